"""convert(): a softmax model becomes an MHLA model, in place, its weights kept.

Everything is checked before anything is touched. What becomes what is said by the records of `models/families.py`; how it
happens is the same for every family of transformers (`transformers_models.py`) and for every one of diffusers
(`diffusers_models.py`), because the MHLA classes are made from the base's own.
"""

import importlib
from collections.abc import Sequence
from typing import TypeVar

from ..nn.settings import MHLASettings
from .families import is_of_diffusers
from .keep import choose_layers, keep_softmax
from .start import calibrate, fit_decays, kl_to_teacher
from .transformers_models import convert_in_place

__all__ = ["calibrate", "choose_layers", "convert", "fit_decays", "keep_softmax", "kl_to_teacher"]
Model = TypeVar("Model")


def convert(
    model: Model,
    settings: MHLASettings | None = None,
    *,
    layers: str | Sequence[int] | None = None,
    **overrides: object,
) -> Model:
    """Turn a pretrained softmax model, or a pipeline of one, into an MHLA model, in place, and return it.

    The base's weights stay as they are, under their names; each converted layer gains `mhla.*` in its attention
    (`attn1.processor.mhla.*` in transformers of diffusers). A converted model needs training before it is good again:
    `mhla_hf.distill`. Only Sana is the same at once: its attention is linear already, and its mixing starts uniform.

    Args:
        model: a causal language model, an encoder of text, a vision tower or classifier of transformers, a transformer of
            diffusers, or a pipeline with one or two, of the families in `models/families.py`. A tower inside a larger model,
            such as `CLIPModel.vision_model`, is saved by its own `save_pretrained`: the larger model's folder would load as
            softmax, with a warning of unexpected weights.
        settings: all choices at once. Default: those of the family's record, in layers "2/3" for language models (models
            without any softmax layer lose recall).
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...) or a list of layer indices; wins over `settings`.
        **overrides: single fields of `MHLASettings`; they win over `settings`.

    Raises:
        TypeError, ValueError: one sentence; the model is then unchanged.
    """
    if is_of_diffusers(model):
        diffusers_models = importlib.import_module(".diffusers_models", __package__)  # imports diffusers
        return diffusers_models.convert_diffusion(model, settings, layers, overrides)
    return convert_in_place(model, settings, layers, overrides)
