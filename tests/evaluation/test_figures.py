"""The picture of a comparison: a panel per score, curves by depth, nothing left out in silence."""

import sys

import pytest
from matplotlib.figure import Figure
from PIL import Image
from small_scores import make_result

from mhla_hf.evaluation.figures import check_plot, plot_scores
from mhla_hf.evaluation.records import Results
from mhla_hf.evaluation.runner import Comparison, read_score_recipe


def test_scores_and_depths_are_drawn(tmp_path):
    depths = [make_result(metric=f"acc_back_{back}", value=0.9 - back / 1000) for back in (64, 128, 512)]
    models = Comparison({"teacher": Results([make_result(), *depths]), "out/mhla": Results(depths)})
    models.plot(tmp_path / "scores.png")
    with Image.open(tmp_path / "scores.png") as picture:
        assert picture.size[0] > 900 and len(picture.getcolors(1 << 24)) > 30
    with pytest.raises(ValueError, match="no score is there to draw"):
        plot_scores(tmp_path / "b.png", {"mhla": [make_result(value=None)]})
    assert [path.name for path in tmp_path.iterdir()] == ["scores.png"]


FID = ["FID", "IS"], ["FID ↓", "IS ↑"]
JUDGE = ["precision (judge)", "IS (judge)"], ["imagenet_256\nprecision (judge) ↑", "imagenet_256\nIS (judge) ↑"]


@pytest.mark.parametrize(("metrics", "titles"), [FID, JUDGE])
def test_the_columns_of_a_recipe_are_drawn_or_else_every_score_and_speed_by_length(
    tmp_path, monkeypatch, metrics, titles
):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: path.touch() or drawn.extend(figure.axes))
    models = {}
    for name, rate in (("teacher", 2.0), ("mhla", 1.0)):
        speed = {"task": "speed", "higher_is_better": False}
        models[name] = [make_result(task="imagenet_256", metric=metric) for metric in metrics]
        for length in (1024, 256, 512):
            values = {"metric": f"forward_ms_{length}", "value": rate * length}
            models[name].append(make_result(**{**speed, **values}))
    plot_scores(tmp_path / "any.png", models, read_score_recipe("table_9_class_to_image").columns)
    drawn = [axes for axes in drawn if axes.get_visible()]
    assert [axes.get_title("left") for axes in drawn] == [*titles, "speed\nforward_ms, by length ↓"]
    curves = {curve.get_label(): curve.lines[0].get_xydata().tolist() for curve in drawn[-1].containers}
    assert curves == {
        name: [[n, rate * n] for n in (256, 512, 1024)] for name, rate in (("teacher", 2.0), ("mhla", 1.0))
    }


def test_a_place_for_the_plot_is_looked_at_first(tmp_path, monkeypatch):
    check_plot(tmp_path / "plot.png")
    for place in (tmp_path, tmp_path / "nowhere" / "plot.png"):
        with pytest.raises(ValueError, match=r"plot: '.*' cannot be written; expected the name of a PNG in a folder"):
            check_plot(place)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install"):
        check_plot(tmp_path / "plot.png")
