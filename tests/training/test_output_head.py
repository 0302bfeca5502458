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


@pytest.mark.parametrize("values", STAGES, ids=lambda values: "-".join(map(str, values.values())))
@pytest.mark.parametrize("model_type", TYPES)
def test_loss_and_gradients_are_those_of_whole_logits(model_type, values, monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK", 7 * VOCAB)  # the last chunk is ragged
    teacher, found = model_of(model_type), []
    student = mhla_hf.convert(copy.deepcopy(teacher), layers="all", block_size=8)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :7] = labels[2, 15:] = -100
    for chunked in (True, False):
        step = LanguageObjective(student, teacher, Stage("s", steps=1, lr=1e-3, seq_len=LENGTH, batch_size=3, **values))
        if not chunked:
            step.heads = (None, None)
        student.zero_grad()
        loss, logs = step(ids, labels, torch.ones(ids.shape), 1 / 50, 1 / 3)
        (3 * loss).backward()
        assert (step.heads[0] is not None) == chunked
        gradients = {name: x.grad.clone() for name, x in student.named_parameters() if x.grad is not None}
        found.append(({"loss": loss.detach(), **logs}, gradients))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert sum(x.abs().sum() for x in gradients.values()) > 0


class Doubled(nn.Linear):
    pass


OTHER_HEADS = {
    "is a Doubled, not a torch.nn.Linear": lambda model: setattr(model, "lm_head", Doubled(32, VOCAB)),
    "more than a scaled or soft-capped output": lambda model: setattr(model.config, "logits_scaling", 2.0),
}


@pytest.mark.parametrize("words, change", OTHER_HEADS.items())
def test_other_heads_are_taken_whole_and_the_log_says_why(lab, caplog, change, words):
    student = lab.student(lab.teacher())
    change(student)
    step, ids = LanguageObjective(student, None, lab.lm()[0]), lab.tokens()[:96].view(2, 48)
    caplog.set_level(logging.INFO, "mhla_hf")
    losses = [step(ids, ids, torch.ones(2, 48), 1 / 94, 1 / 2)[0] for _ in range(2)]
    torch.testing.assert_close(losses[0], student(input_ids=ids, labels=ids).loss)
    assert losses[0] == losses[1] and caplog.text.count(words) == 1
