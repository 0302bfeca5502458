"""A folded file does what it is for: transformers loads it where the package is missing, from a folder and from the Hub.

Run: pytest tests/checkpoints/test_remote.py
"""

import importlib
import shutil
import textwrap

import pytest
import torch
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from mhla_hf.checkpoints.bundle import fold

FILES = {
    "__init__": '__version__ = "0.0.1"\n',
    "ops/namespace": '"""Who this copy is."""\n\nNAMESPACE = "package"\n',
    "ops/scale": '''\
        """Guarded kernels and a plain form."""

        import torch

        try:
            import triton
            import triton.language as tl
        except ImportError:
            triton = None
            tl = None


        def doubled(x):
            """Twice x."""
            return torch.add(x, x)


        def has_kernels():
            return triton is not None and tl is not None
        ''',
    "nn/layer": '''\
        """One layer."""

        from torch import nn

        from ..ops.scale import doubled


        class ToyLayer(nn.Module):
            def __init__(self, size):
                super().__init__()
                self.linear = nn.Linear(size, size)

            def forward(self, x):
                return doubled(self.linear(x))
        ''',
    "models/configuration": '''\
        """Configuration."""

        from huggingface_hub.dataclasses import strict
        from transformers import PreTrainedConfig


        @strict
        class ToyConfig(PreTrainedConfig):
            model_type = "toy_bundle"
            vocab_size: int = 11
            hidden_size: int = 8
        ''',
    "models/toy": '''\
        """Model."""

        import torch
        from torch import nn
        from transformers import PreTrainedModel
        from transformers.modeling_outputs import CausalLMOutput

        from ..nn.layer import ToyLayer
        from ..ops.namespace import NAMESPACE
        from ..ops.scale import has_kernels
        from .configuration import ToyConfig


        class ToyForCausalLM(PreTrainedModel):
            config: ToyConfig
            config_class = ToyConfig
            key = NAMESPACE
            kernels = has_kernels()

            def __init__(self, config):
                super().__init__(config)
                self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
                self.layer = ToyLayer(config.hidden_size)
                self.head = nn.Linear(config.hidden_size, config.vocab_size)
                self.post_init()

            def forward(self, input_ids, **kwargs):
                return CausalLMOutput(logits=self.head(torch.tanh(self.layer(self.embed(input_ids)))))
        ''',
}

LOAD = """
import sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM

for name in {blocked!r}:
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(name + " is importable")
model, info = AutoModelForCausalLM.from_pretrained({where!r}, trust_remote_code=True, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"], info
expected = torch.load({expected!r})
with torch.no_grad():
    assert torch.equal(model(expected["input_ids"]).logits, expected["logits"])
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
print(type(model).__name__, model.key, model.kernels)
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A saved toy checkpoint with its folded source, and the file with the package's own logits."""
    package = tmp_path / "toy_package"
    for where, text in FILES.items():
        path = package / f"{where}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("toy_package.models.toy")
    config = module.ToyConfig()
    config.auto_map = {"AutoConfig": "modeling_mhla.ToyConfig", "AutoModelForCausalLM": "modeling_mhla.ToyForCausalLM"}
    model = module.ToyForCausalLM(config).eval()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    (folder / "modeling_mhla.py").write_text(fold(package, "models.toy", ("transformers",)))
    input_ids = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        logits = model(input_ids).logits
    torch.save({"input_ids": input_ids, "logits": logits}, tmp_path / "expected.pt")
    return folder, tmp_path / "expected.pt"


def test_nothing_but_torch_and_transformers_is_demanded(toy):
    folder, _ = toy
    assert get_imports(folder / "modeling_mhla.py") == ["huggingface_hub", "torch", "transformers"]
    assert get_relative_imports(folder / "modeling_mhla.py") == []


def test_loads_from_a_folder(toy, clean_python):
    folder, expected = toy
    blocked = ("mhla_hf", "triton", "diffusers", "toy_package")
    said = clean_python(LOAD.format(where=str(folder), expected=str(expected), blocked=blocked), blocked)
    name, key, kernels = said.split()
    assert name == "ToyForCausalLM" and len(key) == 12 and kernels == "False"


def test_loads_from_the_hub_cache(toy, clean_python, tmp_path):
    folder, expected = toy
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "clean_home" / "hub" / "models--somebody--toy-mhla"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    blocked = ("mhla_hf", "triton", "diffusers", "toy_package")
    code = LOAD.format(where="somebody/toy-mhla", expected=str(expected), blocked=blocked)
    code += "assert type(model.config) is type(model).config_class\n"
    assert clean_python(code, blocked).startswith("ToyForCausalLM ")
