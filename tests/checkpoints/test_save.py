"""Saved models in the hands of someone who never installed mhla_hf: one other process, offline, without triton."""

import json
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.elsewhere import run_elsewhere
from tools.small_encoders import softmax_encoder
from tools.small_models import MODELS, refused, tokens
from tools.small_scores import small_tokenizer
from tools.small_towers import converted_tower, images, output_of, small_classifier
from transformers import ByT5Tokenizer

from mhla_hf.checkpoints.save import list_saved_files, read_sentence_files, save_model
from mhla_hf.cli.main import main
from mhla_hf.hub.facts import Person
from mhla_hf.hub.folder_checks import stage_folder

VISITOR = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
from transformers import AutoTokenizer
torch.set_num_threads(1)
given, out, report = load_file("given.safetensors"), {}, {}
for name in ("scratch", "llama-all"):  # without an answer to the question whether its code is trusted
    report[name] = AutoTokenizer.from_pretrained(f"saved/{name}")("a b c")["input_ids"]
try:
    AutoModelForCausalLM.from_pretrained("saved/scratch", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
else:
    raise SystemExit("code was run that nobody trusted")
assert not os.path.exists("hf/modules/transformers_modules")
for name in sorted(os.listdir("saved")):
    language = not given[name].is_floating_point()
    image = AutoModelForImageClassification if "lassif" in name else AutoModel
    auto = AutoModelForCausalLM if language else image
    model, info = auto.from_pretrained(f"saved/{name}", trust_remote_code=True, output_loading_info=True)
    with torch.no_grad():
        found = model(given[name])
    out[name] = found.logits if hasattr(found, "logits") else found.last_hidden_state
    if language:
        options = {"attention_mask": torch.ones_like(given[name]), "max_new_tokens": 6, "do_sample": False}
        out[f"{name}.text"] = model.generate(given[name], **options)
    report[f"saved {name}"] = [*info["missing_keys"], *info["unexpected_keys"], type(model).__module__.split(".")[0]]
    if name == "scratch":
        assert type(AutoConfig.from_pretrained("saved/scratch", trust_remote_code=True)) is type(model.config)
    model.save_pretrained(f"again/{name}")
report["hub"] = type(AutoModelForCausalLM.from_pretrained("somebody/llama", trust_remote_code=True)).__name__
report["loaded"] = [m for m in ("mhla_hf", "triton", "diffusers", "accelerate") if sys.modules.get(m)]
report["processor"] = AutoImageProcessor.from_pretrained("saved/classifier").size["height"]
save_file({k: v.contiguous() for k, v in out.items()}, "out.safetensors")
print("", json.dumps(report), sep="\\n")  # behind a question that nobody answered
"""
LANGUAGE = ["scratch", "llama-all", "llama-window", "llama-heads", "qwen3-hybrid", "mixtral-hybrid"]
TOWERS = {"ViTModel": {"layers": [1]}, "DINOv3ViTModel": {"cpe": 3}, "CLIPVisionModelWithProjection": {}}


@torch.no_grad()
def test_bit_equal_elsewhere_and_saved_again(tmp_path):
    models = {name: MODELS[name]() for name in LANGUAGE}
    models["classifier"] = small_classifier(num_channels=3)
    models["classifier_in_stages"] = small_classifier("stages")
    models |= {name: converted_tower(name, **settings) for name, settings in TOWERS.items()}
    tokenizers = {"scratch": small_tokenizer(), "llama-all": ByT5Tokenizer()}
    given, expected = {}, {}
    for name, model in models.items():
        given[name] = tokens(2, 29) if name in LANGUAGE else images(2, channels=model.config.num_channels)
        expected[name] = output_of(model, given[name])
        model.save_pretrained(tmp_path / "saved" / name)
        if name in tokenizers:
            tokenizers[name].save_pretrained(tmp_path / "saved" / name)
    save_file(given, tmp_path / "given.safetensors")
    repository, commit = tmp_path / "hf/hub/models--somebody--llama", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tmp_path / "saved/llama-all", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    report, printed = run_elsewhere(VISITOR, tmp_path)
    assert "You are using a model of type" not in printed
    out = load_file(tmp_path / "out.safetensors")
    assert (report["loaded"], report["processor"], report["hub"]) == ([], 32, "MHLALlamaForCausalLM")
    for name, tokenizer in tokenizers.items():
        assert report[name] == tokenizer("a b c")["input_ids"]
    for name, model in models.items():
        assert report[f"saved {name}"] == ["transformers_modules"]
        assert torch.equal(out[name], expected[name]), name
        if name in LANGUAGE:
            options = {"attention_mask": torch.ones_like(given[name]), "max_new_tokens": 6, "do_sample": False}
            assert torch.equal(out[f"{name}.text"], model.generate(given[name], **options)), name
        for file in ("model.safetensors", "modeling_mhla.py", "config.json"):
            first, again = (tmp_path / folder / name / file for folder in ("saved", "again"))
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
    with refused("sentence_bert_config.json: got the key 'model_args', expected only keys that"):
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
