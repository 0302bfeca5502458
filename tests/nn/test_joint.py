"""Attention over a text and a grid: its definition as a T x T computation."""

import dataclasses
from itertools import product
from math import prod

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import distance, generated

from mhla_hf import MHLASettings
from mhla_hf.nn.joint import JointMHLA, TextTokens
from mhla_hf.ops.blocks import Blocks


def turn(x):
    """A rotary embedding: pairs of neighboring channels, turned by the position."""
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] / 3
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def definition(core, heads, text, grid, text_bias, dtype, rotate):
    """The outputs of all tokens, those of the text first, and the averages of |v| by their weights, T x T."""
    settings, num_text, (q, k, v) = core.settings, text_bias.shape[1], heads
    blocks = Blocks.grid(grid[0], settings.layout, others=grid[1:])
    index, (mixing, balance) = blocks.index(), core.mixing(blocks.counts)
    place = torch.stack(torch.unravel_index(index, blocks.counts), -1)
    gap = (place[:, None] - place).abs().amax(-1)
    near = gap < settings.window if settings.windowed else torch.zeros_like(gap, dtype=torch.bool)
    rotated = [rotate(x).to(dtype).double() for x in (q, k)]
    if settings.salient_blocks:
        near = near | salient_pairs(*rotated, index, near, settings.salient_blocks)
    q, k = (q, k) if settings.rope == "near" else rotated
    far = products(core.q_map(q.to(dtype)).double(), core.k_map(k.to(dtype)).double())
    far = balance.double()[:, :, None] * mixing.double()[..., index[:, None], index] * far
    z = q.shape[3] ** -0.5 * products(*(torch.cat(x, 1) for x in zip(text[:2], rotated, strict=True)))
    z = z + F.pad(text_bias, (0, len(gap)))[:, None, None]
    edge = (num_text, 0, num_text, 0)
    weight = torch.where(F.pad(~near, edge), F.pad(far, edge), z.exp())
    weight = weight / weight.sum(-1, keepdim=True).clamp(min=1e-100)  # 0 where all weights are
    values = torch.cat([text[2], v], 1)
    return [torch.einsum("bhts,bshv->bthv", weight, x) for x in (values, values.abs())], values


def salient_pairs(q, k, index, near, count):
    """Whether a token is in one of the `count` blocks, not near, that the block of another token chooses: [B, H, T, T]."""
    num_blocks = int(index.max()) + 1
    means = [torch.stack([x[:, index == block].mean(1) for block in range(num_blocks)], 1) for x in (q, k)]
    score, pairs = products(*means), torch.zeros(len(q), q.shape[2], *near.shape, dtype=torch.bool)
    for place in product(range(len(q)), range(q.shape[2]), range(num_blocks)):
        far = [block for block in range(num_blocks) if not near[index == place[2]][:, index == block].any()]
        for block in sorted(far, key=lambda block: -score[place][block])[:count]:
            pairs[place[0], place[1]] |= (index == place[2])[:, None] & (index == block)
    return pairs


def products(q, k):
    return torch.einsum("bthk,bshk->bhts", q, k)


@st.composite
def joint_cases(draw):
    """Draw a dtype, grids, a text, settings, and how large the scores of both are, up to 60 either way.

    The balance is of their order, so that softmax and MHLA often have weights of the same order.
    """
    axes = draw(st.integers(1, 3))
    sizes = st.lists(st.integers(1, 5 if axes == 3 else 7), min_size=axes, max_size=axes).map(tuple)
    width = draw(st.integers(1, 9))
    centers = draw(st.tuples(*[st.integers(-60, 60)] * 2))
    return {
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])),
        "grid": tuple(draw(st.lists(sizes, min_size=1, max_size=2))),
        "layout": draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)),
        "batch": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "widths": (width, draw(st.integers(1, 9))),
        "num_text": draw(st.integers(0, 6)),
        "mask": draw(st.sampled_from([None, "bool", "bias", "lowest"])),
        "window": draw(st.sampled_from([None, 1, 1, 2])),
        "salient_blocks": draw(st.sampled_from([0, 1, 2, 5])) if width > 1 else 0,  # else all keys are alike
        "rope": draw(st.sampled_from(["near", "before"])),
        "rotated": width % 2 == 0 and draw(st.booleans()),
        "per_head": draw(st.booleans()),
        "feature_map": draw(st.sampled_from(["relu", "plain_relu", "elu", "softmax"])),
        "centers": centers,
        "spread": draw(st.sampled_from([0.3, 3.0, 20.0])),
        "balance": draw(st.sampled_from(centers)) + draw(st.integers(-10, 10)),
        "seed": draw(st.integers(0, 2**31)),
    }


def build_joint(case):
    """Build the core of a case, q, k, and v of the grid and of the text, and what is added to the scores of the text.

    Scores are at most 60, also after any rotation. The tensors are fp64, with values that the case's dtype can hold.
    """
    torch.manual_seed(case["seed"])
    dtype, heads, (width, value_width) = case["dtype"], case["heads"], case["widths"]
    drawn = {name: case[name] for name in ("layout", "rope", "per_head", "feature_map")}
    windows = {name: case[name] for name in ("window", "salient_blocks")}
    drawn |= {"windowed": True, **windows} if case["window"] else {}
    settings = MHLASettings(mixing_form="direct", sinks=0, impl="torch", **drawn)
    core = JointMHLA(settings, num_heads=heads, key_dim=width, value_dim=value_width, hidden_size=1)
    core = core.double() if dtype == torch.float64 else core
    core.mixing.balance.data.normal_(case["balance"])
    tensors = []
    for center, count in zip(case["centers"], (sum(map(prod, case["grid"])), case["num_text"]), strict=True):
        q, k = (case["spread"] ** 0.5 * torch.randn(case["batch"], count, heads, width) for _ in range(2))
        q[..., 0], k[..., 0] = 8.0, center * width**0.5 / 8
        tensors += [q, k, torch.randn(case["batch"], count, heads, value_width)]
    largest_q, largest_k = (torch.cat([tensors[i], tensors[i + 3]], 1).norm(dim=-1).max() for i in (0, 1))
    shrink = (60 * width**0.5 / (largest_q * largest_k)).clamp(max=1) ** 0.5
    tensors = [x if i % 3 == 2 else shrink * x for i, x in enumerate(tensors)]
    tensors = [x.to(dtype).double().requires_grad_() for x in tensors]
    bias = torch.zeros(case["batch"], case["num_text"], dtype=torch.float64)
    if case["mask"] == "bias":
        bias = bias.normal_(0, 5).to(dtype).double()
    elif case["mask"]:
        bias[torch.rand(bias.shape) < 0.4] = float("-inf") if case["mask"] == "bool" else torch.finfo(dtype).min
    return core, tensors[:3], tensors[3:], bias


@generated(60)
@given(case=joint_cases())
def test_generated_cases(case):
    """In half precision, too, no part of the sum is lost, however large or small its scores are; in fp64, gradients.

    Errors are in roundings of the case's dtype relative to the average of |v|. Scores are sums in fp32, whose roundings
    grow with their size of up to 60.
    """
    core, heads, text, bias = build_joint(case)
    dtype, num_grid = case["dtype"], heads[0].shape[1]
    rotate = turn if case["rotated"] else torch.clone
    info = torch.finfo(dtype)
    rounding = info.eps / 2 + 60 * torch.finfo(torch.float32).eps / 2
    # Smaller shares are not numbers of the dtype, nor their products with features numbers of fp32.
    least_share = max(info.smallest_normal * info.eps, 1e-30) / rounding
    mask = full_mask = None
    if case["mask"]:
        mask = (bias == 0 if case["mask"] == "bool" else bias.to(dtype))[:, None, None]
        full_mask = F.pad(mask, (0, num_grid), value=float(case["mask"] == "bool"))
    q, k, v, *texts = [x.to(dtype) for x in (*heads, *text)]
    turned = {"rotate": lambda *pair: [rotate(x.double()).to(dtype) for x in pair]}
    o, text_o = core(q, k, v, TextTokens(*texts, mask, full_mask), grid=case["grid"], **turned)
    o = torch.cat([text_o, o], 1)
    (expected, size), values = definition(core, heads, text, case["grid"], bias, dtype, rotate)
    size = size + least_share * values.abs().sum(1, keepdim=True)
    assert o.dtype == dtype and bool(((o - expected).abs() <= 4 * rounding * size).all())
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    leaves, direction = [*heads, *text, *core.parameters()], torch.randn(o.shape, dtype=torch.float64)
    found = torch.autograd.grad(o, leaves, direction.to(dtype), **options)
    assert all(x.isfinite().all() for x in found)
    if dtype == torch.float64:
        exact = torch.autograd.grad(expected, leaves, direction, **options)
        assert all(distance(*pair, floor=1e-2) <= 1e-5 for pair in zip(found, exact, strict=True))


@torch.no_grad()
def test_the_position_convolution_sees_each_image_alone():
    grids = ((5, 7), (3, 4))
    (q, k, v), text = torch.randn(3, 2, 47, 2, 4), TextTokens(*torch.randn(3, 2, 5, 2, 4))
    settings = MHLASettings(layout=[2, 2], sinks=0, rope="near", cpe=3)
    core = JointMHLA(settings, num_heads=2, key_dim=4, value_dim=4, hidden_size=8)
    for parameter in core.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    with_cpe = core(q, k, v, text, grid=grids)[0]
    images = [core.cpe(x, grid) for x, grid in zip(v.split([35, 12], 1), grids, strict=True)]
    core.settings = dataclasses.replace(core.settings, cpe=0)
    assert distance(core(q, k, v, text, grid=grids)[0] + torch.cat(images, 1), with_cpe) <= 1e-6
