"""The output head of a causal language model apart from its body, so that a loss never needs all logits of a batch."""

import contextlib
from typing import NamedTuple

import torch
from torch import nn

PROBE = 4  # tokens
RANGE = 100.0  # logits up to this size show what the model does with them
CHUNK = {"cpu": 1 << 22}  # logits at a time
GPU_CHUNK = 1 << 25


class OutputHead(NamedTuple):
    """Logits of hidden states x: cap * tanh(scale * layer(x) / cap), or without a cap scale * layer(x)."""

    layer: nn.Linear
    scale: float
    cap: float | None

    def shape(self, logits):
        """What the model makes of its linear layer's output."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def __call__(self, hidden):
        return self.shape(self.layer(hidden))


@torch.no_grad()
def find_head(model, ids) -> OutputHead | str:
    """The output head of `model`, or in a few words why it cannot be taken apart.

    Tried on a few of the tokens `ids` `[B, L]`: the model runs with made-up logits in the place of its linear layer's, and
    what it gives back has to be what `OutputHead.shape` makes of them. Random generators stay as they are.
    """
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    if type(layer) is not nn.Linear:
        return f"its output head is a {type(layer).__name__}, not a torch.nn.Linear"
    if type(layer.weight.data) is not torch.Tensor:
        return f"its output head's weight is a {type(layer.weight.data).__name__}"
    config, ids, inputs = model.config, ids[:1, :PROBE], []
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    head = OutputHead(layer, float(scale), getattr(config, "final_logit_softcapping", None))
    made = torch.linspace(-RANGE, RANGE, ids.numel() * layer.out_features, device=ids.device)
    made = made.view(layer.out_features, *ids.shape).movedim(0, -1)

    def answer(hidden):
        inputs.append(hidden.shape)
        return made

    with torch.random.fork_rng([ids.device] if ids.is_cuda else []), _replaced(layer, answer):
        logits = model(input_ids=ids, use_cache=False).logits
    if inputs != [(*ids.shape, layer.in_features)]:
        return "its output head does not read one hidden state of each token"
    if logits.shape != made.shape or not torch.allclose(logits.float(), head.shape(made), rtol=1e-5, atol=1e-5):
        return "its logits are more than a scaled or soft-capped output of its linear layer"
    return head


def run_body(model, head, ids):
    """The output of `model` for ids `[B, L]`, its logits left out, and what its head reads, `[B, L, width]`."""
    inputs = []

    def keep(hidden):
        inputs.append(hidden)
        return hidden[:, :1].detach()

    with _replaced(head.layer, keep):
        output = model(input_ids=ids, use_cache=False)
    return output, inputs[0]


@contextlib.contextmanager
def _replaced(module, forward):
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:  # accelerate's
            module.forward = before


class _SumInChunks(torch.autograd.Function):
    """Sums of a loss over tokens, and in the same pass its gradients, so that the logits of a chunk are let go at once."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, loss, others, learns):
        """See `sum_in_chunks`. weight, bias: those of `head`, which autograd has to see."""
        vocab = hidden.shape[-1] if head is None else head.layer.out_features
        rows = max(1, CHUNK.get(hidden.device.type, GPU_CHUNK) // vocab)
        of_hidden, of_weight, of_bias = (need and learns for need in ctx.needs_input_grad[:3])
        learns = of_hidden or of_weight or of_bias
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_weight = torch.zeros_like(weight) if of_weight else None
        d_bias = torch.zeros_like(bias) if of_bias else None
        sums = 0
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            raw = (hidden[part] if head is None else head.layer(hidden[part])).detach().requires_grad_(learns)
            with torch.enable_grad():
                parts = loss(raw if head is None else head.shape(raw), *(x[part] for x in others))
                learned = parts[0]
            sums = sums + parts.detach()
            if not learns:
                continue
            (d_raw,) = torch.autograd.grad(learned, raw)
            if of_hidden:
                d_hidden[part] = d_raw if head is None else d_raw @ weight.to(d_raw.dtype)
            if of_weight:
                d_weight.addmm_(d_raw.to(weight.dtype).T, hidden[part].to(weight.dtype))
            if of_bias:
                d_bias += d_raw.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_sums):
        gradients = (x if x is None else d_sums[0].to(x.dtype) * x for x in ctx.saved_tensors)
        return *gradients, None, None, None, None


def sum_in_chunks(hidden, head, loss, others=()):
    """Sum over tokens of what `loss` gives; only its first element has a gradient, to the hidden states and the head.

    Args:
        hidden: `[N, width]`, which `head` makes logits of; with None they are the logits `[N, vocabulary]`.
        loss: called with the logits of a chunk and the same rows of `others`, tensors `[N, ...]`; gives a vector of sums.
    """
    weight, bias = (None, None) if head is None else (head.layer.weight, head.layer.bias)
    return _SumInChunks.apply(hidden, weight, bias, head, loss, others, torch.is_grad_enabled())
