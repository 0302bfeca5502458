"""Measure what a smaller KV cache loses: kvpress' presses, and model folders, against the full cache of the same model.

kvpress 0.5.5 needs transformers < 5.3, so its rows are made in a separate environment without mhla_hf:

    pip install torch==2.13.0 kvpress==0.5.5
    python experiments/kvpress_rows.py MODEL TEXT... --out presses.json

Folders that `mhla_hf.convert` and `save_pretrained` made are measured in mhla_hf's environment, on the same tokens:

    python -m experiments.kvpress_rows MODEL TEXT... --folder STUDENT... --out folders.json

A row of a text is a prompt of L tokens and the 512 tokens after it. The model reads the prompt, a press makes the cache
smaller, and the model is fed the tokens after the prompt. A press sees the prompt alone.

- kl: KL(full cache || small cache) in nats, the mean over the 512 tokens after the prompt.
- recall: after the same prompt, the model is fed a copy of 256 tokens from its middle, [L/2, L/2 + 256). The mean
  log-probability of the copy's tokens after the first 16, which are the cue.
- kept: bytes of the cache after the prompt over those of the full cache; entries that a press masks count as freed.
- seconds: CPU time of the prefill with a press. One prefill serves all presses: their hooks are called afterwards.
"""

import argparse
import copy
import datetime
import gzip
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

LIMIT = 1_000_000  # characters of a text
AFTER, COPY, CUE = 512, 256, 16  # tokens
CHUNK = 32  # tokens that are fed at once after the prompt
FULL = "full cache"
PRESSES = ("StreamingLLM", "SnapKV", "ExpectedAttention", "AdaKV(ExpectedAttention)", "Compactor", "KVzip")
Row = dict[str, Any]
RowParts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see `row_parts`


def row_parts(ids: torch.Tensor, length: int, row: int) -> RowParts:
    """Cut a row from the token ids of a text: the prompt, the 512 tokens after it, and the copy from the prompt's middle."""
    start = row * (length + AFTER)
    prompt, after = ids[start : start + length], ids[start + length : start + length + AFTER]
    if len(after) < AFTER:
        raise ValueError(f"row {row}: got a text of {len(ids)} tokens, expected {start + length + AFTER}.")
    return prompt, after, prompt[length // 2 :][:COPY]


def divergence(teacher: torch.Tensor, logits: torch.Tensor) -> float:
    """Return KL(teacher || logits) in nats, the mean over rows of logits `[N, V]`, summed in fp64."""
    total = 0.0
    for teacher_part, part in zip(teacher.split(64), logits.split(64), strict=True):
        log_p, log_q = teacher_part.log_softmax(-1), part.log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum().item()
    return total / len(teacher)


def forward(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Run a forward pass over ids `[N]`, and return the logits and the cache with these tokens added."""
    try:
        from mhla_hf.models.transformers_api import forward_cached
    except ModuleNotFoundError:  # kvpress' environment
        output = model(input_ids=ids[None], past_key_values=cache, use_cache=True, **kwargs)
        return output.logits[0], output.past_key_values
    output, cache = forward_cached(model, ids[None], cache, **kwargs)
    return output.logits[0], cache


def prefill(model: Any, prompt: torch.Tensor) -> tuple[Any, float]:
    """Return the full cache of a prompt `[length]`, and the seconds that it took."""
    started = time.process_time()
    _, cache = forward(model, prompt, None, logits_to_keep=1)
    return cache, time.process_time() - started


def feed(model: Any, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Feed tokens `[N]`, the first at position `start`, after a copy of a cache, and return the logits `[N, V]`."""
    cache = copy.deepcopy(cache)
    logits = []
    for part in ids.split(CHUNK):
        # A pressed cache is shorter than the text before these tokens, so the model cannot infer their positions from it.
        positions = torch.arange(start, start + len(part))[None]
        part_logits, cache = forward(model, part, cache, position_ids=positions)
        logits.append(part_logits)
        start += len(part)
    return torch.cat(logits)


def judge(
    model: Any, cache: Any, after: torch.Tensor, copied: torch.Tensor, start: int, teacher: torch.Tensor | None = None
) -> tuple[dict[str, float], torch.Tensor]:
    """Measure how well a model continues from the cache of a prompt; `teacher` has the logits with the full cache. Returns
    "kl" and "recall", and the logits of `after`, `[512, V]`."""
    logits = feed(model, cache, after, start)
    copy_losses = F.cross_entropy(feed(model, cache, copied, start)[:-1], copied[1:], reduction="none")
    kl = 0.0 if teacher is None else divergence(teacher, logits)
    return {"kl": kl, "recall": -copy_losses[CUE - 1 :].mean().item()}, logits


def tensor_bytes(cache: Any) -> int:
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def press_rows(model: Any, parts: RowParts, keep: Fraction, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield names and measures of the full cache and of presses, set as in kvpress' own evaluation; entries that a press
    masks instead of removing count as removed."""
    import kvpress as kv

    ratio = float(1 - keep)
    presses = {
        "StreamingLLM": kv.StreamingLLMPress(ratio),
        "SnapKV": kv.SnapKVPress(ratio),
        "ExpectedAttention": kv.ExpectedAttentionPress(ratio),
        "AdaKV(ExpectedAttention)": kv.AdaKVPress(kv.ExpectedAttentionPress(ratio, epsilon=1e-2)),
        "Compactor": kv.CompactorPress(ratio),
        "KVzip": kv.KVzipPress(ratio),
    }
    prompt, after, copied = parts
    calls: list[tuple[Any, dict[str, Any], Any]] = []  # attention layers, their keyword arguments, and their outputs

    def add_call(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((module, kwargs, output))

    layers = [layer.self_attn for layer in model.model.layers]
    hooks = [layer.register_forward_hook(add_call, with_kwargs=True) for layer in layers]
    cache, seconds = prefill(model, prompt)
    for hook in hooks:
        hook.remove()
    for layer in layers:
        layer.masked_key_indices = None
    measures, teacher = judge(model, cache, after, copied, len(prompt))
    yield FULL, {**measures, "kept": 1.0, "seconds": seconds}
    entry_bytes = 2 * layers[0].head_dim * cache.layers[0].keys.element_size()
    for name in (name for name in names if name != FULL):
        press, small_cache = presses[name], copy.deepcopy(cache)
        for layer in layers:
            layer.masked_key_indices = None
        torch.manual_seed(0)
        started = time.process_time()
        with press(model):
            if hasattr(press, "compress_post"):  # of KVzip's kind: it works at the end of the `with`, not in layers
                press._context_ids = prompt[None]
                press._cache = small_cache
            else:
                for module, kwargs, output in calls:
                    press.forward_hook(module, [], {**kwargs, "past_key_values": small_cache}, output)
        press_seconds = time.process_time() - started
        masks = [layer.masked_key_indices for layer in layers]
        num_masked = sum(len(indices[0]) for indices in masks if indices is not None)
        kept = (tensor_bytes(small_cache) - num_masked * entry_bytes) / tensor_bytes(cache)
        row: Row
        try:
            row, _ = judge(model, small_cache, after, copied, len(prompt), teacher)
        except ValueError as error:  # kvpress masks by keys that no query of a part likes, and may find none
            row = {"failed": str(error)}
        yield name, {**row, "kept": kept, "seconds": seconds + press_seconds}


def folder_rows(teacher: Any, models: Mapping[str, Any], parts: RowParts) -> Iterator[tuple[str, Row]]:
    """Yield names and measures of the original's full cache and of converted models, for what `row_parts` returns."""
    from mhla_hf.evaluation.speed import cache_bytes

    prompt, after, copied = parts
    cache, seconds = prefill(teacher, prompt)
    full_bytes = tensor_bytes(cache)
    measures, logits = judge(teacher, cache, after, copied, len(prompt))
    yield FULL, {**measures, "kept": 1.0, "seconds": seconds}
    for name, model in models.items():
        cache, seconds = prefill(model, prompt)
        measures, _ = judge(model, cache, after, copied, len(prompt), logits)
        yield name, {**measures, "kept": cache_bytes(cache) / full_bytes, "seconds": seconds}


def describe_run(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a record says about hardware, versions, command, and settings; see `provenance.describe_run`."""
    (cpu,) = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[:1] or ["unknown CPU"]
    libraries = ("torch", "transformers", "kvpress", "mhla_hf")
    installed = {x.name.replace("-", "_"): x.version for x in importlib.metadata.distributions()}
    words = [Path(word).name if Path(word).exists() or word.endswith(".json") else word for word in sys.argv[1:]]
    return {
        "hardware": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} thread, {platform.system()}",
        "versions": {"python": platform.python_version(), **{x: installed[x] for x in libraries if x in installed}},
        "command": shlex.join(["python", "experiments/kvpress_rows.py", *words]),
        "date": datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
        "model": args.model.name,
        "dtype": "float32",
        "seed": 0,
        "tokens": {"after": AFTER, "copy": COPY, "cue": CUE, "chunk": CHUNK},
    }


@torch.no_grad()
def main() -> None:
    """Measure the rows that the file lacks: first row 0 of every text and length, then row 1, and so on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of the original, whose full cache is the teacher")
    parser.add_argument("texts", type=Path, nargs="+", help="text files, gzipped or not")
    parser.add_argument("--keep", type=Fraction, default=Fraction(1, 6), help="share of the cache that a press keeps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 7168], help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=2, help="rows of each text and length")
    parser.add_argument("--folder", type=Path, nargs="+", help="model folders to measure, and no press")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    args = parser.parse_args()
    record: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    torch.set_num_threads(1)
    teacher, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    models = {folder.name: load(folder, trust_remote_code=True) for folder in args.folder or ()}
    texts = {}
    for path in args.texts:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            ids = tokenizer(file.read(LIMIT), add_special_tokens=False, verbose=False)["input_ids"]
        texts[path.name.partition(".")[0]] = torch.tensor(ids)
    for index, length, text in itertools.product(range(args.rows), args.lengths, texts):
        keys = {"text": text, "length": length, "row": index}
        done = {row["subject"] for row in record["rows"] if keys.items() <= row.items()}
        missing = [name for name in (FULL, *(models or PRESSES)) if name not in done]
        if not missing:
            continue
        parts = row_parts(texts[text], length, index)
        if models:
            rows = folder_rows(teacher, {name: models[name] for name in missing if name != FULL}, parts)
        else:
            rows = press_rows(teacher, parts, args.keep, missing)
        for name, measures in rows:
            if name in missing:
                record.update(describe_run(args))
                record["rows"].append({**keys, "subject": name, **measures})
                partial = args.out.with_name(args.out.name + ".partial")
                partial.write_text(json.dumps(record, indent=1) + "\n")
                partial.replace(args.out)
                print(record["rows"][-1], flush=True)


def load(folder: Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


if __name__ == "__main__":
    main()
