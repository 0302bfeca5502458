"""MHLA in the transformers of diffusers: the mixins of all families."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils import is_accelerate_available
from torch import Tensor, nn

from ...nn.core import CORE_LOG
from ...nn.grid import GridMHLA
from ...nn.joint import JointMHLA
from ...nn.settings import MHLASettings, check_grid_settings, check_required
from ..families import DiffusionFamily
from ..saving import check_loaded_weights, source_name, write_source
from .context_parallel import TokenShards
from .inputs import core_sizes, find_self_attentions, read_grid
from .processor import (
    FusedJointAttnProcessor,
    GridCheckpoint,
    GridState,
    JointAttnProcessor,
    MHLAAttnProcessor,
    holds_mhla,
)

# In the state dict of a model that PEFT has adapted, names contain one of these.
ADAPTED = re.compile(r"\.(base_layer|modules_to_save)\.")


class MHLATransformerMixin:
    """Turns a transformer of diffusers into an MHLA model; must come first among its bases.

    For `class MHLAX(MHLATransformerMixin, X)`, the constructor takes the arguments of X as keywords, and `mhla`: a
    dictionary of settings. Settings that are missing have the defaults of the family.
    """

    family: DiffusionFamily
    # Further arguments of the constructor, and their defaults. `mhla_measured`, the report of a conversion, is only stored.
    mhla_arguments: dict[str, Any] = {"mhla_measured": None}

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = cls.__bases__[-1]
        cls.mhla_defaults = cls.family.kind.defaults
        # `compile_repeated_blocks` reads this; some bases name their blocks only in `_no_split_modules`.
        cls._repeated_blocks = cls._repeated_blocks or [n for n in base._no_split_modules or [] if n.endswith("Block")]
        cls.__init__ = register_to_config(make_constructor(base, cls.mhla_arguments))
        cls.forward = make_forward(base)
        if hasattr(base, "_load_ip_adapter_weights"):  # what a pipeline's `load_ip_adapter` calls
            cls._load_ip_adapter_weights = refuse_ip_adapter
        # Without accelerate, diffusers cannot load models with modules that stay in fp32.
        if base._keep_in_fp32_modules or is_accelerate_available():
            cls._keep_in_fp32_modules = [*(base._keep_in_fp32_modules or []), "mixing"]
        # diffusers writes the class's module to model_index.json, as the name of the source file. If such a model is passed
        # to `DiffusionPipeline.from_pretrained`, it looks for `ModelMixin` in that module of `sys.modules`.
        module_name = source_name(cls.family.kind.entry).removesuffix(".py")
        module = sys.modules.setdefault(module_name, sys.modules[cls.__module__])
        vars(module).setdefault("ModelMixin", ModelMixin)
        cls.__module__ = module_name
        cls.register_for_auto_class("AutoModel")

    @classmethod
    def extract_init_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Call the base without the config's `auto_map`, of which it would warn."""
        return super().extract_init_dict({k: v for k, v in config_dict.items() if k != "auto_map"}, **kwargs)  # type: ignore[misc]

    def install_mhla(self: Any, settings: MHLASettings) -> None:
        """Set MHLA processors in the layers that `settings.layers` lists, and record the settings in the config."""
        attentions = find_self_attentions(self)
        self.mhla_state = GridState()
        layers: Any = settings.layers
        kind = self.family.kind
        core_class: Any = JointMHLA if kind.joint or settings.windowed else GridMHLA
        for index in layers:
            attn, softmax_heads = attentions[index], (settings.softmax_heads or {}).get(str(index), ())
            joint_class = FusedJointAttnProcessor if hasattr(attn, "to_qkv_mlp_proj") else JointAttnProcessor
            core = core_class(settings, softmax_heads=softmax_heads, **core_sizes(attn))
            processor_class: Any = joint_class if kind.joint else MHLAAttnProcessor
            # Mochi's attention has no `set_processor`.
            attn.processor = processor_class(core, self.mhla_state, kind, attn.processor).train(attn.training)
        values = {name: self.config.get(name, value) for name, value in self.mhla_arguments.items()}
        values["mhla"] = settings.to_dict()
        # `from_config` skips the values that this list names as defaults.
        defaults = [name for name in self.config.get("_use_default_values", []) if name not in values]
        self.register_to_config(**values, _use_default_values=defaults)

    def token_grid(self: Any, hidden_states: Tensor, **arguments: Any) -> tuple[Any, ...]:
        """Return the tokens along each axis of the grid, from a forward's arguments (`read_grid`)."""
        return read_grid(self.family.kind, self.config, hidden_states, arguments)

    def use_base_attention(self: Any, enabled: bool = True) -> None:
        """Let MHLA layers attend as the base does, in the current thread only; False returns to MHLA.

        `mhla_hf.use_mhla_in_steps` switches between sampling steps.
        """
        self.mhla_state.uses_base = enabled

    def enable_parallelism(self: Any, *, config: Any, cp_plan: None = None) -> None:
        """Enable context parallelism as diffusers does, with tokens split in the order of their blocks.

        Args:
            config: `ParallelConfig` or `ContextParallelConfig` of diffusers.
            cp_plan: Must be None: MHLA defines the plan.

        Raises:
            ValueError: `cp_plan` is given, the base is not of Wan, `windowed` is set, or `ulysses_degree` does not divide
                the number of softmax heads of a layer.
        """
        if cp_plan is not None:
            raise ValueError("cp_plan: got a plan, expected None: MHLA layers need tokens in block order.")
        if self._cp_plan is None:  # then diffusers raises an error
            return super().enable_parallelism(config=config)  # type: ignore[misc]
        if not hasattr(self, "blocks"):  # LTX, where diffusers splits the tokens of text and audio, too
            raise ValueError(f"model: got {type(self).__name__}, expected a model of Wan for context parallelism.")
        if self.config.mhla["windowed"]:
            raise ValueError(
                "windowed: got True, expected False for context parallelism (salient_blocks=0 with samples)."
            )
        degree = getattr(getattr(config, "context_parallel_config", config), "ulysses_degree", None) or 1
        mhla, counts = self.config.mhla, {self.config.num_attention_heads}
        if len(mhla["layers"]) == len(find_self_attentions(self)):
            counts = set()  # there are no softmax layers
        counts |= {len(heads) for heads in (mhla["softmax_heads"] or {}).values()}
        if any(count % degree for count in counts):
            expected = f"a divisor of the numbers of softmax heads in a layer, {sorted(counts)}; or use ring_degree"
            raise ValueError(f"ulysses_degree: got {degree}, expected {expected}.")
        plan = {"proj_out": self._cp_plan["proj_out"]}
        super().enable_parallelism(config=config, cp_plan=plan)  # type: ignore[misc]
        if self._parallel_config.context_parallel_config is not None:
            TokenShards(self).hook(self)
            for attn in (find_self_attentions(self)[index] for index in self.config.mhla["layers"]):
                attn.processor.base_processor._parallel_config = attn.processor._parallel_config

    def _set_gradient_checkpointing(
        self: Any, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] | None = None
    ) -> None:
        function = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint
        if enable and not isinstance(function, GridCheckpoint):
            function = GridCheckpoint(self.mhla_state, function)
        super()._set_gradient_checkpointing(enable, function)  # type: ignore[misc]

    # A pipeline passes only the arguments that the signature names, so this method needs the base's.
    @functools.wraps(ModelMixin.save_pretrained, assigned=())
    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as diffusers does, and write the model's source to the same folder, for `trust_remote_code=True`.

        Raises:
            ValueError: A layer has lost its MHLA processor, or the model has LoRA weights that are not fused.
        """
        self.check_processors()
        adapted = next((name for name in self.state_dict() if ADAPTED.search(name)), None)
        if adapted is not None:
            expected = "plain weights; call fuse_lora() and unload_lora() first, and do not use modules_to_save"
            raise ValueError(f"model: got one with the weight {adapted!r}, expected {expected}.")
        if is_main_process:
            write_source(self.family.kind.entry, save_directory, source_name(self.family.kind.entry))
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]

    def check_processors(self: Any) -> None:
        """Raise ValueError if the processor of an MHLA layer was replaced by one that is not MHLA."""
        attentions = find_self_attentions(self)
        for index in self.config.mhla["layers"]:
            processor = attentions[index].processor
            if not holds_mhla(processor):
                expected = "its MHLA processor, whose weights are lost; load or convert the model again"
                raise ValueError(f"model: got {type(processor).__name__} in layer {index}, expected {expected}.")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Load as diffusers does, and check that the weights are complete and valid.

        Raises:
            ValueError: A weight is missing, belongs to an MHLA layer that the config does not list, or is not valid (NaN,
                negative mixing).
        """
        path = pretrained_model_name_or_path
        returns_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(path, output_loading_info=True, **kwargs)  # type: ignore[misc]
        if missing := sorted(info["missing_keys"]):
            expected = f"all weights of {cls.__name__}; convert a model without MHLA layers by mhla_hf.convert"
            raise ValueError(f"{path}: got no weight {missing[0]!r} ({len(missing)} missing), expected {expected}.")
        if unknown := sorted(key for key in info["unexpected_keys"] if ".mhla." in key):
            raise ValueError(f"{path}: got the weight {unknown[0]!r}, expected none beyond config.json's MHLA layers.")
        check_loaded_weights(model)
        return (model, info) if returns_info else model


class MHLAProcessorsMixin:
    """Keeps MHLA processors when attention processors are replaced; for classes with diffusers' `AttentionMixin`."""

    def set_attn_processor(self: Any, processor: Any) -> None:
        """Set processors as the base does, except in MHLA layers, whose processors hold weights; a warning says so.

        A processor for an MHLA layer is used only while `use_base_attention` is enabled, and only if it has no weights.
        """
        if (
            isinstance(processor, dict) and processor.keys() != self.attn_processors.keys()
        ):  # then diffusers raises an error
            return super().set_attn_processor(processor)  # type: ignore[misc]
        mhla_processors = {name: current for name, current in self.attn_processors.items() if holds_mhla(current)}
        processors = processor if isinstance(processor, dict) else dict.fromkeys(self.attn_processors, processor)
        if any(processors.get(name, current) is not current for name, current in mhla_processors.items()):
            count = len(mhla_processors)
            CORE_LOG.warning("set_attn_processor: %d MHLA layers keep their processors, which hold weights.", count)
        for name, current in mhla_processors.items():
            if not isinstance(processors.get(name, current), nn.Module):
                current.set_base_processor(processors[name])
        super().set_attn_processor({**processors, **mhla_processors})  # type: ignore[misc]

    def unfuse_qkv_projections(self: Any) -> None:
        """Unfuse as the base does, and set `fused_projections` to False in all self-attentions, which some bases forget."""
        super().unfuse_qkv_projections()  # type: ignore[misc]
        for attn in find_self_attentions(self):
            attn.fused_projections = False


def make_constructor(base: Any, further: dict[str, Any]) -> Any:
    """Make a constructor that calls `base.__init__` and installs MHLA; its signature lists the arguments of both."""

    def __init__(self: Any, *, mhla: dict[str, Any] | None = None, **kwargs: Any) -> None:
        base.__init__(self, **{name: value for name, value in kwargs.items() if name not in further})
        settings = MHLASettings.from_dict({**self.mhla_defaults, **(mhla or {})})
        self.install_mhla(resolve_settings(type(self), self, settings))

    signature = inspect.signature(base.__init__)
    parameters = list(signature.parameters.values())
    for name, default in {**further, "mhla": None}.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default))
    vars(__init__)["__signature__"] = signature.replace(parameters=parameters)
    return __init__


def make_forward(base: Any) -> Callable[..., Any]:
    """Make a forward that checks the MHLA processors, and runs the base's forward with the grid of its latents."""
    names = tuple(inspect.signature(base.forward).parameters)[2:]
    # Read once here: torch.compile cannot look it up in classes that it must not trace, such as LTX's.
    base_forward = base.forward

    @functools.wraps(base_forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.check_processors()
        grid = self.token_grid(hidden_states, **dict(zip(names, args, strict=False)), **kwargs)
        return self.mhla_state.run(grid, base_forward, self, hidden_states, *args, **kwargs)

    return forward


def refuse_ip_adapter(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"model: got {type(self).__name__}, expected a softmax model: MHLA layers support no IP-Adapter.")


def resolve_settings(model_class: Any, model: nn.Module, settings: MHLASettings) -> MHLASettings:
    """Check settings for a conversion of `model` to `model_class`; return a copy with layers as indices."""
    kind = model_class.family.kind
    check_grid_settings(settings, model_class.__name__, kind.axes, joint=kind.joint or settings.windowed)
    if kind.linear:  # there is no softmax that could be kept
        check_required(settings, model_class.__name__, {"windowed": False, "softmax_heads": None})
    layers = settings.resolve_layers(len(find_self_attentions(model)))
    if unknown := {*map(int, settings.softmax_heads or {})} - {*layers}:
        raise ValueError(f"softmax_heads: got layer {min(unknown)}, expected one of the MHLA layers {layers}.")
    return replace(settings, layers=layers)
