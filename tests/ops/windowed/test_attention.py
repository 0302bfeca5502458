"""Near softmax and far MHLA by decays: the blocked options against its T x T definition, and decoding against both."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from tools.ops_cases import attend_window, build_windowed, distance, generated, map_features, windowed_cases

from mhla_hf.ops.windowed import attention
from mhla_hf.ops.windowed.attention import windowed_attention
from mhla_hf.ops.windowed.decays import Decays, decayed_sums
from mhla_hf.ops.windowed.decoding import WindowedState, continue_windowed
from mhla_hf.ops.windowed.definition import windowed_reference
from mhla_hf.ops.windowed.inputs import WindowedInputs, WindowedOptions

FORMS = {
    "window": WindowedOptions(block_size=5, window=2, sinks=3, scale=0.5),
    "long blocks": WindowedOptions(block_size=40, window=2, sinks=4, scale=0.5),
    "sinks of most of a block": WindowedOptions(block_size=5, window=2, sinks=4, scale=0.5),
    "sinks of a whole block": WindowedOptions(block_size=64, window=2, sinks=64, scale=0.5),
    "window without the block before": WindowedOptions(block_size=6, window=1, sinks=2, scale=0.5),
    "decays alone": WindowedOptions(block_size=5, window=1, sinks=0, scale=0.5),
    "decays, not normalized": WindowedOptions(block_size=5, window=1, sinks=0, scale=0.5, normalize=False),
}


def problem(name, dtype=torch.float64):
    q, k, v = (torch.randn(2, 83, *shape, dtype=dtype) for shape in ((4, 6), (2, 6), (2, 3)))
    decays = Decays(torch.rand(4, 3), torch.tensor([[0.0, -0.1, -2.0], [0.0, -0.5, -0.01]])).to(dtype)
    balance = None if name.startswith("decays") else torch.randn(4, dtype=dtype)
    mapped = [torch.nn.functional.elu(x) + 1 for x in (q, k)]
    return FORMS[name], [*mapped, v, *mapped] if balance is None else [q, k, v, *mapped], decays, balance


PADDINGS = {
    "none": {},
    "left": {"starts": torch.tensor([0, 29])},
    "holes": {"key_mask": torch.arange(83).expand(2, 83) % 7 != 3},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 40, 41, 83])},
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FORMS)
def test_forward_and_gradients_equal_the_definition(name, padding):
    options, tensors, decays, balance = problem(name)
    tensors = [x[:1] if padding == "packed" else x for x in tensors]
    tensors += [decays.weight, decays.log_rate, *([] if balance is None else [balance])]
    real = PADDINGS[padding].get("key_mask", torch.ones(1, 83))[..., None, None]
    direction = torch.randn(*tensors[0].shape[:3], 3, dtype=torch.float64) * real

    def attend(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        *x, weight, log_rate, shift = [*leaves, None][:8]
        o = attend_window(*x, Decays(weight, log_rate), shift, options, function, **PADDINGS[padding])
        grads = torch.autograd.grad(o, leaves, direction.to(dtype), allow_unused=True, materialize_grads=True)
        return [o * real.to(dtype), *grads]

    exact = attend(windowed_reference, torch.float64)
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        for ours, expected in zip(attend(windowed_attention, dtype), exact, strict=True):
            assert ours.dtype == dtype
            assert torch.linalg.norm(ours - expected) <= bound * torch.linalg.norm(expected) + 1e-12


def test_the_scan_equals_the_matrix_at_many_lengths():
    decays = Decays(torch.rand(2, 2, dtype=torch.float64), torch.tensor([[0.0, -0.3]], dtype=torch.float64))
    for count in (1, 2, 15, 16, 17, 50, 600):
        summaries = torch.randn(1, 1, count, 4, dtype=torch.float64)
        for window in (1, 2, 3, 9):
            mixed = torch.einsum("hr,bgmrx->bhmx", decays.weight, decayed_sums(summaries, decays.log_rate, window))
            exact = decays.matrix(count).tril(-window) @ summaries
            assert torch.allclose(mixed, exact, rtol=1e-11, atol=1e-12)


def decode(options, tensors, decays, balance, cuts, crops=()):
    """Outputs of a sequence fed in pieces that end at `cuts`; a crop (at, back) takes tokens back and feeds them anew."""
    q, k, v, fq, fk = tensors
    map_keys = (lambda x, _: x) if balance is None else (lambda x, _: torch.nn.functional.elu(x) + 1)
    state = WindowedState.empty(k, v, decays.weight.shape[1], fk.shape[3], options)
    pieces = list(itertools.pairwise([0, *cuts]))
    for at, back in crops:
        place = [end for _, end in pieces].index(at) + 1
        pieces.insert(place, (at - back, at))
    done = v.new_zeros(len(q), 0, q.shape[2], v.shape[3])
    for start, end in pieces:
        if start < done.shape[1]:
            state.crop(done.shape[1] - start)
        inputs = WindowedInputs(*(x[:, start:end] for x in (q, k, v, fq)), decays, balance, options)
        done = torch.cat([done[:, :start], continue_windowed(inputs, map_keys, state, fresh=start == 0)], 1)
    return done, state


@pytest.mark.parametrize("cuts", [range(1, 84), [1, 2, 30, 31, 56, 83]], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_decoding_equals_the_whole(name, cuts):
    options, tensors, decays, balance = problem(name)
    o, _ = decode(options, tensors, decays, balance, cuts)
    assert distance(o, attend_window(*tensors, decays, balance, options)) <= 1e-11


@pytest.mark.parametrize("name", ["window", "decays alone"])
@pytest.mark.parametrize("back", [3, 5])
def test_tokens_taken_back_leave_no_trace(name, back):
    options, tensors, decays, balance = problem(name)
    for at in range(40, 56):
        o, _ = decode(options, tensors, decays, balance, [20, at - back, at, 83], crops=[(at, back)])
        assert distance(o, attend_window(*tensors, decays, balance, options)) <= 1e-10


def test_a_crop_to_where_nothing_is_far_leaves_nothing_of_the_sums():
    """Nor does their rounding, which large features would show."""
    options, (q, k, v, fq, fk), decays, balance = problem("window", dtype=torch.float32)
    tensors = [q, 9 * k, v, 1e3 * fq, fk]
    o, _ = decode(options, tensors, decays, balance, [12], crops=[(12, 5)])
    expected, _ = decode(options, tensors, decays, balance, [12])
    assert distance(o[:, 7:10], expected[:, 7:10]) <= 1e-5


@pytest.mark.parametrize("log_rate", [-20.0, -100.0])
def test_a_crop_divides_by_no_vanishing_rate(log_rate):
    options, tensors, decays, balance = problem("decays alone", dtype=torch.float32)
    decays = Decays(decays.weight[:, :1], torch.full((2, 1), log_rate))
    o, _ = decode(options, tensors, decays, balance, [22, 83], crops=[(22, 5)])
    assert distance(o, attend_window(*tensors, decays, balance, options)) <= 1e-5


def test_no_more_is_taken_back_than_the_ring_holds():
    """However it is done: a few tokens between two crops do not bring back what they had overwritten."""
    options, tensors, decays, balance = problem("window")
    _, state = decode(options, tensors, decays, balance, [40])
    state.crop(3)
    with pytest.raises(ValueError, match="expected at most 2, the tokens that the ring still holds"):
        state.crop(3)
    state.crop(2)
    with torch.inference_mode():
        _, state = decode(options, tensors, decays, balance, [40])
    state.crop(1)
    state.select(torch.tensor([1, 0]))
    assert not state.position.is_inference() and state.position.tolist() == [39, 39]


def test_autocast_changes_nothing():
    problem_of_32_bits = problem("window", dtype=torch.float32)
    expected, _ = decode(*problem_of_32_bits, [40, *range(41, 50), 83])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = decode(*problem_of_32_bits, [40, *range(41, 50), 83])
    assert torch.equal(o, expected) and state.pending.dtype == torch.float32


def test_near_tokens_count_where_nothing_is_far():
    """Far features of zero leave softmax over the window, however low its scores."""
    options, (q, k, v, fq, fk), decays, balance = problem("window")
    with torch.no_grad():
        args = q.abs() * 40, -k.abs() * 40, v, fq, torch.zeros_like(fk), decays
        expected = attend_window(*args, torch.full_like(balance, -torch.inf), options, windowed_reference)
        torch.testing.assert_close(attend_window(*args, balance, options), expected)


def test_padding_of_an_empty_row_is_not_kept_as_sinks():
    x, options = torch.rand(1, 5, 1, 4), WindowedOptions(4, sinks=2)
    state = WindowedState.empty(x, x, 1, 4, options)
    rest = Decays(torch.ones(1, 1), torch.zeros(1, 1)), torch.zeros(1), options
    padding = WindowedInputs(*[x * torch.nan] * 4, *rest, starts=torch.tensor([5]))
    continue_windowed(padding, lambda x, _: x, state, fresh=True)
    token = WindowedInputs(*[x[:, :1]] * 4, *rest)
    assert continue_windowed(token, lambda x, _: x, state, fresh=False).isfinite().all()


@generated(100)
@given(case=windowed_cases())
def test_generated_cases(case):
    """Whole, and decoded with tokens taken back on the way. A softmax enlarges errors by its largest score.

    After a crop the far sums hold the rounding of a block that was taken out of them, which is many times as large as what
    is left where features are 1e-6: 1e-6 in fp64, and no bound in fp32.
    """
    options, map_keys = case["options"], map_features if case["softmax"] else torch.nn.Identity()

    def check(o, x, padding, bound):
        (q, k, v), (decays, balance) = (t.double() for t in x), exact
        inputs = q, k, v, map_keys(q), map_keys(k), decays, balance, options
        expected = attend_window(*inputs, windowed_reference, **padding)
        real = padding["key_mask"][..., None, None] if "key_mask" in padding else 1
        assert distance(o * real, expected * real) <= bound

    _, *exact = build_windowed(case, torch.float64)[:3]
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        x, decays, balance, padding, enlarged = build_windowed(case, dtype)
        q, k, v = x
        bound = bound * enlarged
        with mock.patch.object(attention, "PIECE_TOKENS", case["piece_tokens"]):
            o = attend_window(q, k, v, map_keys(q), map_keys(k), decays, balance, options, **padding)
        check(o, x, padding, bound)
        if "cu_seqlens" in padding:
            continue
        state = WindowedState.empty(k, v, len(case["log_rate"]), k.shape[3], options)
        columns, fed, o = [], 0, v.new_zeros(len(q), 0, q.shape[2], v.shape[3])
        for count, back in case["plan"]:
            new = range(fed, min(fed + count, q.shape[1]))
            if not new:
                break
            q_new, k_new, v_new = (t[:, new.start : new.stop] for t in x)
            now = {name: t[:, new.start : new.stop] for name, t in padding.items() if name == "key_mask"}
            if "starts" in padding:
                now["starts"] = (padding["starts"] - len(columns)).clamp(0, len(new))
            inputs = WindowedInputs(q_new, k_new, v_new, map_keys(q_new), decays, balance, options, **now)
            with mock.patch.object(attention, "PIECE_TOKENS", case["piece_tokens"]):
                o = torch.cat([o, continue_windowed(inputs, lambda x, _: map_keys(x), state, fresh=not fed)], 1)
            columns, fed = [*columns, *new], new.stop
            whole = {name: t[:, columns] for name, t in padding.items() if name == "key_mask"}
            if "starts" in padding:
                whole["starts"] = padding["starts"].clamp(max=len(columns))
            check(o, [t[:, columns] for t in x], whole, bound)
            ahead = torch.maximum(state.furthest, state.position) - state.position
            back = min(back, options.block_size - int(ahead.max()), int(state.position.min()))
            state.crop(back)
            bound = 1e-6 * enlarged if back else bound
            if back and dtype == torch.float32:
                break
            columns = columns[: len(columns) - back]
            o = o[:, : len(columns)]


def test_a_second_derivative_is_refused():
    options, (q, *rest), decays, balance = problem("window")
    q = q.detach().requires_grad_()
    (grad,) = torch.autograd.grad(attend_window(q, *rest, decays, balance, options).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        grad.square().sum().backward()
