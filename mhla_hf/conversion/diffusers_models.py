"""convert() for diffusers: the transformers of a pipeline become MHLA models in place."""

import inspect
import logging
from typing import Any

from ..models.derived_classes import change_class
from ..models.diffusion.inputs import core_sizes, find_self_attentions
from ..models.diffusion.transformer import resolve_settings
from ..models.families import DIFFUSION, Family
from ..nn.settings import MHLASettings
from .model_family import mhla_class, transformer_family, transformers_of
from .steps import Requested, drop_softmax_layers, match_device_and_dtype

logger = logging.getLogger("mhla_hf")
CONVERTIBLE = [name for family in DIFFUSION for name in family.classes]
EXPECTED = f"one of the {len(CONVERTIBLE)} transformers of diffusers that convert, such as {CONVERTIBLE[0]}"
REFUSED_TRANSFORMERS = {  # reason -> transformers of diffusers that do not convert
    "tokens of text and of images or video share one attention, in a form that is not supported": (
        "BriaTransformer2DModel BriaFiboTransformer2DModel BriaFibo2Transformer2DModel "
        "CogView3PlusTransformer2DModel CogView4Transformer2DModel ConsisIDTransformer3DModel "
        "EasyAnimateTransformer3DModel ErnieImageTransformer2DModel Flux3Transformer2DModel "
        "GlmImageTransformer2DModel HiDreamImageTransformer2DModel HunyuanImageTransformer2DModel "
        "Ideogram4Transformer2DModel JoyImageEditTransformer3DModel JoyImageEditPlusTransformer3DModel "
        "Krea2Transformer2DModel LongCatImageTransformer2DModel MiniMaxH3Transformer3DModel "
        "MotifVideoTransformer3DModel NucleusMoEImageTransformer2DModel OvisImageTransformer2DModel "
        "PRXTransformer2DModel QwenImage21Transformer2DModel"
    ),
    "text and image of each row are packed into one sequence with lengths of their own": (
        "Lumina2Transformer2DModel ZImageTransformer2DModel"
    ),
    "some or all of its attention is causal": "Cosmos3OmniTransformer OmniGenTransformer2DModel",
    "earlier frames at other scales precede the grid of its tokens": (
        "HeliosTransformer3DModel HunyuanVideoFramepackTransformer3DModel"
    ),
    "it generates frames after one another, and reads earlier ones from a cache": (
        "AnyFlowFARTransformer3DModel SanaWMLTX2RefinerTransformer3DModel WanAnimate2Transformer3DModel"
    ),
    "most of its attention is a gated delta rule, which is linear already": "SanaWMTransformer3DModel",
    "its attention is sparse, over tokens in blocks of 8 x 8": "Kandinsky6SRTransformer3DModel",
    "self-attention and cross-attention share an output projection": "LuminaNextDiT2DModel",
    "it is a part of a U-Net, whose blocks it does not know": (
        "DreamLiteTransformer2DModel Transformer2DModel TransformerTemporalModel"
    ),
    "its tokens make no grid of an image or a video": (
        "AceStepTransformer1DModel LongCatAudioDiTTransformer MiniMaxMusic3RVQDepthDecoder "
        "MiniMaxMusic3Transformer1DModel PriorTransformer RFD4ProteinaTransformer StableAudioDiTModel "
        "StableAudio3DiTModel T5FilmDecoder"
    ),
}


def convert_checked(model: Any, checked: list[tuple[Any, Family, MHLASettings]]) -> None:
    """Convert a transformer, or those of a pipeline, in place; `checked` is what `check_conversion` returned for it."""
    if not hasattr(model, "components"):
        logger.warning("convert: a pipeline that holds this transformer needs `pipe.transformer = model` to save it.")
    for transformer, family, settings in checked:
        change_class(transformer, mhla_class(family, type(transformer)))
        transformer.install_mhla(settings)
        attentions: Any = find_self_attentions(transformer)
        layers: Any = settings.layers
        for attn in (attentions[index] for index in layers):
            match_device_and_dtype(attn.processor.mhla, next(attn.parameters()).device, transformer.dtype)
        if transformer.is_gradient_checkpointing:
            transformer.enable_gradient_checkpointing(transformer._gradient_checkpointing_func)


def check_conversion(model: Any, requested: Requested) -> list[tuple[Any, Family, MHLASettings]]:
    """Return (softmax transformer, family, settings with a list of layer indices) for each transformer of a model.

    Raise TypeError or ValueError if one cannot be converted with these settings.
    """
    transformers = transformers_of(model) if hasattr(model, "components") else [model]
    if not transformers:
        raise ValueError(f"model: got {type(model).__name__}, which has no transformer, expected {EXPECTED}.")
    checked = []
    for transformer in transformers:
        model_class = mhla_transformer_class(transformer)
        settings = requested.resolve(MHLASettings(**model_class.mhla_defaults))
        settings = resolve_settings(model_class, transformer, settings)
        num_heads = [core_sizes(attention)["num_heads"] for attention in find_self_attentions(transformer)]
        settings = drop_softmax_layers(settings, num_heads.__getitem__)
        check_state(transformer)
        checked.append((transformer, model_class.family, settings))
    return checked


def check_state(transformer: Any) -> None:
    """Raise ValueError if a transformer has hooks (new modules would lack them), offloaded weights, or a KV cache."""
    registries = [module._diffusers_hook for module in transformer.modules() if hasattr(module, "_diffusers_hook")]
    if any(registry.hooks for registry in registries):  # a hook that was removed leaves its registry behind
        expected = "none; convert before adding them"
        raise ValueError(f"model: got hooks of diffusers (a cache, casting, offloading), expected {expected}.")
    offloaded = next((name for name, value in transformer.named_parameters() if value.is_meta), None)
    if offloaded is not None:
        expected = "weights on a device; convert before offloading"
        raise ValueError(f"model: got the offloaded weight {offloaded}, expected {expected}.")
    for index, attn in enumerate(find_self_attentions(transformer)):
        if "kv_cache" in inspect.signature(type(attn.processor).__call__).parameters:  # as in Flux 2 Klein KV
            expected = "a processor without a cache of reference images, as in Flux2KleinPipeline"
            raise ValueError(f"model: got {type(attn.processor).__name__} in layer {index}, expected {expected}.")


def mhla_transformer_class(transformer: Any) -> Any:
    """Return the MHLA class of a transformer of diffusers. Raise ValueError if it is MHLA already or does not convert."""
    base = type(transformer)
    if hasattr(transformer, "mhla_state"):
        raise ValueError(f"model: got {base.__name__}, which is an MHLA model already, expected a softmax one.")
    family = transformer_family(base)
    if family is None:
        for reason, names in REFUSED_TRANSFORMERS.items():
            if base.__name__ in names.split():
                raise ValueError(f"model: got {base.__name__}, which cannot be converted: {reason}.")
        raise ValueError(f"model: got {base.__name__} of {base.__module__}, expected {EXPECTED}.")
    return mhla_class(family, base)
