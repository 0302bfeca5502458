"""The picture of a comparison: a panel per score, curves by depth, nothing left out in silence.

Run: pytest tests/scores/test_figures.py
"""

import pytest
from PIL import Image
from small_scores import make_result

from mhla_hf.scores.evaluation import Comparison
from mhla_hf.scores.figures import colours_of, plot_scores
from mhla_hf.scores.recipes import read_score_recipe
from mhla_hf.scores.results import Results


def test_scores_and_depths_are_drawn(tmp_path):
    depths = [make_result(metric=f"acc_back_{back}", value=0.9 - back / 1000) for back in (64, 128, 512)]
    scores = [make_result(), make_result(metric="bpb", higher_is_better=False, value=1.9, stderr=None)]
    models = Comparison({"teacher": Results(scores + depths), "out/mhla": Results(scores[:1] + depths)})
    models.plot(tmp_path / "scores.png")
    with Image.open(tmp_path / "scores.png") as picture:
        assert picture.size[0] > 900 and len(picture.getcolors(1 << 24)) > 30
    assert [path.name for path in tmp_path.iterdir()] == ["scores.png"]


def test_a_recipe_gives_the_panels(tmp_path):
    recipe = read_score_recipe("table_6_language")
    records = [make_result(task=c["task"], metric=c["metric"]) for c in recipe.columns.values() if "metric" in c]
    plot_scores(tmp_path / "table.png", {"mhla": records}, recipe.columns)
    with Image.open(tmp_path / "table.png") as picture:
        assert picture.size[1] > 600


def test_too_much_and_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="25 scores are too many for one figure; choose at most 24"):
        plot_scores(tmp_path / "a.png", {"mhla": [make_result(task=f"t{number}") for number in range(25)]})
    with pytest.raises(ValueError, match="no score is there to draw"):
        plot_scores(tmp_path / "a.png", {"mhla": [make_result(value=None)]})
    assert not list(tmp_path.iterdir())


def test_a_model_has_the_colour_of_all_our_figures():
    colours = colours_of(["teacher", "plain linear", "mhla", "mhla-2", "other"])
    assert len(set(colours.values())) == 5 and colours["mhla"] == "#2563c9"
