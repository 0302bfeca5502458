"""Undoes the rotary embedding of queries and keys, by the cosines and sines that their attention module gets.

The factor by which ministral3, beam, and llama4 scale the queries of far positions stays in q.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RotationLayout:
    """Describes how a base rotates R dimensions of a head."""

    pairs: bool = False  # whether angle i rotates dimensions 2i and 2i + 1, instead of i and i + R/2 as in Llama
    repeated: bool = False  # whether each angle comes twice in a row in cos and sin, instead of all of them twice
    backward: bool = False  # whether dimensions are rotated by the negative angle
    last: bool = False  # whether the rotated dimensions are the last R of a head, instead of the first R


HALVES = RotationLayout()
LAST_HALVES = RotationLayout(last=True)
PAIRS = RotationLayout(pairs=True)
REPEATED_PAIRS = RotationLayout(pairs=True, repeated=True)
# By model type. All others have `HALVES`, or with latent attention `LAST_HALVES`.
ROTATION_LAYOUTS = {
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), REPEATED_PAIRS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"), PAIRS),
    "deepseek_v2": RotationLayout(pairs=True, last=True),
    "nanochat": RotationLayout(backward=True),
}
# Types that scale q and k by learned weights after the rotation, so that it cannot be undone.
SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")
NEVER_ROTATED = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "jamba", "kimi_linear", "nemotron_h")
# Types that rotate in sliding layers only, and types that do so only if they have sliding layers.
SLIDING_ROTATED = ("afmoe", "cohere2", "cohere2_moe")
SLIDING_ROTATED_IF_ANY = ("exaone4", "exaone_moe", "kolibri1")


def base_model_type(config: Any) -> str:
    return getattr(config, "base_model_type", None) or config.model_type


def rotation_layout(attention: Any) -> RotationLayout:
    """Return how an attention module rotates q and k; raise ValueError if that cannot be undone."""
    is_latent, model_type = hasattr(attention, "qk_rope_head_dim"), base_model_type(attention.config)
    if model_type in SCALED_AFTER:
        raise ValueError(f"rope: got 'near' for {model_type}, expected 'before': it scales q and k after the rotation.")
    return ROTATION_LAYOUTS.get(model_type, LAST_HALVES if is_latent else HALVES)


def is_rotated(attention: Any) -> bool:
    """Return whether an attention module applies the rotary embedding that is passed to it."""
    model_type = base_model_type(attention.config)
    if model_type in NEVER_ROTATED:
        return False
    if model_type in SLIDING_ROTATED:
        is_sliding = getattr(attention, "is_local_attention", attention.sliding_window is not None)
        return is_sliding or getattr(attention, "force_rope", False)
    if model_type in SLIDING_ROTATED_IF_ANY:
        return attention.sliding_window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def rotation_cos_sin(attention: nn.Module, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the rotation in an attention module's call: R/2 cosines, then R/2 sines, [B or 1, T, 1, R]; None without one.

    They are divided by the square of the scale that the base gives q and k, as in YaRN, so that `unrotate` undoes it, too.
    """
    if not is_rotated(attention):
        return None
    if "position_embeddings" not in kwargs:
        expected = "'before': its attention is not given `position_embeddings`, the cosines and sines"
        raise ValueError(f"rope: got 'near' for {base_model_type(attention.config)}, expected {expected}.")
    if (rotation := kwargs["position_embeddings"]) is None:
        return None
    layout = rotation_layout(attention)
    if isinstance(rotation, Tensor):  # complex [B or 1, T, R/2]
        cos, sin = rotation.real, rotation.imag
    else:  # cosines and sines [B or 1, T, R], each angle twice
        cos, sin = (x[..., ::2] if layout.repeated else x[..., : x.shape[-1] // 2] for x in rotation)
        dtype = torch.promote_types(cos.dtype, torch.float32)
        cos, sin = cos.to(dtype), (-sin if layout.backward else sin).to(dtype)
    scale = cos.square() + sin.square()
    return torch.cat((cos / scale, sin / scale), -1).unsqueeze(2)


def unrotate(x: Tensor, cos_sin: Tensor | None, layout: RotationLayout) -> Tensor:
    """Undo the rotation of q or k [B, T, H, K] by the result of `rotation_cos_sin`; the order of channels stays."""
    if cos_sin is None or not cos_sin.shape[-1]:
        return x
    width, rest = cos_sin.shape[-1], x.shape[-1] - cos_sin.shape[-1]
    kept, rotated = x.split((rest, width), -1) if layout.last else reversed(x.split((width, rest), -1))
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if layout.pairs else rotated.chunk(2, -1)
    cos, sin = cos_sin.to(x).chunk(2, -1)
    parts: tuple[Tensor, ...] = (a * cos + b * sin, b * cos - a * sin)
    if layout.pairs:
        parts = (torch.stack(parts, -1).flatten(-2),)
    return torch.cat((kept, *parts) if layout.last else (*parts, kept), -1)
