"""Saved models in the hands of someone who never installed mhla_hf: one other process, offline, without triton."""

import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.elsewhere import check_elsewhere
from tools.small_encoders import softmax_encoder
from tools.small_models import MODELS, refused, tokens
from tools.small_scores import small_tokenizer
from tools.small_towers import converted_tower, images, small_classifier
from transformers import ByT5Tokenizer

from mhla_hf.checkpoints.save import list_saved_files, read_sentence_files, save_model
from mhla_hf.cli.main import main
from mhla_hf.hub.facts import Person
from mhla_hf.hub.folder_checks import stage_folder

WITHOUT_TRUST = """
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer
for name, ids in json.load(open("ids.json")).items():  # without an answer to the question whether its code is trusted
    assert AutoTokenizer.from_pretrained(f"saved/{name}")("a b c")["input_ids"] == ids
try:
    AutoModelForCausalLM.from_pretrained("saved/scratch", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
else:
    raise SystemExit("code was run that nobody trusted")
assert not os.path.exists("hf/modules/transformers_modules")
assert AutoImageProcessor.from_pretrained("saved/classifier").size["height"] == 32
model = AutoModelForCausalLM.from_pretrained("saved/scratch", trust_remote_code=True)
assert type(AutoConfig.from_pretrained("saved/scratch", trust_remote_code=True)) is type(model.config)
"""
LANGUAGE = ["scratch", "llama-all", "llama-window", "llama-heads", "qwen3-hybrid", "mixtral-hybrid"]
TOWERS = {"ViTModel": {"layers": [1]}, "DINOv3ViTModel": {"cpe": 3}, "CLIPVisionModelWithProjection": {}}


@torch.no_grad()
def test_bit_equal_elsewhere_and_saved_again(tmp_path):
    models = {name: MODELS[name]() for name in LANGUAGE}
    models["classifier"] = small_classifier(num_channels=3)
    models["classifier_in_stages"] = small_classifier("stages")
    models |= {name: converted_tower(name, **settings) for name, settings in TOWERS.items()}
    tokenizers, expected = {"scratch": small_tokenizer(), "llama-all": ByT5Tokenizer()}, {}
    inputs = {"input_ids": tokens(2, 29), "pixel_values": images(2)}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "saved" / name)
        if name in LANGUAGE:
            key, ids = f"saved/{name}-AutoModelForCausalLM", inputs["input_ids"]
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
            expected |= {key: model(ids).logits, f"{key} text": model.generate(ids, **options)}
        else:
            auto = "AutoModelForImageClassification" if "lassif" in name else "AutoModel"
            expected[f"saved/{name}-{auto}"] = model(inputs["pixel_values"])[0]
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / "saved" / name)
    ids = {name: tokenizer("a b c")["input_ids"] for name, tokenizer in tokenizers.items()}
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    repository, commit = tmp_path / "hf/hub/models--somebody--llama", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tmp_path / "saved/llama-all", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    expected["somebody/llama-AutoModelForCausalLM"] = expected["saved/llama-all-AutoModelForCausalLM"]
    printed = check_elsewhere(tmp_path, inputs, expected, first=WITHOUT_TRUST)
    assert "You are using a model of type" not in printed
    for name in models:
        for file in ("model.safetensors", "modeling_mhla.py", "config.json"):
            first, again = (tmp_path / folder / name / file for folder in ("saved", "again/saved"))
            assert first.read_bytes() == again.read_bytes(), (name, file)


@pytest.mark.parametrize("most", [20_000, 150_000], ids=["the source", "the weights"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, most):
    """A limit on the size of files stands for a full disk."""
    model, before = MODELS["llama-all"](), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with refused("/out', expected a folder that can be written (", "File too large"):
            save_model(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


KINDS = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
SENTENCE = {
    "modules.json": [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(KINDS.items())
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_cls_token": True},
    "2_Dense/config.json": {"in_features": 32, "activation_function": "torch.nn.modules.activation.Tanh"},
    "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "query: "}, "similarity_fn_name": "cosine"},
}


@pytest.fixture
def sentence_encoder(tmp_path):
    """The folder of a small encoder that sentence-transformers saved."""
    folder = tmp_path / "encoder"
    softmax_encoder("bert", vocab_size=400).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    for path, content in SENTENCE.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(content))
    save_file({"linear.weight": torch.ones(2, 32)}, folder / "2_Dense/model.safetensors")
    return folder


def test_an_encoder_keeps_the_modules_of_sentence_transformers_and_is_shared_with_them(
    sentence_encoder, tmp_path, monkeypatch, capsys, caplog
):
    odd = {"max_seq_length": 16, "do_lower_case": False, "model_args": {"code_revision": "evil"}}
    (sentence_encoder / "sentence_bert_config.json").write_text(json.dumps(odd))
    (sentence_encoder / "1_Pooling/pooling.py").write_text("")
    out = tmp_path / "out"
    assert main(["convert", str(sentence_encoder), str(out)]) == 0
    assert {path: json.loads((out / path).read_text()) for path in SENTENCE} == SENTENCE
    assert load_file(out / "2_Dense/model.safetensors")["linear.weight"].shape == (2, 32)
    assert not [*out.rglob("pooling.py")] and "sentence" not in caplog.text
    assert main(["info", str(out)]) == 0 and capsys.readouterr().out.endswith("\nscore:      none\n")
    assert {*list_saved_files(out)} == {file for file in out.rglob("*") if file.is_file()}
    monkeypatch.setattr("mhla_hf.hub.folder_checks.check_isolated_load", lambda *given: None)
    person = Person("tester/encoder", None, "mit")
    assert stage_folder(out, tmp_path / "staged", person=person) == ()
    assert (tmp_path / "staged/1_Pooling/config.json").is_file()
    (out / "sentence_bert_config.json").write_text(json.dumps(odd))
    with refused("sentence_bert_config.json: got the key 'model_args', expected only "):
        stage_folder(out, tmp_path / "again", person=person)
    assert main(["convert", str(sentence_encoder), str(out), "--overwrite"]) == 0


FOREIGN = [  # file, what is in it, what is there instead, what is said of it
    ("modules.json", "sentence_transformers.models.Pooling", "evil.Pooling", "'evil.Pooling' in '1_Pool"),
    ("modules.json", "1_Pooling", "../secret", "in '../secret', expected a folder such as 1_Pooling"),
    ("2_Dense/config.json", "torch.nn.modules", "os", "the activation 'os.activation.Tanh', expected one"),
]


@pytest.mark.parametrize(("file", "old", "new", "said"), FOREIGN)
def test_modules_that_may_be_code_are_not_kept_and_that_is_said(
    sentence_encoder, tmp_path, caplog, file, old, new, said
):
    (sentence_encoder / file).write_text((sentence_encoder / file).read_text().replace(old, new))
    with refused(said):
        read_sentence_files(sentence_encoder)
    assert main(["convert", str(sentence_encoder), str(tmp_path / "out")]) == 0
    assert "the modules of sentence-transformers are not kept: model" in caplog.text
    assert not (tmp_path / "out/modules.json").exists() and not (tmp_path / "out/1_Pooling").exists()
