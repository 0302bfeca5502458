"""The MHLA core: the submodule `mhla` of an attention module, which computes attention in place of softmax.

`MHLACore` is what sequences and grids share, `MHLA` the causal core of language models with a mixing matrix; `salient.py`,
`two_way.py`, `sequence.py`, `grid.py`, and `joint.py` have the others. Every parameter belongs to a module that is called,
because offloading moves weights when modules are called.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.api import mhla, mhla_step
from ..ops.blocks import Blocks
from ..ops.torch_layout import TokenMove
from .features import FeatureMap
from .mixing import Mixing
from .settings import MHLASettings, check_required, check_settings

OPEN_GATE_BIAS = 1.2784645  # silu(OPEN_GATE_BIAS) == 1
CORE_LOG = logging.getLogger("mhla_hf")

# A rotary embedding: called with q [B, T, H, K] and k [B, T, G, K], it returns both rotated.
Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class OutputNorm(nn.RMSNorm):
    """RMSNorm over the output of each head, with one weight [V] for all heads (paper section 4.1)."""

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, for models that are built on the meta device."""
        return {"weight": torch.ones(self.weight.shape)}

    def forward(self, o: Tensor) -> Tensor:
        """Normalize o [..., V]. If o and the weight differ in dtype, return fp32, or fp64 if one of the two is fp64."""
        weight: Tensor = self.weight
        if o.dtype != weight.dtype:
            dtype = torch.promote_types(torch.promote_types(o.dtype, weight.dtype), torch.float32)
            o, weight = o.to(dtype), weight.to(dtype)
        return F.rms_norm(o, weight.shape, weight, self.eps)


class OutputGate(nn.Linear):
    """Linear layer whose output, after silu, gates each output channel; initially, the gate is 1 (section 4.1).

    The core applies the silu, so that quantization and LoRA see a linear layer.
    """

    def initial_values(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(self.weight.shape), "bias": torch.full(self.bias.shape, OPEN_GATE_BIAS)}

    def reset_parameters(self) -> None:
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)


def without_padding(key_mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return each tensor [B, T, H, K] with zeros where key_mask [B, T] is False, to keep NaN in padding out of sums."""
    if key_mask is None:
        return tensors
    return tuple(x.masked_fill(~key_mask[:, :, None, None], 0.0) for x in tensors)


def padding_first(key_mask: Tensor | None, starts: Tensor | None) -> tuple[TokenMove, Tensor | None]:
    """Return the `TokenMove` that brings padding, which takes up no positions, to the start of rows, and the new `starts`.

    Without a key_mask [B, T], no token moves, and `starts` is returned unchanged.
    """
    if key_mask is None:
        return TokenMove(), starts
    starts = key_mask.shape[1] - key_mask.sum(1)
    if key_mask.shape[1] == 1:
        return TokenMove(), starts
    source = key_mask.int().argsort(stable=True)
    return TokenMove(source, source.argsort()), starts


def check_no_gradients(core: nn.Module, *tensors: Tensor) -> None:
    """Refuse gradients through a cache that holds tokens: raise ValueError in training mode, warn in eval mode."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        expected = "torch.no_grad() or use_cache=False: no gradient flows through an MHLA cache"
        message = f"past_key_values: got a cache that holds tokens in a pass with gradients, expected {expected}."
        if core.training:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False,
    mask: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Compute softmax attention [B, T, H, V] of q [B, T, H, K], k [B, S, G, K], and v [B, S, G, V].

    The mask is bool or is added to the scores; it broadcasts to [B, H, T, S].
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(v.dtype)
    options: dict[str, Any] = {"is_causal": causal, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


def mixing_options(settings: MHLASettings, num_heads: int) -> dict[str, Any]:
    return {
        "num_heads": num_heads if settings.per_head else None,
        "start": settings.mixing_start,
        "form": settings.mixing_form,
        "learn": settings.learn_mixing,
    }


def cached_mixing(cache: Any, mixing: Any, new_tokens: int, block_size: int) -> Tensor:
    """Return the mixing [M, M] or [H, M, M] for `new_tokens` more tokens; if it needs no gradient, the cache keeps it."""
    needed = -(-(int(cache.seen_tokens) + new_tokens) // block_size)
    if torch.is_grad_enabled() and mixing.weight.requires_grad:
        return mixing(needed)
    if cache.mixing is None or cache.mixing.shape[-1] < needed:
        capacity = max(mixing.num_blocks, 1 << (needed - 1).bit_length())
        cache.mixing = mixing(capacity).detach()
    return cache.mixing


class MHLACore(nn.Module):
    """Base class of MHLA cores, with feature maps, mixing, output norm, and gate.

    Args:
        settings: Settings of the model; the base class reads `feature_map`, `output_norm`, and `gate`.
        mixing: Module with the learned mixing, which subclasses call in `forward`.
        num_heads: Number of query heads, H.
        num_kv_heads: Number of KV heads, G; query head h uses KV head h // (H // G).
        key_dim: Width K of q and k.
        value_dim: Width V of v.
        hidden_size: Width of the layer's input, which the gate reads.
        norm_eps: Eps of the output norm.
    """

    causal = False

    def __init__(
        self, settings: MHLASettings, mixing: nn.Module, *, num_heads: int, num_kv_heads: int, key_dim: int,
        value_dim: int, hidden_size: int, norm_eps: float = 1e-6,
    ):  # fmt: skip
        super().__init__()
        self.settings = settings
        self.num_heads, self.num_kv_heads, self.value_dim = num_heads, num_kv_heads, value_dim
        self.q_map = FeatureMap(settings.feature_map, num_heads, key_dim)
        self.k_map = FeatureMap(settings.feature_map, num_kv_heads, key_dim)
        self.mixing = mixing
        if settings.output_norm:
            self.norm = OutputNorm(value_dim, norm_eps)
        if settings.gate:
            self.gate = OutputGate(hidden_size, num_heads * value_dim)

    def parallel_plan(self, path: str) -> dict[str, str]:
        """Return the entries for this core, a module at `path`, in the tensor-parallel plan of a model of transformers."""
        plan = {}
        for name, part in self.named_children():
            if name == "gate":
                plan[f"{path}.{name}"] = "colwise"
            elif getattr(part, "by_head", False):
                plan[f"{path}.{name}"] = "local_params"
                for parameter, _ in part.named_parameters():
                    plan[f"{path}.{name}.{parameter}"] = "embedding_rowwise"  # splits the first axis
            else:
                plan[f"{path}.{name}"] = "replicated_with_grad_allreduce"
        return plan

    def finish_output(self, o: Tensor, hidden_states: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Apply the output norm and the gate to o [B, T, H, V]; the gate reads the layer's input, [B, T, hidden_size]."""
        if self.settings.output_norm:
            o = self.norm(o)
        o = o.to(dtype)
        if self.settings.gate:
            o = o * F.silu(self.gate(hidden_states)).view_as(o)
        return o


def prepare_operands(
    core: MHLACore, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rotate: Rotation | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Mask q, k, and v, map q and k to features, and rotate them before or after; return these three, and options of `mhla`.

    Features are cast to v's dtype, because rotations give fp32 under autocast.
    """
    settings = core.settings
    if rotate is not None and settings.rope == "before":
        q, k = rotate(q, k)
        rotate = None
    q, k, v = without_padding(key_mask, q, k, v)
    q = core.q_map(q)
    (k,) = without_padding(key_mask, core.k_map(k))
    options: dict[str, Any] = {"normalize": settings.normalize, "unrounded": settings.output_norm}
    if rotate is not None:
        if settings.normalize:
            options["q_den"] = q.to(v.dtype)
            options["k_den"] = k.to(v.dtype)
        q, k = rotate(q, k)
    return q.to(v.dtype), k.to(v.dtype), v, options


class MHLA(MHLACore):
    """Causal multi-head linear attention (paper sections 4.1 and 4.2, appendix C); see `MHLACore` for arguments."""

    causal = True

    def __init__(self, settings: MHLASettings, *, num_heads: int, **widths: Any):
        check_settings(settings, "a causal model")
        check_required(settings, "a model from scratch", {"windowed": False})
        mixing = Mixing(settings.num_blocks, **mixing_options(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, **widths)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, rotate: Rotation | None = None,
        starts: Tensor | None = None, key_mask: Tensor | None = None, cu_seqlens: Tensor | None = None,
        cache: Any = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply causal attention: each token attends to itself and to all earlier tokens.

        Args:
            q, k, v: [B, T, H, K], [B, T, G, K], and [B, T, G, V].
            hidden_states: [B, T, hidden_size], the input of the layer, which the gate reads.
            rotate: Rotary embedding of q and k or, with `rope="after"`, of their features.
            starts: int64 [B], index of the first real token of each left-padded row; ignored if there is a key_mask.
            key_mask: bool [B, T], False for padding, which does not count as a position, wherever it is in a row. Not
                allowed along with cu_seqlens.
            cu_seqlens: int32 or int64 [N + 1], borders of N packed sequences (B = 1). Ignored if there is a cache.
            cache: This layer's `MHLACacheLayer`, read and changed in place; None to attend without one.
            scale: Ignored: a constant factor cancels in the normalized form; without `normalize`, it is always K**-0.5.

        Returns:
            [B, T, H, V] in v's dtype.

        Raises:
            TypeError, ValueError: If an argument is invalid (see `mhla`), or if gradients are required in training and the
                cache holds tokens.
        """
        settings = self.settings
        q, k, v, options = prepare_operands(self, q, k, v, key_mask, rotate)
        padding, options["starts"] = padding_first(key_mask, starts)
        q, k, v = padding.move(q, k, v)
        if "q_den" in options:
            options["q_den"], options["k_den"] = padding.move(options["q_den"], options["k_den"])
        blocks = Blocks.sequence(q.shape[1], settings.block_size)
        o: Any
        if cache is None:
            mixing = self.mixing(blocks.num_blocks)
            o = mhla(q, k, v, mixing, blocks=blocks, causal=True, cu_seqlens=cu_seqlens, impl=settings.impl, **options)
        else:
            mixing = cached_mixing(cache, self.mixing, q.shape[1], settings.block_size)
            if cache.state is None:
                options |= {"blocks": blocks, "causal": True, "return_state": True, "impl": settings.impl}
                o, cache.state = mhla(q, k, v, mixing, **options)
            else:
                check_no_gradients(self, q, k, v)
                cache.state.leave_inference_mode()
                o, cache.state = mhla_step(q, k, v, mixing, cache.state, **options)
            if key_mask is not None:
                cache.note_padding(key_mask)
        return self.finish_output(padding.take_back(o), hidden_states, v.dtype)
