"""What continuous batching brings: python -m experiments.serving (docs/serving.md)

Requests of many lengths, greedy, answered one after the other by `generate`, then together in slots; a Llama of the demo's
size and its conversion with default settings, in all layers and with softmax in one of three; random weights, fp32.
"""

import argparse
import random
import time
from pathlib import Path

import torch

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.serving import ContinuousBatch
from mhla_hf.speed import cache_bytes
from mhla_hf.training.recipe import read_recipe

from .demo.toy import RECIPES
from .rows import made
from .speed import make_models

LENGTHS, NEW, ROOM = (32, 512), 64, 1024
FORM = {
    "window": 2,
    "feature_map": "hedgehog",
    "num_decays": 2,
    "free_decay": False,
    "length_power": False,
    "rope": "before",
}
ALONE, TOGETHER, COMPILED = "one by one, `generate`", "together", "together, compiled"


def answer_alone(model, prompts):
    """The new tokens of each prompt by `generate`, one after the other."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW}
        found.append(model.generate(ids, **options)[0, len(prompt) :].tolist())
    return found


def answer_together(batch, prompts):
    """The same by a batch."""
    requests = [batch.add(prompt, NEW) for prompt in prompts]
    while batch.pending:
        batch.step()
    return [request.tokens for request in requests]


def measure(count):
    """One row of the table for each model and way: new tokens per second, and bytes kept by a slot."""
    sizes = read_recipe(RECIPES / "demo_teacher.yaml").settings
    source, models = random.Random(0), make_models(sizes, ROOM, **FORM)
    hybrid = convert(make_models(sizes, ROOM)["softmax"], layers="2/3", **FORM).eval()
    models["MHLA, softmax in every third layer"] = hybrid
    prompts = [[source.randrange(256) for _ in range(source.randint(*LENGTHS))] for _ in range(count)]
    rows = []
    for name, model in models.items():
        model.generation_config.eos_token_id = None
        torch.compiler.reset()
        batches = {ALONE: None}
        for way, compiled in ((TOGETHER, False), (COMPILED, True)):
            batches[way] = ContinuousBatch(model, slots=count, max_length=ROOM, compile=compiled)
        expected = None
        for way, batch in batches.items():
            if batch is not None:
                answer_together(batch, prompts[:2])  # compiles, makes the slots
            begun = time.perf_counter()
            found = answer_alone(model, prompts) if batch is None else answer_together(batch, prompts)
            seconds = time.perf_counter() - begun
            expected = expected or found
            row = {"model": name, "way": way, "tokens_per_second": count * NEW / seconds, "equal": found == expected}
            row["slot_bytes"] = cache_bytes(batch.cache) / count if batch else None
            rows.append(row)
            print(row, flush=True)
    return rows


def render_serving(record):
    """The table of docs/serving.md."""
    lines = [
        "| model | " + " | ".join((ALONE, TOGETHER, COMPILED)) + " | a slot keeps, KiB |",
        "|---" + "|---:" * 4 + "|",
    ]
    for name in dict.fromkeys(row["model"] for row in record["rows"]):
        own = [row for row in record["rows"] if row["model"] == name]
        cells = [f"{row['tokens_per_second']:,.0f}" for row in own]
        lines.append(f"| {name} | {' | '.join(cells)} | {own[1]['slot_bytes'] / 1024:,.0f} |")
    count, (shortest, longest) = record["requests"], LENGTHS
    said = f"New tokens per second, {count} requests of {shortest} to {longest} tokens, {NEW} new ones each."
    equal = sum(row["equal"] for row in record["rows"])
    said += f" Tokens equal to `generate`'s in {equal} of {len(record['rows'])} rows. {made(record)}"
    return "\n".join([*lines, "", said])


def main():
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/scale/serving.json"))
    parser.add_argument("--requests", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.requests)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made_now = describe_run("python -m experiments.serving", "cpu")
    write_json(arguments.out, {"rows": rows, "requests": arguments.requests, **made_now})


if __name__ == "__main__":
    script(main, "serving")
