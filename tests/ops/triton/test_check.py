"""impl="auto" on a GPU: a small call decides. Here the interpreter plays the GPU."""

import logging

import pytest
import torch

from mhla_hf.ops import api
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import check
from mhla_hf.ops.triton.tuning import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="plays a GPU on the CPU")
GRID, SEQUENCE = Blocks.grid((4, 6), (2, 2)), Blocks.sequence(24, 6)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """The CPU counts as a device with kernels, and nothing is known of it yet."""
    monkeypatch.setattr(api, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(check, "FAULTS_FOUND", {})
    monkeypatch.setattr(api, "ANNOUNCED_CHOICES", set())


def inputs(dtype=torch.float32, blocks=GRID):
    q, k, v = (torch.rand(1, 24, 2, width).to(dtype).requires_grad_() for width in (6, 6, 9))
    return q, k, v, torch.rand(blocks.num_blocks, blocks.num_blocks)


def call_with(monkeypatch, name, replacement, **options):
    """`mhla` by "auto" with a function of the check replaced."""
    monkeypatch.setattr(check, name, replacement)
    return mhla(*inputs(), **{"blocks": GRID, **options})


@pytest.mark.parametrize(
    "dtype, blocks, options",
    [
        (torch.bfloat16, GRID, {"unrounded": True}),
        (torch.float16, GRID, {"normalize": "official"}),
        (torch.float32, SEQUENCE, {"causal": True, "normalize": False}),
        (torch.bfloat16, Blocks.sequence(24, 70), {"causal": True, "key_mask": torch.arange(24)[None] < 20}),
    ],
)
def test_kernels_that_agree_are_taken_and_checked_once(caplog, dtype, blocks, options):
    with caplog.at_level(logging.INFO, "mhla_hf"):
        q, k, v, mixing = inputs(dtype, blocks)
        state = torch.get_rng_state()
        outputs = [mhla(q, k, v, mixing, blocks=blocks, **options) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state), "the check took the user's random numbers"
    assert list(check.FAULTS_FOUND.values()) == [None]
    assert [x.message for x in caplog.records] == [
        "mhla: impl='auto' took 'triton', whose kernels agreed with fp64 on cpu."
    ]
    assert torch.equal(outputs[0], mhla(q, k, v, mixing, blocks=blocks, impl="triton", **options))
    assert torch.equal(*outputs)


def test_kinds_are_checked_apart():
    q, k, v, mixing = inputs()
    mhla(q, k, v, mixing, blocks=GRID)
    with torch.no_grad():
        mhla(q, k, v, mixing, blocks=GRID)
        mhla(q.half(), k.half(), v.half(), mixing, blocks=GRID)
        mhla(q, k, v, mixing, blocks=GRID, q_den=q[..., :5], k_den=k[..., :5])
        mhla(q, k[:, :, :1], v[:, :, :1], mixing, blocks=GRID)
        mhla(q, k, v, mixing, blocks=GRID, key_mask=torch.arange(24)[None] < 20)
        mhla(q, k, v, mixing, blocks=GRID, unrounded=True)
    assert len(check.FAULTS_FOUND) == 7


@pytest.mark.parametrize(
    "factor, said",
    [
        (1.01, "with a relative error of 1.0e-02 on cpu"),
        (float("nan"), "with a relative error of inf on cpu"),
        (None, "failed on cpu with TypeError: unsup"),
    ],
)
def test_kernels_that_are_wrong_or_fail_are_left_to_torch(factor, said, monkeypatch, caplog):
    kernels = check.triton_mhla
    with caplog.at_level(logging.INFO, "mhla_hf"):
        first = call_with(monkeypatch, "triton_mhla", lambda *args, **options: kernels(*args, **options) * factor)
        second = mhla(*inputs(), blocks=GRID)
    assert first.grad_fn.name() == second.grad_fn.name() == "BlockedAttentionBackward"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and len(check.FAULTS_FOUND) == 1
    assert "took 'torch', the Triton kernels " in record.message and said in record.message


def test_a_full_gpu_is_no_verdict(monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        call_with(monkeypatch, "triton_mhla", full)
    assert not check.FAULTS_FOUND


def test_a_graph_is_not_captured_through_a_check(monkeypatch):
    o = call_with(monkeypatch, "is_capturing", lambda device: True)
    assert o.grad_fn.name() == "BlockedAttentionBackward"
    assert not check.FAULTS_FOUND, "the next call would not be checked"


def test_under_compile():
    given = inputs(blocks=SEQUENCE)

    def attend(q, k, v, mixing, **options):
        return mhla(q, k, v, mixing, blocks=Blocks.sequence(q.shape[1], 6), causal=True, **options)

    torch.compiler.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)(*given)
    assert list(check.FAULTS_FOUND.values()) == [None]
    assert torch.equal(got, attend(*given, impl="triton"))
