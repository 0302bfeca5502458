"""What moves in a stage, at which rate, and what stays as it was."""

import copy

import pytest

from mhla_hf.training.loop import Stage

SHORT = {"seq_len": 48, "batch_size": 2}


def moved(before, student):
    return {name for name, value in student.state_dict().items() if not value.equal(before[name])}


def test_what_was_frozen_stays_frozen_and_the_teacher_untouched(lab, tmp_path):
    teacher = lab.teacher(attention_dropout=0.1).train()
    student = lab.student(lab.teacher(), mixing_start="uniform", learn_mixing=False)
    flags = {name: value.requires_grad for name, value in student.named_parameters()}
    before, kept = copy.deepcopy(student.state_dict()), copy.deepcopy(teacher.state_dict())
    lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(4))
    changed = moved(before, student)
    assert {name: value.requires_grad for name, value in student.named_parameters()} == flags
    assert not any("mixing" in name for name in changed)
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.mhla.q_map.weight"} <= changed
    assert not teacher.training and not moved(kept, teacher)
    assert all(value.grad is None and value.requires_grad for value in teacher.parameters())


@pytest.mark.parametrize("trainable", ["mhla", "attention"])
def test_only_what_a_stage_names_moves(lab, tmp_path, trainable):
    teacher = lab.teacher()
    student = lab.student(teacher, layers=[1])
    before = copy.deepcopy(student.state_dict())
    stage = Stage("logits", "logits", 3, 1e-2, trainable=trainable, **SHORT)
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    prefix = "model.layers.1.self_attn." + ("mhla." if trainable == "mhla" else "")
    assert moved(before, student) == {name for name in before if name.startswith(prefix)}


def test_own_rate_for_mhla(lab, tmp_path):
    teacher = lab.teacher(initializer_range=0.3)
    student = lab.student(teacher)
    before = copy.deepcopy(student.state_dict())
    stage = Stage("logits", "logits", 1, 1e-3, lr_mhla=1e-1, schedule="constant", **SHORT)
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    change = {name: (value - before[name]).abs().max().item() for name, value in student.state_dict().items()}
    assert change["model.layers.0.self_attn.mhla.q_map.weight"] == pytest.approx(1e-1, rel=1e-2)
    assert change["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(1e-3, rel=1e-2)


def test_direct_mixing_stays_loadable(lab, tmp_path):
    teacher = lab.teacher()
    student = lab.student(teacher, mixing_form="direct")
    stage = Stage("transfer", "transfer", 6, 0.5, trainable="mhla", schedule="constant", **SHORT)
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    assert student.model.layers[0].self_attn.mhla.mixing.weight.min() == 0
    type(student).from_pretrained(tmp_path / "out")
