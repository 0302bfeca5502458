"""The cores of encoders against their definitions, written out over all pairs of tokens."""

import dataclasses

import pytest
import torch
from tools.ops_cases import distance

from mhla_hf.nn.sequence import SequenceMHLA
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.nn.windowed import TwoWayMHLA
from mhla_hf.ops.windowed.definition import windowed_reference
from mhla_hf.ops.windowed.inputs import WindowedInputs

STARTS, ENDS, LENGTH, BLOCK = (0, 7, 3, 12), (19, 19, 11, 12), 19, 4  # the last row is all padding
PLACE = torch.arange(LENGTH)
REAL = torch.stack([(start <= PLACE) & (end > PLACE) for start, end in zip(STARTS, ENDS, strict=True)])
PADDING = {"starts": torch.tensor(STARTS), "key_mask": REAL}


def agree(o, expected, inputs):
    """Outputs and gradients, of mixing in fp32."""
    assert distance(o[REAL], expected[REAL]) < 1e-7
    pull = torch.randn(o.shape, dtype=o.dtype)
    options = {"allow_unused": True, "materialize_grads": True}
    grads = [torch.autograd.grad((x * pull)[REAL].sum(), inputs, **options) for x in (o, expected)]
    for found, wanted in zip(*grads, strict=True):
        assert distance(found, wanted) < 1e-6 or float(found.abs().max()) == float(wanted.abs().max()) == 0


def random(*shapes):
    return (torch.randn(4, LENGTH, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def defined(core, q, k, v):
    """o `[B, T, H, V]` by T x T weights, with blocks counted from the first real token of each row."""
    matrix = core.mixing(core.mixing.layout)
    q, k = core.q_map(q), core.k_map(k)
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        for head in range(q.shape[2]):
            own = matrix if matrix.dim() == 2 else matrix[head]
            for t in range(start, end):
                mixed = own[(t - start) // BLOCK, torch.arange(end - start) // BLOCK]
                weights = mixed * (k[row, start:end, head] @ q[row, t, head])
                scale = weights.sum() if core.settings.normalize else q.shape[-1] ** 0.5
                o[row, t, head] = weights @ v[row, start:end, head] / scale
    return o


@pytest.mark.parametrize(
    "settings", [{}, {"per_head": True, "feature_map": "relu"}, {"normalize": False, "mixing_form": "direct"}]
)
def test_every_token_sees_its_own_row(settings):
    core = SequenceMHLA(
        MHLASettings(block_size=BLOCK, num_blocks=6, **settings),
        num_heads=2, num_kv_heads=2, key_dim=5, value_dim=3, hidden_size=6,
    ).double()  # fmt: skip
    with torch.no_grad():
        core.mixing.weight.copy_(torch.rand(core.mixing.weight.shape))
    q, k, v = random((2, 5), (2, 5), (2, 3))
    agree(core(q, k, v, **PADDING), defined(core, q, k, v), (q, k, v, core.mixing.weight))


@pytest.mark.parametrize(("window", "heads", "groups"), [(1, 4, 2), (2, 2, 2), (3, 4, 1), (6, 2, 1)])
def test_near_by_softmax_and_far_by_decays(window, heads, groups):
    settings = {"mixing_form": "decay", "windowed": True, "window": window, "sinks": 0, "feature_map": "exp"}
    core = TwoWayMHLA(
        MHLASettings(block_size=BLOCK, num_decays=2, free_decay=True, **settings),
        num_heads=heads, num_kv_heads=groups, key_dim=5, value_dim=3, hidden_size=6,
    ).double()  # fmt: skip
    with torch.no_grad():
        core.mixing.balance.uniform_(-1, 1)
    q, k, v = random((heads, 5), (groups, 5), (groups, 3))
    o = core(q, k, v, **PADDING, scale=0.5)
    expected, (decays, balance) = torch.zeros_like(o), core.mixing()
    for row, (start, end) in enumerate(zip(STARTS, ENDS, strict=True)):
        if start < end:
            alone = [x[row : row + 1, start:end] for x in (q, k, v)]
            form = dataclasses.replace(core.options, scale=0.5)
            inputs = WindowedInputs(*alone, core.q_map(alone[0]), decays, balance, form)
            expected[row, start:end] = windowed_reference(inputs, core.k_map(alone[1]))[0]
    agree(o, expected, (q, k, v, core.mixing.weight, core.mixing.rate, core.k_map.weight))
