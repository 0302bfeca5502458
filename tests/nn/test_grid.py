"""The grid core against the formula of the paper, written out token by token."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tools.ops_cases import check_that_padding_may_hold_anything, core_by_hand, distance

from mhla_hf import MHLASettings
from mhla_hf.nn.core import softmax_attention
from mhla_hf.nn.grid import GridMHLA, GridMixing, PositionConv, block_overlap, rotate_both
from mhla_hf.ops.blocks import Blocks


def by_hand(core, q, k, v, grid, hidden):
    """o_t = sum_s m[b(t), b(s)] <phi(q_t), phi(k_s)> v_s, normalised or not, plus norm, gate, convolution; fp64."""
    settings, prefix = core.settings, core.prefix
    counts = [min(size, count) for size, count in zip(grid, settings.layout, strict=True)]
    block = Blocks.grid(grid, counts, prefix=prefix).index()
    m = core.mixing(counts).double()[..., block, :][..., :, block]
    eps = {"relu": 1e-6, "plain_relu": 0.0}[settings.feature_map]
    phi_q, phi_k = q.double().relu() + eps, k.double().relu() + eps
    w = torch.einsum("bthk,bshk->bhts", phi_q, phi_k) * m
    o = core_by_hand(core, w, v, hidden, q.shape[-1] ** -0.5)
    if settings.cpe:
        conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(grid)]
        x = v[:, prefix:].double().flatten(2).mT.unflatten(2, grid)
        x = conv(x, core.cpe.conv.weight, core.cpe.conv.bias, padding=settings.cpe // 2, groups=x.shape[1])
        o[:, prefix:] += x.flatten(2).mT.reshape(v[:, prefix:].shape)
    return o


def make_core(settings, prefix=0, heads=2, width=5):
    core = GridMHLA(settings, num_heads=heads, key_dim=width, value_dim=width, hidden_size=7, prefix=prefix)
    with torch.no_grad():
        for p in core.parameters():
            p += 0.3 * torch.randn_like(p).abs()
    return core.double()


CASES = [
    ((6, 6), [3, 3], 0, {}),
    ((13, 17), [4, 4], 1, {"cpe": 3, "gate": True, "mixing_form": "direct"}),
    ((1, 9), [4, 4], 5, {"feature_map": "plain_relu", "per_head": True}),
    ((5, 7, 9), [3, 5, 10], 0, {"normalize": False, "output_norm": True, "gate": True}),
    ((11,), [4], 2, {"mixing_form": "free", "normalize": False}),
]


@pytest.mark.parametrize(("grid", "layout", "prefix", "options"), CASES)
def test_grid_core_is_the_paper(grid, layout, prefix, options):
    settings = MHLASettings(**{"layout": layout, "feature_map": "relu", **options})
    core = make_core(settings, prefix)
    tokens = torch.Size(grid).numel() + prefix
    q, k, v = (torch.randn(2, tokens, 2, 5, dtype=torch.float64) + 0.5 for _ in range(3))
    hidden = torch.randn(2, tokens, 7, dtype=torch.float64)
    got = core(q, k, v, grid=grid, hidden_states=hidden)
    assert distance(got, by_hand(core, q, k, v, grid, hidden)) <= 2e-6  # the mixing and the output norm are in fp32


@pytest.mark.parametrize(("grid", "layout", "prefix", "options"), CASES)
@pytest.mark.parametrize("rope", ["before", "after"])
@pytest.mark.parametrize("softmax_heads", [[1], [0, 3]])
def test_some_heads_keep_softmax_and_the_others_do_not_change(softmax_heads, rope, grid, layout, prefix, options):
    """Angles differ from head to head, as in LTX."""
    settings = MHLASettings(**{"layout": layout, "feature_map": "relu", "rope": rope, **options})
    whole = make_core(settings, prefix, heads=4, width=6)
    core, mhla_heads = whole.with_softmax_heads(softmax_heads), [i for i in range(4) if i not in softmax_heads]
    tokens = torch.Size(grid).numel() + prefix
    q, k, v = (torch.randn(2, tokens, 4, 6, dtype=torch.float64) for _ in range(3))
    angles = torch.randn(tokens, 4, 3, dtype=torch.float64).repeat_interleave(2, -1)
    rotate = partial(rotate_both, angles=(angles.cos(), angles.sin()))
    inputs = {"grid": grid, "hidden_states": torch.randn(2, tokens, 7, dtype=torch.float64), "rotate": rotate}
    got, expected = core(q, k, v, **inputs), whole(q, k, v, **inputs)
    assert distance(got[:, :, mhla_heads], expected[:, :, mhla_heads]) <= 1e-6
    assert distance(got[:, :, softmax_heads], softmax_attention(*rotate(q, k), v)[:, :, softmax_heads]) <= 1e-6


def test_the_convolution_of_video_has_the_right_gradient_in_bf16():
    """Whose weight gradient on CPUs is wrong in PyTorch 2.13 unless the input is contiguous."""
    (x, direction), grads = torch.randn(2, 2, 72, 2, 16).bfloat16(), []
    for dtype in (torch.float64, torch.bfloat16):
        conv = PositionConv(32, 3, 3).to(dtype)
        conv(x.to(dtype), (2, 6, 6)).backward(direction.to(dtype))
        grads.append(conv.conv.weight.grad)
    assert distance(*grads[::-1]) <= 1.5e-2


def test_fewer_blocks_average_the_matrix():
    mixing = GridMixing((4,), form="direct")
    with torch.no_grad():
        mixing.weight.copy_(torch.arange(16.0).view(4, 4))
    halves = mixing.weight.view(2, 2, 2, 2).mean((1, 3))
    assert torch.equal(mixing((2,)), halves)
    assert torch.equal(block_overlap(3, 3), torch.eye(3))
    assert torch.allclose(block_overlap(2, 3), torch.tensor([[2 / 3, 1 / 3, 0], [0, 1 / 3, 2 / 3]]))


def test_start_is_local_and_rows_sum_to_one():
    for prefix in (False, True):
        weight = GridMixing((3, 4), prefix=prefix)((3, 4))
        assert torch.allclose(weight.sum(-1), torch.ones(12 + prefix))
        inner = weight[prefix:, prefix:]
        assert (inner.argmax(-1) == torch.arange(12)).all()
        assert (inner[0, 1] > inner[0, 2]) and (inner > 0).all()


@pytest.mark.parametrize(
    ("impl", "options"),
    [("triton", {"cpe": 3}), ("torch", {"feature_map": "hedgehog"}), ("reference", {"normalize": "official"})],
)
def test_padding_may_hold_anything(impl, options):
    core = make_core(MHLASettings(**{"layout": [2, 2], "feature_map": "relu", "impl": impl, **options})).float()
    inputs, real = torch.randn(3, 1, 24, 2, 5), torch.arange(24)[None] % 6 < 4
    check_that_padding_may_hold_anything(core, inputs, real, grid=(4, 6))
