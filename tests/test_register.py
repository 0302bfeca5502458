"""Importing mhla_hf registers its model types, in any order of imports; the command line pays for it when it runs."""

import subprocess
import sys

from tools.small_models import converted_model
from tools.small_towers import converted_tower

COMMAND = "import sys; from mhla_hf_command import main; code = main(sys.argv[1:]);"


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_registered_whatever_is_imported_first_and_however_python_was_started(tmp_path):
    """A module of mhla_hf in a package that `python -m` runs; transformers here, in every other test."""
    converted_model().save_pretrained(tmp_path / "language")
    converted_tower("ViTModel").save_pretrained(tmp_path / "tower")
    (tmp_path / "language/modeling_mhla.py").unlink()
    package = tmp_path / "user_package"
    package.mkdir()
    (package / "__init__.py").write_text("import mhla_hf.conversion.model_family\n")
    (package / "train.py").write_text("""import types, mhla_hf
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
print(isinstance(mhla_hf.convert, types.FunctionType), AutoConfig.for_model("mhla_llama").model_type)
for auto, name in ((AutoModelForCausalLM, "language"), (AutoModel, "tower")):
    found = type(auto.from_pretrained(name))
    print(found.__name__, found.__module__.split(".")[0])
""")
    command = [sys.executable, "-m", "user_package.train"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    expected = ["True", "mhla_llama", "MHLALlamaForCausalLM", "mhla_hf", "MHLAViTModel", "mhla_hf"]
    assert done.stdout.split() == expected, done.stderr[-2000:]


def test_the_command_line_imports_no_library_to_speak_of_itself():
    done = run(COMMAND + "print(code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))", "--help")
    assert done.stdout.endswith("0 []\n"), done.stderr


def test_the_command_line_registers_when_a_command_runs_and_a_type_of_somebody_else_stays_theirs():
    code = """
from transformers import AutoConfig, LlamaConfig
class Theirs(LlamaConfig):
    model_type = "mhla_llama"
AutoConfig.register("mhla_llama", Theirs)
COMMAND
import mhla_hf
assert code == 0
assert type(AutoConfig.for_model("mhla_llama")) is Theirs
assert type(AutoConfig.for_model("mhla_qwen3")) is mhla_hf.MHLAQwen3Config
"""
    done = run(code.replace("COMMAND", COMMAND), "recipes")
    assert done.returncode == 0, done.stderr[-2000:]


WITHOUT_DIFFUSERS = """
import sys
sys.modules["diffusers"] = None
import mhla_hf, torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=128, **sizes)).eval()
options = {"block_size": 4, "window": 2, "effort": 0.05, "keep": 1, "progress": False}
mhla_hf.convert(model, text=torch.randint(64, (4000,)), **options).save_pretrained(sys.argv[1])
reloaded = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.arange(60)[None]
assert torch.equal(model(ids).logits, reloaded(ids).logits)
vision = ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).eval()
mhla_hf.convert(vision, samples=torch.rand(16, 3, 32, 32), layout=[2, 2], effort=0.05, progress=False)
for use in (lambda: mhla_hf.MHLAWanTransformer3DModel, lambda: load_pipeline("nowhere", dtype="auto", device="cpu")):
    from mhla_hf.checkpoints.load import load_pipeline
    try:
        use()
    except ImportError as error:
        print(error)
"""


def test_transformers_models_need_no_diffusers(tmp_path):
    """Conversion with text and with images, saving, loading; what needs diffusers says how to install it."""
    done = run(WITHOUT_DIFFUSERS, str(tmp_path / "made"))
    install = "needs diffusers, which is missing: pip install 'mhla_hf[diffusers]'"
    said = [f"MHLAWanTransformer3DModel {install}", f"model: 'nowhere', a pipeline, {install}"]
    assert done.stdout.splitlines()[-2:] == said, done.stderr[-2000:]
