"""evaluate(): what is wrong is said before anything runs; the recipes' tasks are lm-eval's own, in the paper's columns."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from lm_eval.tasks import TaskManager
from lm_eval.tasks import __file__ as LM_EVAL_TASKS
from lm_eval.tasks._yaml_loader import load_yaml
from tools.small_models import refused
from tools.small_scores import make_result, save_llama, save_mhla
from tools.small_types import small_model_of

import mhla_hf
from mhla_hf.evaluation import language
from mhla_hf.evaluation.records import Comparison, Results
from mhla_hf.evaluation.runner import read_score_recipe
from mhla_hf.evaluation.speed import SpeedProtocol, measure_speed
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.hub.facts import collect_speed

SPEED = {"recipe": "speed", "tasks": None, "include_path": None, "limit": None}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tasks": None}, "tasks: got None without a recipe, expected names, or a recipe: recall, ruler"),
        ({"settings": {"lengths": 3}}, "settings: got {'lengths': 3} without a recipe"),
        ({"tasks": "here_close"}, "tasks: got 'here_close', expected a task that exists; did you mean here_cloze"),
        ({"include_path": "/nowhere"}, "include_path: got '/nowhere', expected a folder"),
        ({"limit": 0}, "limit: got 0"),
        ({"dtype": "int8"}, "dtype: got 'int8', expected one of ['auto'"),
        ({"device": "tpu:9"}, "device: got 'tpu:9', expected one that is available"),
        ({**SPEED, "settings": {"lengths": []}}, "lengths: got []"),
        ({**SPEED, "limit": 2}, "limit: got a value with the recipe 'speed', expected None"),
    ],
)
def test_bad_arguments_are_one_sentence(world, monkeypatch, changes, says):
    whole = language.TaskManager
    # the index of all of lm-eval's own tasks takes half a minute to read
    monkeypatch.setattr(language, "TaskManager", lambda **options: whole(**{**options, "include_defaults": False}))
    options = {"tasks": "here_cloze", "include_path": world / "tasks", "progress": False, "limit": 2, **changes}
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        mhla_hf.evaluate(world / "llama", **options)
    assert "\n" not in str(caught.value)


def test_without_lm_eval_the_line_that_installs_it(world, monkeypatch):
    monkeypatch.delitem(sys.modules, "mhla_hf.evaluation.language")
    monkeypatch.delattr(sys.modules["mhla_hf.evaluation"], "language")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'mhla_hf\[eval\]'"):
        mhla_hf.evaluate(world / "llama", "here_cloze", include_path=world / "tasks")


def test_a_mean_is_refused_while_a_part_is_missing_and_carries_its_error():
    recipe = read_score_recipe("table_6_language")
    parts = [column for column in recipe.columns.values() if column.get("percent")]
    records = [make_result(task=c["task"], metric=c["metric"], value=0.5, stderr=0.01) for c in parts]
    compared = Comparison({"whole": Results(records), "less": Results(records[:-1])})
    compared.columns = recipe.columns
    whole, less = compared.paper_table("markdown").splitlines()[2:]
    assert "| 50.00 ± 0.41 |" in whole and "0.41" not in less
    assert compared.paper_table().splitlines()[0].startswith("model")
    assert Comparison().paper_table() == ""


def test_a_broken_recipe_is_one_sentence(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(yaml.dump({"kind": "language", "tasks": {"a": "many"}}))
    with refused("tasks: got {'a': 'many'}, expected"):
        read_score_recipe(path)
    with refused("which is not a file, expected a YAML file or one of recall, ruler"):
        read_score_recipe("nothing")


def test_the_papers_columns_are_tasks_and_metrics_of_lm_eval():
    folders = ["mmlu/default", "super_glue/boolq", "winogrande", "piqa", "arc", "openbookqa", "wikitext", "lambada"]
    paths = [str(Path(LM_EVAL_TASKS).parent / folder) for folder in (*folders, "longbench", "ruler")]
    manager = TaskManager(include_path=paths, include_defaults=False)
    for recipe in map(read_score_recipe, ("table_6_language", "table_8_longbench")):
        columns = [column for column in recipe.columns.values() if "task" in column]
        assert {column["task"] for column in columns} == {*recipe.tasks}
        for column in columns:
            config = load_yaml(manager.task_index[column["task"]].yaml_path, resolve_func=False)
            metrics = config.get("metric_list") or config["aggregate_metric_list"]
            assert column["metric"] in [metric["metric"] for metric in metrics], column
    assert {0} == {*read_score_recipe("table_6_language").tasks.values()}
    assert {*read_score_recipe("ruler").tasks} <= {*manager.all_tasks}


@pytest.fixture
def folders(tmp_path):
    return [save_llama(tmp_path / "teacher"), save_mhla(tmp_path / "mhla")]


def judge_speed(folders):
    settings = {"lengths": [32, 64], "decode_tokens": 2, "rounds": 1}
    return mhla_hf.evaluate(folders, recipe="speed", settings=settings, progress=False)


def test_models_timed_together_make_the_cards_tables(folders, monkeypatch):
    compared = judge_speed(folders)
    metrics = {f"{metric}_{length}" for metric in ("forward_ms", "decode_ms", "cache_mib") for length in (32, 64)}
    assert {record.metric for record in compared["mhla"]} == metrics
    assert compared["mhla"][0].command.startswith("mhla-hf evaluate teacher mhla --recipe speed --set lengths=32,64")
    cache = compared["teacher"].find("speed", "cache_mib_64")
    assert cache.value == 2 * 3 * 64 * 32 * 4 / 2**20 and cache.higher_is_better is False and cache.samples == 1
    with monkeypatch.context() as patch:
        patch.setattr("mhla_hf.evaluation.speed.measure_speed", None)
        assert judge_speed(folders)["mhla"] == compared["mhla"], "what is known is not timed again"
    text = write_card(folders[1], name="toy", license="mit", compared={"teacher": folders[0]}).read_text()
    assert "MiB: softmax" in text and "0.0469" in text
    assert "| speed |" not in text.split("## Speed and memory")[0] and "forward_ms_32" not in text.split("---")[1]
    check_card(folders[1])
    with refused("lengths: got 120 tokens and 9 more, expected at most the 128 positions of 'gpt'."):
        measure_speed({"gpt": small_model_of("gpt2")}, SpeedProtocol([32, 120], decode_tokens=9), progress=False)


def test_times_that_were_not_measured_together_are_not_compared(folders):
    one, two = judge_speed(folders[:1]), judge_speed(folders[1:])
    assert collect_speed({"softmax": one["teacher"], "mhla": two["mhla"]}) is None
    assert collect_speed({"softmax": one["teacher"], "mhla": [make_result()]}) is None
    assert len(Results.read(folders[1])) == 6
