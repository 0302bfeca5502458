"""Describe how a measurement was made: hardware, library versions, commit, command and date."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (
    "mhla_hf", "torch", "transformers", "diffusers", "lm_eval", "datasets", "accelerate", "tokenizers", "triton",
    "flash-linear-attention"
)  # fmt: skip


def describe_versions() -> dict[str, str]:
    """Return the versions of the libraries that can change a result, by name."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "mhla_hf":
                versions[name] = "0+source"
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda or torch.version.hip or "unknown"
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return dict(sorted(versions.items()))


def describe_hardware(device: torch.device | str = "cpu") -> str:
    """Return a line such as "AMD EPYC, 2 cores, 1 thread", preceded by the GPU's name if `device` is a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(names, platform.processor() or platform.machine() or "unknown CPU")
    counts = ((cores, "core"), (torch.get_num_threads(), "thread"))
    host = ", ".join([cpu, *(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)])
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(torch.device(device))}; {host}"
    return host


def source_commit() -> str:
    """Return the Git commit of the package's checkout, with "+changed" if files differ, or else "mhla_hf <version>"."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and (commit := _git(root, "rev-parse", "HEAD")):
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "mhla_hf")
        return commit + ("+changed" if changed else "")
    return f"mhla_hf {describe_versions()['mhla_hf']}"


def _git(root: Path, *arguments: str) -> str:
    """Return the output of a git command, or "" if git is not installed or fails."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_run(command: str | None, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return hardware, versions, commit, shell command, and date of a measurement, for its record."""
    return {
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "commit": source_commit(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat(),
    }


def public_name(name: str | None) -> str | None:
    """Return the last component of an existing path, since records are published; return any other name unchanged."""
    return os.path.basename(os.path.abspath(name)) if name and os.path.exists(name) else name
