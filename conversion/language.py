"""Turn a language model into an MHLA model: load, convert, distill from the original, save. Or train one from scratch.

    python conversion/language.py --model DIR_OR_HUB_ID --data FILE_FOLDER_OR_DATASET --out out/mine
    python conversion/language.py --recipe language_llama_lite --out out/smollm2
    torchrun --nproc_per_node 8 conversion/language.py --recipe language_340m_scratch --out out/p

If a run was interrupted, the same command resumes it. The script does what `mhla-hf distill` does; copy it and adapt it. The
teacher is a second copy of the model, because `convert` works in place.
"""

import argparse
import shlex
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import mhla_hf
from mhla_hf.cli.main import script
from mhla_hf.training.recipe import read_recipe


def main(arguments: list[str] | None = None) -> PreTrainedModel:
    """Run the script, and return the trained model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default="language_cpu", help="one of `mhla-hf recipes`, or a YAML file; default: %(default)s"
    )
    parser.add_argument("--model", help="folder or Hub id of the softmax model; default: the recipe's base")
    parser.add_argument("--data", help="file, folder or dataset to train on; default: the recipe's data")
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    recipe = read_recipe(args.recipe)
    name = args.model or recipe.base
    torch.manual_seed(args.seed)
    if "preset" in recipe.settings:
        settings = dict(recipe.settings)
        config = mhla_hf.MHLAConfig.preset(settings.pop("preset"), **settings)
        student, teacher = mhla_hf.MHLAForCausalLM(config), None
    elif name is None:
        parser.error(f"--model: got none, expected the softmax model, because {args.recipe} names no base")
    else:
        is_bf16 = recipe.run.get("mixed_precision") == "bf16"
        dtype = torch.bfloat16 if is_bf16 else torch.float32
        teacher = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
        student = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
        mhla_hf.convert(student, **recipe.settings)
    return mhla_hf.distill(
        student,
        teacher,
        out=args.out,
        data=args.data,
        tokenizer=AutoTokenizer.from_pretrained(recipe.tokenizer or name, trust_remote_code=False),
        recipe=args.recipe,
        seed=args.seed,
        command=shlex.join(["python", *sys.argv]),
    )


if __name__ == "__main__":
    script(main)
