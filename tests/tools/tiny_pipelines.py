"""Tiny diffusers pipelines with fixed random weights, built in memory.

`PIPELINES[family]()` returns a softmax pipeline, `generate(pipe)` samples from it, and `inputs(family)` returns
arguments of its transformer.
"""

import functools

import diffusers
import torch
import transformers

from tools.tiny_grids import ARGUMENTS, SIZES
from tools.tiny_joint import JOINT_ARGUMENTS, JOINT_SIZES, image_sequence, joint_size

PROMPT = "a cat walks"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 3, "ffn_dim": 32,
    "in_channels": 16, "out_channels": 16, "text_dim": 32, "freq_dim": 64, "rope_max_seq_len": 32,
}  # fmt: skip
ANIMATE = {
    **WAN, "in_channels": 36, "image_dim": None, "motion_encoder_size": 8, "motion_style_dim": 8, "motion_dim": 4,
    "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 3,
    "motion_encoder_channel_sizes": {"4": 8, "8": 8},
}  # fmt: skip
SANA = {
    "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "caption_channels": 8, "sample_size": 32,
    "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16, "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
}  # fmt: skip
SANA_VIDEO = {
    **SANA, "patch_size": (1, 2, 2), "in_channels": 16, "out_channels": 16, "attention_head_dim": 12,
    "cross_attention_head_dim": 12, "cross_attention_dim": 24, "rope_max_seq_len": 32, "sample_size": 8,
}  # fmt: skip
DIT = {
    "sample_size": 16, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
    "in_channels": 4, "out_channels": 8,
}  # fmt: skip
PIXART = {**DIT, "caption_channels": 32, "cross_attention_dim": 16}
TRANSFORMERS = {
    "wan": (diffusers.WanTransformer3DModel, WAN),
    "wan-i2v": (diffusers.WanTransformer3DModel, {**WAN, "in_channels": 36, "image_dim": 16, "added_kv_proj_dim": 24}),
    "wan-vace": (diffusers.WanVACETransformer3DModel, {**WAN, "vace_layers": [0, 2], "vace_in_channels": 8}),
    "wan-chrono-edit": (diffusers.ChronoEditTransformer3DModel, WAN),
    "wan-animate": (diffusers.WanAnimateTransformer3DModel, ANIMATE),
    "skyreels": (diffusers.SkyReelsV2Transformer3DModel, WAN),
    "sana": (diffusers.SanaTransformer2DModel, SANA),
    "sana-video": (diffusers.SanaVideoTransformer3DModel, SANA_VIDEO),
    "dit": (diffusers.DiTTransformer2DModel, DIT),
    "pixart": (diffusers.PixArtTransformer2DModel, PIXART),
    **SIZES,
    **JOINT_SIZES,
}


def tiny_transformer(family: str, **overrides):
    """Return a transformer in eval mode, with weights so large that every layer affects the output."""
    torch.manual_seed(7)
    model_class, sizes = TRANSFORMERS[family]
    model = model_class(**{**sizes, **overrides}).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "scale_shift" not in name:
                parameter.normal_(std=0.8 * parameter[0].numel() ** -0.5)
    return model


def inputs(family: str, size=None, batch: int = 1, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(batch, *shape, generator=generator)

    sizes = TRANSFORMERS[family][1]
    if family in JOINT_ARGUMENTS:
        make = functools.partial(image_sequence, family) if isinstance(size, list) else JOINT_ARGUMENTS[family]
        return {"timestep": torch.full((batch,), 0.5), **make(size or joint_size(family), noise)}
    if family in ARGUMENTS:
        size = size or {"ltx": (3, 4, 5), "hunyuan-dit": (16, 16)}.get(family.rstrip(".23"), (3, 8, 10))
        return {"timestep": torch.full((batch,), 500.0), **ARGUMENTS[family](size, noise)}
    size = size or ((3, 8, 10) if isinstance(sizes["patch_size"], tuple) else (16, 16))
    arguments = {"hidden_states": noise(sizes["in_channels"], *size), "timestep": torch.full((batch,), 500)}
    if family == "wan-i2v":
        arguments["encoder_hidden_states_image"] = noise(7, 16)
    if family == "wan-vace":
        arguments["control_hidden_states"] = noise(8, *size)
    if family == "wan-animate":
        arguments["pose_hidden_states"] = noise(16, size[0] - 1, *size[1:])
        arguments["face_pixel_values"] = noise(3, 4 * size[0] - 7, 8, 8)
    if family == "dit":
        return {**arguments, "class_labels": torch.arange(batch) % 10}
    if family == "pixart":
        arguments["added_cond_kwargs"] = {}
    text = (512, sizes["text_dim"]) if "text_dim" in sizes else (6, sizes["caption_channels"])
    return {**arguments, "encoder_hidden_states": noise(*text)}


def gemma():
    """Return a tokenizer of single letters, and a text encoder."""
    torch.manual_seed(1)
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *LETTERS]
    sizes = {"head_dim": 4, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 64, "initializer_range": 0.5}
    config = transformers.Gemma2Config(num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=2, **sizes)
    tokenizer = transformers.GemmaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    return {"tokenizer": tokenizer, "text_encoder": transformers.Gemma2Model(config).eval()}


def t5(model_class=transformers.T5EncoderModel, config_class=transformers.T5Config):
    torch.manual_seed(1)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=0)
    return {"tokenizer": tokenizer, "text_encoder": model_class(config_class(**sizes)).eval()}


def wan_vae():
    torch.manual_seed(2)
    kind = {"dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "temperal_downsample": [False, True, True]}
    return diffusers.AutoencoderKLWan(base_dim=3, z_dim=16, **kind).eval()


def image_vae():
    torch.manual_seed(2)
    kind = {"block_out_channels": (4, 4), "norm_num_groups": 2, "latent_channels": 4, "layers_per_block": 1}
    kind |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return diffusers.AutoencoderKL(**kind, mid_block_add_attention=False).eval()


def sana_vae():
    torch.manual_seed(2)
    half = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8), "layers_per_block": (1, 1)}
    half["qkv_multiscales"] = ((), (5,))
    blocks = {f"{side}_{name}": value for name, value in half.items() for side in ("encoder", "decoder")}
    samples = {
        "downsample_block_type": "conv", "upsample_block_type": "interpolate", "decoder_norm_types": "rms_norm",
        "decoder_act_fns": "silu", "scaling_factor": 0.41407,
    }  # fmt: skip
    return diffusers.AutoencoderDC(latent_channels=4, attention_head_dim=2, **blocks, **samples).eval()


def flow():
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def umt5():
    return t5(transformers.UMT5EncoderModel, transformers.UMT5Config)


def of_parts(pipeline_class, family, vae, text=dict, scheduler=flow):
    return lambda: pipeline_class(**text(), vae=vae(), scheduler=scheduler(), transformer=tiny_transformer(family))


wan_pipeline = of_parts(diffusers.WanPipeline, "wan", wan_vae, umt5)
sana_pipeline = of_parts(diffusers.SanaPipeline, "sana", sana_vae, gemma)
dit_pipeline = of_parts(diffusers.DiTPipeline, "dit", image_vae, scheduler=diffusers.DDIMScheduler)
PIPELINES = {
    "wan": wan_pipeline,
    "sana": sana_pipeline,
    "sana-video": of_parts(diffusers.SanaVideoPipeline, "sana-video", wan_vae, gemma),
    "dit": dit_pipeline,
    "pixart": of_parts(diffusers.PixArtSigmaPipeline, "pixart", image_vae, t5, diffusers.DDIMScheduler),
}
EMBEDDINGS = torch.Generator().manual_seed(6)


def embedding(*shape: int) -> torch.Tensor:
    """Return noise that is the same in every process."""
    return torch.randn(shape, generator=EMBEDDINGS)


def texts(name="", *shape):
    """Return arguments for a prompt and the empty one, with ones for embeddings if there is no shape."""
    values = [embedding(1, *shape) if shape else torch.ones(1, 6, dtype=torch.bool) for _ in range(2)]
    return {f"{negative}{name}": value for negative, value in zip(("", "negative_"), values, strict=True)}


PROMPTED = {"max_sequence_length": 16, "use_resolution_binning": False}
EMBEDS = {"prompt": None, **texts("prompt_embeds", 6, 32)}
MASKS = texts("prompt_attention_mask")
LATENT = {"height": 64, "width": 96, "prompt": None, "output_type": "latent"}
BARE = {**LATENT, **EMBEDS}
LTX = {"height": 32, "width": 64, "num_frames": 9}
CALLS = {
    "WanPipeline": {"height": 64, "width": 80, "num_frames": 9, "max_sequence_length": 16},
    "SanaPipeline": {"height": 32, "width": 32, **PROMPTED, "complex_human_instruction": None},
    "SanaVideoPipeline": {"height": 64, "width": 96, "frames": 9, **PROMPTED, "complex_human_instruction": []},
    "DiTPipeline": {},
    "PixArtSigmaPipeline": {"height": 32, "width": 32, **PROMPTED, "clean_caption": False},
    "LTXPipeline": {**LTX, "max_sequence_length": 16},
    "LTX2Pipeline": {**BARE, **MASKS, **LTX, "spatio_temporal_guidance_blocks": [1]},
    "LattePipeline": {"height": 16, "width": 24, "video_length": 3, "clean_caption": False},
    "FluxPipeline": {"height": 32, "width": 48, **EMBEDS, "true_cfg_scale": 3.0, **texts("pooled_prompt_embeds", 8)},
    "AuraFlowPipeline": {"height": 32, "width": 48, "max_sequence_length": 16},
    "Kandinsky5T2VPipeline": {
        **{**LATENT, "num_frames": 9, **texts("prompt_embeds_qwen", 6, 32), **texts("prompt_embeds_clip", 8)},
        **{f"{name}prompt_cu_seqlens": torch.tensor([0, 6], dtype=torch.int32) for name in ("", "negative_")},
    },
    "AllegroPipeline": {
        **BARE,
        **MASKS,
        "width": 80,
        "num_frames": 12,
        "negative_prompt": None,
        "clean_caption": False,
    },
    "HunyuanDiTPipeline": {
        **{**BARE, **texts("prompt_embeds", 5, 32), **texts("prompt_embeds_2", 6, 32)},
        **{**{name: mask[:, :5] for name, mask in MASKS.items()}, **texts("prompt_attention_mask_2")},
        "use_resolution_binning": False,
    },
    "StableDiffusion3Pipeline": {**BARE, **texts("pooled_prompt_embeds", 8)},
    "QwenImagePipeline": {**BARE, **texts("prompt_embeds_mask"), "true_cfg_scale": 3.0},
    "ChromaPipeline": {**BARE, **MASKS},
    "Flux2Pipeline": {name: value for name, value in BARE.items() if "negative" not in name},
    "CogVideoXPipeline": {**BARE, "width": 80, "num_frames": 9},
    "MochiPipeline": {**BARE, **MASKS, "num_frames": 13},
    "HunyuanVideoPipeline": {
        **{name: value for name, value in {**BARE, **MASKS}.items() if "negative" not in name},
        **{"num_frames": 9, "pooled_prompt_embeds": embedding(1, 8)},
    },
}


def at_fresh_addresses(model):
    """Copy the weights of a pipeline or a transformer, whose products may be rounded differently where a file put them."""
    for component in getattr(model, "components", {"": model}).values():
        if isinstance(component, torch.nn.Module):
            for parameter in component.parameters():
                parameter.data = parameter.data.clone()
    return model


@torch.no_grad()
def generate(pipe, **overrides) -> torch.Tensor:
    """Sample by two steps with classifier-free guidance and a fixed seed, to images or videos `[N, ...]`."""
    class_name = type(pipe).__name__
    condition = {"class_labels": [3]} if class_name == "DiTPipeline" else {"prompt": PROMPT}
    call = {
        "num_inference_steps": 2, "guidance_scale": 3.0, "output_type": "np",
        "generator": torch.Generator().manual_seed(5), **condition, **CALLS[class_name], **overrides,
    }  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    result = pipe(**call)
    return torch.as_tensor(result.frames if hasattr(result, "frames") else result.images)
