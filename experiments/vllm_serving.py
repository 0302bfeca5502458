"""Measure a converted model inside vLLM (docs/serving.md).

    python -m experiments.vllm_serving BASE CONVERTED --text FILE

Runs in the environment of `make test-vllm`. Compares, in one process, a softmax model with its conversion: perplexity and
recall in vLLM and in transformers (fp32), the number of requests that fit a GiB of pages, and tokens per second (bf16).
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mhla_hf.checkpoints.file_io import write_json
from mhla_hf.checkpoints.load import register_model_type
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.cli.main import script

from .rows import describe_setup, make_parser, parse_call

GIB = 1 << 30
ROW_TOKENS = 2048  # of text, and of a row whose second half repeats its first
CACHE_LENGTHS = (2048, 8192)
PROMPT_LENGTHS = (256, 1024)  # tokens, the shortest and the longest
NEW_TOKENS = 64  # per request
BATCHES = (1, 8, 32)  # requests at once


@contextlib.contextmanager
def engine(folder: str, **options: Any) -> Iterator[Any]:
    """Run an engine of vLLM in this process, with a GiB of pages."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    llm = LLM(folder, enforce_eager=True, kv_cache_memory_bytes=GIB, max_num_batched_tokens=2048, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def make_rows(text: list[int], count: int) -> dict[str, list[list[int]]]:
    """Cut rows of a text for "perplexity", and rows whose second half repeats the first for "recall"."""
    rows = [text[first * ROW_TOKENS : (first + 1) * ROW_TOKENS] for first in range(count)]
    return {"perplexity": rows, "recall": [2 * row[: ROW_TOKENS // 2] for row in rows]}


def summarize(name: str, log_probs: torch.Tensor) -> float:
    """Return the perplexity, or the mean log-probability of the second half, of log-probabilities [rows, T - 1]."""
    if name == "perplexity":
        return log_probs.mean().neg().exp().item()
    return log_probs[:, ROW_TOKENS // 2 :].mean().item()


@torch.no_grad()
def score_in_transformers(model: Any, rows: Sequence[list[int]]) -> torch.Tensor:
    """Return the log-probability of every token but the first of each row, [rows, T - 1]."""
    scores = []
    for row in rows:
        ids = torch.tensor([row])
        log_probs = model(ids).logits[0, :-1].float().log_softmax(-1)
        scores.append(log_probs.gather(1, ids[0, 1:, None])[:, 0])
    return torch.stack(scores)


def score_in_vllm(llm: Any, rows: Sequence[list[int]]) -> torch.Tensor:
    """Return what `score_in_transformers` returns."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in rows], options, use_tqdm=False)
    return torch.tensor(
        [
            [part[token].logprob for part, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]
            for output, row in zip(outputs, rows, strict=True)
        ]
    )


def make_prompts(text: list[int], count: int) -> list[list[int]]:
    """Cut prompts of random lengths and places from a text."""
    source = random.Random(count)
    lengths = [source.randint(*PROMPT_LENGTHS) for _ in range(count)]
    starts = [source.randrange(len(text) - length) for length in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def time_generate(model: Any, prompts: Sequence[list[int]]) -> float:
    """Return the seconds in which `generate` answers prompts one by one."""
    started = time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return time.perf_counter() - started


def time_vllm(llm: Any, prompts: Sequence[list[int]]) -> float:
    """Return the seconds in which vLLM answers prompts that arrive together."""
    from vllm import SamplingParams

    options = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
    return time.perf_counter() - started


def count_requests(llm: Any, length: int) -> float:
    """Return how many requests of `length` tokens fit the pages of an engine, by vLLM's own arithmetic."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config = llm.llm_engine.vllm_config
    longest, config.model_config.max_model_len = config.model_config.max_model_len, length
    try:
        pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        return get_max_concurrency_for_kv_cache_config(config, pages)
    finally:
        config.model_config.max_model_len = longest


# An engine must be gone before the next one starts, so each has a function.
def score_rows_in_vllm(folder: str, rows: Mapping[str, list[list[int]]]) -> dict[str, float]:
    """Return what `summarize` says of each kind of rows, for the model in a folder, in fp32."""
    with engine(folder, dtype="float32", max_model_len=ROW_TOKENS + 1) as llm:
        return {kind: summarize(kind, score_in_vllm(llm, part)) for kind, part in rows.items()}


def count_and_time_in_vllm(
    folder: str, text: list[int], batches: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return how many requests fit by length, and the seconds by number of requests, for the model in a folder, in bf16."""
    with engine(folder, dtype="bfloat16", max_model_len=CACHE_LENGTHS[-1]) as llm:
        requests = {length: count_requests(llm, length) for length in CACHE_LENGTHS}
        if batches:
            time_vllm(llm, make_prompts(text, 1))  # warm-up
        return requests, {count: time_vllm(llm, make_prompts(text, count)) for count in batches}


def measure(folders: Mapping[str, str], text_file: Path, num_rows: int, batches: Sequence[int]) -> dict[str, Any]:
    """Measure models, first in transformers, whose classes vLLM changes, and then in vLLM.

    Returns "scores" by model, engine and measure, "requests" by model and length, and "speed" as rows.
    """
    tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())), trust_remote_code=False)
    text = tokenizer(text_file.read_text(encoding="utf-8")).input_ids
    rows = make_rows(text, num_rows)
    scores: dict[str, dict[str, dict[str, float]]] = {name: {"transformers": {}, "vLLM": {}} for name in folders}
    speed: list[dict[str, Any]] = []
    for name, folder in folders.items() if num_rows or batches else ():
        register_model_type(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        for kind, part in rows.items() if num_rows else ():
            scores[name]["transformers"][kind] = summarize(kind, score_in_transformers(model, part))
        model = model.bfloat16()
        for count in batches[:2]:
            seconds = time_generate(model, make_prompts(text, count))
            speed.append({"model": name, "engine": "transformers", "requests": count, "seconds": seconds})
        del model
        print(name, scores[name], speed, flush=True)
    requests: dict[str, dict[int, float]] = {}
    for name, folder in folders.items():
        if num_rows:
            scores[name]["vLLM"] = score_rows_in_vllm(folder, rows)
        requests[name], seconds_taken = count_and_time_in_vllm(folder, text, batches)
        for count, seconds in seconds_taken.items():
            speed.append({"model": name, "engine": "vLLM", "requests": count, "seconds": seconds})
        print(name, scores[name], requests[name], speed, flush=True)
    return {"scores": scores, "requests": requests, "speed": speed}


def render_vllm(record: Mapping[str, Any]) -> str:
    """Render the tables of docs/serving.md."""
    names = list(record["scores"])
    lines = ["| | " + " | ".join(names) + " |", "|---" + "|---:" * len(names) + "|"]
    labels = {"perplexity": "perplexity", "recall": "recall, mean log-probability"} if record["rows"] else {}
    for kind, label in labels.items():
        for place in ("transformers", "vLLM"):
            cells = [f"{record['scores'][name][place][kind]:.4f}" for name in names]
            lines.append(f"| {label}, {place} | {' | '.join(cells)} |")
    for length in CACHE_LENGTHS:
        cells = [f"{record['requests'][name][str(length)]:.1f}" for name in names]
        lines.append(f"| requests of {length:,} tokens in 1 GiB | {' | '.join(cells)} |")
    for place in ("transformers", "vLLM"):
        for count in dict.fromkeys(row["requests"] for row in record["speed"] if row["engine"] == place):
            rows = [row for row in record["speed"] if (row["engine"], row["requests"]) == (place, count)]
            seconds = {row["model"]: row["seconds"] for row in rows}
            cells = [f"{count * NEW_TOKENS / seconds[name]:.1f}" for name in names]
            way = "one by one, `generate`" if place == "transformers" else "together, vLLM"
            requests = f"{count} request{'s' if count > 1 else ''}"
            lines.append(f"| new tokens per second, {requests}, {way} | {' | '.join(cells)} |")
    note = ""
    if record["rows"]:
        note += f"Perplexity over {record['rows'] * ROW_TOKENS:,} tokens, "
        note += f"recall of {ROW_TOKENS // 2:,} repeated ones, in fp32. "
    if record["speed"]:
        shortest, longest = PROMPT_LENGTHS
        note += f"Prompts of {shortest} to {longest:,} tokens with {NEW_TOKENS} new ones in bf16, "
        note += f"load average {record['load']:.1f}. "
    note += f"vLLM {record['vllm']}. {describe_setup(record)}"
    return "\n".join([*lines, "", note])


def main() -> None:
    """Run the script."""
    parser = make_parser(__doc__)
    parser.add_argument("base", help="folder or Hub id of the softmax model")
    parser.add_argument("converted", help="folder of its conversion")
    parser.add_argument("--text", type=Path, required=True, help="text file")
    parser.add_argument("--rows", type=int, default=4, help="rows of text (default: 4)")
    requests_help = "requests at once, or none (default: 1 8 32)"
    parser.add_argument("--requests", type=int, nargs="*", default=BATCHES, help=requests_help)
    parser.add_argument("--out", type=Path, default=Path("docs/scale/vllm.json"), help="JSON file to write")
    args, command = parse_call(parser, "vllm_serving", None)
    torch.set_num_threads(1)
    record = measure({"softmax": args.base, "MHLA": args.converted}, args.text, args.rows, args.requests)
    record |= {"rows": args.rows, "vllm": version("vllm"), "load": os.getloadavg()[1], "dtype": "bf16"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, {**record, **describe_run(command, "cpu")})


if __name__ == "__main__":
    script(main, "vllm_serving")
