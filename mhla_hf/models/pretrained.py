"""What every MHLA model of transformers adds to `PreTrainedModel`: its new parameters' start, its source beside its weights,
and a look at the loaded weights before anyone trusts them.
"""

from pathlib import Path

from safetensors import SafetensorError
from torch import nn
from transformers.initialization import copy_

from .families import auto_class_of
from .saving import SOURCE_FILE, check_loaded_weights, check_whole_files, write_source
from .transformers_api import with_layer_wildcard


class MHLAPreTrainedMixin:
    """Before a `PreTrainedModel` class in the bases; `source_entry` names the module that defines the model."""

    source_entry = ""
    _keep_in_fp32_modules_strict = ["mixing"]
    # With a mixing matrix, a decode step reads the length of the cache on the host: it compiles, but not as one graph.
    _can_compile_fullgraph = False

    def entry_to_save(self) -> str:
        """The module whose bundle goes into the checkpoint."""
        return self.source_entry

    def class_names(self) -> list[str]:
        """The names of the classes that this checkpoint can be loaded as, by their Auto classes."""
        return []

    def initialize_weights(self):
        """As transformers, then the MHLA modules' own starts (parameters that were loaded are left alone)."""
        super().initialize_weights()
        for module in self.modules():
            if hasattr(module, "initial_values"):
                for name, value in module.initial_values().items():
                    copy_(module.get_parameter(name), value)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As transformers; damaged MHLA weights (NaN, negative mixing) are refused, and a frozen mixing is frozen again."""
        try:
            loaded = super().from_pretrained(*args, **kwargs)
        except SafetensorError:
            check_whole_files(args[0] if args else kwargs["pretrained_model_name_or_path"])  # says which file
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_loaded_weights(model)
        for module in model.modules():
            if not getattr(module, "learn", True):  # a frozen mixing
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(name == "balance")
        return loaded

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As transformers; where the base's plan splits heads over processes, what `mhla` has by head is split alike."""
        if distributed_config is not None and distributed_config.tp_size > 1:
            size, rank = distributed_config.tp_size, mesh_manager.get_mesh("tp").get_local_rank()
            model._tp_plan |= split_heads_plan(model, size)
            for core in (module.mhla for module in model.modules() if hasattr(module, "softmax_heads")):
                core.heads = core.heads.of_rank(rank, size)
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: its caches are paged."""
        what = "expected generate(), or mhla_hf.serving.ContinuousBatch for requests that come and go"
        raise ValueError(f"cache: got continuous batching with paged caches, {what}.")

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """As transformers, with `modeling_mhla.py` beside the weights: the folder loads with `trust_remote_code=True`."""
        if kwargs.get("is_main_process", True):
            write_source(self.entry_to_save(), save_directory)
        module = SOURCE_FILE.removesuffix(".py")
        names = [*self.class_names(), type(self).__name__]
        self.config.auto_map = {"AutoConfig": f"{module}.{type(self.config).__name__}"}
        self.config.auto_map |= {auto_class_of(name): f"{module}.{name}" for name in names}
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


HUB_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "tags", "commit_description")


def split_heads_plan(model: nn.Module, size: int) -> dict[str, str]:
    """The tensor-parallel plan of the parameters of `mhla`, by name, in layers whose projections are split by head.

    Feature maps, decays and matrices by head are split on their first axis; what all heads share is replicated, its
    gradients summed. ValueError: heads that `size` does not divide.
    """
    plan = {}
    for name, module in model.named_modules():
        layer = with_layer_wildcard(name)
        split = any(style == "colwise" for rule, style in model.tp_plan.items() if rule.startswith(f"{layer}."))
        if not hasattr(module, "mhla") or not split:
            continue
        if module.mhla.num_kv_heads % size:
            what = f"expected one that divides the {module.mhla.num_kv_heads} key/value heads of {name}"
            raise ValueError(f"tp_plan: got tensor-parallel size {size}, {what}.")
        for child, part in module.mhla.named_children():
            path = f"{layer}.mhla.{child}"
            if child == "gate":
                plan[path] = "colwise"
            elif getattr(part, "by_head", False):
                first_axis = {f"{path}.{own}": "embedding_rowwise" for own, _ in part.named_parameters()}
                plan |= {path: "local_params"} | first_axis
            else:
                plan[path] = "replicated_with_grad_allreduce"
    return plan
