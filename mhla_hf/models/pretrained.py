"""The mixin of every MHLA model of transformers: initial values, saving with source, and checks when loading."""

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError
from transformers.initialization import copy_

from .families import auto_class_of
from .saving import SOURCE_FILE, check_loaded_weights, check_whole_files, write_source


class MHLAPreTrainedMixin:
    """Initializes, saves, loads and checks MHLA weights; must come before `PreTrainedModel` in the bases of a class."""

    source_entry = ""  # the module, or "module:function", whose code `checkpoints/bundle.py` saves with the checkpoint
    saved_classes: tuple[str, ...] = ()  # the model classes in that source, for Auto classes to load
    _keep_in_fp32_modules_strict = ["mixing"]
    _can_compile_fullgraph = False  # with a mixing matrix, a decode step reads the length of the cache on the host

    def initialize_weights(self: Any) -> None:
        """Initialize as transformers does, and MHLA modules by their `initial_values`; loaded parameters stay."""
        super().initialize_weights()  # type: ignore[misc]
        for module in self.modules():
            if hasattr(module, "initial_values"):
                for name, value in module.initial_values().items():
                    copy_(module.get_parameter(name), value)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model as transformers does, check its MHLA weights, and freeze mixings that do not learn.

        Raises:
            ValueError: A file in a local folder is damaged, or an MHLA weight is not valid (NaN, negative mixing).
            SafetensorError: A file from the Hub is damaged.
        """
        try:
            loaded = super().from_pretrained(*args, **kwargs)  # type: ignore[misc]
        except SafetensorError:
            check_whole_files(args[0] if args else kwargs["pretrained_model_name_or_path"])  # its error names the file
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_loaded_weights(model)
        for module in model.modules():
            if not getattr(module, "learn", True):
                for name, parameter in module.named_parameters():  # the balance of a frozen mixing learns
                    parameter.requires_grad_(name == "balance")
        return loaded

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """Distribute as transformers does, and split the parameters of `mhla` where the projections are split by head."""
        if distributed_config is not None and distributed_config.tp_size > 1:
            rank = mesh_manager.get_mesh("tp").get_local_rank()
            model._tp_plan.update(split_heads(model, rank, distributed_config.tp_size))
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)  # type: ignore[misc]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError("cache: got the paged caches of continuous batching, expected generate() or vLLM.")

    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save as transformers does, and write `modeling_mhla.py` to the same folder, for `trust_remote_code=True`.

        Also sets `config.auto_map`. With `push_to_hub`, the `HUB_ARGUMENTS` go to `model.push_to_hub`.
        """
        if kwargs.get("is_main_process", True):
            write_source(self.source_entry, save_directory)
        names = {auto_class_of(name): name for name in (*self.saved_classes, type(self).__name__)}
        names = {"AutoConfig": type(self.config).__name__, **names}
        self.config.auto_map = {auto: f"{SOURCE_FILE.removesuffix('.py')}.{name}" for auto, name in names.items()}
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


HUB_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "tags", "commit_description")


def split_heads(model: Any, rank: int, size: int) -> dict[str, str]:
    """Reduce the softmax heads to those of process `rank` of `size`, in place, where projections are split by head.

    Return the tensor-parallel plan for the parameters of `mhla`. Raise ValueError if `size` does not divide the KV heads.
    """
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        layer = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        is_split = any(style == "colwise" for rule, style in model.tp_plan.items() if rule.startswith(f"{layer}."))
        if not hasattr(module, "mhla") or not is_split:
            continue
        core = module.mhla
        if core.num_kv_heads % size:
            expected = f"one that divides the {core.num_kv_heads} key/value heads of {name}"
            raise ValueError(f"tp_plan: got tensor-parallel size {size}, expected {expected}.")
        if getattr(core, "heads", None) is not None:
            core.heads = core.heads.of_rank(rank, size)
        if hasattr(core, "parallel_plan"):  # a core with parameters
            plan |= core.parallel_plan(f"{layer}.mhla")
    return plan
