"""Attention over a text and a grid: its definition as a T x T computation, and its ends, softmax and linear attention."""

import dataclasses
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import distance, generated

from mhla_hf import MHLASettings
from mhla_hf.nn.joint import JointMHLA, TextTokens, split_grids

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


def held(exact, value):
    """Return a value as it is held in a lower precision, in fp64, with the gradient of the exact one."""
    return exact + (value.double() - exact).detach()


def weights_by_definition(core, q, k, text, grid, text_bias, dtype=torch.float64, rotate=turn):
    """Softmax weights, and MHLA weights between far blocks, of all tokens, those of the text first."""
    settings, num_text = core.settings, text_bias.shape[1]
    places = block_places(grid, settings.layout)
    counts = [min(sizes) for sizes in zip(settings.layout, *split_grids(grid), strict=True)]
    index = torch.tensor([sum(p * prod(counts[i + 1 :]) for i, p in enumerate(place)) for place in places])
    mixing, balance = core.mixing(counts)
    gap = (torch.tensor(places)[:, None] - torch.tensor(places)).abs().amax(-1)
    near = gap < settings.window if settings.windowed else torch.zeros_like(gap, dtype=torch.bool)
    rotated = [held(rotate(x), rotate(x).to(dtype)) for x in (q, k)]
    q, k = (q, k) if settings.rope == "near" else rotated
    far = [held(of(x), of(x.to(dtype))) for of, x in ((core.q_map, q), (core.k_map, k))]
    far = balance.double()[:, :, None] * mixing.double()[..., index[:, None], index] * products(*far)
    z = q.shape[3] ** -0.5 * products(*(torch.cat(pair, 1) for pair in zip(text[:2], rotated, strict=True)))
    z = z + F.pad(text_bias, (0, len(gap)))[:, None, None]
    is_far = F.pad(~near, (num_text, 0, num_text, 0))
    return torch.where(is_far, F.pad(far, (num_text, 0, num_text, 0)), z.exp()), is_far


def products(q, k):
    """Return the inner products of queries and keys, [B, H, T, S]."""
    return torch.einsum("bthk,bshk->bhts", q, k)


def average(weight, values):
    """Return the averages of values [B, S, H, V] by weights [B, H, T, S], or 0 where all weights are 0."""
    return torch.einsum("bhts,bshv->bthv", weight / weight.sum(-1, keepdim=True).clamp(min=1e-100), values)


def definition(core, q, k, v, text, grid, text_bias):
    """The outputs of the grid and of the text, T x T."""
    weight, _ = weights_by_definition(core, q, k, text, grid, text_bias)
    return average(weight, torch.cat([text[2], v], 1)).split([NUM_TEXT, q.shape[1]], 1)[::-1]


GRIDS = [((5, 7), [2, 3]), ((1, 4, 3), [2, 2, 2]), ((3, 5, 4), [2, 2, 3]), ((4, 4), [1, 1])]
GRIDS += [(((5, 7), (3, 4)), [2, 3]), (((4, 6), (1, 3), (4, 4)), [2, 2])]  # several images


@pytest.mark.parametrize("masked", [None, "bool", "bias"])
@pytest.mark.parametrize("local", [{}, {"windowed": True, "window": 1}, {"windowed": True, "window": 2}])
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
        "dtype": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "grid": tuple(draw(st.lists(sizes, min_size=1, max_size=2))),
        "layout": draw(st.lists(st.integers(1, 3), min_size=axes, max_size=axes)),
        "batch": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "widths": (width, draw(st.integers(1, 9))),
        "num_text": draw(st.integers(0, 6)),
        "mask": draw(st.sampled_from([None, "bool", "bias", "lowest"])),
        "window": draw(st.sampled_from([None, 1, 1, 2])),
        "rope": draw(st.sampled_from(["near", "before"])),
        "rotated": width % 2 == 0 and draw(st.booleans()),
        "per_head": draw(st.booleans()),
        "feature_map": draw(st.sampled_from(["relu", "plain_relu", "elu"])),
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
    local = {"windowed": True, "window": case["window"]} if case["window"] else {}
    settings = MHLASettings(
        mixing_form="direct",
        sinks=0,
        impl="torch",
        **{name: case[name] for name in ("layout", "rope", "per_head", "feature_map")},
        **local,
    )
    core = JointMHLA(settings, num_heads=heads, key_dim=width, value_dim=value_width, hidden_size=1)
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
    bias = torch.zeros(case["batch"], case["num_text"])
    if case["mask"] == "bias":
        bias = bias.normal_(0, 5).to(dtype)
    elif case["mask"]:
        bias[torch.rand(bias.shape) < 0.4] = float("-inf") if case["mask"] == "bool" else torch.finfo(dtype).min
    return core, tensors[:3], tensors[3:], bias.double()


def terms_of_gradients(core, heads, text, weight, is_far, direction, rotate, least_share):
    """Return the norms of the sums of the absolute terms of all gradients: of `heads`, the text, mixing, and balance."""
    num_text, scale = text[0].shape[1], heads[0].shape[3] ** -0.5
    rotated = rotate(heads[0]), rotate(heads[1]), heads[2]
    q, k, v = (torch.cat(pair, 1).abs() for pair in zip(text, rotated, strict=True))  # [B, S + T, H, ..]
    total = weight.sum(-1, keepdim=True).clamp(min=1e-100)
    share = weight / total + least_share * (weight > 0)
    effect = products(direction.abs(), v)  # of a relative error of each weight on the loss
    effect = effect + (share * effect).sum(-1, keepdim=True)
    near = share * effect * ~is_far
    terms = [scale * torch.einsum("bhts,bshk->bthk", near, k), scale * torch.einsum("bhts,bthk->bshk", near, q)]
    terms.append(torch.einsum("bhts,bthv->bshv", share, direction.abs()))
    of_text, of_grid = ([part[i].norm() for part in (x.tensor_split([num_text], 1) for x in terms)] for i in (0, 1))
    far_share = (weight * is_far).sum(-1, keepdim=True) / total
    far = torch.where(is_far & (far_share > 0), effect / total * (1 + least_share / far_share), 0)
    loss = (weight * far.detach()).sum()
    leaves = [*heads, core.mixing.weight, core.mixing.balance]
    far = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
    of_grid = [x + y.norm() for x, y in zip(of_grid, far[:3], strict=True)]
    return [*of_grid, *of_text, far[3].double().norm(), far[4].double().norm()]


@generated(40)
@given(case=joint_cases())
def test_generated_cases(case):
    """In half precision, too, no part of the sum is lost, however large or small its scores are; outputs and gradients.

    Errors are in roundings of the case's dtype: of an output, relative to the average of |v| by its weights; of a gradient,
    relative to its terms. Scores are sums in fp32, whose roundings grow with their size of up to 60.
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
    inputs = [x.detach().to(dtype).requires_grad_() for x in (*heads, *text)]
    o, text_o = core(
        *inputs[:3],
        TextTokens(*inputs[3:], mask, full_mask),
        grid=case["grid"],
        rotate=lambda *pair: [rotate(x.double()).to(dtype) for x in pair],
    )
    o = torch.cat([text_o, o], 1)
    weight, is_far = weights_by_definition(core, *heads[:2], text, case["grid"], bias, dtype, rotate)
    values = torch.cat([text[2], heads[2]], 1)
    expected = average(weight, values)
    size = average(weight, values.abs()) + least_share * values.abs().sum(1, keepdim=True)
    assert o.dtype == dtype and bool(((o - expected).abs() <= 4 * rounding * size).all())
    direction = torch.randn(o.shape).to(dtype)
    learned = [core.mixing.weight, core.mixing.balance]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    gradients = torch.autograd.grad(o, [*inputs, *learned], direction, **options)
    exact = torch.autograd.grad(expected, [*heads, *text, *learned], direction.double(), **options)
    sizes = terms_of_gradients(core, heads, text, weight, is_far, direction.double(), rotate, least_share)
    for gradient, one, size in zip(gradients, exact, sizes, strict=True):
        assert distance(gradient, one, size.detach()) <= 4 * rounding


@torch.no_grad()
def test_a_new_core_is_nearly_its_softmax_part():
    """Text of random keys: what MHLA adds is a small part of the output."""
    torch.manual_seed(0)
    core = JointMHLA(MHLASettings(layout=[4, 4], feature_map="softmax", rope="near", sinks=0), **SIZES)
    (q, k, v), texts = heads(256, dtype=torch.float32), heads(64, dtype=torch.float32)
    o, _ = core(q, k, v, TextTokens(*texts), grid=(16, 16))
    softmax = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, *texts[1:]))).transpose(1, 2)
    assert 0 < distance(o, softmax) <= 0.05


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
