"""What PyPI would get: the wheel and the sdist hold the package and nothing else, and the wheel alone is enough."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tools.elsewhere import check_elsewhere
from tools.small_scores import TRAINING, save_llama

ROOT = Path(__file__).parents[1]
BESIDE = {".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
CONVERT = """
import mhla_hf, torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, **sizes)).eval()
model.config.save_pretrained("base")
mhla_hf.convert(model, layers="2/3", block_size=16).save_pretrained("made")
ids = torch.randint(64, (2, 70))
with torch.no_grad():
    save_file({"input_ids": ids, "logits": model(ids).logits.contiguous()}, "said.safetensors")
print(mhla_hf.__file__)
"""


def run(*command, folder):
    """What a command prints, run in `folder` without this clone on its path."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(x) for x in command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.slow
def test_the_wheel_alone(tmp_path):
    run(sys.executable, "-m", "build", ROOT, "--outdir", tmp_path, folder=tmp_path)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    files = [path for path in (ROOT / "mhla_hf").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    package = {path.relative_to(ROOT).as_posix() for path in files} | {"mhla_hf_command.py"}
    assert "mhla_hf/py.typed" in package
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == package
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names == package | BESIDE
    (about,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    assert not re.search(r"\]\((?!http|#)", zipfile.ZipFile(wheel).read(about).decode())  # links of the README, on PyPI

    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    run(*pip, wheel, folder=tmp_path)
    assert run(programs / "python", "-c", CONVERT, folder=tmp_path).startswith(str(tmp_path / "venv"))
    said = load_file(tmp_path / "said.safetensors")
    check_elsewhere(tmp_path, {"input_ids": said["input_ids"]}, {"made-AutoModelForCausalLM": said["logits"]})
    assert "convert" in run(programs / "mhla-hf", "--help", folder=tmp_path)
    assert "3 of 3 layers can become MHLA" in run(programs / "mhla-hf", "info", "base", folder=tmp_path)
    assert "language_llama_lite" in run(programs / "mhla-hf", "recipes", folder=tmp_path)

    save_llama(tmp_path / "llama")
    (tmp_path / "notes.txt").write_text(TRAINING)
    run(*pip, f"{wheel}[train]", folder=tmp_path)
    distill = [programs / "mhla-hf", "distill", "llama", "--recipe", "language_llama_lite", "--data", "notes.txt"]
    run(*distill, "--max-steps", "1", "--set", "*.seq_len=32", "--out", "trained", folder=tmp_path)
    assert "2 of 3 layers are MHLA" in run(programs / "mhla-hf", "info", "trained", folder=tmp_path)
