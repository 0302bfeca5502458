"""Records, training and speed of made-up models, and their folders, for the tests of cards."""

import json

import torch
from safetensors.torch import save_file

from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.records import Result, Results
from mhla_hf.nn.settings import MHLASettings

STAGE = {
    "loss": "logits",
    "trainable": "all",
    "steps": 150,
    "batch_size": 8,
    "seq_len": 512,
    "lr": 0.001,
    "lr_mhla": None,
    "tokens": 614400,
    "seconds": 83.21,
    "first_loss": 1.25,
    "last_loss": 0.0625,
}
TRAIN = {
    "format_version": 1,
    "teacher": "teacher",
    "seed": 3,
    "stages": [
        {**STAGE, "name": "transfer", "loss": "transfer", "trainable": "mhla", "lr": 0.01},
        {**STAGE, "name": "match", "lr_mhla": 0.003, "steps": 300},
    ],
    "tokens": 1843200,
    "seconds": 250.5,
    "data": {"kind": "tokens", "name": "/somewhere/private/topics.txt"},
    "mixed_precision": "no",
    "processes": 1,
    "hardware": "Some CPU, 2 cores, 1 thread",
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "command": "mhla-hf distill student --teacher teacher",
}
SPEED = {
    "hardware": "Some CPU, 2 cores, 1 thread",
    "versions": {"torch": "2.13.0"},
    "seed": 5,
    "command": "mhla-hf demo --quick",
    "rows": [
        {"what": "forward", "length": 2048, "softmax_ms": 90.0, "mhla_ms": 30.0},
        {"what": "forward", "length": 512, "softmax_ms": 8.0, "mhla_ms": 10.0},
        {"what": "decode", "length": 512, "softmax_ms": 2.0, "mhla_ms": 3.0},
    ],
}


def result(task, metric, value, stderr, better, **changes):
    fields = {
        "task": task,
        "metric": metric,
        "value": value,
        "stderr": stderr,
        "higher_is_better": better,
        "shots": 0,
        "samples": 200,
        "limit": None,
        "task_version": "1",
        "task_hash": "abc",
        "model": "out/mhla",
        "revision": None,
        "fingerprint": "tensors:1",
        "versions": {"lm_eval": "0.4.13", "torch": "2.13.0"},
        "commit": "deadbeef",
        "dtype": "float32",
        "hardware": "Some CPU, 2 cores, 1 thread",
        "seed": 1234,
        "command": "mhla-hf evaluate out/mhla --tasks topics_bpb",
        "date": "2026-01-01T00:00:00+00:00",
        "seconds": 12.0,
    }
    return Result(**{**fields, **changes})


def scores(bits, recall):
    return [
        result("topics_bpb", "bits_per_byte", bits, None, False),
        result("topics_cloze", "acc", 0.625, 0.0342, True),
        result("topics_recall", "acc", recall, 0.02, True),
    ]


def save_model(folder, records, *, layers=(1, 2), readme=None):
    folder.mkdir()
    mhla = MHLASettings(layers=list(layers)).to_dict()
    config = {
        "model_type": "mhla_llama",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "mhla": mhla,
        "auto_map": {"AutoModelForCausalLM": "modeling_mhla.MHLALlamaForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.full((2,), records[0].value)}, folder / "model.safetensors")
    own = [Result(**{**vars(record), "fingerprint": fingerprint_folder(folder)}) for record in records]
    Results(own).write(folder)
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder
