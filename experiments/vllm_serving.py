"""Measure a converted model inside vLLM (docs/serving.md).

    python -m experiments.vllm_serving BASE CONVERTED --text FILE

Runs in the environment of `make test-vllm`. Compares, in one process, a softmax model with its conversion: perplexity and
recall in vLLM and in transformers (fp32), the number of requests that fit a GiB of pages, and tokens per second (bf16, with
vLLM's own choice to compile).
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

from mhla_hf.checkpoints.load import register_model_type
from mhla_hf.cli.main import script

from .rows import describe_setup, make_parser, markdown, parse_call, write_record

GIB = 1 << 30
ROW_TOKENS = 2048  # of text, and of a row whose second half repeats its first
CACHE_LENGTHS = (2048, 8192)
PROMPT_LENGTHS = (256, 1024)  # tokens, the shortest and the longest
NEW_TOKENS = 64  # per request
BATCHES = (1, 8, 32)  # requests at once
LONG_PROMPTS = (4096, 8)  # tokens and number of the longest requests


@contextlib.contextmanager
def engine(folder: str, **options: Any) -> Iterator[Any]:
    """Run an engine of vLLM in this process, with a GiB of pages."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    options = {"max_num_batched_tokens": 2048, "enable_prefix_caching": False, **options}
    llm = LLM(folder, kv_cache_memory_bytes=GIB, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def summarize(name: str, log_probs: torch.Tensor) -> float:
    """Return the perplexity, or the mean log-probability of the second half, of log-probabilities [rows, T - 1]."""
    is_recall = name == "recall"
    return (log_probs[:, ROW_TOKENS // 2 :].mean() if is_recall else log_probs.mean().neg().exp()).item()


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
    scores = []
    for output, row in zip(outputs, rows, strict=True):
        scores.append([part[token].logprob for part, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)])
    return torch.tensor(scores)


def make_prompts(text: list[int], count: int, length: int | None = None) -> list[list[int]]:
    source = random.Random(count)
    lengths = [length or source.randint(*PROMPT_LENGTHS) for _ in range(count)]
    starts = [source.randrange(len(text) - length) for length in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


# An engine must be gone before the next one starts, which holds at the end of a function.
def measure_in_vllm(
    folder: str, text: list[int], rows: Mapping[str, list[list[int]]], batches: Sequence[int]
) -> tuple[dict[str, float], dict[int, float], dict[str, float]]:
    """Return the scores of rows in fp32, how many requests fit by length, and seconds by case, in bf16."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    def score() -> dict[str, float]:
        with engine(folder, dtype="float32", max_model_len=ROW_TOKENS + 1, enforce_eager=True) as llm:
            return {kind: summarize(kind, score_in_vllm(llm, part)) for kind, part in rows.items()}

    scores = score()
    with engine(folder, dtype="bfloat16", max_model_len=CACHE_LENGTHS[-1]) as llm:
        config, requests = llm.llm_engine.vllm_config, {}
        for length in CACHE_LENGTHS:  # the longest, which the engine has, is the last one
            config.model_config.max_model_len = length
            pages = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
            requests[length] = get_max_concurrency_for_kv_cache_config(config, pages)
        options = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        seconds = {}
        cases = {str(count): make_prompts(text, count) for count in batches}
        cases["long"] = make_prompts(text, LONG_PROMPTS[1], LONG_PROMPTS[0])
        for name, prompts in [("warm-up", cases["long"]), *cases.items()]:
            started = time.perf_counter()
            llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], options, use_tqdm=False)
            seconds[name] = time.perf_counter() - started
        return scores, requests, {name: seconds[name] for name in cases}


def measure(folders: Mapping[str, str], text_file: Path, num_rows: int, batches: Sequence[int]) -> dict[str, Any]:
    """Measure models, first in transformers, whose classes vLLM changes, and then in vLLM."""
    tokenizer = AutoTokenizer.from_pretrained(next(iter(folders.values())), trust_remote_code=False)
    text = tokenizer(text_file.read_text(encoding="utf-8")).input_ids
    rows = {"perplexity": [text[first * ROW_TOKENS : (first + 1) * ROW_TOKENS] for first in range(num_rows)]}
    rows["recall"] = [2 * row[: ROW_TOKENS // 2] for row in rows["perplexity"]]
    scores: dict[str, dict[str, dict[str, float]]] = {name: {} for name in folders}
    speed: list[dict[str, Any]] = []
    for name, folder in folders.items():
        register_model_type(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        measured = {kind: summarize(kind, score_in_transformers(model, part)) for kind, part in rows.items()}
        scores[name]["transformers"] = measured
        model = model.bfloat16()
        for count in batches[:2]:
            started = time.perf_counter()
            for prompt in make_prompts(text, count):  # one by one
                ids = torch.tensor([prompt])
                options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
                model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            seconds = time.perf_counter() - started
            speed.append({"model": name, "engine": "transformers", "case": str(count), "seconds": seconds})
        del model
        print(name, scores[name], speed, flush=True)
    requests: dict[str, dict[int, float]] = {}
    for name, folder in folders.items():
        scores[name]["vLLM"], requests[name], seconds_taken = measure_in_vllm(folder, text, rows, batches)
        for case, seconds in seconds_taken.items():
            speed.append({"model": name, "engine": "vLLM", "case": case, "seconds": seconds})
        print(name, scores[name], requests[name], speed, flush=True)
    return {"scores": scores, "requests": requests, "speed": speed}


def render_vllm(record: Mapping[str, Any]) -> str:
    names = list(record["scores"])
    lines = []
    for kind, label in (("perplexity", "perplexity"), ("recall", "recall, mean log-probability")):
        for place in ("transformers", "vLLM"):
            cells = [f"{record['scores'][name][place][kind]:.4f}" for name in names]
            lines.append([f"{label}, {place}", *cells])
    for length in CACHE_LENGTHS:
        cells = [f"{record['requests'][name][str(length)]:.1f}" for name in names]
        lines.append([f"requests of {length:,} tokens in 1 GiB", *cells])
    for place, way in (("transformers", "one by one, `generate`"), ("vLLM", "together, vLLM")):
        seconds: dict[str, dict[str, float]] = {}  # by case and model
        for row in record["speed"]:
            if row["engine"] == place:
                seconds.setdefault(row["case"], {})[row["model"]] = row["seconds"]
        for case, by_model in seconds.items():
            length, count = LONG_PROMPTS if case == "long" else (0, int(case))
            cells = [f"{count * NEW_TOKENS / by_model[name]:.1f}" for name in names]
            requests = f"{count} request{'s' if count > 1 else ''}{f' of {length:,} tokens' if length else ''}"
            lines.append([f"new tokens per second, {requests}, {way}", *cells])
    note = f"Perplexity over {record['rows'] * ROW_TOKENS:,} tokens, recall of {ROW_TOKENS // 2:,} repeated ones, in fp32. "
    note += f"Prompts of {PROMPT_LENGTHS[0]} to {PROMPT_LENGTHS[1]:,} tokens with {NEW_TOKENS} new ones in bf16, "
    note += f"without prefix caching, load average {record['load']:.1f}. "
    return f"{markdown(['', *names], lines)}\n\n{note}vLLM {record['vllm']}. {describe_setup(record)}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("base", help="folder or Hub id of the softmax model")
    parser.add_argument("converted", help="folder of its conversion")
    parser.add_argument("--text", type=Path, required=True, help="text file")
    parser.add_argument("--rows", type=int, default=4, help="rows of text (default: 4)")
    parser.add_argument("--requests", type=int, nargs="+", default=BATCHES, help="requests at once (default: 1 8 32)")
    parser.add_argument("--out", type=Path, default=Path("docs/scale/vllm.json"), help="JSON file to write")
    args, command = parse_call(parser, "vllm_serving", None)
    torch.set_num_threads(1)
    record = measure({"softmax": args.base, "MHLA": args.converted}, args.text, args.rows, args.requests)
    record |= {"rows": args.rows, "vllm": version("vllm"), "load": os.getloadavg()[1], "dtype": "bf16"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.out, record, command)


if __name__ == "__main__":
    script(main, "vllm_serving")
