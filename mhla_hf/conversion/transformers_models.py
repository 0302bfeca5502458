"""convert() for a language model, a text encoder, or a vision tower of transformers."""

import copy
import logging
from dataclasses import replace
from typing import Any

import torch

from ..checkpoints.load import register_family, strip_code_references
from ..models.derived_classes import attention_sizes, base_classes, change_class
from ..models.families import ENCODER, TOWER, Family, family_of_type
from ..nn.settings import MHLASettings, check_grid_settings, check_settings
from .model_family import mhla_class
from .steps import Requested, drop_softmax_layers, match_device_and_dtype

logger = logging.getLogger("mhla_hf")
REFUSED = {  # reason -> model types of causal and masked language models that do not convert
    "its attention does not call transformers' attention interface": (
        "big_bird bloom codegen convbert cpmant falcon flaubert gpt_neo gpt_neox_japanese gptj ibert longcat_flash luke "
        "megatron-bert mpt mvp openai-gpt prophetnet reformer rembert roformer squeezebert tapas trocr xglm xlm xlnet"
    ),
    "it has no softmax attention": "falcon_mamba fnet mamba mamba2 rwkv xlstm",
    "it is the decoder of an encoder and decoder": (
        "bart bert-generation bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody "
        "pegasus plbart whisper"
    ),
    "its scores have a relative position bias": "deberta deberta-v2 funnel mpnet",
    "its attention is an approximation already": "mra nystromformer yoso",
    "its attention is narrower than its layers": "mobilebert",
    "it reads proteins, or more than text": "esm esmc layoutlm neomme perceiver",
    "its layers do not tell their attention which tokens are padding, so padded batches would be wrong": (
        "nemotron stablelm"
    ),
    "its head runs the decoder without the body that finds the padding, so padded batches would be wrong": "opt",
    "its attention has sinks or a sliding window in every layer": (
        "flint gpt_oss granite_swa granitemoe_swa moshi recurrent_gemma"
    ),
    "its attention is sparse": "axk2 deepseek_v32 deepseek_v4 dots3_note_text glm_moe_dsa hy_v4 longformer",
    "its attention is not one softmax": "diffllama doge",
    "its layers run several times in a loop": "dory inkling2_loop_text",
    "attention and a recurrent part share a layer's cache": "falcon_h1 hrm_text inkling2_text inkling_text zaya",
    "its own cached and whole forward passes differ, so the conversion cannot be checked": "bamba",
    "it sees more than text; its language model has a type of its own": (
        "blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama modernvbert "
        "moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp ultravbert"
    ),
    "its classes are another type's": "exaone gpt-sw3 internlm3 iquestcoder sarvam_mla sarvam_moe",
    "no small model of it could be built to try": (
        "cohere_compass_text dbrx gemma4_assistant gemma4_unified_assistant gemma4_unified_text qwen4_exp_text zamba "
        "zamba2"
    ),
}


class NotConvertible(ValueError):
    """Raised for a model whose type or layers cannot be converted with any settings."""


def checked_settings(model: Any, family: Family, requested: Requested) -> MHLASettings:
    """Resolve and check the settings of a conversion, with `layers` as a list of indices; the model is not changed."""
    settings = requested.resolve(MHLASettings(**family.kind.defaults))
    if settings.rope == "after":
        raise ValueError('rope: got "after", expected "before": the base model rotates q and k before the feature map.')
    kind, is_encoder = family.kind, family.kind is ENCODER
    if kind is TOWER:
        check_grid_settings(settings, kind.noun, kind.axes, has_prefix=True)
    else:
        check_settings(settings, kind.noun, both_ways=is_encoder)
    config = model.config
    attentions = mhla_class(family, type(model)).swap.find_attentions(model)
    mhla_layers = choose_convertible(settings, config, attentions, is_encoder)
    for index in mhla_layers:
        if hasattr(attentions[index], "_hf_hook") and next(attentions[index].parameters()).is_meta:
            raise ValueError(f"model: got offloaded weights in layer {index}, expected weights on a device.")
    settings = replace(settings, layers=list(mhla_layers))
    settings = drop_softmax_layers(settings, lambda i: attention_sizes(attentions[i], config)["num_kv_heads"])
    if is_encoder:
        settings.num_blocks = -(-config.max_position_embeddings // settings.block_size)
    return settings


def settings_with_text(model: Any, family: Family, requested: Requested) -> MHLASettings:
    """Resolve and check the settings of a conversion with text, by default of all layers; the model is not changed."""
    if requested.layers is None and requested.settings is None:
        requested = requested._replace(layers="all")
    settings = checked_settings(model, family, requested)
    if not settings.windowed or settings.softmax_heads:
        conflict = "softmax_heads" if settings.windowed else "windowed=False"
        expected = "windowed=True and no softmax_heads, which the conversion chooses"
        raise ValueError(f"text: got a text along with {conflict}, expected {expected}.")
    return settings


def convert_transformers_model(model: Any, requested: Requested) -> Any:
    """Convert a model of transformers in place, and return it."""
    family = convertible_family(model)
    return convert_in_place(model, family, checked_settings(model, family, requested))


def convert_in_place(model: Any, family: Family, settings: MHLASettings) -> Any:
    """Convert a model in place by its checked settings, and return it.

    The model stays the same object; its class, its configuration, and the classes of its attention modules change. Its MHLA
    classes are registered in transformers' Auto classes. A warning is logged if the base has dropout in its attention.
    """
    config = model.config
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, 0.0):
            logger.warning("convert: %s=%s of the base does not apply to MHLA layers.", name, getattr(config, name))

    model_class, mhla_config = mhla_class(family, type(model)), copy.deepcopy(config)
    generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    if removed := sorted({*strip_code_references(mhla_config), *strip_code_references(generation_config)}):
        logger.info("convert: the MHLA model does not keep %s of its base, which may name code.", ", ".join(removed))
    mhla_config.__class__ = model_class.config_class
    mhla_config.mhla = settings.to_dict()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = mhla_config
    if generation_config is not None:
        model.generation_config = generation_config
    change_class(model, model_class)
    mhla_config.architectures = [model_class.__name__]
    model.install_mhla(settings)
    attentions = model.swap.find_attentions(model)
    for index in settings.layers:
        match_device_and_dtype(attentions[index].mhla, next(attentions[index].parameters()).device, model.dtype)
    register_family(family)
    return model


def restore_softmax(attention: Any, config: Any) -> None:
    """Turn an MHLA attention module into the base's softmax attention again, and delete its MHLA weights, in place."""
    change_class(attention, type(attention).__bases__[1])
    attention.config = config
    del attention.mhla


def convertible_family(model: Any) -> Family:
    """Return the family of a softmax model of transformers. Raise ValueError or TypeError if it cannot be converted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(model_type, str):
        expected = "a language model, text encoder, or vision tower of transformers, or a pipeline"
        raise TypeError(f"model: got {type(model).__name__}, expected {expected}.")
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"model: got {type(model).__name__}, which is an MHLA model already, expected a softmax one.")
    family = family_to_convert(model_type)
    if type(model) not in (convertible := base_classes(family)).values():
        raise ValueError(f"model: got {type(model).__name__}, expected {' or '.join(convertible)}.")
    return family


def family_to_convert(model_type: str) -> Family:
    """Return the family of a model type. Raise NotConvertible, with the reason, if the type does not convert."""
    family = family_of_type(model_type)
    if family is None:
        reasons = [reason for reason, types in REFUSED.items() if model_type in types.split()]
        reason = reasons[0] if reasons else "it was never tried"
        raise NotConvertible(f"model: got model type {model_type!r}, which cannot be converted: {reason}.")
    return family


def choose_convertible(
    settings: MHLASettings, config: Any, attentions: dict[int, Any], both_ways: bool
) -> list[int] | tuple[int, ...]:
    """Choose layers to convert ("2/3" skips every third that can be). Raise ValueError if all, or one requested, cannot."""
    checked = {index: reason_to_keep_softmax(attention, config, both_ways) for index, attention in attentions.items()}
    reasons = {index: reason for index, reason in checked.items() if reason}
    convertible = [index for index in sorted(attentions) if index not in reasons]
    requested = [] if isinstance(settings.layers, str) else settings.layers
    num_layers = config.num_hidden_layers
    if beyond := [index for index in requested if index >= num_layers]:
        expected = f"0 to {num_layers - 1}: the model has {num_layers} layers"
        raise ValueError(f"layers: got layer {beyond[0]}, expected {expected}.")
    if not convertible:
        reason = next(iter(reasons.values()), "it has no attention of transformers' interface")
        raise NotConvertible(f"model: got {config.model_type!r}, none of whose layers can become MHLA: {reason}.")
    if not_convertible := [index for index in requested if index not in convertible]:
        reason = reasons.get(not_convertible[0], "it has no softmax attention")
        got = f"layer {not_convertible[0]}, which cannot become MHLA because {reason}"
        raise ValueError(f"layers: got {got}; expected some of {convertible}.")
    if requested:
        return requested
    return [convertible[place] for place in settings.resolve_layers(len(convertible))]


def reason_to_keep_softmax(attention: torch.nn.Module, config: Any, both_ways: bool = False) -> str | None:
    """Return why a softmax layer cannot become MHLA, as a clause without a period; None if it can."""
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        return "its attention scores have a soft cap (attn_logit_softcapping)"
    types, index = getattr(config, "layer_types", None), getattr(attention, "layer_idx", 0)
    kind = types[index] if types and index < len(types) else None
    model_window = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    window = getattr(attention, "sliding_window", model_window) if getattr(attention, "is_sliding", True) else None
    if window is not None:
        return f"it sees only {'its neighbors' if both_ways else f'the last {window} tokens'} (sliding_window)"
    if kind not in (None, "full_attention"):
        return f"its kind is {kind!r}"
    shares_its_kv = getattr(attention, "store_full_length_kv", False) and getattr(config, "num_kv_shared_layers", 0)
    if shares_its_kv or getattr(attention, "is_kv_shared_layer", False):
        return "it shares keys and values with other layers"
    if getattr(attention, "sinks", None) is not None:
        return "it has attention sinks"
    if both_ways:
        return "it sees only earlier tokens (is_decoder=True)" if getattr(config, "is_decoder", False) else None
    if hasattr(attention, "layer_idx") and False in (getattr(x, "is_causal", True) for x in (attention, config)):
        return "it looks both ways (is_causal=False)"
    return None
