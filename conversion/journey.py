"""The steps that `wan.py`, `sana.py` and `dit.py` share: load, convert, distill, evaluate, write the card.

Student and teacher share everything but the transformer, which is loaded twice, because `convert` works in place. If a run
was interrupted, the same command resumes it.
"""

import argparse
import copy
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import mhla_hf
from mhla_hf.checkpoints.load import load_pipeline
from mhla_hf.cli.values import parse_settings
from mhla_hf.hub.card import write_card, write_first_card
from mhla_hf.hub.facts import Person, find_license
from mhla_hf.training.recipe import read_recipe


def run(about: str, recipe: str, arguments: list[str] | None = None) -> Any:
    """Run all steps for a pipeline whose transformer converts, and return the trained pipeline.

    `about` is the docstring of the script, for `--help`, and `recipe` its default recipe.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default=recipe, help="one of `mhla-hf recipes`, or a YAML file; default: %(default)s"
    )
    parser.add_argument("--model", help="folder or Hub id of the softmax pipeline; default: the recipe's base")
    parser.add_argument("--data", help="folder or dataset of latents, or a .txt file of prompts; default: the recipe's")
    parser.add_argument("--out", required=True, type=Path, help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", help="score recipe, such as table_5_vbench, or a YAML file; default: none")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the score recipe")
    parser.add_argument("--license", help="license for the card, if the base's card states none")
    args = parser.parse_args(arguments)
    chosen_recipe = read_recipe(args.recipe)
    name = args.model or chosen_recipe.base
    if name is None:
        parser.error(f"--model: got none, expected the softmax pipeline, because {args.recipe} names no base")
    base = None if Path(name).exists() else name
    terms = find_license(base, None if base else name, args.license)  # fails now, not after the training

    is_bf16 = chosen_recipe.run.get("mixed_precision") == "bf16"
    teacher = load_pipeline(name, dtype="bfloat16" if is_bf16 else "float32", device="cpu")
    torch.manual_seed(args.seed)
    student = copy.copy(teacher)
    if "preset" in chosen_recipe.settings:
        student.register_modules(transformer=mhla_hf.MHLADiTTransformer2DModel.from_preset(**chosen_recipe.settings))
    else:
        for component in ("transformer", "transformer_2"):  # Wan 2.2 has both
            if softmax := getattr(teacher, component, None):
                transformer = type(softmax).from_pretrained(name, subfolder=component, dtype=torch.float32)
                student.register_modules(**{component: transformer})
        mhla_hf.convert(student, **chosen_recipe.settings)
    mhla_hf.distill(
        student,
        teacher if any(stage.needs_teacher for stage in chosen_recipe.stages) else None,
        out=args.out,
        data=args.data,
        recipe=args.recipe,
        seed=args.seed,
        command=shlex.join(["python", *sys.argv]),
    )

    if args.judge:
        settings = parse_settings(args.set)
        # The source in this folder is safe to run: this package has just written it.
        scores = mhla_hf.evaluate(
            args.out, recipe=args.judge, settings=settings, seed=args.seed, trust_remote_code=True
        )
        print(scores)
        write_card(args.out, name=args.out.name, base_model=base, **terms)
    else:
        write_first_card(args.out, Person(args.out.name, base, **terms))
    return student
