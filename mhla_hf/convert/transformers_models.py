"""convert() for a language model, an encoder or a vision tower of transformers."""

import copy
import logging
from dataclasses import replace

import torch

from ..checkpoints.load import register_family, strip_code_references
from ..models.attention import softmax_attentions
from ..models.converted import install_by_form
from ..models.encoder_attention import encoder_attentions, install_encoder_mhla
from ..models.families import ENCODERS, VISION, Family, family_of_type
from ..models.grid_attention import grid_attentions, install_grid_mhla
from ..models.overlay import attention_sizes, base_classes
from ..models.rotation import rotation_layout
from ..nn.core import check_causal, check_encoder
from ..nn.settings import MHLASettings
from .families import mhla_class
from .steps import chosen_settings, match_device_and_dtype

logger = logging.getLogger("mhla_hf")
REFUSED = {  # why -> model types of causal and of masked language models
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
    "it reads more than text, or proteins": "esm esmc layoutlm neomme perceiver",
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
    """A model of a type, or with layers, that `convert` does not take, whatever its settings: one sentence."""


def check_tower(settings: MHLASettings) -> None:
    """What only a vision tower refuses."""
    if settings.layout is None or len(settings.layout) != 2:
        raise ValueError(f"layout: got {settings.layout!r}, expected blocks per row and column, such as [4, 4].")
    if settings.normalize == "official":
        raise ValueError('normalize: got "official", whose denominator has no class tokens, expected true or false.')


def kind_of_family(family: Family) -> tuple:
    """How attention modules of a family are found, how they become MHLA, and what checks settings for it."""
    if family in VISION:
        return grid_attentions, install_grid_mhla, check_tower
    if family in ENCODERS:
        return encoder_attentions, install_encoder_mhla, check_encoder
    return softmax_attentions, install_by_form, check_causal


def checked_settings(model, family: Family, settings: MHLASettings | None, layers, overrides: dict) -> MHLASettings:
    """The settings of a conversion of `model`, its layers as indices. ValueError, TypeError: it cannot be done so."""
    find, _, check = kind_of_family(family)
    settings = chosen_settings(settings, MHLASettings(**family.defaults), layers, overrides)
    if settings.rope == "after":
        raise ValueError('rope: got "after", expected "before": the base rotates q and k before the map.')
    check(settings)
    config = model.config
    attentions = find(model)
    if family in ENCODERS:
        settings = replace(settings, num_blocks=-(-config.max_position_embeddings // settings.block_size))
    settings = replace(settings, layers=choose_convertible(settings, config, attentions, family in ENCODERS))
    for index in settings.layers:
        if settings.rope == "near":
            rotation_layout(attentions[index])
        if hasattr(attentions[index], "_hf_hook") and next(attentions[index].parameters()).is_meta:
            raise ValueError(f"model: layer {index} is offloaded, expected its weights on a device.")
    return without_softmax_layers(settings, attentions, config)


def without_softmax_layers(settings: MHLASettings, attentions: dict, config) -> MHLASettings:
    """The same without the layers all of whose KV heads keep softmax. ValueError: there are no such layers or heads."""
    kept, layers = dict(settings.softmax_heads or {}), list(settings.layers)
    for index, heads in (settings.softmax_heads or {}).items():
        if int(index) not in layers:
            raise ValueError(f"softmax_heads: got layer {index}, expected some of the MHLA layers {layers}.")
        count = attention_sizes(attentions[int(index)], config)["num_kv_heads"]
        if heads[-1] >= count:
            raise ValueError(f"softmax_heads: got KV head {heads[-1]} in layer {index}, expected 0 to {count - 1}.")
        if len(heads) == count:
            layers.remove(int(index))
            del kept[index]
    if not layers:
        raise ValueError("softmax_heads: got all KV heads of all MHLA layers, expected fewer.")
    return replace(settings, layers=layers, softmax_heads=kept)


def convert_in_place(model, settings: MHLASettings | None, layers, overrides: dict):
    """The work of `convert` for a model of transformers."""
    family = convertible_family(model)
    settings = checked_settings(model, family, settings, layers, overrides)
    find, install, _ = kind_of_family(family)
    config, attentions = model.config, find(model)
    for name in ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"):
        if getattr(config, name, 0.0):
            logger.warning("convert: %s=%s of the base does not apply to MHLA layers.", name, getattr(config, name))

    model_class = mhla_class(family, type(model))
    own = copy.deepcopy(config)
    if odd := {*strip_code_references(own), *strip_code_references(getattr(model, "generation_config", None))}:
        logger.info(
            "convert: the MHLA model does not keep %s of its base, which may name code.", ", ".join(sorted(odd))
        )
    own.__class__ = model_class.config_class
    own.mhla = settings.to_dict()
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = own
    model.__class__ = model_class
    own.architectures = [model_class.__name__]
    install(model, settings)
    for index in settings.layers:
        match_device_and_dtype(attentions[index].mhla, next(attentions[index].parameters()).device, model.dtype)
    register_family(family)
    return model


def convertible_family(model) -> Family:
    """The base's family, or one sentence why this object cannot be converted."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model, torch.nn.Module) or not isinstance(model_type, str):
        what = "a language model or vision tower of transformers, or a pipeline"
        raise TypeError(f"model: got {type(model).__name__}, expected {what}.")
    if getattr(config, "mhla", None) is not None:
        raise ValueError(f"model: got {type(model).__name__}, which is an MHLA model already; expected a softmax one.")
    family = family_to_convert(model_type)
    if type(model) not in (known := base_classes(family)).values():
        raise ValueError(f"model: got {type(model).__name__}, expected {' or '.join(known)}.")
    return family


def family_to_convert(model_type: str) -> Family:
    """The family of a model type that converts. NotConvertible for others, with the reason."""
    family = family_of_type(model_type)
    if family is None:
        reason = next(
            (reason for reason, types in REFUSED.items() if model_type in types.split()), "it was never tried"
        )
        raise NotConvertible(f"model: got model type {model_type!r}, expected another one: {reason}.")
    return family


def choose_convertible(settings: MHLASettings, config, attentions: dict, both_ways: bool) -> list[int]:
    """The layers that become MHLA: of those that lose nothing by it. ValueError, one sentence: there are none, or others."""
    lost = {index: reason_to_keep_softmax(attention, config, both_ways) for index, attention in attentions.items()}
    reasons = {index: reason for index, reason in lost.items() if reason}
    able = [index for index in sorted(attentions) if index not in reasons]
    asked, count = [] if isinstance(settings.layers, str) else settings.layers, config.num_hidden_layers
    if beyond := [index for index in asked if index >= count]:
        raise ValueError(f"layers: got layer {beyond[0]}, expected 0 to {count - 1}: the model has {count} layers.")
    if not able:
        reason = next(iter(reasons.values()), "it has no attention of transformers' interface")
        raise NotConvertible(f"model: got {config.model_type!r}, expected layers that can become MHLA: {reason}.")
    if wrong := [index for index in asked if index not in able]:
        reason = reasons.get(wrong[0], "it has no softmax attention")
        raise ValueError(f"layers: got layer {wrong[0]}, expected some of {able}: {reason}.")
    if asked:
        return asked
    return [able[place] for place in settings.resolve_layers(len(able))]


def reason_to_keep_softmax(attention: torch.nn.Module, config, both_ways: bool = False) -> str | None:
    """What a softmax layer does that an MHLA layer could not, as the end of a sentence; None if nothing.

    both_ways: it is a layer of an encoder, which sees earlier and later tokens.
    """
    if getattr(attention, "attn_logit_softcapping", None) is not None:
        return "its attention scores have a soft cap (attn_logit_softcapping)"
    types, index = getattr(config, "layer_types", None), getattr(attention, "layer_idx", 0)
    kind = types[index] if types and index < len(types) else None
    whole = None if kind == "full_attention" else getattr(config, "sliding_window", None)
    window = getattr(attention, "sliding_window", whole) if getattr(attention, "is_sliding", True) else None
    if window is not None:
        return f"it sees {'its neighbors' if both_ways else f'the last {window} tokens'} alone (sliding_window)"
    if kind not in (None, "full_attention"):
        return f"its kind is {kind!r}"
    stores = getattr(attention, "store_full_length_kv", False) and getattr(config, "num_kv_shared_layers", 0)
    if stores or getattr(attention, "is_kv_shared_layer", False):
        return "it shares keys and values with other layers"
    if getattr(attention, "sinks", None) is not None:
        return "it has attention sinks"
    if both_ways:
        return "it sees earlier tokens alone (is_decoder=True)" if getattr(config, "is_decoder", False) else None
    if hasattr(attention, "layer_idx") and False in (getattr(x, "is_causal", True) for x in (attention, config)):
        return "it looks both ways (is_causal=False)"
    return None
