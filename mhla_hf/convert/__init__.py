"""convert(): a softmax model becomes an MHLA model, in place, its weights kept.

Everything is checked before anything is touched. What becomes what is said by the records of `models/families.py`; how it
happens is the same for every family of transformers (`transformers_models.py`) and for every one of diffusers
(`diffusers_models.py`), because the MHLA classes are made from the base's own. With text, a language model or an encoder
then learns from its softmax original (`language.py`, `encoder.py`).
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ..nn.settings import MHLASettings
from .families import is_of_diffusers
from .teacher import kl_to_teacher
from .transformers_models import convert_in_place

__all__ = ["convert", "kl_to_teacher"]
Model = TypeVar("Model")


def convert(
    model: Model,
    settings: MHLASettings | None = None,
    *,
    tokenizer: object | None = None,
    text: object | None = None,
    keep: float | int | str | None = None,
    context: int | None = None,
    layers: str | Sequence[int] | None = None,
    effort: float = 1.0,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **overrides: object,
) -> Model:
    """Turn a pretrained softmax model, or a pipeline of one, into an MHLA model, in place, and return it.

    The base's weights stay as they are, under their names; each converted layer gains `mhla.*` in its attention
    (`attn1.processor.mhla.*` in transformers of diffusers).

    With `text`, a causal language model or an encoder of text is usable at once: its MHLA heads learn the outputs of their
    softmax originals on it, without labels. The KV heads that a language model misses most, with the query heads that read
    them, keep softmax. Without text, both start close to what their softmax window alone would be, and any model but Sana,
    whose attention is linear already, needs training: `mhla_hf.distill`.

    Args:
        model: a causal language model, an encoder of text, a vision tower or classifier of transformers, a transformer of
            diffusers, or a pipeline with one or two, of the families in `models/families.py`. A tower inside a larger model,
            such as `CLIPModel.vision_model`, is saved by its own `save_pretrained`: the larger model's folder would load as
            softmax, with a warning of unexpected weights.
        settings: all choices at once. Default: those of the family's record.
        tokenizer: that of the model, for `text`.
        text: what a language model or an encoder learns from, some 35,000 tokens of it, or 100,000 for an encoder: a text
            file or a folder of them, a dataset, a list of texts, token ids `[N]`, or "self" for what a language model
            itself writes.
        keep: how much of a language model's KV cache keeps softmax, with `text`: a share of the KV heads, their number, a
            percentage such as "17%", or the bytes of one sequence's cache at `context` tokens, such as "64MiB". 0: none.
            Default: 1/6. An encoder, which has no cache, takes none.
        context: tokens at which `keep` counts bytes; default: the model's positions.
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...) or a list of layer indices; wins over `settings`.
            Default: with `text` "all", without it "2/3" for language models and encoders.
        effort: of learning, with `text`: 0.5 takes half of the rows and steps, so half of the time, and is less exact.
        seed: of the choice of passages of `text`, and of what the model writes.
        checkpoint: file in which a conversion with text notes how far it is; the same call goes on there.
        progress: show bars on stderr.
        **overrides: single fields of `MHLASettings`; they win over `settings`.

    What a conversion with text measured is in `model.config.mhla_measured`, and so in config.json and the model card.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    if text is not None:
        language = importlib.import_module(".language", __package__)  # imports what reads text
        options = {
            "keep": keep,
            "context": context,
            "effort": effort,
            "seed": seed,
            "checkpoint": checkpoint,
            "progress": progress,
        }
        return language.convert_with_text(model, settings, layers, overrides, tokenizer, text, **options)
    if is_of_diffusers(model):
        diffusers_models = importlib.import_module(".diffusers_models", __package__)  # imports diffusers
        return diffusers_models.convert_diffusion(model, settings, layers, overrides)
    return convert_in_place(model, settings, layers, overrides)
