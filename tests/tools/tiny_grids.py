"""Sizes and inputs of tiny transformers of diffusers that attend over a grid of tokens, besides Wan, Sana, DiT, and PixArt.

`SIZES[family]` is the class and the arguments of its constructor, and `arguments(family, size, noise)` returns arguments of
its forward.
"""

import math

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro

HEADS = {"num_attention_heads": 2, "num_layers": 3}
# The width of 20 channels leaves two that LTX does not rotate.
LTX = {**HEADS, "in_channels": 8, "out_channels": 8, "attention_head_dim": 10, "cross_attention_dim": 20}
LTX2 = {
    **LTX, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 6, "audio_cross_attention_dim": 12, "caption_channels": 32,
}  # fmt: skip
# As in LTX-2.3
LTX23 = {
    **LTX2, "attention_head_dim": 12, "cross_attention_dim": 24, "rope_type": "split", "gated_attn": True,
    "audio_gated_attn": True, "cross_attn_mod": True, "audio_cross_attn_mod": True, "perturbed_attn": True,
}  # fmt: skip
COSMOS = {
    **HEADS, "in_channels": 16, "out_channels": 16, "attention_head_dim": 16, "mlp_ratio": 2, "text_embed_dim": 32,
    "adaln_lora_dim": 4, "max_size": (4, 32, 32), "concat_padding_mask": False,  # resizing one takes torchvision
}  # fmt: skip
VIDEO2WORLD = {**COSMOS, "in_channels": 17, "extra_pos_embed_type": None}
ALLEGRO = {**HEADS, "attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 32}
LATTE = {
    **HEADS, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "cross_attention_dim": 16,
    "caption_channels": 32, "sample_size": 8, "patch_size": 2, "norm_type": "ada_norm_single",
    "num_embeds_ada_norm": 1000, "norm_elementwise_affine": False, "video_length": 3,
}  # fmt: skip
KANDINSKY = {
    "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 32, "in_text_dim2": 8, "time_dim": 16, "model_dim": 24,
    "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 3, "axes_dims": (4, 4, 4),
}  # fmt: skip
KANDINSKY6 = {**KANDINSKY, "visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4, "ca_rope": True}
ANYFLOW = {**HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "ffn_dim": 32}
# The blocks after the third have skip connections.
HUNYUAN_DIT = {
    **HEADS, "num_layers": 4, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 16,
    "hidden_size": 16, "mlp_ratio": 2.0, "cross_attention_dim": 32, "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 8, "text_len": 5, "text_len_t5": 6,
}  # fmt: skip
SIZES = {
    "ltx": (diffusers.LTXVideoTransformer3DModel, {**LTX, "caption_channels": 32}),
    "ltx2": (diffusers.LTX2VideoTransformer3DModel, LTX2),
    "ltx2.3": (diffusers.LTX2VideoTransformer3DModel, LTX23),
    "cosmos": (diffusers.CosmosTransformer3DModel, COSMOS),
    "cosmos-video2world": (diffusers.CosmosTransformer3DModel, VIDEO2WORLD),
    "allegro": (diffusers.AllegroTransformer3DModel, ALLEGRO),
    "latte": (diffusers.LatteTransformer3DModel, LATTE),
    "anyflow": (diffusers.AnyFlowTransformer3DModel, {**ANYFLOW, "freq_dim": 64, "rope_max_seq_len": 32}),
    "kandinsky5": (diffusers.Kandinsky5Transformer3DModel, KANDINSKY),
    "kandinsky6": (diffusers.Kandinsky6Transformer3DModel, KANDINSKY6),
    "hunyuan-dit": (diffusers.HunyuanDiT2DModel, HUNYUAN_DIT),
}


def packed(size, noise):
    """Arguments of LTX, whose latents are tokens already."""
    sizes = dict(zip(("num_frames", "height", "width"), size, strict=True))
    text = {"encoder_hidden_states": noise(6, 32), "encoder_attention_mask": text_mask(noise)}
    return {"hidden_states": noise(math.prod(size), 8), **sizes, **text}


def packed_with_audio(size, noise):
    audio = {"audio_hidden_states": noise(5, 4), "audio_encoder_hidden_states": noise(6, 32), "audio_num_frames": 5}
    return {**packed(size, noise), **audio, "audio_encoder_attention_mask": text_mask(noise)}


def packed_with_guidance(size, noise):
    """Arguments of LTX-2.3: the first row of a batch of two takes less of the attention in the second block."""
    arguments = packed_with_audio(size, noise)
    mask = torch.tensor([0.25, 1.0])[: len(arguments["hidden_states"])]
    return {**arguments, "sigma": noise().abs(), "spatio_temporal_guidance_blocks": [1], "perturbation_mask": mask}


def text_mask(noise):
    """A mask of a text in which the last two of six tokens are padding."""
    return (torch.arange(6) < 4).long().expand(len(noise()), -1)


def latte(size, noise):
    return {"hidden_states": noise(4, *size), "encoder_hidden_states": noise(6, 32)}


def cosmos_video2world(size, noise):
    condition = (torch.arange(size[0]) < 1).float()[:, None, None].expand(*size)
    return {**ARGUMENTS["cosmos"](size, noise), "condition_mask": condition.expand(len(noise()), 1, *size)}


def allegro(size, noise):
    """Arguments of Allegro: the pipeline computes the rotary embedding."""
    frames, height, width = size[0], size[1] // 2, size[2] // 2
    stop = ((0, 0), (height, width))
    *tables, t, h, w = get_3d_rotary_pos_embed_allegro(12, stop, (height, width), frames, (2.2, 2.0, 2.0))
    positions = torch.cartesian_prod(t.long(), h.long(), w.long()).T.reshape(3, 1, -1)
    text = {"encoder_hidden_states": noise(6, 32), "encoder_attention_mask": text_mask(noise)}
    return {"hidden_states": noise(4, *size), **text, "image_rotary_emb": (tuple(tables), tuple(positions))}


def kandinsky5(size, noise):
    """Arguments of Kandinsky 5, in whose latents the channels are last."""
    positions = [torch.arange(side) for side in (size[0], size[1] // 2, size[2] // 2)]
    texts = {"encoder_hidden_states": noise(6, 32), "pooled_projections": noise(8)}
    return {"hidden_states": noise(*size, 4), **texts, "visual_rope_pos": positions, "text_rope_pos": torch.arange(6)}


def kandinsky6(size, noise):
    texts = {"encoder_hidden_states": noise(6, 32), "pooled_projections": noise(8)}
    mask = text_mask(noise).bool()[:, None, None]
    latents = {"hidden_states": noise(*size, 4), "audio_hidden_states": noise(5, 4)}
    return {**latents, **texts, "encoder_attention_mask": mask}


def hunyuan_dit(size, noise):
    """Arguments of HunyuanDiT: the pipeline computes the rotary embedding."""
    grid = tuple(side // 2 for side in size)
    rows = len(noise())
    texts = {"encoder_hidden_states": noise(5, 32), "encoder_hidden_states_t5": noise(6, 32)}
    masks = {"text_embedding_mask": torch.ones(rows, 5).long(), "text_embedding_mask_t5": text_mask(noise)}
    sizes = {"image_meta_size": torch.full((rows, 6), 16.0), "style": torch.zeros(rows, dtype=torch.long)}
    rotary = get_2d_rotary_pos_embed(8, ((0, 0), grid), grid, output_type="pt")
    return {"hidden_states": noise(4, *size), **texts, **masks, **sizes, "image_rotary_emb": rotary}


ARGUMENTS = {
    "ltx": packed, "ltx2": packed_with_audio, "ltx2.3": packed_with_guidance,
    "cosmos": lambda size, noise: {
        "hidden_states": noise(16, *size), "encoder_hidden_states": noise(6, 32), "fps": 16},
    "cosmos-video2world": cosmos_video2world, "allegro": allegro, "latte": latte,
    "anyflow": lambda size, noise: {  # in whose latents the frames are first
        "timestep": noise(size[0]).abs(), "r_timestep": noise(size[0]).abs(),
        "hidden_states": noise(size[0], 4, *size[1:]), "encoder_hidden_states": noise(6, 32)},
    "kandinsky5": kandinsky5, "kandinsky6": kandinsky6, "hunyuan-dit": hunyuan_dit,
}  # fmt: skip
