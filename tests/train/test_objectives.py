"""The losses against their definitions, what the teacher sees of training, and the batch cut in parts."""

import copy
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from mhla_hf.training import objectives
from mhla_hf.training.loop import Stage
from mhla_hf.training.objectives import DistillStep, NextToken


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
def test_next_token_against_autograd(temperature, kl, ce, monkeypatch):
    monkeypatch.setitem(objectives.CHUNK, "cpu", 50)  # 3 rows of 11 at a time, the last chunk ragged
    student = torch.randn(11, 13, requires_grad=True)
    teacher = torch.randn(11, 13) if kl else None
    targets = torch.randint(0, 13, (11,))
    targets[[2, 10]] = -100
    loss, kl_sum, ce_sum = NextToken.apply(student, teacher, targets, kl, ce, temperature)
    (grad,) = torch.autograd.grad(3 * loss, student)

    log_q, live = (student / temperature).log_softmax(-1), (targets != -100)
    want_ce = F.cross_entropy(student, targets, reduction="sum")
    want_kl = torch.zeros(())
    if kl:
        log_p = (teacher / temperature).log_softmax(-1)
        want_kl = temperature**2 * (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * live).sum()
    want = kl * want_kl + ce * want_ce
    (want_grad,) = torch.autograd.grad(3 * want, student)
    torch.testing.assert_close((loss, kl_sum, ce_sum), (want, want_kl, want_ce), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-6)


def test_no_loss_without_a_label_gives_no_gradient():
    student = torch.randn(4, 7, requires_grad=True)
    loss, _, _ = NextToken.apply(student, None, torch.full((4,), -100), 0.0, 1.0, 1.0)
    loss.backward()
    assert loss == 0
    assert not student.grad.any()


def test_lm_loss_is_the_models_own(lab):
    model = lab.teacher()
    ids = lab.tokens()[: 3 * 20].view(3, 20)
    labels = ids.clone()
    labels[0, :7] = -100
    labels[2, 15:] = -100
    count = int((labels[:, 1:] != -100).sum())
    loss, logs = DistillStep(model, None, lab.lm()[0])(ids, labels, 1 / count, 1 / 3)
    want = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logs["ce"], want.detach(), rtol=1e-5, atol=1e-6)


def test_lm_loss_has_the_routers_share():
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    model = MixtralForCausalLM(config).eval()
    ids = torch.randint(0, 32, (2, 12))
    loss, _ = DistillStep(model, None, Stage("lm", "lm", 1, 1e-3, seq_len=12))(ids, ids, 1 / 22, 1 / 2)
    torch.testing.assert_close(loss, model(input_ids=ids, labels=ids).loss, rtol=1e-5, atol=1e-6)


def test_transfer_loss_by_hand(lab):
    teacher = lab.teacher()
    student = lab.student(teacher, layers=[1])
    ids = lab.tokens()[:96].view(2, 48)
    loss, _ = DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 0.5)

    caught = {}
    attention = teacher.model.layers[1].self_attn
    handle = attention.register_forward_hook(
        lambda module, args, kwargs, output: caught.update(kwargs=kwargs, out=output[0]), with_kwargs=True
    )
    with torch.no_grad():
        teacher(input_ids=ids, use_cache=False)
    handle.remove()
    got = student.model.layers[1].self_attn(**(caught["kwargs"] | {"attention_mask": None}))[0]
    per_row = (got - caught["out"]).square().sum((1, 2)) / caught["out"].square().sum((1, 2))
    torch.testing.assert_close(loss, per_row.mean(), rtol=1e-5, atol=1e-7)
    assert not attention._forward_hooks


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transfer_does_not_depend_on_the_teachers_attention(lab, implementation):
    teacher = lab.teacher()
    student = lab.student(teacher)
    ids = lab.tokens()[:96].view(2, 48)
    want, _ = DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 1.0)
    teacher.set_attn_implementation(implementation)
    got, _ = DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 1.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_transfer_runs_no_student_but_its_attention(lab):
    teacher = lab.teacher()
    student = lab.student(teacher)

    def fail(*_):
        raise AssertionError("ran")

    for module in (student.lm_head, student.model.norm, student.model.layers[0].mlp, teacher.lm_head):
        module.register_forward_pre_hook(fail)
    ids = lab.tokens()[:96].view(2, 48)
    DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 1.0)[0].backward()
    assert all(value.grad is not None for value in student.model.layers[1].self_attn.mhla.parameters())


def test_teacher_is_never_touched(lab, tmp_path):
    teacher = lab.teacher(attention_dropout=0.1).train()
    before = copy.deepcopy(teacher.state_dict())
    lab.distill(tmp_path / "out", teacher, lab.student(lab.teacher()), stages=lab.stages(4))
    assert not teacher.training
    assert all(value.grad is None for value in teacher.parameters())
    assert all(value.requires_grad for value in teacher.parameters())
    torch.testing.assert_close(teacher.state_dict(), before, rtol=0, atol=0)


def test_what_was_frozen_stays_frozen(lab, tmp_path):
    teacher = lab.teacher()
    student = lab.student(teacher, mixing_start="uniform", learn_mixing=False)
    flags = {name: value.requires_grad for name, value in student.named_parameters()}
    before = copy.deepcopy(student.state_dict())
    lab.distill(tmp_path / "out", teacher, student, stages=lab.stages(4))
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert {name: value.requires_grad for name, value in student.named_parameters()} == flags
    assert not any("mixing" in name for name in moved)
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.mhla.q_map.weight"} <= moved


@pytest.mark.parametrize("trainable", ["mhla", "attention"])
def test_only_what_a_stage_names_moves(lab, tmp_path, trainable):
    teacher = lab.teacher()
    student = lab.student(teacher, layers=[1])
    before = copy.deepcopy(student.state_dict())
    stage = Stage("logits", "logits", 3, 1e-2, seq_len=48, batch_size=2, trainable=trainable)
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    prefix = "model.layers.1.self_attn." + ("mhla." if trainable == "mhla" else "")
    assert moved
    assert moved == {name for name in before if name.startswith(prefix)}


def test_own_rate_for_mhla(lab, tmp_path):
    teacher = lab.teacher(initializer_range=0.3)
    student = lab.student(teacher)
    before = copy.deepcopy(student.state_dict())
    stage = Stage("logits", "logits", 1, 1e-3, lr_mhla=1e-1, seq_len=48, batch_size=2, schedule="constant")
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    change = {name: (value - before[name]).abs().max().item() for name, value in student.state_dict().items()}
    assert change["model.layers.0.self_attn.mhla.q_map.weight"] == pytest.approx(1e-1, rel=1e-2)
    assert change["model.layers.0.self_attn.q_proj.weight"] == pytest.approx(1e-3, rel=1e-2)


def test_direct_mixing_stays_loadable(lab, tmp_path):
    teacher = lab.teacher()
    student = lab.student(teacher, mixing_form="direct")
    stage = Stage("transfer", "transfer", 6, 0.5, seq_len=48, batch_size=2, trainable="mhla", schedule="constant")
    lab.distill(tmp_path / "out", teacher, student, stages=[stage])
    weight = student.model.layers[0].self_attn.mhla.mixing.weight
    assert weight.min() == 0
    type(student).from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("loss", ["transfer", "logits", "lm"])
def test_accumulation_equals_the_big_batch(lab, tmp_path, loss):
    results = []
    for parts in (1, 4):
        teacher = lab.teacher(initializer_range=0.3)
        student = lab.student(teacher)
        trainable = "mhla" if loss == "transfer" else "all"
        stage = Stage("only", loss, 5, 1e-3, seq_len=48, batch_size=8, grad_accum=parts, trainable=trainable)
        out = tmp_path / str(parts)
        lab.distill(out, teacher, student, stages=[stage], log_every=1)
        results.append(([e["loss"] for e in json.loads((out / "train.json").read_text())["history"]], student))
    (one, first), (four, second) = results
    assert one == pytest.approx(four, rel=1e-5)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=1e-3, atol=1e-5)


def test_distillation_learns(lab, tmp_path):
    """A teacher with sharp attention; judged on tokens that were not trained on."""
    teacher = lab.teacher(initializer_range=0.2)
    student = lab.student(teacher)
    stages = lab.stages()
    ids = lab.tokens(480, seed=5).view(10, 48)
    transfer, logits = (DistillStep(student, teacher, stage) for stage in stages)

    def judge():
        return transfer(ids, ids, 1.0, 0.1)[1]["loss"].item(), logits(ids, ids, 1 / 470, 0.1)[1]["kl"].item()

    before = judge()
    lab.distill(tmp_path / "out", teacher, student, stages=stages[:1])
    between = judge()
    lab.distill(tmp_path / "next", teacher, student, stages=stages[1:])
    after = judge()
    assert between[0] < 0.8 * before[0]
    assert between[1] < 0.9 * before[1]
    assert after[1] < 0.9 * between[1]


def test_gradient_checkpointing_and_bf16(lab, tmp_path):
    plain, saved, half = (
        lab.distill(tmp_path / name, stages=lab.stages(4), **options)
        for name, options in [
            ("plain", {}),
            ("saved", {"gradient_checkpointing": True}),
            ("half", {"mixed_precision": "bf16"}),
        ]
    )
    torch.testing.assert_close(plain.state_dict(), saved.state_dict(), rtol=1e-4, atol=1e-6)
    assert not saved.is_activation_checkpointing
    assert {value.dtype for value in half.parameters()} == {torch.float32}
    torch.testing.assert_close(plain.state_dict(), half.state_dict(), rtol=0.1, atol=0.05)
    assert not torch.equal(plain.lm_head.weight, half.lm_head.weight)


def test_the_loop_waits_only_to_log(lab, tmp_path, monkeypatch):
    calls = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        real = getattr(torch.Tensor, name)

        def counted(self, *arguments, real=real, name=name):
            if "transformers" not in sys._getframe(1).f_code.co_filename:
                calls.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(torch.Tensor, name, counted)
    counts, data = [], lab.tokens()
    for steps in (20, 40):
        calls.clear()
        options = {"data": data, "stages": lab.lm(steps), "log_every": 20, "save_every": 100}
        lab.distill(tmp_path / str(steps), None, lab.student(), **options)
        counts.append(len(calls))
    assert counts[1] - counts[0] < 5
