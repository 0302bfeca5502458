"""The losses of language models against their definitions, and what distill refuses of them in one sentence."""

import sys

import pytest
import torch
import torch.nn.functional as F
from optimum.quanto import freeze, qint8, quantize
from tools.small_models import softmax_model
from tools.small_types import small_model_of
from torch import nn

import mhla_hf
from mhla_hf.training import output_head
from mhla_hf.training.loop import Stage, distill
from mhla_hf.training.tasks.language import LanguageObjective, next_token_loss

STAGE = {"seq_len": 48, "batch_size": 4}
LM = [Stage("lm", "lm", 4, 1e-3, **STAGE)]
LOGITS = [Stage("logits", "logits", 4, 1e-3, **STAGE)]
TRANSFER = [Stage("transfer", "transfer", 4, 1e-3, trainable="mhla", **STAGE)]


def quantized(lab):
    student = lab.student()
    quantize(student.model.layers, weights=qint8)
    freeze(student)
    return {"student": student}


TWO = [*LM, Stage("b", "lm", 1, 1e-3, seq_len=64)]
CASES = {
    "no stages": ({"stages": None}, "stages: got neither stages nor a recipe, expected one of the two"),
    "no data": ({"data": None}, "data: got None, and none in the recipe"),
    "short for the second stage": (lambda lab: {"data": lab.tokens(60), "stages": TWO},
        "60 tokens, expected at least seq_len, which is 64."),
    "batch": ({"stages": [Stage("lm", "lm", 4, 1e-3, **STAGE, grad_accum=3)]},
        r"batch_size: got 4 in stage 'lm', expected a multiple of 3 \(processes times grad_accum\)."),
    "positions": (lambda lab: {"student": mhla_hf.convert(small_model_of("gpt2")), "stages": [Stage("a", "lm", 1, 1e-3,
        seq_len=129)]}, "seq_len: got 129, expected at most the 128 positions of the student"),
    "vocabulary": ({"data": torch.arange(90)}, "with token ids 0 to 89, expected ids 0 to 63"),
    "precision": ({"mixed_precision": "fp16"}, "mixed_precision: got 'fp16', expected one of .'no', 'bf16'"),
    "tracker": ({"tracker": "wandb"}, "tracker: got 'wandb', expected one of .*, which are installed"),
    "student": ({"student": nn.Linear(2, 2)}, "student: got Linear, expected a causal language"),
    "quantized": (quantized, "student: got a WeightQBytesTensor of torch.float32 for 'model.*weight', expected float"),
    "frozen": (lambda lab: {"student": lab.student().requires_grad_(False)},
        "trainable: got 'all' in stage 'lm', which trains no parameter with requires_grad, expected .* not frozen"),
    "no weights of MHLA": (lambda lab: {"student": lab.student(windowed=True), "stages": TRANSFER},
        "trainable: got 'mhla' in stage 'transfer', which trains no parameter .*, expected 'attention' or 'all'"),
    "unconverted": (lambda lab: {"student": lab.teacher(), "stages": TRANSFER},
        "student: got a model without MHLA layers for stage .transfer."),
    "no teacher": ({"stages": LOGITS}, "teacher: got None, expected a model for the loss .logits. of stage .logits."),
    "teacher's vocabulary": (lambda lab: {"stages": LOGITS, "teacher": lab.teacher(vocab_size=72)},
        "teacher: got vocab_size 72, expected 64"),
    "shared weights": (lambda lab: {"student": (one := lab.student()), "teacher": one, "stages": LOGITS},
        "teacher: got a model that shares 'model.embed_tokens.weight' with the student"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_written(lab, tmp_path, monkeypatch, case):
    values, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    values = values(lab) if callable(values) else values
    values = {"teacher": None, "stages": LM, "data": lab.tokens(), "progress": False, **values}
    student = values.pop("student", None) or lab.student()
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        distill(student, values.pop("teacher"), out=tmp_path / "out", **values)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["accelerate", "datasets"])
def test_missing_extra_is_named_with_its_command(lab, tmp_path, monkeypatch, missing):
    (tmp_path / "t.jsonl").write_text('{"input_ids": [1]}\n')
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'mhla_hf\[train\]'"):
        distill(lab.student(), out=tmp_path / "out", stages=LM, data=tmp_path / "t.jsonl")


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kl", "ce"), [(1.0, 0.0), (1.0, 0.3), (0.0, 1.0)])
def test_next_token_against_autograd(temperature, kl, ce, monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK", 50)  # 3 rows of 11 at a time, the last chunk ragged
    student = torch.randn(11, 13, requires_grad=True)
    teacher = torch.randn(11, 13) if kl else None
    targets, weights = torch.randint(0, 13, (11,)), torch.rand(11)
    weights[[2, 10]] = 0
    options = {"temperature": temperature, "ce_weight": ce}
    loss, kl_sum, ce_sum = next_token_loss(student, targets, weights, teacher, **options)
    (grad,) = torch.autograd.grad(3 * loss, student)

    log_q = (student / temperature).log_softmax(-1)
    want_ce = (F.cross_entropy(student, targets, reduction="none") * weights).sum()
    want_kl = torch.zeros(())
    if kl:
        log_p = (teacher / temperature).log_softmax(-1)
        want_kl = temperature**2 * (F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * weights).sum()
    (want_grad,) = torch.autograd.grad(3 * (kl * want_kl + ce * want_ce), student)
    torch.testing.assert_close((kl_sum, ce_sum), (want_kl, want_ce), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, want_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, kl_sum + ce * ce_sum)
    nothing = next_token_loss(student, targets, torch.zeros(11), teacher, **options)[0]
    assert nothing == 0 and not torch.autograd.grad(nothing, student)[0].any()


def test_likeliest_tokens_with_all_others_as_one():
    """Where the others are one token, that is the whole KL."""
    student, teacher = torch.randn(11, 13, requires_grad=True), torch.randn(11, 13)
    targets, weights = torch.randint(0, 13, (11,)), torch.ones(11).index_fill(0, torch.tensor([2]), 0)
    sums = [next_token_loss(student, targets, weights, teacher, top_k=top_k, ce_weight=1.0) for top_k in (0, 12)]
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(both[0], student)[0] for both in sums]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_lm_loss_is_the_models_own_with_its_routers_share(lab):
    model = softmax_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    ids = lab.tokens()[: 3 * 20].view(3, 20)
    labels = ids.clone()
    labels[0, :7] = labels[2, 15:] = -100
    token_weight = 1 / int((labels[:, 1:] != -100).sum())
    loss, _ = LanguageObjective(model, None, lab.lm()[0])(ids, labels, torch.ones(3, 20), token_weight, 1 / 3)
    torch.testing.assert_close(loss, model(input_ids=ids, labels=labels).loss, rtol=1e-5, atol=1e-6)


def test_transfer_loss_by_hand(lab):
    teacher = lab.teacher()
    student = lab.student(teacher, layers=[1])
    ids = lab.tokens()[:96].view(2, 48)
    loss, _ = LanguageObjective(student, teacher, lab.stages()[0])(ids, ids, torch.ones(ids.shape), 1.0, 0.5)

    caught, attention = {}, teacher.model.layers[1].self_attn
    keep = lambda module, args, kwargs, output: caught.update(kwargs=kwargs, out=output[0])  # noqa: E731
    with attention.register_forward_hook(keep, with_kwargs=True), torch.no_grad():
        teacher(input_ids=ids, use_cache=False)
    got = student.model.layers[1].self_attn(**(caught["kwargs"] | {"attention_mask": None}))[0]
    per_row = (got - caught["out"]).square().sum((1, 2)) / caught["out"].square().sum((1, 2))
    torch.testing.assert_close(loss, per_row.mean(), rtol=1e-5, atol=1e-7)
    assert not attention._forward_hooks
