"""Saved models in the hands of someone who never installed mhla_hf: one other process, offline, without triton."""

import itertools
import json
import os
import shutil
import subprocess

import pytest
import torch
from elsewhere import run_elsewhere
from safetensors.torch import load_file, save_file
from small_models import MODELS, tokens
from small_scores import small_tokenizer
from small_towers import TOWERS, converted_tower, images, output_of, small_classifier
from transformers import ByT5Tokenizer

VISITOR = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification
torch.set_num_threads(1)
given, out, report = load_file("given.safetensors"), {}, {}
for name in sorted(os.listdir("saved")):
    language = not given[name].is_floating_point()
    image = AutoModelForImageClassification if "lassif" in name else AutoModel
    auto = AutoModelForCausalLM if language else image
    for folder in (f"saved/{name}", f"again/{name}"):
        model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        with torch.no_grad():
            found = model(given[name])
        out[folder] = found.logits if hasattr(found, "logits") else found.last_hidden_state
        if language:
            options = {"attention_mask": torch.ones_like(given[name]), "max_new_tokens": 24, "do_sample": False}
            out[f"{folder}.text"] = model.generate(given[name], **options)
        report[folder] = [sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), type(model).__module__]
        if folder.startswith("saved"):
            assert type(AutoConfig.from_pretrained(folder, trust_remote_code=True)) is type(model.config)
            model.save_pretrained(f"again/{name}")
report["hub"] = type(AutoModelForCausalLM.from_pretrained("somebody/llama", trust_remote_code=True)).__name__
report["loaded"] = [m for m in ("mhla_hf", "triton", "diffusers", "accelerate") if sys.modules.get(m)]
report["processor"] = AutoImageProcessor.from_pretrained("saved/classifier").size["height"]
save_file({k: v.contiguous() for k, v in out.items()}, "out.safetensors")
json.dump(report, open("report.json", "w"))
"""
LANGUAGE = ["scratch", "llama-all", "llama-hybrid", "qwen3-hybrid", "mixtral-hybrid", "llama-gate-norm"]


@torch.no_grad()
def test_bit_equal_elsewhere_and_saved_again(tmp_path):
    models = {name: MODELS[name]() for name in LANGUAGE}
    models["classifier"] = small_classifier(num_channels=3, image_mean=None, image_std=None)
    models["classifier_in_stages"] = small_classifier("stages")
    models["classifier_hybrid"] = small_classifier(mhla={"layers": [1], "gate": True}, attention="linear")
    for name in TOWERS:
        layers, cpe = [1] if name == "ViTModel" else "all", 3 * (name == "DINOv3ViTModel")
        models[name] = converted_tower(name, layers=layers, cpe=cpe)
    given, expected = {}, {}
    for name, model in models.items():
        given[name] = tokens(2, 45) if name in LANGUAGE else images(2, channels=model.config.num_channels)
        expected[name] = output_of(model, given[name])
        model.save_pretrained(tmp_path / "saved" / name)
    save_file(given, tmp_path / "given.safetensors")
    repository, commit = tmp_path / "hf/hub/models--somebody--llama", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(tmp_path / "saved/llama-all", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    run = run_elsewhere(VISITOR, tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    report, out = json.loads((tmp_path / "report.json").read_text()), load_file(tmp_path / "out.safetensors")
    assert (report["loaded"], report["processor"], report["hub"]) == ([], 32, "MHLALlamaForCausalLM")
    for name, model in models.items():
        for folder in (f"saved/{name}", f"again/{name}"):
            assert report[folder][:2] == [[], []], folder
            assert report[folder][2].startswith("transformers_modules."), folder
            assert torch.equal(out[folder], expected[name]), folder
            if name in LANGUAGE:
                mask = torch.ones_like(given[name])
                text = model.generate(given[name], attention_mask=mask, max_new_tokens=24, do_sample=False)
                assert torch.equal(out[f"{folder}.text"], text), folder
        for file in ("model.safetensors", "modeling_mhla.py", "config.json"):
            first, again = (tmp_path / folder / name / file for folder in ("saved", "again"))
            assert first.read_bytes() == again.read_bytes(), (name, file)


READER = """
from transformers import AutoModelForCausalLM, AutoTokenizer
json.dump({f: AutoTokenizer.from_pretrained(f, **%r)("a b c")["input_ids"] for f in %r}, open("read.json", "w"))
try:
    AutoModelForCausalLM.from_pretrained("scratch-fast-0", trust_remote_code=False)
except ValueError as error:
    assert "trust_remote_code=True" in str(error)
else:
    raise SystemExit("code was run that nobody trusted")
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_tokenizer_is_read_without_code_and_without_a_question(tmp_path, terminal):
    """Saved before or after its model. At a terminal transformers asks for the configuration's sake unless told False."""
    told, models = {}, {"scratch": MODELS["scratch"](), "converted": MODELS["llama-all"]()}
    tokenizers = {"fast": small_tokenizer(), "slow": ByT5Tokenizer()}
    for (first, model), (second, tokenizer) in itertools.product(models.items(), tokenizers.items()):
        for order in ((model, tokenizer), (tokenizer, model)):
            folder = f"{first}-{second}-{len(told)}"
            for part in order:
                part.save_pretrained(tmp_path / folder)
            told[folder] = tokenizer("a b c")["input_ids"]
    keyboard, stdin = os.openpty()
    code = READER % ({"trust_remote_code": False} if terminal else {}, list(told))
    run = run_elsewhere(code, tmp_path, stdin=stdin if terminal else subprocess.DEVNULL, timeout=300)
    os.close(keyboard), os.close(stdin)
    assert run.returncode == 0 and not (terminal and "[y/N]" in run.stdout), run.stdout + run.stderr
    assert json.loads((tmp_path / "read.json").read_text()) == told
    assert not (tmp_path / "hf/modules/transformers_modules").exists()
