"""convert() with samples: the MHLA layers of a diffusion or vision model learn the outputs of their softmax originals.

No labels are needed: a diffusion model learns from the inputs that its transformer gets in sampling runs of the softmax
original, a vision model from images. The heads whose conversion changes the model's output most can keep softmax.
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

from ..models.diffusion.inputs import core_sizes, find_self_attentions
from ..models.families import VISION, Family
from ..models.vision.grid_attention import find_grid_attentions
from ..nn.settings import MHLASettings
from .grid_fit import (
    Call,
    GridFit,
    damage_of_heads,
    errors_of_layers,
    grid_layers,
    move,
    output_error,
    run_call,
    softmax_layers,
)
from .model_family import family_of, is_of_diffusers, note_classes
from .steps import Requested, check_learning, check_report, leave_inference_mode, parse_share
from .transformers_models import checked_settings, convert_in_place, convertible_family, restore_softmax

logger = logging.getLogger("mhla_hf")
RUNS, HELD_OUT_RUNS = 6, 2  # runs of the sampler to learn from, and to measure on
SAMPLING_STEPS = 20  # per run
IMAGES_AT_ONCE = 8
EDITING = ("Edit", "Kontext", "Layered")  # in names of pipelines that edit an image, an optional argument
FIT_STEPS = 100
DAMAGE_CALLS = 16  # forward passes, at most, in which heads are measured
MEASURED_CALLS = 8  # forward passes to measure errors on, at most; evenly spaced in the held-out runs
# Defaults with samples, in place of the family's: with these, MHLA learns best.
LEARNED: dict[str, Any] = {"feature_map": "hedgehog", "normalize": True, "output_norm": False, "per_head": True}
# Further ones of diffusion models in which heads keep softmax: at the time of a step that these take, nothing was closer.
BESIDE_HEADS: dict[str, Any] = {"windowed": True, "window": 1, "salient_blocks": 2}
WITHOUT_WINDOWS = (
    "windowed",
    "salient_blocks",
    "normalize",
    "output_norm",
    "mixing_form",
    "rope",
)  # given, they may not fit


def record_calls(transformers: Sequence[Any], sample: Callable[[], Any]) -> list[list[Call]]:
    """Record the arguments of all forward passes of each transformer while `sample` runs."""
    calls: list[list[Call]] = [[] for _ in transformers]

    def recorder(number: int) -> Callable[..., None]:
        @torch.inference_mode(False)  # of tensors of inference mode, there are no gradients
        def record(_: Any, *arguments: Any) -> None:
            # Copies, because a pipeline may change its tensors in place.
            calls[number].append(Call(*move(arguments, "cpu", copy=True)))

        return record

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
        defaults = {} if family is None else family.kind.defaults
        learned = {**LEARNED, "rope": "near" if defaults.get("rope") == "near" else "before"}
        keeps_heads = is_default and defaults.get("layers") == "2/3"
        if keep is not None:
            keeps_heads = parse_share(keep, 100) != 0
        if is_of_diffusers(model) and keeps_heads and requested.overrides.keys().isdisjoint(WITHOUT_WINDOWS):
            learned |= BESIDE_HEADS
        requested = requested._replace(overrides={**learned, **requested.overrides})
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
    num_kept = [count_kept_heads(*entry, keep=keep, is_default=is_default) for entry in checked]
    if any(mhla.softmax_heads for *_, mhla in checked):
        raise ValueError("samples: got some along with softmax_heads, expected None, or `keep`, which chooses heads.")
    start_time = time.monotonic()
    transformers = [transformer for transformer, *_ in checked]
    for transformer in transformers:
        leave_inference_mode(transformer)
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
        report = learn_from_calls(transformer, mhla, own_calls, num_kept[number], effort, seed, progress)
        report["seconds"] = round(time.monotonic() - start_time)
        update_config(transformer, mhla_measured=report)
        logger.info("convert: error of the output %s", report["output"])
    note_classes(model)
    return model


def count_kept_heads(
    model: Any, family: Family, settings: MHLASettings, *, keep: float | int | str | None, is_default: bool
) -> int:
    """Compute how many heads of the layers to convert keep softmax. Raise ValueError if `keep` is not valid.

    Without `keep`, this is the family's share of softmax layers if `is_default`, as the caller gave neither settings nor
    layers, else 0.
    """
    num_layers = len(settings.layers)
    if is_of_diffusers(model):
        attentions: Any = dict(enumerate(find_self_attentions(model)))
        num_heads = sum(core_sizes(attentions[index])["num_heads"] for index in settings.layers)
    else:
        num_heads = num_layers * model.config.num_attention_heads
    if keep is None and is_default:
        converted = len(MHLASettings(**family.kind.defaults).resolve_layers(num_layers))
        return round(num_heads * (1 - converted / num_layers))
    keep = 0 if keep is None else keep
    count = parse_share(keep, num_heads)
    if count is None or count >= num_heads:
        expected = f"0 to {num_heads - 1} of the {num_heads} heads, as a number, a share, or a percentage"
        raise ValueError(f"keep: got {keep!r}, expected {expected}.")
    return count


def keep_softmax_heads(model: Any, settings: MHLASettings, chosen: dict[int, list[int]]) -> None:
    """Let the `chosen` heads {layer: heads} keep softmax, in place, and record them in the configuration."""
    attentions = find_self_attentions(model) if is_of_diffusers(model) else find_grid_attentions(model)
    holders, partly = grid_layers(model), {}
    for index, heads in chosen.items():
        if len(heads) < holders[index].mhla.num_heads:
            partly[str(index)] = heads
            holders[index].mhla = holders[index].mhla.with_softmax_heads(heads)
        elif is_of_diffusers(model):
            base_processor = holders[index].base_processor
            del attentions[index].processor  # torch replaces a module only by a module
            attentions[index].processor = base_processor
        else:
            restore_softmax(attentions[index], model.config)
    remaining = replace(settings, layers=[*grid_layers(model)], softmax_heads=partly)
    update_config(model, mhla=remaining.to_dict())


def update_config(model: Any, **values: Any) -> None:
    if is_of_diffusers(model):
        model.register_to_config(**values)
    else:
        model.config.update(values)


def learn_from_calls(
    model: Any, settings: MHLASettings, runs: Sequence[Sequence[Call]], num_kept: int, effort: float, seed: int,
    progress: bool
) -> dict[str, Any]:  # fmt: skip
    """Fit the MHLA layers of a newly converted model, let `num_kept` of their heads keep softmax, in place; return errors.

    All are squared errors over squared norms, on held-out calls. "output" has the model's, and "layers" each layer's, before
    the fit ("converted") and after it ("fitted"). The heads with the largest "damage" (`damage_of_heads`) keep softmax.
    """
    num_held_out = max(1, len(runs) * HELD_OUT_RUNS // (RUNS + HELD_OUT_RUNS))
    fit_calls, held_out = (
        [call for run in part for call in run] for part in (runs[:-num_held_out], runs[-num_held_out:])
    )
    held_out = spread(held_out, MEASURED_CALLS)
    layers = grid_layers(model)
    with softmax_layers(layers):
        expected = [run_call(model, call) for call in held_out]
    errors = {"converted": output_error(model, held_out, expected)}
    layer_errors: dict[str, Any] = {"converted": errors_of_layers(model, held_out)}
    steps = max(1, round(FIT_STEPS * effort))
    fit = GridFit(model, steps=steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(fit_calls), generator=generator) for _ in range(-(-steps // len(fit_calls)))])
    for index in tqdm(order[:steps].tolist(), desc="fit MHLA to softmax", unit="call", disable=not progress):
        fit.step(fit_calls[index])
    fit.finish()
    errors["fitted"] = output_error(model, held_out, expected)
    layer_errors["fitted"] = errors_of_layers(model, held_out)
    by_layer = {str(index): {key: round(values[index], 5) for key, values in layer_errors.items()} for index in layers}
    chosen: dict[int, list[int]] = {}
    if num_kept:
        damage = damage_of_heads(model, spread(fit_calls, DAMAGE_CALLS), seed)
        for index, values in damage.items():
            by_layer[str(index)]["damage"] = [float(f"{value:.3g}") for value in values]
        heads = [(index, head) for index, values in damage.items() for head in range(len(values))]
        for index, head in sorted(sorted(heads, key=lambda place: -damage[place[0]][place[1]])[:num_kept]):
            chosen.setdefault(index, []).append(head)
        keep_softmax_heads(model, settings, chosen)
        errors["kept"] = output_error(model, held_out, expected)
    report = {
        "calls": len(fit_calls),
        "steps": steps,
        "seed": seed,
        "output": {key: round(value, 5) for key, value in errors.items()},
        "layers": by_layer,
        "softmax_heads": {str(index): heads for index, heads in chosen.items()},
    }
    check_report(report)
    return report


def spread(calls: list[Call], count: int) -> list[Call]:
    """Return at most `count` of the calls, evenly spaced."""
    return calls[:: -(-len(calls) // count)]
