"""The command `mhla-hf evaluate`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ..checkpoints.file_io import check_writable, find_yaml
from . import values

SCORE_RECIPES = Path(__file__).parents[1] / "evaluation" / "recipes"

EVALUATE = """\
example:
  mhla-hf evaluate out/mhla out/teacher --tasks arc_easy,wikitext --batch-size 16
  mhla-hf evaluate out/mhla out/teacher --recipe table_6_language          laid out like the paper's table
  mhla-hf evaluate out/mhla out/teacher --recipe recall --set lengths=512,1024 --set text=notes.txt --plot recall.png
  mhla-hf evaluate out/dit --trust-remote-code --recipe table_9_class_to_image --set reference=imagenet256.npz
  mhla-hf evaluate out/mhla --recipe recall --json > scores.json
Recipes: table_2_imagenet, table_4_text_to_image, table_5_vbench, table_6_language, table_8_longbench,
table_9_class_to_image, recall, ruler, speed, or a YAML file.
On several processes: accelerate launch --multi_gpu -m mhla_hf.cli.main evaluate ...
Scores are stored in results.json in each model's folder, and reused.
"""


def evaluate_options(add: values.AddArgument) -> None:
    add("models", nargs="+", metavar="DIR", help="folders or Hub ids, compared side by side")
    add("--tasks", help="lm-eval tasks, groups, or patterns, separated by commas; or some of the recipe's tasks")
    add("--recipe", help="name or YAML file of a score recipe: tasks, shots, protocol")
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="a setting of the recipe")
    add("--include-path", action="append", metavar="FOLDER", help="folder with more tasks")
    add("--data-files", metavar="FOLDER", help="read TASK.jsonl or TASK.jsonl.gz from here instead of the Hub")
    add("--num-fewshot", type=int, help="examples in the prompt (default: the task's)")
    add("--limit", type=values.parse_value, help="documents per task, or a fraction below 1, for a quick try")
    add("--batch-size", default=8, type=values.parse_value, help='batch size, or "auto" (default: 8)')
    add("--seed", type=values.parse_seed, help="random seed (default: lm-eval's own)")
    add("--dtype", **values.DTYPE)
    add("--device", help="as torch names it (default: cuda if there is one, else cpu)")
    add("--max-length", type=int, help="longest context (default: the model's)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--trust-remote-code", action="store_true", help="run source from the model's folder")
    add("--out", dest="output", help="a .json file, or a folder for several models (default: in the model's folder)")
    add("--force", action="store_true", help="run again even if a score exists")
    style = {"dest": "style", "action": "store_const", "default": "text"}
    add("--markdown", const="markdown", help="print the table as Markdown", **style)
    add("--json", const="json", help="print every score, with its provenance, as JSON", **style)
    add("--plot", metavar="PNG", help="plot the scores")


def run_evaluate(
    models: list[str], settings: list[str], style: str, plot: str | None, command: str, **options: Any
) -> None:
    parsed_settings = values.parse_settings(settings)
    if options["recipe"] is not None:
        find_yaml(options["recipe"], SCORE_RECIPES, "recipe")
    if plot is not None:
        check_writable(plot, "plot")
        if os.path.isdir(plot):
            raise ValueError(f"plot: got {plot!r}, which is a folder, expected a PNG file.")
    for model in models:
        values.check_model(model, options["revision"])
    values.load_libraries()

    from ..evaluation.runner import evaluate

    compared = evaluate(models, settings=parsed_settings, **options)
    if int(os.environ.get("RANK", "0")):
        return  # only the main process has the scores
    if style == "json":
        scores = {name: [dataclasses.asdict(record) for record in records] for name, records in compared.items()}
        print(json.dumps(scores, indent=2))
    else:
        print("\n\n".join(table for table in (compared.table(style), compared.paper_table(style)) if table))
    if plot:
        compared.plot(plot)
