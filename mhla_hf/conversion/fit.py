"""Fitting the MHLA heads of a converted text model to its softmax original, and scoring its KV heads.

The base's weights never change. First, every MHLA layer that has parameters learns the output of its softmax original, on
the inputs that the original's layer gets (`OutputFit`). Then one backward pass of the original per row tells how much its
loss depends on what each KV head would lose (`score_heads`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from ..data import TokenRing
from ..models.transformers_api import recomputed_layers
from .teacher import ChangedCore, log_probabilities, mhla_layers, replaced_cores, run_body, softmax_instead

FIT_LR, UPDATES = 3e-2, 2  # learning rate of the first step, and updates by Adam per step
START_TOKENS = 1024  # per row, at most, from which the far part is initialized
NEGLIGIBLE = 1e-3  # a balance stays as it is if the far weights of all queries sum to at most this
# Positions per row at which predictions are compared, and whose loss scores heads. These are not all, because logits of a
# large vocabulary cost more than the layers.
KL_POSITIONS, SCORED_POSITIONS = 128, 1024


class AskingRow(NamedTuple):
    """A row that repeats its first tokens and asks for facts: ids, int64 [1, T], and which are in answers, bool [T]."""

    ids: torch.Tensor
    is_answer: torch.Tensor


@dataclass
class Rows:
    """The text of a conversion, in batches of token ids, int64 [N, T] each: to fit, to score heads by, and to measure on."""

    fit: list[torch.Tensor]
    scored: list[torch.Tensor]
    held_out: list[torch.Tensor]
    name: str
    asking: Any = None  # `AskingRow` of a language model, on which choices of softmax heads are compared

    @property
    def learned_from(self) -> list[torch.Tensor]:
        return [*self.fit, *self.scored, *([self.asking.ids] if self.asking else [])]


def row_length(source: Any, longest: int, shortest: int) -> int:
    """Return the tokens per row: `longest`, or a sixth of a text in memory if that is less; refuse less than `shortest`."""
    if not isinstance(source, TokenRing):
        return longest
    if (num_tokens := len(source.tokens)) < 6 * shortest:
        expected = f"at least {6 * shortest}: 6 rows of more than {shortest - 1}, the window and one block"
        raise ValueError(f"text: got {num_tokens} tokens, expected {expected}.")
    return min(longest, num_tokens // 6)


class OutputFit:
    """Fits the feature maps and the mixing of every MHLA core to the softmax output of its layer, by Adam.

    The constructor casts these parameters to fp32, in place; `finish` casts them back. The learning rate falls linearly to
    zero over `steps`.
    """

    def __init__(self, model: Any, *, steps: int) -> None:
        self.model = model
        self.steps = steps
        self.done = 0
        self.errors: dict[nn.Module, float] = {}
        self.parameters = self.fitted_parameters()
        self.dtypes = {x: x.dtype for parameters in self.parameters.values() for x in parameters}
        for x in self.dtypes:
            x.data = x.data.float()
        self.optimizers = {core: torch.optim.Adam(x, lr=FIT_LR) for core, x in self.parameters.items()}

    def fitted_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        parts = {x.mhla: (x.mhla.q_map, x.mhla.k_map, x.mhla.mixing) for x in mhla_layers(self.model).values()}
        return {core: [x for part in parts[core] for x in part.parameters() if x.requires_grad] for core in parts}

    def observe_softmax(self, inputs: Any) -> None:
        """Run the softmax original on inputs of a step, with `learn` as the observer of its layers."""
        with softmax_instead(self.model, observe=self.learn):
            run_body(self.model, inputs)

    def start(self, core: Any, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> None:
        """Initialize a core from the rotated q and k of its first update, in place; see `learn` for the arguments."""
        q, k = q[:, :START_TOKENS], k[:, :START_TOKENS]
        far_q, far_k = q, k
        if options.get("cos_sin") is not None:
            cos_sin = options["cos_sin"][:, : q.shape[1]]
            far_q, far_k = core.unrotate(q, cos_sin), core.unrotate(k, cos_sin)
        center_maps(core, far_q, far_k)
        if core.settings.windowed:
            balance_masses(core, q, k, core.q_map(far_q), core.k_map(far_k), options.get("scale"))

    def attend(
        self, core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Compute the output of a core, [B, T, H, V]; see `learn` for the arguments."""
        return core(q, k, v, **options)

    def finish(self) -> None:
        """Cast the parameters back to the dtypes that they had before the fit, in place."""
        for x, dtype in self.dtypes.items():
            x.data = x.data.to(dtype)

    @torch.no_grad()
    def step(self, inputs: Any) -> float:
        """Update all cores on a batch, in place, and return the mean over layers of their squared errors before this step.

        Errors are divided by the sum of squares of the softmax outputs. The first step initializes the cores from its batch.
        """
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = FIT_LR * (1 - self.done / self.steps)
        self.observe_softmax(inputs)
        self.done += 1
        return sum(self.errors.values()) / len(self.errors)

    def learn(
        self, core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Update one core so that its output for q, k, and v comes closer to o; see `SoftmaxCore` for the arguments."""
        if not self.done:
            self.start(core, q, k, options)
        energy = o.float().square().sum()
        if not energy:  # such as where v_proj is zero: MHLA is zero, too
            self.errors[core] = 0.0
            return
        for update in range(UPDATES):
            with torch.enable_grad():
                error = (self.attend(core, q, k, v, options).float() - o.float()).square().sum() / energy
                gradients = torch.autograd.grad(error, self.parameters[core])
            if not update:
                self.errors[core] = float(error.detach())
            for x, gradient in zip(self.parameters[core], gradients, strict=True):
                x.grad = gradient
            self.optimizers[core].step()
            self.optimizers[core].zero_grad()

    def state_dict(self) -> dict[str, Any]:
        values = [[x.detach().clone() for x in parameters] for parameters in self.parameters.values()]
        return {"done": self.done, "values": values, "optimizers": [x.state_dict() for x in self.optimizers.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]
        for core, values, optimizer_state in zip(self.parameters, state["values"], state["optimizers"], strict=True):
            for x, value in zip(self.parameters[core], values, strict=True):
                x.data.copy_(value)
            self.optimizers[core].load_state_dict(optimizer_state)


def center_maps(core: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Set the bias of each feature map to cancel its mean input, which dominates q and k before RoPE in trained models."""
    for feature_map, x in ((core.q_map, q), (core.k_map, k)):
        if hasattr(feature_map, "bias"):
            mean = x.float().mean((0, 1))  # [H or G, K]
            feature_map.bias.copy_(-torch.einsum("hk,hkf->hf", mean, feature_map.weight.float()))


def set_balance(
    core: Any, weights: Callable[[int, int], Sequence[torch.Tensor]], num_rows: int, is_far: torch.Tensor
) -> None:
    """Initialize the balance so that far tokens weigh as much in MHLA as they do in the softmax, in place.

    For a head and a row of a batch, `weights` returns the scores [Q, S] of Q queries and S keys, the log of the sum of
    e^score over all keys [Q, 1], and the weights of MHLA on the scale of e^score [Q, S]. `is_far` is bool [Q, S].
    """
    for head in range(len(core.mixing.balance)):
        masses: Any = 0.0  # [2], the weight of all far tokens in the softmax and in MHLA
        for row in range(num_rows):
            score, log_total, mhla_weight = weights(head, row)
            both = ((score - log_total).exp(), mhla_weight / log_total.exp())
            masses = masses + torch.stack([(weight * is_far).sum() for weight in both])
        if bool((masses > NEGLIGIBLE).all()):
            core.mixing.balance[head] = (masses[0] / masses[1]).log()


def balance_masses(
    core: Any, q: torch.Tensor, k: torch.Tensor, q_features: torch.Tensor, k_features: torch.Tensor, scale: float | None
) -> None:
    """Initialize the balance of a core for sequences (`set_balance`) from rotated q and k and far features, [B, T, ...]."""
    options = core.options
    token = torch.arange(q.shape[1], device=q.device)
    block = token // options.block_size
    distance = block[:, None] - block  # [T, T]
    is_far = ((distance.abs() if options.both_ways else distance) >= options.window) & (token >= options.sinks)
    is_hidden = torch.zeros_like(is_far) if options.both_ways else token[:, None] < token
    mixing = core.mixing()[0].matrix(int(block[-1]) + 1, options.window, options.both_ways)  # [H, M, M]
    mixing = mixing[:, block[:, None], block]  # [H, T, T]
    scale = options.scale if scale is None else scale

    def weights(head: int, row: int) -> Sequence[torch.Tensor]:
        kv_head = head * k.shape[2] // q.shape[2]
        score = (q[row, :, head] @ k[row, :, kv_head].T).float() * scale
        log_total = score.masked_fill(is_hidden, float("-inf")).logsumexp(-1, keepdim=True)
        weight = (q_features[row, :, head] @ k_features[row, :, kv_head].T).float() * mixing[head]
        return score, log_total, weight

    set_balance(core, weights, len(q), is_far)


def read_twice(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return rows that repeat the start of each row, as long as positions allow: recall predicts the second copy."""
    config: Any = model.config
    max_tokens = getattr(config, "max_position_embeddings", 2 * ids.shape[1]) // 2
    return torch.cat(2 * [ids[:, :max_tokens]], 1)


def once_and_twice(model: Any, ids: torch.Tensor, once: torch.Tensor, twice: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute log-probabilities at positions `once` of a row, and at positions `twice` of the row read twice."""
    row = read_twice(model, ids)
    if row.shape[1] < 2 * ids.shape[1]:  # else one pass is enough: the first copy is the row
        return log_probabilities(model, ids, once), log_probabilities(model, row, twice)
    return log_probabilities(model, row, torch.cat([once, twice])).split([len(once), len(twice)], 1)


def compared_positions(length: int, count: int = KL_POSITIONS, first: int = 0) -> torch.Tensor:
    """Return up to `count` evenly spaced positions, int64 [N], from `first` to `length`."""
    count = min(count, length - first)
    return first + torch.arange(count) * (length - first) // count


def score_heads(model: Any, rows: Sequence[torch.Tensor], bar: tqdm) -> dict[int, list[float]]:
    """Estimate the KL to the original, in nats per token, if one KV head alone is MHLA: {layer: [score of each KV head]}.

    To second order, KL is half the square of the change, weighted by the Fisher information. A score keeps the terms of
    single tokens, <g, d>^2 / 2, where g is the gradient of the loss by the head's output, and d is MHLA's output minus
    softmax's. The row's own tokens stand for tokens that the original draws.

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
