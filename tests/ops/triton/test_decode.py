"""Decoding by the kernels, in the interpreter: step by step as the whole."""

import pytest
import torch
from ops_cases import DEVICE, KERNELS, distance, features

from mhla_hf.ops.api import mhla, mhla_step
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.reference import mhla_reference
from mhla_hf.ops.state import MHLAState

pytestmark = KERNELS


@pytest.mark.parametrize(
    "normalize, den_width, dtype",
    [(True, None, torch.bfloat16), (False, None, torch.float16), (True, 5, torch.float32)],
)
def test_decoding_equals_the_whole(normalize, den_width, dtype):
    tokens, size = 11, 4
    inputs = dict(zip("qkv", features(2, tokens, heads=4, groups=2, dtype=dtype), strict=True))
    if den_width:
        inputs |= {f"{x}_den": torch.rand(2, tokens, n, den_width, device=DEVICE) for x, n in (("q", 4), ("k", 2))}
    mixing, causal = torch.rand(4, 3, 3, device=DEVICE), {"causal": True, "normalize": normalize}
    exact = {name: x.double() for name, x in inputs.items()}
    want = mhla_reference(mixing=mixing.double(), blocks=Blocks.sequence(tokens, size), **exact, **causal)
    begin = {name: x[:, :5] for name, x in inputs.items()} | {"mixing": mixing[:, :2, :2], "impl": "triton"}
    o, state = mhla(blocks=Blocks.sequence(5, size), return_state=True, **begin, **causal)
    outputs = [o]
    for t in range(5, tokens):
        now = {name: x[:, t : t + 1] for name, x in inputs.items()}
        outputs.append(mhla_step(**now, mixing=mixing, state=state, normalize=normalize, impl="triton")[0])
    assert distance(torch.cat(outputs, 1), want) <= (1e-5 if dtype == torch.float32 else 1.5e-2)


def test_queries_may_be_strided():
    """The last axis of q and q_den need not be contiguous in memory."""
    (q, k, v), mixing = features(2, 9), torch.rand(3, 3, device=DEVICE)
    dens = {"q_den": q[..., ::2].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1), "k_den": k[..., ::2]}
    q = q.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    outputs = []
    for impl in ("torch", "triton"):
        state = MHLAState.empty(2, 1, 2, 8, 12, 4, den_dim=4, device=DEVICE)
        for t in range(9):
            now = (x[:, t : t + 1] for x in (q, k, v))
            den = {name: x[:, t : t + 1] for name, x in dens.items()}
            o, state = mhla_step(*now, mixing, state, impl=impl, **den)
        outputs.append(o)
    assert distance(*outputs) <= 1e-5
