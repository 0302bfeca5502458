"""The torch implementation against the T x T definition: generated cases, three dtypes, forward and every gradient."""

import collections

import torch
from hypothesis import example, given
from tools import ops_cases
from tools.ops_cases import FORMS, build, distance, mhla_reference, run

from mhla_hf.ops import torch_operator
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks

SEEN = collections.Counter()
SMALL_BESIDE_LARGE = {  # a first alive key that is tiny makes gradients that later ones must not be differences of
    "form": "packed", "batch": 1, "heads": (2, 2), "widths": (1, 4, 1), "per_head": True, "normalize": True,
    "own_den": False, "scale": None, "masked": False, "dead": True, "spare": 1, "one_by_one": False, "seed": 3404,
    "blocks": Blocks.sequence(167, 130), "key_blocks": None, "cu_seqlens": [0, 167],
}  # fmt: skip


@ops_cases.generated(400)
@given(case=ops_cases.cases())
@example(case=SMALL_BESIDE_LARGE)
def check_generated_case(monkeypatch, case):
    monkeypatch.setattr(torch_operator, "HEAD_BY_HEAD_SIZE", 1 if case["one_by_one"] else 10**9)
    SEEN[case["form"]] += 1
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        tensors, options = build(case, dtype)
        exact = {name: x.double() for name, x in tensors.items()}
        direction = ops_cases.direction_for(tensors, case)
        expected, expected_grads = run(mhla_reference, exact, options, direction)
        got, grads = run(mhla, tensors, {**options, "impl": "torch"}, direction)
        assert got.dtype == dtype and got.shape == expected.shape
        assert distance(got, expected) < tolerance
        floors = ops_cases.gradient_floors(exact, options, direction)
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


def test_generated_cases(monkeypatch):
    check_generated_case(monkeypatch)
    assert sum(SEEN.values()) >= 300
    assert set(SEEN) == set(FORMS) and min(SEEN.values()) >= 20
