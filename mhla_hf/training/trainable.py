"""What a stage trains: which parameters move, at which rate, and whether that can work at all.

MHLA layers are found by name (an attention module with a child called `mhla`), so that models whose code came from the
Hub are trained as well. Unusual: a parameter that was frozen before the run stays frozen, whatever a stage names; a
uniform, frozen mixing is how plain linear attention is trained as a yardstick.
"""

import torch
from torch import nn


def mhla_attentions(model):
    """Names of the attention modules that have an MHLA core, in the model's order.

    The core is the module's child `mhla`, or that of its processor, as in diffusers (`attn1.processor.mhla`).
    """
    names = (name for name, _ in model.named_modules() if name.endswith(".mhla"))
    return [name.removesuffix(".mhla").removesuffix(".processor") for name in names]


def check_model(argument, model, wanted):
    """One sentence if `model` cannot be trained or asked: not a model with `save_pretrained`, or without weights."""
    if not (isinstance(model, nn.Module) and hasattr(model, "save_pretrained")):
        raise TypeError(f"{argument}: got {type(model).__name__}; expected {wanted}")
    if any(value.is_meta for value in model.parameters()):
        raise ValueError(f"{argument}: its weights are on the meta device; expected loaded weights")


def check_stage(student, teacher, stage):
    """One sentence if `stage` would train nothing, weights too coarse to train, or lacks the teacher it needs."""
    names = mhla_attentions(student)
    label = f"stage {stage.name!r}"
    if not names and (stage.loss == "transfer" or stage.trainable != "all"):
        raise ValueError(f"student: has no MHLA layer, which {label} trains; expected a model from mhla_hf.convert")
    flags = {parameter: parameter.requires_grad for parameter in student.parameters()}
    moving = [(name, value) for name, value in student.named_parameters() if _moves(name, names, stage, flags[value])]
    if not moving:
        raise ValueError(f"student: all that {label} would train ({stage.trainable!r}) is frozen")
    for name, value in moving:
        if value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"student: {name!r} is {value.dtype}, where small updates vanish; load it with dtype=torch.float32 "
                "(and use mixed_precision='bf16' for speed)"
            )
    if stage.needs_teacher and teacher is None:
        raise ValueError(f"teacher: None was given, and {label} (loss {stage.loss!r}) needs one")


def check_original(student, teacher):
    """One sentence if the student's MHLA layers have no softmax originals of the same names in the teacher."""
    modules = dict(teacher.named_modules())
    for name in mhla_attentions(student):
        if name not in modules:
            raise ValueError(f"teacher: has no module {name!r}, which the student has; expected the student's original")
        if f"{name}.mhla" in modules or f"{name}.processor.mhla" in modules:
            raise ValueError(f"teacher: {name!r} is an MHLA layer itself; expected the softmax original")


def check_not_shared(student, teacher):
    """One sentence if training the student would change the teacher."""
    own = {value.untyped_storage().data_ptr(): name for name, value in student.named_parameters()}
    for name, value in teacher.named_parameters():
        if value.untyped_storage().data_ptr() in own:
            raise ValueError(
                f"teacher: shares {name!r} with the student; load it separately, or deepcopy before converting"
            )


def _moves(name, attentions, stage, flag):
    if stage.trainable == "all":
        return flag
    if stage.trainable in ("mhla", "lora"):
        return flag and (".mhla." in name or (stage.trainable == "lora" and ".lora_" in name))
    return flag and any(name.startswith(f"{attention}.") for attention in attentions)


def choose_trainable(student, stage, flags):
    """Let move what `stage` names, of what `flags` (parameter -> whether it may, True if unknown) leaves free."""
    names = mhla_attentions(student)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(_moves(name, names, stage, flags.get(parameter, True)))


def parameter_groups(student, stage):
    """AdamW's groups: MHLA's own rate for `.mhla.`, decay for matrices elsewhere."""
    groups = {}
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            added = ".mhla." in name
            groups.setdefault((added, parameter.ndim > 1 and not added), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": 0.0,
            "top_lr": stage.lr_mhla if added and stage.lr_mhla is not None else stage.lr,
            "weight_decay": stage.weight_decay if decays else 0.0,
        }
        for (added, decays), parameters in groups.items()
    ]


def direct_mixings(student):
    """Mixing weights that are kept as they are, and so must be kept from going below zero."""
    return [
        module.weight
        for name, module in student.named_modules()
        if name.endswith(".mhla.mixing") and getattr(module, "form", None) == "direct" and module.weight.requires_grad
    ]
