"""What decoding and prefill cost a converted language model against its length: python -m experiments.speed

A Llama with the sizes of SmolLM2-135M and its conversion, with softmax in the KV heads that docs/language/heads.json kept,
random weights, bf16: prefill per token, and one more token by a compiled model with a static cache. Beyond `PREFILLED`
tokens the cache is filled with random keys and values, which cost a step as much as real ones.
"""

import argparse
import copy
import itertools
import json
import shlex
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.models.cache import MHLACacheLayer
from mhla_hf.models.transformers_api import cache_argument, forward_cached
from mhla_hf.speed import cache_bytes

from .rows import describe_setup

LENGTHS, BATCHES, PREFILL = (512, 8192, 32768), (1, 16), (512, 2048, 8192)
STEPS, ROUNDS, PREFILLED = 8, 4, 512
SMOLLM2 = {  # HuggingFaceTB/SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
HEADS = Path("docs/language/heads.json")


def make_models(sizes, longest, **settings):
    """{"softmax": a Llama of these sizes, "MHLA": its conversion}. settings: of `convert`."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes | {"max_position_embeddings": 2 * longest})).eval()
    return {"softmax": base, "MHLA": convert(copy.deepcopy(base), layers="all", **settings).eval()}


def kept_heads():
    """The KV heads that the first row of docs/language/heads.json kept: {layer: [KV head, ...]}."""
    return next(row["softmax_heads"] for row in json.loads(HEADS.read_text(encoding="utf-8"))["rows"] if row["far"])


def synchronize(device):
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure_prefill(model, length, batch=1):
    """Microseconds per token of a forward pass that fills a cache; the fastest of a few."""
    ids, best = random_ids(model, length, batch), float("inf")
    for _ in range(max(1, min(ROUNDS, 10_000 // length))):
        begun = time.perf_counter()
        forward_cached(model, ids, logits_to_keep=1)
        synchronize(model.device)
        best = min(best, time.perf_counter() - begun)
    return 1e6 * best / length / batch


def random_ids(model, length, batch):
    """Token ids `[batch, length]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def fill_cache(model, length, batch, room):
    """A static cache of `length` tokens, and room for more: the first of them read by the model, the others random."""
    cache = StaticCache(config=model.config, max_cache_len=length + room)
    first = min(length, PREFILLED)
    forward_cached(model, random_ids(model, first, batch), cache, logits_to_keep=1)
    for layer in cache.layers:
        if isinstance(layer, MHLACacheLayer):
            layer.seen_tokens.add_(length - first)
            layer = layer.softmax
        if layer is not None and length > first:
            shape = batch, layer.num_heads, length - first
            keys, values = (torch.randn(*shape, x.shape[-1]).to(x) for x in (layer.keys, layer.values))
            layer.update(keys, values)
    return cache


@torch.no_grad()
def measure_decoding(models, length, batch):
    """What one decoding step of a whole batch costs.

    Returns:
        {name: {"next token": milliseconds, of the fastest of some rounds by turns, "bytes": of weights and cache}}.
    """
    torch.compiler.reset()
    rows, steps = {}, {}
    for name, model in models.items():
        cache = fill_cache(model, length, batch, STEPS * (ROUNDS + 1))
        weights = sum(x.numel() * x.element_size() for x in model.parameters())
        rows[name] = {"next token": float("inf"), "bytes": weights + cache_bytes(cache)}
        mode = "reduce-overhead" if model.device.type == "cuda" else None  # CUDA graphs
        compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        steps[name] = decoder(compiled, {cache_argument(model): cache}, random_ids(model, 1, batch), length)
        steps[name]()  # compiles
    for _ in range(ROUNDS):
        for name, decode in steps.items():
            begun = time.perf_counter()
            decode()
            synchronize(models[name].device)
            seconds = (time.perf_counter() - begun) / STEPS
            rows[name]["next token"] = min(rows[name]["next token"], 1e3 * seconds)
    return rows


def decoder(compiled, cache, ids, length):
    """A function that decodes `STEPS` more tokens each time."""
    place = [length]

    def decode():
        for _ in range(STEPS):
            compiled(ids, **cache, position_ids=torch.tensor([place], device=ids.device))
            place[0] += 1

    return decode


def speed_table(rows):
    """A line for each length and batch; of one that failed, why."""
    names = ["MHLA: next token, ms", "softmax: next token, ms", "times faster", "bytes read: times fewer"]
    lines = ["| tokens | batch | " + " | ".join(names) + " |", "|---:" * (2 + len(names)) + "|"]
    for row in rows:
        if "failed" in row:
            cells = [row["failed"]]
        else:
            ours, theirs = row["MHLA"], row["softmax"]
            milliseconds = [x["next token"] for x in (ours, theirs)]
            cells = [f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}" for ms in milliseconds]
            cells += [f"{theirs[what] / ours[what]:.2f}" for what in ("next token", "bytes")]
        lines.append(f"| {row['length']:,} | {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_table(rows):
    """A line for each length."""
    lines = ["| tokens | MHLA: prefill, µs per token | softmax: prefill, µs per token |", "|---:" * 3 + "|"]
    for row in rows:
        lines.append(f"| {row['length']:,} | {row['MHLA']:,.0f} | {row['softmax']:,.0f} |")
    return "\n".join(lines)


def render_speed(record):
    """The tables, and how they were measured."""
    return "\n\n".join([speed_table(record["rows"]), prefill_table(record["prefill"]), describe_setup(record)])


def run(out, lengths, batches, prefill, threads, sizes=SMOLLM2, **settings):
    """Measure into the JSON file `out`. settings: of `convert`."""
    torch.set_num_threads(threads)
    models = make_models(sizes, max(lengths), **settings)
    models = {name: model.bfloat16() for name, model in models.items()}
    command = shlex.join(["python", "-m", "experiments.speed", *sys.argv[1:]])
    record = {**describe_run(command, "cpu"), "dtype": "bf16", "rows": [], "prefill": []}
    for length in prefill:
        timed = {name: measure_prefill(model, length) for name, model in models.items()}
        record["prefill"].append({"length": length, **timed})
        print(record["prefill"][-1], flush=True)
    for batch, length in itertools.product(batches, lengths):
        record["rows"].append({"length": length, "batch": batch, **measure_decoding(models, length, batch)})
        print(record["rows"][-1], flush=True)
        write_json(Path(out), record)
    return record


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.speed", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows that are decoded at once")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="docs/language/speed.json", help="JSON file to write")
    arguments = vars(parser.parse_args())
    print(render_speed(run(**arguments, softmax_heads=kept_heads(), feature_map="exp")))


if __name__ == "__main__":
    script(main, "speed")
