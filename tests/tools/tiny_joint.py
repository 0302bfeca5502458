"""Sizes and inputs of tiny transformers of diffusers in which text and grid share one attention, as `tiny_grids.py` has them
of others."""

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from tools.tiny_grids import latte, text_mask

HEADS = {"num_attention_heads": 2, "attention_head_dim": 12}
FLUX = {**HEADS, "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 32}
FLUX["axes_dims_rope"] = (4, 4, 4)
FLUX2 = {**FLUX, "axes_dims_rope": (2, 4, 4, 2), "mlp_ratio": 2.0, "timestep_guidance_channels": 8}
CHROMA = {**FLUX, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
QWEN = {**HEADS, "in_channels": 8, "out_channels": 2, "num_layers": 3, "joint_attention_dim": 32}
QWEN["axes_dims_rope"] = (4, 4, 4)
SD3 = {
    **HEADS, "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 3, "joint_attention_dim": 32,
    "caption_projection_dim": 24, "pooled_projection_dim": 8, "pos_embed_max_size": 16,
}  # fmt: skip
AURA = {
    **HEADS, "sample_size": 16, "num_mmdit_layers": 2, "num_single_dit_layers": 2, "joint_attention_dim": 32,
    "caption_projection_dim": 24, "pos_embed_max_size": 256,
}  # fmt: skip
HUNYUAN = {
    **HEADS, "in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "mlp_ratio": 2.0, "text_embed_dim": 32,
    "rope_axes_dim": (4, 4, 4),
}  # fmt: skip
HUNYUAN_VIDEO = {**HUNYUAN, "num_layers": 2, "num_single_layers": 2, "pooled_projection_dim": 8}
HUNYUAN_VIDEO15 = {**HUNYUAN, "num_layers": 3, "text_embed_2_dim": 16, "image_embed_dim": 8, "patch_size": 2}
COGVIDEOX = {
    **HEADS, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32,
    "num_layers": 3, "max_text_seq_length": 6, "use_rotary_positional_embeddings": True,
}  # fmt: skip
MOCHI = {
    **HEADS, "in_channels": 4, "num_layers": 3, "pooled_projection_dim": 16, "text_embed_dim": 32, "time_embed_dim": 8,
    "max_sequence_length": 6,
}  # fmt: skip
JOINT_SIZES = {
    "flux": (diffusers.FluxTransformer2DModel, {**FLUX, "pooled_projection_dim": 8}),
    "flux2": (diffusers.Flux2Transformer2DModel, FLUX2),
    "chroma": (diffusers.ChromaTransformer2DModel, CHROMA),
    "qwen-image": (diffusers.QwenImageTransformer2DModel, QWEN),
    "sd3": (diffusers.SD3Transformer2DModel, SD3),
    "sd3.5": (diffusers.SD3Transformer2DModel, {**SD3, "dual_attention_layers": (0, 1), "qk_norm": "rms_norm"}),
    "aura-flow": (diffusers.AuraFlowTransformer2DModel, AURA),
    "hunyuan-video": (diffusers.HunyuanVideoTransformer3DModel, HUNYUAN_VIDEO),
    "hunyuan-video1.5": (diffusers.HunyuanVideo15Transformer3DModel, HUNYUAN_VIDEO15),
    "cogvideox": (diffusers.CogVideoXTransformer3DModel, COGVIDEOX),
    "mochi": (diffusers.MochiTransformer3DModel, MOCHI),
}
VIDEOS = ("hunyuan-video", "hunyuan-video1.5", "cogvideox", "mochi")
# Their stock code, or ours for the grid, reads values of tensors
READS_VALUES = ("flux", "flux2", "chroma", "hunyuan-video1.5")
PACKED = ("flux", "flux2", "chroma", "qwen-image")  # the latents are tokens already


def joint_size(family, frames=3, rows=4, columns=5):
    """Size of the latents whose grid has this many tokens along each axis."""
    size = (rows, columns) if family in PACKED else (2 * rows, 2 * columns)
    return (frames, *size) if family in VIDEOS else size


def image_sequence(family, sizes, noise):
    """Arguments of a transformer for one image and those that it is an edit of, one after the other."""
    parts = [JOINT_ARGUMENTS[family](size, noise) for size in sizes]
    arguments = {**parts[0], "hidden_states": torch.cat([part["hidden_states"] for part in parts], 1)}
    if family == "qwen-image":
        batch = len(arguments["img_shapes"])
        return {**arguments, "img_shapes": [[(1, *size) for size in sizes]] * batch}
    for number, part in enumerate(parts):
        part["img_ids"][:, 0] = number
    arguments["img_ids"] = torch.cat([part["img_ids"] for part in parts])
    if "attention_mask" in arguments:
        added = arguments["hidden_states"].shape[1] - sizes[0][0] * sizes[0][1]
        arguments["attention_mask"] = torch.nn.functional.pad(arguments["attention_mask"], (0, added), value=1.0)
    return arguments


def flux(size, noise):
    tokens = {"hidden_states": noise(size[0] * size[1], 8), "encoder_hidden_states": noise(6, 32)}
    places = torch.cartesian_prod(*map(torch.arange, size)).float()
    positions = {"img_ids": torch.nn.functional.pad(places, (1, 0)), "txt_ids": torch.zeros(6, 3)}
    return {**tokens, **positions}


def chroma(size, noise):
    """Arguments of Chroma. Its pipeline casts the mask to the dtype of the model, so that softmax adds it to the scores."""
    arguments = flux(size, noise)
    mask = torch.nn.functional.pad(text_mask(noise), (0, size[0] * size[1]), value=1).float()
    return {**arguments, "attention_mask": mask}


def flux2(size, noise):
    """Arguments of Flux 2, whose positions have one more column."""
    arguments = flux(size, noise)
    positions = {name: torch.nn.functional.pad(arguments[name], (0, 1)) for name in ("img_ids", "txt_ids")}
    return {**arguments, **positions, "guidance": torch.full((len(noise()),), 4.0)}


def qwen_image(size, noise):
    tokens = {"hidden_states": noise(size[0] * size[1], 8), "encoder_hidden_states": noise(6, 32)}
    mask = text_mask(noise).bool()
    return {**tokens, "encoder_hidden_states_mask": mask, "img_shapes": [[(1, *size)]] * len(mask)}


def mochi(size, noise):
    return {**latte(size, noise), "encoder_attention_mask": text_mask(noise).bool()}


def hunyuan_video(size, noise):
    guidance = torch.full((len(noise()),), 512.0)
    return {**mochi(size, noise), "pooled_projections": noise(8), "guidance": guidance}


def hunyuan_video15(size, noise):
    """Arguments of HunyuanVideo 1.5, with an image."""
    mask = torch.ones(len(noise()), 4).long()
    second = {"encoder_hidden_states_2": noise(4, 16), "encoder_attention_mask_2": mask}
    return {**mochi(size, noise), **second, "image_embeds": noise(3, 8)}


def cogvideox(size, noise):
    """Arguments of CogVideoX: the pipeline computes the rotary embedding."""
    grid = (size[1] // 2, size[2] // 2)
    rotary = get_3d_rotary_pos_embed(16, ((0, 0), grid), grid, size[0])
    tokens = {"hidden_states": noise(size[0], 4, *size[1:]), "encoder_hidden_states": noise(6, 32)}
    return {**tokens, "image_rotary_emb": rotary}


def pooled(make):
    """Arguments with a pooled text, too."""
    return lambda size, noise: {**make(size, noise), "pooled_projections": noise(8)}


JOINT_ARGUMENTS = {
    "flux": pooled(flux), "flux2": flux2, "chroma": chroma, "qwen-image": qwen_image, "sd3": pooled(latte),
    "sd3.5": pooled(latte), "aura-flow": latte, "hunyuan-video": hunyuan_video, "hunyuan-video1.5": hunyuan_video15,
    "cogvideox": cogvideox,
    "mochi": mochi,
}  # fmt: skip
