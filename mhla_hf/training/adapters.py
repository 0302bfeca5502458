"""A conversion as a small PEFT adapter: the MHLA modules, and LoRA on the base's projections, without the base.

    mhla_hf.convert(model, tokenizer=tokenizer, text="notes.txt")
    mhla_hf.save_adapter(model, "llama-mhla-adapter")                          # the MHLA modules alone
    peft_model = mhla_hf.load_adapter(base, "llama-mhla-adapter")              # base: the softmax model or a fine-tune

    peft_model = get_peft_model(model, mhla_hf.adapter_config(model, r=8))     # with LoRA; use any trainer
    mhla_hf.save_adapter(peft_model, "llama-mhla-adapter")

A loaded adapter is a `PeftModel`, so `set_adapter`, `merge_and_unload` and several adapters side by side work as in PEFT.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import save_file

from ..checkpoints.file_io import read_json, write_json
from ..checkpoints.load import register_family, require_extra, wrap_errors
from ..conversion import convert
from ..conversion.model_family import family_of
from ..conversion.teacher import mhla_layers
from ..nn.settings import MHLASettings

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

SETTINGS_FILE = "mhla.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FILES = (SETTINGS_FILE, "adapter_config.json", WEIGHTS_FILE)
NO_LORA = "dummy-target-modules"  # PEFT's placeholder for an adapter without LoRA layers
# Configuration fields that differ between models of one type and different sizes.
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def import_peft(model: Any = None) -> Any:
    """Import and return the `peft` module.

    Args:
        model: A converted model, whose classes and default LoRA targets are registered; see `register_family`. None
            registers nothing.

    Raises:
        ImportError: PEFT is not installed.
    """
    with require_extra("an adapter", "peft", "peft"):
        import peft
    family = family_of(model) if model is not None else None
    if family is not None:
        register_family(family)
    return peft


def adapter_config(model: torch.nn.Module, **lora: Any) -> "LoraConfig":
    """Return a `peft.LoraConfig` that adds LoRA to a converted language model, and trains and saves all MHLA modules.

    Args:
        model: A converted language model.
        **lora: Arguments of `LoraConfig`, such as r, lora_alpha and target_modules (default: the modules that PEFT selects
            for the base model).

    Raises:
        TypeError: The model has no MHLA layers.
        ImportError: PEFT is not installed.
    """
    mhla_layers(model)
    modules_to_save = [*(lora.pop("modules_to_save", None) or ()), "mhla"]
    return import_peft(model).LoraConfig(modules_to_save=modules_to_save, **{"task_type": None, **lora})


def save_adapter(model: "torch.nn.Module | PeftModel", folder: str | Path) -> None:
    """Save a conversion without its base: the settings, the MHLA modules, and LoRA if the model has it.

    Args:
        model: A converted language model, or the result of `get_peft_model(model, adapter_config(model))`. The MHLA modules
            of the former, or all adapters of the latter, are saved.
        folder: Where to write the files of a PEFT adapter and mhla.json.

    Raises:
        TypeError: The model is neither.
        ImportError: PEFT is not installed.
    """
    untyped_model: Any = model
    is_peft_model = hasattr(model, "peft_config")
    base = getattr(model, "base_model", None) if is_peft_model else model
    config: Any = getattr(base, "config", None)
    if getattr(config, "mhla", None) is None:
        raise TypeError(f"model: got {type(model).__name__}, expected a converted model or a PeftModel of one.")
    if is_peft_model:
        untyped_model.save_pretrained(folder)
    else:
        name_or_path = config.name_or_path or None
        lora: Any = adapter_config(model, target_modules=NO_LORA, base_model_name_or_path=name_or_path)
        lora.inference_mode = True
        lora.save_pretrained(folder)
        weights = {
            f"base_model.model.{name}": x.contiguous() for name, x in model.state_dict().items() if ".mhla." in name
        }
        save_file(weights, Path(folder, WEIGHTS_FILE), {"format": "pt"})
    record = {
        "base_model_type": config.base_model_type,
        "sizes": get_sizes(config),
        "mhla": config.mhla,
        "measured": getattr(config, "mhla_measured", None),
    }
    write_json(Path(folder, SETTINGS_FILE), record)


def get_sizes(config: Any) -> dict[str, int]:
    """Return the `SIZES` of a configuration by name. They are compared when an adapter is loaded onto a base model."""
    return {name: size for name in SIZES if (size := getattr(config, name, None)) is not None}


def load_adapter(
    model: "torch.nn.Module | PeftModel", source: str | Path, adapter_name: str = "default", *,
    revision: str | None = None, is_trainable: bool = False,
) -> "PeftModel":  # fmt: skip
    """Load a saved adapter onto its base model or a fine-tune of that model.

    Args:
        model: A softmax language model, which is converted in place; a model that was converted with the same settings; or a
            `PeftModel` of one, to which the adapter is added.
        source: Folder or Hub id of an adapter that `save_adapter` wrote.
        adapter_name: Name of the adapter in PEFT.
        revision: Branch, tag or commit on the Hub.
        is_trainable: Whether the adapter's weights require gradients.

    Returns:
        The `PeftModel`, in eval mode unless `is_trainable`.

    Raises:
        ValueError: The adapter is not an MHLA adapter or belongs to another base, or its name is taken. In these cases
            the model is unchanged.
        TypeError: The model is not a language model of transformers.
        ImportError: PEFT is not installed.
    """
    peft = import_peft()
    folder = _fetch_adapter(source, revision)
    with wrap_errors(f"source: got {str(source)!r}, expected an adapter that can be read"):
        record: Any = read_json(folder / SETTINGS_FILE)
        peft.PeftConfig.from_pretrained(folder)
        peft.load_peft_weights(str(folder), device="cpu")
    peft_model: Any = model if isinstance(model, peft.PeftModel) else None
    if peft_model is not None and adapter_name in peft_model.peft_config:
        raise ValueError(f"adapter_name: got {adapter_name!r}, which the model already has, expected another name.")
    base: Any = model if peft_model is None else peft_model.get_base_model()
    if not hasattr(getattr(base, "config", None), "model_type"):
        raise TypeError(
            f"model: got {type(base).__name__}, expected a language model of transformers or its PeftModel."
        )
    _check_base(base.config, record, source)
    settings = MHLASettings.from_dict(record["mhla"])
    if getattr(base.config, "mhla", None) is None:
        convert(base, settings)
        if record.get("measured"):
            base.config.mhla_measured = record["measured"]
    elif MHLASettings.from_dict(base.config.mhla) != settings:
        raise ValueError(f"model: got one converted with other settings than {str(source)!r}, expected the same ones.")
    if peft_model is not None:
        peft_model.load_adapter(str(folder), adapter_name, is_trainable=is_trainable)
        return peft_model
    return peft.PeftModel.from_pretrained(base, str(folder), adapter_name, is_trainable=is_trainable)


def _fetch_adapter(source: str | Path, revision: str | None) -> Path:
    """Return the folder of an adapter, downloading it if it is on the Hub. Raise ValueError if a file is missing."""
    folder = Path(source)
    if not folder.is_dir():
        with wrap_errors(f"source: got {str(source)!r}, expected a folder or an adapter on the Hub"):
            for name in FILES:
                folder = Path(hf_hub_download(str(source), name, revision=revision)).parent
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"source: got {str(source)!r}, which has no {missing[0]}, expected an adapter that save_adapter wrote."
        )
    return folder


def _check_base(config: Any, record: dict[str, Any], source: str | Path) -> None:
    """Raise ValueError unless model type and sizes of a configuration, converted or not, fit the adapter's base model."""
    model_type = getattr(config, "base_model_type", config.model_type)
    if model_type != record["base_model_type"]:
        raise ValueError(
            f"model: got the model type {model_type!r}, expected "
            f"{record['base_model_type']!r}, the base of {str(source)!r}."
        )
    for name, size in record["sizes"].items():
        if getattr(config, name, None) != size:
            raise ValueError(
                f"model: got {name} {getattr(config, name, None)}, expected {size}, as the base of {str(source)!r} has."
            )
