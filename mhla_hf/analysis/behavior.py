"""Measure the behavior of a language model: whether all ways to run it agree, how far back it recalls, what it generates.

Functions that take a model and token ids run on the model's device without gradients. Differences of logits are the largest
absolute difference relative to the largest absolute logit.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..models.transformers_api import forward_cached
from ..speed import cache_bytes

PASSAGE_TOKENS = 32  # length of a passage that is repeated, for recall
CUE_TOKENS = 8  # first tokens of the passage, from which the model can recognize it; they are not scored

Watch = Callable[[Sequence[Any]], Iterable[Any]]  # wraps a list of steps in a progress bar


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max |actual - expected| / max |expected|; NaN if either tensor contains NaN."""
    return float((actual - expected).abs().max() / expected.abs().max())


def largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN."""
    return float(torch.tensor(list(values)).max())


@torch.no_grad()
def whole_logits(model: Any, ids: torch.Tensor, at: torch.Tensor | None = None, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of one forward pass without a cache.

    Args:
        model: A causal language model.
        ids: Token ids [B, T], of B rows of T tokens.
        at: The N positions to return logits for, [N] (default: all T positions).
        **inputs: attention_mask or position_ids, [B, T].

    Returns:
        Logits, fp32 [B, N, vocabulary size].
    """
    keep = {} if at is None else {"logits_to_keep": at.to(model.device)}
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    return model(input_ids=ids.to(model.device), use_cache=False, **keep, **inputs).logits.float()


@torch.no_grad()
def cached_logits(
    model: Any, ids: torch.Tensor, sizes: int | list[int], at: torch.Tensor | None = None,
    on_cache: Callable[[Any], None] | None = None, watch: Watch = iter, **inputs: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the logits of texts that are read in chunks with a cache.

    Args:
        model, ids, at, **inputs: See `whole_logits`. The positions `at` must be in ascending order.
        sizes: Number of tokens in each chunk; see `torch.split`.
        on_cache: Called with the cache after each chunk.
        watch: Wraps the list of chunks, e.g. `tqdm`.

    Returns:
        Logits, fp32 [B, N, vocabulary size]; see `whole_logits`.
    """
    cache = None
    stop = 0
    logits = []
    for chunk in watch(ids.split(sizes, 1)):
        start = stop
        stop = stop + chunk.shape[1]
        options = {}
        if at is not None:
            options["logits_to_keep"] = (at[(at >= start) & (at < stop)] - start).to(model.device)
        if "attention_mask" in inputs:
            options["attention_mask"] = inputs["attention_mask"][:, :stop].to(model.device)
        if "position_ids" in inputs:
            options["position_ids"] = inputs["position_ids"][:, start:stop].to(model.device)
        output, cache = forward_cached(model, chunk.to(model.device), cache, **options)
        logits.append(output.logits.float())
        if on_cache is not None:
            on_cache(cache)
    return torch.cat(logits, 1)


def has_argument(model: Any, name: str) -> bool:
    """Return whether the model's forward has an argument called `name`."""
    return name in inspect.signature(model.forward).parameters


def causality_difference(model: Any, ids: torch.Tensor) -> float:
    """Return how much the logits before the last token of a text change if that token is replaced (`difference`).

    This is 0 for a causal model. The ids [1, number of tokens] must contain at least two different tokens.
    """
    changed = ids.clone()
    changed[:, -1] = ids[0, ids[0] != ids[0, -1]][0]
    return difference(whole_logits(model, changed)[:, :-1], whole_logits(model, ids)[:, :-1])


def batch_difference(model: Any, rows: Sequence[torch.Tensor]) -> float:
    """Return the largest difference between the logits of rows alone and in a batch.

    The batch is read twice: in one pass, and in chunks with a cache. Shorter rows are padded on the left as in `generate`:
    with a mask, and positions that start at 0 if the model takes positions. The padding token is an ordinary token, so that
    a model that reads it returns other logits.

    Args:
        model: A causal language model.
        rows: Token ids of each row, [number of tokens]. The longest row must have more than `CUE_TOKENS` tokens.
    """
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([rows[0][:1].expand(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    inputs: dict[str, Any] = {"attention_mask": mask}
    if has_argument(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    sizes = [longest - CUE_TOKENS, *[1] * CUE_TOKENS]
    batched = whole_logits(model, ids, **inputs), cached_logits(model, ids, sizes, **inputs)
    alone = [whole_logits(model, row[None])[0] for row in rows]
    return largest(
        difference(in_batch[-len(expected) :], expected)
        for logits in batched
        for in_batch, expected in zip(logits, alone, strict=True)
    )


def packed_difference(model: Any, rows: Sequence[torch.Tensor]) -> float:
    """Return the difference of logits between rows alone and packed into one sequence, separated by position_ids.

    Args:
        model: A causal language model whose forward takes `position_ids`.
        rows: Token ids of each row, [number of tokens], of any lengths.
    """
    alone = torch.cat([whole_logits(model, row[None]) for row in rows], 1)
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return difference(whole_logits(model, torch.cat(list(rows))[None], position_ids=positions), alone)


def layer_bytes(model: Any, ids: torch.Tensor, sizes: int | list[int], layers: Iterable[int]) -> list[int]:
    """Return the total size in bytes of the caches of some layers, after each chunk of a text.

    Args:
        model: A causal language model.
        ids: Token ids [1, T], of T tokens.
        sizes: Number of tokens in each chunk; see `torch.split`.
        layers: Indices of the layers.
    """
    counted: list[int] = []

    def count(cache: Any) -> None:
        counted.append(sum(cache_bytes(cache.layers[index]) for index in layers))

    cached_logits(model, ids, sizes, at=torch.arange(0), on_cache=count)
    return counted


def recall_gain(model: Any, ids: torch.Tensor, distance: int, rows: int) -> float:
    """Measure by how much the log-likelihood of a passage rises when it is repeated.

    The passage consists of random tokens, so the second copy can be predicted only from the first one. There is text
    between the two copies.

    Args:
        model: A causal language model.
        ids: Token ids of a text, [number of tokens]. The passages and the text between them are drawn from it.
        distance: Number of tokens from the start of one copy to the start of the other, at least `PASSAGE_TOKENS`.
        rows: Number of passages to average over.

    Returns:
        The gain in log-likelihood, in nats per token; 0 if the passage was forgotten.
    """
    generator = torch.Generator().manual_seed(distance)
    texts = []
    for _ in range(rows):
        passage = ids[torch.randint(len(ids), (PASSAGE_TOKENS,), generator=generator)]
        start = int(torch.randint(len(ids), (), generator=generator))
        between = ids[(start + torch.arange(distance - PASSAGE_TOKENS)) % len(ids)]
        texts.append(torch.cat([passage, between, passage]))
    scored = torch.arange(CUE_TOKENS, PASSAGE_TOKENS)
    log_probs = next_token_log_probs(model, torch.stack(texts), torch.cat([scored, distance + scored]))
    first_copy, second_copy = log_probs.chunk(2, 1)
    return float((second_copy - first_copy).mean())


def next_token_log_probs(model: Any, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of some tokens of a text, given the tokens before each.

    Args:
        model: A causal language model.
        ids: Token ids [B, T], of B rows of T tokens.
        at: Positions [N] of the N tokens, each at least 1.

    Returns:
        Log-probabilities, fp32 [B, N], on the model's device.
    """
    logits = whole_logits(model, ids, at - 1).log_softmax(-1)
    return logits.gather(-1, ids[:, at, None].to(logits.device))[..., 0]


@torch.no_grad()
def continue_greedily(model: Any, ids: torch.Tensor, count: int, watch: Watch = iter) -> torch.Tensor:
    """Generate `count` tokens greedily after each row of a batch.

    Args:
        model: A causal language model.
        ids: Token ids [B, T], of B prompts of T tokens.
        count: Number of tokens to generate.
        watch: Wraps the list of steps, e.g. `tqdm`.

    Returns:
        Prompts with the generated tokens, [B, T + count], on the CPU.
    """
    cache = None
    token = ids.to(model.device)
    tokens = [token]
    for _ in watch(range(count)):
        output, cache = forward_cached(model, token, cache, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        tokens.append(token)
    return torch.cat(tokens, 1).cpu()
