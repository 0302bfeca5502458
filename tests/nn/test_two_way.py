"""The core of encoders by definition, and beside padding."""

import dataclasses

import pytest
import torch
from tools.ops_cases import check_that_padding_may_hold_anything, distance

from mhla_hf.nn.settings import MHLASettings
from mhla_hf.nn.two_way import TwoWayMHLA
from mhla_hf.ops.windowed.definition import two_way_reference
from mhla_hf.ops.windowed.two_way import FarPart

STARTS, ENDS = (0, 7, 3, 12), (19, 19, 11, 12)  # the last row is all padding
PLACES = torch.arange(19)
REAL = (torch.tensor(STARTS)[:, None] <= PLACES) & (torch.tensor(ENDS)[:, None] > PLACES)


def make_core(window, heads, groups, feature_map="exp"):
    settings = MHLASettings(block_size=4, windowed=True, window=window, sinks=0, feature_map=feature_map)
    core = TwoWayMHLA(settings, num_heads=heads, num_kv_heads=groups, key_dim=5, value_dim=3, hidden_size=6)
    with torch.no_grad():
        core.mixing.rate.copy_(torch.linspace(0, 2, groups))
        core.mixing.balance.uniform_(-1, 1)
    return core


def inputs(heads, groups, dtype):
    shapes = ((heads, 5), (groups, 5), (groups, 3))
    return [torch.randn(4, 19, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("window", "heads", "groups"), [(1, 4, 2), (2, 2, 2), (3, 4, 1), (6, 2, 1)])
def test_every_row_is_the_row_alone_by_definition(window, heads, groups):
    """Outputs and gradients; the mixing is in fp32."""
    core = make_core(window, heads, groups).double()
    q, k, v = inputs(heads, groups, torch.float64)
    o = core(q, k, v, starts=torch.tensor(STARTS), key_mask=REAL, scale=0.5)
    expected, options = torch.zeros_like(o), dataclasses.replace(core.options, scale=0.5)
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        if start < end:
            alone = [x[row : row + 1, start:end] for x in (q, k, v)]
            far = FarPart(core.q_map(alone[0]), core.k_map(alone[1]), *core.mixing())
            expected[row, start:end] = two_way_reference(*alone, far, options)[0]
    assert distance(o[REAL], expected[REAL]) < 1e-7
    pull, leaves = torch.randn_like(o), (q, k, v, *core.mixing.parameters(), core.k_map.weight)
    grads = [torch.autograd.grad((x * pull)[REAL].sum(), leaves) for x in (o, expected)]
    for found, wanted in zip(*grads, strict=True):
        assert distance(found, wanted) < 1e-6 or float(found.abs().max()) == float(wanted.abs().max()) == 0


def test_padding_may_hold_anything():
    options = {"starts": torch.tensor(STARTS)}
    check_that_padding_may_hold_anything(make_core(2, 4, 2), inputs(4, 2, torch.float32), REAL, **options)


def test_autocast_changes_nothing():
    core, tensors = make_core(2, 4, 2, "relu"), inputs(4, 2, torch.float32)
    expected = core(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(core(*tensors), expected)
