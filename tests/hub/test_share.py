"""What is pushed is what others load: by repo id, at a pinned revision, bit for bit, in a process without mhla_hf."""

import json
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_api
from safetensors.torch import load_file
from tools.elsewhere import run_elsewhere
from tools.small_models import MODELS, tokens
from tools.small_repos import CARD
from tools.small_towers import small_classifier
from tools.tiny_pipelines import PIPELINES, generate

import mhla_hf
from mhla_hf.hub.push import push

LOADER = """
import torch
torch.set_num_threads(1)
given = json.load(open("given.json"))
sys.path.append(given["tests"])
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from tools.tiny_pipelines import generate
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
out, homes = {}, {}
for name, (kind, revision) in given["models"].items():
    options = {"revision": revision, "trust_remote_code": True}
    if kind == "pipeline":
        loaded = DiffusionPipeline.from_pretrained("tester/" + name, **options)
        out[name] = generate(loaded).contiguous()
        loaded = loaded.transformer
    else:
        auto = AutoModelForCausalLM if kind == "language" else AutoModelForImageClassification
        loaded = auto.from_pretrained("tester/" + name, **options).eval()
        asked = torch.tensor(given["ids"]) if kind == "language" else torch.tensor(given["pixels"])
        with torch.no_grad():
            out[name] = loaded(asked).logits.contiguous()
    homes[name] = sys.modules[type(loaded).__module__].__name__
save_file(out, "out.safetensors")
print(json.dumps([homes, [name for name in ("mhla_hf", "triton") if sys.modules[name]]]))
"""


def pipeline(family, folder):
    """A converted pipeline, saved; loaded again, because weights from a file may round differently from those in memory."""
    torch.manual_seed(3)
    pipe = PIPELINES[family]()
    mhla_hf.convert(pipe)
    pipe.save_pretrained(folder)
    return DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)


def test_pushed_models_load_by_id_at_a_pinned_revision(hub, unvisited, tmp_path, monkeypatch):
    ids, pixels = tokens(2, 40), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    wanted, models, private = {}, {}, {"private": True, "progress": False, "license": "apache-2.0", "draft": True}
    given = {"scratch": (MODELS["scratch"](), ids), "llama-hybrid": (MODELS["llama-hybrid"](), ids)}
    for name, (model, asked) in (given | {"digits": (small_classifier(), pixels)}).items():
        kind = "image" if asked is pixels else "language"
        models[name] = (kind, push(model, f"tester/{name}", **private).revision)
        with torch.no_grad():
            wanted[name] = model(asked).logits
    for family in ("wan", "dit"):
        pipe = pipeline(family, tmp_path / family)
        models[family] = ("pipeline", push(pipe, f"tester/{family}", **private).revision)
        assert str(tmp_path).encode() not in b"".join(hub.repos[f"tester/{family}"].files().values())
        wanted[family] = generate(pipe)
    for name in models:  # what comes later must not matter
        hub.put(f"tester/{name}", {"README.md": CARD.encode(), "config.json": b"{}"})
    monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)  # chosen when it was imported
    pipe.push_to_hub("tester/by-diffusers")
    models["by-diffusers"] = ("pipeline", hub.repos["tester/by-diffusers"].refs["refs/heads/main"])
    wanted["by-diffusers"] = wanted["dit"]
    given = {"tests": str(Path(__file__).parents[1]), "models": models, "ids": ids.tolist(), "pixels": pixels.tolist()}
    (visitor := tmp_path / "visitor").mkdir()
    (visitor / "given.json").write_text(json.dumps(given))
    environment = hub.environment(visitor / "hf")
    homes, forbidden = run_elsewhere(LOADER, visitor, ("mhla_hf", "triton"), environment)[0]
    found = load_file(visitor / "out.safetensors")
    assert forbidden == [] and set(found) == set(wanted)
    for name, home in homes.items():
        assert home.startswith(("transformers_modules.tester.", "diffusers_modules.local.modeling_mhla_")), home
        assert torch.equal(found[name], wanted[name]), name
