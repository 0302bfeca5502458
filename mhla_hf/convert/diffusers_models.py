"""convert() for diffusers: the transformers of a pipeline become MHLA models, in place, as the same objects.

A pipeline notes the classes of its parts when it is made, and loads them by that note later. A transformer does not
know its pipelines, so those that hold it are found among the objects that Python keeps track of.
"""

import gc
import types

from diffusers import DiffusionPipeline

from ..models.diffusion import check_diffusion_settings, self_attentions
from ..models.families import DIFFUSION
from ..nn.settings import MHLASettings
from .families import mhla_class, transformer_family
from .steps import chosen_settings, match_device_and_dtype

CONVERTIBLE = [name for family in DIFFUSION for name in family.classes]


def convert_diffusion(model, settings: MHLASettings | None, layers, overrides: dict):
    """The work of `convert` for a pipeline, whose transformers are all checked before the first is touched, or one model."""
    transformers = [model]
    if hasattr(model, "components"):
        transformers = [getattr(model, name, None) for name in ("transformer", "transformer_2")]
        transformers = [found for found in transformers if found is not None]
    if not transformers:
        what = f"which has no transformer, expected a pipeline of one of {CONVERTIBLE}"
        raise ValueError(f"model: got {type(model).__name__}, {what}.")
    checked = []
    for transformer in transformers:
        model_class = mhla_transformer_class(transformer)
        defaults = MHLASettings(**model_class.mhla_defaults)
        chosen = chosen_settings(settings, defaults, layers, overrides)
        chosen = check_diffusion_settings(model_class, transformer, chosen)
        check_at_rest(transformer)
        checked.append((transformer, model_class, chosen))
    for transformer, model_class, chosen in checked:
        transformer.__class__ = model_class
        if "_old_forward" in vars(transformer):  # accelerate keeps the forward that its hooks wrap
            transformer._old_forward = types.MethodType(model_class.forward, transformer)
        transformer.install_mhla(chosen)
        for attn in (self_attentions(transformer)[index] for index in chosen.layers):
            match_device_and_dtype(attn.processor.mhla, attn.to_q.weight.device, transformer.dtype)
        if transformer.is_gradient_checkpointing:
            transformer.enable_gradient_checkpointing(transformer._gradient_checkpointing_func)
    tell_pipelines(transformers)
    return model


def tell_pipelines(transformers: list) -> None:
    """Every pipeline that holds one of these notes its new class, for model_index.json."""
    for pipeline in [found for found in gc.get_objects() if issubclass(type(found), DiffusionPipeline)]:
        for name, part in list(vars(pipeline).items()):
            if any(part is transformer for transformer in transformers):
                setattr(pipeline, name, part)


def check_at_rest(transformer) -> None:
    """One sentence if hooks or offloading would not know of the new modules."""
    registries = [module._diffusers_hook for module in transformer.modules() if hasattr(module, "_diffusers_hook")]
    if any(registry.hooks for registry in registries):  # a hook that was removed leaves its registry behind
        raise ValueError("model: has hooks of diffusers (a cache, casting, offloading), expected none; convert first.")
    away = next((name for name, value in transformer.named_parameters() if value.is_meta), None)
    if away is not None:
        raise ValueError(f"model: {away} is offloaded, expected its weights on a device; convert first.")


def mhla_transformer_class(transformer) -> type:
    """The MHLA class of a transformer of diffusers, or one sentence why there is none."""
    base = type(transformer)
    if hasattr(transformer, "mhla_state"):
        raise ValueError(f"model: got {base.__name__}, which is an MHLA model already; expected one of {CONVERTIBLE}.")
    family = transformer_family(base)
    if family is None:
        raise ValueError(f"model: got {base.__name__} of {base.__module__}, expected one of diffusers' {CONVERTIBLE}.")
    return mhla_class(family, base)
