"""The families of base models: one record per family, with all that the package has to know of it.

Conversion, training, sharing, and the bundler read these records. They are plain data, so that reading them does not import
any model.
"""

from dataclasses import dataclass, field
from typing import Any

# The end of the names of language models' classes, and the Auto class that loads them.
HEADS = {
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
    "TextModel": "AutoModel",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
ENCODER_HEADS = {head: auto for head, auto in HEADS.items() if not head.endswith(("LM", "HeadModel", "TextModel"))}
ENCODER_HEADS |= {"ForMaskedLM": "AutoModelForMaskedLM", "ForMultipleChoice": "AutoModelForMultipleChoice"}
IMAGE_HEADS = dict.fromkeys(("ForImageClassification", "WithTeacher"), "AutoModelForImageClassification")
TEXT = ("encoder_hidden_states", "encoder_attention_mask")


@dataclass(frozen=True)
class Family:
    """One family of base models.

    Attributes:
        base: Model type in transformers, or name of the first class in diffusers.
        classes: Names of the base's classes that `convert` takes; the MHLA class of each has the same name after "MHLA".
        entry: Module that defines the MHLA classes. The bundler starts from it.
        task: Task (`pipeline_tag`) on the Hub.
        defaults: Default settings of a conversion (`MHLASettings`).
        conditions: Arguments of a diffusion model beside the latents and the time, in the order of the training data.
            Diffusion families without conditions cannot be trained.
        linear: Whether the attention of the base is linear already, so that converting it loses nothing.
        prefix: Number of tokens before the grid of a vision tower, without the registers that follow these.
        axes: Number of axes of a diffusion model's grid.
        fixed_size: Whether a diffusion model takes square latents of its `sample_size` only.
    """

    base: str
    classes: tuple[str, ...]
    entry: str
    task: str
    defaults: dict[str, Any] = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    linear: bool = False
    prefix: int = 1
    axes: int = 2
    fixed_size: bool = False


def language_family(base: str) -> Family:
    """Return the record of a family of causal language models of transformers."""
    prefix = SPELLED.get(base) or "".join(map(str.capitalize, base.removesuffix("_text").split("_")))
    defaults: dict[str, Any] = {
        "layers": "2/3",
        "mixing_form": "decay",
        "local": "softmax",
        "rope": "near",
        "window": 6,
    }
    defaults |= {"num_decays": 1, "free_decay": True, "length_power": True, "feature_map": "softmax"}
    # `SCALED_AFTER` in models/rotation.py says why.
    defaults |= {"rope": "before"} if base.startswith("hunyuan") else {}
    return Family(base, tuple(prefix + head for head in HEADS), "models.converted", "text-generation", defaults)


def encoder_family(base: str, prefix: str) -> Family:
    """Return the record of a family of text encoders of transformers, in which every token sees every other."""
    classes = tuple(prefix + head for head in ENCODER_HEADS)
    return Family(base, classes, "models.converted_encoder", "feature-extraction", ENCODER_DEFAULTS)


def vision_family(base: str, *classes: str, prefix: int = 1) -> Family:
    """Return the record of a family of vision towers of transformers."""
    defaults = {"layout": [4, 4], "feature_map": "relu"}
    return Family(base, classes, "models.converted_vision", "image-feature-extraction", defaults, prefix=prefix)


def diffusion_family(
    *classes: str, task: str, defaults: dict[str, Any], entry: str = "converted", **fields: Any
) -> Family:
    """Return the record of a family of transformers of diffusers.

    Args:
        *classes: Names of the base's classes.
        task: Task on the Hub.
        defaults: Default settings.
        entry: Name of the module without "_transformer".
        **fields: Other fields of `Family`.
    """
    return Family(classes[0], classes, f"models.{entry}_transformer", task, defaults, **fields)


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
# The start of the class names where it does not follow from the model type.
SPELLED = {
    "apertus1p5_text": "Apertus1p5Text",
    "aria_text": "AriaText", "axk1": "AXK1", "biogpt": "BioGpt", "bitnet": "BitNet", "ctrl": "CTRL",
    "ernie4_5": "Ernie4_5", "ernie4_5_moe": "Ernie4_5_Moe", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode",
    "gpt_neox": "GPTNeoX", "granitemoe": "GraniteMoe", "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared", "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1",
    "hy_v3": "HYV3", "hyperclovax": "HyperCLOVAX", "jetmoe": "JetMoe", "mimo_v2_flash": "MiMoV2Flash",
    "minicpm3": "MiniCPM3", "minimax": "MiniMax", "minimax_m2": "MiniMaxM2", "minimax_m3_vl_text": "MiniMaxM3VL",
    "modernbert-decoder": "ModernBertDecoder", "nanochat": "NanoChat", "nemotron_h": "NemotronH",
    "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_5_text": "Qwen3_5", "smollm3": "SmolLM3", "vaultgemma": "VaultGemma",
}  # fmt: skip
LANGUAGE = tuple(language_family(base) for base in LANGUAGE_TYPES.split())

ENCODER_DEFAULTS: dict[str, Any] = {
    "layers": "2/3",
    "mixing_form": "decay",
    "local": "softmax",
    "window": 1,
    "sinks": 0,
}
ENCODER_DEFAULTS |= {"num_decays": 1, "free_decay": True, "feature_map": "softmax"}
ENCODER_PREFIXES = {
    "albert": "Albert", "bert": "Bert", "camembert": "Camembert", "data2vec-text": "Data2VecText",
    "distilbert": "DistilBert", "electra": "Electra", "ernie": "Ernie", "eurobert": "EuroBert", "gte": "Gte",
    "jina_embeddings_v3": "JinaEmbeddingsV3", "modernbert": "ModernBert", "nomic_bert": "NomicBert",
    "roberta": "Roberta", "roberta-prelayernorm": "RobertaPreLayerNorm", "roc_bert": "RoCBert",
    "ultrabert": "Ultrabert", "xlm-roberta": "XLMRoberta", "xlm-roberta-xl": "XLMRobertaXL", "xmod": "Xmod",
}  # fmt: skip
ENCODERS = tuple(encoder_family(base, prefix) for base, prefix in ENCODER_PREFIXES.items())

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
NORMED = {"normalize": False, "output_norm": True}
WAN_DEFAULTS = {"layout": [3, 5, 10], "feature_map": "relu", **NORMED, "rope": "after", "layers": "2/3"}
SANA_DEFAULTS = {**IMAGE_DEFAULTS, "feature_map": "plain_relu", "mixing_start": "uniform"}

SANA_VIDEO_DEFAULTS = {**SANA_DEFAULTS, "layout": [3, 4, 4], "rope": "after"}

DIT_FACTS: dict[str, Any] = {
    "conditions": ("class_labels",),
    "fixed_size": True,
    "task": "unconditional-image-generation",
}
DIT = diffusion_family("DiTTransformer2DModel", entry="dit", defaults=IMAGE_DEFAULTS, **DIT_FACTS)
WAN_VIDEO: dict[str, Any] = {"task": "text-to-video", "defaults": WAN_DEFAULTS, "axes": 3}
SANA_VIDEO: dict[str, Any] = {"task": "text-to-video", "defaults": SANA_VIDEO_DEFAULTS, "axes": 3}
LINEAR_TEXT: dict[str, Any] = {"conditions": TEXT, "linear": True}

DIFFUSION = (
    diffusion_family("WanTransformer3DModel", conditions=TEXT[:1], **WAN_VIDEO),
    diffusion_family("WanVACETransformer3DModel", "SkyReelsV2Transformer3DModel", **WAN_VIDEO),
    diffusion_family("ChronoEditTransformer3DModel", **{**WAN_VIDEO, "task": "image-to-image"}),
    diffusion_family("WanAnimateTransformer3DModel", **{**WAN_VIDEO, "task": "video-to-video"}),
    diffusion_family("SanaTransformer2DModel", task="text-to-image", defaults=SANA_DEFAULTS, **LINEAR_TEXT),
    diffusion_family("SanaVideoTransformer3DModel", **SANA_VIDEO, **LINEAR_TEXT),
    diffusion_family("PixArtTransformer2DModel", task="text-to-image", defaults=IMAGE_DEFAULTS, conditions=TEXT),
    DIT,
)
FAMILIES = (*LANGUAGE, *ENCODERS, *VISION, *DIFFUSION)


def family_of_type(model_type: str | None) -> Family | None:
    """Return the family of a model type of transformers, or None."""
    return next((family for family in (*LANGUAGE, *ENCODERS, *VISION) if family.base == model_type), None)


def family_of_class(name: str) -> Family | None:
    """Return the family of a model class, or None.

    Args:
        name: Name of the class, with or without "MHLA" at its start, as in `config.json`.
    """
    return next((family for family in FAMILIES if name.removeprefix("MHLA") in family.classes), None)


def auto_class_of(name: str) -> str:
    """Return the name of the Auto class of transformers that loads a model class of this name."""
    return next(
        (auto for end, auto in {**HEADS, **ENCODER_HEADS, **IMAGE_HEADS}.items() if name.endswith(end)), "AutoModel"
    )
