"""What a stage trains: which parameters move, at which rate, and whether that can work at all.

MHLA layers are found by name (an attention module with a child called `mhla`), so that models whose code came from the
Hub are trained as well. Unusual: a parameter that was frozen before the run stays frozen, whatever a stage names; a
uniform, frozen mixing is how plain linear attention is trained as a yardstick.
"""

import torch
from torch import nn


def mhla_attentions(model):
    """Names of the attention modules that have an MHLA core (a child called `mhla`), in the model's order."""
    return [name.removesuffix(".mhla") for name, _ in model.named_modules() if name.endswith(".mhla")]


def check_models(student, teacher, stages):
    """One sentence for the first thing that could not work, before anything is loaded or written."""
    for name, model in (("student", student), ("teacher", teacher)):
        if model is None and name == "teacher":
            continue
        if not (isinstance(model, nn.Module) and hasattr(model, "save_pretrained") and hasattr(model, "base_model")):
            raise TypeError(f"{name}: got {type(model).__name__}; expected a causal language model of transformers")
        if any(value.is_meta for value in model.parameters()):
            raise ValueError(f"{name}: its weights are on the meta device; expected loaded weights")
        limit = getattr(model.config, "max_position_embeddings", None)
        for stage in stages:
            if limit and stage.seq_len > limit and (name == "student" or stage.loss != "lm"):
                raise ValueError(
                    f"seq_len: stage {stage.name!r} has {stage.seq_len}, and the {name} knows {limit} positions"
                )
    for stage in stages:
        _check_stage(student, teacher, stage)
    if teacher is not None and any(stage.loss != "lm" for stage in stages):
        own = {value.untyped_storage().data_ptr(): name for name, value in student.named_parameters()}
        for name, value in teacher.named_parameters():
            if value.untyped_storage().data_ptr() in own:
                raise ValueError(
                    f"teacher: shares {name!r} with the student; load it separately, or deepcopy before converting"
                )


def _check_stage(student, teacher, stage):
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
    if stage.loss == "lm":
        return
    if teacher is None:
        raise ValueError(f"teacher: None was given, and {label} (loss {stage.loss!r}) needs one")
    if stage.loss == "logits":
        rows = [len(model.get_input_embeddings().weight) for model in (student, teacher)]
        if rows[0] != rows[1]:
            raise ValueError(f"teacher: has a vocabulary of {rows[1]}, and the student one of {rows[0]}; expected one")
        return
    modules = dict(teacher.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(f"teacher: has no module {name!r}, which the student has; expected the student's original")
        if f"{name}.mhla" in modules:
            raise ValueError(f"teacher: {name!r} is an MHLA layer itself; expected the softmax original")
    widths = [model.config.hidden_size for model in (student, teacher)]
    if widths[0] != widths[1]:
        raise ValueError(f"teacher: has hidden size {widths[1]}, and the student {widths[0]}; expected one")


def _moves(name, attentions, stage, flag):
    if stage.trainable == "all":
        return flag
    ending = ".mhla." if stage.trainable == "mhla" else "."
    return flag and any(name.startswith(attention + ending) for attention in attentions)


def choose_trainable(student, stage, flags):
    names = mhla_attentions(student)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(_moves(name, names, stage, flags[parameter]))


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
