"""What a smaller KV cache loses: kvpress' presses, and model folders, against the full cache of the same model.

kvpress 0.5.5 needs transformers < 5.3, so its rows are made in an environment of its own, which lacks mhla_hf:

    pip install torch==2.13.0 kvpress==0.5.5
    python experiments/kvpress_rows.py MODEL TEXT... --out presses.json
    python experiments/kvpress_rows.py MODEL TEXT... --out presses.json --show

Folders that `mhla_hf.convert` and `save_pretrained` made are measured in mhla_hf's environment, on the same tokens:

    python -m experiments.kvpress_rows MODEL TEXT... --folder STUDENT... --out folders.json

MODEL is the folder of the original, with its tokenizer. A row of a text is a prompt of L tokens and the 512 tokens that
follow it. The prompt is prefilled, the cache is made small, and what follows is fed to the model as it stands in the
text. A press sees the prompt alone: it is told nothing of what follows, as is the case when a language model writes.

- kl: KL(full cache || small cache) in nats, the mean over the 512 tokens that are fed after the prompt.
- perplexity: of these tokens but the first, which the prompt's last token predicts, with no press at work yet.
- recall: after the same prompt, the model is fed a copy of 256 tokens from its middle, [L/2, L/2 + 256). The mean log
  probability of the copy's tokens after its first 16, which are the cue.
- kept: bytes of the cache after the prompt, as a share of the full cache's. AdaKV, CriticalAdaKV and KVzip evict a
  number of its own from every head. kvpress masks these entries and does not free them: here, they count as freed.
- press_seconds: what a press adds to prefill_seconds. Presses do not change what prefill computes, so one prefill serves
  all of them: their forward hooks are called afterwards, with what the layers gave and got. Seconds are CPU time.

Nothing is drawn but by a few presses, from seed 0. A row that the file has is not made again.
"""

import argparse
import copy
import datetime
import gzip
import importlib.metadata
import itertools
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from fractions import Fraction
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

LIMIT = 1_000_000  # characters of a text
AFTER, COPY, CUE = 512, 256, 16  # tokens
CHUNK = 32  # tokens that are fed at once after the prompt
FULL = "full cache"
MEASURES = {
    "kl": ("KL from the full cache, nats", "{:.3f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "recall": ("recall, mean log probability", "{:.2f}"),
    "kept": ("cache that is kept", "{:.3f}"),
    "prefill_seconds": ("seconds of the prefill, with the press", "{:.1f}"),
    "after_seconds": ("seconds of the 512 tokens after it", "{:.1f}"),
}
PRESSES = ("StreamingLLM", "SnapKV", "ExpectedAttention", "AdaKV(ExpectedAttention)", "Compactor", "KVzip")


def read_text(path):
    """The first million characters of a text file, gzipped or not."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return file.read(LIMIT)


def text_name(path):
    """`moby_dick` for moby_dick.txt.gz."""
    return path.name.partition(".")[0]


def tokenize(tokenizer, path):
    """Token ids `[N]` of a text, with nothing added."""
    return torch.tensor(tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"])


def row_parts(ids, length, row):
    """The prompt `[length]`, what follows it `[512]`, and the copy of 256 tokens from the prompt's middle.

    Row i begins at token i * (length + 512) of the text.
    """
    start = row * (length + AFTER)
    prompt, after = ids[start : start + length], ids[start + length : start + length + AFTER]
    if len(after) < AFTER:
        raise ValueError(f"row {row}: got a text of {len(ids)} tokens, expected {start + length + AFTER}.")
    return prompt, after, prompt[length // 2 :][:COPY]


def token_log_probs(logits, ids):
    """Log probabilities `[N - 1]` of ids[1:], from the logits `[N, V]` that ids gave."""
    return -torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")


def divergence(teacher, logits):
    """KL(teacher || logits) in nats, the mean over rows of logits `[N, V]`, in fp64 sums."""
    total = 0.0
    for expected, found in zip(teacher.split(64), logits.split(64), strict=True):
        expected, found = expected.log_softmax(-1), found.log_softmax(-1)
        total += (expected.exp() * (expected - found)).sum(-1).double().sum().item()
    return total / len(teacher)


def forward(model, ids, cache, **kwargs):
    """One forward pass over `ids` `[N]` that continues `cache`, or starts one: the logits `[.., V]` and the cache."""
    try:
        from mhla_hf.models.transformers_api import forward_cached
    except ModuleNotFoundError:  # kvpress' environment
        output = model(input_ids=ids[None], past_key_values=cache, use_cache=True, **kwargs)
        return output.logits[0], output.past_key_values
    output, cache = forward_cached(model, ids[None], cache, **kwargs)
    return output.logits[0], cache


def prefill(model, prompt):
    """The full cache of a prompt, and the seconds it took."""
    begun = time.process_time()
    _, cache = forward(model, prompt, None, logits_to_keep=1)
    return cache, time.process_time() - begun


def feed(model, cache, ids, start):
    """Logits `[N, V]` of `ids`, which stand at position `start`, after a copy of the cache; and the seconds it took."""
    cache, found, begun = copy.deepcopy(cache), [], time.process_time()
    for part in ids.split(CHUNK):
        # A pressed cache is shorter than what it stands for, so the positions have to be said.
        logits, cache = forward(model, part, cache, position_ids=torch.arange(start, start + len(part))[None])
        found.append(logits)
        start += len(part)
    return torch.cat(found), time.process_time() - begun


def judge(model, cache, after, copied, start, teacher=None):
    """The measures of a cache, and its logits of what follows; those of the full cache are `teacher`."""
    logits, seconds = feed(model, cache, after, start)
    recalled, _ = feed(model, cache, copied, start)
    return {
        "kl": 0.0 if teacher is None else divergence(teacher, logits),
        "perplexity": math.exp(-token_log_probs(logits, after).mean().item()),
        "recall": token_log_probs(recalled, copied)[CUE - 1 :].mean().item(),
        "after_seconds": seconds,
    }, logits


def tensor_bytes(cache):
    """Bytes of the keys and values of a cache of softmax layers."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def make_presses(ratio):
    """name -> press that evicts `ratio` of the cache, set as in kvpress' own evaluation; none needs trained weights."""
    import kvpress as kv

    return {
        "StreamingLLM": kv.StreamingLLMPress(ratio),
        "SnapKV": kv.SnapKVPress(ratio),
        "AdaKV(SnapKV)": kv.AdaKVPress(kv.SnapKVPress(ratio)),
        "ExpectedAttention": kv.ExpectedAttentionPress(ratio),
        "AdaKV(ExpectedAttention)": kv.AdaKVPress(kv.ExpectedAttentionPress(ratio, epsilon=1e-2)),
        "CriticalAdaKV(ExpectedAttention)": kv.CriticalAdaKVPress(kv.ExpectedAttentionPress(ratio, use_vnorm=False)),
        "KeyDiff": kv.KeyDiffPress(ratio),
        "Compactor": kv.CompactorPress(ratio),
        "KVzip": kv.KVzipPress(ratio),
    }


def prefill_watched(model, prompt):
    """`prefill`, and what each attention layer was called with."""
    calls, hooks = [], []
    for layer in model.model.layers:
        hook = lambda module, args, kwargs, output: calls.append((module, kwargs, output))  # noqa: E731
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    try:
        return *prefill(model, prompt), calls
    finally:
        for hook in hooks:
            hook.remove()


def press_cache(model, press, prompt, cache, calls):
    """What a press makes of the full cache, the seconds it took, and the share of the cache that it keeps.

    The entries that it masks, if that is how it evicts, are noted in the model's layers, as kvpress does.
    """
    full, cache = tensor_bytes(cache), copy.deepcopy(cache)
    for module, _, _ in calls:
        module.masked_key_indices = None
    torch.manual_seed(0)
    begun = time.process_time()
    with press(model):
        if hasattr(press, "compress_post"):  # of the KVzip kind: it works at the end of the `with`, not in layers
            press._context_ids, press._cache = prompt[None], cache
        else:
            for module, kwargs, output in calls:
                press.forward_hook(module, [], {**kwargs, "past_key_values": cache}, output)
    seconds = time.process_time() - begun
    masked = sum(len(module.masked_key_indices[0]) for module, _, _ in calls if module.masked_key_indices is not None)
    entry = 2 * calls[0][0].head_dim * cache.layers[0].keys.element_size()
    return cache, seconds, (tensor_bytes(cache) - masked * entry) / full


def press_rows(model, parts, keep, names):
    """Yield (name, measures) of the full cache and of presses, for one row of a text."""
    prompt, after, copied = parts
    cache, seconds, calls = prefill_watched(model, prompt)
    presses = make_presses(float(1 - keep))
    for module, _, _ in calls:
        module.masked_key_indices = None
    measures, teacher = judge(model, cache, after, copied, len(prompt))
    yield FULL, {**measures, "kept": 1.0, "prefill_seconds": seconds}
    for name in names:
        if name == FULL:
            continue
        small, added, kept = press_cache(model, presses[name], prompt, cache, calls)
        try:
            measures, _ = judge(model, small, after, copied, len(prompt), teacher)
        except ValueError as error:  # kvpress masks by keys that no query of a part likes, and may find none
            measures = {"failed": str(error)}
        yield name, {**measures, "kept": kept, "prefill_seconds": seconds, "press_seconds": added}


def folder_rows(teacher, models, parts, saved):
    """Yield (name, measures) of the full cache and of `models` by name; `saved`: the file of the teacher's part, or None."""
    from mhla_hf.speed import cache_bytes

    prompt, after, copied = parts
    if saved and saved.exists():
        full = torch.load(saved)
    else:
        cache, seconds = prefill(teacher, prompt)
        measures, logits = judge(teacher, cache, after, copied, len(prompt))
        measures |= {"kept": 1.0, "prefill_seconds": seconds}
        full = {"measures": measures, "logits": logits, "bytes": tensor_bytes(cache), "ids": torch.cat(parts)}
        if saved:
            saved.parent.mkdir(parents=True, exist_ok=True)
            torch.save(full, saved)
    if not torch.equal(full["ids"], torch.cat(parts)):
        raise ValueError(f"{saved.name}: made of other tokens; expected a folder of its own for each teacher.")
    yield FULL, full["measures"]
    for name, model in models.items():
        cache, seconds = prefill(model, prompt)
        measures, _ = judge(model, cache, after, copied, len(prompt), full["logits"])
        yield name, {**measures, "kept": cache_bytes(cache) / full["bytes"], "prefill_seconds": seconds}


def describe_run(args):
    """What a record says of how it was made."""
    cpu, info = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.partition(":")[2].strip() for line in info.open() if line.startswith("model name")), cpu)
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "kvpress", "mhla_hf"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    words = [Path(word).name if Path(word).exists() or word.endswith(".json") else word for word in sys.argv[1:]]
    return {
        "hardware": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} thread, {platform.system()}",
        "versions": versions,
        "command": shlex.join(["python", "experiments/kvpress_rows.py", *words]),
        "date": datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
        "model": args.model.name,
        "dtype": "float32",
        "seed": 0,
        "tokens": {"after": AFTER, "copy": COPY, "cue": CUE, "chunk": CHUNK},
    }


def render(record):
    """Tables in Markdown, one per measure: subjects by texts and lengths, means over rows."""
    rows = [{**row, "prefill_seconds": row["prefill_seconds"] + row.get("press_seconds", 0)} for row in record["rows"]]
    columns = sorted({(row["text"], row["length"]) for row in rows}, key=lambda column: (column[1], column[0]))
    subjects = list(dict.fromkeys((row["subject"], row.get("keep")) for row in rows))
    keeps = {keep for _, keep in subjects if keep}
    lines = []
    for measure, (title, form) in MEASURES.items():
        lines += [f"| {title} | " + " | ".join(f"{text}, {length:,}" for text, length in columns) + " |"]
        lines += ["|---" + "|---:" * len(columns) + "|"]
        for subject, keep in subjects:
            own = [row for row in rows if (row["subject"], row.get("keep")) == (subject, keep) and measure in row]
            found = [[row[measure] for row in own if (row["text"], row["length"]) == column] for column in columns]
            cells = [form.format(statistics.fmean(values)) if values else "" for values in found]
            if any(cells):
                name = f"{subject}, keep {keep}" if keep and len(keeps) > 1 else subject
                lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([*lines, f"`{record['command']}`, {record['hardware']}, {versions}, fp32."])


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the folder of the original, whose full cache is the teacher")
    parser.add_argument("texts", type=Path, nargs="+", help="text files, gzipped or not")
    parser.add_argument("--keep", type=Fraction, default=Fraction(1, 6), help="share of the cache that a press keeps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 7168], help="tokens of a prompt")
    parser.add_argument("--rows", type=int, default=2, help="rows of each text and length")
    parser.add_argument(
        "--press", nargs="+", default=PRESSES, metavar="PRESS", help="names of presses (see make_presses)"
    )
    parser.add_argument("--folder", type=Path, nargs="+", help="model folders to measure, and no press")
    parser.add_argument("--teachers", type=Path, help="with --folder: keep what the teacher gave in this folder")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--show", action="store_true", help="print the tables of the file, and measure nothing")
    return parser.parse_args()


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def identify(args, text, length, row, name):
    """What tells a row of the file from the others."""
    own = {} if args.folder or name == FULL else {"keep": str(args.keep)}
    return {"text": text, "length": length, "row": row, "subject": name, **own}


def add_row(args, record, row):
    """Write the record with one more row."""
    record |= describe_run(args)
    record["rows"].append(row)
    partial = args.out.with_name(args.out.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(args.out)
    print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)


@torch.no_grad()
def measure(args, record):
    """Make the rows that the record lacks: the first of every text and length, then the second."""
    torch.set_num_threads(1)
    teacher, tokenizer = load(args.model), AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    models = {folder.name: load(folder, trust_remote_code=True) for folder in args.folder or ()}
    names = [FULL, *(models or args.press)]
    texts = {text_name(path): tokenize(tokenizer, path) for path in args.texts}
    for row, length, text in itertools.product(range(args.rows), args.lengths, texts):
        wanted = {name: identify(args, text, length, row, name) for name in names}
        missing = [name for name in names if not any(wanted[name].items() <= r.items() for r in record["rows"])]
        if not missing:
            continue
        parts = row_parts(texts[text], length, row)
        if models:
            saved = args.teachers and args.teachers / f"{args.model.name}-{text}-{length}-{row}.pt"
            made = folder_rows(teacher, {name: models[name] for name in missing if name != FULL}, parts, saved)
        else:
            made = press_rows(teacher, parts, args.keep, missing)
        for name, measures in made:
            if name in missing:
                add_row(args, record, {**wanted[name], **measures})


def main():
    args = parse_arguments()
    record = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    if record.get("model", args.model.name) != args.model.name:
        raise ValueError(f"{args.out.name}: of {record['model']}, got {args.model.name}; expected one model in a file.")
    if not args.show:
        measure(args, record)
    print(render(record))


if __name__ == "__main__":
    main()
