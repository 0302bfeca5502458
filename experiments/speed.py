"""What a converted language model costs against its length: python -m experiments.speed (docs/language.md)

A Llama of the demo's size and its conversion with default settings in all layers, random weights, batch 1, fp32: prefill per
token, at once and in chunks of 2,048 tokens as `generate(prefill_chunk_size=2048)` feeds them, and one more token by a
compiled model with a static cache.
"""

import argparse
import copy
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from mhla_hf.checkpoints.files import write_json
from mhla_hf.checkpoints.machine import describe_run
from mhla_hf.cli import script
from mhla_hf.convert import convert
from mhla_hf.models.transformers_api import cache_argument, forward_cached
from mhla_hf.training.recipe import read_recipe

from .demo.journey import RECIPES
from .rows import made

LENGTHS, CHUNK, STEPS, ROUNDS = (512, 2048, 8192, 32768), 2048, 32, 5

FORM = {
    "window": 2,
    "feature_map": "hedgehog",
    "num_decays": 2,
    "free_decay": False,
    "length_power": False,
    "rope": "before",
}


def make_models(longest, **changes):
    """{"softmax": the base, "MHLA": its conversion}. changes: of the base's configuration."""
    torch.manual_seed(0)
    settings = read_recipe(RECIPES / "demo_teacher.yaml").settings | {"max_position_embeddings": 2 * longest} | changes
    base = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    return {"softmax": base, "MHLA": convert(copy.deepcopy(base), layers="all", **FORM).eval()}


def fastest(function, rounds, device):
    """Seconds of the fastest call."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


@torch.no_grad()
def measure(model, length, batch=1):
    """{"at once", "in chunks": microseconds per token of prefill; "next token": milliseconds, of the whole batch}."""
    device = model.device
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)

    def prefill(chunk):
        cache = None
        for part in ids.split(chunk, 1):
            _, cache = forward_cached(model, part, cache, logits_to_keep=1)

    rounds = max(1, min(ROUNDS, 50_000 // length))
    row = {
        what: 1e6 * fastest(lambda size=size: prefill(size), rounds, device) / length / batch
        for what, size in SIZES.items()
    }
    torch.compiler.reset()
    cache = StaticCache(config=model.config, max_cache_len=length + STEPS * (ROUNDS + 1))
    forward_cached(model, ids, cache, logits_to_keep=1)
    mode = "reduce-overhead" if device.type == "cuda" else None  # CUDA graphs
    name = cache_argument(model)
    compiled, place = torch.compile(model, fullgraph=True, dynamic=False, mode=mode), [length]

    def decode():
        for _ in range(STEPS):
            compiled(ids[:, -1:], **{name: cache}, position_ids=torch.tensor([place], device=device))
            place[0] += 1

    decode()  # compiles
    return row | {"next token": 1e3 * fastest(decode, ROUNDS, device) / STEPS}


SIZES = {"at once": 1 << 62, "in chunks": CHUNK}


def speed_table(rows):
    """A line for each length; of one that failed, why."""
    whats = {"at once": "prefill, µs per token", "in chunks": f"in chunks of {CHUNK:,}", "next token": "next token, ms"}
    lines = [
        "| tokens | " + " | ".join(f"{name}: {said}" for said in whats.values() for name in ("MHLA", "softmax")) + " |",
        "|---:" * (1 + 2 * len(whats)) + "|",
    ]
    for row in rows:
        cells = [f"{row[name][what]:.3g}" for what in whats for name in ("MHLA", "softmax")] if "MHLA" in row else []
        lines.append(f"| {row['length']:,} | {' | '.join(cells or [row['failed']])} |")
    return "\n".join(lines)


def render_speed(record):
    """The table, and how it was measured."""
    return f"{speed_table(record['rows'])}\n\n{made(record)}"


def run(out, lengths=LENGTHS, command=None):
    """Measure every length into the JSON file `out`, one thread."""
    torch.set_num_threads(1)
    models = make_models(max(lengths))
    rows = [
        {"length": length, **{name: measure(model, length) for name, model in models.items()}} for length in lengths
    ]
    record = {**describe_run(command, "cpu"), "rows": rows}
    write_json(Path(out), record)
    return record


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.speed", description=__doc__)
    parser.add_argument("--out", default="docs/language/speed.json", help="JSON file to write")
    print(render_speed(run(parser.parse_args().out, command="python -m experiments.speed")))


if __name__ == "__main__":
    script(main, "speed")
