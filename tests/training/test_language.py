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


def frozen(model):
    return model.requires_grad_(False)


def on_meta(lab):
    with torch.device("meta"):
        return lab.teacher()


def quantized(lab):
    student = lab.student()
    quantize(student.model.layers, weights=qint8)
    freeze(student)
    return student


def integers(lab):
    student = lab.student()
    student.model.norm.weight = nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    return student


def shared(lab):
    teacher = lab.teacher()
    student = lab.student(teacher)
    student.model.embed_tokens.weight = teacher.model.embed_tokens.weight
    return student, teacher


CASES = {
    "no stages": (lambda lab: {"stages": None}, ValueError, "stages: expected either stages or recipe"),
    "both": (lambda lab: {"recipe": "r.yaml"}, ValueError, "stages: expected either stages or recipe"),
    "no recipe": (lambda lab: {"stages": None, "recipe": "none.yaml"}, ValueError, "recipe: 'none.yaml' is not a file"),
    "no data": (lambda lab: {"data": None}, ValueError, "data: None was given"),
    "no file": (lambda lab: {"data": "none.txt"}, ValueError, "data: there is no file or folder 'none.txt'"),
    "short": (lambda lab: {"data": lab.tokens(30)}, ValueError, "30 tokens, which is shorter than one sequence"),
    "short for the second stage": (
        lambda lab: {"data": lab.tokens(60), "stages": [*LM, Stage("b", "lm", 1, 1e-3, seq_len=64)]},
        ValueError,
        "60 tokens, which is shorter than one sequence .seq_len 64.",
    ),
    "vocabulary": (
        lambda lab: {"data": torch.arange(90)},
        ValueError,
        "gives token 89; the model knows tokens 0 to 63",
    ),
    "seed": (lambda lab: {"seed": -1}, ValueError, "seed: got -1; expected a whole number"),
    "save_every": (lambda lab: {"save_every": 0}, ValueError, "save_every is 0; expected a whole number"),
    "log_every": (lambda lab: {"log_every": 1.5}, ValueError, "log_every is 1.5; expected int"),
    "precision": (
        lambda lab: {"mixed_precision": "fp16"},
        ValueError,
        "mixed_precision is 'fp16'; expected one of .'no', 'bf16'",
    ),
    "tracker": (lambda lab: {"tracker": "wandb"}, ValueError, "tracker: got 'wandb'; expected one that is installed"),
    "student": (lambda lab: {"student": nn.Linear(2, 2)}, TypeError, "student: got Linear; expected a causal language"),
    "student on meta": (
        lambda lab: {"student": on_meta(lab)},
        ValueError,
        "student: its weights are on the meta device",
    ),
    "quantized": (
        lambda lab: {"student": quantized(lab)},
        ValueError,
        "student: 'model.*weight' is a WeightQBytesTensor of torch.float32; expected float weights",
    ),
    "integers": (
        lambda lab: {"student": integers(lab)},
        ValueError,
        "student: 'model.norm.weight' is a Tensor of torch.int8; expected float weights, so load it without quantization",
    ),
    "save_dtype": (
        lambda lab: {"save_dtype": torch.int8},
        ValueError,
        "save_dtype is 'int8'; expected one of .'float32'",
    ),
    "frozen": (lambda lab: {"student": frozen(lab.student())}, ValueError, "'all'. is frozen"),
    "unconverted": (
        lambda lab: {"student": lab.teacher(), "stages": TRANSFER},
        ValueError,
        "student: has no MHLA layer, which stage 'transfer' trains",
    ),
    "no teacher": (lambda lab: {"stages": LOGITS}, ValueError, "teacher: None was given, and stage 'logits'"),
    "teacher": (lambda lab: {"teacher": "gpt2"}, TypeError, "teacher: got str; expected a causal language model"),
    "teacher's vocabulary": (
        lambda lab: {"stages": LOGITS, "teacher": lab.teacher(vocab_size=72)},
        ValueError,
        "teacher: has a vocabulary of 72, and the student one of 64",
    ),
    "fewer layers": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.teacher(num_hidden_layers=1)},
        ValueError,
        "teacher: has no module 'model.layers.1.self_attn'",
    ),
    "teacher's width": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.teacher(hidden_size=48)},
        ValueError,
        "teacher: has a hidden size of 48, and the student one of 32",
    ),
    "shared weights": (
        lambda lab: dict(zip(("student", "teacher"), shared(lab), strict=True)) | {"stages": LOGITS},
        ValueError,
        "teacher: shares 'model.embed_tokens.weight' with the student",
    ),
    "too long": (
        lambda lab: {"stages": [Stage("a", "lm", 1, 1e-3, seq_len=256)], "data": lab.tokens()},
        ValueError,
        "seq_len: stage 'a' has 256, and the student knows 128 positions",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_and_nothing_written(lab, tmp_path, monkeypatch, case):
    make, kind, words = CASES[case]
    monkeypatch.chdir(tmp_path)
    values = {"teacher": None, "stages": LM, "data": lab.tokens(), "progress": False} | make(lab)
    student = values.pop("student", None) or lab.student()
    with pytest.raises(kind, match=words) as caught:
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
