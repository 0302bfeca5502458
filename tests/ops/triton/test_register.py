"""The kernels against the definition in fp64, forward and every gradient, in triton's interpreter.

tests/conftest.py sets TRITON_INTERPRET=1 before anything imports triton; with TRITON_INTERPRET=0 and a GPU the same cases
run on the GPU. New memory is filled with NaN, so an element that no kernel writes shows.
"""

import pytest
import torch

from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import summaries
from mhla_hf.ops.triton.tuning import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 5e-3}
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
GRIDS = {
    "sequence": Blocks.sequence(37, 8),
    "one block": Blocks.sequence(20, 32),
    "array_split": Blocks.grid((26,), (4,)),
    "2-D": Blocks.grid((5, 7), (2, 3)),
    "3-D": Blocks.grid((3, 4, 4), (2, 2, 2)),
    "prefix": Blocks.grid((5, 6), (2, 3), prefix=3),
    "even": Blocks.grid((4, 6), (2, 2)),
    "runs": Blocks.grid((4, 6), (2, 1), prefix=12),
}

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    pytest.mark.usefixtures("poisoned", "few_numbers"),
]


def error(got, want):
    """Relative, Frobenius."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def inputs_for(blocks, key_blocks, batch, heads, groups, widths, per_head, normalize, dtype):
    """Feature-mapped q and k, v, mixing (and q_den, k_den where widths has three), rounded to dtype."""
    tokens, keys = blocks.length, (key_blocks or blocks).length
    key_width, value_width, *den_width = widths
    q, k = torch.randn(batch, tokens, heads, key_width), torch.randn(batch, keys, groups, key_width)
    v = torch.randn(batch, keys, groups, value_width)
    if normalize and not den_width:
        q, k = q.abs(), k.abs()
    mixing = torch.rand(*(heads,) * per_head, blocks.num_blocks, (key_blocks or blocks).num_blocks)
    dens = [torch.rand(batch, n, h, den_width[0]) for n, h in ((tokens, heads), (keys, groups))] if den_width else []
    return [x.to(DEVICE, dtype) for x in (q, k, v)] + [mixing.to(DEVICE)] + [x.to(DEVICE, dtype) for x in dens]


def compute(function, inputs, grad, exact, **options):
    """Output and the gradients of all inputs."""
    inputs = [(x.double() if exact else x.clone()).requires_grad_() for x in inputs]
    dens = dict(zip(("q_den", "k_den"), inputs[4:], strict=False))
    o = function(*inputs[:4], **dens, **options)
    return [o, *torch.autograd.grad(o, inputs, grad.to(o.dtype))]


def check(
    blocks, *, key_blocks=None, batch=1, heads=2, groups=1, widths=(12, 20), per_head=False, normalize=True, dtype=F32,
    mask=False, **options,
):  # fmt: skip
    """Kernels against the definition in fp64 on the same rounded inputs: the output and every gradient, none NaN.

    With a denominator, the gradient of a mixing whose queries see one block only is 0, for its scale cancels: exactly so.
    """
    inputs = inputs_for(blocks, key_blocks, batch, heads, groups, widths, per_head, normalize, dtype)
    options = {**options, "blocks": blocks, "key_blocks": key_blocks, "normalize": normalize}
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    if mask:
        options["key_mask"] = torch.rand(batch, (key_blocks or blocks).length, device=DEVICE) > 0.3
    grad = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3], device=DEVICE).to(dtype)
    want = compute(mhla, inputs, grad, True, impl="reference", **options)
    got = compute(mhla, inputs, grad, False, impl="triton", **options)
    names = ("o", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")
    errors = {name: error(x, y) for name, x, y in zip(names, got, want, strict=False)}
    assert all(x.isfinite().all() for x in got), errors
    if normalize and float(want[4].norm()) < 1e-9 * float(want[3].norm()):
        assert not got[4].any()
        errors.pop("dmixing")
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("normalize, dtype", [(True, F32), (False, BF16)])
def test_bidirectional(grid, normalize, dtype):
    """Mixing per head and masks by turns, so that every pair of options meets."""
    number = list(GRIDS).index(grid)
    if (grid, normalize) == ("one block", False):
        dtype = (
            F32  # one number, the sum of a few hundred rounded terms of either sign, has no relative error to speak of
        )
    options = {"per_head": number % 2 == 1, "mask": number // 2 % 2 == 1}
    check(GRIDS[grid], normalize=normalize, dtype=dtype, **options)


@pytest.mark.parametrize(
    "grid, normalize, per_head, mask",
    [
        ("2-D", True, False, True),
        ("2-D", False, True, False),
        ("sequence", True, True, False),
        ("sequence", False, False, True),
    ],
)
def test_rectangular(grid, normalize, per_head, mask):
    options = {"normalize": normalize, "per_head": per_head, "mask": mask, "groups": 2}
    check(GRIDS[grid], key_blocks=Blocks.grid((4, 7), (2, 2)), dtype=BF16 if mask else F32, **options)


@pytest.mark.parametrize(
    "dtypes, normalize, causal",
    [((F32, F32, BF16), True, True), ((F16, F16, F32), False, True), ((BF16, F32, F32), True, False)],
)
def test_tensors_of_different_dtypes(dtypes, normalize, causal):
    """Products are those of fp32; the errors are of the results' dtypes."""
    blocks = GRIDS["sequence"]
    inputs = inputs_for(blocks, None, 1, 2, 1, (12, 20), False, normalize, F32)
    inputs = [*(x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=False)), inputs[3]]
    options = {"blocks": blocks, "causal": causal, "normalize": normalize}
    grad = torch.randn(1, blocks.length, 2, 20, device=DEVICE).to(dtypes[2])
    want = compute(mhla, inputs, grad, True, impl="reference", **options)
    got = compute(mhla, inputs, grad, False, impl="triton", **options)
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= max(TOLERANCE[x.dtype], TOLERANCE[dtypes[2]] if normalize else 0), (x.dtype, error(x, y))


@pytest.mark.parametrize("grid, per_head, dtype", [("2-D", False, F32), ("2-D", True, BF16), ("sequence", True, F32)])
def test_separate_denominator(grid, per_head, dtype):
    check(GRIDS[grid], widths=(12, 20, 7), per_head=per_head, mask=per_head, dtype=dtype)


@pytest.mark.parametrize(
    "grid, widths, per_head, dtype",
    [
        (Blocks.grid((4, 6), (2, 2)), (12, 20), False, F32),
        (Blocks.sequence(24, 6), (12, 20, 7), True, F32),
        (Blocks.grid((2, 4, 4), (2, 2, 2)), (12, 20), False, BF16),
    ],
)
def test_official_denominator(grid, widths, per_head, dtype):
    check(grid, normalize="official", widths=widths, per_head=per_head, mask=per_head, dtype=dtype, groups=2)


@pytest.mark.parametrize("length, size", [(37, 8), (150, 70), (20, 32), (64, 32), (200, 130)])
@pytest.mark.parametrize("normalize, per_head", [(True, False), (False, True)])
def test_causal(length, size, normalize, per_head):
    mask = size in (70, 32)
    check(Blocks.sequence(length, size), causal=True, normalize=normalize, per_head=per_head, mask=mask)


@pytest.mark.parametrize("length, size", [(37, 6), (160, 40), (300, 70)])
@pytest.mark.parametrize("normalize, dtype", [(True, BF16), (False, F16)])
def test_causal_in_half_precision(length, size, normalize, dtype):
    """With few blocks the mixing's gradient is small beside the terms it is the difference of."""
    check(Blocks.sequence(length, size), causal=True, normalize=normalize, mask=size == 40, dtype=dtype)


@pytest.mark.parametrize("size, dtype, widths", [(8, BF16, (12, 20)), (70, F16, (12, 20, 7))])
def test_padding_in_half_precision(size, dtype, widths):
    options = {"causal": True, "heads": 1, "dtype": dtype, "widths": widths}
    length = 45 if size == 8 else 150
    check(Blocks.sequence(length, size), batch=3, starts=torch.tensor([0, 11, length]), mask=size == 8, **options)
    check(Blocks.sequence(2 * length, size), cu_seqlens=torch.tensor([0, 20, 20, length + 7, 2 * length]), **options)


@pytest.mark.parametrize("length, size", [(45, 8), (150, 70)])
@pytest.mark.parametrize("normalize, per_head, widths", [(True, False, (12, 20, 5)), (False, True, (5, 33))])
def test_left_padding(length, size, normalize, per_head, widths):
    options = {"starts": torch.tensor([0, 11, length]), "normalize": normalize, "per_head": per_head, "widths": widths}
    check(Blocks.sequence(length, size), causal=True, batch=3, **options)


@pytest.mark.parametrize("length, size", [(90, 8), (230, 70)])
@pytest.mark.parametrize("normalize, per_head, dtype", [(True, False, torch.int32), (False, True, torch.int64)])
def test_packed_sequences(length, size, normalize, per_head, dtype):
    edges = torch.tensor([0, 20, 20, length // 2, length], dtype=dtype)
    check(Blocks.sequence(length, size), causal=True, cu_seqlens=edges, normalize=normalize, per_head=per_head)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "widths, dtype",
    [
        *[((64, 64), F32), ((72, 72), BF16), ((17, 33), F16), ((1, 1), F32)],
        *[((128, 128), F16), ((128, 256), BF16)],
    ],
)
def test_widths(widths, causal, dtype):
    """Six blocks: with two, causal and normalized, one number is all of the mixing's gradient, mostly rounding."""
    normalize = widths != (1, 1)  # one feature cancels: its gradient is 0 but for rounding
    check(Blocks.sequence(11, 2), causal=causal, widths=widths, dtype=dtype, heads=1, normalize=normalize)


@pytest.mark.parametrize("normalize, per_head, dtype", [(True, True, BF16), (False, False, F32)])
def test_long_blocks_in_parts(normalize, per_head, dtype, monkeypatch):
    """Few long blocks are summed up by several programs each."""
    monkeypatch.setattr(summaries, "PART_TOKENS", 64)
    assert summaries.part_span(150, 2) == 128
    options = {"normalize": normalize, "per_head": per_head, "dtype": dtype, "mask": per_head}
    check(Blocks.grid((2, 150), (2, 1)), **options)
    if not normalize:
        check(Blocks.sequence(230, 150), key_blocks=Blocks.sequence(200, 70), groups=2, **options)


def test_blocks_come_in_parts_where_a_gpu_would_be_idle():
    assert summaries.part_span(1024, 96) == 256  # 16 blocks of 16k tokens, six heads
    assert summaries.part_span(16384, 6) == 256  # the same as one block
    assert summaries.part_span(210, 150) == 256
    assert summaries.part_span(1024, 6144) == 1024


@pytest.mark.parametrize(
    "heads, groups, per_head, causal",
    [(4, 2, True, True), (6, 2, False, True), (6, 2, False, False), (3, 1, True, False)],
)
def test_grouped_heads(heads, groups, per_head, causal):
    options = {"heads": heads, "groups": groups, "per_head": per_head, "batch": 2 // groups, "widths": (5, 6)}
    check(Blocks.sequence(150, 70) if per_head and causal else Blocks.sequence(24, 6), causal=causal, **options)
