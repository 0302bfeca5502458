"""convert() with samples: the MHLA layers of a diffusion or vision model learn the outputs of their softmax originals.

No labels are needed: a diffusion model learns from the inputs that its transformer gets in sampling runs of the softmax
original, a vision model from images. The layers whose conversion changes the model's output most can keep softmax.
"""

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from ..models.diffusion.inputs import find_self_attentions
from ..models.families import VISION, Family
from ..models.vision.grid_attention import find_grid_attentions
from ..nn.settings import MHLASettings
from .grid_fit import Call, GridFit, errors_of_layers, grid_layers, move, output_error, run_call, softmax_layers
from .model_family import family_of, is_of_diffusers, note_classes
from .steps import Requested, check_learning, check_report, parse_share
from .transformers_models import checked_settings, convert_in_place, convertible_family, restore_softmax

logger = logging.getLogger("mhla_hf")
RUNS, HELD_OUT_RUNS = 6, 2  # runs of the sampler to learn from, and to measure on
SAMPLING_STEPS = 20  # per run
IMAGES_AT_ONCE = 8
EDITING = ("Edit", "Kontext", "Layered")  # in names of pipelines that edit an image, an optional argument
FIT_STEPS = 100
MEASURED_CALLS = 8  # forward passes to measure errors on, at most; evenly spaced in the held-out runs
# Defaults with samples, in place of the family's: with these, MHLA learns best.
LEARNED: dict[str, Any] = {"feature_map": "hedgehog", "normalize": True, "output_norm": False, "per_head": True}


def record_calls(transformers: Sequence[Any], sample: Callable[[], Any]) -> list[list[Call]]:
    """Record the arguments of all forward passes of each transformer while `sample` runs."""
    calls: list[list[Call]] = [[] for _ in transformers]

    def recorder(number: int) -> Callable[..., None]:
        # Copies, because a pipeline may change its tensors in place.
        return lambda _, *arguments: calls[number].append(Call(*move(arguments, "cpu", copy=True)))

    with contextlib.ExitStack() as stack, torch.no_grad():
        for number, transformer in enumerate(transformers):
            stack.enter_context(transformer.register_forward_pre_hook(recorder(number), with_kwargs=True))
        sample()
    return calls


def check_samples(model: Any, samples: Any) -> None:
    """Raise TypeError or ValueError if `samples` of `convert` do not suit a model."""
    if callable(samples):
        return
    if isinstance(samples, torch.Tensor):
        if is_of_diffusers(model) or samples.ndim != 4 or len(samples) < 2 * IMAGES_AT_ONCE:
            start = f"samples: got a tensor of shape {list(samples.shape)} with {type(model).__name__}"
            expected = f"at least {2 * IMAGES_AT_ONCE} images [N, channels, height, width] with a vision model"
            raise ValueError(f"{start}, expected {expected}.")
        return
    kinds = {type(sample) for sample in samples} if isinstance(samples, list | tuple) else set()
    if kinds not in ({str}, {int}) or not hasattr(model, "components"):
        raise TypeError(
            f"samples: got {type(samples).__name__} with {type(model).__name__}, expected a list of prompts or of class "
            "labels with a pipeline, images with a vision model, or a function that samples with a torch.Generator."
        )
    name, parameters = type(model).__name__, inspect.signature(type(model).__call__).parameters
    required = {key for key, x in parameters.items() if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD}
    if kinds == {int}:
        num_classes = model.transformer.config.get("num_embeds_ada_norm") or 0
        if "class_labels" not in parameters or not 0 <= min(samples) <= max(samples) < num_classes:
            expected = f"labels from 0 to {num_classes - 1}" if "class_labels" in parameters else "prompts"
            raise ValueError(f"samples: got {samples!r:.40} with {name}, expected {expected}.")
    elif "prompt" not in parameters or required - {"self", "prompt"} or any(word in name for word in EDITING):
        expected = "class labels" if "class_labels" in required else "a function that samples with a torch.Generator"
        raise ValueError(f"samples: got prompts with {name}, expected {expected}.")


def sampling_runs(model: Any, samples: Any, seed: int) -> list[Callable[[], Any]]:
    """Return functions that each run the softmax original on another part of `samples`, or with another seed."""
    if isinstance(samples, torch.Tensor):
        return [partial(model, batch.to(model.device)) for batch in samples.split(IMAGES_AT_ONCE)]
    random_numbers = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (RUNS + HELD_OUT_RUNS,), generator=random_numbers).tolist()
    if not callable(samples) and len(samples) > len(seeds):
        order = torch.randperm(len(samples), generator=random_numbers).tolist()
        samples = [samples[index] for index in order[: len(seeds)]]

    def sample(number: int) -> Any:
        generator = torch.Generator().manual_seed(seeds[number])
        if callable(samples):
            return samples(generator)
        value = samples[number % len(samples)]
        options = {"prompt": value, "output_type": "latent"} if isinstance(value, str) else {"class_labels": [value]}
        return model(**options, num_inference_steps=SAMPLING_STEPS, generator=generator)

    return [partial(sample, number) for number in range(len(seeds))]


def convert_with_samples(
    model: Any, requested: Requested, samples: Any, *, keep: float | int | str | None, effort: float, seed: int,
    progress: bool
) -> Any:  # fmt: skip
    """Convert a diffusion or vision model in place, fit it to its softmax original, and measure it; see `convert`.

    The model must be in eval mode. The scores go to `mhla_measured` in the configuration of each transformer.
    """
    is_default = requested.settings is None and requested.layers is None
    if requested.settings is None:
        family = family_of(getattr(model, "transformer", model))
        rope = "near" if family is not None and family.kind.defaults.get("rope") == "near" else "before"
        requested = requested._replace(overrides={**LEARNED, "rope": rope, **requested.overrides})
    if is_default:
        requested = requested._replace(layers="all")
    if is_of_diffusers(model):
        from . import diffusers_models  # imports diffusers

        checked: Any = diffusers_models.check_conversion(model, requested)
        if linear := [family.base for _, family, _ in checked if family.kind.linear]:
            raise ValueError(f"samples: got some for {linear[0]}, whose attention is linear already, expected None.")
    else:
        family = convertible_family(model)
        if family not in VISION:
            expected = "None, or a diffusion or vision model; a language model or text encoder learns from `text`"
            raise ValueError(f"samples: got some for {type(model).__name__}, expected {expected}.")
        checked = [(model, family, checked_settings(model, family, requested))]
    check_samples(model, samples)
    check_learning(model, effort, seed)
    num_kept = [count_kept_layers(family, len(mhla.layers), keep, is_default) for _, family, mhla in checked]
    start_time = time.monotonic()
    transformers = [transformer for transformer, *_ in checked]
    calls = [record_calls(transformers, run) for run in sampling_runs(model, samples, seed)]
    for number, transformer in enumerate(transformers):
        if any(not run[number] for run in calls):
            raise ValueError(f"samples: got a run without {type(transformer).__name__}, expected every run to call it.")
    if is_of_diffusers(model):
        diffusers_models.convert_checked(model, checked)
    else:
        convert_in_place(*checked[0])
    for number, (transformer, _, mhla) in enumerate(checked):
        own_calls = [run[number] for run in calls]
        report = learn_from_calls(transformer, own_calls, num_kept[number], effort, seed, progress)
        keep_softmax_layers(transformer, mhla, report["softmax_layers"])
        report["seconds"] = round(time.monotonic() - start_time)
        update_config(transformer, mhla_measured=report)
        logger.info("convert: error of the output %s", report["output"])
    note_classes(model)
    return model


def count_kept_layers(family: Family, num_layers: int, keep: float | int | str | None, is_default: bool) -> int:
    """Compute how many of the converted layers get softmax back. Raise ValueError if `keep` is not valid.

    Without `keep`, this is the family's default if `is_default` (the caller gave neither settings nor layers), else 0.
    """
    if keep is None:
        default = MHLASettings(**family.kind.defaults)
        return num_layers - len(default.resolve_layers(num_layers)) if is_default else 0
    count = parse_share(keep, num_layers)
    if count is None or count >= num_layers:
        expected = f"0 to {num_layers - 1} of the {num_layers} layers, as a number, a share, or a percentage"
        raise ValueError(f"keep: got {keep!r}, expected {expected}.")
    return count


def keep_softmax_layers(model: Any, settings: MHLASettings, chosen: list[int]) -> None:
    """Turn the `chosen` MHLA layers into softmax layers again, and record the others in the configuration, in place."""
    attentions = find_self_attentions(model) if is_of_diffusers(model) else find_grid_attentions(model)
    for index in chosen:
        if is_of_diffusers(model):
            base_processor = attentions[index].processor.base_processor
            del attentions[index].processor  # torch replaces a module only by a module
            attentions[index].processor = base_processor
        else:
            restore_softmax(attentions[index], model.config)
    layers: Any = settings.layers
    remaining = replace(settings, layers=[index for index in layers if index not in chosen]).to_dict()
    update_config(model, mhla=remaining)


def update_config(model: Any, **values: Any) -> None:
    if is_of_diffusers(model):
        model.register_to_config(**values)
    else:
        model.config.update(values)


def learn_from_calls(
    model: Any, runs: Sequence[Sequence[Call]], num_kept: int, effort: float, seed: int, progress: bool
) -> dict[str, Any]:
    """Fit the MHLA layers of a newly converted model in place; return errors, and which layers should keep softmax.

    All are squared errors over squared norms, on held-out calls. "output" has the model's, and "layers" each layer's, before
    the fit ("converted") and after it ("fitted"). A layer's "alone" is the model's error if only this layer is MHLA: the
    `num_kept` layers with the largest "alone" should keep softmax.
    """
    num_held_out = max(1, len(runs) * HELD_OUT_RUNS // (RUNS + HELD_OUT_RUNS))
    fit_calls, held_out = (
        [call for run in part for call in run] for part in (runs[:-num_held_out], runs[-num_held_out:])
    )
    held_out = held_out[:: -(-len(held_out) // MEASURED_CALLS)]
    layers = grid_layers(model)
    with softmax_layers(layers):
        expected = [run_call(model, call) for call in held_out]
    errors = {"converted": output_error(model, held_out, expected)}
    layer_errors = {"converted": errors_of_layers(model, held_out)}
    steps = max(1, round(FIT_STEPS * effort))
    fit = GridFit(model, steps=steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(fit_calls), generator=generator) for _ in range(-(-steps // len(fit_calls)))])
    for index in tqdm(order[:steps].tolist(), desc="fit MHLA to softmax", unit="call", disable=not progress):
        fit.step(fit_calls[index])
    fit.finish()
    errors["fitted"] = output_error(model, held_out, expected)
    layer_errors["fitted"] = errors_of_layers(model, held_out)
    layer_errors["alone"] = {}
    for index in layers:
        with softmax_layers({other: holder for other, holder in layers.items() if other != index}):
            layer_errors["alone"][index] = output_error(model, held_out, expected)
    chosen = sorted(sorted(layers, key=lambda index: -layer_errors["alone"][index])[:num_kept])
    if chosen:
        with softmax_layers({index: layers[index] for index in chosen}):
            errors["kept"] = output_error(model, held_out, expected)
    by_layer = {str(index): {key: round(values[index], 5) for key, values in layer_errors.items()} for index in layers}
    report = {
        "calls": len(fit_calls),
        "steps": steps,
        "seed": seed,
        "output": {key: round(value, 5) for key, value in errors.items()},
        "layers": by_layer,
        "softmax_layers": chosen,
    }
    check_report(report)
    return report
