"""The commands `mhla-hf evaluate` and `tasks`."""

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
  mhla-hf evaluate out/mhla out/teacher --recipe recall --set lengths=512,1024 --plot recall.png
  mhla-hf evaluate out/dit --trust-remote-code --recipe table_9_class_to_image --set reference=imagenet256.npz
  mhla-hf evaluate out/mhla --recipe recall --json > scores.json
Recipes: table_2_imagenet, table_4_text_to_image, table_5_vbench, table_6_language, table_8_longbench,
table_9_class_to_image, recall, ruler, speed, or a YAML file.
On several processes: accelerate launch --multi_gpu -m mhla_hf.cli.main evaluate ...
Scores are stored in results.json in each model's folder; those measured on this machine are reused.
"""
TASKS = """\
example:
  mhla-hf tasks notes.txt --tokenizer out/mhla --out tasks --window 1024
  mhla-hf evaluate out/mhla out/teacher --include-path tasks --tasks 'heldout_*'
Four tasks: bits per byte, a cloze test, recall of an earlier line (by distance), and continuing an earlier sentence.
Use a text that no model was trained on: at least 20,000 characters of prose with paragraphs.
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
    values.add_dtype_option(add)
    values.add_device_option(add)
    add("--max-length", type=int, help="longest context (default: the model's)")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--trust-remote-code", action="store_true", help="run source from the model's folder")
    add("--out", dest="output", help="a .json file, or a folder for several models (default: in the model's folder)")
    add("--force", action="store_true", help="run again even if a score exists")
    add("--trust-scores", action="store_true", help="reuse scores that were not measured on this machine")
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


def tasks_options(add: values.AddArgument) -> None:
    add("text", metavar="TEXT", help="a UTF-8 text file that the models were not trained on")
    add("--tokenizer", required=True, metavar="DIR_OR_ID", help="a model's folder or Hub id, to count tokens")
    add("--out", required=True, help="output folder, for the --include-path of mhla-hf evaluate")
    add("--name", default="heldout", dest="prefix", help="prefix of the task names (default: %(default)s)")
    add("--window", type=values.parse_count, default=512, help="longest context, in tokens (default: %(default)s)")
    add("--items", type=values.parse_count, default=150, help="questions per task (default: %(default)s)")
    add("--seed", type=values.parse_seed, default=0, help="random seed (default: 0)")


def run_tasks(text: str, tokenizer: str, out: str, command: str, progress: bool, **options: Any) -> None:
    values.check_file(text)
    values.check_model(tokenizer, weights=False)
    values.load_libraries()

    from ..checkpoints.load import load_tokenizer
    from ..data import read_text_file
    from ..evaluation.text_tasks import make_tasks

    tasks = make_tasks(read_text_file(Path(text), "text"), out, load_tokenizer(tokenizer), **options)
    print("\n".join(f"{name}: {size} documents" for name, size in tasks.sizes.items()))
    print(f"next: mhla-hf evaluate MODEL --include-path {out} --tasks '{options['prefix']}_*'")
