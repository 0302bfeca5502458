"""Fitting MHLA cores to the outputs of their softmax originals, on the inputs that the original's layers get.

The base's weights never change. What each kind of model is fitted on is in `encoder.py` and `grid_fit.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..ops.windowed.two_way import distance_mixing
from .teacher import mhla_layers, run_body, softmax_instead

FIT_LR, UPDATES = 3e-2, 2  # learning rate of the first step, and updates by Adam per step
START_TOKENS = 1024  # a core is initialized from the first tokens of each row, at most this many
NEGLIGIBLE = 1e-3  # a head's balance stays as it is if its far weights, in softmax or MHLA, sum to at most this


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
        """Run the softmax original on the inputs of a step; after each of its layers, `learn` updates the core."""
        with softmax_instead(self.model, observe=self.learn):
            run_body(self.model, inputs)

    def start(self, core: Any, q: torch.Tensor, k: torch.Tensor, options: dict[str, Any]) -> None:
        """Initialize a core from q and k of its first update, in place; see `learn` for the arguments."""
        q, k = q[:, :START_TOKENS], k[:, :START_TOKENS]
        center_maps(core, q, k)
        if core.settings.windowed:
            self.start_balance(core, q, k, options.get("scale"))

    def start_balance(self, core: Any, q: torch.Tensor, k: torch.Tensor, scale: float | None) -> None:
        """Set the balance (see `set_balance`) of an encoder's core in place, from q [B, T, H, K] and k [B, T, G, K]."""
        options, queries_per_kv = core.options, q.shape[2] // k.shape[2]
        q_features, k_features = core.q_map(q), core.k_map(k)
        block = torch.arange(q.shape[1], device=q.device) // options.block_size
        mixing = distance_mixing(core.mixing()[0], int(block[-1]) + 1)[:, block[:, None], block]  # [G, T, T]
        scale = options.scale if scale is None else scale

        def weights(head: int, row: int) -> Sequence[torch.Tensor]:
            kv_head = head // queries_per_kv
            score = (q[row, :, head] @ k[row, :, kv_head].T).float() * scale
            weight = (q_features[row, :, head] @ k_features[row, :, kv_head].T).float() * mixing[kv_head]
            return score, score.logsumexp(-1, keepdim=True), weight

        set_balance(core, weights, len(q), (block[:, None] - block).abs() >= options.window)

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
    """Set each feature map's bias, if any, to cancel its mean input, which dominates q and k in trained models; in place."""
    for feature_map, x in ((core.q_map, q), (core.k_map, k)):
        if hasattr(feature_map, "bias"):
            mean = x.float().mean((0, 1))  # [H or G, K]
            feature_map.bias.copy_(-torch.einsum("hk,hkf->hf", mean, feature_map.weight.float()))


def set_balance(
    core: Any, weights: Callable[[int, int], Sequence[torch.Tensor]], num_rows: int, is_far: torch.Tensor
) -> None:
    """Set in place each head's balance, the log of a factor on MHLA's weights, to give far keys the total weight of softmax.

    For a head and a row of a batch, `weights` returns the scores [Q, S] of Q queries and S keys, the log of the sum of
    e^score over all keys [Q, 1], and MHLA's weights on the scale of e^score [Q, S]. `is_far` [Q, S]: outside the window.
    """
    for head in range(len(core.mixing.balance)):
        masses: Any = 0.0  # [2], the weight of all far tokens in the softmax and in MHLA
        for row in range(num_rows):
            score, log_total, mhla_weight = weights(head, row)
            both = ((score - log_total).exp(), mhla_weight / log_total.exp())
            masses = masses + torch.stack([(weight * is_far).sum() for weight in both])
        if bool((masses > NEGLIGIBLE).all()):
            core.mixing.balance[head] = (masses[0] / masses[1]).log()
