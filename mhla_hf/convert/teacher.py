"""The softmax original of a converted model of text, which is in the model: its projections are the base's.

With softmax in the place of its MHLA cores a model that was just converted is its own teacher. No second model is held.
"""

import inspect
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from ..models.attention import softmax_attentions
from ..models.encoder_attention import encoder_attentions
from ..models.families import ENCODERS
from .families import family_of


class SoftmaxCore(nn.Module):
    """Softmax in the place of an MHLA core, causal if the core is.

    Args:
        core: the core.
        observe: called after each forward pass as `observe(core, q, k, v, o, options)`, with q, k, v and the output o of
            all heads `[B, T, H or G, K]`, and the options that the core takes beside q, k and v.
    """

    def __init__(self, core: nn.Module, observe=None):
        super().__init__()
        self.core, self.observe = core, observe

    def forward(self, q, k, v, **options):
        """As the core's, of rows without padding."""
        o = softmax_attention(q, k, v, options.get("scale"), self.core.causal)
        if self.observe is not None:
            kept = ("scale", "hidden_states", "angles")
            self.observe(self.core, q, k, v, o, {name: options[name] for name in kept if name in options})
        return o


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, causal: bool
) -> torch.Tensor:
    """Softmax attention `[B, T, H, V]` of q `[B, T, H, K]`, k `[B, T, G, K]` and v `[B, T, G, V]`."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=causal, scale=scale, enable_gqa=True).transpose(1, 2)


def is_encoder(model) -> bool:
    """Whether a model is an encoder of text of transformers."""
    return family_of(model) in ENCODERS


def mhla_layers(model) -> dict[int, nn.Module]:
    """The attention modules of a language model or an encoder of text that are MHLA, by layer index.

    Raises:
        TypeError: there are none.
    """
    if is_encoder(model):
        attentions = encoder_attentions(model)
    else:
        attentions = softmax_attentions(model) if isinstance(model, nn.Module) else {}
        attentions = {index: x for index, x in attentions.items() if getattr(x, "is_causal", True)}
    layers = {index: attention for index, attention in attentions.items() if hasattr(attention, "mhla")}
    if not layers:
        raise TypeError(f"model: got {type(model).__name__}, expected a model of text with MHLA layers.")
    return layers


def run_body(model, ids: torch.Tensor) -> torch.Tensor:
    """The last hidden states `[B, T, width]` of rows of token ids `[B, T]` without padding."""
    options = {} if is_encoder(model) else {"use_cache": False}
    return model.base_model(input_ids=ids.to(model.device), **options)[0]


@contextmanager
def replaced_cores(model, replace):
    """The model with `replace(core)` in the place of every MHLA core."""
    layers = mhla_layers(model)
    cores = {index: attention.mhla for index, attention in layers.items()}
    for index, attention in layers.items():
        attention.mhla = replace(cores[index])
    try:
        yield {index: attention.mhla for index, attention in layers.items()}
    finally:
        for index, attention in layers.items():
            attention.mhla = cores[index]


def softmax_instead(model, observe=None):
    """The model as its softmax original; observe: see `SoftmaxCore`."""
    return replaced_cores(model, lambda core: SoftmaxCore(core, observe))


def log_probabilities(model, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """The model's log-probabilities of the next token, fp32.

    Args:
        model: a causal language model in eval mode.
        ids: token ids `[B, T]`.
        positions: int64 `[N]`, of which tokens; None: of all. The others cost no logits.

    Returns:
        `[B, N or T, vocabulary]`.
    """
    if model.training:  # windows and more are dropped in training
        raise ValueError("model: got one in training mode, expected model.eval().")
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
    """KL(teacher, student) of two `log_probabilities`, nats per token."""
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / teacher[..., 0].numel()


@torch.no_grad()
def kl_to_teacher(model, batches) -> float:
    """KL of the model's next tokens to those of its softmax original, nats per token over batches of ids `[B, T]`.

    The original is this model with softmax in its MHLA layers: its own only as long as nothing but `mhla.*` was trained.
    """
    total = 0.0
    for ids in batches:
        with softmax_instead(model):
            teacher = log_probabilities(model, ids)
        total += float(mean_kl(teacher, log_probabilities(model, ids)))
    return total / len(batches)
