"""The machine and the software a number was measured on, as text for records, cards and plots."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

LIBRARIES = ("mhla_hf", "torch", "transformers", "diffusers", "lm_eval", "datasets", "accelerate", "tokenizers")
LIBRARIES += ("triton", "flash-linear-attention")


def describe_versions():
    """library -> version of everything installed that can change a number."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "mhla_hf":
                found[name] = "0+source"
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda or torch.version.hip, "cudnn": str(torch.backends.cudnn.version())}
    return dict(sorted(found.items()))


def describe_hardware(device="cpu"):
    """One line: "AMD EPYC, 2 cores, 1 thread", with the accelerator before it when it is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    host = f"{_cpu_name()}, {_count(cores, 'core')}, {_count(torch.get_num_threads(), 'thread')}"
    if torch.device(device).type == "cuda":
        return f"{torch.cuda.get_device_name(torch.device(device))}; {host}"
    return host


def _count(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cpu_name():
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine() or "unknown CPU")


def source_commit():
    """Git commit of the package's checkout ("+changed" when its tracked files differ), else "mhla_hf <version>"."""
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists() and (commit := _git(root, "rev-parse", "HEAD")):
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "mhla_hf")
        return commit + ("+changed" if changed else "")
    return f"mhla_hf {describe_versions()['mhla_hf']}"


def _git(root, *arguments):
    """Output of a git command, or "" where git is absent or refuses."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_run(command, device="cpu"):
    """What goes with every record of a measurement: hardware, versions, commit, the shell line that repeats it, date."""
    return {
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "commit": source_commit(),
        "command": command,
        "date": now(),
    }


def now():
    """This moment as ISO 8601, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()
