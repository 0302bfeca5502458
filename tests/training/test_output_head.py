"""The loss in chunks of logits, taken behind the output head, against the loss of whole logits: values and gradients."""

import copy
import logging

import pytest
import torch
from tools.small_types import small_model_of
from torch import nn

import mhla_hf
from mhla_hf.training import output_head
from mhla_hf.training.loop import Stage
from mhla_hf.training.tasks.language import LanguageObjective

VOCAB, LENGTH = 64, 24
STAGES = [{"loss": "lm"}, {"loss": "logits", "ce_weight": 0.3, "temperature": 2.0}, {"loss": "logits", "top_k": 8}]
TYPES = {  # with what is special about their heads made to matter
    "gemma2": {"final_logit_softcapping": 0.7}, "cohere": {"logit_scale": 0.25}, "granite": {"logits_scaling": 3.0},
    "phi": {}, "gpt2": {},  # phi's head has a bias
}  # fmt: skip


def model_of(model_type):
    model = small_model_of(model_type)
    for name, value in TYPES[model_type].items():
        setattr(model.config, name, value)
        if hasattr(model, name):
            setattr(model, name, value)
    return model


def results(student, teacher, values, chunked, monkeypatch):
    """Loss, logs and the gradient of every parameter."""
    stage = Stage("s", steps=1, lr=1e-3, seq_len=LENGTH, batch_size=3, **values)
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :7] = labels[2, 15:] = -100
    step = LanguageObjective(student, teacher, stage)
    if not chunked:
        step.heads = (None, None)
    else:
        monkeypatch.setattr(output_head, "CPU_CHUNK", 7 * VOCAB)  # the last chunk is ragged
    student.zero_grad()
    loss, logs = step(ids, labels, 1 / 50, 1 / 3)
    (3 * loss).backward()
    assert (step.heads[0] is not None) == chunked
    gradients = {name: x.grad.clone() for name, x in student.named_parameters() if x.grad is not None}
    return {"loss": loss.detach(), **logs}, gradients


def assert_equal_ways(student, teacher, values, monkeypatch):
    logs, gradients = results(student, teacher, values, True, monkeypatch)
    want_logs, want = results(student, teacher, values, False, monkeypatch)
    torch.testing.assert_close(logs, want_logs, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == want.keys()
    assert sum(x.abs().sum() for x in want.values()) > 0
    torch.testing.assert_close(gradients, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("values", STAGES, ids=lambda values: "-".join(map(str, values.values())))
@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_whole_logits(model_type, values, monkeypatch):
    teacher = model_of(model_type)
    student = mhla_hf.convert(copy.deepcopy(teacher), layers="all", block_size=8)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert_equal_ways(student, teacher, values, monkeypatch)


@pytest.mark.parametrize("trained", ["head", "frozen head"])
def test_only_what_learns_gets_a_gradient(lab, trained, monkeypatch):
    teacher = lab.teacher(tie_word_embeddings=False)
    student = lab.student(teacher)
    student.lm_head.weight.requires_grad_(trained == "head")
    student.model.requires_grad_(trained != "head")
    assert_equal_ways(student, teacher, {"loss": "logits"}, monkeypatch)


OTHER_HEADS = {
    "is a Doubled, not a torch.nn.Linear": lambda m: setattr(
        m, "lm_head", type("Doubled", (nn.Linear,), {})(32, VOCAB)
    ),
    "more than a scaled or soft-capped output": lambda model: setattr(model.config, "logits_scaling", 2.0),
}


@pytest.mark.parametrize("words, change", OTHER_HEADS.items())
def test_other_heads_are_taken_whole_and_the_log_says_why(lab, caplog, change, words):
    student = lab.student(lab.teacher())
    change(student)
    step, ids = LanguageObjective(student, None, lab.lm()[0]), lab.tokens()[:96].view(2, 48)
    caplog.set_level(logging.INFO, "mhla_hf")
    losses = [step(ids, ids, 1 / 94, 1 / 2)[0] for _ in range(2)]
    torch.testing.assert_close(losses[0], student(input_ids=ids, labels=ids).loss)
    assert losses[0] == losses[1] and words in caplog.text and len(caplog.records) == 1
