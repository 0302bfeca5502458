"""How long whole models take, against length: a forward pass, and one more token after that many; and what they hold.

The models are timed by turns, in one process, round after round, and the fastest round counts, so that a busy
moment of the machine hits all of them or none. Memory is that of the cache, counted in bytes.
"""

import itertools
import time

import torch
from tqdm import tqdm

from .data import last_position
from .models.transformers_api import forward_cached

WARM_UP = 64
DECODE = "decode, per token"


def measure_speed(models, lengths, *, decode_tokens=64, rounds=3, progress=True):
    """Time a forward pass and decoding of several language models, batch 1, on the device where they are.

    models: name -> model of transformers. lengths: tokens in the context. decode_tokens: tokens decoded after it; the time
    is that of one of them. rounds: of which the fastest counts.

    Returns a list of {"what": "forward" or "decode, per token", "length", "<name>_ms": milliseconds}, by what, then length;
    with decoding goes "<name>_mib", the MiB of the cache after the context. ValueError: a model has not as many positions.
    """
    for name, model in models.items():
        if max(lengths) + decode_tokens > (limit := last_position(model.config)):
            what = f"and {decode_tokens} more, expected at most the {limit} positions of {name!r}"
            raise ValueError(f"lengths: got {max(lengths)} tokens {what}.")
    random = torch.Generator().manual_seed(0)
    vocabulary = min(model.config.vocab_size for model in models.values())
    ids = torch.randint(vocabulary, (1, max(lengths)), generator=random)
    training = {name: model.training for name, model in models.items()}
    best, held = {}, {}
    total = len(models) * sum(2 * length + decode_tokens for length in [min(WARM_UP, max(lengths)), *lengths * rounds])
    bar = tqdm(total=total, desc="speed", unit="tokens", unit_scale=True, disable=not progress)
    try:
        with torch.inference_mode(), bar:
            for model in models.values():
                model.eval()
                _one(model, ids[:, :WARM_UP], decode_tokens, bar)
            for length, _, name in itertools.product(lengths, range(rounds), models):
                seconds, held[length, name] = _one(models[name], ids[:, :length], decode_tokens, bar)
                for what, value in seconds.items():
                    best[what, length, name] = min(best.get((what, length, name), value), value)
    finally:
        for name, model in models.items():
            model.train(training[name])
    rows = []
    for what, length in itertools.product(("forward", DECODE), lengths):
        row = {f"{name}_ms": 1e3 * best[what, length, name] for name in models}
        row |= {f"{name}_mib": held[length, name] / 2**20 for name in models if what == DECODE}
        rows.append({"what": what, "length": length, **row})
    return rows


def _one(model, ids, decode_tokens, bar):
    """(seconds of one forward pass over `ids` `[1, T]` and of one token decoded after it, bytes of the cache between).

    The bar moves on between what is timed.
    """
    ids = ids.to(model.device)
    started = clock(model.device)
    model(input_ids=ids, use_cache=False, logits_to_keep=1)
    forward = clock(model.device) - started
    bar.update(ids.shape[1])
    _, cache = forward_cached(model, ids, logits_to_keep=1)
    held = cache_bytes(cache)
    bar.update(ids.shape[1])
    token = ids[:, -1:]
    started = clock(model.device)
    for _ in range(decode_tokens):
        _, cache = forward_cached(model, token, cache)
    decode = clock(model.device) - started
    bar.update(decode_tokens)
    return {"forward": forward, DECODE: decode / decode_tokens}, held


def cache_bytes(cache):
    """Bytes of all tensors in a cache, each storage once."""
    found, seen, todo = {}, {}, [cache]
    while todo:
        part = todo.pop()
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif id(part) not in seen:
            seen[id(part)] = part
            inner = part if isinstance(part, dict) else getattr(part, "__dict__", {})
            todo += part if isinstance(part, (list, tuple)) else inner.values()
    return sum(found.values())


def clock(device):
    """Seconds, once the device has finished what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
