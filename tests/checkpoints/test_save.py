"""Saved models in the hands of someone who never installed mhla_hf: one other process, offline, without triton."""

import resource
import shutil

import pytest
import torch
from elsewhere import run_elsewhere
from safetensors.torch import load_file, save_file
from small_models import MODELS, tokens
from small_scores import small_tokenizer
from small_towers import converted_tower, images, output_of, small_classifier
from transformers import ByT5Tokenizer

from mhla_hf.checkpoints.save import save_model

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
        options = {"attention_mask": torch.ones_like(given[name]), "max_new_tokens": 12, "do_sample": False}
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
LANGUAGE = ["scratch", "llama-all", "llama-window", "qwen3-hybrid", "mixtral-hybrid"]
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
    report, _ = run_elsewhere(VISITOR, tmp_path)
    out = load_file(tmp_path / "out.safetensors")
    assert (report["loaded"], report["processor"], report["hub"]) == ([], 32, "MHLALlamaForCausalLM")
    for name, tokenizer in tokenizers.items():
        assert report[name] == tokenizer("a b c")["input_ids"]
    for name, model in models.items():
        assert report[f"saved {name}"] == ["transformers_modules"]
        assert torch.equal(out[name], expected[name]), name
        if name in LANGUAGE:
            options = {"attention_mask": torch.ones_like(given[name]), "max_new_tokens": 12, "do_sample": False}
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
        with pytest.raises(ValueError, match=r"output '.*/out' cannot be written: .*File too large") as caught:
            save_model(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
