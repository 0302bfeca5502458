"""Compute the loss of a causal language model in chunks of tokens, so that only the logits of one chunk exist at a time.

For this, the model's other layers run without its output head, which must be a linear layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

NUM_PROBE_TOKENS = 4
PROBE_RANGE = 100.0  # probe logits go from -100 to 100, so that a soft cap changes them
CPU_CHUNK = 1 << 22  # logits per chunk
GPU_CHUNK = 1 << 25


class OutputHead(NamedTuple):
    """A linear output head with logits cap * tanh(scale * layer(x) / cap), or scale * layer(x) without a cap."""

    layer: nn.Linear
    scale: float
    cap: float | None

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.transform(self.layer(hidden))


@torch.no_grad()
def find_head(model: Any, ids: torch.Tensor) -> OutputHead | str:
    """Return a model's output head, or the reason why it cannot run apart from the other layers.

    The model runs on some of `ids` [B, L] with known logits as the head's output, to check that only a scale or cap follows.
    """
    name, layer = type(model).__name__, getattr(model, "get_output_embeddings", lambda: None)()
    if type(layer) is not nn.Linear:
        return f"{name}: its output head is a {type(layer).__name__}, not a torch.nn.Linear"
    config = model.config
    ids = ids[:1, :NUM_PROBE_TOKENS]
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    head = OutputHead(layer, float(scale), getattr(config, "final_logit_softcapping", None))
    probe = torch.linspace(-PROBE_RANGE, PROBE_RANGE, ids.numel() * layer.out_features, device=ids.device)
    probe = probe.view(layer.out_features, *ids.shape).movedim(0, -1)
    input_shapes: list[torch.Size] = []

    def return_probe(_layer: Any, inputs: tuple[torch.Tensor], _output: Any) -> torch.Tensor:
        input_shapes.append(inputs[0].shape)
        return probe

    with torch.random.fork_rng([ids.device] if ids.is_cuda else []), layer.register_forward_hook(return_probe):
        logits = model(input_ids=ids, use_cache=False).logits
    if input_shapes != [(*ids.shape, layer.in_features)]:
        return f"{name}: its output head does not read one hidden state of each token"
    if logits.shape != probe.shape or not torch.allclose(logits.float(), head.transform(probe), rtol=1e-5, atol=1e-5):
        return f"{name}: its logits are more than a scaled or soft-capped output of its linear layer"
    return head


def run_without_head(model: Any, head: OutputHead | None, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return a model's output, and the inputs of its `head` [B, L, width] or, if `head` is None, the logits."""
    if head is None:
        output = model(input_ids=ids, use_cache=False)
        return output, output.logits
    hidden: list[torch.Tensor] = []

    def keep_input(_layer: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        hidden.extend(inputs)
        return inputs[0][:, :1].detach()

    with head.layer.register_forward_pre_hook(keep_input):
        output = model(input_ids=ids, use_cache=False)
    return output, hidden[0]


class SumInChunks(torch.autograd.Function):
    """Computes S sums over N tokens, with the logits of one chunk at a time. Only the first sum has a gradient.

    `loss(logits, *rows)` returns the sums [S] over a chunk from its logits and the same rows of `token_tensors`, [N, ...]
    each. The forward pass computes the gradients, so that it can free the logits of a chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, head: OutputHead | None,
        loss: Callable[..., torch.Tensor], token_tensors: Sequence[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Return the sums [S]. `hidden` [N, width] are inputs of `head` (`weight`, `bias`) or, if it is None, logits."""
        vocab_size = hidden.shape[-1] if head is None else head.layer.out_features
        rows = max(1, (CPU_CHUNK if hidden.device.type == "cpu" else GPU_CHUNK) // vocab_size)
        tensors: Any = zip((hidden, weight, bias), ctx.needs_input_grad, strict=False)
        gradients = [torch.zeros_like(x) if is_needed else None for x, is_needed in tensors]
        d_hidden, d_weight, d_bias = gradients
        need_any = any(x is not None for x in gradients)
        sums: Any = 0
        for start in range(0, len(hidden), rows):
            chunk = slice(start, start + rows)
            raw = (hidden[chunk] if head is None else head.layer(hidden[chunk])).detach().requires_grad_(need_any)
            with torch.enable_grad():
                logits = raw if head is None else head.transform(raw)
                chunk_sums = loss(logits, *(x[chunk] for x in token_tensors))
                differentiable = chunk_sums[0]
            sums = sums + chunk_sums.detach()
            if not need_any:
                continue
            (d_raw,) = torch.autograd.grad(differentiable, raw)
            if d_hidden is not None:
                d_hidden[chunk] = d_raw if weight is None else d_raw @ weight.to(d_raw.dtype)
            if d_weight is not None:
                d_weight.addmm_(d_raw.to(d_weight.dtype).T, hidden[chunk].to(d_weight.dtype))
            if d_bias is not None:
                d_bias += d_raw.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_sums: torch.Tensor) -> Any:
        gradients = (x if x is None else d_sums[0].to(x.dtype) * x for x in ctx.saved_tensors)
        return *gradients, None, None, None
