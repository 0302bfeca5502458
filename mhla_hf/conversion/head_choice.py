"""Which KV heads of a language model keep softmax, and how many salient tokens the others keep.

`score_heads` estimates, by one backward pass of the original per row, how much its predictions change if a KV head becomes
MHLA. `measure_candidates` compares numbers of softmax heads, and of salient tokens, by one forward pass each on another row,
which repeats its start and asks for facts at its end.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from ..models.language.causal_attention import ATTENTION_NAME, keep_softmax_heads
from ..models.transformers_api import recomputed_layers, set_attention_function
from ..nn.settings import MHLASettings
from .sizes import LayerSizes, sizes_of_conversion
from .steps import is_number, parse_share
from .teacher import (
    ChangedCore,
    KeptHeadsCore,
    log_probabilities,
    mean_kl,
    mhla_layers,
    replaced_cores,
    softmax_instead,
)
from .transformers_models import restore_softmax

logger = logging.getLogger("mhla_hf")
SLOTS = (128, 512)  # numbers of salient tokens that a search compares
PARTS = (15, 10, 6, 4)  # with keep="auto", candidates keep softmax in 1/15, 1/10, 1/6, or 1/4 of the KV heads
TOLERANCE = 0.02  # nats per token of KL, with keep="auto"
MAX_LOSS = 0.05  # largest drop of the probability of a copied token, and of an answer, with keep="auto"
# Positions per row, at most, since logits of a large vocabulary cost more than the layers: of recall, of the loss that
# scores heads, and of the comparison of a candidate with the original.
RECALL_POSITIONS, SCORED_POSITIONS, CURVE_POSITIONS = 128, 1024, 256
QUESTION_TOKENS = 8  # from the start of a question to its answer, at most
REPORT_LENGTHS = (4096, 32768)  # tokens for which the report gives the cache's size, cut to the model's positions
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Point = dict[str, Any]  # a candidate: numbers of "salient" tokens and softmax "heads", "kept_heads", scores


class AskingRow(NamedTuple):
    """A row that repeats its first tokens and asks for facts: ids, int64 [1, T], and which are in answers, bool [T]."""

    ids: torch.Tensor
    is_answer: torch.Tensor


class LanguageRows(NamedTuple):
    """The rows of a conversion, int64 [1, T] each: to score heads by, to compare choices on, and to measure on."""

    scored: list[torch.Tensor]
    asking: AskingRow
    held_out: list[torch.Tensor]
    name: str


class HeadChoice:
    """Lists the candidates that `keep` allows, and finds the best of them for a converted model; see `convert`.

    Candidates differ in softmax heads and, with `compares_slots` and `keep` "auto" or a size, in numbers of salient tokens.
    """

    def __init__(
        self, model: Any, settings: MHLASettings, keep: float | int | str, context: int, tolerance: float,
        compares_slots: bool,
    ) -> None:  # fmt: skip
        self.settings, self.context, self.tolerance, self.is_auto = settings, context, tolerance, keep == "auto"
        positions = model.config.max_position_embeddings
        self.lengths = sorted({context, *(min(length, positions) for length in REPORT_LENGTHS)})
        max_bytes = parse_size(keep)
        slots = SLOTS if compares_slots and (self.is_auto or max_bytes is not None) else (settings.salient,)
        self.sizes = {count: sizes_of_conversion(model, replace(settings, salient=count)) for count in slots}
        num_heads = sum(size.num_kv_heads for size in self.sizes[slots[0]].values())
        if self.is_auto:
            counts = {count: sorted({round(num_heads / part) for part in PARTS}) for count in slots}
        elif max_bytes is not None:
            counts = {count: heads_within(max_bytes, sizes, context) for count, sizes in self.sizes.items()}
        else:
            number = parse_share(keep, num_heads)
            counts = {slots[0]: [number] if number is not None and number < num_heads else []}
        self.candidates: list[Point] = [{"salient": count, "heads": n} for count in slots for n in counts[count]]
        if not self.candidates:
            sizes = self.sizes[slots[0]].values()
            least, softmax = sum(x.state_bytes for x in sizes), sum(x.token_bytes for x in sizes) * context
            size = f"or a size such as '64MiB' of at least {least} bytes (softmax takes {softmax})"
            forms = f"as a number, a share, or a percentage, or 'auto', {size}"
            expected = f"0 to {num_heads - 1} of the {num_heads} KV heads {forms}"
            raise ValueError(f"keep: got {keep!r} at {context} tokens, expected {expected}.")
        # A single candidate without softmax heads needs no scores.
        self.compares = len(self.candidates) > 1 or self.candidates[0]["heads"] > 0

    def find(self, model: Any, rows: LanguageRows, progress: bool) -> tuple[int, dict[int, list[int]], dict[str, Any]]:
        """Score the heads, measure the candidates, and choose one.

        Returns the chosen number of salient tokens, the softmax heads, and what the report says: "context", "softmax_heads",
        "cache_bytes", and, if heads were scored, "head_scores" and "curve".
        """
        report: dict[str, Any] = {"context": self.context}
        chosen: Point = {**self.candidates[0], "kept_heads": {}}
        if self.compares:
            num_passes = len(mhla_layers(model)) * (2 * len(rows.scored) + len(self.candidates))
            with tqdm(total=num_passes, desc="choose softmax heads", unit="layer", disable=not progress) as bar:
                scores = score_heads(model, rows.scored, bar)
                points = [{**x, "kept_heads": highest_scores(scores, x["heads"])} for x in self.candidates]
                original = measure_candidates(model, rows.asking, points, bar)
            for point in points:
                point["bytes"] = self.cache_bytes(point)
            chosen = self.choose(original, points)
            chosen["chosen"] = True
            report["head_scores"] = {str(layer): [float(f"{x:.3g}") for x in row] for layer, row in scores.items()}
            original |= {"heads": sum(map(len, scores.values())), "bytes": self.softmax_bytes()}
            report["curve"] = [original, *(self.describe(point) for point in points)]
        softmax, converted = self.softmax_bytes(), self.cache_bytes(chosen)
        report["cache_bytes"] = {x: {"softmax": softmax[x], "converted": converted[x]} for x in converted}
        report["softmax_heads"] = name_layers(chosen["kept_heads"])
        return chosen["salient"], chosen["kept_heads"], report

    def describe(self, point: Point) -> Point:
        """Return a candidate's entry in the report: its scores, and the settings with which `convert` makes it."""
        described = {name: value for name, value in point.items() if name != "kept_heads"}
        kept = {name: getattr(self.settings, name) for name in ("block_size", "window", "sinks")}
        layers = list(self.sizes[point["salient"]])
        settings = {"layers": layers, "salient": point["salient"], "softmax_heads": name_layers(point["kept_heads"])}
        return {**described, "settings": kept | settings}

    def softmax_bytes(self) -> dict[str, int]:
        token_bytes = sum(layer.token_bytes for layer in next(iter(self.sizes.values())).values())
        return {str(length): token_bytes * length for length in self.lengths}

    def cache_bytes(self, point: Point) -> dict[str, int]:
        """Compute the size of one sequence's cache in the MHLA layers, {length: bytes}."""
        layers, kept_heads = self.sizes[point["salient"]], point["kept_heads"]
        shares = {index: len(kept_heads.get(index, ())) / layer.num_kv_heads for index, layer in layers.items()}
        return {
            str(length): sum(layer.cache_bytes(shares[index], length) for index, layer in layers.items())
            for length in self.lengths
        }

    def choose(self, original: Point, points: Sequence[Point]) -> Point:
        """Return the point of least KL; for "auto", that of the smallest cache within `tolerance` and `MAX_LOSS`, if any."""
        closest = min(points, key=lambda point: point["kl"])
        if not self.is_auto:
            return closest
        enough = [
            point
            for point in points
            if point["kl"] <= self.tolerance
            and math.exp(original["recall"]) - math.exp(point["recall"]) <= MAX_LOSS
            and original.get("answers", 0) - point.get("answers", 0) <= MAX_LOSS
        ]
        if not enough:
            logger.warning("keep: no candidate keeps enough with tolerance=%s; took the closest.", self.tolerance)
        return min(enough, key=lambda point: point["bytes"][str(self.context)]) if enough else closest


def compared_positions(length: int, count: int = RECALL_POSITIONS, first: int = 0) -> torch.Tensor:
    """Return up to `count` evenly spaced positions, int64 [N], from `first` to `length - 1`."""
    count = min(count, length - first)
    return first + torch.arange(count) * (length - first) // count


def score_heads(model: Any, rows: Sequence[torch.Tensor], bar: tqdm) -> dict[int, list[float]]:
    """Estimate the KL to the original, in nats per token, if one KV head alone is MHLA: {layer: [score of each KV head]}.

    To second order, KL is half the square of the change, weighted by the Fisher information. A score drops the terms
    between tokens and keeps those of each token, <g, d>^2 / 2, where g is the gradient of the loss by the head's output,
    and d is MHLA's output minus softmax's. The row's own next tokens give the loss, not tokens that the original samples.

    Args:
        model: A converted language model in eval mode.
        rows: Rows of token ids, int64 [1, T] each, whose own tokens give the loss.
        bar: Progress bar, which moves by 2 for each row and MHLA layer.
    """
    trainable = [x for x in model.parameters() if x.requires_grad]
    for x in trainable:  # only the changes need gradients here
        x.requires_grad_(False)
    totals: dict[int, Any] = {}
    try:
        for ids in rows:
            num_tokens = ids.shape[1]
            positions = compared_positions(num_tokens - 1, SCORED_POSITIONS, num_tokens // 8)
            change = partial(ChangedCore, num_tokens=num_tokens, notify=bar.update)
            with replaced_cores(mhla_layers(model), change) as cores, recomputed_layers(model):
                log_p = log_probabilities(model, ids, positions)
                loss = -log_p.gather(-1, ids[:, positions + 1, None].to(log_p.device)).sum()
                gradients = torch.autograd.grad(loss, [core.change for core in cores.values()])
            for index, gradient in zip(cores, gradients, strict=True):
                kl = gradient.square().sum(0) / (2 * len(positions) * len(rows))
                totals[index] = totals.get(index, 0) + kl
    finally:
        for x in trainable:
            x.requires_grad_(True)
    return {index: total.tolist() for index, total in totals.items()}


def highest_scores(scores: dict[int, list[float]], count: int) -> dict[int, list[int]]:
    """Return the `count` KV heads with the highest scores, {layer: [head, ...]}; of equal ones, the earlier come first."""
    heads = [(layer, head) for layer, values in scores.items() for head in range(len(values))]
    by_score = sorted(heads, key=lambda head: -scores[head[0]][head[1]])
    kept_heads: dict[int, list[int]] = {}
    for layer, head in sorted(by_score[:count]):
        kept_heads.setdefault(layer, []).append(head)
    return kept_heads


@torch.no_grad()
def measure_candidates(model: Any, row: AskingRow, points: Sequence[Point], bar: tqdm) -> Point:
    """Add scores to each point in place, and return the original's scores. The model keeps the last point's "salient".

    "kl" is the KL to the original in nats per token, "recall" the mean log-probability of copied tokens, and "answers", if
    the row has any, the mean probability of an answer.
    """
    answers = row.is_answer.nonzero()[:, 0]
    starts = row.is_answer & ~row.is_answer.roll(1)
    end = int(answers[0]) - QUESTION_TOKENS if len(answers) else row.ids.shape[1]
    copied = torch.arange(end - end // 12, end)  # in the repeated part, before the first question
    compared = compared_positions(row.ids.shape[1] - 1, CURVE_POSITIONS, row.ids.shape[1] // 8)
    positions = torch.cat([compared, copied - 1, answers - 1])
    teacher: Any = None

    def measure() -> tuple[torch.Tensor, Point]:
        log_p = log_probabilities(model, row.ids, positions)[0].cpu()
        of_next = log_p.gather(-1, row.ids[0, positions + 1, None])[:, 0]
        _, of_copies, of_answers = of_next.split([len(compared), len(copied), len(answers)])
        predicted = log_p[: len(compared)]
        kl = 0.0 if teacher is None else max(0.0, float(mean_kl(teacher, predicted)))
        measured = {"kl": round(kl, 6), "recall": round(float(of_copies.mean()), 4)}
        if len(answers):
            by_answer = torch.zeros(int(starts.sum())).index_add(0, starts.cumsum(0)[answers] - 1, of_answers)
            measured["answers"] = round(float(by_answer.exp().mean()), 4)
        return predicted, measured

    layers = mhla_layers(model)
    with softmax_instead(model):
        teacher, original = measure()
    for point in points:
        set_salient(model, point["salient"])
        kept_cores = {
            layers[index].mhla: KeptHeadsCore(layers[index].mhla, point["kept_heads"].get(index, ()), bar.update)
            for index in layers
        }
        with replaced_cores(layers, kept_cores.__getitem__):
            point |= measure()[1]
    return original


def name_layers(kept_heads: dict[int, list[int]]) -> dict[str, list[int]]:
    """Return `kept_heads` with layer indices as strings, which JSON needs as keys."""
    return {str(layer): heads for layer, heads in kept_heads.items()}


def set_salient(model: Any, count: int) -> None:
    """Set the number of salient tokens per MHLA head of a converted language model, in place."""
    model.config.mhla["salient"] = count
    for attention in mhla_layers(model).values():
        core = attention.mhla
        core.settings, core.options = replace(core.settings, salient=count), replace(core.options, salient=count)


def parse_size(keep: float | int | str) -> int | None:
    """Convert a size such as "64MiB" to bytes; None if `keep` is not a size."""
    if isinstance(keep, str) and keep[-3:] in UNITS and is_number(keep[:-3]):
        return int(float(keep[:-3]) * UNITS[keep[-3:]])
    return None


def heads_within(max_bytes: int, sizes: dict[int, LayerSizes], context: int) -> list[int]:
    """Return [n], the largest number of KV heads (never all) that can keep softmax within `max_bytes` at `context` tokens.

    The list is empty if MHLA in all heads takes more than `max_bytes`, or is not smaller than softmax.
    """
    num_heads, token_bytes, state_bytes = (sum(column) for column in zip(*sizes.values(), strict=True))
    bytes_per_head = (token_bytes * context - state_bytes) / num_heads  # that keeping softmax adds
    if max_bytes < state_bytes or bytes_per_head <= 0:
        return []
    return [min(num_heads - 1, int((max_bytes - state_bytes) / bytes_per_head))]


def give_softmax_back(model: Any, kept_heads: dict[int, list[int]]) -> None:
    """Give `kept_heads`, {MHLA layer: [KV head, ...]}, softmax again, and record them in `model.config.mhla`, in place.

    A layer all of whose KV heads are kept becomes a softmax layer of the base. Raise ValueError if no MHLA would be left.
    """
    layers, config = mhla_layers(model), model.config
    partly = {index: heads for index, heads in kept_heads.items() if len(heads) < layers[index].mhla.num_kv_heads}
    mhla_indices = [index for index in layers if index not in kept_heads or index in partly]
    if not mhla_indices:
        raise ValueError(f"keep: got all {sum(map(len, kept_heads.values()))} KV heads, expected one left for MHLA.")
    if config._attn_implementation == ATTENTION_NAME:
        set_attention_function(config, "sdpa")  # the default of transformers
    for index, heads in kept_heads.items():
        if index in partly:
            keep_softmax_heads(layers[index], heads)
        else:
            restore_softmax(layers[index], config)
    softmax_heads = {str(index): heads for index, heads in partly.items()} or None
    settings = MHLASettings.from_dict(config.mhla)
    config.mhla = replace(settings, layers=mhla_indices, softmax_heads=softmax_heads).to_dict()
