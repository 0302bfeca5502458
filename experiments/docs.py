"""Render the tables of README and docs from the JSON files of the measurements: python -m experiments.docs (`make
docs`)

A table is between two comments, `<!-- KIND FILE -->` and `<!-- end -->`. `KINDS[KIND]` renders it from FILE, a path
from the repository's root. Everything else in a document is written by hand.
"""

import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mhla_hf import convert
from mhla_hf.checkpoints.file_io import write_text
from mhla_hf.conversion.sizes import sizes_of_layers
from mhla_hf.models.derived_classes import base_classes, model_name
from mhla_hf.models.families import DIFFUSION, ENCODERS, LANGUAGE
from mhla_hf.training.recipe import read_recipe

from .attention import render_random_rank
from .bench import render_bench
from .calibrate_grids import render_calibration
from .classifiers import render_study
from .demo.figures import plot_gains
from .demo.journey import render_short
from .diffusion_peers import render_peers
from .digits_vit import render_digits
from .distill_grids import render_distilled
from .encoder import render_encoder
from .heads import BYTES_AT, render_heads
from .judge import render_lookups, render_tasks
from .recipe_costs import format_costs, render_classifiers
from .rows import describe_setup, make_parser, markdown
from .speed import draw_speed, fastest_steps, passes_table, render_speed, speed_table
from .vllm_server import render_server
from .vllm_serving import render_vllm

ROOT = Path(__file__).parents[1]
PAGES = tuple(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))
TABLE = re.compile(r"(<!-- (\w+) ([\w./-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
ADAPTER_CARD = "model_cards/checkpoints/smollm2-135m-instruct-mhla/README.md"
DOCUMENTS = tuple(
    name for name in ("README.md", ADAPTER_CARD, *PAGES) if TABLE.search((ROOT / name).read_text(encoding="utf-8"))
)
UNMEASURED = (
    "Not measured yet: no GPU was at hand. `make gpu`, on a machine with one, fills this part; no speed is claimed."
)


def render(text: str) -> str:
    """Render the tables of a document."""

    def render_table(match: re.Match[str]) -> str:
        begin, kind, file, end = match.groups()
        is_record = file.endswith(".json") and (ROOT / file).is_file()
        record = json.loads((ROOT / file).read_text(encoding="utf-8")) if is_record else None
        lines = KINDS[kind](record).strip("\n").splitlines()
        return f"{begin}\n{chr(10).join(line.rstrip() for line in lines)}\n\n{end}"

    return TABLE.sub(render_table, text)


def command_and_date(record: Mapping[str, Any]) -> str:
    return f"`{record['command']}` ({record['date']}, commit `{record['commit'][:12]}`)."


def write_documents() -> list[str]:
    changed = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        rendered = render(text)
        if rendered != text:
            write_text(ROOT / name, rendered)
            changed.append(name)
    return changed


def render_families(_: Any = None) -> str:
    """Render the model types of transformers and the transformers of diffusers that convert."""
    tables = []
    for title, families in (("language models", LANGUAGE), ("text encoders", ENCODERS)):
        types: dict[str, list[str]] = {}  # by heads
        for family in families:
            names = (name.removeprefix(model_name(family)) for name in base_classes(family))
            types.setdefault(", ".join(names), []).append(f"`{family.base}`")
        tables.append(markdown(["heads", title], [[heads, ", ".join(names)] for heads, names in types.items()], left=2))
    transformers: dict[tuple[str, str, str], list[str]] = {}  # by defaults
    for family in DIFFUSION:
        layout, layers = family.kind.defaults["layout"], family.kind.defaults["layers"]
        start = "as the base" if family.kind.linear else "text by softmax" if family.kind.joint else "locality"
        key = f"({', '.join(map(str, layout))})", layers, start
        transformers.setdefault(key, []).extend(f"`{name}`" for name in family.classes)
    lines = [[*key, ", ".join(names)] for key, names in transformers.items()]
    tables.append(markdown(["blocks", "layers", "start", "transformers of diffusers"], lines, left=4))
    return "\n\n".join(tables)


def render_kvpress(record: Mapping[str, Any]) -> str:
    """Render KL and recall by text after the shortest and the longest prompts, means over rows: a line per subject."""
    rows = record["rows"]
    lengths, texts = sorted({row["length"] for row in rows}), sorted({row["text"] for row in rows})
    measures = {"kl": ("KL", "{:.3f}"), "recall": ("recall", "{:.2f}")}
    columns = list(itertools.product(measures, (lengths[0], lengths[-1]), texts))
    lines = []
    for subject in dict.fromkeys(row["subject"] for row in rows):
        cells = [subject]
        for measure, *place in columns:
            of_cell = [row for row in rows if [row["subject"], row["length"], row["text"]] == [subject, *place]]
            values = [row[measure] for row in of_cell if measure in row]
            cells.append(measures[measure][1].format(statistics.fmean(values)) if values else "")
        lines.append(cells)
    header = ["cache", *(f"{measures[measure][0]}, {text}, {length:,}" for measure, length, text in columns)]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{markdown(header, lines)}\n\n`{record['command']}`, {record['hardware']}, {versions}, fp32."


def render_recipes(record: Mapping[str, Any]) -> str:
    """Render the recipes of the package: base, data, stages, and what they take of devices and disks."""
    lines = []
    for row in record["rows"]:
        name = row["recipe"]
        recipe = read_recipe(name)
        base = recipe.base or (f"preset {recipe.settings['preset']}" if "preset" in recipe.settings else "yours")
        stages = [f"{stage.name}: {stage.steps:,} of {stage.batch_size}" for stage in recipe.stages]
        lines.append([f"`{name}`", base, recipe.data or "yours", ", ".join(stages), *format_costs(row)])
    header = ["recipe", "base", "data", "stages: steps of samples", "devices", "peak, GB", "disk, GB"]
    return f"{markdown(header, lines, left=7)}\n\n{command_and_date(record)}"


def render_cache(_: Any = None) -> str:
    """Render the bytes of the cache of one Llama layer in bf16, before and after `convert`, counted now."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = convert(LlamaForCausalLM(config).bfloat16().eval(), layers="all")
    (layer,) = sizes_of_layers(model).values()
    lines = []
    for length in (512, 2048, 8192):
        softmax, mhla = (layer.cache_bytes(share, length) / 1024 for share in (1, 0))
        lines.append([f"{length:,}", f"{softmax:,.0f}", f"{mhla:,.0f}", f"{mhla / softmax:.2f}"])
    return markdown(["tokens", "softmax, KiB", "MHLA, KiB", "MHLA / softmax"], lines, left=0)


def draw_gains(path: Path) -> None:
    """Draw the first picture of the README from the records of speed and quality, up to the positions of SmolLM2."""
    steps = fastest_steps(json.loads((ROOT / "docs/bench/speed.json").read_text(encoding="utf-8")))
    rows = json.loads((ROOT / "docs/language/heads.json").read_text(encoding="utf-8"))["rows"]
    heads = rows[0]
    cache = {length: (heads["whole_bytes"][str(length)], heads["bytes"][str(length)]) for length in BYTES_AT}
    time = {length: (costs["softmax"], costs["MHLA"]) for length, costs in steps.items() if length <= BYTES_AT[-1]}
    quality: dict[str, dict[str, float]] = {}
    drawn = {  # label -> form and KV heads
        "MHLA": ("salient 128", 15),
        "6 heads, 256 salient tokens": ("salient 256", 6),
        "window of as many bytes": ("wide window", 15),
    }
    for label, form in drawn.items():
        of_form = (row for row in rows if (row["form"], row["heads"]) == form)
        places = next(row["places"] for row in of_form if row["text"].startswith("wiki") and row["seed"] == 0)
        quality.setdefault("softmax", {position: scores[2] for position, scores in places.items()})
        quality[label] = {position: scores[1] for position, scores in places.items()}
    titles = (
        "Time per new token\nSmolLM2-135M, one CPU thread",
        f"Cache\n{heads['heads']} of 90 KV heads keep softmax, bf16",
        "Perplexity by position\nWikiText-2 test, one seed",
    )
    plot_gains(path, time, cache, quality, titles)


def render_gpu(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return UNMEASURED
    rows = [row for row in record["language"] if "failed" not in row]
    prefill_rows = [{"length": row["length"], **row["prefill"]} for row in rows]
    kinds: dict[str, list[str]] = {}  # the largest error of each kind of call, by dtype
    for row in record["kernels"]:
        cell = row["failed"] or f"{max(row['error'].values()):.1e}"
        kinds.setdefault(row["kind"], [row["kind"]]).append(cell)
    dtypes = dict.fromkeys(row["dtype"] for row in record["kernels"])
    parts = [
        f"{command_and_date(record)} {render_bench(record)}",
        "Four layers of the size of Llama-3.2-1B's, a batch of 16, bf16, decoding in CUDA graphs:",
        speed_table(record["language"]),
        passes_table(prefill_rows, "prompt"),
        "Largest relative error of output and gradients of every kind of call, against the definition in fp64:",
        markdown(["call", *dtypes], list(kinds.values()), left=3),
    ]
    return "\n\n".join(parts)


KINDS: dict[str, Callable[[Any], str]] = {  # renders a table from its record, which is None if there is no JSON file
    "bench": lambda record: f"{command_and_date(record)} {render_bench(record)}",
    "gpu": render_gpu,
    "families": render_families,
    "cache": render_cache,
    "heads": render_heads,
    "lookups": render_lookups,
    "tasks": render_tasks,
    "recipes": render_recipes,
    "calibration": render_calibration,
    "distilled_grids": render_distilled,
    "kvpress": render_kvpress,
    "encoder": render_encoder,
    "speed": render_speed,
    "vllm": render_vllm,
    "server": render_server,
    "costs": render_classifiers,
    "journey": lambda record: f"{render_short(record)}\n\n{describe_setup(record)}",
    "diffusion_peers": render_peers,
    "digits_vit": lambda record: render_digits(record["over_seeds"]),
    "rank": render_random_rank,
    "study": render_study,
}


if __name__ == "__main__":
    make_parser(__doc__).parse_args()
    draw_gains(ROOT / "docs/gains.png")
    draw_speed(json.loads((ROOT / "docs/bench/speed.json").read_text(encoding="utf-8")), ROOT / "docs/bench/speed.png")
    print("\n".join(f"{name}: rendered" for name in write_documents()) or "All tables are up to date.")
