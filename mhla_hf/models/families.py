"""The families of base models: one record for each, and all that the package knows of it by name.

Converting, training, sharing and the bundles read these records. They are plain data, so that reading them imports nothing.
"""

from dataclasses import dataclass, field

TEXT = ("encoder_hidden_states", "encoder_attention_mask")


@dataclass(frozen=True)
class Family:
    """One family of base models.

    base: its model type in transformers, or its first class in diffusers.
    classes: the base's classes that `convert` takes; the MHLA class of each has its name with MHLA before it.
    entry: the module that defines these classes, and that is folded into their checkpoints.
    task: what the Hub calls the thing it does.
    defaults: the settings of a conversion (`MHLASettings`).
    prefix: tokens before the grid of a vision tower; registers come after them.
    axes: how many axes the grid of a transformer of diffusers has.
    conditions: what that transformer is told beside the time, in the order in which training data hold it; without any,
        it can be converted but not trained.
    fixed_size: it takes square latents of its `sample_size` only.
    linear: its attention is linear before the conversion, which then loses nothing.
    """

    base: str
    classes: tuple[str, ...]
    entry: str
    task: str
    defaults: dict = field(default_factory=dict)
    prefix: int = 1
    axes: int = 2
    conditions: tuple[str, ...] = ()
    fixed_size: bool = False
    linear: bool = False


def language_family(base: str, *classes: str) -> Family:
    """A family of causal language models of transformers."""
    return Family(base, classes, "models.converted", "text-generation", {"layers": "2/3"})


def vision_family(base: str, *classes: str, prefix: int = 1) -> Family:
    """A family of vision towers of transformers."""
    defaults = {"layout": [4, 4], "feature_map": "relu"}
    return Family(base, classes, "models.converted_vision", "image-feature-extraction", defaults, prefix)


LANGUAGE = (
    language_family("llama", "LlamaForCausalLM"),
    language_family("mistral", "MistralForCausalLM"),
    language_family("mixtral", "MixtralForCausalLM"),
    language_family("olmo2", "Olmo2ForCausalLM"),
    language_family("qwen2", "Qwen2ForCausalLM"),
    language_family("qwen3", "Qwen3ForCausalLM"),
)

VISION = (
    vision_family("vit", "ViTModel", "ViTForImageClassification"),
    vision_family("deit", "DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", prefix=2),
    vision_family("dinov2", "Dinov2Model", "Dinov2ForImageClassification"),
    vision_family("dinov2_with_registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    vision_family("dinov3_vit", "DINOv3ViTModel"),
    vision_family("clip_vision_model", "CLIPVisionModel", "CLIPVisionModelWithProjection"),
    vision_family("siglip_vision_model", "SiglipVisionModel", prefix=0),
)

IMAGE_DEFAULTS = {"layout": [4, 4], "feature_map": "relu", "normalize": True, "layers": "all"}
WAN_DEFAULTS = {
    "layout": [3, 5, 10],
    "feature_map": "relu",
    "normalize": False,
    "output_norm": True,
    "rope": "after",
    "layers": "2/3",
}
SANA_DEFAULTS = {**IMAGE_DEFAULTS, "feature_map": "plain_relu", "mixing_start": "uniform"}

WAN = Family(
    base="WanTransformer3DModel",
    classes=("WanTransformer3DModel",),
    entry="models.converted_transformer",
    task="text-to-video",
    defaults=WAN_DEFAULTS,
    axes=3,
    conditions=TEXT[:1],
)
WAN_RELATIVES = Family(
    base="WanVACETransformer3DModel",
    classes=("WanVACETransformer3DModel", "SkyReelsV2Transformer3DModel"),
    entry="models.converted_transformer",
    task="text-to-video",
    defaults=WAN_DEFAULTS,
    axes=3,
)
CHRONO_EDIT = Family(
    base="ChronoEditTransformer3DModel",
    classes=("ChronoEditTransformer3DModel",),
    entry="models.converted_transformer",
    task="image-to-image",
    defaults=WAN_DEFAULTS,
    axes=3,
)
SANA = Family(
    base="SanaTransformer2DModel",
    classes=("SanaTransformer2DModel",),
    entry="models.converted_transformer",
    task="text-to-image",
    defaults=SANA_DEFAULTS,
    conditions=TEXT,
    linear=True,
)
SANA_VIDEO = Family(
    base="SanaVideoTransformer3DModel",
    classes=("SanaVideoTransformer3DModel",),
    entry="models.converted_transformer",
    task="text-to-video",
    defaults={**SANA_DEFAULTS, "layout": [3, 4, 4], "rope": "after"},
    axes=3,
    conditions=TEXT,
    linear=True,
)
DIT = Family(
    base="DiTTransformer2DModel",
    classes=("DiTTransformer2DModel",),
    entry="models.dit_transformer",
    task="unconditional-image-generation",
    defaults=IMAGE_DEFAULTS,
    conditions=("class_labels",),
    fixed_size=True,
)
PIXART = Family(
    base="PixArtTransformer2DModel",
    classes=("PixArtTransformer2DModel",),
    entry="models.pixart_transformer",
    task="text-to-image",
    defaults=IMAGE_DEFAULTS,
    conditions=TEXT,
)

DIFFUSION = (WAN, WAN_RELATIVES, CHRONO_EDIT, SANA, SANA_VIDEO, DIT, PIXART)
FAMILIES = (*LANGUAGE, *VISION, *DIFFUSION)


def family_of_type(model_type: str | None) -> Family | None:
    """The family of a model type of transformers; None for any other."""
    return next((family for family in (*LANGUAGE, *VISION) if family.base == model_type), None)


def family_of_class(name: str) -> Family | None:
    """The family of a class of models by its name, with MHLA before it or without, as config.json says it; or None."""
    return next((family for family in FAMILIES if name.removeprefix("MHLA") in family.classes), None)
