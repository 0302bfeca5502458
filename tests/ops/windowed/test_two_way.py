"""Near softmax and far MHLA, before and after each token: the blocked computation against its T x T definition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import build_windowed, distance, generated, windowed_cases

from mhla_hf.ops.windowed import two_way
from mhla_hf.ops.windowed.definition import two_way_reference
from mhla_hf.ops.windowed.options import WindowedOptions
from mhla_hf.ops.windowed.two_way import FarPart, two_way_attention

OPTIONS = WindowedOptions(block_size=5, window=2, sinks=0, scale=0.5)


def problem(dtype=torch.float64):
    """q, k, v, and the tensors of the far part: features, rates of decay, and balance."""
    q, k, v = (torch.randn(2, 83, *shape, dtype=dtype) for shape in ((4, 6), (2, 6), (2, 3)))
    features = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    return [q, k, v, *features, torch.tensor([-0.1, -0.5], dtype=dtype), torch.randn(4, dtype=dtype)]


def check_definition(tensors, options, padding, enlarged=None):
    """Compare outputs and gradients in fp64 and fp32 with those of the definition in fp64.

    Bounds of outputs grow with `enlarged`; gradients are then compared with the largest one.
    """
    real = torch.arange(tensors[0].shape[1]) >= padding.get("starts", torch.zeros(1))[:, None]
    real = (real & padding.get("key_mask", torch.tensor(True)))[..., None, None]
    direction = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], dtype=torch.float64) * real

    def attend(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        o = function(*leaves[:3], FarPart(*leaves[3:]), options, **padding)
        return [o.detach() * real, *torch.autograd.grad(o, leaves, direction.to(dtype))]

    exact, grown = attend(two_way_reference, torch.float64), enlarged or 1.0
    floor = max(float(x.norm()) for x in exact[1:]) if enlarged else 0.0
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        ours = attend(two_way_attention, dtype)
        assert all(x.dtype == dtype for x in ours) and distance(ours[0], exact[0]) <= bound * grown
        bound = 10 * bound * grown if enlarged else bound
        assert all(distance(x, y, floor) <= bound for x, y in zip(ours[1:], exact[1:], strict=True))


@pytest.mark.parametrize(("size", "window"), [(5, 2), (40, 2), (6, 1), (64, 1), (3, 9)])
def test_forward_and_gradients_equal_the_definition(size, window):
    """Without padding, which generated cases have."""
    options = WindowedOptions(block_size=size, window=window, sinks=0, scale=0.5)
    check_definition(problem(), options, {})


@generated(100)
@given(case=windowed_cases(both_ways=True), log_decay=st.sampled_from([0.0, -0.01, -0.5, -3.0]))
def test_generated_cases(case, log_decay):
    """A softmax enlarges errors by its largest score."""
    (q, k, v), padding, enlarged = build_windowed(case, torch.float32)
    features = [(x / case["size"]).exp() for x in (q, k)]
    heads, groups = case["heads"]
    tensors = [q, k, v, *features, torch.full((groups,), log_decay), 2 * torch.randn(heads)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_way, "PIECE_TOKENS", case["piece_blocks"] * case["options"].block_size)
        check_definition(tensors, case["options"], padding, enlarged)


def test_near_tokens_count_where_nothing_is_far():
    """Far features of zero leave softmax over the window, however low its scores."""
    q, k, v, fq, fk, log_decay, balance = problem()
    args, nothing = (q.abs() * 40, -k.abs() * 40, v), (fq, torch.zeros_like(fk), log_decay)
    expected = two_way_reference(*args, FarPart(*nothing, torch.full_like(balance, -torch.inf)), OPTIONS)
    torch.testing.assert_close(two_way_attention(*args, FarPart(*nothing, balance), OPTIONS), expected)


def test_a_token_with_no_key_but_distant_ones_has_no_output():
    """As padding far after the last real token, where even the sum of the weights underflows."""
    q, k, v, *features, log_decay, balance = (x.requires_grad_() for x in problem(torch.float32))
    far, is_key = FarPart(*features, log_decay * 20, balance), (torch.arange(83) < 5).expand(2, 83)
    o = two_way_attention(q, k, v, far, OPTIONS, key_mask=is_key)
    assert o.isfinite().all() and (o[:, -5:, 2:] == 0).all()
    grads = torch.autograd.grad(o[:, :5].sum(), (q, k, v, *features, log_decay, balance))
    assert all(x.isfinite().all() for x in grads)


def test_a_second_derivative_is_refused():
    q, k, v, *far = problem()
    q.requires_grad_()
    (grad,) = torch.autograd.grad(two_way_attention(q, k, v, FarPart(*far), OPTIONS).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()
