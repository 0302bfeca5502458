"""What a language model does, in numbers: what must be the same however it is run, how far back it recalls, how it writes.

Everything is measured on token ids, on the model's device, without gradients; a difference is the largest one between two
tensors of logits, as a share of the largest logit.
"""

import inspect

import torch

from ..models.transformers_api import forward_cached
from ..speed import cache_bytes

PASSAGE, CUE = 32, 8  # tokens of a passage that comes again, and its first ones, which do not count


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest |got - wanted| as a share of the largest |wanted|; NaN where either holds one."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def worst(values) -> float:
    """The largest, or NaN where one is."""
    return float(torch.tensor(list(values)).max())


@torch.no_grad()
def whole_logits(model, ids, at=None, **given):
    """Logits fp32 `[B, T, vocabulary]` of one pass over ids `[B, T]` without a cache; at: the places to keep, or all."""
    keep = {} if at is None else {"logits_to_keep": at.to(model.device)}
    given = {name: value.to(model.device) for name, value in given.items()}
    return model(input_ids=ids.to(model.device), use_cache=False, **keep, **given).logits.float()


@torch.no_grad()
def cached_logits(model, ids, sizes, at=None, see=None, watch=iter, **given):
    """The same of ids that are fed in pieces of so many tokens.

    see(cache): is called after each; watch: what wraps the list of pieces, such as tqdm; given: the mask and positions.
    """
    cache, stop, parts = None, 0, []
    for piece in watch(ids.split(sizes, 1)):
        start, stop = stop, stop + piece.shape[1]
        keep = {}
        if at is not None:
            keep["logits_to_keep"] = (at[(at >= start) & (at < stop)] - start).to(model.device)
        if "attention_mask" in given:
            keep["attention_mask"] = given["attention_mask"][:, :stop].to(model.device)
        if "position_ids" in given:
            keep["position_ids"] = given["position_ids"][:, start:stop].to(model.device)
        output, cache = forward_cached(model, piece.to(model.device), cache, **keep)
        parts.append(output.logits.float())
        if see is not None:
            see(cache)
    return torch.cat(parts, 1)


def takes(model, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def causality_difference(model, ids) -> float:
    """What another last token of ids `[1, T]` changes in the logits before it."""
    changed = ids.clone()
    changed[:, -1] = ids[0, ids[0] != ids[0, -1]][0]
    return difference(whole_logits(model, changed)[:, :-1], whole_logits(model, ids)[:, :-1])


def batch_difference(model, rows) -> float:
    """The worst of the `rows` (ids `[T]` each) alone against itself in one batch, in one pass and with a cache.

    Shorter rows are padded on the left, with a token that says something, under a mask and with positions that start at 0
    (where the model takes positions), as `generate` has them.
    """
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([rows[0][:1].expand(longest - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in rows]).long()
    given = {"attention_mask": mask}
    if takes(model, "position_ids"):
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    pieces = [longest - CUE, *[1] * CUE]
    together = whole_logits(model, ids, **given), cached_logits(model, ids, pieces, **given)
    alone = [whole_logits(model, row[None])[0] for row in rows]
    found = [(logits[-len(row) :], row) for both in together for logits, row in zip(both, alone, strict=True)]
    return worst(difference(got, wanted) for got, wanted in found)


def packed_difference(model, rows) -> float:
    """The `rows` (ids `[T]` each) one after the other in one row, kept apart by position_ids, against each alone."""
    alone = torch.cat([whole_logits(model, row[None]) for row in rows], 1)
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return difference(whole_logits(model, torch.cat(rows)[None], position_ids=places), alone)


def layer_bytes(model, ids, sizes, layers) -> list[int]:
    """Bytes that the cache holds for these layers after each piece of ids `[1, T]`; sizes: see `cached_logits`."""
    found = []

    def see(cache):
        found.append(sum(cache_bytes(cache.layers[index]) for index in layers))

    cached_logits(model, ids, sizes, at=torch.arange(0), see=see)
    return found


def recall_gain(model, ids, distance: int, rows: int) -> float:
    """How much likelier a passage is when it comes again `distance` tokens later, in nats per token; 0: it was forgotten.

    The passage is made of tokens of ids `[N]` in random order, which nothing but memory foretells, and between its two
    copies stands text. distance: of the copies' first tokens, at least PASSAGE. rows: texts, over which the gain is a mean.
    """
    random, texts = torch.Generator().manual_seed(distance), []
    for _ in range(rows):
        passage = ids[torch.randint(len(ids), (PASSAGE,), generator=random)]
        start = int(torch.randint(len(ids), (), generator=random))
        between = ids[(start + torch.arange(distance - PASSAGE)) % len(ids)]
        texts.append(torch.cat([passage, between, passage]))
    texts = torch.stack(texts)
    counted = torch.cat([torch.arange(CUE, PASSAGE), distance + torch.arange(CUE, PASSAGE)])
    first, second = told_logs(model, texts, counted).chunk(2, 1)
    return float((second - first).mean())


def told_logs(model, ids, at):
    """The log-probabilities, fp32 `[B, N]`, that the model gave to the tokens of ids `[B, T]` at the places `[N]` before
    it saw them."""
    logits = whole_logits(model, ids, at - 1).log_softmax(-1)
    return logits.gather(-1, ids[:, at, None].to(logits.device))[..., 0]


@torch.no_grad()
def continue_greedily(model, ids, count: int, watch=iter):
    """ids `[B, T]` and, after each row, the `count` tokens that the model takes for likeliest, on the CPU.

    watch: what wraps the steps, such as tqdm.
    """
    cache, token = None, ids.to(model.device)
    written = [token]
    for _ in watch(range(count)):
        output, cache = forward_cached(model, token, cache, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        written.append(token)
    return torch.cat(written, 1).cpu()
