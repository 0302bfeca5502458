"""Measure what decoding and prefill of a converted language model cost, by context length: python -m experiments.speed

The models are a Llama with the sizes of SmolLM2-135M and its conversion, with random weights in bf16, and with softmax in
the KV heads that docs/language/heads.json lists. Measured are prefill and decoding by a compiled model with a static cache.
Beyond `PREFILLED` tokens, the cache is filled with random keys and values, which take as long to read as real ones.
"""

import argparse
import copy
import functools
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script
from mhla_hf.conversion import convert
from mhla_hf.evaluation.speed import cache_bytes, clock
from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.models.transformers_api import cache_argument, forward_cached

from .rows import Row, describe_setup, make_parser, markdown, parse_call

LENGTHS, BATCHES, PREFILL = (512, 8192, 32768), (1, 16), (512, 2048, 8192)
STEPS = 8  # tokens decoded per round
ROUNDS = 4  # the fastest counts
PREFILLED = 512  # tokens in a cache that a model has read; the others are random
SMOLLM2 = {  # HuggingFaceTB/SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def make_models(sizes: Mapping[str, Any], max_length: int, **settings: Any) -> dict[str, Any]:
    """Make a Llama ("softmax") and its conversion ("MHLA"), with random weights in fp32 and twice as many positions."""
    torch.manual_seed(0)
    softmax = LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 2 * max_length})).eval()
    return {"softmax": softmax, "MHLA": convert(copy.deepcopy(softmax), layers="all", **settings).eval()}


@torch.no_grad()
def measure_prefill(model: Any, length: int) -> float:
    """Return the microseconds per token of a forward pass that fills a cache, in the fastest of a few rounds."""
    ids = random_ids(model, length, 1)
    best = float("inf")
    for _ in range(max(1, min(ROUNDS, 10_000 // length))):
        started = time.perf_counter()
        forward_cached(model, ids, logits_to_keep=1)
        best = min(best, clock(model.device) - started)
    return 1e6 * best / length


def random_ids(model: Any, length: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def fill_cache(model: Any, length: int, batch: int, num_new_tokens: int) -> StaticCache:
    """Return a static cache with `length` tokens, of which the model has read the first; the others are random."""
    cache = StaticCache(config=model.config, max_cache_len=length + num_new_tokens)
    num_read = min(length, PREFILLED)
    forward_cached(model, random_ids(model, num_read, batch), cache, logits_to_keep=1)
    for layer in cache.layers:
        if isinstance(layer, MHLACacheLayer):
            layer.seen_tokens.add_(length - num_read)
            layer = layer.softmax
        if layer is not None and length > num_read:
            shape = batch, layer.num_heads, length - num_read
            keys, values = (torch.randn(*shape, x.shape[-1]).to(x) for x in (layer.keys, layer.values))
            layer.update(keys, values)
    return cache


@torch.no_grad()
def measure_decoding(
    models: Mapping[str, Any], length: int, batch: int, rounds: int | None = None, is_compiled: bool = True
) -> dict[str, dict[str, float]]:
    """Measure one decoding step after `length` tokens: "next token" (ms) and "bytes" (of weights and cache) by model."""
    torch.compiler.reset()
    costs: dict[str, dict[str, float]] = {}
    calls: dict[str, Callable[..., Any]] = {}
    position = length
    for name, model in models.items():
        cache = fill_cache(model, length, batch, STEPS * ((rounds or ROUNDS) + 1))
        weights = sum(x.numel() * x.element_size() for x in model.parameters())
        costs[name] = {"next token": float("inf"), "bytes": weights + cache_bytes(cache)}
        mode = "reduce-overhead" if model.device.type == "cuda" else None  # CUDA graphs
        call = torch.compile(model, fullgraph=True, dynamic=False, mode=mode) if is_compiled else model
        calls[name] = functools.partial(call, random_ids(model, 1, batch), **{cache_argument(model): cache})
    for index in range((rounds or ROUNDS) + 1):  # the first compiles
        for name, call in calls.items():
            device = models[name].device
            started = time.perf_counter()
            for step in range(STEPS):
                call(position_ids=torch.tensor([[position + step]], device=device))
            seconds = (clock(device) - started) / STEPS
            if index:
                costs[name]["next token"] = min(costs[name]["next token"], 1e3 * seconds)
        position += STEPS
    return costs


def speed_table(rows: Sequence[Row]) -> str:
    """Render the costs of decoding, a line for each length and batch size; a line of a failed row has the reason."""
    names = ["MHLA: next token, ms", "softmax: next token, ms", "times faster", "bytes read: times fewer"]
    lines = []
    for row in rows:
        cells = [row.get("failed", "")]
        if "failed" not in row:
            mhla, softmax = row["MHLA"], row["softmax"]
            milliseconds = [costs["next token"] for costs in (mhla, softmax)]
            cells = [f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}" for ms in milliseconds]
            cells += [f"{softmax[measure] / mhla[measure]:.2f}" for measure in ("next token", "bytes")]
        lines.append([f"{row['length']:,}", str(row["batch"]), *cells])
    return markdown(["tokens", "batch", *names], lines, left=0)


def prefill_table(rows: Sequence[Row]) -> str:
    lines = [[f"{row[key]:,.0f}" for key in ("length", "MHLA", "softmax")] for row in rows]
    return markdown(["tokens", "MHLA: prefill, µs per token", "softmax: prefill, µs per token"], lines, left=0)


def render_speed(record: Mapping[str, Any]) -> str:
    return "\n\n".join([speed_table(record["rows"]), prefill_table(record["prefill"]), describe_setup(record)])


def run(args: argparse.Namespace, command: str, sizes: Mapping[str, Any] = SMOLLM2, **settings: Any) -> dict[str, Any]:
    """Measure decoding and prefill in bf16, and write the record after each batch size and length."""
    torch.set_num_threads(args.threads)
    models = make_models(sizes, max(args.lengths), **settings)
    models = {name: model.bfloat16() for name, model in models.items()}
    record = {**describe_run(command, "cpu"), "dtype": "bf16", "rows": [], "prefill": []}
    for length in args.prefill:
        microseconds = {name: measure_prefill(model, length) for name, model in models.items()}
        record["prefill"].append({"length": length, **microseconds})
        print(record["prefill"][-1], flush=True)
    for batch, length in itertools.product(args.batches, args.lengths):
        record["rows"].append({"length": length, "batch": batch, **measure_decoding(models, length, batch)})
        print(record["rows"][-1], flush=True)
        write_json(args.out, record)
    return record


def main() -> None:
    """Measure the conversion that keeps the KV heads of the first row of docs/language/heads.json with a far part."""
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows that are decoded at once")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="docs/language/speed.json", help="JSON file to write")
    args, command = parse_call(parser, "speed", None)
    rows = json.loads(Path("docs/language/heads.json").read_text(encoding="utf-8"))["rows"]
    heads = next(row["softmax_heads"] for row in rows if row["far"])
    print(render_speed(run(args, command, softmax_heads=heads, feature_map="exp")))


if __name__ == "__main__":
    script(main, "speed")
