"""What is pushed is what others load: by repo id, at a pinned revision, bit for bit, in a process without mhla_hf; and what
a hostile or broken repository can do to our own loading, which is nothing.
"""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import hf_api
from safetensors.torch import load_file
from small_models import MODELS, tokens
from small_repos import CARD, save_carded
from small_scores import small_llama
from small_towers import small_classifier
from tiny_pipelines import PIPELINES, generate

import mhla_hf
from mhla_hf.checkpoints.checksums import SUMS_FILE
from mhla_hf.checkpoints.load import load_language_model
from mhla_hf.share.push import push

TESTS = Path(__file__).parents[1]
LOADER = """
import json, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mhla_hf", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import torch
torch.set_num_threads(1)
given = json.load(open("given.json"))
sys.path.append(given["tests"])
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from tiny_pipelines import generate
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
print(json.dumps([homes, [name for name in ("mhla_hf", "triton") if name in sys.modules]]))
"""


def load_elsewhere(hub, folder, **given):
    """Run `LOADER` in an empty folder and home, with this Hub; the last line it prints, as JSON."""
    folder.mkdir()
    (folder / "given.json").write_text(json.dumps({"tests": str(TESTS), **given}))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    options = {"cwd": folder, "env": {**environment, **hub.environment(folder / "hf")}, "stdin": subprocess.DEVNULL}
    run = subprocess.run([sys.executable, "-c", LOADER], capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


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
    given = {"models": models, "ids": ids.tolist(), "pixels": pixels.tolist()}
    homes, forbidden = load_elsewhere(hub, tmp_path / "visitor", **given)
    found = load_file(tmp_path / "visitor" / "out.safetensors")
    assert forbidden == [] and set(found) == set(wanted)
    for name, home in homes.items():
        assert home.startswith(("transformers_modules.tester.", "diffusers_modules.local.modeling_mhla_")), home
        assert torch.equal(found[name], wanted[name]), name


@pytest.fixture
def hostile(hub, tmp_path, unvisited):
    """Repositories of which something is wrong, made from one that was pushed; the file that hostile code would leave."""
    trace = tmp_path / "trace"
    model = mhla_hf.convert(small_llama(), layers="2/3", block_size=32, num_blocks=4)
    push(save_carded(tmp_path / "mhla", model, name="tester/good"), "tester/good", progress=False)
    good, weights = hub.repos["tester/good"].files(), load_file(tmp_path / "mhla" / "model.safetensors")
    config = json.loads(good["config.json"])

    class Evil:
        def __reduce__(self):
            return open, (str(trace), "w")

    pickled = io.BytesIO()
    torch.save({**weights, "extra": Evil()}, pickled)
    outside = {"metadata": {}, "weight_map": dict.fromkeys(weights, "../" * 20 + os.path.relpath(trace, "/"))}
    auto = {"AutoConfig": "evil/code--code.Config", "AutoModelForCausalLM": "evil/code--code.Model"}
    hub.put("evil/code", {"code.py": f"open({str(trace)!r}, 'w')\n".encode()})
    changes = {
        "pickled": {"model.safetensors": None, "pytorch_model.bin": pickled.getvalue()},
        "truncated": {SUMS_FILE: None, "model.safetensors": good["model.safetensors"][:-1000]},
        "outside": {"model.safetensors": None, "model.safetensors.index.json": json.dumps(outside).encode()},
        "elsewhere": {"config.json": json.dumps(config | {"auto_map": auto}).encode()},
        "newer": {SUMS_FILE: None, "config.json": json.dumps(config | {"mhla": {"format_version": 99}}).encode()},
    }
    for name, files in changes.items():
        hub.put(f"tester/{name}", {path: data for path, data in (good | files).items() if data is not None})
    return trace


REFUSED = {
    "pickled": "does not appear to have a file named model.safetensors",
    "truncated": "Error while deserializing header: incomplete metadata",
    "outside": "cannot contain a '..' path segment",
    "elsewhere": "config.json was changed after the model was pushed",
    "newer": "format_version: got 99, expected at most",
    "nothing": "is not a valid model identifier|not a local folder",
}


def test_our_loading_refuses_in_one_sentence(hub, hostile):
    """With mhla_hf installed its own classes are used: no code of the repository runs, whatever trust_remote_code says."""
    for name, said in REFUSED.items():
        for trust in (False, True):
            with pytest.raises(ValueError, match=rf"model 'tester/{name}' cannot be loaded") as caught:
                load_language_model(f"tester/{name}", trust_remote_code=trust)
            assert any(part in str(caught.value) for part in said.split("|")) and "\n" not in str(caught.value), name
            assert not hostile.exists(), name
    model, _ = load_language_model("tester/good", revision=hub.repos["tester/good"].refs["refs/heads/main"])
    assert type(model).__name__ == "MHLALlamaForCausalLM"
