import pytest

from mhla_hf.hub import folder_checks


@pytest.fixture
def unvisited(monkeypatch):
    """Checks without the seconds that loading in a clean process takes; `test_folder_checks.py` has that."""
    monkeypatch.setattr(folder_checks, "check_isolated_load", lambda *given: None)
