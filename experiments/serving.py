"""Measure what continuous batching gains: python -m experiments.serving (docs/serving.md)

Requests of many lengths are decoded greedily, one after the other by `generate`, and then together in slots. The
models are a Llama of the demo's size and its conversions, of all layers and of two of three, with random weights in
fp32.
"""

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.serving import ContinuousBatch
from mhla_hf.speed import cache_bytes
from mhla_hf.training.recipe import read_recipe

from .demo.toy import RECIPES
from .rows import describe_setup
from .speed import make_models

PROMPT_LENGTHS = (32, 512)  # tokens, the shortest and the longest
NEW_TOKENS = 64  # per request
SLOT_LENGTH = 1024  # tokens that a slot can hold
FORM: dict[str, Any] = {
    "window": 2,
    "feature_map": "hedgehog",
    "num_decays": 2,
    "free_decay": False,
    "length_power": False,
    "rope": "before",
}
ALONE, TOGETHER, COMPILED = "one by one, `generate`", "together", "together, compiled"


def answer_alone(model: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the new tokens of each prompt, from one call of `generate` per prompt."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def answer_together(batch: ContinuousBatch, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the new tokens of each prompt, from a continuous batch."""
    requests = [batch.add(prompt, NEW_TOKENS) for prompt in prompts]
    while batch.pending:
        batch.step()
    return [request.tokens for request in requests]


def measure(num_requests: int) -> list[dict[str, Any]]:
    """Time each model with each way of decoding.

    Args:
        num_requests: Number of requests, which is also the number of slots.

    Returns:
        Rows with "model", "way", "tokens_per_second" (new tokens), "equal" (whether the tokens are those of
        `generate`), and "slot_bytes" (bytes of the cache per slot; None for `generate`).
    """
    sizes = read_recipe(RECIPES / "demo_teacher.yaml").settings
    rng = random.Random(0)
    models = make_models(sizes, SLOT_LENGTH, **FORM)
    hybrid = convert(make_models(sizes, SLOT_LENGTH)["softmax"], layers="2/3", **FORM).eval()
    models["MHLA, softmax in every third layer"] = hybrid
    prompts = [[rng.randrange(256) for _ in range(rng.randint(*PROMPT_LENGTHS))] for _ in range(num_requests)]
    rows = []
    for name, model in models.items():
        model.generation_config.eos_token_id = None
        torch.compiler.reset()
        batches: dict[str, ContinuousBatch | None] = {ALONE: None}
        for way, compiled in ((TOGETHER, False), (COMPILED, True)):
            batches[way] = ContinuousBatch(model, slots=num_requests, max_length=SLOT_LENGTH, compile=compiled)
        expected = None
        for way, batch in batches.items():
            if batch is not None:
                answer_together(batch, prompts[:2])  # warm-up: compiles, and allocates the slots
            started = time.perf_counter()
            answers = answer_alone(model, prompts) if batch is None else answer_together(batch, prompts)
            seconds = time.perf_counter() - started
            expected = expected or answers
            row = {
                "model": name,
                "way": way,
                "tokens_per_second": num_requests * NEW_TOKENS / seconds,
                "equal": answers == expected,
                "slot_bytes": cache_bytes(batch.cache) / num_requests if batch else None,
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def render_serving(record: Mapping[str, Any]) -> str:
    """Render the table of docs/serving.md."""
    lines = [
        "| model | " + " | ".join((ALONE, TOGETHER, COMPILED)) + " | a slot keeps, KiB |",
        "|---" + "|---:" * 4 + "|",
    ]
    for name in dict.fromkeys(row["model"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["model"] == name]
        cells = [f"{row['tokens_per_second']:,.0f}" for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} | {rows[1]['slot_bytes'] / 1024:,.0f} |")
    shortest, longest = PROMPT_LENGTHS
    num_equal = sum(row["equal"] for row in record["rows"])
    note = (
        f"New tokens per second, {record['requests']} requests of {shortest} to {longest} tokens, "
        f"{NEW_TOKENS} new ones each. "
        f"Tokens equal to `generate`'s in {num_equal} of {len(record['rows'])} rows. {describe_setup(record)}"
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser("python -m experiments.serving", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/scale/serving.json"), help="JSON file to write")
    parser.add_argument("--requests", type=int, default=32, help="number of requests, and of slots (default: 32)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(args.requests)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    run = describe_run("python -m experiments.serving", "cpu")
    write_json(args.out, {"rows": rows, "requests": args.requests, **run})


if __name__ == "__main__":
    script(main, "serving")
