"""What several files share: lm-eval's own tasks, and two saved models with tasks made for them."""

import shutil
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager
from tools.small_scores import HELD_OUT, WINDOW, save_llama, save_mhla, small_tokenizer
from tools.small_tasks import make_tasks

BUILT_IN = Path(lm_eval.tasks.__file__).parent
FOLDERS = "mmlu/default winogrande piqa arc openbookqa super_glue/boolq wikitext lambada longbench ruler".split()  # noqa: SIM905
FEWSHOT = """
task: here_shots
custom_dataset: !function local_data.load
dataset_kwargs: {file: here_cloze.jsonl}
test_split: test
fewshot_split: test
fewshot_config: {sampler: default}
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
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
def manager():
    """lm-eval's index of those of its own tasks that our recipes use; that of all takes half a minute to read."""
    return TaskManager(include_path=[str(BUILT_IN / folder) for folder in FOLDERS], include_defaults=False)


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
    """The same, to be changed."""
    return shutil.copytree(world, tmp_path / "world", ignore=shutil.ignore_patterns("results.json"))
