"""What the MHLA heads of a converted model of text learn from its softmax original, and which KV heads stay softmax.

The base's weights never change. First every layer learns the output of its own softmax, on the teacher's inputs
(`OutputFit`). Then a gate for each KV head, between softmax and MHLA, learns against the loss of the whole model how much
that head is missed (`GateFit`); the heads with the largest gates keep softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..models.transformers_api import recomputed_layers
from .teacher import (
    log_probabilities,
    mean_kl,
    mhla_layers,
    replaced_cores,
    run_body,
    softmax_attention,
    softmax_instead,
)

START_TOKENS = 1024  # of a row, at most, by which a far part starts
NEGLIGIBLE = 1e-3  # mass of all far tokens together, from which no start is made
GATE_START, GATE_LR, GATE_PENALTY = 0.5, 0.08, 0.004
GATE_BETAS, GATE_EPS = (0.8, 0.95), 1e-3
KL_POSITIONS = 128  # of a row, whose next tokens are compared: logits of a large vocabulary cost more than the layers


@dataclass
class Rows:
    """Token ids `[N, T]` each: to learn outputs from, to learn gates from, and those that nothing learned from."""

    fit: list[torch.Tensor]
    gates: list[torch.Tensor]
    held_out: list[torch.Tensor]
    name: str


class OutputFit:
    """Feature maps and mixing of every MHLA core, learning their layer's softmax output by Adam.

    Args:
        model: a language model or an encoder that was just converted, in eval mode.
        steps: how often `step` will be called; the learning rate falls to zero over them.
        lr: learning rate at the start.
        updates: steps of Adam on each row.
    """

    def __init__(self, model: nn.Module, *, steps: int, lr: float = 3e-2, updates: int = 2):
        self.model, self.steps, self.lr, self.updates = model, steps, lr, updates
        self.done, self.errors = 0, {}
        self.parameters, self.optimizers, self.dtypes = {}, {}, {}
        for attention in mhla_layers(model).values():
            core = attention.mhla
            parts = (core.q_map, core.k_map, core.mixing)
            self.parameters[core] = [x for part in parts for x in part.parameters() if x.requires_grad]
            for x in self.parameters[core]:
                self.dtypes[x] = x.dtype
                x.data = x.data.float()
            self.optimizers[core] = torch.optim.Adam(self.parameters[core], lr=lr)

    def finish(self) -> None:
        """Give the parameters, which learn in fp32, their dtype back."""
        for x, dtype in self.dtypes.items():
            x.data = x.data.to(dtype)

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> float:
        """Learn from rows of token ids `[B, T]`; the mean over layers of the relative error of the output before."""
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = self.lr * (1 - self.done / self.steps)
        with softmax_instead(self.model, observe=self.learn):
            run_body(self.model, ids)
        self.done += 1
        return sum(self.errors.values()) / len(self.errors)

    def learn(self, core, q, k, v, o, options) -> None:
        """The updates of one core, from what its layer saw and returned."""
        if not self.done:
            start_from_inputs(core, *(x[:, :START_TOKENS] for x in (q, k)), options)
        energy = o.float().square().sum()
        for update in range(self.updates):
            with torch.enable_grad():
                error = (core(q, k, v, **options).float() - o.float()).square().sum() / energy
                gradients = torch.autograd.grad(error, self.parameters[core])
            if not update:
                self.errors[core] = float(error.detach())
            for x, gradient in zip(self.parameters[core], gradients, strict=True):
                x.grad = gradient
            self.optimizers[core].step()
            self.optimizers[core].zero_grad()

    def state_dict(self) -> dict:
        """What `load_state_dict` needs to go on: parameters, optimizers and steps done."""
        values = [[x.detach().clone() for x in parameters] for parameters in self.parameters.values()]
        return {"done": self.done, "values": values, "optimizers": [x.state_dict() for x in self.optimizers.values()]}

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state_dict` was called."""
        self.done = state["done"]
        saved = zip(
            self.parameters.values(), self.optimizers.values(), state["values"], state["optimizers"], strict=True
        )
        for parameters, optimizer, values, optimizer_state in saved:
            for x, value in zip(parameters, values, strict=True):
                x.data.copy_(value)
            optimizer.load_state_dict(optimizer_state)


def start_from_inputs(core, q: torch.Tensor, k: torch.Tensor, options: dict) -> None:
    """Start maps with a bias at the mean of what they map: real queries and keys before RoPE are mostly a constant.

    With a local softmax the far part then starts where it weighs as much as the far tokens of the softmax do.

    Args:
        core: the MHLA core.
        q, k: rotated queries `[B, T, H, K]` and keys `[B, T, G, K]`.
        options: of the core; scale and angles are read.
    """
    if options.get("angles") is not None:
        angles = options["angles"][:, : q.shape[1]]
        far_q, far_k = core.unrotate(q, angles), core.unrotate(k, angles)
    else:
        far_q, far_k = q, k
    for part, x in ((core.q_map, far_q), (core.k_map, far_k)):
        if hasattr(part, "bias"):
            part.bias.copy_(-torch.einsum("hk,hkf->hf", x.float().mean((0, 1)), part.weight.float()))
    if core.settings.local:
        balance_masses(core, q, k, core.q_map(far_q), core.k_map(far_k), options.get("scale"))


def balance_masses(core, q: torch.Tensor, k: torch.Tensor, fq: torch.Tensor, fk: torch.Tensor, scale: float | None):
    """Start the balance of a core where far features `fq`, `fk` `[B, T, H or G, K]` weigh what the softmax's far tokens do.

    Args:
        core: a `DecayMHLA` with a local softmax.
        q, k: rotated queries `[B, T, H, K]` and keys `[B, T, G, K]`.
        scale: of the softmax; None is K**-0.5.
    """
    form, balance = core.form, core.mixing.balance
    token = torch.arange(q.shape[1], device=q.device)
    block = token // form.block_size
    distance = block[:, None] - block
    far = ((distance.abs() if form.both_ways else distance) >= form.lag) & (token >= form.sinks)
    unseen = torch.zeros_like(far) if form.both_ways else token[:, None] < token
    mixing = core.mixing()[0].matrix(int(block[-1]) + 1, form.lag, form.both_ways)[:, block[:, None], block]
    scale = form.scale if scale is None else scale
    for head in range(q.shape[2]):
        group, masses = head * k.shape[2] // q.shape[2], 0.0
        for row in range(len(q)):
            score = (q[row, :, head] @ k[row, :, group].T).float() * scale
            total = score.masked_fill(unseen, float("-inf")).logsumexp(-1, keepdim=True)
            weight = (fq[row, :, head] @ fk[row, :, group].T).float() * mixing[head] / total.exp()
            masses = masses + torch.stack([(x * far).sum() for x in ((score - total).exp(), weight)])
        if bool((masses > NEGLIGIBLE).all()):
            balance[head] = (masses[0] / masses[1]).log()


class GatedCore(nn.Module):
    """g * softmax + (1 - g) * MHLA, with a gate g for each KV head.

    Args:
        core: the MHLA core.
        gate: its gates `[G]`.
    """

    def __init__(self, core: nn.Module, gate: torch.Tensor):
        super().__init__()
        self.core, self.gate = core, nn.Parameter(gate)

    def forward(self, q, k, v, *, scale=None, **options):
        """As the core's, of rows without padding."""
        gate = self.gate.repeat_interleave(q.shape[2] // k.shape[2])[:, None].to(v.dtype)
        o = softmax_attention(q, k, v, scale, self.core.causal)
        return gate * o + (1 - gate) * self.core(q, k, v, scale=scale, **options)


def read_twice(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The beginning of each row `[B, T]`, as much as has room, twice: what comes a second time can be recalled."""
    room = getattr(model.config, "max_position_embeddings", 2 * ids.shape[1]) // 2
    return torch.cat(2 * [ids[:, :room]], 1)


def compared_positions(length: int, second_half: bool) -> torch.Tensor:
    """At most `KL_POSITIONS` positions of a row of `length` tokens, evenly spaced, in all of it or in its second half."""
    first = length // 2 if second_half else 0
    count = min(KL_POSITIONS, length - first)
    return first + torch.arange(count) * (length - first) // count


class GateFit:
    """A gate for each KV head of every MHLA layer, learning against the KL to the softmax original.

    Every row is read as it is and twice over, so that recall counts. The loss is the KL plus `GATE_PENALTY` times the sum of
    all gates.

    Args:
        model: a converted language model whose MHLA heads have learned, in eval mode.
        rows: token ids `[1, T]` each.
    """

    def __init__(self, model: nn.Module, rows: Sequence[torch.Tensor]):
        self.model, self.done = model, 0
        self.sizes = {index: attention.mhla.num_kv_heads for index, attention in mhla_layers(model).items()}
        self.gates = nn.Parameter(torch.full((sum(self.sizes.values()),), GATE_START))
        self.optimizer = torch.optim.Adam([self.gates], lr=GATE_LR, betas=GATE_BETAS, eps=GATE_EPS)
        self.examples = []
        for ids in rows:
            for row, second_half in ((ids, False), (read_twice(model, ids), True)):
                positions = compared_positions(row.shape[1], second_half)
                with torch.no_grad(), softmax_instead(model):
                    self.examples.append((row, positions, log_probabilities(model, row, positions).half()))

    def step(self) -> float:
        """One step of Adam on one example; the KL before it, nats per token."""
        ids, positions, teacher = self.examples[self.done % len(self.examples)]
        gates = iter(self.gates.detach().to(self.model.device).split(list(self.sizes.values())))
        learned = [x for x in self.model.parameters() if x.requires_grad]
        for x in learned:  # whose gradients nobody asks for
            x.requires_grad_(False)
        try:
            gated = replaced_cores(self.model, lambda core: GatedCore(core, next(gates)))
            with gated as cores, recomputed_layers(self.model):
                kl = mean_kl(teacher.float(), log_probabilities(self.model, ids, positions))
                gradients = torch.autograd.grad(kl, [core.gate for core in cores.values()])
        finally:
            for x in learned:
                x.requires_grad_(True)
        self.gates.grad = torch.cat([gradient.cpu() for gradient in gradients]) + GATE_PENALTY
        self.optimizer.step()
        self.gates.data.clamp_(0, 1)
        self.done += 1
        return float(kl.detach())

    def by_layer(self) -> dict[int, list[float]]:
        """The gates of each layer: {layer: [gate of each KV head]}."""
        gates = self.gates.detach().split(list(self.sizes.values()))
        return {layer: gate.tolist() for layer, gate in zip(self.sizes, gates, strict=True)}

    def state_dict(self) -> dict:
        """What `load_state_dict` needs to go on: gates, optimizer and steps done."""
        return {"done": self.done, "gates": self.gates.detach().clone(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Go on where `state_dict` was called."""
        self.done = state["done"]
        self.gates.data.copy_(state["gates"])
        self.optimizer.load_state_dict(state["optimizer"])


def largest_gates(gates: dict[int, list[float]], count: int) -> dict[int, list[int]]:
    """The `count` KV heads with the largest gates: {layer: [KV head, ...]}, from {layer: [gate of each KV head]}."""
    heads = [(layer, head) for layer, values in gates.items() for head in range(len(values))]
    kept_heads = {}
    for layer, head in sorted(sorted(heads, key=lambda place: -gates[place[0]][place[1]])[:count]):
        kept_heads.setdefault(layer, []).append(head)
    return kept_heads
