"""Convert the authors' Wan and DiT checkpoints to MHLA transformers of diffusers.

No key is skipped. An unknown key is an error with the authors' name, a weight without a key one with diffusers' name. The
released DiT code normalizes in another way than the paper (`normalize="official"`) and has an additional LayerNorm. The
released Wan code has this denominator only with `norm_output`, and does not scale q k^T, so its mixing is multiplied by the
square root of the head's width, which the operator divides by.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mhla_hf.models.diffusion.converted_transformer import MHLAWanTransformer3DModel
from mhla_hf.models.diffusion.dit_transformer import MHLADiTTransformer2DModel

# Number of blocks -> blocks per frame, row and column axis. For 150 it is the authors' own; the paper has none for 105.
WAN_LAYOUTS = {150: (3, 5, 10), 105: (7, 3, 5)}
WAN_MIXING = "self_attn.block_attn.conv"
WAN_BLOCK = {
    **{f"self_attn.{name}": f"attn1.to_{name}" for name in "qkv"},
    **{f"cross_attn.{name}": f"attn2.to_{name}" for name in "qkv"},
    **{f"{old}_attn.o": f"{new}.to_out.0" for old, new in (("self", "attn1"), ("cross", "attn2"))},
    **{f"{old}_attn.norm_{x}": f"{new}.norm_{x}" for old, new in (("self", "attn1"), ("cross", "attn2")) for x in "qk"},
    "self_attn.g_norm": "attn1.processor.mhla.norm",
    "self_attn.g": "attn1.processor.mhla.gate",
    "self_attn.lepe": "attn1.processor.mhla.cpe.conv",
    WAN_MIXING: "attn1.processor.mhla.mixing",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
WAN_ENDS = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
}
DIT_MIXING = "attn.piece_attn.conv"
DIT_BLOCK = {
    "attn.norm": "attn1.input_norm",
    "attn.lepe": "attn1.processor.mhla.cpe.conv",
    DIT_MIXING: "attn1.processor.mhla.mixing",
    "attn.to_out.0": "attn1.to_out.0",
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}
DIT_ENDS = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
DIT_EMBEDDERS = {  # the authors have one for all blocks, diffusers one per block
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
# Width -> number of heads of the sizes S, B, L and XL.
DIT_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}


def is_official_wan(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state dict is that of the authors' Wan, with MHLA in some or all layers."""
    return "patch_embedding.weight" in state and any(f".{WAN_MIXING}." in key for key in state)


def is_official_dit(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state dict is that of the authors' DiT, with MHLA in some or all layers."""
    return "x_embedder.proj.weight" in state and any(f".{DIT_MIXING}." in key for key in state)


def load_official_wan(
    state: Mapping[str, torch.Tensor], *, layout: Sequence[int] | None = None, norm_output: bool = False
) -> MHLAWanTransformer3DModel:
    """Make the authors' Wan an `MHLAWanTransformer3DModel` in eval mode.

    Args:
        state: Its state dict, with or without `self_attn.lepe.*` and `self_attn.g.*`. The latter is the gate of the released
            configuration, which has no effect in the released code.
        layout: Number of blocks per frame, row and column axis. Default: (3, 5, 10) for 150 blocks, as the authors have it,
            and (7, 3, 5) for 105.
        norm_output: The authors' option of this name, which the checkpoint does not tell: whether outputs are divided by the
            sum of the weights before their norm. Its default is true in their code, and both of their released
            configurations set it to false.
    """
    mixing = mhla_layers(state, WAN_MIXING)
    num_blocks = block_count(mixing, WAN_MIXING)
    if layout is None and num_blocks not in WAN_LAYOUTS:
        raise ValueError(
            f"layout: got none for {num_blocks} blocks, expected three counts whose product is {num_blocks}."
        )
    layout = tuple(layout or WAN_LAYOUTS[num_blocks])
    if len(layout) != 3 or math.prod(layout) != num_blocks:
        raise ValueError(
            f"layout: got {layout}, expected three counts whose product is the checkpoint's {num_blocks} blocks."
        )
    attention = f"blocks.{min(mixing)}.self_attn"
    width, channels, *patch = shape_of(state, "patch_embedding.weight")
    head_width = shape_of(state, f"{attention}.g_norm.weight")[0]
    image_width = shape_of(state, "img_emb.proj.0.weight")[0] if "img_emb.proj.0.weight" in state else None
    lepe = f"{attention}.lepe.weight"
    mhla = {
        "layout": list(layout),
        "layers": sorted(mixing),
        "mixing_form": "free",
        "normalize": "official" if norm_output else False,
        "gate": f"{attention}.g.weight" in state,
        "cpe": shape_of(state, lepe)[-1] if lepe in state else 0,
    }
    model = MHLAWanTransformer3DModel(
        patch_size=tuple(patch),
        num_attention_heads=width // head_width,
        attention_head_dim=head_width,
        in_channels=channels,
        out_channels=shape_of(state, "head.head.weight")[0] // math.prod(patch),
        text_dim=shape_of(state, "text_embedding.0.weight")[1],
        freq_dim=shape_of(state, "time_embedding.0.weight")[1],
        ffn_dim=shape_of(state, "blocks.0.ffn.0.weight")[0],
        num_layers=number_of_blocks(state),
        cross_attn_norm="blocks.0.norm3.weight" in state,
        image_dim=image_width,
        added_kv_proj_dim=width if image_width else None,
        mhla=mhla,
    )

    def rename(key: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        """Translate one weight; see `fill`."""
        block, module, kind = split_key(key)
        if module == "modulation" or key == "head.modulation":
            return [(f"blocks.{block}.scale_shift_table" if block else "scale_shift_table", value)]
        if module == WAN_MIXING and kind == "weight":
            return [(f"blocks.{block}.{WAN_BLOCK[module]}.weight", value.float().flatten(1) * head_width**0.5)]
        table = WAN_BLOCK if block else WAN_ENDS
        prefix = f"blocks.{block}." if block else ""
        return [(f"{prefix}{table[module]}.{kind}", value)] if module in table else None

    return fill(model, state, rename, "Wan")


def load_official_dit(state: Mapping[str, torch.Tensor], *, num_heads: int | None = None) -> MHLADiTTransformer2DModel:
    """Make the authors' DiT an `MHLADiTTransformer2DModel` in eval mode. Layers with `attn.qkv` are softmax layers.

    By default, `num_heads` is that of the size (S, B, L, XL) with this width.
    """
    mixing = mhla_layers(state, DIT_MIXING)
    num_blocks = block_count(mixing, DIT_MIXING)
    width, channels, patch, _ = shape_of(state, "x_embedder.proj.weight")
    num_positions = shape_of(state, "pos_embed")[1]
    side = math.isqrt(num_positions)
    blocks = math.isqrt(num_blocks)
    if side**2 != num_positions or blocks**2 != num_blocks or side % blocks:
        raise ValueError(
            f"pos_embed: got {num_positions} positions and {num_blocks} blocks, "
            "expected squares of which one divides the other."
        )
    if num_heads is None and width not in DIT_HEADS:
        raise ValueError(
            f"num_heads: got none for width {width}, expected a number; the authors' widths are {list(DIT_HEADS)}."
        )
    num_heads = num_heads or DIT_HEADS[width]
    model = MHLADiTTransformer2DModel(
        num_attention_heads=num_heads,
        attention_head_dim=width // num_heads,
        in_channels=channels,
        out_channels=shape_of(state, "final_layer.linear.weight")[0] // patch**2,
        num_layers=number_of_blocks(state),
        sample_size=side * patch,
        patch_size=patch,
        num_embeds_ada_norm=shape_of(state, "y_embedder.embedding_table.weight")[0] - 1,
        norm_eps=1e-6,
        input_norm=True,
        timestep_freq_shift=0,
        mhla={
            "layout": [blocks, blocks],
            "layers": sorted(mixing),
            "normalize": "official",
            "mixing_form": "direct" if min(float(value.min()) for value in mixing.values()) >= 0 else "free",
            "cpe": shape_of(state, f"blocks.{min(mixing)}.attn.lepe.weight")[-1],
        },
    )
    positions = model.pos_embed.pos_embed
    if positions.shape != state["pos_embed"].shape or (positions - state["pos_embed"]).abs().max() > 1e-3:
        raise ValueError(
            "pos_embed: got other numbers than DiT's sines and cosines, expected those, as the model computes them itself."
        )

    def rename(key: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
        """Translate one weight; see `fill`."""
        block, module, kind = split_key(key)
        if key == "pos_embed":
            return []
        if module in DIT_EMBEDDERS and not block:
            name = f"{DIT_EMBEDDERS[module]}.{kind}"
            return [(f"transformer_blocks.{i}.{name}", value) for i in range(model.config.num_layers)]
        if module in ("attn.to_qkv", "attn.qkv") and block:
            names = (f"transformer_blocks.{block}.attn1.to_{name}.{kind}" for name in "qkv")
            return list(zip(names, value.chunk(3), strict=True))
        if module == DIT_MIXING and kind == "weight":
            value = value.float().flatten(1)
        table = DIT_BLOCK if block else DIT_ENDS
        prefix = f"transformer_blocks.{block}." if block else ""
        return [(f"{prefix}{table[module]}.{kind}", value)] if module in table else None

    return fill(model, state, rename, "DiT")


def split_key(key: str) -> tuple[str, str, str]:
    """Split a key such as "blocks.3.self_attn.q.weight" into ("3", "self_attn.q", "weight").

    The first part is "" outside of blocks, and the last one is "" for parameters that are neither a weight nor a bias.
    """
    block, rest = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", key).groups()
    module, _, kind = rest.rpartition(".")
    return (block or "", module, kind) if kind in ("weight", "bias") else (block or "", rest, "")


def mhla_layers(state: Mapping[str, torch.Tensor], mixing: str) -> dict[int, torch.Tensor]:
    """Return the mixing matrices, [M, M, 1, 1] each, by layer; `mixing` is the name of their module."""
    matrices = {}
    for key, value in state.items():
        block, module, kind = split_key(key)
        if block and module == mixing and kind == "weight":
            matrices[int(block)] = value
    return matrices


def block_count(mixing: Mapping[int, torch.Tensor], name: str) -> int:
    """Return the number of blocks M of mixing matrices [M, M, 1, 1]; `name` begins the message if one has another shape."""
    sizes = {tuple(value.shape) for value in mixing.values()}
    if len(sizes) != 1 or any(len(size) != 4 or size != (size[0], size[0], 1, 1) for size in sizes):
        raise ValueError(f"{name}: got {sorted(sizes)}, expected one shape [M, M, 1, 1] in all layers.")
    return sizes.pop()[0]


def number_of_blocks(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of transformer blocks in a state dict."""
    return 1 + max(int(block) for block, _, _ in map(split_key, state) if block)


def shape_of(state: Mapping[str, torch.Tensor], key: str) -> tuple[int, ...]:
    """Return the shape of a weight. Raise ValueError if it is missing."""
    if key not in state:
        raise ValueError(f"checkpoint: got no key {key!r}, expected a whole model of the authors.")
    return tuple(state[key].shape)


def fill(
    model: Any,
    state: Mapping[str, torch.Tensor],
    rename: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]] | None],
    family: str,
) -> Any:
    """Load a state dict of the authors into a model of diffusers, and return the model in eval mode.

    For a key and value, `rename` returns the model's names and values, as pairs, or None for an unknown key. `family` is the
    authors' name of the model, for messages.
    """
    weights = model.state_dict()
    renamed: dict[str, torch.Tensor] = {}
    unknown = []
    for key, value in state.items():
        pairs = rename(key, value)
        if pairs is None or any(name not in weights for name, _ in pairs):
            unknown.append(key)
            continue
        for name, part in pairs:
            if part.shape != weights[name].shape:
                raise ValueError(
                    f"checkpoint: got {key!r} of shape {list(value.shape)}, which gives {list(part.shape)} for {name}, "
                    f"expected {list(weights[name].shape)}."
                )
            renamed[name] = part
    missing = sorted(set(weights) - set(renamed))
    if unknown or missing:
        problems = [f"{len(unknown)} unknown keys, {', '.join(map(repr, unknown))}"] if unknown else []
        problems += [f"no weights for {', '.join(map(repr, missing))}"] if missing else []
        raise ValueError(
            f"checkpoint: got {' and '.join(problems)}, expected the authors' {family}, whole and with nothing else."
        )
    model.load_state_dict({name: part.clone() for name, part in renamed.items()})
    return model.eval()
