"""The cores by decays and with salient tokens, in half precision and beside padding; that of encoders by definition."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import (
    check_that_padding_may_hold_anything,
    distance,
    generated,
    salient_cases,
    strided,
    windowed_cases,
)

from mhla_hf.models.language.cache import MHLACacheLayer
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.salient import SalientCore
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.nn.windowed import DecayMHLA, TwoWayMHLA
from mhla_hf.ops.windowed.definition import windowed_reference
from mhla_hf.ops.windowed.inputs import WindowedInputs

SIZES = {"num_heads": 2, "num_kv_heads": 1, "key_dim": 8, "value_dim": 8, "hidden_size": 16}


@torch.no_grad()
@pytest.mark.parametrize("tokens", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_state_in_bf16_does_not_drift(tokens):
    """Fed in pieces and at last token by token, against one pass over everything."""
    torch.manual_seed(0)
    settings = MHLASettings(mixing_form="decay", windowed=True)
    core = DecayMHLA(settings, num_heads=2, num_kv_heads=1, key_dim=32, value_dim=32, hidden_size=64).eval()
    core = core.bfloat16()
    q, k, v = (torch.randn(1, tokens, heads, 32).bfloat16() for heads in (2, 1, 1))
    whole, cache, start = core(q, k, v), MHLACacheLayer(), 0
    for end in (*range(1_000, tokens - 100, 1_000), *range(tokens - 100, tokens + 1)):
        o = core(q[:, start:end], k[:, start:end], v[:, start:end], cache=cache)
        expected = whole[:, start:end].float()
        assert (o.float() - expected).norm() <= 1e-2 * expected.norm()
        start = end


def test_a_dropped_window_changes_training_alone():
    settings = MHLASettings(mixing_form="decay", windowed=True, block_size=8, window_dropout=1.0)
    core = DecayMHLA(settings, **SIZES)
    q, k, v = (torch.randn(1, 40, heads, 8) for heads in (2, 1, 1))
    evaluated, trained = core.eval()(q, k, v), core.train()(q, k, v)
    torch.testing.assert_close(trained[:, :8], evaluated[:, :8])
    assert not torch.allclose(trained[:, 8:], evaluated[:, 8:])
    cache = MHLACacheLayer()  # a model of transformers makes one in training, too
    torch.testing.assert_close(core(q, k, v, cache=cache), trained)
    assert cache.state.position.tolist() == [40]


@generated(100)
@given(case=windowed_cases() | salient_cases(), dense=st.booleans(), share=st.sampled_from([0.3, 0.7, 1.0]))
@torch.no_grad()
def test_generated_padding_in_a_cache(case, dense, share):
    """Each row is the row alone, wherever its padding stands, however it is fed and whatever is taken back.

    Salient tokens in fp64, because rounding in fp32 could change which they are, and without crops, which leave votes.
    """
    torch.manual_seed(case["seed"])
    options, (batch, tokens), (heads, groups) = case["options"], case["shape"], case["heads"]
    near = {"windowed": case["softmax"], "window": options.window, "sinks": options.sinks, "salient": options.salient}
    near |= {"mixing_form": "decay", "num_decays": len(case["log_rate"])}
    near = {} if dense and not options.salient else near
    settings = MHLASettings(feature_map="relu", impl="torch", num_blocks=3, block_size=options.block_size, **near)
    core = {"matrix": MHLA, "decay": DecayMHLA, "salient": SalientCore}[settings.core]
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


STARTS, ENDS = (0, 7, 3, 12), (19, 19, 11, 12)  # the last row is all padding
REAL = torch.stack(
    [(start <= torch.arange(19)) & (end > torch.arange(19)) for start, end in zip(STARTS, ENDS, strict=True)]
)


@pytest.mark.parametrize(("window", "heads", "groups"), [(1, 4, 2), (2, 2, 2), (3, 4, 1), (6, 2, 1)])
def test_two_ways_near_by_softmax_and_far_by_decays(window, heads, groups):
    """Outputs and gradients; the mixing is in fp32."""
    settings = {"mixing_form": "decay", "windowed": True, "window": window, "sinks": 0, "feature_map": "exp"}
    core = TwoWayMHLA(
        MHLASettings(block_size=4, num_decays=2, free_decay=True, **settings),
        num_heads=heads, num_kv_heads=groups, key_dim=5, value_dim=3, hidden_size=6,
    ).double()  # fmt: skip
    with torch.no_grad():
        core.mixing.balance.uniform_(-1, 1)
    shapes = ((heads, 5), (groups, 5), (groups, 3))
    q, k, v = (torch.randn(4, 19, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    o = core(q, k, v, starts=torch.tensor(STARTS), key_mask=REAL, scale=0.5)
    expected, (decays, balance) = torch.zeros_like(o), core.mixing()
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        if start < end:
            alone = [x[row : row + 1, start:end] for x in (q, k, v)]
            form = dataclasses.replace(core.options, scale=0.5)
            inputs = WindowedInputs(*alone, core.q_map(alone[0]), decays, balance, form)
            expected[row, start:end] = windowed_reference(inputs, core.k_map(alone[1]))[0]
    assert distance(o[REAL], expected[REAL]) < 1e-7
    pull, leaves = torch.randn_like(o), (q, k, v, core.mixing.weight, core.mixing.rate, core.k_map.weight)
    options = {"allow_unused": True, "materialize_grads": True}
    grads = [torch.autograd.grad((x * pull)[REAL].sum(), leaves, **options) for x in (o, expected)]
    for found, wanted in zip(*grads, strict=True):
        assert distance(found, wanted) < 1e-6 or float(found.abs().max()) == float(wanted.abs().max()) == 0


def make_salient(**settings):
    settings = {"block_size": 4, "sinks": 2, "window": 2, "salient": 3, **settings}
    sizes = {"num_heads": 4, "num_kv_heads": 2, "key_dim": 6, "value_dim": 5}
    return SalientCore(MHLASettings(mixing_form="decay", windowed=True, **settings), **sizes)


def inputs(tokens, batch=2):
    return [torch.randn(batch, tokens, heads, width) for heads, width in ((4, 6), (2, 6), (2, 5))]


def in_pieces(core, tensors, tokens):
    """The outputs for a prompt of 30 tokens and then token by token, and the cache."""
    cache, cuts = MHLACacheLayer(), itertools.pairwise([0, *range(30, tokens + 1)])
    return torch.cat([core(*(x[:, a:b] for x in tensors), cache=cache) for a, b in cuts], 1), cache


def test_salient_tokens_have_no_parameters():
    assert not list(make_salient().parameters()) and not make_salient().state_dict()


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_beside_salient_tokens_may_hold_anything(side, window):
    real = torch.ones(2, 40, dtype=torch.bool)
    real[1, :11] = False
    real = real if side == "left" else real.flip(1)
    check_that_padding_may_hold_anything(make_salient(window=window), inputs(40), real)


@torch.no_grad()
def test_autocast_changes_nothing_of_salient_tokens():
    core, tensors = make_salient(), inputs(40)
    expected = core(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        decoded, cache = in_pieces(core, tensors, 40)
        assert torch.equal(core(*tensors), expected)
    assert all(x.dtype != torch.bfloat16 for x in cache.state.tensors().values())
    assert distance(decoded, expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_salient_tokens_in_half_precision(dtype):
    """Rounding changes which tokens are salient, so all are: 12 blocks of the 4 tokens each."""
    core, tensors = make_salient(salient=48), inputs(48)
    expected, halves = core(*tensors), [x.to(dtype) for x in tensors]
    for o in (core(*halves), in_pieces(core, halves, 48)[0]):
        assert o.dtype == dtype and distance(o, expected) <= 1e-2


def test_another_scale_of_salient_tokens_is_used():
    core, (q, k, v) = make_salient(), inputs(40)
    assert distance(core(q, k, v, scale=0.3), core(q * (0.3 * 6**0.5), k, v)) <= 1e-5
