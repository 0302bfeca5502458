"""convert(): turns a softmax model into an MHLA model in place, with the base's weights.

Arguments are checked before the model is changed. All families of transformers are converted by `transformers_models.py`,
all of diffusers by `diffusers_models.py`. With text, `language.py` chooses which KV heads of a language model keep softmax,
and `encoder.py` fits text encoders to their softmax originals; with samples, `calibration.py` fits other models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..models.families import ENCODERS, LANGUAGE
from ..nn.settings import MHLASettings
from .model_family import is_of_diffusers, note_classes, transformers_of
from .steps import Requested, converting
from .teacher import kl_to_teacher
from .transformers_models import convert_transformers_model, convertible_family

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
    softmax. The others keep a window and their most salient tokens. Encoders keep softmax in a window; MHLA beyond it
    learns from the text. All other converted models need training (`mhla_hf.distill`), except Sana, whose attention is
    linear already; `samples` bring diffusion and vision models closer to their originals.

    Args:
        model: A causal language model, text encoder, vision tower or image classifier of transformers, a transformer of
            diffusers, or a pipeline with one or two, of the families in `models/families.py`. Save a tower inside a larger
            model, such as `CLIPModel.vision_model`, by its own `save_pretrained`: saved with that model, it loads as
            softmax. If only a pipeline's transformer is converted, set `pipe.transformer = model` before saving the pipe.
        settings: All settings at once. Default: those of the model's family.
        tokenizer: The model's tokenizer. Without it, `text` is token ids, and heads are chosen without asking for facts.
        text: What to choose heads by and to learn from: a text file, a folder of text files, a dataset, a list of texts,
            int64 token ids [N], or "self" (the model samples it). About 10,000 tokens are read, 100,000 for an encoder.
        samples: What a diffusion or vision model learns from. For a pipeline, a list of prompts or class labels, of which
            eight are run; or a function that runs it once: `lambda generator: pipe("a cat", generator=generator)`.
            For a vision model, unlabeled images [N, C, height, width].
        keep: How much keeps softmax. Language models with `text`: a share of the KV heads, their number, a percentage such
            as "17%", or the size of a sequence's cache at `context` tokens, such as "64MiB". Default: "auto", the smallest
            cache within `tolerance` that keeps recall. A size or "auto" chooses `salient`, too, unless it or `settings` is
            given. With `samples`: how many heads; default: the share of layers that the family keeps, 0 with `settings` or
            `layers`. Beside such heads, diffusion models read `salient_blocks=2`. Not for encoders.
        context: Number of tokens for which the cache sizes of language models are computed. Default: the model's positions.
        tolerance: With keep="auto": the largest accepted KL to the original, in nats per token. Default: 0.02.
        layers: Which to convert: "all", "2/3" (0, 3, 6... keep softmax), or a list of indices; overrides `settings.layers`.
            Default, without `settings`: "all" with `text` or `samples`, else the family's ("2/3" for language models).
        effort: Multiplies the number of rows that score a language model's heads; for other models, the fit's steps.
        seed: Decides which passages of `text` are read, and what the model samples.
        checkpoint: File for the progress of a text encoder's conversion, from which the same call resumes.
        progress: Whether to show progress bars on stderr and, with `text`, to print the scores and sizes of the cache.
        **overrides: Single fields of `MHLASettings`, which take precedence over `settings`.

    Returns:
        `model`, the same object. With `text` or `samples`, `mhla_measured` in its configuration has the scores.

    Raises:
        TypeError, ValueError: An argument is not valid. After any exception and Ctrl-C, the model is as it was.
    """
    parts = transformers_of(model) if hasattr(model, "components") else [model]
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    learning: dict[str, Any] = {"keep": keep, "effort": effort, "seed": seed, "progress": progress}
    unused: dict[str, Any] = {"context": context, "tolerance": tolerance, "checkpoint": checkpoint}
    requested = Requested(settings, layers, overrides)
    with torch.inference_mode(False), converting(modules):  # which also enables gradients under torch.no_grad
        if samples is not None:
            check_unused("along with samples", text=text, **unused)
            from .calibration import convert_with_samples

            return convert_with_samples(model, requested, samples, **learning)
        if text is not None:
            return convert_with_text(model, requested, tokenizer, text, **learning, **unused)
        check_unused("without text or samples", keep=keep, **unused)
        if is_of_diffusers(model):
            from .diffusers_models import check_conversion, convert_checked  # imports diffusers

            convert_checked(model, check_conversion(model, requested))
            note_classes(model)
            return model
        return convert_transformers_model(model, requested)


def convert_with_text(model: Any, *arguments: Any, checkpoint: Any, **options: Any) -> Any:
    """Convert a language model or text encoder with text; see `convert` for the arguments."""
    family = convertible_family(model)
    if family in LANGUAGE:
        check_unused("with a language model, which has nothing to resume", checkpoint=checkpoint)
        from .language import convert_language_model  # imports the data modules

        return convert_language_model(model, family, *arguments, **options)
    if family in ENCODERS:
        check_unused("with an encoder", **{name: options.pop(name) for name in ("keep", "context", "tolerance")})
        from .encoder import convert_encoder

        return convert_encoder(model, family, *arguments, checkpoint=checkpoint, **options)
    expected = "None: only causal language models and text encoders learn from text"
    raise ValueError(f"text: got a text for {type(model).__name__}, expected {expected}.")


def check_unused(reason: str, **arguments: object) -> None:
    """Raise ValueError, with `reason`, if one of `arguments`, which this conversion does not use, is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: got {value!r:.40} {reason}, expected None.")
