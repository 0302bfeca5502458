"""Pipelines and classifiers are loaded as language models are: one commit, no pickle, nothing missing."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import hf_api
from safetensors.torch import load_file, save_file
from tools.small_models import refused
from tools.small_scores import save_llama, small_tokenizer
from tools.tiny_pipelines import dit_pipeline, sana_pipeline
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from mhla_hf.checkpoints.isolated_load import check_isolated_load
from mhla_hf.checkpoints.load import load_classifier, load_config, load_language_model, load_pipeline

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    dit_pipeline().save_pretrained(folder / "pipeline")
    ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4)).save_pretrained(folder / "classifier")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder / "classifier")
    return folder


def load(kind, model):
    return (load_classifier if kind == "classifier" else load_pipeline)(model, dtype="float32", device="cpu")


def spoil(folder, kind, how):
    file = next((folder if kind == "classifier" else folder / "transformer").glob("*.safetensors"))
    weights = load_file(file)
    if how == "pickled":
        torch.save(weights, file.with_name("pytorch_model.bin" if kind == "classifier" else f"{file.stem}.bin"))
        file.unlink()
    elif how == "one missing":
        weights.pop(sorted(weights)[0])
        save_file(weights, file, metadata={"format": "pt"})
    elif how == "outside":
        index = {"metadata": {}, "weight_map": {"a": "../secret.safetensors"}}
        (file.parent / f"{file.name}.index.json").write_text(json.dumps(index))


SAID = {
    "pickled": "no file named|has no .safetensors file",
    "one missing": "lacks 1 of its weights, such as ",
    "outside": "got the shard '../secret.safetensors', expected a file beside the index",
}


@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize("kind", ["pipeline", "classifier"])
def test_a_damaged_folder_gets_one_sentence(saved, tmp_path, kind, how):
    folder = shutil.copytree(saved / kind, tmp_path / "model")
    spoil(folder, kind, how)
    with pytest.raises(ValueError) as caught:
        load(kind, folder)
    text = str(caught.value)
    assert any(part in text for part in SAID[how].split("|")) and "\n" not in text, text


def test_a_text_encoder_that_lacks_a_weight_is_not_filled_at_random(tmp_path):
    """transformers only warns of it, inside diffusers too."""
    sana_pipeline().save_pretrained(tmp_path / "model")
    assert load_pipeline(tmp_path / "model", dtype="float32", device="cpu").text_encoder.dtype == torch.float32
    (file,) = (tmp_path / "model" / "text_encoder").glob("*.safetensors")
    weights = load_file(file)
    name = re.escape(sorted(weights)[0])
    del weights[sorted(weights)[0]]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 of its weights, such as 'text_encoder.{name}'"):
        load_pipeline(tmp_path / "model", dtype="float32", device="cpu")
    with pytest.raises(ValueError, match=f"a model that lacks the weight 'text_encoder.{name}'"):
        check_isolated_load(tmp_path / "model", "pipeline")


DAMAGED = {  # config.json, and what is said of it
    "[1, 2]": "config.json: got list, expected a JSON object",
    '{"model_type": ["llama"]}': "model_type in config.json: got ['llama'], expected a name",
    '{"model_type": "llama", "architectures": "Llama"}': "got 'Llama', expected a list of names",
    '{"model_type": "llama", "rms_norm_eps": "x"}': "field 'rms_norm_eps'",
    '{"model_type": "llama", "num_hidden_layers": 10000000}': "num_hidden_layers in config.json: got 10000000, expected at",
    '{"model_type": "gpt2", "n_layer": 10000000}': "n_layer in config.json: got 10000000, expected at most 10000",
    '{"model_type": "mhla_llama", "mhla": [1]}': "mhla: got list, expected a dictionary of settings",
    '{"model_type": "mhla_llama", "mhla": {"layers": [99]}}': "layers: got index 99, expected at most",
}


@pytest.mark.parametrize(("config", "said"), DAMAGED.items())
def test_a_damaged_configuration_is_one_sentence_before_layers_are_made(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    save_file({}, tmp_path / "model.safetensors")
    small_tokenizer().save_pretrained(tmp_path)
    for use in (load_config, load_language_model):
        with refused(said):
            use(tmp_path)


def test_all_files_come_from_one_commit_of_the_hub(saved, hub, monkeypatch):
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)  # diffusers asks through this one
    for kind in ("pipeline", "classifier"):
        files = {p.relative_to(saved / kind).as_posix(): p for p in (saved / kind).rglob("*") if p.is_file()}
        files = {path: file.read_bytes() for path, file in files.items()}
        hub.put(f"tester/{kind}", files)
        commit = hub.repos[f"tester/{kind}"].refs["refs/heads/main"]
        load(kind, f"tester/{kind}")
        asked = [path for _, path, _ in hub.log if re.match(rf"/tester/{kind}/resolve/", path)]
        before = {path.rpartition("/")[2] for path in asked if f"/resolve/{commit}/" not in path}
        index = "model_index.json" if kind == "pipeline" else "config.json"  # which finds the commit
        assert len(asked) > 3 and before == {index}
    with refused("model: got 'tester/classifier', expected a pipeline that can be loaded (", "model_index"):
        load_pipeline("tester/classifier", dtype="float32", device="cpu")


def test_a_model_without_a_tokenizer_says_where_to_put_one_or_takes_another(tmp_path):
    mute, other = save_llama(tmp_path / "mute"), save_llama(tmp_path / "other")
    for file in mute.glob("tokenizer*"):
        file.unlink()
    said = re.escape(f"can be loaded (it has no tokenizer; save one there: tokenizer.save_pretrained({str(mute)!r})).")
    with pytest.raises(ValueError, match=f"{said}$"):
        load_language_model(mute)
    assert len(load_language_model(mute, tokenizer=other)[1]) == 400
