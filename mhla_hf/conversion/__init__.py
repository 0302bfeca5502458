"""convert(): turns a softmax model into an MHLA model in place, with the base's weights.

Everything is checked before anything is changed. All families of transformers are converted by `transformers_models.py`,
all of diffusers by `diffusers_models.py`. With text, a language model or text encoder then learns from its softmax original
(`language.py`, `encoder.py`); with samples, a diffusion or vision model does (`calibration.py`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..nn.settings import MHLASettings
from .model_family import is_of_diffusers, note_classes, transformers_of
from .steps import converting
from .teacher import kl_to_teacher
from .transformers_models import convert_transformers_model

__all__ = ["convert", "kl_to_teacher"]
Model = TypeVar("Model")


def convert(
    model: Model,
    settings: MHLASettings | None = None,
    *,
    tokenizer: object | None = None,
    text: object | None = None,
    samples: object | None = None,
    keep: float | int | str | None = None,
    context: int | None = None,
    tolerance: float | None = None,
    layers: str | Sequence[int] | None = None,
    effort: float = 1.0,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    **overrides: object,
) -> Model:
    """Turn a pretrained softmax model, or the transformers of a pipeline, into MHLA models in place.

    The base's weights keep their values and names; converted layers get new ones, `mhla.*`. With `text`, a causal language
    model or text encoder is ready for use afterwards. The KV heads of a language model that most need the whole past keep
    softmax. The others keep a window and their most salient tokens; with `salient=0`, or a setting of the far part such as
    `num_decays`, they keep running sums instead, which learn from the text, as encoders do. Without `text`, models need
    training (`mhla_hf.distill`), except Sana, whose attention is linear; `samples` bring them closer to their originals.

    Args:
        model: A causal language model, text encoder, vision tower or image classifier of transformers, a transformer of
            diffusers, or a pipeline with one or two, of the families in `models/families.py`. Save a tower inside a larger
            model, such as `CLIPModel.vision_model`, by its own `save_pretrained`: the larger model's would load as softmax.
            A pipeline that holds a transformer given alone needs `pipe.transformer = model` before it is saved.
        settings: All settings at once. Default: those of the model's family.
        tokenizer: The model's tokenizer. Without it, `text` is token ids, and heads are chosen without asking for facts.
        text: What to choose heads by and to learn from: a text file, a folder of text files, a dataset, a list of texts,
            int64 token ids [N], or "self": the model samples. About 10,000 tokens are read, 50,000 with `salient=0`,
            100,000 for an encoder. Default: none, since training may follow.
        samples: What a diffusion or vision model learns from. For a pipeline, a list of prompts or class labels, of which
            the original samples eight; or a function that runs it: `lambda generator: pipe("a cat", generator=generator)`.
            For a vision model, unlabeled images [N, C, height, width].
        keep: With `text`, how much keeps softmax: a share of the KV heads, their number, a percentage such as "17%", or the
            size of a sequence's cache at `context` tokens, such as "64MiB". Default: "auto", the smallest cache that keeps
            enough. A size and "auto" choose `salient`, too, unless it or `settings` is given. With `samples`, how many
            layers keep softmax; default: the family's number, none with `settings` or `layers`.
        context: Number of tokens at which caches are compared. Default: the model's positions.
        tolerance: KL to the original that "auto" accepts, in nats per token. Default: 0.02.
        layers: "all", "2/3" (layers 0, 3, 6, ... keep softmax), or a list of layer indices; before those of `settings`.
            Default: without `settings`, "all" with `text` or `samples`, else the family's, "2/3" for language models.
        effort: Multiplies the rows and steps of `text` or `samples`; with salient tokens, the rows that choose heads.
        seed: Decides which passages of `text` are read, and what the model samples.
        checkpoint: File for the progress of a conversion that learns from text, from which the same call resumes.
        progress: Whether to show progress bars on stderr and, with `text`, to print the scores and sizes of the cache.
        **overrides: Single fields of `MHLASettings`, which take precedence over `settings`.

    Returns:
        `model`, the same object. After learning, `mhla_measured` in its configuration has the scores.

    Raises:
        TypeError, ValueError: An argument is not valid. After any exception and Ctrl-C, the model is as it was.
    """
    parts = transformers_of(model) if hasattr(model, "components") else [model]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    learning: dict[str, Any] = {"keep": keep, "effort": effort, "seed": seed, "progress": progress}
    unused: dict[str, Any] = {"context": context, "tolerance": tolerance, "checkpoint": checkpoint}
    with torch.inference_mode(False), converting(modules):  # which also enables gradients under torch.no_grad
        if samples is not None:
            check_unused("along with samples", text=text, **unused)
            from .calibration import convert_with_samples

            return convert_with_samples(model, settings, layers, overrides, samples, **learning)
        if text is not None:
            from .language import convert_with_text  # imports the data modules

            return convert_with_text(model, settings, layers, overrides, tokenizer, text, **learning, **unused)
        check_unused("without text or samples", keep=keep, **unused)
        if is_of_diffusers(model):
            from .diffusers_models import check_conversion, convert_checked  # imports diffusers

            convert_checked(model, check_conversion(model, settings, layers, overrides))
            note_classes(model)
            return model
        return convert_transformers_model(model, settings, layers, overrides)


def check_unused(reason: str, **arguments: object) -> None:
    """Raise ValueError if an argument that this kind of conversion does not read is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: got {value!r:.40} {reason}, expected None.")
