"""Measure what a converted language model costs beside its original, by length: python -m experiments.speed

The models are a Llama with the sizes of SmolLM2-135M and its conversions with and without salient tokens, with random
weights in bf16, and with softmax in the KV heads that docs/language/heads.json lists. Measured are prompts, training steps,
and decoding with a static cache by the compiled model and, at the first batch size, without compilation. Beyond `PREFILLED`
tokens, the cache is filled with random keys and values, which take as long to read as real ones.
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

from mhla_hf.checkpoints.file_io import PathLike, write_json
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script
from mhla_hf.conversion import convert
from mhla_hf.evaluation.speed import cache_bytes, clock
from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.models.transformers_api import cache_argument, forward_cached
from mhla_hf.ops.windowed.salient import VOTE_EVERY
from mhla_hf.plots import COLORS, PALETTE, drawing

from .rows import Row, describe_setup, make_parser, markdown, parse_call

LENGTHS, BATCHES = (512, 8192, 32768), (1, 16)
PREFILL, TRAINING = (256, 512, 1024, 2048, 4096, 8192), (512, 2048)
MAX_TOKENS = 100_000  # in the caches of a batch; beyond, softmax takes many minutes
STEPS = 8  # tokens decoded per round
ROUNDS = 4  # the fastest counts
WINDOW = "window alone"  # a conversion without salient tokens
MODELS = ("softmax", WINDOW, "MHLA")
PREFILLED = 512  # tokens in a cache that a model has read; the others are random
SMOLLM2 = {  # HuggingFaceTB/SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def make_models(sizes: Mapping[str, Any], max_length: int, **settings: Any) -> dict[str, Any]:
    """Make a Llama and its conversions, by `MODELS`, with random weights in fp32 and positions for twice `max_length`."""
    torch.manual_seed(0)
    softmax = LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 2 * max_length})).eval()
    models = {"softmax": softmax, "MHLA": convert(copy.deepcopy(softmax), layers="all", **settings).eval()}
    return models | {WINDOW: convert(copy.deepcopy(softmax), layers="all", **{**settings, "salient": 0}).eval()}


def measure_passes(models: Mapping[str, Any], length: int, trains: bool = False) -> dict[str, float]:
    """Return the milliseconds of one forward pass by model, over a row of tokens; the fastest round of each counts.

    The pass fills a cache and computes the logits of the last token or, with `trains`, computes the gradients of the loss.
    """
    best = dict.fromkeys(models, float("inf"))
    for _ in range(max(2, min(ROUNDS, 10_000 // length)) + 1):
        for name, model in models.items():
            ids = random_ids(model, length, 1)
            model.requires_grad_().zero_grad()  # as loaded: what is frozen takes other, slower kernels on a CPU
            started = time.perf_counter()
            with torch.set_grad_enabled(trains):
                if trains:
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                else:
                    forward_cached(model, ids, logits_to_keep=1)
            best[name] = min(best[name], 1e3 * (clock(model.device) - started))
    return best


def count_products(models: Mapping[str, Any], length: int) -> dict[str, float]:
    """Count the multiplications of a prompt of `length` tokens by model, those of products with weights and of attention."""
    config, settings = models["softmax"].config, models["MHLA"].config.mhla
    width, queries_per_kv = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    weights = sum(x.weight.numel() for x in models["softmax"].model.modules() if isinstance(x, torch.nn.Linear))
    token = torch.arange(length, dtype=torch.float64)
    size, window = settings["block_size"], settings["window"]
    softmax_head = queries_per_kv * 2 * width * (token + 1).sum().item()
    near = queries_per_kv * 2 * width * torch.minimum(token, token % size + (window - 1) * size).add(1).sum().item()
    left = ((token // size - window + 1) * size).clamp_min(0)  # tokens that have left the window
    votes = size / VOTE_EVERY * (left > 0)
    beyond = queries_per_kv * width * (2 * left.clamp_max(settings["salient"]) + votes).sum().item()
    kept = sum(len(heads) for heads in (settings["softmax_heads"] or {}).values())
    num_heads = config.num_hidden_layers * config.num_key_value_heads
    shared = weights * length + config.vocab_size * config.hidden_size
    return {
        "softmax": shared + num_heads * softmax_head,
        "MHLA": shared + kept * softmax_head + (num_heads - kept) * (near + beyond),
    }


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


def milliseconds(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def speed_table(rows: Sequence[Row]) -> str:
    """Render the costs of decoding, a line for each length and batch size; a line of a failed row has the reason."""
    names = [name for name in MODELS if any(name in row for row in rows)]
    lines = []
    for row in rows:
        cells = [row.get("failed", "")]
        if "failed" not in row:
            cells = [milliseconds(row[name]["next token"]) for name in names]
            ratios = (row["softmax"][measure] / row["MHLA"][measure] for measure in ("next token", "bytes"))
            cells += [f"{ratio:.2f}" for ratio in ratios]
        lines.append([f"{row['length']:,}", str(row["batch"]), *cells])
    header = [*(f"{name}: next token, ms" for name in names), "MHLA: times faster", "bytes read: times fewer"]
    return markdown(["tokens", "batch", *header], lines, left=0)


def passes_table(rows: Sequence[Row], what: str) -> str:
    """Render `measure_passes` by length, with the share of multiplications if the rows have it."""
    names = [name for name in MODELS if any(name in row for row in rows)]
    header = ["tokens", *(f"{name}: {what}, ms" for name in names), "MHLA: times faster"]
    counted = all("products" in row for row in rows)
    lines = []
    for row in rows:
        line = [f"{row[key]:,.0f}" for key in ("length", *names)] + [f"{row['softmax'] / row['MHLA']:.2f}"]
        if counted:
            line.append(f"{row['products']['softmax'] / row['products']['MHLA']:.2f}")
        lines.append(line)
    return markdown([*header, "multiplications: times fewer"] if counted else header, lines, left=0)


def render_speed(record: Mapping[str, Any]) -> str:
    eager = [{**row, "batch": f"{row['batch']}, not compiled"} for row in record["eager"]]
    parts = [passes_table(record["prefill"], "prompt"), speed_table(record["rows"] + eager)]
    return "\n\n".join([*parts, passes_table(record["training"], "training step"), describe_setup(record)])


def fastest_steps(record: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the milliseconds of a step of one row by length and model, compiled or not, whichever is faster."""
    rows = [row for row in (*record["rows"], *record["eager"]) if row["batch"] == 1]
    return {
        length: {name: min(row[name]["next token"] for row in rows if row["length"] == length) for name in MODELS}
        for length in dict.fromkeys(row["length"] for row in rows)
    }


def draw_speed(record: Mapping[str, Any], path: PathLike) -> None:
    """Draw how many times faster than softmax the conversion is, by length: prompts, training steps, and the next token."""
    steps = fastest_steps(record)
    decoding = {"next token": [(length, costs["softmax"] / costs["MHLA"]) for length, costs in steps.items()]}
    passes = {
        label: [(row["length"], row["softmax"] / row["MHLA"]) for row in record[key]]
        for key, label in (("prefill", "prompt"), ("training", "training step"))
    }
    with drawing(path, figsize=(6.4, 3.8)) as (_, axes):
        axis = axes[0, 0]
        for color, (label, points) in zip(PALETTE[2:], (passes | decoding).items(), strict=False):
            axis.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
        axis.axhline(1, color=COLORS["teacher"], linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = sorted({length for points in (passes | decoding).values() for length, _ in points})
        axis.set_xticks(ticks, [f"{x:,}" for x in ticks], rotation=30)
        axis.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axis.set_title("Times as fast as softmax, by tokens")
        axis.legend(loc="upper left")


def run(args: argparse.Namespace, command: str, sizes: Mapping[str, Any] = SMOLLM2, **settings: Any) -> dict[str, Any]:
    """Measure prompts, training steps, and decoding in bf16, and write the record after each row of decoding."""
    torch.set_num_threads(args.threads)
    models = make_models(sizes, max(args.lengths), **settings)
    models = {name: model.bfloat16() for name, model in models.items()}
    record = {**describe_run(command, "cpu"), "dtype": "bf16", "prefill": [], "training": [], "rows": [], "eager": []}
    for length in args.prefill:
        products = count_products(models, length)
        record["prefill"].append({"length": length, **measure_passes(models, length), "products": products})
        print(record["prefill"][-1], flush=True)
    for length in args.training:
        record["training"].append({"length": length, **measure_passes(models, length, trains=True)})
        print(record["training"][-1], flush=True)
    for model in models.values():
        model.requires_grad_(False).zero_grad()
    cases = [(batch, length, True) for batch, length in itertools.product(args.batches, args.lengths)]
    for batch, length, is_compiled in cases + [(args.batches[0], length, False) for length in args.lengths]:
        if batch * length > MAX_TOKENS:
            continue
        costs = measure_decoding(models, length, batch, is_compiled=is_compiled)
        rows = record["rows" if is_compiled else "eager"]
        rows.append({"length": length, "batch": batch, **costs})
        print(rows[-1], flush=True)
        write_json(args.out, record)
    return record


def main() -> None:
    """Measure the conversion that keeps the KV heads of the first row of docs/language/heads.json."""
    parser = make_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens in the cache")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="rows that are decoded at once")
    parser.add_argument("--prefill", type=int, nargs="*", default=PREFILL, help="tokens of a prompt")
    parser.add_argument("--training", type=int, nargs="*", default=TRAINING, help="tokens of a training step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", default="docs/bench/speed.json", help="JSON file to write")
    args, command = parse_call(parser, "speed", None)
    rows = json.loads(Path("docs/language/heads.json").read_text(encoding="utf-8"))["rows"]
    print(render_speed(run(args, command, softmax_heads=rows[0]["softmax_heads"])))


if __name__ == "__main__":
    script(main, "speed")
