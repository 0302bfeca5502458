"""Time language models in turns at each context length, and count the bytes of their caches (recipes of kind "speed")."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import load_language_model
from ..checkpoints.values import at_least, checked, read_settings
from ..data import max_positions
from ..models.transformers_api import forward_cached
from .records import SPEED, SPEED_METRICS, Results
from .subjects import VERSION, find_subjects, format_command


@checked
class SpeedProtocol:
    """Settings of a recipe of kind "speed"."""

    lengths: list[int] | int  # context lengths in tokens
    decode_tokens: int = at_least(1, 64)  # number of tokens to decode after each context
    rounds: int = at_least(1, 3)  # number of measurements per length, of which the fastest counts

    def validate_lengths(self) -> None:
        self.lengths = [self.lengths] if isinstance(self.lengths, int) else self.lengths
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths: got {self.lengths!r}, expected one or more numbers of tokens, each at least 1.")


def judge_speed(models: object, args: Any) -> dict[str, Results]:
    """Time language models in turns, or reuse stored times if exactly these models were timed together."""
    protocol: Any = read_settings(SpeedProtocol, args.recipe.settings)
    subjects = find_subjects(models, args)
    args.command = args.command or format_command(subjects)
    task_hash = hash_json([VERSION, sorted(x.fingerprint for x in subjects), *vars(protocol).values(), args.device])
    metrics = [f"{metric}_{length}" for metric in SPEED_METRICS for length in protocol.lengths]
    if not all(x.knows(task=SPEED, metric=metric, task_hash=task_hash) for x in subjects for metric in metrics):
        started = time.perf_counter()
        loaded = {subject.name: subject.load(load_language_model)[0] for subject in subjects}
        measured = measure_speed(loaded, protocol, args.progress)
        for subject in subjects:
            scores = {metric: (value, None, False, protocol.rounds) for metric, value in measured[subject.name].items()}
            subject.store_scores(SPEED, scores, task_hash, started, loaded[subject.name].device)
    return {subject.name: subject.kept.where(task_hash=task_hash) for subject in subjects}


def measure_speed(models: Mapping[str, Any], protocol: Any, progress: bool) -> dict[str, dict[str, float]]:
    """Time models on random tokens; return {model: {metric: value}} with metrics such as "forward_ms_512"."""
    lengths = protocol.lengths
    for name, model in models.items():
        if max(lengths) + protocol.decode_tokens > (limit := max_positions(model.config)):
            got = f"{max(lengths)} tokens and {protocol.decode_tokens} more"
            raise ValueError(f"lengths: got {got}, expected at most the {limit} positions of {name!r}.")
    vocabulary = min(model.config.vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (1, max(lengths)), generator=torch.Generator().manual_seed(0))
    best: dict[str, dict[str, float]] = {name: {} for name in models}
    runs = [(length, name) for length in lengths for _ in range(protocol.rounds) for name in models]
    with torch.inference_mode(), contextlib.ExitStack() as stack:
        for model in models.values():
            stack.callback(model.train, model.training)
            time_once(model.eval(), ids[:, :64], protocol.decode_tokens)
        for length, name in tqdm(runs, desc="speed", unit="run", disable=not progress):
            for metric, value in time_once(models[name], ids[:, :length], protocol.decode_tokens).items():
                key = f"{metric}_{length}"
                best[name][key] = min(best[name].get(key, value), value)
    return best


def time_once(model: Any, ids: torch.Tensor, decode_tokens: int) -> dict[str, float]:
    """Return {metric: value} of `SPEED_METRICS` for `ids` [1, T]; the decode time is a mean over `decode_tokens` tokens."""
    ids = ids.to(model.device)
    start = clock(model.device)
    model(input_ids=ids, use_cache=False, logits_to_keep=1)
    forward = clock(model.device) - start
    _, cache = forward_cached(model, ids, logits_to_keep=1)
    size = cache_bytes(cache)
    start = clock(model.device)
    for _ in range(decode_tokens):
        _, cache = forward_cached(model, ids[:, -1:], cache)
    decode = (clock(model.device) - start) / decode_tokens
    return {"forward_ms": 1e3 * forward, "decode_ms": 1e3 * decode, "cache_mib": size / 2**20}


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in a cache, at any depth; storage that tensors share counts once."""
    sizes: dict[int, int] = {}  # address of a storage -> its bytes
    visited: dict[int, Any] = {}  # keeps objects alive, so that no id is reused
    pending = [cache]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        elif id(item) not in visited:
            visited[id(item)] = item
            attributes = item if isinstance(item, dict) else getattr(item, "__dict__", {})
            pending += item if isinstance(item, (list, tuple)) else attributes.values()
    return sum(sizes.values())


def clock(device: torch.device | str) -> float:
    """Return the time in seconds, once a CUDA device has finished all queued work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
