"""FSDP2 as `accelerate launch` sets it up: a stage trains sharded copies, and its end brings the whole weights back.

The student and the teacher that a caller gave stay whole and on the CPU, with weights on the main process alone if it
likes. What is trained and asked are copies of them whose parameters every process holds a share of, layer by layer.
"""

import contextlib
import copy
import os

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from .trainable import mhla_attentions

AVERAGE = "average.pt"
CALLED_ALONE = {"CombinedTimestepLabelEmbeddings"}  # DiT asks its first block's once more, from outside the block


def launched_with(engine: str) -> bool:
    """Whether `accelerate launch` was told to use it: "FSDP" or another."""
    return os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"


def make_accelerator(**options):
    """An `accelerate.Accelerator` with these options, for the processes that there are: GPUs, or else CPUs by gloo.

    ValueError, one sentence: the launcher asks for FSDP1, another engine, or to offload from a CPU.
    """
    import accelerate
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for engine in ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if launched_with(engine):
            raise ValueError(f"distributed_type: the launcher set {engine}; expected FSDP or data parallel")
    alone = not torch.accelerator.is_available()
    if not launched_with("FSDP"):
        return keep_names(accelerate.Accelerator(cpu=alone, **options))
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"fsdp_version: the launcher set {version}; expected 2")
    if alone and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError("fsdp_offload_params: the launcher set true; expected false where there is no GPU")
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap",
        mixed_precision_policy=MixedPrecisionPolicy(),  # autocast does it, as without sharding
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(cpu=alone, fsdp_plugin=plugin, **options)
    if alone:  # Accelerate knows FSDP on accelerators only; torch shards over gloo as well
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, accelerate.PartialState()):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def judge_sharded(accelerator, task):
    """`task.judge()` by all processes together, since each layer needs all of them."""
    (root,) = accelerator._models
    root.unshard()
    scores = task.judge()
    root.reshard()
    return scores


def keep_names(accelerator):
    """States of a run by one process and by several in data parallel have the same names, so that either goes on."""

    def strip(_models, weights, _folder):
        for state in weights:
            consume_prefix_in_state_dict_if_present(state, "module.")

    def unwrap(models, _folder):
        models[:] = map(accelerator.unwrap_model, models)

    accelerator.register_save_state_pre_hook(strip)
    accelerator.register_load_state_pre_hook(unwrap)
    return accelerator


def save_average(accelerator, average, folder):
    """Write the state of an `EMAModel` into a run's state: by the main process, or each process its share."""
    if accelerator.is_fsdp2:
        dcp.save(average.state_dict(), checkpoint_id=folder / "average")
    elif accelerator.is_main_process:
        torch.save(average.state_dict(), folder / AVERAGE)


def load_average(accelerator, average, folder):
    """Read what `save_average` wrote."""
    if accelerator.is_fsdp2:
        state = average.state_dict()
        dcp.load(state, checkpoint_id=folder / "average")
        average.load_state_dict(state)
    else:
        average.load_state_dict(torch.load(folder / AVERAGE, weights_only=True))
        average.to(accelerator.device)


@contextlib.contextmanager
def sharded(accelerator, task, needs_teacher):
    """While it lasts, `task` has the copies: the student's, which `prepare` will shard, and the teacher's, sharded."""
    given = task.student, task.teacher
    if not accelerator.is_fsdp2:
        if needs_teacher:
            task.teacher.to(accelerator.device).eval()
        yield
        return
    try:
        if needs_teacher:
            task.teacher = _shard_teacher(accelerator, task.teacher, task.student)
        task.student = _copy(task.student, accelerator.is_main_process)
        yield
    finally:
        task.student, task.teacher = given


def expose(accelerator, root, model, student):
    """Give `root`, a module around `model`, what Accelerate looks for when it shards: units, embeddings, tied weights.

    Attention that is MHLA in the student is a unit of its own, in the teacher too: the loss "transfer" has a layer of the
    teacher without its attention and the student's attention at the same time.
    """
    modules = dict(model.named_modules())
    units = {type(modules[name]).__name__ for name in mhla_attentions(student) if name in modules}
    units |= CALLED_ALONE | set(getattr(model, "_no_split_modules", None) or ())
    present = {type(module).__name__ for module in modules.values()}
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(units & present)
    for name in ("get_input_embeddings", "get_output_embeddings", "tie_weights"):
        if hasattr(model, name):
            setattr(root, name, getattr(model, name))


@torch.no_grad()
def gather(accelerator, root, student):
    """Put the weights of the sharded copy in `root` into the main process's `student`."""
    state = accelerator.get_state_dict(root)
    for name, value in state.items():
        student.get_parameter(name.removeprefix("student.")).copy_(value)


class _Root(nn.Module):
    """What FSDP takes for the top of a model, so that any part of the model can be called."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        """Nothing, but FSDP begins with it."""


def _shard_teacher(accelerator, teacher, student):
    from accelerate.utils import fsdp2_prepare_model

    root = _Root(_copy(teacher, accelerator.is_main_process, frozen=True)).eval()
    expose(accelerator, root, root.model, student)
    accelerator.state.fsdp_plugin.set_auto_wrap_policy(root)
    fsdp2_prepare_model(accelerator, root)
    root.set_reshard_after_forward(True)
    root.set_reshard_after_forward(False, recurse=False)  # what no unit holds is needed by whatever part is called
    root()
    return root.model


def _copy(model, main, frozen=False):
    """A copy that shares the weights of the main process; elsewhere memory that is never touched stands for them."""
    memo = {}
    for parameter in model.parameters():
        data = parameter.detach() if main else torch.empty_like(parameter, device="cpu")
        memo[id(parameter)] = nn.Parameter(data, parameter.requires_grad and not frozen)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():  # buffers are no part of what is sharded
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer, persistent=False)
    return copied
