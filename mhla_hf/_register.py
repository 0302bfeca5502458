"""Registering MHLA's model types with transformers' Auto classes without paying for it at `import mhla_hf`.

transformers reads its Auto tables lazily, and reads them in the middle of its own imports. So nothing of ours is imported
when a table is loaded: each model type gets a line of names, as transformers' own models have, and the classes are imported
when somebody asks for them. `register()` of the Auto classes would need the classes, and would import them in a circle.
"""

import importlib
import importlib.util
import sys

CONFIG_TABLE = "transformers.models.auto.configuration_auto"
MODEL_TABLE = "transformers.models.auto.modeling_auto"
SAVING = "mhla_hf.models.saving"

BODY, CAUSAL_LM = "MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"
IMAGE, IMAGE_CLASSIFIER = "MODEL_FOR_IMAGE_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"


def _language(name: str) -> tuple[str, dict]:
    return f"MHLA{name}Config", {CAUSAL_LM: f"MHLA{name}ForCausalLM"}


def _vision(name: str, classifier: bool = True) -> tuple[str, dict]:
    models = dict.fromkeys((BODY, IMAGE), f"MHLA{name}Model")
    return f"MHLA{name}Config", models | ({IMAGE_CLASSIFIER: f"MHLA{name}ForImageClassification"} if classifier else {})


# model type -> (configuration class, Auto table -> model class); the same names as the tables of `models.configuration`
# give, spelt out here because asking would import transformers.
MODEL_TYPES = {
    "mhla": _language(""),
    "mhla_llama": _language("Llama"),
    "mhla_mistral": _language("Mistral"),
    "mhla_mixtral": _language("Mixtral"),
    "mhla_qwen2": _language("Qwen2"),
    "mhla_qwen3": _language("Qwen3"),
    "mhla_vision": (
        "MHLAVisionConfig",
        {BODY: "MHLAVisionModel", IMAGE: "MHLAVisionModel", IMAGE_CLASSIFIER: "MHLAForImageClassification"},
    ),
    "mhla_vit": _vision("ViT"),
    "mhla_deit": _vision("DeiT"),
    "mhla_dinov2": _vision("Dinov2"),
    "mhla_dinov2_with_registers": _vision("Dinov2WithRegisters"),
    "mhla_dinov3_vit": _vision("DINOv3ViT", classifier=False),
    "mhla_clip_vision_model": _vision("CLIPVision", classifier=False),
    "mhla_siglip_vision_model": _vision("SiglipVision", classifier=False),
}


class _Room:
    """Stands where transformers keeps a model's module: a class is imported when it is asked for."""

    def __getattr__(self, name: str):
        return getattr(importlib.import_module("mhla_hf"), name)


def register_configs() -> None:
    """Tell `AutoConfig` the names of the from-scratch and the converted model types."""
    mapping = sys.modules[CONFIG_TABLE].CONFIG_MAPPING
    for model_type, (config, _) in MODEL_TYPES.items():
        mapping._mapping[model_type] = config
        mapping._modules[model_type] = _Room()


def register_models() -> None:
    """Tell the Auto classes of models the names of their classes."""
    for model_type, (config, models) in MODEL_TYPES.items():
        for table, model in models.items():
            mapping = getattr(sys.modules[MODEL_TABLE], table)
            mapping._model_mapping[model_type] = model
            mapping._reverse_config_mapping[config] = model_type
            mapping._modules[model_type] = _Room()


def hand_over_source_maker() -> None:
    """Tell `models` how the one-file source of a checkpoint is made; the room itself knows nothing of `hub`."""

    def make(entry):
        return importlib.import_module("mhla_hf.checkpoints.bundle").make_source(entry)

    sys.modules[SAVING].set_source_maker(make)


class _AfterImport:
    """A finder that lets the others find `module`, and calls `action` once when it has been executed."""

    def __init__(self, module: str, action):
        self.module, self.action = module, action

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute, action = spec.loader.exec_module, self.action

        def exec_module(module):
            execute(module)
            action()

        spec.loader.exec_module = exec_module
        return spec


def register_on_import() -> None:
    """Register now with what is loaded, and with the rest when it is loaded."""
    actions = {CONFIG_TABLE: register_configs, MODEL_TABLE: register_models, SAVING: hand_over_source_maker}
    for module, action in actions.items():
        if module in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(module, action))
