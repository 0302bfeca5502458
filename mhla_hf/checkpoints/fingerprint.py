"""Hash model folders, loaded models and settings, so that a score can be matched to the model that it was measured on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from .file_io import PIPELINE_INDEX, PathLike

WEIGHT_SUFFIXES = (".safetensors", ".bin")
HASHED_SUFFIXES = (*WEIGHT_SUFFIXES, ".safetensors.index.json", ".py", ".model")
HASHED_FILES = (
    PIPELINE_INDEX, "config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"
)  # fmt: skip
ORIGIN_KEY = "_name_or_path"  # where diffusers records the folder or Hub id a configuration was loaded from
FILES_WITH_ORIGIN = ("config.json", PIPELINE_INDEX)


def fingerprint_folder(folder: PathLike) -> str:
    """Return "files:" and 32 hex digits of a SHA-256 over the weights, configuration, tokenizer, and source of a model."""
    folder = Path(folder)
    entries = folder.rglob("*") if (folder / PIPELINE_INDEX).is_file() else folder.iterdir()
    files = sorted(
        file for file in entries
        if file.is_file() and (file.name in HASHED_FILES or file.name.endswith(HASHED_SUFFIXES))
    )  # fmt: skip
    if not any(file.name.endswith(WEIGHT_SUFFIXES) for file in files):
        raise FileNotFoundError(f"{folder}: got a folder without weights, expected a .safetensors file in it.")
    digest = hashlib.sha256()
    for file in files:
        content = strip_origin(file.read_bytes()) if file.name in FILES_WITH_ORIGIN else b""
        size = len(content) or file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode() + content)
        if not content:
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)
    return f"files:{digest.hexdigest()[:32]}"


def fingerprint_model(model: Any) -> str:
    """Return "tensors:" and 32 hex digits of a SHA-256 over a model's state dict, or over all components of a pipeline."""
    digest = hashlib.sha256()
    for name, component in sorted(getattr(model, "components", {"": model}).items()):
        digest.update(f"{name}\0{type(component).__name__}\0".encode() if name else b"")
        if isinstance(component, torch.nn.Module):
            for key, tensor in sorted(component.state_dict().items()):
                digest.update(f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                if tensor.numel():
                    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif hasattr(component, "to_json_string"):
            digest.update(component.to_json_string().encode())
    return f"tensors:{digest.hexdigest()[:32]}"


def hash_json(content: Any, digits: int = 16) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def strip_origin(data: bytes) -> bytes:
    """Return a configuration of diffusers without the path or Hub id it was loaded from, and any other file unchanged."""
    try:
        content = json.loads(data)
    except ValueError:
        return data
    if not isinstance(content, dict) or "_class_name" not in content or ORIGIN_KEY not in content:
        return data
    del content[ORIGIN_KEY]
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def hash_file(path: PathLike) -> str:
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
