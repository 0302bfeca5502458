"""Time whole models by context length: a forward pass, and decoding with a cache, whose size is reported, too.

The models are timed in turns, for several rounds in one process, and the fastest round counts. In this way, other load on
the machine affects all of them alike.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

from .data import max_positions
from .models.transformers_api import forward_cached

WARM_UP_TOKENS = 64
DECODE = "decode, per token"


def measure_speed(
    models: Mapping[str, Any],
    lengths: Sequence[int],
    *,
    decode_tokens: int = 64,
    rounds: int = 3,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Time a forward pass and decoding of several language models at batch size 1, on the models' own devices.

    The tokens are random. Models run in eval mode; their training mode is restored at the end.

    Args:
        models: Name -> transformers model.
        lengths: Context lengths in tokens.
        decode_tokens: Number of tokens decoded after each context; the time per token is reported.
        rounds: Number of measurements of each time; the fastest is returned.
        progress: Whether to show a progress bar.

    Returns:
        A list of dicts with "what" ("forward" or "decode, per token"), "length" and "<name>_ms" (milliseconds), and for
        decoding also "<name>_mib" (MiB in the cache after the context).

    Raises:
        ValueError: A model has fewer positions than a length needs.
    """
    for name, model in models.items():
        if max(lengths) + decode_tokens > (limit := max_positions(model.config)):
            start = f"lengths: got {max(lengths)} tokens and {decode_tokens} more"
            raise ValueError(f"{start}, expected at most the {limit} positions of {name!r}.")
    generator = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (1, max(lengths)), generator=generator)
    training = {name: model.training for name, model in models.items()}
    best: dict[tuple[str, int, str], float] = {}  # (phase, length, model) -> seconds
    cached: dict[tuple[int, str], int] = {}  # (length, model) -> bytes
    runs = [min(WARM_UP_TOKENS, max(lengths)), *(length for length in lengths for _ in range(rounds))]
    total = len(models) * sum(2 * length + decode_tokens for length in runs)
    bar = tqdm(total=total, desc="speed", unit="tokens", unit_scale=True, disable=not progress)
    try:
        with torch.inference_mode(), bar:
            for model in models.values():
                model.eval()
                _time_once(model, ids[:, :WARM_UP_TOKENS], decode_tokens, bar)
            for length, _, name in itertools.product(lengths, range(rounds), models):
                seconds, cached[length, name] = _time_once(models[name], ids[:, :length], decode_tokens, bar)
                for phase, value in seconds.items():
                    best[phase, length, name] = min(best.get((phase, length, name), value), value)
    finally:
        for name, model in models.items():
            model.train(training[name])
    rows = []
    for phase, length in itertools.product(("forward", DECODE), lengths):
        row: dict[str, Any] = {"what": phase, "length": length}
        for name in models:
            row[f"{name}_ms"] = 1e3 * best[phase, length, name]
        for name in models if phase == DECODE else ():
            row[f"{name}_mib"] = cached[length, name] / 2**20
        rows.append(row)
    return rows


def _time_once(model: Any, ids: torch.Tensor, decode_tokens: int, bar: Any) -> tuple[dict[str, float], int]:
    """Time one forward pass and decoding after it.

    Args:
        model: A causal language model.
        ids: Token ids [1, number of tokens].
        decode_tokens: Number of tokens to decode.
        bar: A progress bar, which is not updated while time is measured.

    Returns:
        (dict with "forward" and "decode, per token", both in seconds; bytes in the cache after the context).
    """
    ids = ids.to(model.device)
    start = clock(model.device)
    model(input_ids=ids, use_cache=False, logits_to_keep=1)
    forward = clock(model.device) - start
    bar.update(ids.shape[1])
    _, cache = forward_cached(model, ids, logits_to_keep=1)
    size = cache_bytes(cache)
    bar.update(ids.shape[1])
    token = ids[:, -1:]
    start = clock(model.device)
    for _ in range(decode_tokens):
        _, cache = forward_cached(model, token, cache)
    decode = clock(model.device) - start
    bar.update(decode_tokens)
    return {"forward": forward, DECODE: decode / decode_tokens}, size


def cache_bytes(cache: Any) -> int:
    """Return the size in bytes of all tensors in a cache object, at any depth; shared storage counts once."""
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
            if isinstance(item, (list, tuple)):
                pending += item
            else:
                pending += (item if isinstance(item, dict) else getattr(item, "__dict__", {})).values()
    return sum(sizes.values())


def clock(device: torch.device | str) -> float:
    """Return `time.perf_counter()` in seconds, on CUDA after waiting for all work on the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
