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

# model type -> (configuration class, causal LM class); the same names as `CONVERTIBLE_MODEL_TYPES` gives, spelt out here
# because asking would import transformers.
MODEL_TYPES = {
    "mhla": ("MHLAConfig", "MHLAForCausalLM"),
    "mhla_llama": ("MHLALlamaConfig", "MHLALlamaForCausalLM"),
    "mhla_mistral": ("MHLAMistralConfig", "MHLAMistralForCausalLM"),
    "mhla_mixtral": ("MHLAMixtralConfig", "MHLAMixtralForCausalLM"),
    "mhla_qwen2": ("MHLAQwen2Config", "MHLAQwen2ForCausalLM"),
    "mhla_qwen3": ("MHLAQwen3Config", "MHLAQwen3ForCausalLM"),
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
    """Tell `AutoModelForCausalLM` the names of their classes."""
    mapping = sys.modules[MODEL_TABLE].MODEL_FOR_CAUSAL_LM_MAPPING
    for model_type, (config, model) in MODEL_TYPES.items():
        mapping._model_mapping[model_type] = model
        mapping._reverse_config_mapping[config] = model_type
        mapping._modules[model_type] = _Room()


def hand_over_source_writer() -> None:
    """Tell `models` how the one-file source of a checkpoint is written; the room itself knows nothing of `hub`."""

    def write(entry, folder):
        return importlib.import_module("mhla_hf.hub.bundle").write_bundle(entry, folder)

    sys.modules[SAVING].set_source_writer(write)


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
    actions = {CONFIG_TABLE: register_configs, MODEL_TABLE: register_models, SAVING: hand_over_source_writer}
    for module, action in actions.items():
        if module in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(module, action))
