"""Registering MHLA's model types with transformers' Auto classes without paying for it at `import mhla_hf`.

`AutoConfig` and `AutoModelForCausalLM` live in two modules that transformers imports lazily. If one is loaded already its
classes are registered now; otherwise a one-time import hook registers them as soon as it has been loaded.
"""

import importlib
import importlib.util
import sys

CONFIG_TABLE = "transformers.models.auto.configuration_auto"
MODEL_TABLE = "transformers.models.auto.modeling_auto"
SAVING = "mhla_hf.models.saving"


def register_configs() -> None:
    """Tell `AutoConfig` the from-scratch and the converted model types."""
    table = sys.modules[CONFIG_TABLE]
    configuration = importlib.import_module("mhla_hf.models.configuration")
    table.AutoConfig.register("mhla", configuration.MHLAConfig, exist_ok=True)
    for base in configuration.CONVERTIBLE_MODEL_TYPES:
        name = configuration.overlay_model_type(base)
        table.AutoConfig.register(name, configuration.overlay_config_class(base), exist_ok=True)


def register_models() -> None:
    """Tell `AutoModelForCausalLM` their classes."""
    table = sys.modules[MODEL_TABLE]
    language = importlib.import_module("mhla_hf.models.language")
    converted = importlib.import_module("mhla_hf.models.converted")
    configuration = importlib.import_module("mhla_hf.models.configuration")
    auto = table.AutoModelForCausalLM
    auto.register(configuration.MHLAConfig, language.MHLAForCausalLM, exist_ok=True)
    for base in configuration.CONVERTIBLE_MODEL_TYPES:
        auto.register(configuration.overlay_config_class(base), converted.overlay_model_class(base), exist_ok=True)


def hand_over_source_writer() -> None:
    """Tell `models` how the one-file source of a checkpoint is written; the room itself knows nothing of `hub`."""
    saving = sys.modules[SAVING]

    def write(entry, folder):
        return importlib.import_module("mhla_hf.hub.bundle").write_bundle(entry, folder)

    saving.set_source_writer(write)


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


def register_auto_classes_on_import() -> None:
    """Register now what transformers has loaded, and the rest when it loads it."""
    actions = {CONFIG_TABLE: register_configs, MODEL_TABLE: register_models, SAVING: hand_over_source_writer}
    for module, action in actions.items():
        loaded = sys.modules.get(module)
        if loaded is not None and not getattr(loaded.__spec__, "_initializing", False):
            action()
        else:
            sys.meta_path.insert(0, _AfterImport(module, action))
