"""Convert checkpoints of the paper's authors to models of transformers and diffusers.

    python conversion/official_checkpoints.py checkpoint.pth --out out/deit
    python conversion/official_checkpoints.py wan.safetensors --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers --out out/wan

The model is recognized by the keys of its state dict. With --base, the result is a whole pipeline, with the checkpoint in
place of its transformer. No key is skipped: an unknown key, or a weight without a key, is an error that names it. The
released vision code normalizes in another way than the paper, so such a model gets `normalize="official"`. The part for Wan
and DiT is in `official_diffusion.py`.
"""

import argparse
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import DiTPipeline, WanPipeline
from official_diffusion import is_official_dit, is_official_wan, load_official_dit, load_official_wan

import mhla_hf
from mhla_hf import MHLAForImageClassification, MHLAVisionConfig
from mhla_hf.checkpoints.file_io import atomic_folder
from mhla_hf.checkpoints.load import no_code_prompts
from mhla_hf.cli.main import script

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
VIT_ENDS = {"patch_embed.proj": "model.stem.proj", "fc_norm": "model.norm", "norm": "model.norm", "head": "classifier"}
MIXING = "attn.piece_attn.conv.weight"


def read_state(path: str | Path) -> dict[str, torch.Tensor]:
    """Read the state dict in a .safetensors or PyTorch file, without the prefixes of DDP and torch.compile.

    If training saved several, the averaged weights (EMA) are preferred.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint: got {str(path)!r}, expected a .safetensors or PyTorch file.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    state = next((state[name] for name in WRAPPINGS if isinstance(state.get(name), dict)), state)
    unwrapped = {}
    for key, value in state.items():
        while key.startswith(PREFIXES):
            key = key.split(".", 1)[1]
        unwrapped[key.replace("._orig_mod.", ".")] = value
    return unwrapped


def is_vit(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a state dict is that of the authors' image classifier."""
    return "pos_embed" in state and f"blocks.0.{MIXING}" in state


def vit_config(
    state: Mapping[str, torch.Tensor], *, num_heads: int | None = None, image_size: int | None = None
) -> MHLAVisionConfig:
    """Read the configuration of the authors' image classifier from the shapes of its weights.

    By default, heads are 64 wide, as in all released variants. Images have as many pixels as the positions cover, except
    224 for 16 x 16 positions of patches of 16 pixels, because the authors pad 224 to 256.
    """
    num_positions, width = state["pos_embed"].shape[1:]
    patch = state["patch_embed.proj.weight"].shape[-1]
    num_blocks = len(state[f"blocks.0.{MIXING}"])
    side, blocks = math.isqrt(num_positions), math.isqrt(num_blocks)
    if side**2 != num_positions or blocks**2 != num_blocks or side % blocks:
        raise ValueError(
            f"pos_embed: got {num_positions} positions and {num_blocks} blocks, "
            "expected squares of which one divides the other."
        )
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


def rename_vit(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Translate the state dict of the authors' image classifier to the names and shapes of `MHLAForImageClassification`."""
    renamed = {}
    for key, value in state.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", key)
        module, _, kind = key.rpartition(".")
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
        elif module in VIT_ENDS and kind in ("weight", "bias"):
            renamed[f"{VIT_ENDS[module]}.{kind}"] = value
        else:
            raise ValueError(f"checkpoint: got the key {key!r}, expected only keys of the authors' image classifier.")
    return renamed


def load_vit(state: Mapping[str, torch.Tensor], **options: Any) -> MHLAForImageClassification:
    """Make the authors' image classifier an `MHLAForImageClassification` in eval mode; for options see `vit_config`."""
    for key in ("patch_embed.proj.weight", "blocks.0.attn.lepe.weight", "blocks.0.mlp.fc1.weight"):
        if key not in state:
            raise ValueError(f"checkpoint: got no key {key!r}, expected all of the authors' image classifier.")
    config, renamed = vit_config(state, **options), rename_vit(state)
    model = MHLAForImageClassification(config)
    weights = model.state_dict()
    missing, unknown = sorted(set(weights) - set(renamed)), sorted(set(renamed) - set(weights))
    if missing or unknown:
        extra = f"the weight {(unknown or [''])[0]!r}, which the model does not have"
        problem = f"no weight {missing[0]!r}" if missing else extra
        raise ValueError(f"checkpoint: got {problem}, expected the weights of every layer and no others.")
    for key, value in renamed.items():
        if value.shape != weights[key].shape:
            raise ValueError(f"checkpoint: got {key} of {tuple(value.shape)}, expected {tuple(weights[key].shape)}.")
    model.load_state_dict(renamed)
    return model.eval()


# name -> function that recognizes a state dict, function that loads it, options of the latter
FAMILIES = {
    "Wan": (is_official_wan, load_official_wan, ("layout", "norm_output")),
    "DiT": (is_official_dit, load_official_dit, ("num_heads",)),
    "image classifier": (is_vit, load_vit, ("num_heads",)),
}


def load_official(path: str | Path, **options: Any) -> Any:
    """Load a checkpoint of the authors as a model in eval mode.

    Options are what the checkpoint does not tell: `layout` and `norm_output` (Wan) or `num_heads` (the others).
    """
    state = read_state(path)
    for name, (recognizes, load, option_names) in FAMILIES.items():
        if recognizes(state):
            unknown = sorted(set(options) - set(option_names))
            if unknown:
                raise ValueError(f"{unknown[0]}: got {options[unknown[0]]}, expected none for the authors' {name}.")
            return load(state, **options)
    first_key = next(iter(state), None)
    names = " or ".join(f"the authors' {name}" for name in FAMILIES)
    raise ValueError(f"checkpoint: got keys such as {first_key!r}, expected those of {names}.")


def into_pipeline(model: Any, base: str) -> WanPipeline | DiTPipeline:
    """Load the pipeline `base`, a folder or Hub id, with `model` as its transformer."""
    pipelines = {"MHLAWanTransformer3DModel": WanPipeline, "MHLADiTTransformer2DModel": DiTPipeline}
    class_name = type(model).__name__
    if class_name not in pipelines:
        raise ValueError(f"base: got {base!r}, expected none for {class_name}, which belongs to no pipeline.")
    with no_code_prompts():
        return pipelines[class_name].from_pretrained(base, transformer=model)


def main(arguments: list[str] | None = None) -> Any:
    """Run the script, and return the model or the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", help="the authors' file, .pth or .safetensors")
    add("--out", required=True, help="folder to create")
    layout = "Wan: number of blocks per axis (frames, rows, columns); default: by their product"
    add("--layout", type=int, nargs=3, help=layout)
    norm = "Wan: trained with norm_output: true, the default of the authors' code, false in their YAML files"
    add("--norm-output", action="store_true", default=None, help=norm)
    add("--num-heads", type=int, help="DiT and image classifiers: number of heads; default: by the width")
    add("--base", help="Wan and DiT: the pipeline (folder or Hub id) that gets the transformer")
    args = parser.parse_args(arguments)
    if os.path.exists(args.out):
        raise ValueError(f"out: got {args.out!r}, which exists, expected a path where a folder can be created.")
    names = ("layout", "norm_output", "num_heads")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    model = load_official(args.checkpoint, **options)
    result = model if args.base is None else into_pipeline(model, args.base)
    with atomic_folder(args.out) as folder:
        result.save_pretrained(folder)
    print(f"{args.out}: {type(model).__name__}, {model.num_parameters():,} parameters (mhla_hf {mhla_hf.__version__})")
    return result


if __name__ == "__main__":
    script(main)
