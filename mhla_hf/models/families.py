"""The families of base models: one record per family, as plain data, which imports no model."""

from dataclasses import dataclass, field, replace
from typing import Any

TEXT = ("encoder_hidden_states", "encoder_attention_mask")


@dataclass(frozen=True)
class AttentionKind:
    """Describes a kind of attention that MHLA replaces, for all families that have it."""

    defaults: dict[str, Any]  # settings of a conversion (`MHLASettings`)
    entry: str = "models.converted"  # module that creates the MHLA classes
    auto_classes: tuple[str, ...] = ()  # of transformers, whose mappings name the classes that can be converted
    sources: dict[str, str] = field(default_factory=dict)  # `MHLASettings.core` -> entry of `checkpoints/bundle.py`
    noun: str = ""  # name of a model in errors; models of diffusers are named by their class
    axes: int = 0  # of the grid of tokens; 0 for sequences
    linear: bool = False  # whether the attention is linear already, so that converting it loses nothing


@dataclass(frozen=True)
class DiffusionKind(AttentionKind):
    """Describes a kind of attention of diffusers' transformers."""

    # Axes of the input after the batch; forward's arguments give the sizes of axes that are not among them.
    latents: str = "channels frames height width"
    rotary: str = "pairs"  # form of the rotary embedding (`read_rotary`)
    head_norm: bool = False  # whether norms of q and k are by head, not over all channels
    joint: bool = False  # whether tokens of a text share one attention with those of the grid
    text_last: bool = False  # whether the text comes after the grid where both are in one sequence
    positions: str = ""  # argument that gives the grid if latents are tokens: "img_ids" or "img_shapes"


@dataclass(frozen=True)
class Family:
    """A family of base models: a model type of transformers, or classes of diffusers that convert in the same way."""

    base: str  # model type in transformers, or name of the first class in diffusers
    kind: AttentionKind
    task: str  # `pipeline_tag` on the Hub
    classes: tuple[str, ...] = ()  # that `convert` takes, in addition to those of `kind.auto_classes`
    prefix: int = 1  # tokens before the grid of a vision tower, not counting register tokens


@dataclass(frozen=True)
class DiffusionFamily(Family):
    """A family of transformers of diffusers."""

    kind: DiffusionKind
    # Arguments besides latents and time, in the order of the training data. Without them, a family is trained from calls of
    # its pipelines.
    conditions: tuple[str, ...] = ()
    fixed_size: bool = False  # whether latents must be squares whose side is the model's `sample_size`


WINDOWED: dict[str, Any] = {"layers": "2/3", "windowed": True}
# Endings of the names of classes with a head: `TEXT_ENDS` occur in text decoders and in text encoders.
TEXT_ENDS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
HEAD_ENDS = (*TEXT_ENDS, "ForCausalLM", "ForMaskedLM", "ForMultipleChoice", "ForImageClassification")
AUTO_CLASSES = ("AutoModel", *(f"AutoModel{end}" for end in TEXT_ENDS))
CAUSAL = AttentionKind(
    noun="a causal model",
    defaults={**WINDOWED, "window": 6, "salient": 128},
    auto_classes=("AutoModelForCausalLM", *AUTO_CLASSES),
    sources={"windowed": "models.converted:windowed_class", "matrix": "models.converted:matrix_class"},
)
ENCODER = AttentionKind(
    noun="an encoder",
    sources={"windowed": "models.converted:windowed_encoder_class", "matrix": "models.converted:matrix_encoder_class"},
    defaults={**WINDOWED, "window": 1, "sinks": 0, "feature_map": "softmax"},
    auto_classes=(*AUTO_CLASSES, "AutoModelForMaskedLM", "AutoModelForMultipleChoice"),
)
TOWER = AttentionKind(
    noun="a vision tower",
    sources={"matrix": "models.converted:vision_class"},
    defaults={"layout": [4, 4], "feature_map": "relu"},
    axes=2,
)
IMAGE_DEFAULTS: dict[str, Any] = {"layout": [4, 4], "feature_map": "relu", "normalize": True, "layers": "all"}
SANA_DEFAULTS: dict[str, Any] = {**IMAGE_DEFAULTS, "feature_map": "plain_relu", "mixing_start": "uniform"}
DERIVED = "models.diffusion.converted_transformer"
PIXART_IMAGES = DiffusionKind(IMAGE_DEFAULTS, DERIVED, axes=2, latents="channels height width")
DIT_IMAGES = replace(PIXART_IMAGES, entry="models.diffusion.dit_transformer")
SANA_IMAGES = replace(PIXART_IMAGES, defaults=SANA_DEFAULTS, linear=True)
VIDEO = DiffusionKind({}, DERIVED, axes=3)
SANA_VIDEO = replace(VIDEO, defaults={**SANA_DEFAULTS, "layout": [3, 4, 4], "rope": "after"}, linear=True)
WAN_DEFAULTS: dict[str, Any] = {"layout": [3, 5, 10], "feature_map": "relu", "normalize": False, "output_norm": True}
WAN_VIDEO = replace(VIDEO, defaults={**WAN_DEFAULTS, "rope": "after", "layers": "2/3"})
LTX_VIDEO = replace(WAN_VIDEO, latents="tokens channels", rotary="joined heads")
COSMOS_VIDEO = replace(WAN_VIDEO, rotary="halves", head_norm=True)
ALLEGRO_VIDEO = replace(WAN_VIDEO, rotary="axes")
ANYFLOW_VIDEO = replace(WAN_VIDEO, latents="frames channels height width", rotary="complex")
KANDINSKY_VIDEO = replace(WAN_VIDEO, latents="frames height width channels", rotary="matrices", head_norm=True)
# Latte has transformer blocks that attend within each frame, and others, between frames, which stay softmax.
LATTE_FRAMES = replace(PIXART_IMAGES, latents="channels frames height width")
HUNYUAN_IMAGES = replace(PIXART_IMAGES, defaults={**IMAGE_DEFAULTS, "rope": "after"}, head_norm=True)
# A query of the grid reads the text and its own block by softmax: without its own block, a layer starts much worse.
JOINT_WINDOW: dict[str, Any] = {"windowed": True, "window": 1, "sinks": 0, "rope": "near"}
JOINT_DEFAULTS: dict[str, Any] = {"layout": [4, 4], "feature_map": "softmax", "layers": "2/3", **JOINT_WINDOW}
SD3_IMAGES = replace(PIXART_IMAGES, defaults=JOINT_DEFAULTS, head_norm=True, joint=True)
FLUX_IMAGES = replace(SD3_IMAGES, latents="tokens channels", positions="img_ids")
QWEN_IMAGES = replace(SD3_IMAGES, latents="tokens channels", positions="img_shapes", rotary="complex streams")
HUNYUAN_VIDEO = replace(
    VIDEO, defaults={**JOINT_DEFAULTS, "layout": [3, 5, 10]}, head_norm=True, joint=True, text_last=True
)
COGVIDEOX_VIDEO = replace(HUNYUAN_VIDEO, latents="frames channels height width")
MOCHI_VIDEO = replace(HUNYUAN_VIDEO, rotary="half heads")


def vision_family(base: str, *classes: str, prefix: int = 1) -> Family:
    return Family(base, TOWER, "image-feature-extraction", classes, prefix=prefix)


def diffusion_family(kind: DiffusionKind, task: str, *classes: str, **fields: Any) -> DiffusionFamily:
    return DiffusionFamily(classes[0], kind, task, classes, **fields)


# Model types of transformers.
LANGUAGE_TYPES = (
    "afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid beam biogpt bitnet cohere cohere2 "
    "cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma "
    "gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox "
    "granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hyperclovax jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text "
    "mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral "
    "modernbert-decoder nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 "
    "vaultgemma youtu"
)
LANGUAGE = tuple(Family(base, CAUSAL, "text-generation") for base in LANGUAGE_TYPES.split())

ENCODER_TYPES = (
    "albert bert camembert data2vec-text distilbert electra ernie eurobert gte jina_embeddings_v3 modernbert nomic_bert "
    "roberta roberta-prelayernorm roc_bert ultrabert xlm-roberta xlm-roberta-xl xmod"
)
ENCODERS = tuple(Family(base, ENCODER, "feature-extraction") for base in ENCODER_TYPES.split())

VISION = (
    vision_family("vit", "ViTModel", "ViTForImageClassification"),
    vision_family("deit", "DeiTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", prefix=2),
    vision_family("dinov2", "Dinov2Model", "Dinov2ForImageClassification"),
    vision_family("dinov2_with_registers", "Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    vision_family("dinov3_vit", "DINOv3ViTModel"),
    vision_family("clip_vision_model", "CLIPVisionModel", "CLIPVisionModelWithProjection"),
    vision_family("siglip_vision_model", "SiglipVisionModel", prefix=0),
)

DIT = diffusion_family(
    DIT_IMAGES, "unconditional-image-generation", "DiTTransformer2DModel", conditions=("class_labels",), fixed_size=True
)
DIFFUSION = (
    diffusion_family(WAN_VIDEO, "text-to-video", "WanTransformer3DModel", conditions=TEXT[:1]),
    diffusion_family(WAN_VIDEO, "text-to-video", "WanVACETransformer3DModel", conditions=TEXT[:1]),
    diffusion_family(WAN_VIDEO, "text-to-video", "SkyReelsV2Transformer3DModel"),
    diffusion_family(WAN_VIDEO, "image-to-image", "ChronoEditTransformer3DModel"),
    diffusion_family(WAN_VIDEO, "video-to-video", "WanAnimateTransformer3DModel"),
    diffusion_family(SANA_IMAGES, "text-to-image", "SanaTransformer2DModel", conditions=TEXT),
    diffusion_family(SANA_VIDEO, "text-to-video", "SanaVideoTransformer3DModel", conditions=TEXT),
    diffusion_family(PIXART_IMAGES, "text-to-image", "PixArtTransformer2DModel", conditions=TEXT),
    diffusion_family(LTX_VIDEO, "text-to-video", "LTXVideoTransformer3DModel"),
    diffusion_family(LTX_VIDEO, "text-to-video", "LTX2VideoTransformer3DModel"),
    diffusion_family(COSMOS_VIDEO, "text-to-video", "CosmosTransformer3DModel"),
    diffusion_family(ALLEGRO_VIDEO, "text-to-video", "AllegroTransformer3DModel"),
    diffusion_family(ANYFLOW_VIDEO, "text-to-video", "AnyFlowTransformer3DModel"),
    diffusion_family(KANDINSKY_VIDEO, "text-to-video", "Kandinsky5Transformer3DModel", "Kandinsky6Transformer3DModel"),
    diffusion_family(LATTE_FRAMES, "text-to-video", "LatteTransformer3DModel"),
    diffusion_family(HUNYUAN_IMAGES, "text-to-image", "HunyuanDiT2DModel"),
    DIT,
    diffusion_family(FLUX_IMAGES, "text-to-image", "FluxTransformer2DModel", "ChromaTransformer2DModel"),
    diffusion_family(FLUX_IMAGES, "text-to-image", "Flux2Transformer2DModel"),
    diffusion_family(QWEN_IMAGES, "text-to-image", "QwenImageTransformer2DModel"),
    diffusion_family(SD3_IMAGES, "text-to-image", "SD3Transformer2DModel", "AuraFlowTransformer2DModel"),
    diffusion_family(HUNYUAN_VIDEO, "text-to-video", "HunyuanVideoTransformer3DModel"),
    diffusion_family(HUNYUAN_VIDEO, "text-to-video", "HunyuanVideo15Transformer3DModel"),
    diffusion_family(COGVIDEOX_VIDEO, "text-to-video", "CogVideoXTransformer3DModel"),
    diffusion_family(MOCHI_VIDEO, "text-to-video", "MochiTransformer3DModel"),
)
FAMILIES = (*LANGUAGE, *ENCODERS, *VISION, *DIFFUSION)


def family_of_type(model_type: str | None) -> Family | None:
    """Return the family whose base has this model type of transformers, such as "llama"; None if there is none."""
    return next((family for family in (*LANGUAGE, *ENCODERS, *VISION) if family.base == model_type), None)


def auto_class_of(name: str) -> str:
    """Return the name of the Auto class of transformers that loads a model class of this name."""
    if name.endswith("LMHeadModel"):
        return "AutoModelForCausalLM"
    head = name.removesuffix("WithTeacher")
    return next((f"AutoModel{end}" for end in HEAD_ENDS if head.endswith(end)), "AutoModel")
