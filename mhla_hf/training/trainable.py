"""What a stage trains: which parameters move, at which rate, and whether that can work at all.

MHLA layers are found by name, so that models whose code came from the Hub are trained as well. What was frozen before the
run stays so, whatever a stage names: plain linear attention, the yardstick, is a uniform, frozen mixing.
"""

import torch

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)


def mhla_attentions(model):
    """Names of the attention modules with an MHLA core: the child `mhla` of the module, or in diffusers of its processor."""
    names = (name for name, _ in model.named_modules() if name.endswith(".mhla"))
    return [name.removesuffix(".mhla").removesuffix(".processor") for name in names]


def check_student(student, stages):
    """One sentence if the student is quantized, or if a stage would train nothing of it."""
    names, given = mhla_attentions(student), dict(student.named_parameters())
    for name, value in given.items():
        if value.dtype not in FLOATS or type(value.data) is not torch.Tensor:
            kind = f"{type(value.data).__name__} of {value.dtype}"
            raise ValueError(f"student: {name!r} is a {kind}; expected float weights, loaded without quantization")
    for stage in stages:
        if not names and (stage.loss == "transfer" or stage.trainable != "all"):
            raise ValueError(f"student: has no MHLA layer, which stage {stage.name!r} trains; expected one of convert")
        if not any(_moves(name, names, stage, value.requires_grad) for name, value in given.items()):
            raise ValueError(f"student: all that stage {stage.name!r} would train ({stage.trainable!r}) is frozen")


def check_teacher(student, teacher, stages):
    """One sentence if a stage needs a teacher that is missing, shares weights with the student, or is not its original."""
    needing = [stage for stage in stages if stage.needs_teacher]
    if not needing:
        return
    if teacher is None:
        raise ValueError(f"teacher: None was given, and stage {needing[0].name!r} (loss {needing[0].loss!r}) needs one")
    own = {value.untyped_storage().data_ptr() for value in student.parameters()}
    for name, value in teacher.named_parameters():
        if value.untyped_storage().data_ptr() in own:
            raise ValueError(f"teacher: shares {name!r} with the student; expected a copy, made before converting")
    modules, mixed = dict(teacher.named_modules()), mhla_attentions(teacher)
    for name in mhla_attentions(student) if any(stage.loss == "transfer" for stage in needing) else ():
        if name not in modules:
            raise ValueError(f"teacher: has no module {name!r}, which the student has; expected the student's original")
        if name in mixed:
            raise ValueError(f"teacher: {name!r} is an MHLA layer itself; expected the softmax original")


def dtypes_of(model):
    """The dtype of every parameter and buffer, by name."""
    return {name: value.dtype for name, value in (*model.named_parameters(), *model.named_buffers())}


def dtypes_to_save(model, wanted):
    """`wanted` for the weights, None: as they are now; float32 where the model's class never has them in less."""
    kind = type(model)  # the object itself may have been made by another class, before it was converted
    kept = getattr(kind, "_keep_in_fp32_modules_strict", getattr(kind, "_keep_in_fp32_modules", None)) or ()
    dtypes = dtypes_of(model)
    for name, _ in model.named_parameters():
        dtype = wanted or dtypes[name]
        dtypes[name] = torch.float32 if dtype in HALVES and set(kept) & set(name.split(".")) else dtype
    return dtypes


def set_dtypes(model, dtypes, whole=True):
    """Give parameters and buffers the named dtypes, in place; gradients are dropped, and unless `whole` the weights too."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        dtype = dtypes.get(name, value.dtype)
        kept = whole or not isinstance(value, torch.nn.Parameter)
        value.data, value.grad = value.data.to(dtype) if kept else torch.empty_like(value.data, dtype=dtype), None


def _moves(name, attentions, stage, flag):
    if stage.trainable in ("mhla", "lora"):
        return flag and (".mhla." in name or (stage.trainable == "lora" and ".lora_" in name))
    return flag and (stage.trainable == "all" or any(name.startswith(f"{attention}.") for attention in attentions))


def choose_trainable(student, stage, flags):
    """Let move what `stage` names, of what `flags` (parameter -> whether it may, True if unknown) leaves free."""
    names = mhla_attentions(student)
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(_moves(name, names, stage, flags.get(parameter, True)))


def parameter_groups(student, stage):
    """AdamW's groups: MHLA's own rate for `.mhla.`, decay for matrices elsewhere."""
    groups, rates = {}, (stage.lr, stage.lr if stage.lr_mhla is None else stage.lr_mhla)
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            added = ".mhla." in name
            groups.setdefault((added, parameter.ndim > 1 and not added), []).append(parameter)
    return [
        {"params": parameters, "lr": 0.0, "top_lr": rates[added], "weight_decay": stage.weight_decay * decays}
        for (added, decays), parameters in groups.items()
    ]


def direct_mixings(student):
    """Mixing weights that are kept as they are, and so must be kept from going below zero."""
    return [
        module.weight
        for name, module in student.named_modules()
        if name.endswith(".mhla.mixing") and getattr(module, "form", None) == "direct" and module.weight.requires_grad
    ]
