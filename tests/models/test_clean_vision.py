"""Saved image models in the hands of someone who never installed mhla_hf: one other process, offline, without triton."""

import json

import torch
from elsewhere import run_elsewhere
from safetensors.torch import load_file, save_file
from small_towers import TOWERS, converted_tower, images, output_of, small_classifier

LOOK = """
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification
torch.set_num_threads(1)
given, out, report = load_file("pixels.safetensors"), {}, {}
for name in sorted(os.listdir("saved")):
    auto = AutoModelForImageClassification if "lassif" in name else AutoModel
    for folder in (f"saved/{name}", f"again/{name}"):
        model, info = auto.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
        pixels = given[name]
        with torch.no_grad():
            found = model(pixels)
        out[folder] = found.logits if hasattr(found, "logits") else found.last_hidden_state
        report[folder] = [sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), type(model).__module__]
        if folder.startswith("saved"):
            model.save_pretrained(f"again/{name}")
    report[f"saved/{name}"].append(model.config.model_type)
report["loaded"] = [m for m in ("mhla_hf", "triton", "diffusers", "accelerate") if m in sys.modules]
report["processor"] = AutoImageProcessor.from_pretrained("saved/classifier").size["height"]
save_file({k: v.contiguous() for k, v in out.items()}, "out.safetensors")
json.dump(report, open("report.json", "w"))
"""


def test_bit_equal_elsewhere_and_saved_again(tmp_path):
    models = {"classifier": small_classifier(num_channels=3, image_mean=None, image_std=None)}
    models["classifier_in_stages"] = small_classifier("stages")
    models["classifier_hybrid"] = small_classifier(mhla={"layers": [1], "gate": True}, attention="linear")
    for name in TOWERS:
        models[name] = converted_tower(
            name, layers=[1] if name == "ViTModel" else "all", cpe=3 * (name == "DINOv3ViTModel")
        )
    pixels = {name: images(2, channels=model.config.num_channels) for name, model in models.items()}
    expected = {name: output_of(model, pixels[name]).detach() for name, model in models.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "saved" / name)
    save_file(pixels, tmp_path / "pixels.safetensors")
    run = run_elsewhere(LOOK, tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    report, out = json.loads((tmp_path / "report.json").read_text()), load_file(tmp_path / "out.safetensors")
    assert report["loaded"] == [] and report["processor"] == 32
    for name, model in models.items():
        for folder in (f"saved/{name}", f"again/{name}"):
            assert report[folder][:2] == [[], []], folder
            assert report[folder][2].startswith("transformers_modules."), folder
            assert torch.equal(out[folder], expected[name]), folder
        assert report[f"saved/{name}"][3] == model.config.model_type
        for file in ("model.safetensors", "modeling_mhla.py", "config.json"):
            first, again = (tmp_path / folder / name / file for folder in ("saved", "again"))
            assert first.read_bytes() == again.read_bytes(), (name, file)
