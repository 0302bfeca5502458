"""What reads all of lm-eval's task files is done once."""

import pytest
from lm_eval.tasks import TaskManager


@pytest.fixture(scope="session")
def manager():
    """lm-eval's index of its built-in tasks; reading it takes seconds."""
    return TaskManager()
