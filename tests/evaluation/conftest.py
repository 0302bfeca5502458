"""What several files share: two saved models, and tasks made for them."""

import shutil

import pytest
from tools.small_scores import HELD_OUT, WINDOW, make_tasks, save_llama, save_mhla, small_tokenizer

FEWSHOT = """
include: here_cloze.yaml
task: here_shots
fewshot_split: test
num_fewshot: null
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 2.0}
"""
GROUP = """
group: here_all
task: [here_cloze, here_recall]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 3.0}
"""


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Two models and tasks: nobody writes here but results.json."""
    folder = tmp_path_factory.mktemp("world")
    make_tasks(folder / "tasks", HELD_OUT, small_tokenizer(), WINDOW)
    (folder / "tasks" / "shots.yaml").write_text(FEWSHOT)
    (folder / "tasks" / "group.yaml").write_text(GROUP)
    save_llama(folder / "llama")
    save_mhla(folder / "mhla")
    return folder


@pytest.fixture
def fresh(world, tmp_path):
    return shutil.copytree(world, tmp_path / "world", ignore=shutil.ignore_patterns("results.json"))
