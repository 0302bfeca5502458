"""Registers converted language models with vLLM, which calls `register` by the entry point `vllm.general_plugins`."""

from importlib.metadata import version

SUPPORTED_VLLM = "0.32"


def check_version(installed: str) -> None:
    """Raise ImportError unless this is the minor version of vLLM that the plugin was tested with."""
    if installed.split("+")[0].split(".")[:2] != SUPPORTED_VLLM.split("."):
        raise ImportError(f"vllm: got version {installed}, expected {SUPPORTED_VLLM}, which this mhla_hf supports.")


def register() -> None:
    """Register the configurations of converted language models with transformers, and their classes with vLLM.

    vLLM calls this in each of its processes, perhaps more than once. Raise ImportError for another minor version of vLLM.
    """
    check_version(version("vllm"))
    from .configuration import register_models

    register_models()
