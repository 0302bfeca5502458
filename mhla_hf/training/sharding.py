"""Training with FSDP2, as `accelerate launch` sets it up.

Student and teacher stay unsharded on the CPU, with weights in the main process alone. Every stage trains a sharded
copy of the student, with a sharded copy of the teacher, and finally gathers the trained weights in the student.
"""

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .tasks.base import Task
from .trainable import find_mhla_attentions

AVERAGE_FOLDER = "average"
# Modules that are FSDP units of their own because they are also called from outside of their block, as DiT calls the
# embeddings of its first block.
CALLED_FROM_OUTSIDE = {"CombinedTimestepLabelEmbeddings"}


def launched_with(engine: str) -> bool:
    """Return whether `accelerate launch` was configured for an engine, such as "FSDP" or "DEEPSPEED"."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def make_accelerator(**options: Any) -> Any:
    """Create an `Accelerator` for FSDP2 or data parallelism, on GPUs or else on CPUs (gloo). Refuse other engines."""
    import accelerate
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for engine in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if launched_with(engine):
            raise ValueError(f"distributed_type: got {engine} from the launcher, expected FSDP or data parallelism.")
    cpu_only = not torch.accelerator.is_available()
    if not launched_with("FSDP"):
        accelerator = accelerate.Accelerator(cpu=cpu_only, **options)

        def remove_ddp_prefix(_models: Any, state_dicts: list[dict[str, Any]], _folder: str) -> None:
            for state_dict in state_dicts:
                consume_prefix_in_state_dict_if_present(state_dict, "module.")

        def unwrap(models: list[nn.Module], _folder: str) -> None:
            models[:] = map(accelerator.unwrap_model, models)

        # Runs with and without data parallelism read each other's states.
        accelerator.register_save_state_pre_hook(remove_ddp_prefix)
        accelerator.register_load_state_pre_hook(unwrap)
        return accelerator
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"fsdp_version: got {version} from the launcher, expected 2.")
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(),  # FSDP casts nothing: autocast does, as without sharding
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(cpu=cpu_only, fsdp_plugin=plugin, **options)
    if cpu_only:  # Accelerate supports FSDP on accelerators only, but torch also shards over gloo
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, accelerate.PartialState()):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def save_average(average: Any, folder: Path) -> None:
    """Save an `EMAModel` in a state's folder; with FSDP, each process saves its shards. All processes call this."""
    with warnings.catch_warnings(action="ignore"):  # torch warns if there is only one process
        save_shards(average.state_dict(), checkpoint_id=folder / AVERAGE_FOLDER)


def load_average(average: Any, folder: Path) -> None:
    state = average.state_dict()
    with warnings.catch_warnings(action="ignore"):
        load_shards(state, checkpoint_id=folder / AVERAGE_FOLDER)
    average.load_state_dict(state)


@contextlib.contextmanager
def sharded(accelerator: Any, task: Task, needs_teacher: bool) -> Iterator[None]:
    """With FSDP, put copies into `task`: a sharded teacher, and a student to shard; else move the teacher to the device."""
    student, teacher = task.student, task.teacher
    if not accelerator.is_fsdp2:
        if needs_teacher:
            teacher.to(accelerator.device).eval()
        yield
        return
    try:
        if needs_teacher:
            from accelerate.utils import fsdp2_prepare_model

            root: Any = _Root(_copy_model(teacher, accelerator.is_main_process, frozen=True)).eval()
            attach_wrapping_hints(accelerator, root, root.model, student)
            accelerator.state.fsdp_plugin.set_auto_wrap_policy(root)
            fsdp2_prepare_model(accelerator, root)
            root.set_reshard_after_forward(True)
            # Parameters that belong to no unit stay gathered, because any part of the model may be called.
            root.set_reshard_after_forward(False, recurse=False)
            root()
            task.teacher = root.model
        task.student = _copy_model(student, accelerator.is_main_process)
        yield
    finally:
        task.student, task.teacher = student, teacher


def attach_wrapping_hints(accelerator: Any, root: nn.Module, model: nn.Module, student: nn.Module) -> None:
    """Tell Accelerate the classes of FSDP units in `root`: blocks, and what is called alone, as attentions by "transfer"."""
    modules = dict(model.named_modules())
    attention_classes = {type(modules[name]).__name__ for name in find_mhla_attentions(student) if name in modules}
    block_classes = set(getattr(model, "_no_split_modules", None) or ())
    present_classes = {type(module).__name__ for module in modules.values()}
    units = (attention_classes | block_classes | CALLED_FROM_OUTSIDE) & present_classes
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(units)
    for name in ("get_input_embeddings", "get_output_embeddings", "tie_weights"):
        if hasattr(model, name):
            setattr(root, name, getattr(model, name))


@torch.no_grad()
def gather_weights(accelerator: Any, root: nn.Module, student: nn.Module) -> None:
    """Copy the sharded student's weights from `root` into the main process's `student`. All processes call this."""
    for name, value in accelerator.get_state_dict(root).items():
        student.get_parameter(name.removeprefix("student.")).copy_(value)


class _Root(nn.Module):
    """Wraps a model for FSDP, so that any submodule of the model can be called, not only the whole model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> None:
        """Have FSDP's hooks gather the parameters that belong to no unit."""


def _copy_model(model: nn.Module, is_main: bool, frozen: bool = False) -> nn.Module:
    """Copy modules for FSDP: buffers are not persistent; the main process shares the parameters, others leave them unset."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = parameter.detach() if is_main else torch.empty_like(parameter, device="cpu")
        memo[id(parameter)] = nn.Parameter(data, parameter.requires_grad and not frozen)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer, persistent=False)
    return copied
