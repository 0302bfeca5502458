"""Checkpoints in the authors' naming become models of transformers and diffusers, every key accounted for.

    python conversion/official_checkpoints.py checkpoint.pth --out out/deit
    python conversion/official_checkpoints.py wan.safetensors --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers --out out/wan

With --base the result is a whole pipeline: the checkpoint in place of that pipeline's transformer. What a file holds is
recognized by its keys. Nothing is skipped; a key that has no place, or a place without a key, is an error that
names it (Wan and DiT: `official_diffusion.py`). The released vision code normalizes otherwise than the paper
(`normalize="official"`), so that is what such a model gets.
"""

import argparse
import math
import os
import re
from pathlib import Path

import torch
from diffusers import DiTPipeline, WanPipeline
from official_diffusion import is_official_dit, is_official_wan, load_official_dit, load_official_wan

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.checkpoints.file_io import atomic_folder
from mhla_hf.checkpoints.load import no_code_prompts
from mhla_hf.cli import script

WRAPPINGS = ("state_dict_ema", "ema", "state_dict", "model")
PREFIXES = ("module.", "_orig_mod.")
VIT_BLOCK = {
    "norm1": "norm1",
    "attn.norm": "attn.norm",
    "attn.q_norm": "attn.q_norm",
    "attn.k_norm": "attn.k_norm",
    "attn.lepe": "attn.mhla.cpe.conv",
    "attn.to_out.0": "attn.o_proj",
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
VIT_ENDS = {
    "patch_embed.proj": "model.stem.proj",
    "fc_norm": "model.norm",
    "norm": "model.norm",
    "head": "classifier",
}
MIXING = "attn.piece_attn.conv.weight"


def read_state(path) -> dict[str, torch.Tensor]:
    """The weights in a .safetensors or PyTorch file, averaged ones (EMA) first, without the wrappings of training."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint: got {str(path)!r}, expected a .safetensors or PyTorch file.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    state = next((state[name] for name in WRAPPINGS if isinstance(state.get(name), dict)), state)
    clean = {}
    for key, value in state.items():
        while key.startswith(PREFIXES):
            key = key.split(".", 1)[1]
        clean[key.replace("._orig_mod.", ".")] = value
    return clean


def is_vit(state) -> bool:
    """Whether these are the keys of the authors' image classifier."""
    return "pos_embed" in state and f"blocks.0.{MIXING}" in state


def vit_config(state, *, num_heads=None, image_size=None) -> MHLAVisionConfig:
    """The configuration of the authors' image classifier, read from the shapes of its weights.

    num_heads: default: heads of 64, as all released variants have. image_size: default: 224 for 256 positions, since the
    authors pad 224 to 256, and else the side that the positions cover.
    """
    tokens, width = state["pos_embed"].shape[1:]
    patch = state["patch_embed.proj.weight"].shape[-1]
    count = len(state[f"blocks.0.{MIXING}"])
    side, blocks = math.isqrt(tokens), math.isqrt(count)
    if side**2 != tokens or blocks**2 != count or side % blocks:
        raise ValueError(f"pos_embed: got {tokens} positions and {count} blocks, expected squares that divide.")
    if image_size is None:
        image_size = 224 if (side, patch) == (16, 16) else side * patch
    kernel = state["blocks.0.attn.lepe.weight"].shape[-1]
    return MHLAVisionConfig(
        image_size=image_size,
        patch_size=patch,
        num_channels=state["patch_embed.proj.weight"].shape[1],
        hidden_size=width,
        num_hidden_layers=1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks.")),
        num_attention_heads=num_heads or max(1, width // 64),
        num_labels=len(state["head.weight"]) if "head.weight" in state else 0,
        mlp_ratio=len(state["blocks.0.mlp.fc1.weight"]) / width,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        qkv_bias="blocks.0.attn.to_qkv.bias" in state,
        input_norm=True,
        pool_first="fc_norm.weight" in state,
        drop_path_rate=0.0,
        mhla={"layout": [blocks, blocks], "normalize": "official", "mixing_form": "free", "cpe": kernel},
    )


def rename_vit(state) -> dict[str, torch.Tensor]:
    """The authors' names and shapes of an image classifier's weights as ours; ValueError for a key without a place."""
    renamed = {}
    for key, value in state.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", key)
        end, _, kind = key.rpartition(".")
        if key == "pos_embed":
            side = math.isqrt(value.shape[1])
            renamed["model.positions.weight"] = value.mT.unflatten(2, (side, side)).contiguous()
        elif block and block[2] == "attn.to_qkv":
            for name, part in zip("qkv", value.chunk(3), strict=True):
                renamed[f"model.stages.0.blocks.{block[1]}.attn.{name}_proj.{block[3]}"] = part.clone()
        elif block and f"{block[2]}.{block[3]}" == MIXING:
            renamed[f"model.stages.0.blocks.{block[1]}.attn.mhla.mixing.weight"] = value.float().flatten(1)
        elif block and block[2] in VIT_BLOCK:
            renamed[f"model.stages.0.blocks.{block[1]}.{VIT_BLOCK[block[2]]}.{block[3]}"] = value
        elif end in VIT_ENDS and kind in ("weight", "bias"):
            renamed[f"{VIT_ENDS[end]}.{kind}"] = value
        else:
            raise ValueError(f"checkpoint: got the key {key!r}, which has no place in the authors' image classifier.")
    return renamed


def load_vit(state, **options) -> MHLAForImageClassification:
    """The authors' image classifier as `MHLAForImageClassification`, in eval mode; strict on keys and shapes."""
    for needed in ("patch_embed.proj.weight", "blocks.0.attn.lepe.weight", "blocks.0.mlp.fc1.weight"):
        if needed not in state:
            raise ValueError(f"checkpoint: misses the key {needed!r}, expected all of the authors' image classifier.")
    config, renamed = vit_config(state, **options), rename_vit(state)
    model = MHLAForImageClassification(config)
    own = model.state_dict()
    missing, surplus = sorted(set(own) - set(renamed)), sorted(set(renamed) - set(own))
    if missing or surplus:
        what = f"misses {missing[0]!r}" if missing else f"has {surplus[0]!r}, which the model has not"
        raise ValueError(f"checkpoint: {what}, expected the weights of every layer and no others.")
    for key, value in renamed.items():
        if value.shape != own[key].shape:
            raise ValueError(f"checkpoint: {key} is {tuple(value.shape)}, expected {tuple(own[key].shape)}.")
    model.load_state_dict(renamed)
    return model.eval()


# name -> is it that, load it, which options it takes
FAMILIES = {
    "Wan": (is_official_wan, load_official_wan, ("layout", "norm_output")),
    "DiT": (is_official_dit, load_official_dit, ("num_heads",)),
    "image classifier": (is_vit, load_vit, ("num_heads",)),
}


def load_official(path, **options):
    """The model in a checkpoint of the authors; ValueError, one sentence, if it is none or not whole.

    options: layout and norm_output (Wan) or num_heads (the others), where the checkpoint does not say it.
    """
    state = read_state(path)
    for name, (fits, load, known) in FAMILIES.items():
        if fits(state):
            foreign = sorted(set(options) - set(known))
            if foreign:
                raise ValueError(f"{foreign[0]}: got {options[foreign[0]]}, expected none for the authors' {name}.")
            return load(state, **options)
    first, known = next(iter(state), None), [f"the authors' {name}" for name in FAMILIES]
    raise ValueError(f"checkpoint: got keys such as {first!r}, expected those of {' or '.join(known)}.")


def into_pipeline(model, base: str):
    """The pipeline `base`, a folder or a repository, with `model` as its transformer."""
    pipelines = {"MHLAWanTransformer3DModel": WanPipeline, "MHLADiTTransformer2DModel": DiTPipeline}
    kind = type(model).__name__
    if kind not in pipelines:
        raise ValueError(f"base: got {base!r}, expected none for {kind}, which belongs to no pipeline.")
    with no_code_prompts():
        return pipelines[kind].from_pretrained(base, transformer=model)


def main(arguments=None):
    """Run the script; returns the model, or the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="the authors' file, .pth or .safetensors")
    parser.add_argument("--out", required=True, help="folder to make")
    parser.add_argument(
        "--layout", type=int, nargs=3, help="Wan: blocks of frames, rows and columns; default: by their number"
    )
    parser.add_argument(
        "--norm-output",
        action="store_true",
        default=None,
        help="Wan: trained with norm_output: true, the default of the authors' code, which their two yamls turn off",
    )
    parser.add_argument("--num-heads", type=int, help="DiT and image classifiers; default: by the width")
    parser.add_argument("--base", help="Wan and DiT: the pipeline (folder or repository) that gets the transformer")
    given = parser.parse_args(arguments)
    if os.path.exists(given.out):
        raise ValueError(f"out: got {given.out!r}, which exists, expected a path where a folder can be made.")
    names = ("layout", "norm_output", "num_heads")
    options = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    model = load_official(given.checkpoint, **options)
    result = model if given.base is None else into_pipeline(model, given.base)
    with atomic_folder(given.out) as folder:
        result.save_pretrained(folder)
    print(f"{given.out}: {type(model).__name__}, {model.num_parameters():,} parameters (mhla_hf {mhla_hf.__version__})")
    return result


if __name__ == "__main__":
    script(main)
