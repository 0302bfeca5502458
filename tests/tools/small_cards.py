"""Folders of models with made-up scores, training, and speed, for the tests of cards."""

import dataclasses
import json

import torch
from safetensors.torch import save_file

from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.records import Results
from mhla_hf.nn.settings import MHLASettings
from tools.small_scores import make_result

MADE_ON = {"hardware": "Some CPU, 2 cores, 1 thread", "versions": {"torch": "2.13.0", "transformers": "5.23.0"}}
SIZES = {"batch_size": 8, "seq_len": 512, "tokens": 614400, "seconds": 83.21, "first_loss": 1.25, "last_loss": 0.0625}
ONE_LOSS = {"first_loss": 0.4239, "last_loss": 0.4239}
STAGES = [
    {"name": "transfer", "loss": "transfer", "trainable": "mhla", "lr": 0.01, "steps": 150, **SIZES, **ONE_LOSS},
    {"name": "match", "loss": "logits", "trainable": "all", "lr": 0.001, "lr_mhla": 0.003, "steps": 300, **SIZES},
]
TRAIN = {
    "format_version": 1, "teacher": "teacher", "seed": 3, "stages": STAGES, "tokens": 1843200, "seconds": 250.5,
    "data": {"kind": "tokens", "name": "/somewhere/private/topics.txt"}, "mixed_precision": "no", "processes": 1,
    "command": "mhla-hf distill student --teacher teacher", **MADE_ON,
}  # fmt: skip
SPEED = {"forward_ms_2048": (90.0, 30.0), "forward_ms_512": (8.0, 10.0)}  # metric: (teacher, model)
SPEED |= {"decode_ms_512": (2.0, 3.0), "cache_mib_512": (8.0, 2.0)}


def result(task, metric, value, stderr, higher_is_better, **changes):
    fields = {"task": task, "metric": metric, "value": value, "stderr": stderr, "higher_is_better": higher_is_better}
    versions = {"lm_eval": "0.4.13", "torch": "2.13.0"}
    return make_result(**{**fields, **MADE_ON, "versions": versions, "samples": 200, "seed": 1234, **changes})


def times(column, speed=SPEED):
    """Return the records of speed of the teacher (column 0) or of the model (column 1)."""
    return [result("speed", metric, values[column], None, False, seed=5) for metric, values in speed.items()]


def scores(bits, recall):
    return [
        result("topics_bpb", "bits_per_byte", bits, None, False),
        result("topics_cloze", "acc", 0.625, 0.0342, True),
        result("topics_recall", "acc", recall, 0.02, True),
    ]


def save_model(folder, records, *, layers=(1, 2)):
    """Write a folder with a config, weights, and `records`."""
    folder.mkdir()
    config = {"model_type": "mhla_llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_mhla.MHLALlamaForCausalLM"}}
    config |= {"architectures": ["MHLALlamaForCausalLM"], "mhla": MHLASettings(layers=list(layers)).to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.full((2,), records[0].value)}, folder / "model.safetensors")
    fingerprint = fingerprint_folder(folder)
    Results([dataclasses.replace(record, fingerprint=fingerprint) for record in records]).write(folder)
    return folder
