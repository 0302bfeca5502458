"""Queries and keys as they were before the rotary embedding of their base.

A base of transformers hands its attention function q and k that it has rotated. Attention is told the cosines and sines,
from which the rotation can be undone: `rotation_angles` reads them, `unrotate` applies them.
Only the rotation is undone. The scale that ministral3, beam and llama4 give the queries of far positions stays on q.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class RotationLayout:
    """Which dimensions of a head the base rotates together, where they are, and how it hands cosines and sines on.

    pairs: dimensions 2i and 2i + 1 are rotated by angle i; otherwise dimensions i and i + R/2, as in Llama.
    repeated: cos and sin hold each angle twice in a row; otherwise all angles, and then all again.
    backward: dimensions are rotated by minus the angle.
    last: the rotated dimensions are the last R of a head; otherwise the first R.
    """

    pairs: bool = False
    repeated: bool = False
    backward: bool = False
    last: bool = False


HALVES, LAST_HALVES = RotationLayout(), RotationLayout(last=True)
PAIRS, REPEATED_PAIRS = RotationLayout(pairs=True), RotationLayout(pairs=True, repeated=True)
ROTATION_LAYOUTS = {  # by model type; `HALVES` or, in latent attention, `LAST_HALVES` for all others
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), REPEATED_PAIRS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"), PAIRS),
    "deepseek_v2": RotationLayout(pairs=True, last=True),
    "nanochat": RotationLayout(backward=True),
}
SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # by learned weights, after the rotation
NEVER_ROTATED = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "jamba", "kimi_linear", "nemotron_h")
# Types that rotate in sliding layers only, and types that do so only if they have sliding layers.
SLIDING_ROTATED, SLIDING_ROTATED_IF_ANY = ("afmoe", "cohere2", "cohere2_moe"), ("exaone4", "exaone_moe", "kolibri1")


def rotated_type(config) -> str:
    """The model type of the base, of its own configuration or of a converted model's."""
    return getattr(config, "base_model_type", None) or config.model_type


def rotation_layout(attention) -> RotationLayout:
    """How the base rotates.

    Args:
        attention: an attention module of transformers.

    Raises:
        ValueError: q and k of this type are no longer a rotation of what they were.
    """
    latent, kind = hasattr(attention, "qk_rope_head_dim"), rotated_type(attention.config)
    if kind in SCALED_AFTER:
        what = "it scales q and k by learned weights after their rotation"
        raise ValueError(f"rope: got 'near' for {kind}, expected 'before': {what}.")
    return ROTATION_LAYOUTS.get(kind, LAST_HALVES if latent else HALVES)


def is_rotated(attention: nn.Module) -> bool:
    """Whether the forward of this attention module applies the rotation that it is given."""
    kind = rotated_type(attention.config)
    if kind in NEVER_ROTATED:
        return False
    if kind in SLIDING_ROTATED:
        sliding = getattr(attention, "is_local_attention", attention.sliding_window is not None)
        return sliding or getattr(attention, "force_rope", False)
    if kind in SLIDING_ROTATED_IF_ANY:
        return attention.sliding_window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def rotation_angles(attention: nn.Module, kwargs: dict) -> torch.Tensor | None:
    """The rotation of one call of an attention module, in the form that `unrotate` takes.

    If the base scales its rotation, as YaRN does, cos and sin come divided by the square of the scale: `unrotate` then
    undoes both.

    Args:
        attention: an attention module of transformers.
        kwargs: keyword arguments of the call; "position_embeddings", (cos, sin) or one complex tensor, is None in layers
            without rotation.

    Returns:
        `[B or 1, T, 1, R]` for R rotated dimensions of a head: R/2 cosines and R/2 sines; None if this module does not
        rotate. In the dtype of the base's cos and sin, but at least fp32.

    Raises:
        ValueError: the module rotates, but not by an argument.
    """
    if not is_rotated(attention):
        return None
    if "position_embeddings" not in kwargs:
        what = "its attention is not given the cosines and sines of its rotation as `position_embeddings`"
        raise ValueError(f"rope: got 'near' for {rotated_type(attention.config)}, expected 'before': {what}.")
    if (rotation := kwargs["position_embeddings"]) is None:
        return None
    cos, sin = distinct_angles(rotation, rotation_layout(attention))
    scale = cos.square() + sin.square()
    return torch.cat((cos / scale, sin / scale), -1).unsqueeze(2)


def distinct_angles(rotation, layout: RotationLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[B or 1, T, R/2]`, at least in fp32, of (cos, sin) or of one complex tensor: each angle once."""
    if isinstance(rotation, torch.Tensor):
        return rotation.real, rotation.imag
    if layout.repeated:
        cos, sin = (x[..., ::2] for x in rotation)
    else:
        cos, sin = (x[..., : x.shape[-1] // 2] for x in rotation)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    return cos.to(dtype), (-sin if layout.backward else sin).to(dtype)


def unrotate(x: torch.Tensor, angles: torch.Tensor | None, layout: RotationLayout) -> torch.Tensor:
    """Undo the rotation of queries or keys.

    Where the base permutes dimensions as it rotates them (`rope_interleave`), they stay permuted, those of q and of k alike.

    Args:
        x: `[B, T, H, K]` as rotated, floating point.
        angles: `[B or 1, T, 1, R]` of `rotation_angles`; None, or a width of 0, returns x as it is.
        layout: of `rotation_layout`.

    Returns:
        `[B, T, H, K]` in the dtype of x.
    """
    if angles is None or not angles.shape[-1]:
        return x
    width, rest = angles.shape[-1], x.shape[-1] - angles.shape[-1]
    kept, turned = x.split((rest, width), -1) if layout.last else reversed(x.split((width, rest), -1))
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if layout.pairs else turned.chunk(2, -1)
    cos, sin = angles.to(x).chunk(2, -1)
    back = (a * cos + b * sin, b * cos - a * sin)
    back = (torch.stack(back, -1).flatten(-2),) if layout.pairs else back
    return torch.cat((kept, *back) if layout.last else (*back, kept), -1)
