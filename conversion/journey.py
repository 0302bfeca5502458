"""What `wan.py`, `sana.py` and `dit.py` share: load, convert, distill, judge, card, for any pipeline that can become MHLA.

Student and teacher share everything but the transformer, which is loaded twice, because converting happens in
place. Stopped at any moment, the same command goes on.
"""

import argparse
import copy
import shlex
import sys
from pathlib import Path

import torch

import mhla_hf
from mhla_hf.checkpoints.file_io import write_text
from mhla_hf.checkpoints.load import load_pipeline
from mhla_hf.commands.values import parse_settings
from mhla_hf.share.card import plain_card, write_card
from mhla_hf.share.facts import find_license
from mhla_hf.training.recipe import read_recipe


def run(about, recipe, arguments=None):
    """The whole journey; `about` is the script's docstring, `recipe` its default. Returns the trained pipeline."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default=recipe, help="one of `mhla-hf recipes`, or a YAML file; default: %(default)s"
    )
    parser.add_argument("--model", help="folder or Hub id of the softmax pipeline; default: the recipe's base")
    parser.add_argument("--data", help="folder or dataset of latents, or a .txt file of prompts; default: the recipe's")
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", help="score recipe, such as table_5_vbench, or a YAML file; default: no judging")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one of its settings")
    parser.add_argument("--license", help="license of the card, where the base's card states none")
    given = parser.parse_args(arguments)
    recipe = read_recipe(given.recipe)
    name = given.model or recipe.base
    if name is None:
        parser.error(f"--model is needed: {given.recipe} names no base")
    base = None if Path(name).exists() else name
    terms = find_license(base, None if base else name, given.license)  # before the long work

    half = recipe.run.get("mixed_precision") == "bf16"
    teacher = load_pipeline(name, dtype="bfloat16" if half else "float32", device="cpu")
    torch.manual_seed(given.seed)
    if "preset" in recipe.settings:
        trained = mhla_hf.MHLADiTTransformer2DModel.from_preset(**recipe.settings)
    else:
        stock = type(teacher.transformer)
        trained = stock.from_pretrained(name, subfolder="transformer", dtype=torch.float32)
        mhla_hf.convert(trained, **recipe.settings)
    student = copy.copy(teacher)
    student.register_modules(transformer=trained)
    mhla_hf.distill(
        student,
        teacher if any(stage.needs_teacher for stage in recipe.stages) else None,
        out=given.out,
        data=given.data,
        recipe=given.recipe,
        seed=given.seed,
        command=shlex.join(["python", *sys.argv]),
    )

    if given.judge:
        settings = parse_settings(given.set)
        # trusted: the source in this folder was written by this package, a moment ago
        print(
            mhla_hf.evaluate(given.out, recipe=given.judge, settings=settings, seed=given.seed, trust_remote_code=True)
        )
        write_card(given.out, name=given.out.name, base_model=base, **terms)
    else:
        write_text(given.out / "README.md", plain_card(given.out, given.out.name, base, terms))
    return student
