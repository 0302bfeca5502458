"""Measure what decoding and prefill of a converted language model cost, by context length: python -m experiments.speed

The models are a Llama with the sizes of SmolLM2-135M and its conversion, with random weights in bf16, and with softmax in
the KV heads that docs/language/heads.json lists. Measured are prefill, per token, and decoding of one more token by a
compiled model with a static cache. Beyond `PREFILLED` tokens, the cache is filled with random keys and values, which take
as long to read as real ones.
"""

import argparse
import copy
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
from mhla_hf.evaluation.speed import cache_bytes
from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.models.transformers_api import cache_argument, forward_cached

from .rows import Row, describe_setup, make_parser, parse_call

LENGTHS, BATCHES, PREFILL = (512, 8192, 32768), (1, 16), (512, 2048, 8192)
STEPS = 8  # tokens decoded per round
ROUNDS = 4  # the fastest counts
PREFILLED = 512  # tokens in a cache that a model has read; the others are random
SMOLLM2 = {  # HuggingFaceTB/SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
HEADS = Path("docs/language/heads.json")


def make_models(sizes: Mapping[str, Any], max_length: int, **settings: Any) -> dict[str, Any]:
    """Make a Llama ("softmax") and its conversion ("MHLA"), with random weights in fp32 and twice as many positions."""
    torch.manual_seed(0)
    softmax = LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 2 * max_length})).eval()
    return {"softmax": softmax, "MHLA": convert(copy.deepcopy(softmax), layers="all", **settings).eval()}


def kept_heads() -> dict[str, list[int]]:
    """Return the KV heads that keep softmax in the first row of docs/language/heads.json with a far part, by layer."""
    rows = json.loads(HEADS.read_text(encoding="utf-8"))["rows"]
    heads: dict[str, list[int]] = next(row["softmax_heads"] for row in rows if row["far"])
    return heads


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def measure_prefill(model: Any, length: int, batch: int = 1) -> float:
    """Return the microseconds per token of a forward pass that fills a cache, in the fastest of a few rounds."""
    ids = random_ids(model, length, batch)
    best = float("inf")
    for _ in range(max(1, min(ROUNDS, 10_000 // length))):
        started = time.perf_counter()
        forward_cached(model, ids, logits_to_keep=1)
        synchronize(model.device)
        best = min(best, time.perf_counter() - started)
    return 1e6 * best / length / batch


def random_ids(model: Any, length: int, batch: int) -> torch.Tensor:
    """Return random token ids on the device of the model: int64 `[batch, length]`."""
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
def measure_decoding(models: Mapping[str, Any], length: int, batch: int) -> dict[str, dict[str, float]]:
    """Measure one decoding step of a batch after `length` tokens; the models take turns.

    Returns "next token" (milliseconds, in the fastest round) and "bytes" (of weights and cache) by model.
    """
    torch.compiler.reset()
    costs: dict[str, dict[str, float]] = {}
    steps = {}
    for name, model in models.items():
        cache = fill_cache(model, length, batch, STEPS * (ROUNDS + 1))
        weights = sum(x.numel() * x.element_size() for x in model.parameters())
        costs[name] = {"next token": float("inf"), "bytes": weights + cache_bytes(cache)}
        mode = "reduce-overhead" if model.device.type == "cuda" else None  # CUDA graphs
        compiled = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)
        steps[name] = decoder(compiled, {cache_argument(model): cache}, random_ids(model, 1, batch), length)
        steps[name]()  # compiles
    for _ in range(ROUNDS):
        for name, decode in steps.items():
            started = time.perf_counter()
            decode()
            synchronize(models[name].device)
            seconds = (time.perf_counter() - started) / STEPS
            costs[name]["next token"] = min(costs[name]["next token"], 1e3 * seconds)
    return costs


def decoder(model: Any, cache: Mapping[str, Any], ids: torch.Tensor, length: int) -> Callable[[], None]:
    """Return a function that decodes `STEPS` more tokens with each call, after `length` tokens in the cache.

    `cache` has the cache by the name of the model's argument for it; `ids` [B, 1] are fed in every step.
    """
    position = length

    def decode() -> None:
        nonlocal position
        for _ in range(STEPS):
            model(ids, **cache, position_ids=torch.tensor([[position]], device=ids.device))
            position += 1

    return decode


def speed_table(rows: Sequence[Row]) -> str:
    """Render the costs of decoding, a line for each length and batch size; a line of a failed row has the reason."""
    names = ["MHLA: next token, ms", "softmax: next token, ms", "times faster", "bytes read: times fewer"]
    lines = ["| tokens | batch | " + " | ".join(names) + " |", "|---:" * (2 + len(names)) + "|"]
    for row in rows:
        if "failed" in row:
            cells = [row["failed"]]
        else:
            mhla, softmax = row["MHLA"], row["softmax"]
            milliseconds = [costs["next token"] for costs in (mhla, softmax)]
            cells = [f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}" for ms in milliseconds]
            cells += [f"{softmax[measure] / mhla[measure]:.2f}" for measure in ("next token", "bytes")]
        lines.append(f"| {row['length']:,} | {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prefill_table(rows: Sequence[Row]) -> str:
    """Render the costs of prefill, a line for each length."""
    lines = ["| tokens | MHLA: prefill, µs per token | softmax: prefill, µs per token |", "|---:" * 3 + "|"]
    for row in rows:
        lines.append(f"| {row['length']:,} | {row['MHLA']:,.0f} | {row['softmax']:,.0f} |")
    return "\n".join(lines)


def render_speed(record: Mapping[str, Any]) -> str:
    """Render both tables, and how they were measured."""
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
    """Run the script."""
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows that are decoded at once")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="docs/language/speed.json", help="JSON file to write")
    args, command = parse_call(parser, "speed", None)
    print(render_speed(run(args, command, softmax_heads=kept_heads(), feature_map="exp")))


if __name__ == "__main__":
    script(main, "speed")
