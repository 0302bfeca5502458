"""impl="auto" on a GPU: one small call decides. Here the interpreter plays the GPU."""

import logging
import math

import pytest
import torch

from mhla_hf.ops import api
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import check
from mhla_hf.ops.triton.tuning import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="plays a GPU on the CPU")
GRID = Blocks.grid((4, 6), (2, 2))


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    """The CPU counts as a device with kernels, and nothing is known of it yet."""
    monkeypatch.setattr(api, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(check, "KERNEL_FAULTS", {})
    monkeypatch.setattr(api, "ANNOUNCED_CHOICES", set())


def inputs(dtype=torch.float32):
    return [torch.rand(1, 24, 2, width).to(dtype).requires_grad_() for width in (6, 6, 9)] + [torch.rand(4, 4)]


def test_kernels_that_agree_are_taken_and_checked_once(caplog):
    with caplog.at_level(logging.INFO, "mhla_hf"):
        state = torch.get_rng_state()
        inputs_by_dtype = [inputs(dtype) for dtype in (torch.float32, torch.bfloat16)]
        torch.set_rng_state(state)
        outputs = [mhla(*x, blocks=GRID) for x in inputs_by_dtype for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state), "the check took the user's random numbers"
    assert list(check.KERNEL_FAULTS.values()) == [None]
    assert caplog.messages == ["mhla: impl='auto' took 'triton', whose kernels agreed with fp64 on cpu."]
    for x, o in zip(inputs_by_dtype, outputs[::2], strict=True):
        assert torch.equal(o, mhla(*x, blocks=GRID, impl="triton"))
    assert torch.equal(*outputs[:2])


SAID = {1.05: "relative error of 5.0e-02 on cpu", math.nan: "error of inf on cpu", None: "failed on cpu with TypeError"}


@pytest.mark.parametrize("factor, said", SAID.items())
def test_kernels_that_are_wrong_or_fail_are_left_to_torch(factor, said, monkeypatch, caplog):
    kernels = check.triton_mhla
    with caplog.at_level(logging.INFO, "mhla_hf"):
        monkeypatch.setattr(check, "triton_mhla", lambda inputs: kernels(inputs) * factor)
        outputs = [mhla(*inputs(), blocks=GRID) for _ in range(2)]
    assert {o.grad_fn.name() for o in outputs} == {"BlockedAttentionBackward"}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and len(check.KERNEL_FAULTS) == 1
    assert "took 'torch', the Triton kernels " in record.message and said in record.message


def test_a_full_gpu_is_no_verdict(monkeypatch):
    def full(inputs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(check, "triton_mhla", full)
    with pytest.raises(torch.OutOfMemoryError):
        mhla(*inputs(), blocks=GRID)
    assert not check.KERNEL_FAULTS


def test_under_compile():
    given = inputs()

    def attend(q, k, v, mixing, **options):
        return mhla(q, k, v, mixing, blocks=Blocks.sequence(q.shape[1], 6), causal=True, **options)

    torch.compiler.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)(*given)
    assert list(check.KERNEL_FAULTS.values()) == [None]
    assert torch.equal(got, attend(*given, impl="triton"))
