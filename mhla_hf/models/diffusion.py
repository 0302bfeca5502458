"""MHLA in the transformers of diffusers: the processor that owns the new modules, and what every family's class shares.

No attention of diffusers knows the grid of its tokens. The model's `forward` writes it to a `GridState` that the processors
read, one for each thread, and restores it afterwards; gradient checkpointing, which runs a block again when the
state holds another call's grid, binds the grid to the call. A family's class is little more than its record: constructor and
forward are made from the base's own, in `MHLATransformerMixin.__init_subclass__`.
"""

import functools
import inspect
import os
import re
import sys
import threading
from dataclasses import replace

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import is_accelerate_available
from torch import nn

from ..nn.core import CORE_LOG
from ..nn.grid import GridMHLA, rotate_pairs
from ..nn.settings import MHLASettings
from .families import Family
from .grid_shards import TokenShares, share_of_grid
from .saving import check_loaded_weights, source_name, write_source

ADAPTED = re.compile(r"\.(base_layer|modules_to_save)\.")  # names by which PEFT wraps a module


class GridState(threading.local):
    """The grid of the forward pass that this thread is running; one object for a model and all of its processors."""

    def __init__(self):  # once in every thread
        self.grid = None

    def __reduce__(self):
        return type(self), ()  # a copy, or a pickle, runs nothing

    def run(self, grid, function, *args, **kwargs):
        """`function(*args, **kwargs)` with this grid; the one before is back when it ends, however it ends."""
        if grid == self.grid:
            return function(*args, **kwargs)
        before, self.grid = self.grid, grid
        try:
            return function(*args, **kwargs)
        finally:
            self.grid = before


class GridCheckpoint:
    """A checkpoint function that binds the grid of the call, for the second run in the backward pass.

    An object rather than a closure: a copy of the model (EMA) must get a checkpoint function with the copy's state.
    """

    def __init__(self, state: GridState, function):
        self.state, self.function = state, function

    def __call__(self, block, *args):
        return self.function(functools.partial(self.state.run, self.state.grid, block), *args)


class MHLAAttnProcessor(nn.Module):
    """Self-attention by MHLA over the model's grid, for the attention modules of Wan, Sana, DiT and PixArt.

    It has one child, `mhla`, and no parameter of its own, so that offloading moves every weight when it is called.
    """

    _parallel_config = None  # diffusers writes its context-parallel configuration here

    def __init__(self, core: GridMHLA, state: GridState):
        super().__init__()
        self.mhla = core
        self.state = state

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        # diffusers reads this signature to decide which arguments an attention hands on
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def forward(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        """`[B, N, C]` to `[B, N, C]`; `attn` holds the base's projections, rotary_emb is (cos, sin) or None.

        A child `input_norm` of `attn` comes first (the authors' DiT).
        """
        if encoder_hidden_states is not None:
            raise ValueError("encoder_hidden_states: got a tensor, expected None: an MHLA layer is self-attention.")
        if attention_mask is not None:
            raise ValueError("attention_mask: got a tensor, expected None: MHLA layers see the whole grid.")
        if self.state.grid is None:
            what = "a call of the whole transformer; to run blocks again, use its enable_gradient_checkpointing"
            raise ValueError(f"grid: got none, expected {what}.")
        if hasattr(attn, "input_norm"):
            hidden_states = attn.input_norm(hidden_states)
        projections = (attn.to_q, attn.to_k, attn.to_v)
        if getattr(attn, "fused_projections", False):
            q, k, v = attn.to_qkv(hidden_states).split([part.out_features for part in projections], dim=-1)
        else:
            q, k, v = (part(hidden_states) for part in projections)
        q = q if attn.norm_q is None else attn.norm_q(q)
        k = k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))

        def rotate(x, y):
            return rotate_pairs(x, *rotary_emb), rotate_pairs(y, *rotary_emb)

        grid, rotate = self.state.grid, None if rotary_emb is None else rotate
        shard = None if self._parallel_config is None else share_of_grid(self._parallel_config, grid)
        o = self.mhla(q, k, v, grid=grid, hidden_states=hidden_states, rotate=rotate, shard=shard)
        o = attn.to_out[1](attn.to_out[0](o.flatten(2)))
        return o.clip(-65504, 65504) if o.dtype == torch.float16 else o  # as Sana's own


def holds_mhla(processor) -> bool:
    """Whether an attention's processor is MHLA's, by what it has: diffusers runs a checkpoint's file again at each load, and
    the class of an earlier model is then no longer the one that bears its name."""
    return hasattr(processor, "mhla")


class MHLATransformerMixin:
    """Before a transformer of diffusers in the bases: `class MHLAX(MHLATransformerMixin, X)`.

    The constructor takes the base's arguments by keyword, and `mhla`: settings as `MHLASettings.to_dict` gives them, or some
    of them; the family's defaults fill the rest. `family` is the record, which gives `mhla_defaults`;
    `mhla_arguments` are further arguments of the constructor with their defaults, which `install_mhla` reads from the
    config.
    """

    family: Family
    mhla_arguments = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        base = cls.__bases__[-1]
        cls.mhla_defaults = cls.family.defaults
        # what torch.compile takes apart; some bases name their blocks only for device maps
        cls._repeated_blocks = cls._repeated_blocks or [n for n in base._no_split_modules or [] if n.endswith("Block")]
        cls.__init__ = register_to_config(constructor_with_mhla(base, cls.mhla_arguments))
        cls.forward = forward_on_grid(base)
        if base._keep_in_fp32_modules or is_accelerate_available():  # without accelerate diffusers could not load it
            cls._keep_in_fp32_modules = [*(base._keep_in_fp32_modules or []), "mixing"]
        name = source_name(cls.family.entry).removesuffix(".py")
        home = sys.modules.setdefault(name, sys.modules[cls.__module__])
        vars(home).setdefault("ModelMixin", ModelMixin)  # diffusers looks for it beside a class that it loads
        cls.__module__ = name  # diffusers writes this name to model_index.json
        cls.register_for_auto_class("AutoModel")

    @classmethod
    def extract_init_dict(cls, config_dict: dict, **kwargs):
        """As diffusers, which would warn of the line of `config.json` by which it found this class."""
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)

    def install_mhla(self, settings: MHLASettings) -> None:
        """Give the self-attentions that `settings.layers` lists their MHLA processors, and note the settings."""
        attentions = self_attentions(self)
        settings = check_diffusion_settings(type(self), self, settings)
        self.mhla_state = GridState()
        for attn in (attentions[index] for index in settings.layers):
            widths = {"hidden_size": attn.to_q.in_features, "key_dim": attn.to_q.out_features // attn.heads}
            core = GridMHLA(settings, num_heads=attn.heads, value_dim=attn.to_v.out_features // attn.heads, **widths)
            attn.set_processor(MHLAAttnProcessor(core, self.mhla_state).train(attn.training))
        noted = {name: self.config.get(name, value) for name, value in self.mhla_arguments.items()}
        noted["mhla"] = settings.to_dict()
        defaults = [name for name in self.config.get("_use_default_values", []) if name not in noted]
        self.register_to_config(**noted, _use_default_values=defaults)

    def token_grid(self, hidden_states: torch.Tensor) -> tuple:
        """Tokens per axis of latents `[B, C, ...]`; one sentence if they are not this model's."""
        sides, patch = hidden_states.shape[2:], self.config.patch_size
        if len(sides) != self.family.axes or hidden_states.shape[1] != self.config.in_channels:
            axes = f"{self.config.in_channels}, {'frames, ' if self.family.axes == 3 else ''}height, width"
            what = f"expected [batch, {axes}]; do they come from this model's own VAE?"
            raise ValueError(f"hidden_states: got latents {list(hidden_states.shape)}, {what}")
        patch = (patch,) * len(sides) if isinstance(patch, int) else patch
        return tuple(side // step for side, step in zip(sides, patch, strict=True))

    def enable_parallelism(self, *, config, cp_plan=None) -> None:
        """As diffusers. Context parallelism: each process has tokens in the order of their blocks (`TokenShares`)."""
        if cp_plan is not None:
            raise ValueError("cp_plan: got one, expected None: MHLA layers need tokens in the order of their blocks.")
        if self._cp_plan is None:  # so that diffusers says what it needs
            return super().enable_parallelism(config=config)
        degree = getattr(getattr(config, "context_parallel_config", config), "ulysses_degree", None) or 1
        heads = self.config.num_attention_heads
        if heads % degree and len(self.config.mhla["layers"]) < len(self_attentions(self)):
            what = f"which does not divide the {heads} heads of softmax layers; expected one that does, or ring_degree"
            raise ValueError(f"ulysses_degree: got {degree}, {what}.")
        super().enable_parallelism(config=config, cp_plan={"proj_out": self._cp_plan["proj_out"]})
        if self._parallel_config.context_parallel_config is not None:
            TokenShares(self).hook(self)

    def _set_gradient_checkpointing(self, enable: bool = True, gradient_checkpointing_func=None) -> None:
        function = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint
        if enable and not isinstance(function, GridCheckpoint):
            function = GridCheckpoint(self.mhla_state, function)
        super()._set_gradient_checkpointing(enable, function)

    @functools.wraps(ModelMixin.save_pretrained, assigned=())  # a pipeline hands on what the signature names
    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args, **kwargs):
        """As diffusers, with the model's source beside the weights: the folder loads with `trust_remote_code=True`."""
        self.check_processors()
        adapted = next((name for name in self.state_dict() if ADAPTED.search(name)), None)
        if adapted is not None:
            what = "expected plain weights: fuse_lora() and unload_lora() come first, and modules_to_save does not work"
            raise ValueError(f"save_directory: got a model with {adapted}, {what}.")
        if is_main_process:
            write_source(self.family.entry, save_directory, source_name(self.family.entry))
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def check_processors(self) -> None:
        """One sentence if another processor sits where the config says MHLA: diffusers has many ways to put one there."""
        attentions = self_attentions(self)
        for index in self.config.mhla["layers"]:
            found = attentions[index].processor
            if not holds_mhla(found):
                what = "expected its MHLAAttnProcessor, whose weights are lost; load or convert the model again"
                raise ValueError(f"model: got {type(found).__name__} in layer {index}, {what}.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As diffusers, but whole: weights that are missing, unknown to MHLA layers, or damaged are refused."""
        where, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(where, output_loading_info=True, **kwargs)
        if missing := sorted(info["missing_keys"]):
            what = f"expected all weights of {cls.__name__}; a model without MHLA layers is for mhla_hf.convert"
            raise ValueError(f"{where}: has no {missing[0]!r} ({len(missing)} missing), {what}.")
        if unknown := sorted(key for key in info["unexpected_keys"] if ".mhla." in key):
            raise ValueError(f"{where}: has {unknown[0]!r}, expected only the MHLA layers of its config.json.")
        check_loaded_weights(model)
        return (model, info) if wants_info else model


class MHLAProcessorsMixin:
    """After `MHLATransformerMixin` in the bases, where the base has diffusers' `AttentionMixin`; DiT does not."""

    def set_attn_processor(self, processor) -> None:
        """As the base, but MHLA layers keep their processors, which hold their weights."""
        own = {name: found for name, found in self.attn_processors.items() if holds_mhla(found)}
        given = processor if isinstance(processor, dict) else dict.fromkeys(self.attn_processors, processor)
        if any(given.get(name, found) is not found for name, found in own.items()):
            CORE_LOG.warning("set_attn_processor: %d MHLA layers keep their own, which hold their weights.", len(own))
        super().set_attn_processor({**given, **own})

    def unfuse_qkv_projections(self) -> None:
        """As the base; MHLA layers read from the attention whether it is fused, which some bases leave as it was."""
        super().unfuse_qkv_projections()
        for attn in self_attentions(self):
            attn.fused_projections = False


def constructor_with_mhla(base: type, further: dict):
    """The constructor of `base` with its arguments as keywords only, `mhla`, and `further` ones with their defaults."""

    def __init__(self, *, mhla: dict | None = None, **kwargs):
        base.__init__(self, **{name: value for name, value in kwargs.items() if name not in further})
        self.install_mhla(MHLASettings.from_dict({**self.mhla_defaults, **(mhla or {})}))

    signature = inspect.signature(base.__init__)
    kind, added = inspect.Parameter.KEYWORD_ONLY, {**further, "mhla": None}
    own = [inspect.Parameter(name, kind, default=default) for name, default in added.items()]
    __init__.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
    return __init__


def forward_on_grid(base: type):
    """The forward of `base`, with the grid of its latents told to the processors."""

    @functools.wraps(base.forward)
    def forward(self, hidden_states, *args, **kwargs):
        self.check_processors()
        grid = self.token_grid(hidden_states)
        return self.mhla_state.run(grid, base.forward, self, hidden_states, *args, **kwargs)

    return forward


def self_attentions(model: nn.Module) -> list[nn.Module]:
    """The self-attention of each block of a transformer that can become MHLA, in order."""
    blocks = getattr(model, "transformer_blocks", None)
    return [block.attn1 for block in (model.blocks if blocks is None else blocks)]


def check_diffusion_settings(model_class: type, model: nn.Module, settings: MHLASettings) -> MHLASettings:
    """The settings with their layers as a list, or one sentence why `model` cannot become `model_class` with them."""
    axes = model_class.family.axes
    if settings.layout is None or len(settings.layout) != axes:
        what = f"{axes} counts of blocks for {model_class.__name__}, such as {model_class.mhla_defaults['layout']}"
        raise ValueError(f"layout: got {settings.layout}, expected {what}.")
    return replace(settings, layers=settings.resolve_layers(len(self_attentions(model))))
