"""The softmax original of a converted text model, without a second copy of it in memory.

A model that was just converted still has the base's projections, so it is its own teacher: with softmax in place of its MHLA
cores, it computes what the original does.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..models.encoder.encoder_attention import find_encoder_attentions
from ..models.families import ENCODERS
from ..models.language.causal_attention import find_causal_attentions
from ..nn.core import softmax_attention
from ..nn.heads import HeadSplit
from .model_family import family_of


class SoftmaxCore(nn.Module):
    """Computes softmax attention in place of an MHLA core, for rows without padding; causal if the core is.

    After each forward pass, it calls `observe(core, q, k, v, o, options)`, where q is [B, T, H, K], k [B, T, G, K], v
    [B, T, G, V], the output o [B, T, H, V], and `options` has the keyword arguments to call `core` with.
    """

    def __init__(self, core: Any, observe: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.core = core
        self.observe = observe

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        o = softmax_attention(q, k, v, options.get("scale"), self.core.causal)
        if self.observe is not None:
            names = ("scale", "hidden_states")
            self.observe(self.core, q, k, v, o, {name: options[name] for name in names if name in options})
        return o


class ChangedCore(nn.Module):
    """Computes softmax attention in place of an MHLA core, plus `change` [T, G] times what MHLA would change.

    `change` is 0, so its gradient is the effect on the loss, to first order, of MHLA in each token and KV head. `notify` is
    called after each forward pass.
    """

    def __init__(self, core: Any, num_tokens: int, notify: Callable[[], object]) -> None:
        super().__init__()
        self.core, self.notify = core, notify
        self.change = nn.Parameter(torch.zeros(num_tokens, core.num_kv_heads))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **options: Any
    ) -> torch.Tensor:
        o = softmax_attention(q, k, v, scale, self.core.causal)
        with torch.no_grad():
            difference = self.core(q, k, v, scale=scale, **options) - o
        self.notify()
        change = self.change.to(o).repeat_interleave(q.shape[2] // k.shape[2], 1)
        return o + change[..., None] * difference


class KeptHeadsCore(nn.Module):
    """Computes softmax attention in some KV heads of an MHLA core, and MHLA in the others, for rows without padding.

    `notify` is called after each forward pass.
    """

    def __init__(self, core: Any, kept_heads: Sequence[int], notify: Callable[[], object]) -> None:
        super().__init__()
        self.core, self.split, self.notify = core, HeadSplit(kept_heads, core.num_kv_heads), notify

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, **options: Any
    ) -> torch.Tensor:
        o = self.core(q, k, v, scale=scale, **options)
        self.notify()
        if not self.split.counts[True]:
            return o
        kept_q, kept_k, kept_v = (self.split.part(x, True, 2) for x in (q, k, v))
        parts = {True: softmax_attention(kept_q, kept_k, kept_v, scale, self.core.causal).to(o.dtype)}
        if self.split.counts[False]:
            parts[False] = self.split.part(o, False, 2)
        return self.split.join(parts, 2)


def is_encoder(model: Any) -> bool:
    return family_of(model) in ENCODERS


def mhla_layers(model: Any) -> dict[int, Any]:
    """Return the MHLA attention modules of a language model or text encoder, by layer. Raise TypeError if it has none."""
    if is_encoder(model):
        attentions = find_encoder_attentions(model)
    else:
        found = find_causal_attentions(model) if isinstance(model, nn.Module) else {}
        attentions = {index: attention for index, attention in found.items() if getattr(attention, "is_causal", True)}
    layers = {index: attention for index, attention in attentions.items() if hasattr(attention, "mhla")}
    if not layers:
        raise TypeError(f"model: got {type(model).__name__}, expected a text model with MHLA layers.")
    return layers


def run_body(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Run a model without its head: token ids [B, T] without padding -> last hidden states [B, T, width]."""
    options: dict[str, Any] = {} if is_encoder(model) else {"use_cache": False}
    return model.base_model(input_ids=ids.to(model.device), **options)[0]


@contextmanager
def replaced_cores(layers: dict[int, Any], replace: Callable[[Any], nn.Module]) -> Iterator[dict[int, Any]]:
    """Context manager that replaces the MHLA core of each layer by `replace(core)`, and yields the new modules by layer.

    `layers` are modules with a child `mhla`, the core, by layer index. The cores are restored, even after an exception.
    """
    cores = {index: attention.mhla for index, attention in layers.items()}
    for index, attention in layers.items():
        attention.mhla = replace(cores[index])
    try:
        yield {index: attention.mhla for index, attention in layers.items()}
    finally:
        for index, attention in layers.items():
            attention.mhla = cores[index]


def softmax_instead(model: Any, observe: Callable[..., None] | None = None) -> AbstractContextManager[dict[int, Any]]:
    """Return a context manager that turns a converted text model into its softmax original, in place; see `SoftmaxCore`."""
    return replaced_cores(mhla_layers(model), lambda core: SoftmaxCore(core, observe))


def log_probabilities(model: Any, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a language model's log-probabilities of the next token, fp32 [B, N or T, vocabulary], for ids without padding.

    `positions` selects N of T (default: all); if forward has `logits_to_keep`, no other logits are computed. Eval mode only.
    """
    if model.training:
        raise ValueError("model: got a model in training mode, expected eval mode; call model.eval().")
    options = {}
    if positions is not None:
        positions = positions.to(model.device)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options = {"logits_to_keep": positions}
    logits = model(input_ids=ids.to(model.device), use_cache=False, **options).logits
    if positions is not None and not options:
        logits = logits[:, positions]
    return logits.float().log_softmax(-1)


def mean_kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Compute KL(teacher, student) in nats per token from log-probabilities [..., vocabulary]."""
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / teacher[..., 0].numel()


@torch.no_grad()
def kl_to_teacher(model: Any, batches: Sequence[torch.Tensor]) -> float:
    """Measure the KL of a converted language model's predictions to those of its softmax original, in nats per token.

    The original is this model with softmax in its MHLA layers, so the result is valid only if just `mhla.*` was trained.

    Args:
        model: A converted causal language model in eval mode.
        batches: Batches of token ids, int64 [B, T] each, without padding; the result is the mean over them.

    Raises:
        TypeError, ValueError: The model has no MHLA layers, or is in training mode.
    """
    total = 0.0
    for ids in batches:
        with softmax_instead(model):
            teacher = log_probabilities(model, ids)
        total += float(mean_kl(teacher, log_probabilities(model, ids)))
    return total / len(batches)
