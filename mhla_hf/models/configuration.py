"""Configurations: the from-scratch language model's, and for each base family one that adds "mhla" to the base's own.

No modelling code is imported here: registering a configuration must cost nothing.
"""

import re
from copy import deepcopy

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from ..nn.settings import MHLASettings

CONVERTIBLE_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
# Vision towers: the base's classes that convert() knows.
CONVERTIBLE_VISION_TYPES = {
    "vit": ("ViTModel", "ViTForImageClassification"),
    "deit": ("DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    "dinov3_vit": ("DINOv3ViTModel",),
    "clip_vision_model": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "siglip_vision_model": ("SiglipVisionModel",),
}
OVERLAY_PREFIX = "mhla_"
NO_SOFTMAX = "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf installed"

MHLA_PRESETS = {
    "340M": {},
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 4,
    },
}


@strict
class MHLAConfig(PreTrainedConfig):
    """The paper's language model (sections 4, 5.4 and C); the defaults are its 340 M configuration.

    Args:
        expand_k: width of all q heads together, as a share of `hidden_size` (0.5: heads of 128).
        expand_v: width of all v heads together, as a share of `hidden_size` (1.0: heads of 256).
        mhla: settings as a dictionary (`MHLASettings`). Default: relu, RoPE after the map, no normaliser but an RMSNorm
            per head, output gate, 32 blocks of 64 tokens.

    `MHLAConfig.preset("340M")` and `MHLAConfig.preset("tiny")` give ready configurations.
    """

    model_type = "mhla"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 4
    expand_k: float = 0.5
    expand_v: float = 1.0
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True
    rope_parameters: dict | None = None
    mlp_bias: bool = False
    head_dim: int | None = None
    value_dim: int | None = None
    mhla: dict | None = None

    def __post_init__(self, **kwargs):
        heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = int(self.hidden_size * self.expand_k) // heads
        if self.value_dim is None:
            self.value_dim = int(self.hidden_size * self.expand_v) // heads
        settings = MHLASettings.from_dict(paper_language_settings() if self.mhla is None else self.mhla)
        if settings.layers != "all" and settings.resolve_layers(self.num_hidden_layers) != list(
            range(self.num_hidden_layers)
        ):
            raise ValueError(
                f'layers: got {settings.layers!r}, expected "all": a from-scratch MHLA model has no softmax layers; '
                "convert a base model for a hybrid."
            )
        settings.layers = list(range(self.num_hidden_layers))
        self.mhla = settings.to_dict()
        super().__post_init__(**kwargs)

    def validate_architecture(self):
        """Part of the strict validation: heads must have even, positive widths (RoPE rotates pairs)."""
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even number of at least 2.")
        if self.value_dim < 1:
            raise ValueError(f"value_dim: got {self.value_dim}, expected at least 1.")

    @classmethod
    def preset(cls, name: str, **overrides) -> "MHLAConfig":
        """A named configuration ("340M", "tiny"), with any argument replaced."""
        if name not in MHLA_PRESETS:
            raise ValueError(f"name: got {name!r}, expected one of {sorted(MHLA_PRESETS)}.")
        return cls(**{**MHLA_PRESETS[name], **overrides})


def paper_language_settings() -> dict:
    """The attention of the paper's language model, as `config.json` holds it."""
    return MHLASettings(feature_map="relu", normalize=False, output_norm=True, gate=True, rope="after").to_dict()


class MHLAOverlayConfig:
    """What a converted model's configuration adds to its base's: `mhla`, checked when made and when loaded.

    In `config.json` also `transformers_weights`, which names no file: softmax classes refuse the folder by it, which they
    would load but for `mhla.*`; this class drops it.
    """

    def __post_init__(self, **kwargs):
        settings = kwargs.pop("mhla", None)
        if settings is not None:
            kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)
        if settings is not None:
            self.mhla = resolved_settings(settings, self.num_hidden_layers)

    def to_dict(self) -> dict:
        """As the base, and what stops softmax classes."""
        values = super().to_dict()
        return {**values, "transformers_weights": NO_SOFTMAX} if values.get("mhla") is not None else values


def resolved_settings(settings: dict | MHLASettings, num_layers: int) -> dict:
    """Settings as `config.json` holds them: checked, with the layers spelt out."""
    values = deepcopy(settings) if isinstance(settings, MHLASettings) else MHLASettings.from_dict(settings)
    values.layers = values.resolve_layers(num_layers)
    return values.to_dict()


def overlay_model_type(base_model_type: str) -> str:
    """The converted family's model type: "llama" becomes "mhla_llama"."""
    return OVERLAY_PREFIX + base_model_type


def base_of_overlay_name(name: str, suffix: str) -> str | None:
    """The base model type that an overlay class name such as "MHLALlamaConfig" speaks of; None if there is none."""
    match = re.fullmatch(rf"MHLA(\w+){suffix}", name)
    if not match:
        return None
    for model_type in (*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES):
        if CONFIG_MAPPING_NAMES[model_type] == f"{match.group(1)}Config":
            return model_type
    return None


def overlay_config_named(name: str) -> type:
    """The configuration class of a converted family by its own name, such as "MHLALlamaConfig"."""
    base_model_type = base_of_overlay_name(name, "Config")
    if base_model_type is None:
        known = [*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES]
        raise AttributeError(f"name: got {name!r}, expected a configuration of {known}.")
    return overlay_config_class(base_model_type)


_OVERLAY_CONFIGS = {}
# Where a process that unpickles such a class finds it: the module that resolves overlay names. In a bundle, this one.
_OVERLAY_MODULE = __name__.replace(".configuration", ".converted")


def overlay_config_class(base_model_type: str) -> type:
    """The configuration class of a converted family, made once: `MHLALlamaConfig(LlamaConfig)` for "llama"."""
    if base_model_type not in _OVERLAY_CONFIGS:
        known = [*CONVERTIBLE_MODEL_TYPES, *CONVERTIBLE_VISION_TYPES]
        if base_model_type not in known:
            raise ValueError(
                f"model_type: got {base_model_type!r}, expected one of {known}; other families are not supported yet."
            )
        base = CONFIG_MAPPING[base_model_type]
        namespace = {
            "model_type": overlay_model_type(base_model_type),
            "base_model_type": base_model_type,
            "__module__": _OVERLAY_MODULE,
            "__doc__": f"`{base.__name__}` with `mhla`, the settings of its MHLA layers.",
        }
        _OVERLAY_CONFIGS[base_model_type] = type(f"MHLA{base.__name__}", (MHLAOverlayConfig, base), namespace)
    return _OVERLAY_CONFIGS[base_model_type]
