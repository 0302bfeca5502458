"""What is pushed is what others load: by repo id, at a pinned revision, bit for bit, in a process without mhla_hf."""

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_api
from tools.elsewhere import check_elsewhere
from tools.small_models import MODELS, tokens
from tools.small_repos import CARD
from tools.small_towers import small_classifier
from tools.tiny_pipelines import PIPELINES, at_fresh_addresses, generate

import mhla_hf
from mhla_hf.hub.push import push


def pipeline(family, folder):
    """A converted pipeline, saved; loaded again, because weights from a file may round differently from those in memory."""
    torch.manual_seed(3)
    pipe = PIPELINES[family]()
    mhla_hf.convert(pipe)
    pipe.save_pretrained(folder)
    return at_fresh_addresses(DiffusionPipeline.from_pretrained(folder, trust_remote_code=True))


def test_pushed_models_load_by_id_at_a_pinned_revision(hub, unvisited, tmp_path, monkeypatch):
    inputs = {"input_ids": tokens(2, 40), "pixel_values": torch.rand(2, 1, 8, 8)}
    wanted, revisions = {}, {}
    options = {"private": True, "progress": False, "license": "apache-2.0", "draft": True}
    models = {name: (MODELS[name](), "AutoModelForCausalLM", "input_ids") for name in ("scratch", "llama-hybrid")}
    models["digits"] = (small_classifier(), "AutoModelForImageClassification", "pixel_values")
    for name, (model, auto, key) in models.items():
        revisions[f"tester/{name}"] = push(model, f"tester/{name}", **options).revision
        with torch.no_grad():
            wanted[f"tester/{name}-{auto}"] = model(inputs[key]).logits
    for family in ("wan", "dit"):
        pipe = pipeline(family, tmp_path / family)
        revisions[f"tester/{family}"] = push(pipe, f"tester/{family}", **options).revision
        assert str(tmp_path).encode() not in b"".join(hub.repos[f"tester/{family}"].files().values())
        wanted[f"tester/{family}-DiffusionPipeline"] = generate(pipe)
    for name in revisions:  # what comes later must not matter
        hub.put(name, {"README.md": CARD.encode(), "config.json": b"{}"})
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)  # chosen when it was imported
    pipe.push_to_hub("tester/by-diffusers")
    wanted["tester/by-diffusers-DiffusionPipeline"] = wanted["tester/dit-DiffusionPipeline"]
    (visitor := tmp_path / "visitor").mkdir()
    options = {"absent": ("mhla_hf", "triton"), "environment": hub.environment(visitor / "hf")}
    check_elsewhere(visitor, inputs, wanted, revisions=revisions, **options)
