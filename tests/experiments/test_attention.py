"""The matrices are those that the layers applied, the measures are what they are called, and ranks reach their bounds."""

import json
import math

import pytest
import torch
from tools.small_towers import softmax_tower

from experiments import attention
from mhla_hf.nn.grid import GridMHLA
from mhla_hf.nn.settings import MHLASettings


def whole(call, sample):
    return torch.stack([call.matrix(sample, head) for head in range(call.q.shape[2])])


@pytest.mark.parametrize(("normalize", "prefix"), [(True, 2), (False, 0), ("official", 0)])
def test_a_grid_layers_matrix_times_v_is_its_output(normalize, prefix):
    grid = (4, 6) if normalize == "official" else (5, 7)  # that denominator needs equal blocks
    q, k, v = (torch.randn(2, math.prod(grid) + prefix, 2, 6) for _ in range(3))
    settings = MHLASettings(layout=[2, 3], feature_map="relu", per_head=True, normalize=normalize)
    core = GridMHLA(settings, prefix=prefix, num_heads=2, key_dim=6, value_dim=6, hidden_size=8)
    for parameter in core.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    options = {"grid": grid, "key_mask": torch.rand(2, math.prod(grid) + prefix) > 0.2}
    (call,) = attention.record_model(core, {"q": q, "k": k, "v": v, **options})
    for sample in range(2):
        product = torch.einsum("hts,shv->thv", whole(call, sample), v[sample].double())
        torch.testing.assert_close(product.float(), core(q, k, v, **options)[sample], rtol=1e-4, atol=1e-5)


def test_softmax_matrices_are_those_that_the_model_itself_gives():
    model = softmax_tower("ViTForImageClassification").train()
    pixels = {"pixel_values": torch.randn(2, 3, model.config.image_size, model.config.image_size)}
    calls = attention.record_model(model, pixels)
    assert model.training and [call.kind for call in calls] == ["softmax"] * model.config.num_hidden_layers
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(**pixels, output_attentions=True).attentions
    for call, matrices in zip(calls, wanted, strict=True):
        for sample in range(2):
            torch.testing.assert_close(whole(call, sample).float(), matrices[sample], rtol=1e-4, atol=1e-6)


def test_measures():
    values = torch.tensor([4.0, 4.0, 4.0, 0.0], dtype=torch.float64)
    assert attention.count_rank(values, 1e-6) == 3 and attention.effective_rank(values) == pytest.approx(3.0)
    assert attention.count_rank(values * 0, 1e-6) == 0 and attention.effective_rank(values * 0) == 0.0
    rows = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [-2, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    expected = torch.tensor([0, math.log(4), math.log(2), math.nan], dtype=torch.float64)
    torch.testing.assert_close(attention.row_entropy(rows), expected, equal_nan=True)
    assert [attention.bound_of("mhla", 9, 16, sizes) for sizes in ([4] * 16, [64] * 16, [3, 20])] == [64, 256, 19]


@pytest.mark.parametrize(("tokens", "width"), [(64, 16), (256, 72)])
def test_every_kind_reaches_its_bound_and_none_passes_it(tokens, width):
    row = attention.measure_random_rank(tokens, width)
    assert row["rank"]["linear"] == row["bound"]["linear"] == min(tokens, width)
    size = tokens // row["blocks"]
    assert row["rank"]["mhla"] == row["bound"]["mhla"] == min(tokens, row["blocks"] * min(size, width))
    assert row["rank"]["start"] == row["bound"]["start"] and row["rank"]["softmax"] == tokens
    assert all(share > 10 * row["tolerance"] for share in row["smallest"].values())


def test_the_study_goes_on_where_it_was(tmp_path):
    attention.study_random_rank(tmp_path, (64, 128), (16,))
    before = json.loads((tmp_path / "rank.json").read_text())
    (tmp_path / "rank.json").write_text(json.dumps({**before, "rows": before["rows"][:1]}))
    again = attention.study_random_rank(tmp_path, (64, 128), (16,))
    assert before["rows"] == again["rows"] == json.loads((tmp_path / "rank.json").read_text())["rows"]
    assert "| 128 | 16 | 16 | 16 of 16 | 128 of 128 | 128 of 128 | 128 of 128 |" in attention.render_random_rank(again)
