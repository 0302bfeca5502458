"""The T x T definition against loops, and the torch implementation against it, in three dtypes with every gradient."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from tools.ops_cases import build, cases, distance, generated, gradient_floors, mhla_reference, run

from mhla_hf.ops import torch_operator
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks

SMALL_BESIDE_LARGE = {  # a first alive key that is tiny makes gradients that later ones must not be differences of
    "form": "packed", "batch": 1, "heads": (2, 2), "widths": (1, 4, 1), "per_head": True, "normalize": True,
    "own_den": False, "scale": None, "masked": False, "dead": True, "spare": 1, "one_by_one": False, "seed": 3404,
    "blocks": Blocks.sequence(167, 130), "key_blocks": None, "cu_seqlens": [0, 167],
}  # fmt: skip


def written_out(q, k, v, mixing, blocks, key_blocks, causal, normalize, scale):
    """o for one row, one head, by loops over tokens."""
    query_block, key_block = blocks.index().tolist(), key_blocks.index().tolist()
    o = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    for t in range(len(q)):
        keys = range(t + 1 if causal else len(k))
        weights = [mixing[query_block[t], key_block[s]] * scale * (q[t] @ k[s]) for s in keys]
        o[t] = sum(weight * v[s] for s, weight in enumerate(weights)) / (sum(weights) if normalize else 1)
    return o


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("form", ["causal", "grid", "cross"])
def test_against_loops(form, normalize):
    blocks = Blocks.sequence(7, 3) if form == "causal" else Blocks.grid((3, 3), (2, 2))
    key_blocks = Blocks.sequence(5, 2) if form == "cross" else blocks
    q = torch.rand(2, blocks.length, 4, 3, dtype=torch.float64)
    k, v = (torch.rand(2, key_blocks.length, 2, width, dtype=torch.float64) for width in (3, 2))
    mixing = torch.rand(4, blocks.num_blocks, key_blocks.num_blocks, dtype=torch.float64)
    options = {"blocks": blocks, "key_blocks": key_blocks, "causal": form == "causal", "normalize": normalize}
    scale = 0.7 if form == "causal" else None  # that of softmax attention
    o = mhla_reference(q, k, v, mixing, scale=scale, **options)
    for row in range(2):
        for head in range(4):
            one = (q[row, :, head], k[row, :, head // 2], v[row, :, head // 2], mixing[head])
            expected = written_out(*one, blocks, key_blocks, form == "causal", normalize, scale or 3**-0.5)
            torch.testing.assert_close(o[row, :, head], expected, rtol=1e-12, atol=1e-12)


@generated(400)
@given(case=cases())
@example(case=SMALL_BESIDE_LARGE)
def test_generated_cases(case):
    with mock.patch.object(torch_operator, "HEAD_BY_HEAD_SIZE", 1 if case["one_by_one"] else 10**9):
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            tensors, options = build(case, dtype)
            exact = {name: x.double() for name, x in tensors.items()}
            generator = torch.Generator().manual_seed(case["seed"] + 1)
            shape = (*tensors["q"].shape[:3], tensors["v"].shape[3])
            direction = torch.randn(shape, generator=generator, dtype=torch.float64)
            expected, expected_grads = run(mhla_reference, exact, options, direction)
            got, grads = run(mhla, tensors, {**options, "impl": "torch"}, direction)
            assert got.dtype == dtype and got.shape == expected.shape
            assert distance(got, expected) < tolerance
            floors = gradient_floors(exact, options, direction)
            for name, grad in grads.items():
                assert grad.dtype == tensors[name].dtype, name
                off = distance(grad, expected_grads[name], floors[name])
                if off >= tolerance:  # signed terms may cancel: the definition in this precision is as far off then
                    _, rounded = run(mhla_reference, tensors, options, direction)
                    assert off < 2 * distance(rounded[name], expected_grads[name], floors[name]), name
        tensors, options = build(case, torch.bfloat16)
        got, _ = run(mhla, tensors, {**options, "impl": "torch"})
    expected, _ = run(mhla_reference, {name: x.double() for name, x in tensors.items()}, options)
    assert got.dtype == torch.bfloat16
    assert distance(got, expected) < 1.5e-2
