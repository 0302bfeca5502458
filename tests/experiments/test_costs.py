"""Parameters and multiply-adds: a small model by hand, and those of the paper's table 2."""

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


def test_multiply_adds_of_table_2():
    rows = {row["preset"]: row for row in classifier_costs(("deit-t", "vlt-t")) if row["attention"] == "mhla"}
    assert round(rows["deit-t"]["outside"] / 1e9, 1) == 1.1 and round(rows["vlt-t"]["outside"] / 1e9, 1) == 2.4
    assert rows["deit-t"]["padded_size"] == 256 and rows["deit-t"]["padded_flops"] > 1.25 * rows["deit-t"]["flops"]
    assert rows["vlt-t"]["padded_flops"] == rows["vlt-t"]["flops"]
