"""The types of the public names: what a checker is told is what `import mhla_hf` gives, and no signature has holes."""

import ast
import inspect
from pathlib import Path

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
