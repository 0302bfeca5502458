"""What distill refuses: one sentence that names the argument, and nothing written."""

import builtins
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from optimum.quanto import freeze, qint8, quantize
from torch import nn

from mhla_hf.training import run_folder
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


def renamed(lab):
    teacher = lab.teacher()
    teacher.model.layers[1].attention = teacher.model.layers[1].self_attn
    del teacher.model.layers[1].self_attn
    return teacher


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
    "large seed": (lambda lab: {"seed": 2**32}, ValueError, "seed: got 4294967296; expected a whole number from 0 to"),
    "seed text": (lambda lab: {"seed": "0"}, ValueError, "seed: got '0'; expected a whole number"),
    "save_every": (lambda lab: {"save_every": 0}, ValueError, "save_every: got 0; expected a whole number"),
    "log_every": (lambda lab: {"log_every": 1.5}, ValueError, "log_every: got 1.5; expected a whole number"),
    "precision": (lambda lab: {"mixed_precision": "fp16"}, ValueError, "mixed_precision: got 'fp16'; expected 'no'"),
    "tracker": (lambda lab: {"tracker": "ledger"}, ValueError, "tracker: got 'ledger'; expected one of"),
    "tracker missing": (lambda lab: {"tracker": "wandb"}, ImportError, "tracker: wandb is missing: pip install wandb"),
    "student": (lambda lab: {"student": nn.Linear(2, 2)}, TypeError, "student: got Linear; expected a causal language"),
    "student name": (lambda lab: {"student": "gpt2"}, TypeError, "student: got str; expected a causal language"),
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
        "save_dtype: got 'int8'; expected one of float16",
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
    "teacher's layers": (
        lambda lab: {"stages": TRANSFER, "teacher": renamed(lab)},
        ValueError,
        "teacher: has no module 'model.layers.1.self_attn'",
    ),
    "fewer layers": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.teacher(num_hidden_layers=1)},
        ValueError,
        "teacher: has no module 'model.layers.1.self_attn'",
    ),
    "teacher's width": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.teacher(hidden_size=48)},
        ValueError,
        "teacher: has hidden size 48, and the student 32",
    ),
    "converted teacher": (
        lambda lab: {"stages": TRANSFER, "teacher": lab.student()},
        ValueError,
        "is an MHLA layer itself; expected the softmax original",
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


def test_out_is_a_file(lab, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match=r"out: '.*out' is a file"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=LM)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_out_holds_other_files(lab, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files; expected a new or an empty folder"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=LM)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "letter.txt"]


def test_out_may_be_an_empty_folder(lab, tmp_path):
    (tmp_path / "out").mkdir()
    lab.distill(tmp_path / "out", None, lab.student(), stages=LM)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("damage", ["", "[]", "{", "{}"])
def test_damaged_record(lab, tmp_path, damage):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.json").write_text(damage)
    with pytest.raises(ValueError, match="out: ") as caught:
        lab.distill(tmp_path / "out", None, lab.student(), stages=LM)
    assert "\n" not in str(caught.value)


def test_read_only_folder(lab, tmp_path):
    place = Path("/proc/mhla_hf") if os.access("/proc", os.R_OK) and os.geteuid() == 0 else tmp_path / "locked"
    if place.parent == tmp_path:
        place.mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"out: '.*' cannot be written") as caught:
        lab.distill(place / "out", None, lab.student(), stages=LM)
    assert "\n" not in str(caught.value)
    assert not place.exists() or not list(place.iterdir())


def test_disk_too_small(lab, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match=r"needs about 1 MB .* and 0 MB are free"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=LM)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [2_000, 60_000, 110_000])
def test_disk_full_on_the_way(lab, tmp_path, monkeypatch, limit):
    """A limit on the size of files stands for a full disk: the record, the weights or the moments do not fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    stages = [Stage("lm", "lm", 4, 1e-3, **STAGE)]
    student = lab.student()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=r"out: .* of '.*out' cannot be written \(.*\); nothing was kept") as caught:
            lab.distill(tmp_path / "out", None, student, stages=stages)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*tmp-*"))
    fresh = lab.student()
    lab.distill(tmp_path / "out", None, fresh, stages=stages)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_last_whole_state_is_named_when_the_disk_fills(lab, tmp_path, monkeypatch):
    real = run_folder.RunFolder.aside
    monkeypatch.setattr(run_folder.RunFolder, "aside", lambda self, target: real(self, target))
    with monkeypatch.context() as later:
        count = []

        def full(self, target):
            count.append(target)
            if len(count) == 3:
                raise OSError(28, "No space left on device")
            return real(self, target)

        later.setattr(run_folder.RunFolder, "aside", full)
        with pytest.raises(OSError, match=r"No space left on device.*the state in '.*step-000000002' is whole"):
            lab.distill(tmp_path / "out", None, lab.student(), stages=LM, save_every=1)
    lab.distill(tmp_path / "out", None, lab.student(), stages=LM, save_every=1)
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("when", ["logging", "saving"])
def test_numbers_that_are_not_finite(lab, tmp_path, when):
    stages = [Stage("lm", "lm", 40, 1e30, max_grad_norm=1.0 if when == "saving" else 0.0, **STAGE)]
    every = {"log_every": 5, "save_every": 40} if when == "logging" else {"log_every": 40, "save_every": 5}
    with pytest.raises(ValueError, match=r"lr: with 1e\+30 stage 'lm' left the finite numbers .*smaller lr is needed"):
        lab.distill(tmp_path / "out", None, lab.student(), stages=stages, **every)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("out.state/step-*"))
