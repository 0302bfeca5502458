"""The fingerprint of a model follows what decides its numbers, and nothing else; the machine is described."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.small_scores import make_result, save_llama, small_llama

from mhla_hf.checkpoints.fingerprint import fingerprint_folder, fingerprint_model
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.evaluation.records import Results


def test_the_fingerprint_follows_what_decides_the_numbers(tmp_path):
    folder = save_llama(tmp_path / "model")
    first = fingerprint_folder(folder)
    assert re.fullmatch(r"files:[0-9a-f]{32}", first)
    (folder / "README.md").write_text("a card")
    Results([make_result()]).write(folder)
    (folder / "train.json").write_text("{}")
    assert fingerprint_folder(folder) == first
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    second = fingerprint_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    third = fingerprint_folder(folder)
    (folder / "modeling_mhla.py").write_text("# source")
    assert len({first, second, third, fingerprint_folder(folder)}) == 4
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="got a folder without weights"):
        fingerprint_folder(folder)


def test_the_fingerprint_of_a_loaded_model_follows_its_weights():
    model = small_llama()
    first = fingerprint_model(model)
    assert first == fingerprint_model(small_llama())
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    assert fingerprint_model(model) != first
    assert fingerprint_model(small_llama().bfloat16()) != first


def test_the_machine_is_described():
    run = describe_run("a command")
    assert re.search(r", \d+ cores?, 1 thread$", run["hardware"]) and run["command"] == "a command"
    assert {"mhla_hf", "torch", "transformers", "python", "lm_eval"} <= set(run["versions"])
    assert re.fullmatch(r"[0-9a-f]{40}(\+changed)?|mhla_hf .+", run["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run["date"])
