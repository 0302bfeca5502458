"""Select the parameters that a training stage trains, with their learning rates and dtypes, and check the models.

MHLA layers are found by the names of their modules, so that models whose code came from the Hub can be trained, too. What
was frozen before the run stays frozen, such as the uniform mixing of plain linear attention, which serves as a baseline.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .recipe import CommonStage

HALF_DTYPES = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_DTYPES, torch.float32, torch.float64)


def find_mhla_attentions(model: nn.Module) -> list[str]:
    """Return the names of the attention modules whose MHLA core is NAME.mhla or, in diffusers, NAME.processor.mhla."""
    cores = (name for name, _ in model.named_modules() if name.endswith(".mhla"))
    return [name.removesuffix(".mhla").removesuffix(".processor") for name in cores]


def check_student(student: nn.Module, stages: Sequence[CommonStage]) -> None:
    """Raise ValueError if weights are quantized, or if a stage finds no MHLA layer or no parameter to train."""
    attentions = find_mhla_attentions(student)
    parameters = dict(student.named_parameters())
    for name, parameter in parameters.items():
        if parameter.dtype not in FLOAT_DTYPES or type(parameter.data) is not torch.Tensor:
            got = f"a {type(parameter.data).__name__} of {parameter.dtype} for {name!r}"
            raise ValueError(f"student: got {got}, expected float weights, loaded without quantization.")
    for stage in stages:
        if not attentions and (stage.loss == "transfer" or stage.trainable != "all"):
            got = f"a model without MHLA layers for stage {stage.name!r}"
            raise ValueError(f"student: got {got}, expected a converted model.")
        if not any(_is_trained(name, attentions, stage, value.requires_grad) for name, value in parameters.items()):
            got = f"{stage.trainable!r} in stage {stage.name!r}, which trains no parameter with requires_grad"
            raise ValueError(f"trainable: got {got}, expected 'attention' or 'all', and a student that is not frozen.")


def check_teacher(student: nn.Module, teacher: nn.Module | None, stages: Sequence[CommonStage]) -> None:
    """Raise ValueError if a stage needs a teacher that is None, shares the student's weights, or is not its original."""
    needing = next((stage for stage in stages if stage.needs_teacher), None)
    if needing is None:
        return
    if teacher is None:
        expected = f"a model for the loss {needing.loss!r} of stage {needing.name!r}"
        raise ValueError(f"teacher: got None, expected {expected}.")
    student_storages = {parameter.untyped_storage().data_ptr() for parameter in student.parameters()}
    for name, parameter in teacher.named_parameters():
        if parameter.untyped_storage().data_ptr() in student_storages:
            got = f"a model that shares {name!r} with the student"
            raise ValueError(f"teacher: got {got}, expected a copy made before the conversion.")
    teacher_modules = dict(teacher.named_modules())
    teacher_attentions = find_mhla_attentions(teacher)
    for name in find_mhla_attentions(student) if any(stage.loss == "transfer" for stage in stages) else ():
        if name not in teacher_modules:
            raise ValueError(f"teacher: got a model without the module {name!r}, expected the student's original.")
        if name in teacher_attentions:
            raise ValueError(f"teacher: got an MHLA layer for {name!r}, expected the softmax original.")


def get_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}


def get_saved_dtypes(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return saved dtypes by name: buffers keep theirs; parameters get `dtype` if given, or fp32 if the class demands it."""
    cls: Any = type(model)  # an instance may have an attribute from before the conversion
    kept = getattr(cls, "_keep_in_fp32_modules_strict", getattr(cls, "_keep_in_fp32_modules", None)) or ()
    dtypes = get_dtypes(model)
    for name, _ in model.named_parameters():
        saved = dtype or dtypes[name]
        stays_fp32 = saved in HALF_DTYPES and not set(kept).isdisjoint(name.split("."))
        dtypes[name] = torch.float32 if stays_fp32 else saved
    return dtypes


def set_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype], keep_weights: bool = True) -> None:
    """Convert parameters and buffers in place, and drop gradients. Without `keep_weights`, parameters lose their values."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        dtype = dtypes.get(name, value.dtype)
        is_kept = keep_weights or not isinstance(value, nn.Parameter)
        value.data = value.data.to(dtype) if is_kept else torch.empty_like(value.data, dtype=dtype)
        value.grad = None


def _is_trained(name: str, attentions: Sequence[str], stage: CommonStage, allowed: bool) -> bool:
    """Return whether a stage trains a parameter; `allowed` is False if it was frozen before the run."""
    trainable: str = stage.trainable
    if trainable in ("mhla", "lora"):
        return allowed and (".mhla." in name or (trainable == "lora" and ".lora_" in name))
    return allowed and (trainable == "all" or name.startswith(tuple(f"{attention}." for attention in attentions)))


def set_trainable(student: nn.Module, stage: CommonStage, allowed: Mapping[nn.Parameter, bool]) -> None:
    """Set `requires_grad` of all parameters for a stage; those for which `allowed` is False stay frozen."""
    attentions = find_mhla_attentions(student)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(_is_trained(name, attentions, stage, allowed.get(parameter, True)))


def make_parameter_groups(student: nn.Module, stage: CommonStage) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups. `top_lr` is their peak learning rate, from which each step sets `lr`."""
    lr_mhla = stage.lr if stage.lr_mhla is None else stage.lr_mhla
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            is_mhla = ".mhla." in name
            weight_decay = 0.0 if is_mhla or parameter.ndim < 2 else stage.weight_decay
            groups.setdefault((lr_mhla if is_mhla else stage.lr, weight_decay), []).append(parameter)
    return [
        {"params": values, "lr": 0.0, "top_lr": top_lr, "weight_decay": weight_decay}
        for (top_lr, weight_decay), values in groups.items()
    ]
