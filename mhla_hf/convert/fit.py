"""What the MHLA heads of a converted language model learn from its softmax original, and which KV heads stay softmax.

The base's weights never change. First every layer learns the output of its own softmax, on the teacher's inputs
(`learn_outputs`). Then a gate for each KV head, between softmax and MHLA, learns against the loss of the whole model how
much that head is missed (`learn_gates`); the heads with the largest gates keep softmax.
"""

from collections.abc import Sequence

import torch
from torch import nn

from .teacher import causal_softmax, log_probabilities, mean_kl, mhla_layers, replaced_cores, softmax_instead

START_TOKENS = 1024  # of a row, at most, by which a far part starts
NEGLIGIBLE = 1e-3  # mass of all far tokens together, from which no start is made
GATE_START, GATE_RATE, GATE_PENALTY = 0.5, 0.08, 0.004
GATE_BETAS = (0.8, 0.95)
KL_POSITIONS = 256  # of a row, whose next tokens are compared: logits of a large vocabulary cost more than the layers


class OutputFit:
    """Feature maps and mixing of every MHLA core, learning their layer's softmax output with Adam.

    Args:
        model: a language model that was just converted, in eval mode.
        lr: learning rate of the first row; it falls to zero over `rows`.
        rows: how many rows there will be.
        updates: steps of Adam on each row.
    """

    def __init__(self, model: nn.Module, *, rows: int, lr: float = 3e-2, updates: int = 2):
        self.model, self.rows, self.lr, self.updates = model, rows, lr, updates
        self.done, self.losses = 0, {}
        self.optimizers, self.parameters = {}, {}
        for attention in mhla_layers(model).values():
            core = attention.mhla
            learned = [core.q_map, core.k_map, core.mixing]
            self.parameters[core] = [x for part in learned for x in part.parameters() if x.requires_grad]
            self.optimizers[core] = torch.optim.Adam(self.parameters[core], lr=lr)

    @torch.no_grad()
    def step(self, ids: torch.Tensor) -> float:
        """Learn from one row or batch of token ids `[B, T]`; the mean relative error of the outputs before it."""
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = self.lr * (1 - self.done / self.rows)
        with softmax_instead(self.model, observe=self.learn):
            self.model.base_model(input_ids=ids.to(self.model.device), use_cache=False)
        self.done += 1
        return sum(self.losses.values()) / len(self.losses)

    def learn(self, core, q, k, v, o, options) -> None:
        """The updates of one core, from what its layer saw and returned."""
        if not self.done:
            start_from_mass(core, *(x[:, :START_TOKENS] for x in (q, k)), options)
        energy = o.float().square().sum()
        for update in range(self.updates):
            with torch.enable_grad():
                error = (core(q, k, v, **options).float() - o.float()).square().sum() / energy
                gradients = torch.autograd.grad(error, self.parameters[core])
            if not update:
                self.losses[core] = float(error)
            for x, gradient in zip(self.parameters[core], gradients, strict=True):
                x.grad = gradient
            self.optimizers[core].step()
            self.optimizers[core].zero_grad()


def start_from_mass(core, q, k, options) -> None:
    """Start a core where its far part weighs as much as the far tokens of its softmax, over the tokens q and k.

    Maps with a bias first take the mean of what they map away: real keys before RoPE are mostly a constant.

    Args:
        core: a `DecayMHLA` with a local softmax.
        q, k: rotated queries `[B, T, H, K]` and keys `[B, T, G, K]`.
        options: of `DecayMHLA.forward`; scale and angles are read.
    """
    form, angles = core.form, options["angles"]
    angles = q.new_zeros(1, q.shape[1], 1, 0) if angles is None else angles[:, : q.shape[1]]
    far_q, far_k = core.unrotate(q, angles), core.unrotate(k, angles)
    for part, x in ((core.q_map, far_q), (core.k_map, far_k)):
        if hasattr(part, "bias"):
            part.bias.copy_(-torch.einsum("hk,hkf->hf", x.float().mean((0, 1)), part.weight.float()))
    fq, fk = core.q_map(far_q), core.k_map(far_k)
    token = torch.arange(q.shape[1], device=q.device)
    block = token // form.block_size
    far = (block[:, None] - block >= form.lag) & (token >= form.sinks)
    decays, _ = core.mixing()
    mixing = decays.matrix(int(block[-1]) + 1, form.lag)[:, block[:, None], block]
    share, scale = q.shape[2] // k.shape[2], form.scale if options["scale"] is None else options["scale"]
    masses = torch.zeros(2, q.shape[2], device=q.device)
    for row in range(len(q)):
        for head in range(q.shape[2]):
            group = head // share
            score = (q[row, :, head] @ k[row, :, group].T).float() * scale
            total = score.masked_fill(token[:, None] < token, float("-inf")).logsumexp(-1, keepdim=True)
            own = (fq[row, :, head] @ fk[row, :, group].T).float() * mixing[head]
            masses[:, head] += torch.stack([(x * far).sum() for x in ((score - total).exp() * far, own / total.exp())])
    started = (masses > NEGLIGIBLE).all(0)
    balance = core.mixing.balance
    balance.copy_(torch.where(started, (masses[0] / masses[1]).log(), balance))


class GatedCore(nn.Module):
    """g * softmax + (1 - g) * MHLA, with a gate g for each KV head.

    Args:
        core: the MHLA core.
    """

    def __init__(self, core: nn.Module):
        super().__init__()
        self.core = core
        self.gate = nn.Parameter(torch.full((core.num_kv_heads,), GATE_START))

    def forward(self, q, k, v, *, scale=None, **options):
        """As `MHLA.forward`, of rows without padding."""
        gate = self.gate.repeat_interleave(q.shape[2] // k.shape[2])[:, None].to(v.dtype)
        return gate * causal_softmax(q, k, v, scale) + (1 - gate) * self.core(q, k, v, scale=scale, **options)


def repeated_half(ids: torch.Tensor) -> torch.Tensor:
    """The first half of each row `[B, T]`, twice: what comes a second time can be recalled."""
    half = ids[:, : ids.shape[1] // 2]
    return torch.cat([half, half], 1)


def compared_positions(length: int, second_half: bool) -> torch.Tensor:
    """At most `KL_POSITIONS` positions of a row of `length` tokens, evenly spaced, in all of it or in its second half."""
    first = length // 2 if second_half else 0
    count = min(KL_POSITIONS, length - first)
    return first + torch.arange(count) * (length - first) // count


class GateFit:
    """A gate for each KV head of every MHLA layer, learning against the KL to the softmax original.

    Every row is used as it is and with its first half repeated, so that recall counts. The loss is the KL plus
    `GATE_PENALTY` times the sum of all gates.

    Args:
        model: a converted language model whose MHLA heads have learned, in eval mode.
        rows: token ids `[1, T]` each.
    """

    def __init__(self, model: nn.Module, rows: Sequence[torch.Tensor]):
        self.model = model
        self.gates = {
            index: torch.full((attention.mhla.num_kv_heads,), GATE_START)
            for index, attention in mhla_layers(model).items()
        }
        self.flat = nn.Parameter(torch.cat(list(self.gates.values())))
        self.optimizer = torch.optim.Adam([self.flat], lr=GATE_RATE, betas=GATE_BETAS, eps=1e-3)
        self.examples = []
        for ids in rows:
            for row, second_half in ((ids, False), (repeated_half(ids), True)):
                positions = compared_positions(row.shape[1], second_half)
                with torch.no_grad(), softmax_instead(model):
                    self.examples.append((row, positions, log_probabilities(model, row, positions).half()))
        self.done = 0

    def step(self) -> float:
        """One step of Adam on one example; its KL before the step, nats per token."""
        ids, positions, teacher = self.examples[self.done % len(self.examples)]
        with frozen(self.model), replaced_cores(self.model, GatedCore) as cores:
            sizes = [len(core.gate) for core in cores.values()]
            for core, value in zip(cores.values(), self.flat.detach().split(sizes), strict=True):
                core.gate = nn.Parameter(value.to(self.model.device))
            kl = mean_kl(teacher.float(), log_probabilities(self.model, ids, positions))
            gradients = torch.autograd.grad(kl, [core.gate for core in cores.values()])
        self.flat.grad = torch.cat([gradient.cpu() for gradient in gradients]) + GATE_PENALTY
        self.optimizer.step()
        self.flat.data.clamp_(0, 1)
        self.done += 1
        return float(kl)


class frozen:
    """Meanwhile no parameter of the model asks for gradients, so that a backward pass computes none of weights."""

    def __init__(self, model: nn.Module):
        self.parameters = [x for x in model.parameters() if x.requires_grad]

    def __enter__(self):
        for x in self.parameters:
            x.requires_grad_(False)

    def __exit__(self, *_):
        for x in self.parameters:
            x.requires_grad_(True)
