"""The causal core in half precision and in a cache, and both causal cores beside padding."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import check_that_padding_may_hold_anything, distance, generated, strided, windowed_cases

from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.salient import SalientCore
from mhla_hf.nn.settings import MHLASettings


@generated(100)
@given(case=windowed_cases(), dense=st.booleans(), share=st.sampled_from([0.3, 0.7, 1.0]))
@torch.no_grad()
def test_generated_padding_in_a_cache(case, dense, share):
    """Each row is the row alone, wherever its padding stands, however it is fed and whatever is taken back.

    Salient tokens in fp64, because rounding in fp32 could change which they are, and without crops, which leave votes.
    """
    torch.manual_seed(case["seed"])
    options, (batch, tokens), (heads, groups) = case["options"], case["shape"], case["heads"]
    is_windowed = bool(options.salient) or not dense
    near = {"windowed": is_windowed, "window": options.window, "sinks": options.sinks, "salient": options.salient}
    settings = MHLASettings(feature_map="relu", impl="torch", num_blocks=3, block_size=options.block_size, **near)
    core = SalientCore if is_windowed else MHLA
    core = core(settings, num_heads=heads, num_kv_heads=groups, key_dim=4, value_dim=3, hidden_size=8)
    dtype, bound = (torch.float64, 1e-11) if options.salient else (torch.float32, 1e-5)
    shapes = ((heads, 4), (groups, 4), (groups, 3))
    inputs = [torch.randn(batch, tokens, *shape, dtype=dtype) for shape in shapes]
    inputs = [strided(x) if case["strided"] else x for x in inputs]
    real, cache, columns, o, fed = torch.rand(batch, tokens) < share, MHLACacheLayer(), [], inputs[0][:, :0, :, :3], 0
    for count, back in case["plan"]:
        new = list(range(fed, min(fed + count, tokens)))
        if not new:
            break
        mask = None if real[:, new].all() else real[:, new]
        piece = core(*(x[:, new] for x in inputs), key_mask=mask, cache=cache)
        cache.count(piece)
        o, columns, fed = torch.cat([o, piece], 1), columns + new, fed + len(new)
        whole, kept = [x[:, columns] for x in inputs], real[:, columns]
        together = core(*whole, key_mask=kept)
        for row in range(batch):
            own = kept[row]
            if own.any():
                alone = core(*(x[row : row + 1, own] for x in whole))
                assert distance(o[row : row + 1, own], alone) <= bound
                assert distance(together[row : row + 1, own], alone) <= bound
        back = 0 if options.salient else min(back, options.block_size)
        try:
            cache.crop(-back)
        except ValueError:
            continue
        assert kept[:, len(columns) - back :].all()
        columns = columns[: len(columns) - back]
        o = o[:, : len(columns)]


def make_core(**settings):
    settings = {"block_size": 4, "sinks": 2, "window": 2, "salient": 3, **settings}
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 6, "value_dim": 5}
    return SalientCore(MHLASettings(windowed=True, **settings), **sizes)


def inputs(tokens, batch=2):
    return [torch.randn(batch, tokens, heads, width) for heads, width in ((4, 6), (2, 6), (2, 5))]


def in_pieces(core, tensors, tokens):
    """The outputs for a prompt of 30 tokens and then token by token, and the cache."""
    cache, cuts = MHLACacheLayer(), itertools.pairwise([0, *range(30, tokens + 1)])
    return torch.cat([core(*(x[:, a:b] for x in tensors), cache=cache) for a, b in cuts], 1), cache


@pytest.mark.parametrize(("window", "salient"), [(1, 3), (2, 3), (2, 0)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_hold_anything(side, window, salient):
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :11] = False
    real = real if side == "left" else real.flip(1)
    check_that_padding_may_hold_anything(make_core(window=window, salient=salient), inputs(40), real)


@torch.no_grad()
@pytest.mark.parametrize("salient", [0, 3])
def test_autocast_changes_nothing(salient):
    core, tensors = make_core(salient=salient), inputs(40)
    expected = core(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded, cache = in_pieces(core, tensors, 40)
        assert torch.equal(core(*tensors), expected)
    assert all(x.dtype != torch.bfloat16 for x in cache.state.tensors().values())
    assert distance(decoded, expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "salient"), [(torch.float16, 48), (torch.bfloat16, 48), (torch.bfloat16, 0)])
def test_half_precision(dtype, salient):
    """Rounding changes which tokens are salient, so all are, 12 blocks of the 4 tokens each, or none."""
    core, tensors = make_core(salient=salient), inputs(48)
    expected, halves = core(*tensors), [x.to(dtype) for x in tensors]
    for o in (core(*halves), in_pieces(core, halves, 48)[0]):
        assert o.dtype == dtype and distance(o, expected) <= 1e-2


def test_another_scale_is_used():
    core, (q, k, v) = make_core(), inputs(40)
    assert distance(core(q, k, v, scale=0.3), core(q * (0.3 * 6**0.5), k, v)) <= 1e-5
