"""The core with salient tokens: padding, autocast, and a cache."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import check_that_padding_may_hold_anything, distance, generated, salient_cases, strided

from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.nn.salient import SalientCore
from mhla_hf.nn.settings import MHLASettings

SIZES = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 6, "value_dim": 5}


def make(**settings):
    settings = {"block_size": 4, "sinks": 2, "window": 2, "salient": 3, **settings}
    return SalientCore(MHLASettings(mixing_form="decay", windowed=True, **settings), **SIZES)


def inputs(tokens, batch=2):
    return [torch.randn(batch, tokens, heads, width) for heads, width in ((4, 6), (2, 6), (2, 5))]


def test_it_has_no_parameters():
    assert not list(make().parameters()) and not make().state_dict()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_hold_anything(side, window):
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :11] = False
    real = real if side == "left" else real.flip(1)
    check_that_padding_may_hold_anything(make(window=window), inputs(40), real)


@torch.no_grad()
def test_autocast_changes_nothing():
    core, (q, k, v) = make(), inputs(40)
    expected = core(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = MHLACacheLayer()
        pieces = [
            core(*(x[:, a:b] for x in (q, k, v)), cache=cache)
            for a, b in ((0, 30), *((t, t + 1) for t in range(30, 40)))
        ]
        assert torch.equal(core(q, k, v), expected)
    assert all(x.dtype != torch.bfloat16 for x in cache.state.tensors().values())
    assert distance(torch.cat(pieces, 1), expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_dtype_and_is_near(dtype):
    """Rounding changes which tokens are salient, so all are: 12 blocks of the 4 tokens each."""
    core, tensors = make(salient=48), inputs(48)
    expected, halves = core(*tensors), [x.to(dtype) for x in tensors]
    cache = MHLACacheLayer()
    pieces = [
        core(*(x[:, a:b] for x in halves), cache=cache) for a, b in ((0, 30), *((t, t + 1) for t in range(30, 48)))
    ]
    for o in (core(*halves), torch.cat(pieces, 1)):
        assert o.dtype == dtype and distance(o, expected) <= 1e-2


def test_another_scale_is_used():
    core, (q, k, v) = make(), inputs(40)
    assert distance(core(q, k, v, scale=0.3), core(q * (0.3 * 6**0.5), k, v)) <= 1e-5


@generated(50)
@given(case=salient_cases(), share=st.sampled_from([0.3, 0.7, 1.0]))
@torch.no_grad()
def test_generated_padding_in_a_cache(case, share):
    """Each row is the row alone, wherever its padding stands and however it is fed.

    In fp64, because rounding in fp32 could change which tokens are salient.
    """
    torch.manual_seed(case["seed"])
    options, (batch, tokens), (heads, groups) = case["options"], case["shape"], case["heads"]
    given = {name: getattr(options, name) for name in ("block_size", "window", "sinks", "salient")}
    settings = MHLASettings(mixing_form="decay", windowed=True, **given)
    core = SalientCore(settings, num_heads=heads, num_kv_heads=groups, key_dim=4, value_dim=3)
    shapes = ((heads, 4), (groups, 4), (groups, 3))
    tensors = [torch.randn(batch, tokens, *shape, dtype=torch.float64) for shape in shapes]
    tensors = [strided(x) if case["strided"] else x for x in tensors]
    real, cache, o, at = torch.rand(batch, tokens) < share, MHLACacheLayer(), tensors[0][:, :0, :, :3], 0
    for count, _ in case["plan"]:
        new = slice(at, min(at + count, tokens))
        if new.start == new.stop:
            break
        mask = None if real[:, new].all() else real[:, new]
        piece = core(*(x[:, new] for x in tensors), key_mask=mask, cache=cache)
        cache.count(piece)
        o, at = torch.cat([o, piece], 1), new.stop
    together = core(*(x[:, :at] for x in tensors), key_mask=real[:, :at])
    assert not together[~real[:, :at]].any()
    for row in range(batch):
        own = real[row, :at]
        if own.any():
            alone = core(*(x[row : row + 1, :at][:, own] for x in tensors))
            assert distance(o[row : row + 1, own], alone) <= 1e-11
            assert distance(together[row : row + 1, own], alone) <= 1e-11
