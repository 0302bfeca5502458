"""Reads what the transformers of diffusers pass in different forms: projections, rotary embeddings, and grid sizes.

The forms of a family are named by its `AttentionKind`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .families import AttentionKind

# Cosines and sines, broadcastable to [B, T, H, K], and the distance of the two channels of a pair.
RotaryAngles = tuple[torch.Tensor, torch.Tensor, int]
GRID_AXES = ("frames", "height", "width")


class AttentionParts(NamedTuple):
    """The modules of a self-attention, whose names differ among the transformers of diffusers."""

    to_q: nn.Linear
    to_k: nn.Linear
    to_v: nn.Linear
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    outputs: tuple[nn.Module, ...]
    num_heads: int


def attention_parts(attn: Any) -> AttentionParts:
    """Return the modules of a self-attention by their roles."""
    if hasattr(attn, "to_query"):  # Kandinsky
        inputs = (attn.to_query, attn.to_key, attn.to_value, attn.query_norm, attn.key_norm)
        return AttentionParts(*inputs, (attn.out_layer,), attn.num_heads)
    inputs = (attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
    return AttentionParts(*inputs, tuple(attn.to_out), attn.heads)


def find_self_attentions(model: Any) -> list[Any]:
    """Return the self-attention over the grid of each block of a transformer, in order."""
    if hasattr(model, "visual_transformer_blocks"):  # Kandinsky 5; Kandinsky 6 has a part for video in each block
        return [getattr(block, "video_dec_block", block).self_attention for block in model.visual_transformer_blocks]
    blocks = getattr(model, "transformer_blocks", None)
    return [block.attn1 for block in (model.blocks if blocks is None else blocks)]


def project_heads(attn: Any, hidden_states: torch.Tensor, head_norm: bool) -> tuple[torch.Tensor, ...]:
    """Project the input of a self-attention to q, k, and v, and apply its norms.

    Args:
        attn: Attention module.
        hidden_states: [B, T, C].
        head_norm: Whether the norms apply to each head, not to all channels at once.

    Returns:
        q [B, T, H, K], k [B, T, H, K], and v [B, T, H, V].
    """
    parts = attention_parts(attn)
    projections = (parts.to_q, parts.to_k, parts.to_v)
    if getattr(attn, "fused_projections", False):
        projected = attn.to_qkv(hidden_states).split([part.out_features for part in projections], dim=-1)
    else:
        projected = tuple(part(hidden_states) for part in projections)
    heads = []
    for x, norm in zip(projected, (parts.norm_q, parts.norm_k, None), strict=True):
        x = x if norm is None or head_norm else norm(x)
        x = x.unflatten(2, (parts.num_heads, -1))
        heads.append(norm(x) if norm is not None and head_norm else x)
    return tuple(heads)


def read_pairs(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read cosines and sines [.., T, 1, K] (Wan) or [T, K] (HunyuanDiT) for pairs of neighboring channels."""
    cos, sin = (x[:, None] if x.ndim == 2 else x for x in rotary)
    return cos, sin, 1


def read_halves(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read cosines and sines [T, K] for pairs of a channel in the first half of a head and one in the second (Cosmos)."""
    cos, sin, _ = read_pairs(rotary, num_heads)
    return cos, sin, cos.shape[-1] // 2


def read_joined_heads(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read the embeddings of LTX, whose angles differ from head to head.

    Args:
        rotary: Cosines and sines, [B, T, H * K] each for pairs of neighboring channels, or, as in LTX-2 with
            `rope_type="split"`, [B, H, T, K / 2] each for pairs across the halves of a head.
        num_heads: Number of heads H.
    """
    cos, sin = rotary
    if cos.ndim == 4:
        width = cos.shape[-1]
        cos, sin = (x.transpose(1, 2).repeat(1, 1, 1, 2) for x in rotary)
        return cos, sin, width
    return cos.unflatten(-1, (num_heads, -1)), sin.unflatten(-1, (num_heads, -1)), 1


def read_axes(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read the embeddings of Allegro, in which each third of a head is rotated by the position along one axis.

    Args:
        rotary: Cosines and sines [positions, K / 3] of each axis, and the positions [1, T] of the tokens along each axis.
        num_heads: Not used.
    """
    tables, positions = rotary
    cos, sin = (
        torch.cat([F.embedding(position, table[i]) for position, table in zip(positions, tables, strict=True)], dim=-1)
        for i in range(2)
    )
    return cos[:, :, None], sin[:, :, None], cos.shape[-1] // 6


def read_matrices(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read rotation matrices [.., T, 1, K / 2, 2, 2] for pairs of neighboring channels (Kandinsky)."""
    return rotary[..., 0, 0].repeat_interleave(2, dim=-1), rotary[..., 1, 0].repeat_interleave(2, dim=-1), 1


def read_complex(rotary: Any, num_heads: int) -> RotaryAngles:
    """Read complex numbers [1, 1, T, K / 2], the same for q and k, for pairs of neighboring channels (AnyFlow)."""
    angles = rotary["query"].transpose(1, 2)  # [1, T, 1, K / 2]
    return angles.real.repeat_interleave(2, dim=-1), angles.imag.repeat_interleave(2, dim=-1), 1


ROTARY_FORMS = {
    "pairs": read_pairs,
    "halves": read_halves,
    "joined heads": read_joined_heads,
    "axes": read_axes,
    "matrices": read_matrices,
    "complex": read_complex,
}


def read_grid(kind: AttentionKind, config: Any, latents: torch.Tensor, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Compute the number of tokens along each axis of the grid.

    Args:
        kind: The kind of the family.
        config: Configuration of the transformer.
        latents: Its input, [B, ..] with the axes that `kind.latents` names.
        arguments: The other arguments of its forward.

    Raises:
        ValueError: The latents do not have these axes or the model's number of channels, or an argument that has the size
            of the grid is missing.
    """
    names, channels = kind.latents.split(), config.get("in_channels")
    sizes = dict(zip(names, latents.shape[1:], strict=False))
    if arguments.get("condition_mask") is not None:  # Cosmos appends it to the channels
        sizes["channels"] += arguments["condition_mask"].shape[1]
    if latents.ndim != len(names) + 1 or channels not in (None, sizes["channels"]):
        axes = ", ".join(str(channels) if name == "channels" and channels else name for name in names)
        expected = f"[batch, {axes}]; do they come from this model's own VAE?"
        raise ValueError(f"hidden_states: got latents {list(latents.shape)}, expected {expected}")
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (config.get("patch_size_t", patch), patch, patch)
    grid = []
    for name, step in list(zip(GRID_AXES, patch[-3:], strict=False))[-kind.axes :]:
        argument = f"num_{name}" if name == "frames" else name
        side = sizes[name] if name in sizes else arguments.get(argument)
        if side is None:
            expected = "the size of the latents; tokens that have only coordinates make no grid"
            raise ValueError(f"{argument}: got None, expected {expected}.")
        grid.append(side // step)
    return tuple(grid)
