"""Saved models with all that a push needs, and folders with made-up scores, training, and speed for cards."""

import dataclasses
import hashlib
import json

import torch
from safetensors.torch import load_file, save_file

import mhla_hf
from mhla_hf.checkpoints.bundle import check_bundle
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import write_card
from mhla_hf.nn.settings import MHLASettings
from tools.small_scores import make_result, save_model

CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\n---\n\n# A model\n"


def small_scratch(**changes):
    """Return a from-scratch model with a vocabulary of 400 tokens."""
    sizes = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return mhla_hf.MHLAForCausalLM(mhla_hf.MHLAConfig.preset("tiny", num_attention_heads=2, **sizes, **changes))


def score(folder, tasks=("heldout_recall", "heldout_generation")):
    """Write results.json as if the model in `folder` had been evaluated on `tasks`, and return the folder."""
    fingerprint = fingerprint_folder(folder)
    records = [make_result(task=task, fingerprint=fingerprint, model="mhla") for task in tasks]
    Results(records).write(folder)
    return folder


def save_carded(folder, model):
    """Save a model with its tokenizer, scores, and the card that `write_card` makes of them."""
    write_card(score(save_model(folder, model)), name="tester/mhla", license="apache-2.0")


def forge(folder):
    """Add code to the source of a saved model, and replace its hash by one that fits."""
    source = folder / "modeling_mhla.py"
    text = source.read_text() + "print('mine')\n"
    original, lines = check_bundle(source.read_text())["sha256"], ("\nsha256: {}\n", '\nNAMESPACE = "{}"\n')
    for line in lines:
        text = text.replace(line.format(original), line.format("package"))
    forged = hashlib.sha256(text.encode()).hexdigest()[:12]
    for line in lines:
        text = text.replace(line.format("package"), line.format(forged), 1)
    assert check_bundle(text)["sha256"] == forged
    source.write_text(text)


def spoil(value, name="model.norm.weight"):
    """Return a function that damages the model in a folder."""

    def change_weights(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name].view(-1)[-1] = value
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change_weights


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


def save_scored(folder, records, *, layers=(1, 2)):
    """Write a folder with a config, weights, and `records`."""
    folder.mkdir()
    config = {"model_type": "mhla_llama", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_mhla.MHLALlamaForCausalLM"}, "dtype": "bfloat16"}
    config |= {"architectures": ["MHLALlamaForCausalLM"], "mhla": MHLASettings(layers=list(layers)).to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.full((2,), records[0].value)}, folder / "model.safetensors")
    fingerprint = fingerprint_folder(folder)
    Results([dataclasses.replace(record, fingerprint=fingerprint) for record in records]).write(folder)
    return folder
