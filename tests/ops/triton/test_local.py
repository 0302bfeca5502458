"""The kernel of near and far attention against the definition in fp64, in triton's interpreter, or on a GPU with
TRITON_INTERPRET=0; its gradients; decoding; and when impl="auto" takes it."""

import dataclasses
import logging

import pytest
import torch
from ops_cases import distance

from mhla_hf.ops import api
from mhla_hf.ops.decays import Decays
from mhla_hf.ops.local import local_attention
from mhla_hf.ops.local_state import LocalState, continue_local
from mhla_hf.ops.torch_local import LocalForm
from mhla_hf.ops.triton import check, local
from mhla_hf.ops.triton.tuning import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 1e-5, BF16: 1.5e-2}
WINDOW = LocalForm(block_size=16, lag=2, sinks=3, scale=0.4, impl="triton")
FORMS = {
    "window": WINDOW,
    "long blocks": dataclasses.replace(WINDOW, block_size=100, sinks=20),
    "no block before": dataclasses.replace(WINDOW, block_size=12, lag=1),
    "decays alone": dataclasses.replace(WINDOW, lag=1, sinks=0),
    "decays, not normalized": dataclasses.replace(WINDOW, lag=1, sinks=0, normalize=False),
}
PADDINGS = {
    "none": {},
    "left": {"starts": torch.tensor([0, 29], device=DEVICE)},
    "holes": {"key_mask": torch.arange(83, device=DEVICE).expand(2, 83) % 7 != 3},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 40, 41, 83], device=DEVICE)},
}

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    pytest.mark.usefixtures("poisoned"),
]


def map_features(x):
    return torch.nn.functional.elu(x) + 1


def problem(form, tokens=83, batch=2, heads=4, groups=2, dtype=F32):
    """q, k, v, fq, fk rounded to dtype; then weights and rates of the decays, fp32, and a balance where there is a softmax."""
    q, k, v = (torch.randn(batch, tokens, n, w, device=DEVICE) for n, w in ((heads, 6), (groups, 6), (groups, 18)))
    mapped = [map_features(x.to(dtype)) for x in (q, k)]
    learned = [torch.rand(heads, 3, device=DEVICE), -torch.rand(groups, 3, device=DEVICE)]
    if form.sinks == 0:
        return [x.to(dtype) for x in (*mapped, v, *mapped)] + learned
    return [x.to(dtype) for x in (q, k, v, *mapped)] + [*learned, torch.randn(heads, device=DEVICE)]


def attend(form, q, k, v, fq, fk, weight, log_rate, balance=None, **padding):
    o = local_attention(q, k, v, fq, fk, Decays(weight, log_rate), balance, form, **padding)
    return o * padding["key_mask"][..., None, None] if "key_mask" in padding else o


def exact(form, inputs, **padding):
    return attend(dataclasses.replace(form, impl="reference"), *(x.double() for x in inputs), **padding)


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
    form = FORMS[name]
    tokens = 210 if name == "long blocks" and padding == "none" else 83
    inputs = problem(form, tokens, batch=1 if padding == "packed" else 2, dtype=dtype)
    want = exact(form, inputs, **PADDINGS[padding])
    got = attend(form, *inputs, **PADDINGS[padding])
    assert got.dtype == F32 and distance(got, want) <= TOLERANCE[dtype]
    rounded = attend(dataclasses.replace(form, unrounded=False), *inputs, **PADDINGS[padding])
    assert torch.equal(rounded, got.to(dtype))
