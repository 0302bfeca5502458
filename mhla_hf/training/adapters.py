"""A conversion as a small PEFT adapter: the MHLA modules, and LoRA on the base's projections, without the base.

    mhla_hf.convert(model, tokenizer=tokenizer, text="notes.txt")
    mhla_hf.save_adapter(model, "llama-mhla-adapter")                          # the MHLA modules alone
    mhla_hf.save_adapter(distilled, "llama-mhla-adapter", base=base, rank=32)  # and what distillation changed, as LoRA
    peft_model = mhla_hf.load_adapter(base, "llama-mhla-adapter")              # base: the softmax model or a fine-tune

    peft_model = get_peft_model(model, mhla_hf.adapter_config(model, r=8))     # with LoRA; use any trainer
    mhla_hf.save_adapter(peft_model, "llama-mhla-adapter")

A loaded adapter is a `PeftModel`, so `set_adapter`, `merge_and_unload` and several adapters side by side work as in PEFT.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
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

logger = logging.getLogger("mhla_hf")
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


def save_adapter(
    model: "torch.nn.Module | PeftModel", folder: str | Path, *, base: torch.nn.Module | None = None, rank: int = 32
) -> None:
    """Save a conversion without its base: the settings, the MHLA modules, and LoRA if the model has it.

    Args:
        model: A converted language model, or the result of `get_peft_model(model, adapter_config(model))`. The MHLA modules
            of the former, or all adapters of the latter, are saved.
        folder: Where to write the files of a PEFT adapter and mhla.json.
        base: The softmax original of a converted model that was distilled. What distillation changed in its linear layers
            is then saved as LoRA; without `base`, it is not saved.
        rank: Rank of this LoRA. It keeps the largest singular values of each change; the log says how much that is.

    Raises:
        TypeError: The model is neither.
        ValueError: `base` is given with a `PeftModel`, is not the original, or differs in other parameters than the weights
            of linear layers.
        ImportError: PEFT is not installed.
    """
    untyped_model: Any = model
    untyped_base: Any = base
    is_peft_model = hasattr(model, "peft_config")
    converted_model: Any = getattr(model, "base_model", None) if is_peft_model else model
    config: Any = getattr(converted_model, "config", None)
    if getattr(config, "mhla", None) is None:
        raise TypeError(f"model: got {type(model).__name__}, expected a converted model or a PeftModel of one.")
    if is_peft_model:
        if base is not None:
            raise ValueError(f"base: got {type(base).__name__} with a PeftModel, whose LoRA is saved, expected None.")
        untyped_model.save_pretrained(folder)
    else:
        factors = {} if base is None else factorize_changes(model, base, rank)
        lora: Any = adapter_config(
            model,
            r=rank,
            lora_alpha=rank,
            target_modules=list(factors) or NO_LORA,
            base_model_name_or_path=(config if base is None else untyped_base.config).name_or_path or None,
        )
        lora.inference_mode = True
        lora.save_pretrained(folder)
        weights = {name: x.contiguous() for name, x in model.state_dict().items() if ".mhla." in name}
        for name, (down, up) in factors.items():
            weights |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        weights = {f"base_model.model.{name}": x for name, x in weights.items()}
        save_file(weights, Path(folder, WEIGHTS_FILE), {"format": "pt"})
    record = {
        "base_model_type": config.base_model_type,
        "sizes": get_sizes(config),
        "mhla": config.mhla,
        "measured": getattr(config, "mhla_measured", None),
    }
    write_json(Path(folder, SETTINGS_FILE), record)


@torch.no_grad()
def factorize_changes(
    model: torch.nn.Module, base: torch.nn.Module, rank: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Approximate what distillation changed in the linear layers by matrices of low rank.

    Args:
        model: The converted and distilled model.
        base: Its softmax original.
        rank: Rank of the approximation.

    Returns:
        For each changed layer, by name, the factors of LoRA: `[rank, in_features]` and `[out_features, rank]`, in the
        dtype of the model's weights. Their product is the best approximation of the change.

    Raises:
        ValueError: `base` is not the original, or differs in other parameters than the weights of linear layers.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    factors = {}
    whole = kept = 0.0  # squared norms of the changes and of their approximations
    for name, original in base.named_parameters():
        weight = parameters.get(name)
        if weight is None or weight.shape != original.shape:
            raise ValueError(
                f"base: got {type(base).__name__} whose {name!r} does not fit, expected the model's original."
            )
        change = weight.float() - original.to(weight).float()
        if not change.any():
            continue
        module_name, _, kind = name.rpartition(".")
        if kind != "weight" or not isinstance(modules[module_name], torch.nn.Linear):
            raise ValueError(
                f"base: got a model with another {name!r}, expected changed weights of linear layers alone."
            )
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
        pad = rank - len(values)  # of a layer with fewer features than the rank
        down = F.pad(values.sqrt()[:, None] * right, (0, 0, 0, pad))
        up = F.pad(left * values.sqrt(), (0, pad))
        factors[module_name] = (down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous())
        whole += float(change.square().sum())
        kept += float(values.square().sum())
    if whole:
        logger.info(f"rank: LoRA of rank {rank} keeps {kept / whole:.1%} of the squared norm of all changes")
    return factors


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
