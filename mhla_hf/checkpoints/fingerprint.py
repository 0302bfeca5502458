"""What numbers depend on, as a hash: of a folder its files, of a loaded model or pipeline its weights, of settings."""

import hashlib
import json
from pathlib import Path

import torch

WEIGHTS = (".safetensors", ".bin")
PIPELINE = "model_index.json"
DECISIVE = (
    PIPELINE, "config.json", "scheduler_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
    "vocab.json", "merges.txt", "special_tokens_map.json",
)  # fmt: skip
ORIGIN = "_name_or_path"  # where diffusers notes the folder or Hub id that a configuration was read from
NOTED = ("config.json", PIPELINE)  # where it does


def fingerprint_folder(folder):
    """ "files:" + sha256 over what decides a local model's numbers: weights, configuration, tokenizer, its own source.

    Cards, results, plots and training records are not part of it; of a pipeline (model_index.json), the folders of its
    components are. FileNotFoundError when the folder has no weights.
    """
    folder = Path(folder)
    parts = folder.rglob("*") if (folder / PIPELINE).is_file() else folder.iterdir()
    decisive = (*WEIGHTS, ".safetensors.index.json", ".py", ".model")
    files = sorted(file for file in parts if file.is_file() and (file.name in DECISIVE or file.name.endswith(decisive)))
    if not any(file.name.endswith(WEIGHTS) for file in files):
        raise FileNotFoundError(f"{folder} holds no weights: expected a .safetensors file in it")
    digest = hashlib.sha256()
    for file in files:
        noted = without_origin(file.read_bytes()) if file.name in NOTED else b""
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(noted) or file.stat().st_size}\0".encode() + noted)
        if not noted:
            hash_file(file, digest)
    return f"files:{digest.hexdigest()[:32]}"


def fingerprint_model(model):
    """ "tensors:" + sha256 over names, dtypes, shapes and bytes of a loaded model's state dict.

    Of a pipeline over those of its components, and over the settings of components without weights.
    """
    digest = hashlib.sha256()
    for name, part in sorted(getattr(model, "components", {"": model}).items()):
        digest.update(f"{name}\0{type(part).__name__}\0".encode() if name else b"")
        if isinstance(part, torch.nn.Module):
            for key, tensor in sorted(part.state_dict().items()):
                digest.update(f"{key}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
                if tensor.numel():
                    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif hasattr(part, "to_json_string"):
            digest.update(part.to_json_string().encode())
    return f"tensors:{digest.hexdigest()[:32]}"


def hash_of(content, digits: int = 16) -> str:
    """First hex digits of the sha256 of something that JSON can say."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def without_origin(data: bytes) -> bytes:
    """A configuration's bytes without diffusers' note of where it was loaded from, if there is one.

    A push takes it out and a fingerprint leaves it out, so a pushed model still is the one that was evaluated.
    """
    try:
        content = json.loads(data)
    except ValueError:
        return data
    if not isinstance(content, dict) or "_class_name" not in content or ORIGIN not in content:
        return data
    del content[ORIGIN]
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def hash_file(path, digest=None) -> str:
    """sha256 of a file's bytes, 64 hex digits; digest: one that goes on by them."""
    digest = digest or hashlib.sha256()
    with Path(path).open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
