"""Parameters and multiply-adds: a small model by hand, and those of the paper's table 2."""

import pytest
from small_towers import small_classifier

from experiments.costs import classifier_costs, count_flops


def test_counted_multiply_adds_are_the_formula():
    """One small model by hand: stem, projections and MLP, summaries, mixing, outputs, position convolution, classifier."""
    model, t, d, m = small_classifier(), 256, 24, 16
    layer = t * (4 * d * d + 8 * d * d) + t * d * 9
    attention = t * d * 8 + m * m * d * 8 + t * d * 8 + m * m * d + t * d
    total, outside = count_flops(model, 32, 32)
    assert outside == t * 4 * d + 2 * layer + d * 5
    assert total == outside + 2 * attention
    softmax = count_flops(small_classifier(attention="softmax"), 32, 32)
    assert softmax == (outside + 2 * 2 * t * t * d, outside)


@pytest.mark.parametrize(
    ("preset", "billions", "padded"), [("deit-t", 1.1, 256), pytest.param("vlt-t", 2.4, 224, marks=pytest.mark.slow)]
)
def test_multiply_adds_of_table_2(preset, billions, padded):
    (row,) = (row for row in classifier_costs((preset,)) if row["attention"] == "mhla")
    assert round(row["outside"] / 1e9, 1) == billions and row["padded_size"] == padded
    assert (row["padded_flops"] > 1.25 * row["flops"]) is (padded > 224)
