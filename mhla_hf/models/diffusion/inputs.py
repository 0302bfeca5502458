"""Reads modules, rotary embeddings, and grids of diffusers' transformers, in the form that a `DiffusionKind` names."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..families import DiffusionKind

# Cosines and sines, broadcastable to [B, T, H, K], and the distance of the two channels of a pair.
RotaryAngles = tuple[Tensor, Tensor, int]
GRID_AXES = ("frames", "height", "width")
# Attributes of transformers that hold their blocks, in the order in which these run.
BLOCK_LISTS = ("joint_transformer_blocks", "transformer_blocks", "blocks", "single_transformer_blocks")


class AttentionParts(NamedTuple):
    """The modules of a self-attention, whose names differ among the transformers of diffusers."""

    to_q: nn.Linear
    to_k: nn.Linear
    to_v: nn.Linear
    norm_q: nn.Module | None
    norm_k: nn.Module | None
    outputs: tuple[nn.Module, ...]  # that come after the attention, in order
    num_heads: int
    fused: str = "to_qkv"  # name of the projection to q, k, and v made by `fuse_qkv_projections`


def attention_parts(attn: Any, text: bool = False) -> AttentionParts:
    """Return the modules of a self-attention; with `text`, its separate modules for text tokens if it has such."""
    if text and getattr(attn, "add_q_proj", None) is not None:
        inputs = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k)
        output = getattr(attn, "to_add_out", None)  # the last layer may drop the text
        return AttentionParts(*inputs, () if output is None else (output,), attn.heads, "to_added_qkv")
    if hasattr(attn, "to_query"):  # Kandinsky
        inputs = (attn.to_query, attn.to_key, attn.to_value, attn.query_norm, attn.key_norm)
        return AttentionParts(*inputs, (attn.out_layer,), attn.num_heads)
    inputs = (attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
    # Without `to_out`, the block applies one output projection to attention and MLP.
    return AttentionParts(*inputs, tuple(getattr(attn, "to_out", None) or ()), attn.heads)


def core_sizes(attn: Any) -> dict[str, int]:
    """Return the arguments of the MHLA core of a self-attention, except `settings`."""
    if hasattr(attn, "to_qkv_mlp_proj"):  # single blocks of Flux 2
        width = attn.head_dim
        return {"num_heads": attn.heads, "hidden_size": attn.query_dim, "key_dim": width, "value_dim": width}
    parts = attention_parts(attn)
    return {
        "num_heads": parts.num_heads,
        "hidden_size": parts.to_q.in_features,
        "key_dim": parts.to_q.out_features // parts.num_heads,
        "value_dim": parts.to_v.out_features // parts.num_heads,
    }


def find_self_attentions(model: Any) -> list[Any]:
    """Return the self-attentions over the grid, in order; some blocks of SD3 have two."""
    if hasattr(model, "visual_transformer_blocks"):  # Kandinsky 5; Kandinsky 6 has a part for video in each block
        return [getattr(block, "video_dec_block", block).self_attention for block in model.visual_transformer_blocks]
    attentions: list[Any] = []
    for block in (block for name in BLOCK_LISTS for block in getattr(model, name, None) or ()):
        both = [block.attn, getattr(block, "attn2", None)] if hasattr(block, "attn") else [block.attn1]
        attentions += [attn for attn in both if attn is not None]
    return attentions


def project_heads(attn: Any, hidden_states: Tensor, head_norm: bool, text: bool = False) -> tuple[Tensor, ...]:
    """Project [B, T, C] to normed q, k, and v [B, T, H, K or V]. With `head_norm`, norms apply to each head by itself."""
    parts = attention_parts(attn, text)
    projections = (parts.to_q, parts.to_k, parts.to_v)
    if getattr(attn, "fused_projections", False):
        fused = getattr(attn, parts.fused)(hidden_states)
        projected = fused.split([part.out_features for part in projections], dim=-1)
    else:
        projected = tuple(part(hidden_states) for part in projections)
    heads = []
    for x, norm in zip(projected, (parts.norm_q, parts.norm_k, None), strict=True):
        x = x if norm is None or head_norm else norm(x)
        x = x.unflatten(2, (parts.num_heads, -1))
        heads.append(norm(x) if norm is not None and head_norm else x)
    return tuple(heads)


def read_rotary(form: str, rotary: Any, num_heads: int) -> RotaryAngles:
    """Read a rotary embedding in the form that `DiffusionKind.rotary` names."""
    if form == "axes":  # tables [positions, K / 3] for each axis, and the tokens' positions [1, T] (Allegro)
        tables, positions = rotary
        cos, sin = (
            torch.cat([F.embedding(place, table[i]) for place, table in zip(positions, tables, strict=True)], dim=-1)
            for i in range(2)
        )
        return cos[:, :, None], sin[:, :, None], cos.shape[-1] // 6
    if form == "matrices":  # [..., T, 1, K / 2 or 1, 2, 2], of neighboring channels; one for all pairs in Kandinsky
        rotary = rotary[..., 0, 0], rotary[..., 1, 0]
        if rotary[0].shape[-1] == 1:
            return *rotary, 1
    if form == "complex":  # [1, 1, T, K / 2], the same for q and k, for pairs of neighbors (AnyFlow)
        rotary = torch.view_as_real(rotary["query"].transpose(1, 2)).unbind(-1)  # [1, T, 1, K / 2]
    if form == "complex streams":  # image [T, K / 2] and text [S, K / 2], for pairs of neighbors (Qwen-Image)
        rotary = torch.view_as_real(torch.cat([rotary[1], rotary[0]])[:, None]).unbind(-1)  # [S + T, 1, K / 2]
    cos, sin = rotary
    if form in ("half heads", "matrices", "complex", "complex streams"):  # [T, H, K / 2] of neighbors (Mochi)
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1), 1
    if form == "joined heads" and cos.ndim == 4:  # [B, H, T, K / 2] across the halves of a head (LTX-2, "split")
        width = cos.shape[-1]
        cos, sin = (x.transpose(1, 2).repeat(1, 1, 1, 2) for x in rotary)
        return cos, sin, width
    if form == "joined heads":  # [B, T, H * K] of neighbors, whose angles differ from head to head (LTX)
        return cos.unflatten(-1, (num_heads, -1)), sin.unflatten(-1, (num_heads, -1)), 1
    # [..., T, 1, K] (Wan) or [T, K] (HunyuanDiT, Cosmos), of neighbors or across the halves of a head
    cos, sin = (x[:, None] if x.ndim == 2 else x for x in rotary)
    return cos, sin, cos.shape[-1] // 2 if form == "halves" else 1


def grid_of_positions(positions: Tensor, num_tokens: int) -> tuple[Any, ...]:
    """Return (rows, columns), or a tuple of pairs for several images, from Flux's positions [T, 3] or [B, T, 3 or 4]."""
    places = positions.reshape(-1, num_tokens, positions.shape[-1])[0, :, 1:3].long().cpu()
    first_tokens = (places == 0).all(-1).nonzero().flatten().tolist()
    images = places.tensor_split(first_tokens[1:])
    grids = tuple((int(image[-1, 0]) + 1, int(image[-1, 1]) + 1) for image in images)
    for image, grid in zip(images, grids, strict=True):
        if not torch.equal(image, torch.cartesian_prod(*map(torch.arange, grid))):
            expected = "the rows and columns of each image in row-major order, from (0, 0) on"
            raise ValueError(f"img_ids: got {num_tokens} positions in another order, expected {expected}.")
    return grids if len(grids) > 1 else grids[0]


def grid_of_shapes(shapes: Any, num_tokens: int) -> tuple[Any, ...]:
    """Return (rows, columns), or for several images a tuple of pairs, from the `img_shapes` of Qwen-Image.

    Each batch element has one shape (frames, rows, columns), or a list of several. Frames become further rows of tokens.
    """
    first = shapes[0] if isinstance(shapes[0], list) else [shapes[0]]
    grids = tuple((frames * height, width) for frames, height, width in first)
    if sum(map(math.prod, grids)) != num_tokens or any(shape != shapes[0] for shape in shapes):
        expected = f"shapes of {num_tokens} tokens in total, the same for every batch element"
        raise ValueError(f"img_shapes: got {shapes}, expected {expected}.")
    return grids if len(grids) > 1 else grids[0]


def read_grid(kind: DiffusionKind, config: Any, latents: Tensor, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the number of tokens along each axis of the grid, or one tuple per image, from a forward's arguments."""
    if kind.positions:
        read: Any = grid_of_positions if kind.positions == "img_ids" else grid_of_shapes
        return read(arguments[kind.positions], latents.shape[1])
    names, channels = kind.latents.split(), config.get("in_channels")
    sizes = dict(zip(names, latents.shape[1:], strict=False))
    if arguments.get("condition_mask") is not None:  # Cosmos appends it to the channels
        sizes["channels"] += arguments["condition_mask"].shape[1]
    if latents.ndim != len(names) + 1 or channels not in (None, sizes["channels"]):
        axes = ", ".join(str(channels) if name == "channels" and channels else name for name in names)
        expected = f"[batch, {axes}], as this model's own VAE makes them"
        raise ValueError(f"hidden_states: got latents {list(latents.shape)}, expected {expected}.")
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (config.get("patch_size_t") or 1, patch, patch)
    grid = []
    for name, step in list(zip(GRID_AXES, patch[-3:], strict=False))[-kind.axes :]:
        argument = f"num_{name}" if name == "frames" else name
        side = sizes[name] if name in sizes else arguments.get(argument)
        if side is None:
            raise ValueError(f"{argument}: got None, expected the latents' size along this axis.")
        grid.append(side // step)
    return tuple(grid)
