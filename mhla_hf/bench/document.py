"""docs/performance.md from what `mhla-hf bench` has measured: python -m mhla_hf.bench.document docs

A part without a measurement says so and names the command that makes one. Besides the targets and the words on the demo
nothing here holds a figure of its own; what a cache holds is counted anew, and kept in bench/cache.json.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..checkpoints.files import file_aside, write_json
from ..patch import convert
from ..speed import cache_bytes
from . import render_bench
from .compare import FORWARD, LINEAR_BLOCK, TRAINING

PAGE = """# Performance

Made from the JSON files beside it by `python -m mhla_hf.bench.document docs`. In all of them every competitor takes its
turn in every round of one process, the fastest round of each counts, and nothing is timed before it has been compared with
its definition in fp64: of an operator output and gradients on few tokens, and of MHLA at full length some outputs of one
sequence of the batch; of decoding some tokens; of a whole model its attention.

## The operator on a CPU

Softmax is `scaled_dot_product_attention` with the backend that torch chooses, named below; on the right stand its others, up
to 4,096 tokens the one that writes all weights, and a copy of as many bytes as must move. Linear is plain linear attention
in torch, written here: in chunks as long as MHLA's blocks with a running sum over them, and one summary while decoding.

{quick}

MHLA loses where the context is short: one decoded token costs a fixed overhead in Python, and plain linear attention,
which keeps one summary and mixes nothing, decoded faster at every length measured.

### What decoding keeps

MHLA keeps every block's summary, in fp32, so its cache grows with the text, as softmax's keys and values do; plain linear
attention keeps one summary. Counted, not timed: one layer of a model with the heads of Llama-3.2-1B (32, 8 for keys and
values, width 64), converted with the default settings, bf16, batch 1.

{cache}

## Whole models

The demo's softmax and MHLA models (0.9 M parameters, batch 1) by length, measured by `mhla-hf demo` in one run; the
crossover for decoding lies between 1,024 and 4,096 tokens. Another model was being trained on the same machine meanwhile,
which shows in the decode times.

![Forward and decode time against length](demo/speed.png)

## On a GPU

{gpu}

Targets for an H200 in bf16, set before the kernels were written, in two stages where there are two numbers; to the right of
each what was measured. A row is the fastest form of MHLA; softmax is the best backend of `scaled_dot_product_attention`; the
floor is a copy of as many bytes as the call must read and write. Plain linear attention is fla's kernel in causal operators
where fla is installed ("linear fla"), else MHLA's own operator with uniform mixing ("linear ours"): one block, or causal
blocks of {linear_block:,} tokens.

{targets}

A whole step of denoising of Wan2.1-1.3B, 31,500 tokens: at least 2.1 times as fast as softmax (the paper's table 5), and no
more than 5 % slower than plain linear attention (MHLA's operator with one block). The hybrid, which has MHLA in two layers
of three, has no target.

{whole}

### The kernels of each pass

The registered forward and backward pass of these six, each beside a copy of as many bytes as the pass must read and write.
The copy's time over that of the pass is the share of the copy's bandwidth that it reaches. What fits the GPU's cache stays
there, for the copy too.

{kernels}

### Decoding on a GPU

Sixty-four tokens, one by one, after a text of 8k to 1M, where a block ends half way through them. All but MHLA's torch form
run from a CUDA graph; MHLA's kernels can, once `pin_state` of `mhla_hf.ops.triton.decode` has moved a state's positions to
the GPU: its docstring says how.

{decode}
"""
UNMEASURED = (
    "Not measured yet: no GPU was at hand. `make bench-gpu`, on a machine with one, runs the suite `{suite}` and fills\n"
    "this part. [kernels.md](kernels.md) says how the kernels are tested without one; no speed is claimed."
)
# case of the suite "paper" -> forward µs, times softmax, % of the floor, forward + backward µs; some in two stages
GPU_TARGETS = {
    "DiT-S/2 512 px, 16 blocks, batch 32": ("68, then 40", "1.6, then 2.8", "35, then 58", "180, then 150"),
    "DiT-S/2 2048 px, 16 blocks, batch 1": (23, 37, 50, 62),
    "Wan 31,500 tokens, 150 blocks": ("193, then 150", "51, then 65", "47, then 60", 520),
    "LM 2,048 tokens, K 64, V 64, blocks of 64, batch 8": (88, 1.7, 36, 233),
    "LM 8,192 tokens, K 64, V 64, blocks of 64, batch 2": (88, 6.6, 36, 233),
    "DiT-S/2 256 px, 16 blocks, batch 32": (12, 1.0, 50, 35),
}
WHOLE_CASE = "Wan2.1-1.3B, whole"
WHOLE_TARGETS = {
    "mhla": (2.1, 0.95),
    "mhla hybrid 2/3": ("", ""),
}  # times as fast as softmax, as plain linear attention


def performance_page(docs):
    """The text of performance.md for the folder `docs`: bench/ and its gpu/, kernels/ and decode/ may hold a bench.json."""
    docs = Path(docs)
    parts = {"quick": ("bench", "quick"), "gpu": ("bench/gpu", "paper")}
    parts |= {suite: (f"bench/{suite}", suite) for suite in ("kernels", "decode")}
    measured = {name: measured_part(docs, *at) for name, at in parts.items()}
    tables = {"targets": target_table(docs), "whole": whole_table(docs)}
    return PAGE.format(**tables, **measured, cache=cache_table(docs), linear_block=LINEAR_BLOCK)


def cache(lengths=(512, 1024, 4096)):
    """[tokens, bytes of softmax's keys and values, of MHLA's cache] for each of `lengths`; performance.md says of what."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    config = LlamaConfig(vocab_size=8, hidden_size=64, intermediate_size=8, num_hidden_layers=1, **heads)
    models = [LlamaForCausalLM(config).bfloat16().eval() for _ in range(2)]
    convert(models[1], layers="all")
    with torch.no_grad():
        return [
            [
                tokens,
                *(cache_bytes(model(torch.zeros(1, tokens, dtype=torch.long)).past_key_values) for model in models),
            ]
            for tokens in lengths
        ]


def cache_table(docs):
    """bench/cache.json as a table."""
    lines = ["| tokens | softmax, KiB | MHLA, KiB | MHLA / softmax |", "|---:" * 4 + "|"]
    for tokens, softmax, mhla in json.loads((docs / "bench" / "cache.json").read_text(encoding="utf-8")):
        lines.append(f"| {tokens:,} | {softmax / 1024:,.0f} | {mhla / 1024:,.0f} | {mhla / softmax:.1f} |")
    return "\n".join(lines)


def target_table(docs):
    """GPU_TARGETS as a table, each with what docs/bench/gpu/bench.json has measured of it."""
    measured = {}
    for row in gpu_rows(docs):
        kinds = {
            kind: [ms for name, ms in row["ms"].items() if name.startswith(kind)] for kind in ("mhla", "sdpa", "copy")
        }
        ours, softmax, copy = (min(found, default=None) for found in kinds.values())
        measured[row["case"], row["what"]] = (1e3 * ours, softmax and softmax / ours, copy and 100 * copy / ours)
    lines = [
        "| shape | forward µs | | times softmax | | % of the floor | | forward + backward µs | |",
        "|---" * 9 + "|",
    ]
    for case, targets in GPU_TARGETS.items():
        got = (*measured.get((case, FORWARD), (None,) * 3), measured.get((case, TRAINING), (None,))[0])
        lines.append(f"| {case} | {beside(targets, got)} |")
    return "\n".join(lines)


def gpu_rows(docs):
    """The rows of docs/bench/gpu/bench.json, none where that is missing."""
    file = docs / "bench" / "gpu" / "bench.json"
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []


def beside(targets, measured):
    """Cells of a table: each target, then what was measured of it, a number or None."""
    words = ("not measured" if x is None else f"{x:.3g}" for x in measured)
    return " | ".join(f"{target} | {word}" for target, word in zip(targets, words, strict=True))


def whole_table(docs):
    """WHOLE_TARGETS as a table, each with what was measured of it."""
    rows = [row["ms"] for row in gpu_rows(docs) if (row["case"], row["what"]) == (WHOLE_CASE, FORWARD)]
    lines = ["| form | times softmax | | times plain linear | |", "|---" * 5 + "|"]
    for form, targets in WHOLE_TARGETS.items():
        pairs = [(row.get(other), row.get(form)) for row in rows for other in ("softmax", "linear")]
        got = [theirs / ours if theirs and ours else None for theirs, ours in pairs] or [None, None]
        lines.append(f"| {form} | {beside(targets, got)} |")
    return "\n".join(lines)


def measured_part(docs, folder, suite):
    """One measurement: how it was made, its table and its plot; or that there is none."""
    file = docs / folder / "bench.json"
    if not file.exists():
        return UNMEASURED.format(suite=suite)
    record = json.loads(file.read_text(encoding="utf-8"))
    table = "\n".join(line.rstrip() for line in render_bench(record).splitlines())
    made = f"`{record['command']}` ({record['date']}, commit `{record['commit'][:12]}`)."
    caution = "Other programs may have been running:\nread the ratios, not the milliseconds."
    return f"{made} {caution}\n\n```text\n{table}\n```\n\n![The same as a plot]({folder}/bench.png)"


if __name__ == "__main__":
    write_json(Path(sys.argv[1]) / "bench" / "cache.json", cache())
    with file_aside(Path(sys.argv[1]) / "performance.md") as aside:
        aside.write_text(performance_page(sys.argv[1]), encoding="utf-8")
