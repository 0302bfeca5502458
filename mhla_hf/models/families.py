"""The families of base models: one record for each, and all that the package knows of it by name.

Converting, training, sharing and the bundles read these records. They are plain data, so that reading them imports nothing.
"""

from dataclasses import dataclass, field

HEADS = {  # how a language model's class ends, and the Auto class that finds it
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
    "TextModel": "AutoModel",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
ENCODER_HEADS = {
    "ForMaskedLM": "AutoModelForMaskedLM",
    **{head: auto for head, auto in HEADS.items() if not head.endswith(("LM", "HeadModel", "TextModel"))},
    "ForMultipleChoice": "AutoModelForMultipleChoice",
}
IMAGE_HEADS = dict.fromkeys(("ForImageClassification", "WithTeacher"), "AutoModelForImageClassification")
TEXT = ("encoder_hidden_states", "encoder_attention_mask")


@dataclass(frozen=True)
class Family:
    """One family of base models.

    base: its model type in transformers, or its first class in diffusers.
    classes: the base's classes that `convert` takes; the MHLA class of each has its name with MHLA before it.
    entry: the module that defines these classes, and that is folded into their checkpoints.
    task: what the Hub calls the thing it does.
    defaults: the settings of a conversion (`MHLASettings`).
    conditions: what it is told beside the time, in the order in which training data hold it; without any, it cannot be
        trained as a transformer of diffusers.
    linear: its attention is linear before the conversion, which then loses nothing.
    prefix: tokens before the grid of a vision tower; registers come after them.
    axes: how many axes the grid of a transformer of diffusers has.
    fixed_size: it takes square latents of its `sample_size` only.
    """

    base: str
    classes: tuple[str, ...]
    entry: str
    task: str
    defaults: dict = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    linear: bool = False
    prefix: int = 1
    axes: int = 2
    fixed_size: bool = False

    @property
    def stem(self) -> str:
        """How the names of the base's classes begin."""
        return min(self.classes, key=len).removesuffix("Model")


def language_family(base: str, prefix: str) -> Family:
    """A family of causal language models of transformers: a body and the heads on it, as far as it has them."""
    defaults = {"layers": "2/3", "mixing_form": "decay", "local": "softmax"}
    return Family(base, tuple(prefix + head for head in HEADS), "models.converted", "text-generation", defaults)


def encoder_family(base: str, prefix: str) -> Family:
    """A family of encoders of text of transformers, where every token sees every other: a body and the heads on it."""
    classes = tuple(prefix + head for head in ENCODER_HEADS)
    return Family(base, classes, "models.converted_encoder", "feature-extraction", ENCODER_DEFAULTS)


def vision_family(base: str, *classes: str, prefix: int = 1) -> Family:
    """A family of vision towers of transformers."""
    defaults = {"layout": [4, 4], "feature_map": "relu"}
    return Family(base, classes, "models.converted_vision", "image-feature-extraction", defaults, prefix=prefix)


def diffusion_family(*classes: str, task: str, defaults: dict, entry: str = "converted", **facts) -> Family:
    """A family of transformers of diffusers; `entry` is the start of its module's name."""
    return Family(classes[0], classes, f"models.{entry}_transformer", task, defaults, **facts)


LANGUAGE_PREFIXES = {  # model type in transformers -> how the names of its classes begin
    "afmoe": "Afmoe", "apertus": "Apertus", "arcee": "Arcee", "aria_text": "AriaText", "axk1": "AXK1",
    "bailing_hybrid": "BailingHybrid", "beam": "Beam", "biogpt": "BioGpt", "bitnet": "BitNet",
    "cohere": "Cohere", "cohere2": "Cohere2", "cohere2_moe": "Cohere2Moe", "ctrl": "CTRL", "cwm": "Cwm",
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "dots1": "Dots1",
    "ernie4_5": "Ernie4_5", "ernie4_5_moe": "Ernie4_5_Moe", "exaone4": "Exaone4",
    "exaone_moe": "ExaoneMoe", "flex_olmo": "FlexOlmo", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3",
    "gemma3n_text": "Gemma3n", "gemma4_text": "Gemma4", "glm": "Glm", "glm4": "Glm4", "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode", "gpt_neox": "GPTNeoX",
    "granite": "Granite", "granitemoe": "GraniteMoe", "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared", "helium": "Helium", "hunyuan_v1_dense": "HunYuanDenseV1",
    "hunyuan_v1_moe": "HunYuanMoEV1", "hy_v3": "HYV3", "hyperclovax": "HyperCLOVAX", "jais2": "Jais2",
    "jetmoe": "JetMoe", "kimi_linear": "KimiLinear", "kolibri1": "Kolibri1", "laguna": "Laguna", "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe", "lfm3": "Lfm3", "llama": "Llama", "llama4_text": "Llama4", "mellum": "Mellum",
    "mimo_v2_flash": "MiMoV2Flash", "minicpm3": "MiniCPM3", "minimax": "MiniMax", "minimax_m2": "MiniMaxM2",
    "minimax_m3_vl_text": "MiniMaxM3VL", "ministral": "Ministral", "ministral3": "Ministral3", "mistral": "Mistral",
    "mixtral": "Mixtral", "modernbert-decoder": "ModernBertDecoder", "nanochat": "NanoChat", "olmo": "Olmo",
    "olmo2": "Olmo2", "olmo3": "Olmo3", "olmo_hybrid": "OlmoHybrid", "olmoe": "Olmoe", "persimmon": "Persimmon",
    "phi": "Phi", "phi3": "Phi3", "phimoe": "Phimoe", "qwen2": "Qwen2", "qwen2_moe": "Qwen2Moe", "qwen3": "Qwen3",
    "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_5_text": "Qwen3_5", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss", "smollm3": "SmolLM3", "solar_open": "SolarOpen", "starcoder2": "Starcoder2",
    "vaultgemma": "VaultGemma", "youtu": "Youtu",
}  # fmt: skip
LANGUAGE = tuple(language_family(base, prefix) for base, prefix in LANGUAGE_PREFIXES.items())

ENCODER_DEFAULTS = {"block_size": 16, "layers": "2/3"}
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

DIT_FACTS = {"conditions": ("class_labels",), "fixed_size": True, "task": "unconditional-image-generation"}
DIT = diffusion_family("DiTTransformer2DModel", entry="dit", defaults=IMAGE_DEFAULTS, **DIT_FACTS)
WAN_VIDEO = {"task": "text-to-video", "defaults": WAN_DEFAULTS, "axes": 3}
SANA_VIDEO = {"task": "text-to-video", "defaults": SANA_VIDEO_DEFAULTS, "axes": 3}
LINEAR_TEXT = {"conditions": TEXT, "linear": True}

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
    """The family of a model type of transformers; None for any other."""
    return next((family for family in (*LANGUAGE, *ENCODERS, *VISION) if family.base == model_type), None)


def family_of_class(name: str) -> Family | None:
    """The family of a class of models by its name, with MHLA before it or without, as config.json says it; or None."""
    return next((family for family in FAMILIES if name.removeprefix("MHLA") in family.classes), None)


def auto_class_of(name: str) -> str:
    """The Auto class of transformers that finds a model class of this name."""
    return next(
        (auto for end, auto in {**HEADS, **ENCODER_HEADS, **IMAGE_HEADS}.items() if name.endswith(end)), "AutoModel"
    )
