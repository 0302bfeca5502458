"""Attention over a text and a grid: its definition as a T x T computation, and its ends, softmax and linear attention."""

import dataclasses
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from ops_cases import distance

from mhla_hf import MHLASettings
from mhla_hf.nn.joint import JointMHLA, TextTokens, near_blocks, split_grids

HEADS, WIDTH, NUM_TEXT = 2, 4, 5
SIZES = {"num_heads": HEADS, "key_dim": WIDTH, "value_dim": WIDTH, "hidden_size": HEADS * WIDTH}


def core_of(layout, dtype=torch.float64, **settings):
    """A core with noise on its parameters."""
    torch.manual_seed(1)
    core = JointMHLA(MHLASettings(layout=layout, sinks=0, **{"rope": "near", **settings}), **SIZES).to(dtype)
    with torch.no_grad():
        for parameter in core.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return core


def heads(num_tokens, batch=2, dtype=torch.float64, scale=1.5):
    return [scale * torch.randn(batch, num_tokens, HEADS, WIDTH, dtype=dtype) for _ in range(3)]


def block_places(grid, layout):
    """The place of the block of each token along each axis, as `numpy.array_split` cuts axes: list of tuples."""
    if isinstance(grid[0], tuple):
        counts = [min(sizes) for sizes in zip(layout, *grid, strict=True)]
        return [place for image in grid for place in block_places(image, counts)]
    parts = [torch.arange(n).tensor_split(min(n, m)) for n, m in zip(grid, layout, strict=True)]
    by_axis = [[i for i, part in enumerate(axis) for _ in part] for axis in parts]
    return list(product(*by_axis))


def turn(x):
    """A rotary embedding: pairs of neighboring channels, turned by the position."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] / 3
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def definition(core, q, k, v, text, grid, text_bias):
    """T x T: softmax weights of text and near blocks, MHLA weights of far blocks, over their sum; q and k not rotated."""
    settings = core.settings
    places = block_places(grid, settings.layout)
    counts = [min(sizes) for sizes in zip(settings.layout, *split_grids(grid), strict=True)]
    index = torch.tensor([sum(p * prod(counts[i + 1 :]) for i, p in enumerate(place)) for place in places])
    weights, balance = core.mixing(counts)
    gap = (torch.tensor(places)[:, None] - torch.tensor(places)).abs().amax(-1)
    near = gap < settings.window if settings.local else torch.zeros_like(gap, dtype=torch.bool)
    rotated = (turn(q), turn(k))
    q, k = (q, k) if settings.rope == "near" else rotated
    scale = WIDTH**-0.5
    z_text = scale * torch.einsum("bthk,bshk->bhts", rotated[0], text.k) + text_bias[:, None, None]
    z_grid = scale * torch.einsum("bthk,bshk->bhts", *rotated)
    far = torch.einsum("bthk,bshk->bhts", core.q_map(q), core.k_map(k))
    far = balance.double()[None, :, :, None] * weights.double()[..., index[:, None], index] * far
    grid_weights = torch.where(near, z_grid.exp(), far)
    weight = torch.cat([z_text.exp(), grid_weights], -1)
    o = torch.einsum("bhts,bshv->bthv", weight / weight.sum(-1, keepdim=True), torch.cat([text.v, v], 1))
    z = scale * torch.einsum("bthk,bshk->bhts", text.q, torch.cat([text.k, rotated[1]], 1))
    z[..., :NUM_TEXT] += text_bias[:, None, None]
    return o, torch.einsum("bhts,bshv->bthv", z.softmax(-1), torch.cat([text.v, v], 1))


GRIDS = [((5, 7), [2, 3]), ((1, 4, 3), [2, 2, 2]), ((3, 5, 4), [2, 2, 3]), ((4, 4), [1, 1])]
GRIDS += [(((5, 7), (3, 4)), [2, 3]), (((4, 6), (1, 3), (4, 4)), [2, 2])]  # several images


@pytest.mark.parametrize("masked", [None, "bool", "bias"])
@pytest.mark.parametrize("local", [{}, {"local": "softmax", "window": 1}, {"local": "softmax", "window": 2}])
@pytest.mark.parametrize(("grid", "layout"), GRIDS)
def test_definition(grid, layout, local, masked):
    """Odd grids, one frame, padding in a text, and features before and after the rotation; outputs and gradients."""
    rope = "near" if masked else "before"
    core = core_of(layout, feature_map="softmax", rope=rope, per_head=masked == "bool", **local)
    torch.manual_seed(2)
    q, k, v = (x.requires_grad_() for x in heads(sum(map(prod, split_grids(grid)))))
    texts = [x.requires_grad_() for x in heads(NUM_TEXT)]
    bias = torch.zeros(2, NUM_TEXT, dtype=torch.float64)
    mask = None
    if masked == "bool":
        is_key = torch.arange(NUM_TEXT) < torch.tensor([[3], [5]])
        mask = is_key[:, None, None]
        bias = bias.masked_fill(~is_key, float("-inf"))
    elif masked == "bias":
        bias = torch.randn_like(bias)
        mask = bias[:, None, None]
    full_mask = None if mask is None else F.pad(mask, (0, q.shape[1]), value=float(masked == "bool"))
    text = TextTokens(*texts, mask, full_mask)
    outputs = core(q, k, v, text, grid=grid, rotate=lambda x, y: (turn(x), turn(y)))
    expected = definition(core, q, k, v, text, grid, bias)
    leaves = [q, k, v, *texts, *(p for p in core.parameters() if p.requires_grad)]
    losses = [sum((x * x.sin()).sum() for x in pair) for pair in (outputs, expected)]
    gradients = [torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses]
    for one, other in zip(outputs, expected, strict=True):
        assert distance(one, other) <= 1e-12
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None) and (one is None or distance(one, other, floor=1e-3) <= 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_all_blocks_near_is_softmax(scale):
    """In fp32, and with scores far from that of the additional key."""
    core = core_of([2, 3], torch.float32, local="softmax", window=3, rope="before")
    torch.manual_seed(2)
    (q, k, v), texts = heads(35, dtype=torch.float32, scale=scale), heads(NUM_TEXT, dtype=torch.float32, scale=scale)
    o, text_o = core(q, k, v, TextTokens(*texts), grid=(5, 7))
    both = [torch.cat([text, x], 1).transpose(1, 2) for text, x in zip(texts, (q, k, v), strict=True)]
    expected = F.scaled_dot_product_attention(*both).transpose(1, 2)
    assert distance(torch.cat([text_o, o], 1), expected) <= 1e-5


@torch.no_grad()
def test_without_a_text_one_block_is_linear_attention():
    core = core_of([1, 1], torch.float32, feature_map="relu", mixing_start="uniform")
    q, k, v = heads(35, dtype=torch.float32)
    empty = TextTokens(*(x[:, :0] for x in (q, k, v)))
    o, text_o = core(q, k, v, empty, grid=(5, 7))
    q, k, v = (x.transpose(1, 2) for x in (q.relu() + 1e-6, k.relu() + 1e-6, v))
    expected = q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)
    assert distance(o, expected.transpose(1, 2)) <= 1e-5 and text_o.shape[1] == 0


@torch.no_grad()
def test_a_new_core_is_nearly_its_softmax_part():
    """Text of random keys: what MHLA adds is a small part of the output."""
    torch.manual_seed(0)
    core = JointMHLA(MHLASettings(layout=[4, 4], feature_map="softmax", rope="near", sinks=0), **SIZES)
    (q, k, v), texts = heads(256, dtype=torch.float32), heads(64, dtype=torch.float32)
    o, _ = core(q, k, v, TextTokens(*texts), grid=(16, 16))
    softmax = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, *texts[1:]))).transpose(1, 2)
    assert 0 < distance(o, softmax) <= 0.05


def test_near_blocks():
    assert near_blocks([2, 3], 1) == [[i] for i in range(6)]
    assert near_blocks([1, 4], 2) == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3]]
    assert near_blocks([2, 3], 2)[0] == [0, 1, 3, 4] and near_blocks([2, 3], 3) == [[*range(6)]] * 6


@torch.no_grad()
def test_the_position_convolution_sees_each_image_alone():
    torch.manual_seed(3)
    grids = ((5, 7), (3, 4))
    (q, k, v), text = heads(47, dtype=torch.float32), TextTokens(*heads(NUM_TEXT, dtype=torch.float32))
    core = core_of([2, 2], torch.float32, cpe=3)
    with_cpe = core(q, k, v, text, grid=grids)[0]
    images = [core.cpe(x, grid) for x, grid in zip(v.split([35, 12], 1), grids, strict=True)]
    core.settings = dataclasses.replace(core.settings, cpe=0)
    assert distance(core(q, k, v, text, grid=grids)[0] + torch.cat(images, 1), with_cpe) <= 1e-6
