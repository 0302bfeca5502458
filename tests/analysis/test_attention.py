"""The matrices are those that the layers applied, and the measures are what they are called."""

import math

import pytest
import torch
from small_encoders import converted_encoder
from small_models import MODELS, scratch_model, softmax_model, tokens
from torch import nn

from mhla_hf.analysis.attention import is_uniform, record_attention
from mhla_hf.analysis.measures import (
    count_rank,
    describe_mixing,
    effective_rank,
    measure_calls,
    rank_bound,
    record_model,
    row_entropy,
)
from mhla_hf.nn.grid import GridMHLA
from mhla_hf.nn.settings import MHLASettings


class GridLayer(nn.Module):
    """One MHLA layer over a grid, its core shaken."""

    def __init__(self, prefix=0, heads=2, width=6, **settings):
        super().__init__()
        settings = MHLASettings(**{"layout": [2, 3], "feature_map": "relu", "per_head": True, **settings})
        sizes = {"num_heads": heads, "key_dim": width, "value_dim": width, "hidden_size": 8}
        self.mhla = GridMHLA(settings, prefix=prefix, **sizes)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.3 * torch.randn(parameter.shape)

    def forward(self, q, k, v, **options):
        return self.mhla(q, k, v, **options)


def measured(model, inputs, **options):
    return measure_calls(record_model(model, inputs), **options)["layers"]


def seen(model, *args, **kwargs):
    with record_attention(model) as found, torch.no_grad():
        output = model(*args, **kwargs)
    return found, output


def whole(call, sample):
    return torch.stack([call.matrix(sample, head) for head in range(call.q.shape[2])])


def check(call, v, output):
    """The matrix of every sample and head, times v, is what came out."""
    v = v.double().repeat_interleave(output.shape[2] // v.shape[2], 2)
    for sample in range(len(v)):
        got = torch.einsum("hts,shv->thv", whole(call, sample), v[sample])
        torch.testing.assert_close(got.float(), output[sample], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False, "official"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_grid_layers_matrix_times_v_is_its_output(normalize, prefix):
    grid = (4, 6) if normalize == "official" else (5, 7)  # that denominator needs equal blocks
    prefix = 0 if normalize == "official" else prefix
    q, k, v = (torch.randn(2, math.prod(grid) + prefix, 2, 6) for _ in range(3))
    mask = torch.rand(2, math.prod(grid) + prefix) > 0.2
    found, output = seen(GridLayer(prefix, normalize=normalize), q, k, v, grid=grid, key_mask=mask)
    check(found[0], v, output)


def test_rotated_features_with_a_denominator_of_their_own():
    q, k, v = (torch.randn(1, 24, 2, 6) for _ in range(3))
    turn = torch.randn(24, 1, 6).abs()
    found, output = seen(GridLayer(rope="after"), q, k, v, grid=(4, 6), rotate=lambda a, b: (a * turn, b * turn))
    assert found[0].options["q_den"] is not None
    check(found[0], v, output)


@pytest.mark.parametrize(
    "make",
    [
        lambda: scratch_model(gate=False, output_norm=False),
        lambda: scratch_model(normalize=True, gate=False, output_norm=False),
        MODELS["llama-window"],
        MODELS["llama-decay"],
    ],
)
def test_a_language_models_matrices_times_v_are_its_layers_outputs_on_padded_rows_too(make):
    model = make()
    core = next(module for name, module in model.named_modules() if name.endswith(".mhla"))
    kept = {}
    core.register_forward_hook(lambda core, args, output: kept.update(v=args[2], o=output))
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :5] = 0
    found, _ = seen(model, input_ids=tokens(2, 21), attention_mask=mask, use_cache=False)
    kept["o"][0, :5] = 0
    mine = next(call for call in found if call.kind == "mhla")
    check(mine, kept["v"], kept["o"])
    assert "form" not in mine.options or 0 < mine.far_share(1) < 1


def test_an_encoders_matrices_times_v_are_its_layers_outputs_where_nothing_is_padding():
    model, kept = converted_encoder("bert", block_size=8), {}
    core = next(module for name, module in model.named_modules() if name.endswith(".mhla"))
    core.register_forward_hook(lambda core, args, output: kept.update(v=args[2], o=output))
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1, 17:] = 0
    found, _ = seen(model, input_ids=tokens(2, 21), attention_mask=mask)
    assert not found[0].is_causal
    check(found[0], kept["v"], kept["o"])
    with pytest.raises(ValueError, match="got rows that begin with padding"):
        seen(model, input_ids=tokens(2, 21), attention_mask=mask.flip(1))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_softmax_matrices_are_those_that_the_model_itself_gives(family):
    model, ids = softmax_model(family), tokens(2, 17)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[1, 14:] = 0
    found, _ = seen(model, input_ids=ids, attention_mask=mask, use_cache=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, output_attentions=True, use_cache=False).attentions
    assert [call.layer for call in found] == [f"model.layers.{i}.self_attn" for i in range(3)]
    for call, matrix in zip(found, wanted, strict=True):
        for sample, rows in ((0, 17), (1, 14)):
            got = whole(call, sample)[:, :rows].float()
            torch.testing.assert_close(got, matrix[sample, :, :rows], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "mhla"])
def test_plain_linear_attention_never_passes_d(kind):
    """The same layer, with uniform and with learned mixing: d is the wall for one, the sum over blocks for the other."""
    settings = {"mixing_start": "uniform"} if kind == "linear" else {}
    layer = GridLayer(layout=[4, 4], width=4, per_head=False, **settings)
    if kind == "linear":
        layer.mhla.mixing.weight.data.zero_()
    q, k, v = (torch.randn(1, 256, 2, 4) for _ in range(3))
    (own,) = measured(layer, {"q": q, "k": k, "v": v, "grid": (16, 16)}, tolerance=1e-12)
    assert own["kind"] == kind and own["rank"] == own["rank_max"] == own["bound"] == (4 if kind == "linear" else 64)
    assert own["uniform_entropy"] == pytest.approx(math.log(256), abs=1e-3)
    assert 0 < own["entropy"] < math.log(256)


def test_causal_layers_are_measured_where_nothing_is_hidden():
    """A triangle has full rank whatever fills it; the lower left quarter tells plain linear attention from softmax."""
    config = {"feature_map": "relu", "normalize": True, "gate": False, "output_norm": False}
    linear = scratch_model(mixing_start="uniform", learn_mixing=False, **config)
    for module in linear.modules():
        if hasattr(module, "form"):
            module.weight.data.copy_(module.initial_values()["weight"])
    inputs = {"input_ids": tokens(1, 128), "use_cache": False}
    calls = record_model(linear, inputs)
    found = measure_calls(calls, tolerance=1e-10)["layers"]
    assert {layer["kind"] for layer in found} == {"linear"}
    assert all(layer["rank_max"] <= layer["bound"] == layer["key_width"] for layer in found)
    assert all(layer["part"] == "second half on first half" for layer in found)
    ((call, *_), *_) = calls.values()
    assert torch.linalg.matrix_rank(call.matrix()) > 100 > call.q.shape[-1]
    softmax = measured(softmax_model(), inputs, tolerance=1e-10)
    assert all(layer["rank_min"] > 8 and layer["bound"] == 64 for layer in softmax)


def test_measures():
    values = torch.tensor([4.0, 4.0, 4.0, 0.0], dtype=torch.float64)
    assert count_rank(values, 1e-6) == 3 and effective_rank(values) == pytest.approx(3.0)
    assert count_rank(values * 0, 1e-6) == 0 and effective_rank(values * 0) == 0.0
    rows = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [-2, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    entropy = row_entropy(rows)
    torch.testing.assert_close(entropy[:3], torch.tensor([0, math.log(4), math.log(2)], dtype=torch.float64))
    assert entropy[3].isnan()
    assert rank_bound([4] * 16, 16) == 64 and rank_bound([64] * 16, 16) == 256 and rank_bound([3, 20], 16) == 19


def test_mixing_beside_its_start():
    described = describe_mixing(MODELS["llama-hybrid"]())["model.layers.1.self_attn"]
    start, learned = (torch.tensor(described[key]) for key in ("start", "learned"))
    assert start.shape == learned.shape == (4, 4) and start[3].argmax() == 3
    torch.testing.assert_close(start.sum(-1), torch.ones(4))
    assert 0 < described["moved"] < 1 and not torch.equal(start, learned)
    assert is_uniform(torch.ones(1, 3, 3).tril() * torch.tensor([1.0, 0.5, 0.3])[:, None], causal=True)
    assert not is_uniform(start[None], causal=True)
