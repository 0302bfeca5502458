"""The types of the public names: what a checker is told is what `import mhla_hf` gives, and no signature has holes."""

import ast
import inspect
from pathlib import Path

import pytest

import mhla_hf


def test_checkers_are_told_of_every_public_name():
    tree = ast.parse(Path(mhla_hf.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    told = {alias.asname: line.module for line in tree.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    told.pop(None)  # what is not given on
    overloads = [line for line in tree.body if isinstance(line, ast.FunctionDef) and line.name != "__getattr__"]
    assert told | {line.name: mhla_hf._PUBLIC[line.name] for line in overloads} == mhla_hf._PUBLIC
    for line in overloads:
        arguments = [one.arg for one in (*line.args.args, *line.args.kwonlyargs)]
        assert arguments == list(inspect.signature(getattr(mhla_hf, line.name)).parameters)


def functions_of(public):
    """The function, or a class's own public methods."""
    if not inspect.isclass(public):
        return [public]
    named = {name: member for name, member in vars(public).items() if not name.startswith("_")}
    return [function for name in named if inspect.isroutine(function := getattr(public, name))]


@pytest.mark.parametrize("name", mhla_hf._PUBLIC)
def test_every_argument_has_a_type(name):
    for function in functions_of(getattr(mhla_hf, name)):
        if not inspect.unwrap(function).__module__.startswith("mhla_hf"):
            continue  # made by a library's decorator
        signature = inspect.signature(function)
        holes = {p.name for p in signature.parameters.values() if p.annotation is p.empty} - {"self", "cls"}
        assert not holes and signature.return_annotation is not signature.empty, (function, holes)
