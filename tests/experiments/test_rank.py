"""The rank of random-feature attention: plain linear stops at d, MHLA reaches its bound, softmax reaches N (table 1)."""

import json

import pytest

from experiments.studies.rank import measure_random_rank, render_random_rank, study_random_rank


@pytest.mark.parametrize("width", [16, 72])
@pytest.mark.parametrize("tokens", [64, 256, *(pytest.param(n, marks=pytest.mark.slow) for n in (1024, 4096))])
def test_every_kind_reaches_its_bound_and_none_passes_it(tokens, width):
    row = measure_random_rank(tokens, width)
    assert row["rank"]["linear"] == row["bound"]["linear"] == min(tokens, width)
    size = tokens // row["blocks"]
    assert row["rank"]["mhla"] == row["bound"]["mhla"] == min(tokens, row["blocks"] * min(size, width))
    assert row["rank"]["start"] == row["bound"]["start"] and row["rank"]["softmax"] == tokens
    assert all(share > 10 * row["tolerance"] for share in row["smallest"].values())


def test_blocks_of_different_sizes():
    row = measure_random_rank(200, 12, blocks=16, seed=1)  # eight blocks of 13 tokens, eight of 12
    assert row["rank"]["mhla"] == row["bound"]["mhla"] == 16 * 12
    row = measure_random_rank(70, 12, blocks=16, seed=1)  # six blocks of 5 tokens, ten of 4
    assert row["rank"]["mhla"] == row["bound"]["mhla"] == 70


def test_the_study_goes_on_where_it_was(tmp_path):
    sizes = {"lengths": (64, 128), "widths": (16,), "progress": False}
    study_random_rank(tmp_path, **sizes)
    before = json.loads((tmp_path / "rank.json").read_text())
    (tmp_path / "rank.json").write_text(json.dumps({**before, "rows": before["rows"][:1]}))
    again = study_random_rank(tmp_path, **sizes)
    rows, once_more = ([{**row, "seconds": 0} for row in record["rows"]] for record in (before, again))
    assert rows == once_more and json.loads((tmp_path / "rank.json").read_text()) == again
    assert (tmp_path / "rank.png").stat().st_size > 10_000
    assert "| 128 | 16 | 16 | 16 of 16 | 128 of 128 | 128 of 128 | 128 of 128 |" in render_random_rank(again)
    with pytest.raises(ValueError, match="another folder"):
        study_random_rank(tmp_path, lengths=(64,), widths=(16,), progress=False)
