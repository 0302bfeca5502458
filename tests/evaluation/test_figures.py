"""The picture of a comparison: a panel per score, curves by depth, nothing left out in silence.

Run: pytest tests/evaluation/test_figures.py
"""

import sys

import pytest
from PIL import Image
from small_scores import make_result

from mhla_hf.evaluation import figures
from mhla_hf.evaluation.figures import check_plot, plot_scores
from mhla_hf.evaluation.records import Results
from mhla_hf.evaluation.runner import Comparison, read_score_recipe


def test_scores_and_depths_are_drawn(tmp_path):
    depths = [make_result(metric=f"acc_back_{back}", value=0.9 - back / 1000) for back in (64, 128, 512)]
    models = Comparison({"teacher": Results([make_result(), *depths]), "out/mhla": Results(depths)})
    models.plot(tmp_path / "scores.png")
    with Image.open(tmp_path / "scores.png") as picture:
        assert picture.size[0] > 900 and len(picture.getcolors(1 << 24)) > 30
    assert [path.name for path in tmp_path.iterdir()] == ["scores.png"]
    with pytest.raises(ValueError, match="no score is there to draw"):
        plot_scores(tmp_path / "b.png", {"mhla": [make_result(value=None)]})
    assert not (tmp_path / "b.png").exists()


@pytest.fixture
def drawn(monkeypatch):
    """The figure that was written last."""
    seen = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path: seen.append(figure))
    return lambda: [axes for axes in seen[-1].axes if axes.get_visible()]


def test_the_columns_of_a_recipe_are_drawn_or_else_every_score_by_its_name(drawn):
    columns = read_score_recipe("table_9_class_to_image").columns
    for metrics, titles in (
        (["FID", "IS"], ["FID ↓", "IS ↑"]),
        (["precision (judge)", "IS (judge)"], ["imagenet_256\nprecision (judge) ↑", "imagenet_256\nIS (judge) ↑"]),
    ):
        records = [make_result(task="imagenet_256", metric=metric) for metric in metrics]
        plot_scores("any.png", {"teacher": records, "mhla": records}, columns)
        assert [axes.get_title("left") for axes in drawn()] == titles


def test_speed_is_a_curve_by_length_for_each_metric(drawn):
    models = {}
    for name, rate in (("teacher", 2.0), ("mhla", 1.0)):
        models[name] = [
            make_result(task="speed", metric=f"{metric}_{length}", value=rate * length, higher_is_better=False)
            for metric in ("forward_ms", "cache_mib")
            for length in (1024, 256, 512)
        ]
    plot_scores("any.png", models)
    titles = [axes.get_title("left") for axes in drawn()]
    assert titles == [f"speed\n{metric}, by length ↓" for metric in ("forward_ms", "cache_mib")]
    for axes in drawn():
        curves = {curve.get_label(): curve.lines[0].get_xydata().tolist() for curve in axes.containers}
        assert curves == {
            "teacher": [[256, 512], [512, 1024], [1024, 2048]],
            "mhla": [[256, 256], [512, 512], [1024, 1024]],
        }


def test_a_place_for_the_plot_is_looked_at_first(tmp_path, monkeypatch):
    check_plot(tmp_path / "plot.png")
    for place in (tmp_path, tmp_path / "nowhere" / "plot.png"):
        with pytest.raises(ValueError, match=r"plot: '.*' cannot be written; expected the name of a PNG in a folder"):
            check_plot(place)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install"):
        check_plot(tmp_path / "plot.png")
