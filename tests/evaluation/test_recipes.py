"""Score recipes: every task they name exists in the installed lm-eval, and the columns are those of the paper's tables.

Run: pytest tests/evaluation/test_recipes.py
"""

import re

import pytest
import yaml
from small_scores import make_result

from mhla_hf.evaluation.recipes import FOLDER, read_score_recipe, recipe_names, with_settings
from mhla_hf.evaluation.records import Results, paper_rows
from mhla_hf.evaluation.runner import Comparison

# two rows of each table of the paper, as printed
TABLE_6 = {
    "GLA (340M)": "22.9 46.0 50.0 62.9 25.5 31.0 45.8 60.8 41.47 86.98",
    "MHLA (340M)": "23.7 47.1 51.3 64.4 25.9 33.4 46.5 61.3 38.31 71.64",
}
TABLE_8 = {
    "Mamba(360M)": "3.37 2.36 1.60 4.57 2.28 5.16 5.49 1.10 0.10 12.23 18.36 14.96 13.63 12.33 6.97",
    "MHLA(325M)": "3.58 2.97 1.87 4.68 2.38 6.41 6.44 1.69 1.49 12.58 18.59 15.01 13.37 12.72 7.41",
}
PAPER = {"table_6_language": TABLE_6, "table_8_longbench": TABLE_8}


def language_recipes():
    return [name for name in recipe_names() if read_score_recipe(name).kind == "language" and name != "recall"]


@pytest.mark.parametrize("name", language_recipes())
def test_every_task_exists_with_the_metric_of_its_column(manager, name):
    recipe = read_score_recipe(name)
    assert set(recipe.tasks) <= set(manager.all_tasks)
    assert set(recipe.tasks.values()) == {0}
    for label, column in recipe.columns.items():
        if "mean_of" in column:
            continue
        assert column["task"] in recipe.tasks, label
        metrics = listed_metrics(manager, column["task"])
        assert metrics is None or column["metric"] in metrics, label
        if label.endswith("acc_n"):
            assert column["metric"] == "acc_norm"
    assert {column["task"] for column in recipe.columns.values() if "task" in column} in (set(), set(recipe.tasks))


def listed_metrics(manager, task):
    """Metrics that the task's own YAML lists; None where it lists none (group, or inherited)."""
    path = manager.task_index[task].yaml_path
    listed = re.findall(r"- metric: \"?([\w]+)", path.read_text(encoding="utf-8"))
    return set(listed) or None


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_rows_come_out_of_their_parts(name):
    """With the columns' scores put in, each printed average is what the recipe computes."""
    recipe = read_score_recipe(name)
    for printed in PAPER[name].values():
        cells = dict(zip(recipe.columns, map(float, printed.split()), strict=True))
        records = [
            make_result(task=c["task"], metric=c["metric"], value=cells[label] / (100 if c.get("percent") else 1))
            for label, c in recipe.columns.items()
            if "mean_of" not in c
        ]
        header, (row,) = paper_rows({"paper": records}, recipe.columns)
        assert [cell.rstrip(" ↑↓") for cell in header[1:]] == list(cells)
        for label, cell in zip(cells, row[1:], strict=True):
            assert float(cell.split(" ± ")[0]) == pytest.approx(cells[label], abs=0.0501 if name[6] == "6" else 0.00501)


def test_a_mean_is_refused_while_a_part_is_missing_and_carries_its_error():
    recipe = read_score_recipe("table_6_language")
    parts = [column for column in recipe.columns.values() if column.get("percent")]
    records = [make_result(task=c["task"], metric=c["metric"], value=0.5, stderr=0.01) for c in parts]
    compared = Comparison({"whole": Results(records), "less": Results(records[:-1])})
    compared.recipe = recipe
    whole, less = compared.paper_table("markdown").splitlines()[2:]
    assert "| 50.00 ± 0.41 |" in whole and "0.41" not in less
    assert compared.paper_table().splitlines()[0].startswith("model")
    assert Comparison().paper_table() == ""


def test_settings_are_replaced_one_by_one():
    recipe = with_settings(read_score_recipe("recall"), {"lengths": [256]})
    assert recipe.settings["lengths"] == [256] and recipe.settings["items"] == 20 and recipe.name == "recall"


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_say_what_they_are_for(name):
    assert len(read_score_recipe(name).about) > 60 and (FOLDER / f"{name}.yaml").is_file()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("nothing", "holds a str"),
        ("{", "is not YAML"),
        ({"kind": "music", "tasks": ["a"]}, "kind is 'music'; expected one of ['language'"),
        ({"kind": "language"}, "tasks is missing"),
        ({"kind": "language", "tasks": {"a": "many"}}, "tasks is {'a': 'many'}; expected"),
        ({"kind": "language", "tasks": ["a"], "colour": 1}, "unknown 'colour'"),
        ({"kind": "language", "tasks": ["a"], "settings": [1]}, "settings is [1]; expected dict"),
        (
            {"kind": "language", "tasks": ["a"], "columns": {"x": {"mean_of": ["y"]}}},
            "column 'x' is {'mean_of': ['y']}; expected task and metric",
        ),
        ({"kind": "language", "tasks": ["a"], "columns": {"x": {"taks": "a"}}}, "column 'x' is"),
    ],
)
def test_a_broken_recipe_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "own.yaml"
    path.write_text(content if isinstance(content, str) else yaml.dump(content))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_score_recipe(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="is no file; expected one, or a name: recall, ruler"):
        read_score_recipe("nothing")
