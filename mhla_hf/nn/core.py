"""The MHLA core: everything an attention module gains when it stops being softmax attention.

It takes q, k and v where softmax attention would, and returns what softmax attention would. Feature maps, mixing, output
norm and gate live here, so that a converted layer holds all of its new parameters under one name, `mhla`. `MHLACore` is
what sequences and grids share, `MHLA` the causal core of language models, `GridMHLA` (`grid.py`) that of images and video.
Every parameter sits in a module that is called, never read from outside: offloading moves weights when modules are called.
"""

import logging
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from ..ops.api import mhla, mhla_step
from ..ops.blocks import Blocks
from ..ops.torch_layout import MoveTokens
from .features import FeatureMap
from .mixing import Mixing
from .settings import MHLASettings

GATE_OPEN = 1.2784645  # silu(GATE_OPEN) == 1
CORE_LOG = logging.getLogger("mhla_hf")


class OutputNorm(nn.Module):
    """RMSNorm over each head's output, computed in fp32, one weight of `[V]` for all heads (section 4.1)."""

    def __init__(self, value_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(value_dim))

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        return {"weight": torch.ones(self.weight.shape)}

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        """Of o `[.., V]`; where it and the weight differ in dtype, in fp32 (fp64 if one is)."""
        weight = self.weight
        if o.dtype != weight.dtype:
            dtype = torch.promote_types(torch.promote_types(o.dtype, weight.dtype), torch.float32)
            o, weight = o.to(dtype), weight.to(dtype)
        return F.rms_norm(o, weight.shape, weight, self.eps)


def without_padding(key_mask: torch.Tensor | None, *tensors: torch.Tensor) -> tuple:
    """Zeros in `[B, T, H, K]` where key_mask `[B, T]` is False: NaN in padding would get through a weight of 0."""
    return tensors if key_mask is None else tuple(x.masked_fill(~key_mask[:, :, None, None], 0.0) for x in tensors)


def padding_first(key_mask: torch.Tensor) -> tuple:
    """Where tokens go so that padding comes before all real tokens of its row and has no place among them.

    Returns the `source` and `back` of `MoveTokens` (None for single tokens) and where the real tokens begin, int64 `[B]`.
    """
    starts = key_mask.shape[1] - key_mask.sum(1)
    if key_mask.shape[1] == 1:
        return None, None, starts
    source = key_mask.int().argsort(stable=True)
    return source, source.argsort(), starts


def move_tokens(source: torch.Tensor | None, back: torch.Tensor | None, *tensors: torch.Tensor) -> tuple:
    """`MoveTokens` of each tensor `[B, T, H, K]`, as `padding_first` says."""
    return tensors if source is None else tuple(MoveTokens.apply(x, source, back) for x in tensors)


def refuse_gradients(core: nn.Module, *tensors: torch.Tensor) -> None:
    """No gradient flows through a cache that holds tokens: refused in training, said once elsewhere."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        sentence = "past_key_values: got a cache that holds tokens, expected torch.no_grad() or use_cache=False: "
        sentence += "no gradient flows through an MHLA cache."
        if core.training:
            raise ValueError(sentence)
        warnings.warn(sentence, stacklevel=3)


class OutputGate(nn.Linear):
    """W x + b for every output channel, of which silu is one at the start (section 4.1).

    The silu is the core's: what replaces or wraps linear layers (quantization, LoRA) knows only of the product.
    """

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The start of each own parameter, for models that are built empty and filled later."""
        return {"weight": torch.zeros(self.weight.shape), "bias": torch.full(self.bias.shape, GATE_OPEN)}

    def reset_parameters(self) -> None:
        """As `initial_values` says."""
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)


def mixing_choices(settings: MHLASettings, num_heads: int) -> dict:
    """What a mixing matrix takes of the settings."""
    choices = {"start": settings.mixing_start, "form": settings.mixing_form, "learn": settings.learn_mixing}
    return {"num_heads": num_heads if settings.per_head else None, **choices}


class MHLACore(nn.Module):
    """What the causal core and the grid core share: feature maps, mixing, and what is done to the output.

    Args:
        settings: the choices.
        mixing: the module that holds the mixing.
        num_heads: query heads H.
        num_kv_heads: key/value heads G; query head h uses head h // (H // G).
        key_dim: width K of q and k.
        value_dim: width V of v.
        hidden_size: width of the layer's input, needed by the gate.
        norm_eps: eps of the output norm.
    """

    causal = False

    def __init__(
        self, settings, mixing, *, num_heads, num_kv_heads, key_dim, value_dim, hidden_size, norm_eps: float = 1e-6
    ):
        super().__init__()
        self.settings = settings
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.value_dim = value_dim
        self.q_map = FeatureMap(settings.feature_map, num_heads, key_dim)
        self.k_map = FeatureMap(settings.feature_map, num_kv_heads, key_dim)
        self.mixing = mixing
        if settings.output_norm:
            self.norm = OutputNorm(value_dim, norm_eps)
        if settings.gate:
            self.gate = OutputGate(hidden_size, num_heads * value_dim)

    def operands(self, q, k, v, key_mask, rotate) -> tuple:
        """Features of q and k, v, and the operator's options that follow from them and the settings.

        `settings.rope` says whether `rotate`, if there is one, comes before the maps or after. All features are in v's
        dtype: under autocast a rotation leaves fp32, which softmax attention would cast back, too.
        """
        if rotate is not None and self.settings.rope == "before":
            (q, k), rotate = rotate(q, k), None
        q, k, v = without_padding(key_mask, q, k, v)
        q, k = self.q_map(q), *without_padding(key_mask, self.k_map(k))
        options = {"normalize": self.settings.normalize, "unrounded": self.settings.output_norm}
        if rotate is not None:
            if self.settings.normalize:
                options |= {"q_den": q.to(v.dtype), "k_den": k.to(v.dtype)}
            q, k = rotate(q, k)
        return q.to(v.dtype), k.to(v.dtype), v, options

    def finish_output(self, o: torch.Tensor, hidden_states: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Output norm and gate over o `[B, T, H, V]`, which is then in `dtype`."""
        if self.settings.output_norm:
            o = self.norm(o)
        o = o.to(dtype)
        if self.settings.gate:
            o = o * F.silu(self.gate(hidden_states)).view_as(o)
        return o


def check_causal(settings: MHLASettings, model: str = "a causal model") -> None:
    """One sentence if `settings` are not those of a causal model, or of another one of sequences, named `model`."""
    if settings.normalize == "official":
        raise ValueError(f'normalize: got "official", expected true or false for {model}.')
    for name in ("layout", "cpe"):
        if getattr(settings, name):
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected none for {model}.")


def check_encoder(settings: MHLASettings) -> None:
    """One sentence if `settings` are not those of an encoder, which has mixing by a matrix, or by decays with a window."""
    check_causal(settings, "an encoder")
    if settings.mixing_form != "decay":
        return
    if settings.local is None:
        raise ValueError('local: got None with mixing_form="decay", expected "softmax" for an encoder.')
    if settings.impl == "triton":
        raise ValueError('impl: got "triton" with mixing_form="decay", expected "auto" or "torch" for an encoder.')
    expected = {"rope": "before", "sinks": 0, "length_power": False, "window_dropout": 0}
    for name, value in {**expected, "softmax_heads": None}.items():
        if getattr(settings, name) != value:
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected {value!r} for an encoder.")


class MHLA(MHLACore):
    """Causal multi-head linear attention over `[B, T, H, K]` queries (sections 4.1, 4.2 and appendix C).

    Args: as `MHLACore`, which makes its own `Mixing` from `settings`.
    """

    causal = True

    def __init__(self, settings: MHLASettings, *, num_heads: int, **widths):
        check_causal(settings)
        mixing = Mixing(settings.num_blocks, **mixing_choices(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, **widths)

    def forward(
        self, q, k, v, *, hidden_states=None, rotate=None, starts=None, key_mask=None, cu_seqlens=None, cache=None,
        scale=None,
    ) -> torch.Tensor:  # fmt: skip
        """Attend.

        Args:
            q: `[B, T, H, K]`. k: `[B, T, G, K]`. v: `[B, T, G, V]`.
            hidden_states: `[B, T, hidden_size]`, the layer's input; read by the gate.
            rotate: rotary embedding of q and k or, with `rope="after"`, of their features: a function of both.
            starts: int64 `[B]`, first real token of each row of a left-padded batch; not read where there is a key_mask.
            key_mask: bool `[B, T]`, False where a token is padding, which has no place in a row wherever it stands;
                without cu_seqlens.
            cu_seqlens: int `[N + 1]`, borders of packed sequences (B is 1).
            cache: a layer of an MHLA cache; read and written in place.
            scale: of the base's softmax; not used, a constant cancels in the normalized form and is fixed in the other.

        Returns:
            `[B, T, H, V]` in v's dtype.
        """
        settings = self.settings
        q, k, v, options = self.operands(q, k, v, key_mask, rotate)
        if key_mask is not None:
            source, back, starts = padding_first(key_mask)
            q, k, v = move_tokens(source, back, q, k, v)
            options |= {x: move_tokens(source, back, options[x])[0] for x in ("q_den", "k_den") if x in options}
        options |= {"starts": starts, "impl": settings.impl}
        blocks = Blocks.sequence(q.shape[1], settings.block_size)
        if cache is None:
            o = self.attend(q, k, v, blocks, cu_seqlens=cu_seqlens, **options)
        elif cache.state is None:
            mixing = cache.mixing_for(self.mixing, q.shape[1], settings.block_size)
            o, cache.state = mhla(q, k, v, mixing, blocks=blocks, causal=True, return_state=True, **options)
        else:
            refuse_gradients(self, q, k, v)
            cache.state.leave_inference_mode()
            mixing = cache.mixing_for(self.mixing, q.shape[1], settings.block_size)
            o, cache.state = mhla_step(q, k, v, mixing, cache.state, **options)
        if key_mask is not None:
            (o,) = move_tokens(back, source, o)
            if cache is not None:
                cache.note_padding(key_mask)
        return self.finish_output(o, hidden_states, v.dtype)

    def attend(self, q, k, v, blocks, **options) -> torch.Tensor:
        """Attention over whole sequences; over shards of them: see training/sequence_parallel.py."""
        return mhla(q, k, v, self.mixing(blocks.num_blocks), blocks=blocks, causal=True, **options)
