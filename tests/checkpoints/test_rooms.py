"""The real rooms keep the rules of folding, and every real entry folds into a file that stands alone.

Run: pytest tests/checkpoints/test_rooms.py
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_hf.checkpoints import bundle
from mhla_hf.checkpoints.bundle import build_bundle, check_bundle, entries, fold, write_bundle

PACKAGE = Path(bundle.__file__).resolve().parent.parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for room in bundle.ROOMS
    for path in (PACKAGE / room).rglob("*.py")
    if path.name != "__init__.py"
)


def pyflakes(text):
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--output-format", "concise", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def imported_libraries(text):
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("relative" if node.level else node.module.split(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_shipped_module_folds(module):
    of_diffusers = module.startswith("models.diffusion") or module.endswith("_transformer")
    libraries = () if module.startswith("ops.") else ("diffusers",) if of_diffusers else ("transformers",)
    compile(fold(PACKAGE, module, libraries), module, "exec")


def test_ops_know_torch_and_triton_only():
    for path in (PACKAGE / "ops").rglob("*.py"):
        libraries = imported_libraries(path.read_text()) - {"relative", "torch", "triton"}
        assert libraries <= sys.stdlib_module_names, f"{path.name} imports {libraries}"


def test_names_are_unique_across_all_shipped_modules():
    modules = [bundle._read(PACKAGE, module) for module in MODULES]
    for module in modules:
        module.bound.pop("__getattr__", None)  # an entry's own; no bundle has two
    bundle._check_names(modules)


def test_every_entry_exists():
    assert entries() == list(bundle.ENTRIES)


@pytest.mark.parametrize("entry", bundle.ENTRIES)
def test_entry_stands_alone(entry):
    text = build_bundle(entry)
    assert text == build_bundle(entry)
    flakes = pyflakes(text)
    assert flakes.returncode == 0, flakes.stdout
    foreign = {"relative", "mhla_hf", "transformers", "diffusers"} - set(bundle.ENTRIES[entry])
    assert not foreign & imported_libraries(text)
    assert check_bundle(text)["entry"] == entry
    assert f'\nNAMESPACE = "{check_bundle(text)["sha256"]}"\n' in text


def test_all_bundles_run_in_one_process_where_the_package_is_missing(clean_python, tmp_path):
    code, wanted = "import sys\n", []
    for number, entry in enumerate(entries()):
        path = write_bundle(entry, tmp_path / "code").rename(tmp_path / "code" / f"bundle_{number}.py")
        wanted.append(check_bundle(path.read_text())["sha256"])
        code += f"sys.path.insert(0, {str(path.parent)!r})\nimport bundle_{number}\nprint(bundle_{number}.NAMESPACE)\n"
    assert clean_python(code, blocked=("mhla_hf", "triton")).split() == wanted
    assert len(set(wanted)) == len(wanted) == len(bundle.ENTRIES)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The bundler over a package with one entry instead of the real one."""
    package = tmp_path / "small"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1"\n')
    (package / "models" / "one.py").write_text("X = 1\n")
    monkeypatch.setattr(bundle, "_PACKAGE", package)
    monkeypatch.setattr(bundle, "ENTRIES", {"models.one": (), "models.later": ()})
    return tmp_path


def test_entries_are_those_that_exist(small):
    assert entries() == ["models.one"]


@pytest.mark.parametrize("entry", ["models.later", "models.none", "", "../etc"])
def test_unknown_entry_is_refused(small, entry):
    with pytest.raises(ValueError, match=r"entry must be one of \['models\.one'\], got "):
        write_bundle(entry, small / "out")
    assert not (small / "out").exists()


def test_written_aside_and_renamed(small, monkeypatch):
    path = write_bundle("models.one", small / "out")
    assert path.name == "modeling_mhla.py" and path.read_text() == build_bundle("models.one")
    path.write_text("old")

    def full(*names):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_bundle("models.one", small / "out")
    assert path.read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["modeling_mhla.py"]


def test_folder_that_is_a_file_is_refused(small):
    (small / "file").write_text("")
    with pytest.raises(ValueError, match="folder must be a directory, got the file"):
        write_bundle("models.one", small / "file")


def test_broken_package_leaves_the_old_file(small):
    path = write_bundle("models.one", small / "out")
    before = path.read_text()
    (bundle._PACKAGE / "models" / "one.py").write_text("import numpy as np\n")
    with pytest.raises(ValueError, match="alias 'np'"):
        write_bundle("models.one", small / "out")
    assert path.read_text() == before
