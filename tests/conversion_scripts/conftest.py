"""The scripts of conversion/ as a user runs them, in this process."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "conversion"


@pytest.fixture
def run(monkeypatch):
    """run(script, *arguments); SystemExit as at its end in a shell."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")

    return call


@pytest.fixture
def refused(run, capsys):
    """refused(script, *arguments): the one sentence with which it ends, at exit code 2."""

    def call(name, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            run(name, *arguments)
        assert stop.value.code == 2
        return capsys.readouterr().err

    return call
