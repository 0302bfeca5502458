"""The kernel of near and far attention against the definition in fp64, in triton's interpreter, or on a GPU with
TRITON_INTERPRET=0; its gradients; decoding; and when impl="auto" takes it."""

import dataclasses
import logging

import pytest
import torch
from tools.ops_cases import DEVICE, KERNELS, attend_window, distance
from tools.small_models import refused
from torch._dynamo.utils import counters

from mhla_hf.nn.settings import MHLASettings
from mhla_hf.nn.windowed import DecayMHLA
from mhla_hf.ops import api
from mhla_hf.ops.triton import check
from mhla_hf.ops.triton.tuning import INTERPRETED, TunedKernel
from mhla_hf.ops.windowed import triton_attend
from mhla_hf.ops.windowed.decays import Decays
from mhla_hf.ops.windowed.decoding import WindowedState, continue_windowed
from mhla_hf.ops.windowed.definition import windowed_reference
from mhla_hf.ops.windowed.inputs import WindowedInputs, WindowedOptions

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 1.5e-2}
WINDOW = WindowedOptions(block_size=16, window=2, sinks=3, scale=0.4, impl="triton")
FORMS = {
    "window": WINDOW,
    "long blocks": dataclasses.replace(WINDOW, block_size=100, sinks=20),
    "no block before": dataclasses.replace(WINDOW, block_size=12, window=1),
    "decays alone": dataclasses.replace(WINDOW, window=1, sinks=0),
    "decays, not normalized": dataclasses.replace(WINDOW, window=1, sinks=0, normalize=False),
}
PADDINGS = {
    "none": {},
    "left": {"starts": torch.tensor([0, 29], device=DEVICE)},
    "holes": {"key_mask": torch.arange(83, device=DEVICE).expand(2, 83) % 7 != 3},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 40, 41, 83], device=DEVICE)},
}

pytestmark = KERNELS


def map_features(x):
    return torch.nn.functional.elu(x) + 1


def problem(options, tokens=83, batch=2, groups=1, dtype=F32):
    """q, k, v, fq, fk rounded to dtype; in fp32 weights and rates of the decays and, with a softmax, a balance."""
    q, k, v = (torch.randn(batch, tokens, n, w, device=DEVICE) for n, w in ((2 * groups, 6), (groups, 6), (groups, 18)))
    mapped = [map_features(x.to(dtype)) for x in (q, k)]
    learned = [torch.rand(2 * groups, 3, device=DEVICE), -torch.rand(groups, 3, device=DEVICE)]
    if options.sinks == 0:
        return [x.to(dtype) for x in (*mapped, v, *mapped)] + learned
    return [x.to(dtype) for x in (q, k, v, *mapped)] + [*learned, torch.randn(2 * groups, device=DEVICE)]


def attend(options, q, k, v, fq, fk, weight, log_rate, balance=None, **padding):
    o = attend_window(q, k, v, fq, fk, Decays(weight, log_rate), balance, options, **padding)
    return o * padding["key_mask"][..., None, None] if "key_mask" in padding else o


def exact(options, *inputs, **padding):
    q, k, v, fq, fk, weight, log_rate, *balance = (x.double() for x in inputs)
    decays = Decays(weight, log_rate)
    o = attend_window(q, k, v, fq, fk, decays, *(balance or [None]), options, windowed_reference, **padding)
    return o * padding["key_mask"][..., None, None] if "key_mask" in padding else o


@pytest.mark.parametrize(
    "name, padding, dtype",
    [
        *(("window", padding, F32) for padding in PADDINGS),
        *(("window", padding, BF16) for padding in ("left", "packed")),
        ("long blocks", "none", F32),
        ("long blocks", "holes", BF16),
        ("no block before", "packed", F32),
        ("decays alone", "left", F32),
        ("decays, not normalized", "packed", BF16),
    ],
)
def test_every_form(name, padding, dtype):
    options = FORMS[name]
    tokens = 210 if name == "long blocks" and padding == "none" else 83
    groups = 2 if padding in ("none", "packed") else 1
    inputs = problem(options, tokens, 1 if padding == "packed" else 2, groups, dtype)
    want = exact(options, *inputs, **PADDINGS[padding])
    got = attend(options, *inputs, **PADDINGS[padding])
    assert got.dtype == F32 and distance(got, want) <= TOLERANCE[dtype]
    rounded = attend(dataclasses.replace(options, unrounded=False), *inputs, **PADDINGS[padding])
    assert torch.equal(rounded, got.to(dtype))


@pytest.mark.parametrize(
    "name, padding, dtype", [("window", "left", F32), ("window", "packed", BF16), ("decays alone", "holes", F32)]
)
def test_gradients(name, padding, dtype):
    """Of every input and of what is learned, of sinks that are keys of other tokens too; and the second derivative."""
    options, results = FORMS[name], []
    inputs = problem(options, batch=1 if padding == "packed" else 2, dtype=dtype)
    direction = torch.randn(*inputs[0].shape[:3], 18, device=DEVICE)
    for function, kind in ((attend, torch.Tensor.clone), (exact, torch.Tensor.double)):
        given = [kind(x).requires_grad_() for x in inputs]
        o = function(options, *given, **PADDINGS[padding])
        first = torch.autograd.grad(o, given, direction.to(o.dtype), create_graph=True)
        results.append([*first, *torch.autograd.grad(first[0].float().square().sum(), given[1:3])])
    for place, (got, want) in enumerate(zip(*results, strict=True)):
        assert distance(got, want) <= TOLERANCE[dtype], place


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(50, 61, 83), (7, 8, 83)], ids=str)
def test_a_state_continued_in_pieces_equals_the_whole(cuts, monkeypatch):
    """Left padding in the first piece, segments of two blocks, and a step of one token, which stays PyTorch."""
    monkeypatch.setattr("mhla_hf.ops.windowed.attention.SEGMENT_TOKENS", 24)
    inputs, starts = problem(WINDOW), torch.tensor([0, 5], device=DEVICE)
    want = exact(WINDOW, *inputs, starts=starts)
    assert distance(attend(WINDOW, *inputs, starts=starts), want) <= TOLERANCE[F32]
    q, k, v, fq, _, weight, log_rate, balance = inputs
    state, begin, outputs = WindowedState.empty(k, v, 3, 6, WINDOW), 0, []
    for end in cuts:
        tokens = (x[:, begin:end] for x in (q, k, v, fq))
        padding = None if begin else starts
        piece = WindowedInputs(*tokens, Decays(weight, log_rate), balance, WINDOW, starts=padding)
        outputs.append(continue_windowed(piece, lambda x, _: map_features(x), state, fresh=begin == 0))
        begin = end
    assert distance(torch.cat(outputs, 1), want) <= TOLERANCE[F32]


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiles_to_one_graph_for_all_lengths(backend, monkeypatch):
    """With the small call that decides; aot_eager traces the backward pass, too."""
    options = dataclasses.replace(WINDOW, impl="auto")
    monkeypatch.setattr(api, "KERNEL_DEVICES", (DEVICE,))
    monkeypatch.setattr(check, "KERNEL_FAULTS", {})

    def loss(*inputs):
        return attend(options, *inputs).square().sum()

    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (40, 48, 57):
        inputs = [x.requires_grad_() for x in problem(WINDOW, tokens, batch=1)]
        got, want = (torch.autograd.grad(function(*inputs), inputs) for function in (compiled, loss))
        assert all(distance(x, y) <= 1e-6 for x, y in zip(got, want, strict=True))
    assert counters["stats"]["unique_graphs"] == 1 and list(check.KERNEL_FAULTS.values()) == [None]


def test_opcheck():
    q, k, v, fq, _, weight, _, balance = (x.requires_grad_() for x in problem(WINDOW, 32, batch=1))
    mixed, valid = torch.rand(1, 2, 2, 3, 6, 19, device=DEVICE), torch.ones(1, 32, dtype=torch.bool, device=DEVICE)
    sink = k[:, :3].detach().requires_grad_(), v[:, :3].detach().requires_grad_(), valid[:, :3].clone()
    given = q, k, v, fq, mixed, weight, balance, *sink, valid, torch.arange(2, device=DEVICE)[None]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_attend.TRITON_WINDOWED, (*given, 16, 2, 0.4, True, F32), test_utils=checks)


@pytest.mark.skipif(not INTERPRETED, reason="plays a GPU on the CPU")
@pytest.mark.parametrize(
    "options", [WINDOW, dataclasses.replace(FORMS["decays, not normalized"], unrounded=False)], ids=str
)
def test_kernels_that_agree_are_taken_and_others_left(options, monkeypatch, caplog):
    monkeypatch.setattr(api, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(api, "ANNOUNCED_CHOICES", set())
    right, inputs, auto = (
        triton_attend.TRITON_WINDOWED,
        problem(options, 40, batch=1),
        dataclasses.replace(options, impl="auto"),
    )
    wrong, failing = (lambda *given: right(*given) * 1.05), (lambda *given: None + 1)
    verdicts = {
        right: "agreed with fp64",
        wrong: "gave o with a relative error of 5.0e-02",
        failing: "failed on cpu with TypeEr",
    }
    for kernel, said in verdicts.items():
        monkeypatch.setattr(check, "KERNEL_FAULTS", {})
        monkeypatch.setattr(triton_attend, "TRITON_WINDOWED", kernel)
        caplog.clear()
        with caplog.at_level(logging.INFO, "mhla_hf"):
            got = [attend(auto, *inputs) for _ in range(2)]
        impl = "triton" if kernel is right else "torch"
        assert torch.equal(*got) and torch.equal(got[0], attend(dataclasses.replace(options, impl=impl), *inputs))
        (record,), (verdict,) = caplog.records, check.KERNEL_FAULTS.values()
        assert f"took '{impl}', " in record.message and said in record.message
        assert (verdict is None) == (kernel is right)


@torch.no_grad()
@pytest.mark.parametrize("output_norm", [False, True])
def test_the_core_takes_what_its_settings_say(output_norm, monkeypatch):
    """And where its output is rounded anyway, the kernel rounds it."""
    written, launcher = [], TunedKernel.__getitem__

    def recorded(self, grid):
        return lambda **arguments: (written.append(arguments), launcher(self, grid)(**arguments))

    monkeypatch.setattr(TunedKernel, "__getitem__", recorded)
    choices = {"mixing_form": "decay", "windowed": True, "block_size": 16, "output_norm": output_norm, "gate": False}
    outputs, given = [], [torch.randn(2, 60, heads, 8, device=DEVICE).to(BF16) for heads in (4, 2, 2)]
    for impl in ("triton", "torch"):
        torch.manual_seed(0)
        settings = MHLASettings(**choices, impl=impl)
        core = DecayMHLA(settings, num_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, hidden_size=32)
        outputs.append(core.to(DEVICE, BF16)(*given))
    assert outputs[0].dtype == BF16 and distance(*outputs) <= TOLERANCE[BF16]
    (arguments,) = written
    assert {x[0].dtype for x in arguments.values() if isinstance(x, tuple)} == {BF16, *([F32] if output_norm else [])}


def test_refusals_name_the_reason():
    with refused("impl: got 'triton', expected another one: the kernels compute in fp32, not in fp64"):
        attend(WINDOW, *(x.double() for x in problem(WINDOW)))
