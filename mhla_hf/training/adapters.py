"""A conversion as a small PEFT adapter: its settings, MHLA modules, and LoRA on the base's projections, without the base.

    mhla_hf.save_adapter(model, "llama-mhla-adapter")              # with `base`, also what distillation changed, as LoRA
    peft_model = mhla_hf.load_adapter(base, "llama-mhla-adapter")  # base: the softmax model or a fine-tune

A loaded adapter is a `PeftModel`: `set_adapter`, `merge_and_unload`, and several adapters work as in PEFT.
"""

import copy
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub import hf_hub_download
from safetensors.torch import load_file, save_file

from ..checkpoints.file_io import atomic_folder, read_json, remove_abandoned, wrap_errors, write_json
from ..checkpoints.load import register_family, require_extra
from ..conversion import convert
from ..conversion.model_family import family_of
from ..conversion.teacher import mhla_layers
from ..nn.settings import MHLASettings, is_whole

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
    """Return the `peft` module. If `model` is converted, register its family, so that PEFT knows its LoRA targets."""
    with require_extra("an adapter", "peft", "peft"):
        import peft
    if model is not None and (family := family_of(model)) is not None:
        register_family(family)
    return peft


def adapter_config(model: torch.nn.Module, **lora: Any) -> "LoraConfig":
    """Return a `peft.LoraConfig` that adds LoRA to a converted language model, and trains and saves its MHLA modules.

    Args:
        model: A converted language model. It gets copies of first rows of its weights, so that merged LoRA is detected.
        **lora: Arguments of `LoraConfig`. The default of `target_modules` is PEFT's for the base model.

    Raises:
        TypeError: `model` is not converted.
        ImportError: PEFT is not installed.
    """
    mhla_layers(model)
    modules_to_save = [*(lora.pop("modules_to_save", None) or ()), "mhla"]
    config = import_peft(model).LoraConfig(modules_to_save=modules_to_save, **{"task_type": None, **lora})
    _remember_base(model)
    return config


def save_adapter(
    model: "torch.nn.Module | PeftModel", folder: str | Path, *, base: torch.nn.Module | None = None, rank: int = 32
) -> None:
    """Save a conversion without its base: the settings, the MHLA modules, and LoRA if the model has it.

    Args:
        model: A converted language model, or a `PeftModel` of one, whose adapters are saved.
        folder: Where to write a PEFT adapter and mhla.json. An adapter there is replaced; other files stay. Of several
            adapters, all but "default" go to subfolders of their names, as in PEFT.
        base: The softmax original of a distilled model or of one with merged LoRA. The model's changes to the linear layers
            of `base` are then saved as LoRA. Without `base`, these changes are lost, and merged LoRA is an error.
        rank: Rank of this LoRA: how many singular values of each change are kept. Their share of the squared norm is logged.

    Raises:
        TypeError: `model` is neither a converted model nor a `PeftModel` of one.
        ValueError: `folder` holds files but no adapter, or cannot be written; `base` or `rank` does not fit; LoRA was merged
            and `base` is None; or `load_adapter` would refuse the adapter.
    """
    peft, untyped_model = import_peft(), cast(Any, model)
    is_peft_model = isinstance(model, peft.PeftModel)
    converted: Any = untyped_model.get_base_model() if is_peft_model else model
    config: Any = getattr(converted, "config", None)
    if getattr(config, "mhla", None) is None or (not is_peft_model and hasattr(model, "peft_config")):
        got = type(model).__name__ + (" with adapters" if hasattr(model, "peft_config") else "")
        raise TypeError(f"model: got {got}, expected a converted model, or the PeftModel that adapts it.")
    if is_peft_model and base is not None:
        raise ValueError(f"base: got {type(base).__name__} with a PeftModel, whose own LoRA is saved, expected None.")
    if not is_whole(rank, 1):
        raise ValueError(f"rank: got {rank!r}, expected a whole number of at least 1.")
    path = Path(folder).resolve()
    is_adapter = any(path.glob(SETTINGS_FILE)) or any(path.glob(f"*/{SETTINGS_FILE}"))
    is_used = path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_adapter)
    if is_used or Path.cwd().is_relative_to(path):
        expected = "a new or empty folder, or an adapter to replace, and not the working folder"
        raise ValueError(f"folder: got {str(folder)!r}, expected {expected}.")
    peft_configs = untyped_model.peft_config if is_peft_model else {}
    # PiSSA and similar initializations change the base when LoRA is added, and again when the adapter is loaded.
    if base is None and not any(isinstance(getattr(x, "init_lora_weights", 0), str) for x in peft_configs.values()):
        _check_not_merged(converted)
    adapters = {
        name: (copy.copy(lora), peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
        for name, lora in peft_configs.items()
    } or {"default": _lora_of_changes(converted, base, rank)}
    settings = MHLASettings.from_dict(config.mhla)
    for name, (lora, weights) in adapters.items():
        lora.inference_mode = True
        _check_weights(converted, settings, lora, weights, name, f"model: got the adapter {name!r}")
    sizes = {name: size for name in SIZES if (size := getattr(config, name, None)) is not None}
    record = {"base_model_type": config.base_model_type, "sizes": sizes, "mhla": config.mhla}
    record["measured"] = getattr(config, "mhla_measured", None)
    message = f"folder: got {str(folder)!r}, expected a folder that can be written"
    with wrap_errors(message), atomic_folder(path, replace=True) as temporary:
        for entry in path.iterdir() if path.exists() else ():
            if entry.name not in FILES:
                (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, temporary / entry.name)
        if is_peft_model:
            untyped_model.create_or_update_model_card(str(temporary))
        for name, (lora, weights) in adapters.items():
            target = temporary if len(adapters) == 1 or name == "default" else temporary / name
            lora.save_pretrained(target)
            weights = {key: x.clone(memory_format=torch.contiguous_format) for key, x in weights.items()}
            save_file(weights, target / WEIGHTS_FILE, {"format": "pt"})
            write_json(target / SETTINGS_FILE, record)


def _lora_of_changes(model: Any, base: Any, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the configuration and weights of an adapter: the MHLA modules and, given `base`, LoRA of what changed."""
    factors: dict[str, Any] = {} if base is None else factorize_changes(model, base, rank)
    name = (model if base is None else base).config.name_or_path or None
    options = {"target_modules": list(factors) or NO_LORA, "modules_to_save": ["mhla"], "base_model_name_or_path": name}
    lora = import_peft().LoraConfig(r=rank, lora_alpha=rank, **options)
    weights = {name: x for name, x in model.state_dict().items() if ".mhla." in name}
    for name, (down, up) in factors.items():
        weights |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return lora, {f"base_model.model.{name}": x for name, x in weights.items()}


def _first_rows(model: Any) -> dict[str, torch.Tensor]:
    """Return a copy of the first row of each linear layer's weight, except of meta tensors and where LoRA is merged."""
    layers = {name: getattr(x, "base_layer", x) for name, x in model.named_modules() if not getattr(x, "merged", False)}
    weights = {name: x.weight for name, x in layers.items() if isinstance(x, torch.nn.Linear)}
    return {name: x[:1].detach().clone() for name, x in weights.items() if not x.is_meta}


def _remember_base(model: Any) -> None:
    """Store the first row of each linear weight in the model, unless some are stored, to detect LoRA merged later."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.rows_before_lora = getattr(base, "rows_before_lora", None) or _first_rows(base)


def _check_not_merged(model: Any) -> None:
    rows = getattr(model, "rows_before_lora", {})
    for name, row in _first_rows(model).items():
        if name in rows and not torch.equal(rows[name].to(row), row):
            expected = "the model that merge_and_unload() returned, with base=ORIGINAL and rank=SUM OF THE MERGED RANKS"
            raise ValueError(f"model: got LoRA merged into {name!r}, which would be lost, expected {expected}.")


@torch.no_grad()
def factorize_changes(model: Any, base: Any, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return LoRA's (A [rank, in], B [out, rank]) nearest to a linear layer's change from `base`; refuse other changes."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    whole = kept = 0.0  # squared norms of the changes and of their approximations
    for name, original in base.named_parameters():
        weight = parameters.get(name)
        if weight is None or weight.shape != original.shape:
            got = f"{type(base).__name__}, whose {name!r} does not fit the model"
            raise ValueError(f"base: got {got}, expected the model's softmax original.")
        change = weight.float() - original.to(weight).float()
        if not change.any():
            continue
        module_name, _, kind = name.rpartition(".")
        if kind != "weight" or not isinstance(modules[module_name], torch.nn.Linear):
            got = f"a model whose {name!r} differs from the converted model's"
            raise ValueError(f"base: got {got}, expected one that differs only in weights of linear layers.")
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        left, values, right = left[:, :rank], values[:rank], right[:rank]
        pad = rank - len(values)  # with zeros, if the layer has fewer features than `rank`
        down = F.pad(values.sqrt()[:, None] * right, (0, 0, 0, pad))
        up = F.pad(left * values.sqrt(), (0, pad))
        factors[module_name] = (down.to(weight.dtype).contiguous(), up.to(weight.dtype).contiguous())
        whole += float(change.square().sum())
        kept += float(values.square().sum())
    if whole:
        logger.info(f"rank: LoRA of rank {rank} keeps {kept / whole:.1%} of the squared norm of all changes")
    return factors


def load_adapter(
    model: "torch.nn.Module | PeftModel", source: str | Path, adapter_name: str = "default", *,
    revision: str | None = None, is_trainable: bool = False,
) -> "PeftModel":  # fmt: skip
    """Load a saved adapter onto its base model or a fine-tune of that model.

    Args:
        model: A softmax language model, which is converted in place; a model that was converted with the same settings; or a
            `PeftModel` of either, to which the adapter is added.
        source: Folder or Hub id of an adapter that `save_adapter` wrote.
        adapter_name: Name of the adapter in PEFT. Of several adapters in a local folder, the one of this name is loaded.
        revision: Branch, tag or commit on the Hub.
        is_trainable: Whether the adapter's weights require gradients.

    Returns:
        The `PeftModel`, in eval mode unless `is_trainable`.

    Raises:
        TypeError: The model is not a language model of transformers.
        ValueError: The source is no MHLA adapter or does not fit the model, which is left unchanged; or the name is taken
            or not valid.
    """
    peft = import_peft()
    folder = _fetch_adapter(source, adapter_name, revision)
    start = f"source: got {str(source)!r}"
    with wrap_errors(f"{start}, expected an adapter that can be read"):
        record: Any = read_json(folder / SETTINGS_FILE)
        expected = {"base_model_type": record["base_model_type"], **record["sizes"]}
        settings = MHLASettings.from_dict(record["mhla"])
        lora = peft.PeftConfig.from_pretrained(folder)
        weights = load_file(folder / WEIGHTS_FILE)
    peft_model: Any = model if isinstance(model, peft.PeftModel) else None
    if peft_model is not None and adapter_name in peft_model.peft_config:
        raise ValueError(f"adapter_name: got {adapter_name!r}, which the model already has, expected another name.")
    base: Any = model if peft_model is None else peft_model.get_base_model()
    if not hasattr(getattr(base, "config", None), "model_type"):
        raise TypeError(f"model: got {type(base).__name__}, expected a language model of transformers or a PeftModel.")
    for name, value in expected.items():
        default = base.config.model_type if name == "base_model_type" else None
        if (current := getattr(base.config, name, default)) != value:
            raise ValueError(f"model: got {name} {current!r}, expected {value!r}, as the base of {str(source)!r} has.")
    is_converted = getattr(base.config, "mhla", None) is not None
    if is_converted and MHLASettings.from_dict(base.config.mhla) != settings:
        raise ValueError(f"model: got MHLA settings unlike those of {str(source)!r}, expected equal settings.")
    _check_weights(base, settings, lora, weights, adapter_name, start)
    if not is_converted:
        convert(base, settings)
        if record.get("measured"):
            base.config.mhla_measured = record["measured"]
    if peft_model is None:
        peft_model = peft.PeftModel.from_pretrained(base, str(folder), adapter_name, is_trainable=is_trainable)
    else:
        peft_model.load_adapter(str(folder), adapter_name, is_trainable=is_trainable)
    if getattr(lora, "target_modules", NO_LORA) != NO_LORA:
        _remember_base(base)
    return peft_model


def _check_weights(
    base: Any, settings: MHLASettings, lora: Any, weights: dict[str, torch.Tensor], adapter_name: str, start: str
) -> None:
    """Raise ValueError unless an adapter has exactly the tensors that PEFT saves for it, all of them finite."""
    peft, lora = import_peft(), copy.deepcopy(lora)
    lora.base_model_name_or_path = None  # PEFT would warn that the copy has another name
    with wrap_errors(f"{start}, expected an adapter that fits {type(base).__name__}"), torch.device("meta"):
        model = type(base)(copy.deepcopy(base.config))
        if getattr(base.config, "mhla", None) is None:
            convert(model, settings)
        expected = {f"base_model.model.{name}": x for name, x in model.state_dict().items() if ".mhla." in name}
        model = peft.get_peft_model(model, lora, adapter_name)
        expected |= peft.get_peft_model_state_dict(model, adapter_name=adapter_name, save_embedding_layers=False)
    for name in sorted({*expected, *weights}):
        got, required = (f"shape {list(x[name].shape)}" if name in x else "nothing" for x in (weights, expected))
        if got != required:
            raise ValueError(f"{start} with {got} for {name!r}, expected {required}.")
        if not weights[name].isfinite().all():
            raise ValueError(f"{start} with NaN or infinity in {name!r}, expected finite numbers.")


def _fetch_adapter(source: str | Path, adapter_name: str, revision: str | None) -> Path:
    """Return the folder of an adapter, downloaded if it is on the Hub. Raise ValueError if a file is missing."""
    folder = Path(source)
    if not folder.is_dir():  # moves back an adapter that a killed save_adapter was replacing
        remove_abandoned(folder.parent, f"{folder.name}.tmp-")
    if not folder.is_dir():
        with wrap_errors(f"source: got {str(source)!r}, expected a folder or an adapter on the Hub"):
            for name in FILES:
                folder = Path(hf_hub_download(str(source), name, revision=revision)).parent
    if (folder / adapter_name / SETTINGS_FILE).is_file():
        folder = folder / adapter_name
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        start = f"source: got {str(source)!r}, which has no {missing[0]}"
        raise ValueError(f"{start}, expected an adapter that save_adapter wrote.")
    return folder
