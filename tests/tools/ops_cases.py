"""Generated inputs of the operator, as plain data (shapes, options, a seed), and distances between results.

`MHLA_CASES=10000 pytest tests/ops tests/nn -k generated` runs 10,000 cases of each kind.
"""

import functools
import os

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.windowed.options import WindowedOptions

mhla_reference = functools.partial(mhla, impl="reference")
FORMS = ("causal", "starts", "packed", "grid", "cross", "official")
HEADS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]  # query heads per KV head, and KV heads


def generated(count):
    """Settings of hypothesis for `count` cases, or for MHLA_CASES."""
    count = int(os.environ.get("MHLA_CASES", count))
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw, forms=FORMS):
    """Shapes and options of a call, of every form, with even or uneven blocks and all valid options."""
    form = draw(st.sampled_from(forms))
    group, groups = draw(st.sampled_from(HEADS))
    case = {
        "form": form,
        "batch": 1 if form == "packed" else draw(st.integers(1, 3)),
        "heads": (group * groups, groups),
        "widths": (draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 5))),
        "per_head": draw(st.booleans()),
        "normalize": "official" if form == "official" else draw(st.booleans()),
        "own_den": draw(st.booleans()),
        "scale": draw(st.sampled_from([None, 1.0, 0.3, -2.0])),
        "masked": draw(st.booleans()),
        "dead": draw(st.booleans()),
        "spare": draw(st.integers(0, 2)),
        "one_by_one": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "size": draw(st.sampled_from([1.0, 1.0, 30.0, 1e3])),
        "seed": draw(st.integers(0, 2**31)),
    }
    if form == "official":
        even = [Blocks.grid((4, 6), (2, 3)), Blocks.grid((2, 4, 6), (1, 2, 3)), Blocks.sequence(12, 4)]
        blocks = draw(st.sampled_from(even))
    elif form in ("causal", "starts", "packed"):
        size = draw(st.sampled_from([1, 3, 8, 16, 17, 64, 130, 192]))
        blocks = Blocks.sequence(draw(st.integers(1, 4 * size if size < 64 else size + 70)), size)
    else:
        blocks = draw(grids())
    case["blocks"], case["key_blocks"] = blocks, draw(grids()) if form == "cross" else None
    if form == "starts":
        case["starts"] = draw(st.lists(st.integers(0, blocks.length), min_size=case["batch"], max_size=case["batch"]))
    if form == "packed":
        cuts = draw(st.lists(st.integers(0, blocks.length), max_size=4))
        case["cu_seqlens"] = [0, *sorted(cuts), blocks.length]
    return case


@st.composite
def grids(draw):
    """A sequence or a grid of up to three axes, with even or uneven blocks, with or without prefix tokens."""
    if draw(st.booleans()):
        return Blocks.sequence(draw(st.integers(1, 40)), draw(st.integers(1, 20)))
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    return Blocks.grid(shape, [draw(st.integers(1, 4)) for _ in shape], prefix=draw(st.integers(0, 3)))


def build(case, dtype):
    """Differentiable inputs by name, representable in fp32 whatever the dtype, and options of `mhla`."""
    generator = torch.Generator().manual_seed(case["seed"])

    def make(*shape, low=0.0):
        return (torch.rand(*shape, generator=generator) * (1 - low) + low).to(dtype)

    blocks, key_blocks = case["blocks"], case["key_blocks"] or case["blocks"]
    (heads, groups), (width, value_width, den_width), batch = case["heads"], case["widths"], case["batch"]
    low = 0.0 if case["normalize"] else -1.0  # a denominator needs nonnegative features
    tensors = {
        "q": make(batch, blocks.length, heads, width, low=low),
        "k": make(batch, key_blocks.length, groups, width, low=low),
        "v": make(batch, key_blocks.length, groups, value_width, low=-1.0),
    }
    spare = case["spare"] if case["form"] in ("causal", "starts", "packed") else 0
    rows, columns = blocks.num_blocks + spare, key_blocks.num_blocks + 2 * spare
    tensors["mixing"] = make(*([heads] if case["per_head"] else []), rows, columns, low=low)
    if case["normalize"] and case["own_den"]:
        tensors["q_den"] = make(batch, blocks.length, heads, den_width)
        tensors["k_den"] = make(batch, key_blocks.length, groups, den_width)
    if case["dead"]:  # as after relu, some queries and keys are exactly zero
        for name in ("q", "k", "q_den", "k_den"):
            if name in tensors:
                tensors[name][torch.rand(tensors[name].shape[:3], generator=generator) < 0.3] = 0
    tensors["q"], tensors["k"] = (tensors[name] * case.get("size", 1.0) for name in "qk")
    if case.get("strided"):
        tensors = {name: x if name == "mixing" else strided(x) for name, x in tensors.items()}
    options = {"blocks": blocks, **{name: case[name] for name in ("key_blocks", "normalize", "scale")}}
    options["causal"] = case["form"] in ("causal", "starts", "packed")
    if case["masked"]:
        options["key_mask"] = torch.rand(batch, key_blocks.length, generator=generator) < 0.7
    if "starts" in case:
        options["starts"] = torch.tensor(case["starts"])
    if "cu_seqlens" in case:
        options["cu_seqlens"] = torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    return tensors, options


def strided(x):
    """A copy in memory in which neighbors along K are not adjacent."""
    return x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


@st.composite
def plans(draw):
    """Pairs of how many tokens are added to a state, and how many are then removed; often none, for long texts."""
    added, removed = st.sampled_from([1, 1, 1, 2, 3, 7, 20, 70]), st.just(0) | st.just(0) | st.integers(0, 20)
    return draw(st.lists(st.tuples(added, removed), min_size=draw(st.sampled_from([1, 8]))))


@st.composite
def windowed_cases(draw, both_ways=False):
    """Options, shapes, and padding of windowed attention, with up to a block of sinks, and how causal one is decoded."""
    size = draw(st.integers(1, 9) | st.just(40))
    group, groups = draw(st.sampled_from(HEADS))
    tokens = draw(st.integers(1, 70) | st.just(70))
    padding = draw(st.sampled_from(["none", "none", "left", "left" if both_ways else "packed"]))
    batch = 1 if padding == "packed" else draw(st.integers(1, 3))
    inner = st.integers(0, tokens)
    sinks, salient = (0, 0) if both_ways else (draw(st.integers(0, size)), draw(st.sampled_from([0, 1, 3, 7, 20, 80])))
    return {
        "options": WindowedOptions(size, window=draw(st.integers(1, 3)), sinks=sinks, scale=0.5, salient=salient),
        "shape": (batch, tokens),
        "heads": (group * groups, groups),
        "widths": (draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        "size": draw(st.sampled_from([1.0, 1.0, 6.0, 30.0])),
        "strided": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
        "starts": draw(st.lists(inner, min_size=batch, max_size=batch)) if padding == "left" else None,
        "cu_seqlens": [0, *sorted(draw(st.lists(inner, max_size=4))), tokens] if padding == "packed" else None,
        "holes": both_ways and draw(st.booleans()),
        "plan": draw(plans()),
        "piece_blocks": draw(st.sampled_from([1, 2, 32])),
    }


def build_windowed(case, dtype):
    """(q, k, v), padding, and the factor by which large scores increase rounding errors."""
    generator = torch.Generator().manual_seed(case["seed"])
    (batch, tokens), (heads, groups), (width, value_width) = case["shape"], case["heads"], case["widths"]
    shapes = ((heads, width), (groups, width), (groups, value_width))
    q, k, v = (torch.randn(batch, tokens, *shape, generator=generator) for shape in shapes)
    q, k = q * case["size"], k * case["size"]
    largest = case["options"].scale * float(torch.einsum("bthd,bsgd->bhgts", q, k).abs().max())
    tensors = [strided(x.to(dtype)) if case["strided"] else x.to(dtype) for x in (q, k, v)]
    padding = {name: torch.tensor(case[name]) for name in ("starts", "cu_seqlens") if case[name] is not None}
    if case["holes"]:
        padding["key_mask"] = torch.rand(batch, tokens, generator=generator) < 0.7
    return tensors, padding, max(1.0, largest)


def run(function, tensors, options, direction=None):
    """The output of a call and, for an output gradient `direction`, the gradients by name."""
    inputs = {name: x.detach().requires_grad_(direction is not None) for name, x in tensors.items()}
    o = function(**inputs, **options)
    if direction is None:
        return o, {}
    grads = torch.autograd.grad(o, list(inputs.values()), direction.to(o.dtype), allow_unused=True)
    return o.detach(), dict(zip(inputs, grads, strict=True))


@torch.no_grad()
def distance(actual, expected, floor=0.0):
    """The Frobenius norm of the difference over that of `expected`, or over `floor` if this is larger."""
    size = max(float(expected.double().norm()), float(floor), torch.finfo(torch.float64).tiny)
    return float((actual.double() - expected.double()).norm()) / size


def gradient_floors(tensors, options, direction):
    """Norms of the gradients without the cancellation between numerator and denominator, as floors for `distance`."""
    if not options["normalize"]:  # terms of both signs cancel in the gradient of the mixing, a sum over all tokens
        terms = {name: x.abs() for name, x in tensors.items()}
        _, grads = run(mhla_reference, terms, options, direction.abs())
        return {**dict.fromkeys(tensors, 0.0), "mixing": float(grads["mixing"].norm())}
    ones = {**tensors, "v": torch.ones_like(tensors["v"])}
    plain = {**options, "normalize": False, "scale": 1.0}
    bare = {name: x for name, x in tensors.items() if name not in ("q_den", "k_den")}
    weights, _ = run(mhla_reference, {**bare, "v": ones["v"]}, plain)
    shares, _ = run(mhla_reference, ones, options)
    inverse = torch.where(weights == 0, 0, shares / torch.where(weights == 0, 1, weights))
    _, grads = run(mhla_reference, bare, plain, direction * inverse)
    floors = {name: float(grad.norm()) for name, grad in grads.items()}
    # The gradient of the mixing is a sum over all tokens, of which only rounding errors may be left: take that of the terms.
    _, grads = run(mhla_reference, {**bare, "v": bare["v"].abs()}, plain, (direction * inverse).abs())
    floors["mixing"] = float(grads["mixing"].norm())
    if "q_den" in tensors:
        o, _ = run(mhla_reference, tensors, options)
        size = (direction * inverse * o).abs().sum(-1, keepdim=True)
        one = {"q": tensors["q_den"], "k": tensors["k_den"], "v": torch.ones_like(tensors["k_den"][..., :1])}
        _, grads = run(mhla_reference, {**one, "mixing": tensors["mixing"]}, plain, size)
        floors["q_den"] = float(grads["q"].norm())
        floors["k_den"] = float(grads["k"].norm())
        floors["mixing"] += float(grads["mixing"].norm())
    return floors


def check_that_padding_may_hold_anything(core, inputs, real, **options):
    """Outputs and gradients of a core do not depend on q, k, and v at padding, even if they are not finite."""
    padding = ~real[:, :, None, None]
    results = []
    direction = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3]).masked_fill(padding, 0)
    for value in (0.0, float("nan"), float("inf")):
        filled = [x.masked_fill(padding, value).requires_grad_() for x in inputs]
        o = core(*filled, key_mask=real, **options)
        gradients = torch.autograd.grad(o, [*filled, *core.parameters()], direction)
        assert not any(x[~real].any() for x in gradients[:3])
        results.append((o[real], *gradients))
    assert all(torch.equal(x, y) for result in results[1:] for x, y in zip(result, results[0], strict=True))


def core_by_hand(core, w, v, hidden, scale):
    """The output of a core in fp64 from its unnormalized attention weights `w` [B, H, T, T] and v [B, T, H, V]."""
    settings = core.settings
    o = torch.einsum("bhts,bshv->bthv", w, v.double())
    o = (o / w.sum(-1).transpose(1, 2)[..., None]).nan_to_num(0.0) if settings.normalize else o * scale  # 0/0 is 0
    if settings.output_norm:
        o = o * (o.square().mean(-1, keepdim=True) + core.norm.eps).rsqrt() * core.norm.weight
    if settings.gate:
        gate = torch.nn.functional.linear(hidden.double(), core.gate.weight, core.gate.bias)
        o = o * torch.nn.functional.silu(gate).view_as(o)
    return o
