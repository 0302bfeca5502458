"""A conversion as a small PEFT adapter: the MHLA modules whole, and LoRA on the base's projections, without the base.

    mhla_hf.convert(model, tokenizer=tokenizer, text="notes.txt")
    mhla_hf.save_adapter(model, "llama-mhla-adapter")                          # the MHLA modules alone
    peft_model = mhla_hf.load_adapter(base, "llama-mhla-adapter")              # base: softmax, this or a fine-tune of it

    peft_model = get_peft_model(model, mhla_hf.adapter_config(model, r=8))     # with LoRA; train it with anything
    mhla_hf.save_adapter(peft_model, "llama-mhla-adapter")

What is loaded is a `PeftModel`: `set_adapter`, `merge_and_unload` and several adapters side by side are PEFT's.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import hf_hub_download
from safetensors.torch import save_file

from ..checkpoints.file_io import read_json, write_json
from ..checkpoints.load import register_family, require_extra, wrap_errors
from ..convert import convert
from ..convert.families import family_of
from ..convert.teacher import mhla_layers
from ..nn.settings import MHLASettings

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

SETTINGS_FILE = "mhla.json"
NO_LORA = "dummy-target-modules"  # of PEFT: no module is targeted
FILES = (SETTINGS_FILE, "adapter_config.json", "adapter_model.safetensors")
# two bases of a type differ in one of these
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def import_peft(base=None):
    """PEFT, which knows the default LoRA targets of the converted model `base`; ImportError in one sentence."""
    with require_extra("an adapter", "peft", "peft"):
        import peft
    if base is not None:
        register_family(family_of(base))
    return peft


def adapter_config(model: torch.nn.Module, **lora: object) -> "LoraConfig":
    """A `peft.LoraConfig` for a converted language model: LoRA, and every MHLA module trained and saved whole.

    lora: arguments of `LoraConfig`, such as r, lora_alpha and target_modules (default: PEFT's for the base). TypeError: the
    model has no MHLA layers.
    """
    mhla_layers(model)
    saved = [*(lora.pop("modules_to_save", None) or ()), "mhla"]
    return import_peft(model).LoraConfig(modules_to_save=saved, **{"task_type": None, **lora})


def save_adapter(model: "torch.nn.Module | PeftModel", folder: str | Path) -> None:
    """Save a conversion without its base: the settings, the MHLA modules, and LoRA if the model has it.

    Args:
        model: a converted language model, whose MHLA modules are saved; or the `PeftModel` that
            `get_peft_model(model, adapter_config(model))` made, whose active adapters are saved.
        folder: where to write; the files are those of a PEFT adapter, and mhla.json.

    Raises:
        TypeError: the model is neither.
    """
    mounted = hasattr(model, "peft_config")
    config = getattr(getattr(model, "base_model", None) if mounted else model, "config", None)
    if getattr(config, "mhla", None) is None:
        raise TypeError(f"model: got {type(model).__name__}, expected a converted model or a PeftModel of one.")
    if mounted:
        model.save_pretrained(folder)
    else:
        lora = adapter_config(model, target_modules=NO_LORA, base_model_name_or_path=config.name_or_path or None)
        lora.inference_mode = True
        lora.save_pretrained(folder)
        weights = {name: x.contiguous() for name, x in model.state_dict().items() if ".mhla." in name}
        file = Path(folder, FILES[-1])
        save_file({f"base_model.model.{name}": x for name, x in weights.items()}, file, {"format": "pt"})
    noted = {"base_model_type": config.base_model_type, "sizes": sizes_of(config), "mhla": config.mhla}
    noted["measured"] = getattr(config, "mhla_measured", None)
    write_json(Path(folder, SETTINGS_FILE), noted)


def sizes_of(config) -> dict[str, int]:
    """By which an adapter knows its base among the others of its model type."""
    return {name: size for name in SIZES if (size := getattr(config, name, None)) is not None}


def load_adapter(
    model: torch.nn.Module, source: str | Path, adapter_name: str = "default", *, revision: str | None = None,
    is_trainable: bool = False,
) -> "PeftModel":  # fmt: skip
    """Mount a saved adapter on its base or a fine-tune of it, which is converted on the way, in place.

    Args:
        model: a softmax language model, one that was converted with the same settings, or a `PeftModel` of one, which gets
            one more adapter.
        source: folder or Hub id of what `save_adapter` wrote. revision: of the Hub's.
        adapter_name: by which PEFT knows it. is_trainable: whether its weights go on learning.

    Returns the `PeftModel`, in eval mode unless trainable. ValueError: the adapter is none of MHLA, or another base's, or
    its name is taken; the model is then unchanged.
    """
    peft = import_peft()
    folder = Path(source)
    if not folder.is_dir():
        with wrap_errors(f"adapter {str(source)!r}: is no folder here and cannot be loaded from the Hub"):
            for name in FILES:
                folder = Path(hf_hub_download(str(source), name, revision=revision)).parent
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(f"adapter {str(source)!r}: has no {missing[0]}, expected one that save_adapter wrote.")
    with wrap_errors(f"adapter {str(source)!r}: cannot be read"):
        noted = read_json(folder / SETTINGS_FILE)
        peft.PeftConfig.from_pretrained(folder)
        peft.load_peft_weights(str(folder), device="cpu")
    mounted = isinstance(model, peft.PeftModel)
    if mounted and adapter_name in model.peft_config:
        raise ValueError(f"adapter_name: got {adapter_name!r}, which the model has already; expected another name.")
    base = model.get_base_model() if mounted else model
    if not hasattr(getattr(base, "config", None), "model_type"):
        wanted = "a language model of transformers or its PeftModel"
        raise TypeError(f"model: got {type(base).__name__}, expected {wanted}.")
    own = getattr(base.config, "base_model_type", base.config.model_type)
    if own != noted["base_model_type"]:
        raise ValueError(f"model: got a {own}, expected a {noted['base_model_type']}, the base of {str(source)!r}.")
    if wrong := {name: size for name, size in noted["sizes"].items() if getattr(base.config, name, None) != size}:
        sizes = {name: getattr(base.config, name, None) for name in wrong}
        raise ValueError(f"model: has the sizes {sizes}, expected {wrong}, the base of {str(source)!r}.")
    settings = MHLASettings.from_dict(noted["mhla"])
    if getattr(base.config, "mhla", None) is None:
        convert(base, settings)
        if noted.get("measured"):
            base.config.mhla_measured = noted["measured"]
    elif MHLASettings.from_dict(base.config.mhla) != settings:
        raise ValueError(f"model: was converted with other settings than {str(source)!r}, expected the same.")
    if mounted:
        model.load_adapter(str(folder), adapter_name, is_trainable=is_trainable)
        return model
    return peft.PeftModel.from_pretrained(base, str(folder), adapter_name, is_trainable=is_trainable)
