"""The authors' Wan and DiT checkpoints as MHLA transformers of diffusers, every key accounted for.

Nothing is skipped and nothing is guessed. A key without a place, and a place without a key, is an error that names the key
in the authors' spelling and the place in diffusers'. The released DiT code normalizes otherwise than the paper
(`normalize="official"`) and has one LayerNorm more; the released Wan code has that denominator only with `norm_output`, and
no scale, so its mixing is multiplied by the root of the head's width, which the operator divides by.
"""

import math
import re

import torch

from mhla_hf.models.converted_transformer import MHLAWanTransformer3DModel
from mhla_hf.models.dit_transformer import MHLADiTTransformer2DModel

WAN_LAYOUTS = {150: (3, 5, 10), 105: (7, 3, 5)}  # the authors' own for 150; 105 are not spelt out in the paper
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
DIT_EMBEDDERS = {  # one for all blocks there, one in each block here
    "t_embedder.mlp.0": "norm1.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "norm1.emb.timestep_embedder.linear_2",
    "y_embedder.embedding_table": "norm1.emb.class_embedder.embedding_table",
}
DIT_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}


def is_official_wan(state: dict) -> bool:
    """Whether these are the keys of the authors' Wan, wholly or partly MHLA."""
    return "patch_embedding.weight" in state and any(f".{WAN_MIXING}." in key for key in state)


def is_official_dit(state: dict) -> bool:
    """Whether these are the keys of the authors' DiT, wholly or partly MHLA."""
    return "x_embedder.proj.weight" in state and any(f".{DIT_MIXING}." in key for key in state)


def load_official_wan(state: dict, *, layout=None, norm_output: bool = False) -> MHLAWanTransformer3DModel:
    """The authors' Wan as `MHLAWanTransformer3DModel`, in eval mode.

    Args:
        state: their state dict; with or without `self_attn.g.*` (the released configuration's gate has no effect in the
            released code) and `self_attn.lepe.*`.
        layout: blocks per frame, row and column axis; default: theirs for 150 blocks, (7, 3, 5) for 105.
        norm_output: theirs, whether outputs are divided by the summed weights before their norm, which the checkpoint does
            not tell: true by default in their code, false in both of their released configurations.
    """
    mixing = mhla_layers(state, WAN_MIXING)
    count = block_count(mixing, WAN_MIXING)
    if layout is None and count not in WAN_LAYOUTS:
        raise ValueError(f"layout: got none for {count} blocks, expected three counts whose product is {count}.")
    layout = tuple(layout or WAN_LAYOUTS[count])
    if len(layout) != 3 or math.prod(layout) != count:
        raise ValueError(
            f"layout: got {layout}, expected three counts whose product is the checkpoint's {count} blocks."
        )
    first = f"blocks.{min(mixing)}.self_attn"
    rows = {
        key: shape_of(state, key) for key in ("patch_embedding.weight", "head.head.weight", "time_embedding.0.weight")
    }
    (width, channels, *patch), head_width = rows["patch_embedding.weight"], shape_of(state, f"{first}.g_norm.weight")[0]
    image = shape_of(state, "img_emb.proj.0.weight")[0] if "img_emb.proj.0.weight" in state else None
    lepe = f"{first}.lepe.weight"
    mhla = {
        "layout": list(layout),
        "layers": sorted(mixing),
        "mixing_form": "free",
        "normalize": "official" if norm_output else False,
        "gate": f"{first}.g.weight" in state,
        "cpe": shape_of(state, lepe)[-1] if lepe in state else 0,
    }
    model = MHLAWanTransformer3DModel(
        patch_size=tuple(patch),
        num_attention_heads=width // head_width,
        attention_head_dim=head_width,
        in_channels=channels,
        out_channels=rows["head.head.weight"][0] // math.prod(patch),
        text_dim=shape_of(state, "text_embedding.0.weight")[1],
        freq_dim=rows["time_embedding.0.weight"][1],
        ffn_dim=shape_of(state, "blocks.0.ffn.0.weight")[0],
        num_layers=number_of_blocks(state),
        cross_attn_norm="blocks.0.norm3.weight" in state,
        image_dim=image,
        added_kv_proj_dim=width if image else None,
        mhla=mhla,
    )

    def rename(key, value):
        block, end, kind = split_key(key)
        if end == "modulation" or key == "head.modulation":
            return [(f"blocks.{block}.scale_shift_table" if block else "scale_shift_table", value)]
        if end == WAN_MIXING and kind == "weight":
            return [(f"blocks.{block}.{WAN_BLOCK[end]}.weight", value.float().flatten(1) * head_width**0.5)]
        table = WAN_BLOCK if block else WAN_ENDS
        return (
            [(f"blocks.{block}.{table[end]}.{kind}" if block else f"{table[end]}.{kind}", value)]
            if end in table
            else None
        )

    return fill(model, state, rename, "Wan")


def load_official_dit(state: dict, *, num_heads: int | None = None) -> MHLADiTTransformer2DModel:
    """The authors' DiT as `MHLADiTTransformer2DModel`, in eval mode; layers with `attn.qkv` are softmax.

    Args:
        state: their state dict.
        num_heads: default: that of the size (S, B, L, XL) with this width.
    """
    mixing = mhla_layers(state, DIT_MIXING)
    count = block_count(mixing, DIT_MIXING)
    width, channels, patch, _ = shape_of(state, "x_embedder.proj.weight")
    tokens, side, blocks = (
        shape_of(state, "pos_embed")[1],
        math.isqrt(shape_of(state, "pos_embed")[1]),
        math.isqrt(count),
    )
    if side**2 != tokens or blocks**2 != count or side % blocks:
        raise ValueError(
            f"pos_embed: got {tokens} positions and {count} blocks, expected squares of which one divides the other."
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
    table = model.pos_embed.pos_embed
    if table.shape != state["pos_embed"].shape or (table - state["pos_embed"]).abs().max() > 1e-3:
        raise ValueError(
            "pos_embed: got other numbers than DiT's sines and cosines, expected those, which have no weights here."
        )

    def rename(key, value):
        block, end, kind = split_key(key)
        if key == "pos_embed":
            return []
        if end in DIT_EMBEDDERS and not block:
            return [
                (f"transformer_blocks.{i}.{DIT_EMBEDDERS[end]}.{kind}", value) for i in range(model.config.num_layers)
            ]
        if end in ("attn.to_qkv", "attn.qkv") and block:
            names = (f"transformer_blocks.{block}.attn1.to_{name}.{kind}" for name in "qkv")
            return list(zip(names, value.chunk(3), strict=True))
        if end == DIT_MIXING and kind == "weight":
            value = value.float().flatten(1)
        table = DIT_BLOCK if block else DIT_ENDS
        place = f"transformer_blocks.{block}." if block else ""
        return [(f"{place}{table[end]}.{kind}", value)] if end in table else None

    return fill(model, state, rename, "DiT")


def split_key(key: str) -> tuple[str, str, str]:
    """Block number or "", module, and "weight" or "bias": ("3", "self_attn.q", "weight")."""
    block, rest = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.+)", key).groups()
    end, _, kind = rest.rpartition(".")
    return (block or "", end, kind) if kind in ("weight", "bias") else (block or "", rest, "")


def mhla_layers(state: dict, mixing: str) -> dict[int, torch.Tensor]:
    """The mixing matrices by layer."""
    found = {}
    for key, value in state.items():
        block, end, kind = split_key(key)
        if block and end == mixing and kind == "weight":
            found[int(block)] = value
    return found


def block_count(mixing: dict[int, torch.Tensor], name: str) -> int:
    """M, the same in all layers, from weights `[M, M, 1, 1]`."""
    sizes = {tuple(value.shape) for value in mixing.values()}
    if len(sizes) != 1 or any(len(size) != 4 or size != (size[0], size[0], 1, 1) for size in sizes):
        raise ValueError(f"{name}: got {sorted(sizes)}, expected one shape [M, M, 1, 1] in all layers.")
    return sizes.pop()[0]


def number_of_blocks(state: dict) -> int:
    """How many blocks the keys speak of."""
    return 1 + max(int(block) for block, _, _ in map(split_key, state) if block)


def shape_of(state: dict, key: str) -> tuple:
    """The shape of a weight that must be there."""
    if key not in state:
        raise ValueError(f"checkpoint: misses the key {key!r}, expected a whole model of the authors.")
    return tuple(state[key].shape)


def fill(model, state: dict, rename, family: str):
    """Load `state` through `rename(key, value) -> [(own key, value), ...] or None`; strict on keys and shapes, both ways."""
    own, renamed, origin, unknown = model.state_dict(), {}, {}, []
    for key, value in state.items():
        places = rename(key, value)
        if places is None or any(place not in own for place, _ in places):
            unknown.append(key)
            continue
        for place, part in places:
            if part.shape != own[place].shape:
                raise ValueError(
                    f"checkpoint: {key!r} is {list(value.shape)}, which gives {list(part.shape)} for {place}, "
                    f"expected {list(own[place].shape)}."
                )
            renamed[place], origin[place] = part, key
    missing = sorted(set(own) - set(renamed))
    if unknown or missing:
        found = [f"has {len(unknown)} unknown keys, {', '.join(map(repr, unknown))}"] if unknown else []
        found += [f"misses the weights of {', '.join(map(repr, missing))}"] if missing else []
        raise ValueError(
            f"checkpoint: {' and '.join(found)}, expected the authors' {family}, whole and with nothing else."
        )
    model.load_state_dict({place: part.clone() for place, part in renamed.items()})
    return model.eval()
