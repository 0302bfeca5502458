"""What moves in a stage, at which rate, and what stays as it was."""

import copy

import pytest
import torch

from mhla_hf.training.loop import Stage

SHORT = {"seq_len": 48, "batch_size": 2, "schedule": "constant"}


def changes(lab, out, teacher, student, *stages):
    """How far each weight moves at most, of those that move."""
    before = copy.deepcopy(student.state_dict())
    lab.distill(out, teacher, student, stages=list(stages))
    return {k: (x - before[k]).abs().max().item() for k, x in student.state_dict().items() if not x.equal(before[k])}


def test_what_was_frozen_stays_frozen_and_the_teacher_untouched(lab, tmp_path):
    teacher = lab.teacher(attention_dropout=0.1).train()
    student, kept = lab.student(lab.teacher(), mixing_start="uniform", learn_mixing=False), copy.deepcopy(teacher)
    flags = {name: value.requires_grad for name, value in student.named_parameters()}
    changed = set(changes(lab, tmp_path / "out", teacher, student, *lab.stages(4)))
    assert {name: value.requires_grad for name, value in student.named_parameters()} == flags
    assert not any("mixing" in name for name in changed)
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.mhla.q_map.weight"} <= changed
    torch.testing.assert_close(teacher.state_dict(), kept.state_dict(), rtol=0, atol=0)
    assert not teacher.training
    assert all(value.grad is None and value.requires_grad for value in teacher.parameters())


@pytest.mark.parametrize("trainable", ["mhla", "attention", "all"])
def test_only_what_a_stage_names_moves_at_its_rate(lab, tmp_path, trainable):
    teacher = lab.teacher(initializer_range=0.3)
    student = lab.student(teacher, layers=[1])
    stage = Stage("logits", "logits", 1, 1e-3, lr_mhla=1e-1, trainable=trainable, **SHORT)
    changed = changes(lab, tmp_path / "out", teacher, student, stage)
    prefix = {"mhla": "model.layers.1.self_attn.mhla.", "attention": "model.layers.1.self_attn.", "all": ""}[trainable]
    assert set(changed) == {name for name in student.state_dict() if name.startswith(prefix)}
    assert changed["model.layers.1.self_attn.mhla.q_map.weight"] == pytest.approx(1e-1, rel=1e-2)
    if trainable != "mhla":
        assert changed["model.layers.1.self_attn.q_proj.weight"] == pytest.approx(1e-3, rel=1e-2)


def test_direct_mixing_stays_loadable(lab, tmp_path):
    teacher = lab.teacher()
    student = lab.student(teacher, mixing_form="direct")
    stage = Stage("transfer", "transfer", 6, 0.5, trainable="mhla", **SHORT)
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    assert student.model.layers[0].self_attn.mhla.mixing.weight.min() == 0
    type(student).from_pretrained(tmp_path / "out")
