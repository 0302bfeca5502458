"""The losses against their definitions, and that they teach."""

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig, MixtralForCausalLM

from mhla_hf.training import objectives
from mhla_hf.training.objectives import DistillStep, next_token


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
def test_next_token_against_autograd(temperature, kl, ce, monkeypatch):
    monkeypatch.setitem(objectives.CHUNK, "cpu", 50)  # 3 rows of 11 at a time, the last chunk ragged
    student = torch.randn(11, 13, requires_grad=True)
    teacher = torch.randn(11, 13) if kl else None
    targets = torch.randint(0, 13, (11,))
    targets[[2, 10]] = -100
    kl_sum, ce_sum = next_token(student, targets, (teacher,) if kl else (), temperature)
    (grad,) = torch.autograd.grad(3 * (kl * kl_sum + ce * ce_sum), student)

    log_q, live = (student / temperature).log_softmax(-1), (targets != -100)
    want_ce = F.cross_entropy(student, targets, reduction="sum")
    want_kl = torch.zeros(())
    if kl:
        log_p = (teacher / temperature).log_softmax(-1)
        want_kl = temperature**2 * (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * live).sum()
    (want_grad,) = torch.autograd.grad(3 * (kl * want_kl + ce * want_ce), student)
    torch.testing.assert_close((kl_sum, ce_sum), (want_kl, want_ce), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-6)
    nothing = next_token(student, torch.full((11,), -100), (teacher,) if kl else (), temperature).sum()
    assert nothing == 0 and not torch.autograd.grad(nothing, student)[0].any()


def mixtral():
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5)
    return MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [None, mixtral])
def test_lm_loss_is_the_models_own_with_its_routers_share(lab, make):
    model, ids = (make or lab.teacher)(), lab.tokens()[: 3 * 20].view(3, 20)
    labels = ids.clone()
    labels[0, :7] = labels[2, 15:] = -100
    loss, _ = DistillStep(model, None, lab.lm()[0])(ids, labels, 1 / int((labels[:, 1:] != -100).sum()), 1 / 3)
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss, rtol=1e-5, atol=1e-6)


def test_transfer_loss_by_hand(lab):
    teacher = lab.teacher()
    student = lab.student(teacher, layers=[1])
    ids = lab.tokens()[:96].view(2, 48)
    loss, _ = DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 0.5)

    caught, attention = {}, teacher.model.layers[1].self_attn
    handle = attention.register_forward_hook(
        lambda module, args, kwargs, output: caught.update(kwargs=kwargs, out=output[0]), with_kwargs=True
    )
    with handle, torch.no_grad():
        teacher(input_ids=ids, use_cache=False)
    got = student.model.layers[1].self_attn(**(caught["kwargs"] | {"attention_mask": None}))[0]
    per_row = (got - caught["out"]).square().sum((1, 2)) / caught["out"].square().sum((1, 2))
    torch.testing.assert_close(loss, per_row.mean(), rtol=1e-5, atol=1e-7)
    assert not attention._forward_hooks


def test_transfer_runs_no_student_but_its_attention_whatever_the_teachers_is(lab):
    teacher = lab.teacher()
    student, ids, losses = lab.student(teacher), lab.tokens()[:96].view(2, 48), []

    def fail(*_):
        raise AssertionError("ran")

    for module in (student.lm_head, student.model.norm, student.model.layers[0].mlp, teacher.lm_head):
        module.register_forward_pre_hook(fail)
    for implementation in ("eager", "sdpa"):
        teacher.set_attn_implementation(implementation)
        losses.append(DistillStep(student, teacher, lab.stages()[0])(ids, ids, 1.0, 1.0)[0])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    losses[0].backward()
    assert all(value.grad is not None for value in student.model.layers[1].self_attn.mhla.parameters())


def test_distillation_learns(lab, tmp_path):
    """A teacher with sharp attention; judged on tokens that were not trained on."""
    teacher = lab.teacher(initializer_range=0.2)
    student = lab.student(teacher)
    stages = lab.stages(30)
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
