"""What distill refuses of language models: one sentence that names the argument, and nothing written."""

import builtins

import pytest
import torch
from optimum.quanto import freeze, qint8, quantize
from torch import nn

from mhla_hf.training.loop import Stage, distill

STAGE = {"seq_len": 48, "batch_size": 4}
LM = [Stage("lm", "lm", 4, 1e-3, **STAGE)]
LOGITS = [Stage("logits", "logits", 4, 1e-3, **STAGE)]
TRANSFER = [Stage("transfer", "transfer", 4, 1e-3, trainable="mhla", **STAGE)]


def quantized(lab):
    student = lab.student()
    quantize(student.model.layers, weights=qint8)
    freeze(student)
    return {"student": student}


def shared(lab):
    teacher = lab.teacher()
    student = lab.student(teacher)
    student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
    return {"student": student, "teacher": teacher, "stages": LOGITS}


TWO = [*LM, Stage("b", "lm", 1, 1e-3, seq_len=64)]
LONG = [Stage("a", "lm", 1, 1e-3, seq_len=256)]
CASES = {
    "no stages": ({"stages": None}, "stages: expected either stages or recipe"),
    "both": ({"recipe": "r.yaml"}, "stages: expected either stages or recipe"),
    "no data": ({"data": None}, "data: None was given"),
    "no file": ({"data": "none.txt"}, "data: there is no file or folder 'none.txt'"),
    "no name": ({"data": " "}, "data: got ' '; expected a file"),
    "short for the second stage": (
        lambda lab: {"data": lab.tokens(60), "stages": TWO},
        "60 tokens, which is shorter than one sequence .seq_len 64.",
    ),
    "vocabulary": ({"data": torch.arange(90)}, "gives token 89; the model knows tokens 0 to 63"),
    "seed": ({"seed": -1}, "seed: got -1; expected a whole number"),
    "log_every": ({"log_every": 1.5}, "log_every is 1.5; expected int"),
    "precision": ({"mixed_precision": "fp16"}, "mixed_precision is 'fp16'; expected one of .'no', 'bf16'"),
    "tracker": ({"tracker": "wandb"}, "tracker: got 'wandb'; expected one that is installed"),
    "option": ({"processor": 1}, "unexpected keyword argument 'processor'"),
    "student": ({"student": nn.Linear(2, 2)}, "student: got Linear; expected a causal language"),
    "quantized": (quantized, "student: 'model.*weight' is a WeightQBytesTensor of torch.float32; expected float"),
    "save_dtype": ({"save_dtype": torch.int8}, "save_dtype is 'int8'; expected one of .'float32'"),
    "frozen": (lambda lab: {"student": lab.student().requires_grad_(False)}, "'all'. is frozen"),
    "unconverted": (
        lambda lab: {"student": lab.teacher(), "stages": TRANSFER},
        "student: has no MHLA layer, which stage 'transfer' trains",
    ),
    "no teacher": ({"stages": LOGITS}, "teacher: None was given, and stage 'logits'"),
    "teacher": ({"teacher": "gpt2"}, "teacher: got str; expected a causal language model"),
    "teacher's vocabulary": (
        lambda lab: {"stages": LOGITS, "teacher": lab.teacher(vocab_size=72)},
        "teacher: its vocab_size is 72, and the student's is 64",
    ),
    "fewer layers": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.teacher(num_hidden_layers=1)},
        "teacher: has no module 'model.layers.1.self_attn'",
    ),
    "shared weights": (shared, "teacher: shares 'model.embed_tokens.weight' with the student"),
    "too long": ({"stages": LONG}, "seq_len: stage 'a' has 256, and the student knows 128 positions"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_written(lab, tmp_path, monkeypatch, case):
    values, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    values = {"teacher": None, "stages": LM, "data": lab.tokens(), "progress": False} | (
        values(lab) if callable(values) else values
    )
    student = values.pop("student", None) or lab.student()
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        distill(student, values.pop("teacher"), out=tmp_path / "out", **values)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["accelerate", "datasets"])
def test_missing_extra_is_named_with_its_command(lab, tmp_path, monkeypatch, missing):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == missing:
            raise ImportError(name)
        return real(name, *arguments, **options)

    (tmp_path / "t.jsonl").write_text('{"input_ids": [1]}\n')
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'mhla_hf\[train\]'"):
        distill(lab.student(), out=tmp_path / "out", stages=LM, data=tmp_path / "t.jsonl")
