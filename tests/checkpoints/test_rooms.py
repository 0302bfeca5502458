"""The real rooms keep the rules of folding, and every real entry folds into a file that stands alone."""

import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.small_models import refused
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from mhla_hf.checkpoints import bundle
from mhla_hf.checkpoints.bundle import build_bundle, check_bundle, make_source

ROOMS = ("ops", "nn", "models")
PACKAGE = Path(bundle.__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for room in ROOMS
    for path in (PACKAGE / room).rglob("*.py")
    if path.name != "__init__.py"
)


@pytest.fixture(scope="module")
def bundles():
    return {entry: build_bundle(entry) for entry in bundle.ENTRIES}


def test_shipped_rooms_import_at_the_top_and_ops_know_torch_and_triton_only():
    for path in (path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")):
        tree = ast.parse(path.read_text())
        nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        outer = {node for each in tree.body for node in (each.body if isinstance(each, ast.Try) else [each])}
        assert set(nodes) <= outer, f"{path.name} imports inside a function or under a condition"
        if not path.is_relative_to(PACKAGE / "ops"):
            continue
        names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
        names += [n.module for n in nodes if isinstance(n, ast.ImportFrom) and not n.level]
        libraries = {name.split(".")[0] for name in names} - {"torch", "triton"}
        assert libraries <= sys.stdlib_module_names, f"{path.name} imports {libraries}"


def test_names_are_unique_across_all_shipped_modules():
    modules = [bundle._read_module(PACKAGE, module) for module in MODULES]
    meanings = {}  # name -> (file that defines it or its import line, file)
    for module in modules:
        names = {name for statement in module.statements for name in statement.binds} - {"__getattr__"}  # one a bundle
        for name, meaning in (*((name, module.path) for name in names), *module.imports.items()):
            assert name.startswith("_") or not hasattr(builtins, name), f"{module.path} hides the builtin {name}"
            assert meanings.setdefault(name, meaning) == meaning, f"{name} in {module.path} means something else"


def test_every_bundle_stands_alone(bundles, tmp_path):
    """Nothing in it is undefined or unused, and it demands of a user no more than its own library."""
    for entry, text in bundles.items():
        assert check_bundle(text)["entry"] == entry and "License of the code: Apache-2.0." in text
        assert "Args:" not in text and text.count("\nimport torch\n") == 1
        assert f'\nNAMESPACE = "{check_bundle(text)["sha256"]}"\n' in text
        file = tmp_path / f"{entry}.py"
        file.write_text(text)
        demanded = set(get_imports(file)) - sys.stdlib_module_names
        assert demanded <= {"torch", "safetensors", "huggingface_hub", bundle.ENTRIES[entry]}
        assert get_relative_imports(file) == []
    assert len({check_bundle(text)["sha256"] for text in bundles.values()}) == len(bundles)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--output-format", "concise", "."]
    flakes = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert flakes.returncode == 0, flakes.stdout


def test_a_changed_or_newer_bundle_is_noticed(bundles):
    text = bundles["models.vision.vision_model"]
    for changed, words in (
        (text.replace("\nimport torch\n", "\nimport torch  # mine\n"), "bundle that was edited and hashes to"),
        (text.replace("format: 1", "format: 2"), "got a bundle of format 2, expected at most 1"),
        ("import torch\n", "without a bundle's header"),
    ):
        with refused(words):
            check_bundle(changed)


def test_an_old_transformers_is_told_which_one_is_needed(bundles, monkeypatch):
    """Before an import that it lacks."""
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    monkeypatch.delattr("transformers.cache_utils.LinearAttentionCacheLayerMixin")
    with refused("transformers: got 4.57.6, expected 5.19.0 or newer; ", kind=ImportError):
        exec(compile(bundles["models.converted:matrix_class"], "bundle.py", "exec"), {"__name__": "bundle"})


ABSENT = {  # a language model has no grids, no vision, no other families; one of diffusers has no caches of decoders
    "models.converted:windowed_class": "MHLA MHLACore MHLAState Mixing mhla mhla_step prepare_operands FeatureMap "
    "TwoWayMHLA two_way_attention GridMHLA WanTransformer ViTModel MHLAConfig",
    "models.converted:matrix_class": "SalientCore SalientState salient_attention SoftmaxHeads PositionConv MHLAConfig",
    "models.converted:windowed_encoder_class": "SequenceMHLA GridMixing mhla MHLACacheLayer mhla_attention SalientCore",
    "models.converted:matrix_encoder_class": "TwoWayMHLA DistanceMixing two_way_attention MHLACacheLayer mhla_step GridCall",
    "models.diffusion.converted_transformer": "MHLACacheLayer LlamaForCausalLM MHLA mhla_step",
}


@pytest.mark.parametrize("entry", ABSENT)
def test_a_bundle_holds_nothing_of_other_models(bundles, entry):
    assert not re.findall(rf"(?:class|def) (?:{'|'.join(ABSENT[entry].split())})\b", bundles[entry])
    if entry.startswith("models.converted:"):  # only a matrix takes kernels
        assert ("import triton" in bundles[entry]) == ("matrix" in entry)


def test_it_has_the_name_that_its_library_wants(bundles):
    entry, diffusion = "models.converted:windowed_class", "models.diffusion.dit_transformer"
    assert make_source(entry) == ("modeling_mhla.py", bundles[entry])
    sha = check_bundle(bundles[diffusion])["sha256"]
    assert make_source(diffusion)[0] == f"modeling_mhla_dit_{sha}.py"
    with pytest.raises(ValueError, match=r"entry: got '\.\./etc', expected one of \['models\.language\..*\]\."):
        make_source("../etc")
