"""What reads all of lm-eval's task files is done once; the Hub of the tests is that of tests/hub."""

import pytest
from hub.conftest import hub  # noqa: F401
from lm_eval.tasks import TaskManager


@pytest.fixture(scope="session")
def manager():
    """lm-eval's index of its built-in tasks; reading it takes seconds."""
    return TaskManager()
