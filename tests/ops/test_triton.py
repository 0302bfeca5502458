"""The kernels against the definition in fp64, forward and every gradient, in triton's interpreter.

tests/conftest.py sets TRITON_INTERPRET=1 before anything imports triton; with TRITON_INTERPRET=0 and a GPU the same cases
run on the GPU. New memory is filled with NaN, so an element that no kernel writes shows.
"""

import itertools

import pytest
import torch

from mhla_hf.bench.kernels import kernel_of, recorded_launches
from mhla_hf.ops import triton_common, triton_configs, triton_impl
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton_common import INTERPRETED

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


@pytest.fixture(autouse=True)
def linear_form(request, monkeypatch):
    """Small cases would all take the quadratic form; those that do not ask for it take the linear one."""
    if "quadratic" not in request.node.name:
        monkeypatch.setattr(triton_impl, "use_quadratic", lambda *shape: False)


def error(got, want):
    """Relative, Frobenius."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def inputs_for(blocks, key_blocks, batch, heads, groups, widths, per_head, normalize, dtype, raw):
    """Feature-mapped (or raw) q and k, v, mixing (and q_den, k_den where widths has three), rounded to dtype."""
    tokens, keys = blocks.length, (key_blocks or blocks).length
    key_width, value_width, *den_width = widths
    q, k = torch.randn(batch, tokens, heads, key_width), torch.randn(batch, keys, groups, key_width)
    v = torch.randn(batch, keys, groups, value_width)
    if normalize and not den_width and not raw:
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
    raw = options.get("feature_map") is not None
    inputs = inputs_for(blocks, key_blocks, batch, heads, groups, widths, per_head, normalize, dtype, raw)
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
@pytest.mark.parametrize(
    "normalize, per_head, mask, dtype",
    [(n, p, m, F32) for n, p, m in itertools.product((True, False), (False, True), (False, True))]
    + [(n, n, n, BF16) for n in (True, False)],
)
def test_bidirectional(grid, normalize, per_head, mask, dtype):
    if (grid, normalize, dtype) == ("one block", False, BF16):
        grid = "2-D"  # one number, the sum of a few hundred rounded terms of either sign, has no relative error to speak of
    check(GRIDS[grid], normalize=normalize, per_head=per_head, mask=mask, dtype=dtype)


@pytest.mark.parametrize("per_head, mask", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("grid", ["2-D", "sequence"])
@pytest.mark.parametrize("normalize", [True, False])
def test_rectangular(grid, normalize, per_head, mask):
    options = {"normalize": normalize, "per_head": per_head, "mask": mask, "groups": 2}
    check(GRIDS[grid], key_blocks=Blocks.grid((4, 7), (2, 2)), dtype=BF16 if mask and not per_head else F32, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtypes", [(F32, F32, BF16), (F16, F16, F32), (BF16, F32, F32)])
def test_tensors_of_different_dtypes(dtypes, normalize, causal):
    """Products are those of fp32; the errors are of the results' dtypes."""
    blocks = GRIDS["sequence"]
    inputs = inputs_for(blocks, None, 1, 2, 1, (12, 20), False, normalize, F32, False)
    inputs = [*(x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=False)), inputs[3]]
    options = {"blocks": blocks, "causal": causal, "normalize": normalize}
    grad = torch.randn(1, blocks.length, 2, 20, device=DEVICE).to(dtypes[2])
    want = compute(mhla, inputs, grad, True, impl="reference", **options)
    got = compute(mhla, inputs, grad, False, impl="triton", **options)
    for x, y in zip(got, want, strict=True):
        assert error(x, y) <= max(TOLERANCE[x.dtype], TOLERANCE[dtypes[2]] if normalize else 0), (x.dtype, error(x, y))


@pytest.mark.parametrize("grid", ["2-D", "sequence"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_separate_denominator(grid, per_head, dtype):
    check(GRIDS[grid], widths=(12, 20, 7), per_head=per_head, mask=per_head, dtype=dtype)


@pytest.mark.parametrize(
    "grid", [Blocks.grid((4, 6), (2, 2)), Blocks.sequence(24, 6), Blocks.grid((2, 4, 4), (2, 2, 2))]
)
@pytest.mark.parametrize("widths", [(12, 20), (12, 20, 7)])
@pytest.mark.parametrize("per_head, mask, dtype", [(False, False, F32), (True, True, F32), (False, False, BF16)])
def test_official_denominator(grid, widths, per_head, mask, dtype):
    check(grid, normalize="official", widths=widths, per_head=per_head, mask=mask, dtype=dtype, groups=2)


@pytest.mark.parametrize("length, size", [(37, 8), (70, 40), (20, 32), (64, 32)])
@pytest.mark.parametrize(
    "normalize, per_head, mask, dtype",
    [(n, p, m, F32) for n, p, m in itertools.product((True, False), (False, True), (False, True))],
)
def test_causal(length, size, normalize, per_head, mask, dtype):
    check(Blocks.sequence(length, size), causal=True, normalize=normalize, per_head=per_head, mask=mask, dtype=dtype)


@pytest.mark.parametrize("length, size", [(37, 6), (160, 40)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_causal_in_half_precision(length, size, normalize, mask, dtype):
    """Here, unlike in fp32, the causal kernels read the mask themselves."""
    check(Blocks.sequence(length, size), causal=True, normalize=normalize, mask=mask, dtype=dtype)


@pytest.mark.parametrize("widths", [(12, 20), (12, 20, 7)])
@pytest.mark.parametrize("size, dtype", [(8, BF16), (40, F16)])
def test_padding_in_half_precision(size, dtype, widths):
    options = {"causal": True, "heads": 1, "dtype": dtype, "widths": widths}
    check(Blocks.sequence(45, size), batch=3, starts=torch.tensor([0, 11, 45]), mask=size == 8, **options)
    check(Blocks.sequence(90, size), cu_seqlens=torch.tensor([0, 20, 20, 57, 90]), **options)


@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("widths", [(12, 20), (12, 20, 5)])
def test_left_padding(size, normalize, per_head, widths):
    if len(widths) == 3 and not normalize:
        widths = (5, 33)
    starts = torch.tensor([0, 11, 45])
    check(
        Blocks.sequence(45, size), causal=True, batch=3, starts=starts, normalize=normalize, per_head=per_head, widths=widths
    )  # fmt: skip


@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_head, dtype", [(False, torch.int32), (True, torch.int64)])
def test_packed_sequences(size, normalize, per_head, dtype):
    edges = torch.tensor([0, 20, 20, 57, 90], dtype=dtype)
    check(Blocks.sequence(90, size), causal=True, cu_seqlens=edges, normalize=normalize, per_head=per_head)


@pytest.mark.parametrize("feature_map, mask", [("relu", False), ("relu", True), ("plain_relu", True)])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("normalize", [True, False, "official"])
def test_feature_map(normalize, dtype, feature_map, mask):
    options = {"feature_map": feature_map, "normalize": normalize, "dtype": dtype, "mask": mask}
    check(GRIDS["prefix" if normalize != "official" else "even"], groups=2, **options)
    if dtype is F32 and feature_map == "plain_relu":
        check(GRIDS["even"], widths=(72, 70), **options)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("normalize", [True, False, "official"])
def test_feature_map_in_the_quadratic_form(normalize, dtype, mask):
    check(GRIDS["even"], feature_map="relu", normalize=normalize, dtype=dtype, mask=mask)


@pytest.mark.parametrize(
    "grid, key_grid, widths, dtype, inside",
    [
        ("3-D", None, (128, 128), BF16, True),
        ("2-D", None, (12, 20), F16, True),
        ("sequence", None, (64, 72), BF16, True),
        ("runs", None, (72, 33), F16, True),
        ("2-D", "even", (20, 12), BF16, True),
        ("even", None, (12, 136), BF16, False),
        ("prefix", None, (136, 12), F16, False),
        ("2-D", None, (12, 20), F32, False),
        ("quadratic", None, (12, 20), BF16, False),
    ],
)
@pytest.mark.parametrize("feature_map", [None, "relu"])
def test_output_norm(grid, key_grid, widths, dtype, inside, feature_map, monkeypatch):
    """Without gradients, in the kernels where they hold whole rows; with gradients after them. The eps is such that the norm
    does not undo the scale."""
    monkeypatch.setattr(triton_impl, "use_quadratic", lambda *shape: grid == "quadratic")
    blocks, key_blocks = GRIDS["even" if grid == "quadratic" else grid], key_grid and GRIDS[key_grid]
    norm = torch.rand(widths[1], device=DEVICE) + 0.5, 1.0
    options = {"normalize": False, "output_norm": norm, "feature_map": feature_map, "key_blocks": key_blocks}
    check(blocks, widths=widths, dtype=dtype, mask=True, per_head=feature_map is None, **options)
    inputs = inputs_for(blocks, key_blocks, 2, 2, 1, widths, feature_map is None, False, dtype, True)
    options |= {"blocks": blocks, "scale": 0.3, "key_mask": torch.rand(inputs[1].shape[:2], device=DEVICE) > 0.3}
    want = mhla(*(x.double() for x in inputs), impl="reference", **options)
    with recorded_launches() as launched:
        got = mhla(*inputs, impl="triton", **options)
    assert got.dtype is dtype and ("normed" in map(kernel_of, launched)) is inside
    assert error(got, want) <= (TOLERANCE[dtype] if dtype is F32 else 2.0 ** (-8 if dtype is BF16 else -10))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "widths",
    [
        (32, 32),
        (64, 64),
        (128, 64),
        (72, 72),
        (96, 96),
        (128, 128),
        (256, 128),
        (256, 256),
        (17, 33),
        (128, 256),
        (1, 1),
    ],
)
def test_widths(widths, causal, dtype):
    """Six blocks: with two, causal and normalised, one number is all of the mixing's gradient, mostly rounding."""
    normalize = widths != (1, 1)  # one feature cancels: its gradient is 0 but for rounding
    check(Blocks.sequence(11, 2), causal=causal, widths=widths, dtype=dtype, heads=1, normalize=normalize)


@pytest.mark.parametrize("widths, dtype", [((136, 20), BF16), ((20, 136), F16)])
@pytest.mark.parametrize("length, size, normalize", [(21, 4, True), (70, 40, False)])
def test_masks_of_wide_causal_heads(widths, dtype, length, size, normalize):
    """Of heads wider than 128 masked keys and values are zeros before the kernels read them."""
    blocks = Blocks.sequence(length, size)
    check(blocks, causal=True, heads=1, widths=widths, dtype=dtype, mask=True, normalize=normalize)


@pytest.mark.parametrize("widths", [(72, 20), (12, 130)])
@pytest.mark.parametrize("normalize", [True, False])
def test_wide_fp32_heads_in_parts(widths, normalize):
    """Lanes beyond the 64th go in launches of their own, here with several tiles of the outer width and a running state."""
    check(Blocks.sequence(70, 40), causal=True, widths=widths, normalize=normalize)
    check(GRIDS["2-D"], widths=(*widths, 72)[: 2 + normalize], normalize=normalize, groups=2, mask=True)


@pytest.mark.parametrize(
    "normalize, mapped, per_head, dtype",
    [(True, True, False, F32), (False, False, True, F32), ("official", False, False, F32), (True, False, True, BF16)],
)
def test_long_blocks_in_parts(normalize, mapped, per_head, dtype, monkeypatch):
    """Few long blocks are summed up by several programs each, and mixing adds those parts."""
    monkeypatch.setattr(triton_common, "PART_TOKENS", 64)
    assert triton_common.in_parts(150, 2) == (2, 128)
    options = {"normalize": normalize, "per_head": per_head, "dtype": dtype, "mask": not mapped}
    options["feature_map"] = "relu" if mapped else None
    check(Blocks.grid((2, 150), (2, 1)), **options)
    if not normalize:
        check(Blocks.sequence(230, 150), key_blocks=Blocks.sequence(200, 70), groups=2, **options)


def test_blocks_come_in_parts_where_a_gpu_would_be_idle():
    assert triton_common.in_parts(1024, 96) == (4, 256)  # 16 blocks of 16k tokens, six heads
    assert triton_common.in_parts(16384, 6) == (64, 256)  # the same as one block
    assert triton_common.in_parts(210, 150) == (1, 256)
    assert triton_common.in_parts(1024, 6144) == (1, 1024)


@pytest.mark.parametrize("widths, dtype", [((72, 20), F32), ((136, 20), BF16), ((20, 136), BF16)])
@pytest.mark.parametrize("block", [40, 70])
def test_causal_heads_in_smaller_parts(widths, dtype, block, monkeypatch):
    """On chips of 12.x: 32 lanes of fp32 at a time; 128 of bf16 in long blocks, and for keys.

    Four blocks: see `test_widths`.
    """
    monkeypatch.setattr(triton_configs, "chip_of", lambda device: (12, 0))
    check(Blocks.sequence(3 * block + 20, block), causal=True, widths=widths, dtype=dtype, groups=2)


@pytest.fixture
def shipped_tiles(monkeypatch):
    """The interpreter with the tiles that a GPU gets, instead of smaller ones."""
    monkeypatch.setattr(triton_configs, "INTERPRETED", False)
    triton_configs.config_for.cache_clear()
    yield
    triton_configs.config_for.cache_clear()


@pytest.mark.parametrize(
    "chip", [(9, 0), *(pytest.param(chip, marks=pytest.mark.slow) for chip in ((8, 0), (8, 6), (10, 0), (12, 0)))]
)
@pytest.mark.parametrize(
    "form, options",
    [
        ("linear", {"blocks": Blocks.grid((6, 24), (1, 2))}),
        ("quadratic", {"blocks": Blocks.grid((10, 7), (2, 3))}),
        ("causal", {"blocks": Blocks.sequence(132, 64), "causal": True}),
        ("long", {"blocks": Blocks.sequence(160, 70), "causal": True}),
    ],
)
@pytest.mark.parametrize("dtype, mask", [(F32, False), (BF16, False), (BF16, True)])
def test_shipped_tiles(form, options, dtype, mask, chip, shipped_tiles, monkeypatch):
    """With a key mask some are others."""
    monkeypatch.setattr(triton_configs, "chip_of", lambda device: chip)
    monkeypatch.setattr(triton_impl, "use_quadratic", lambda *shape: form == "quadratic")
    check(widths=(72, 72), heads=1, dtype=dtype, mask=mask, **options)


@pytest.mark.parametrize("heads, groups, per_head", [(4, 4, False), (4, 2, True), (6, 2, False), (3, 1, True)])
@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads(heads, groups, per_head, causal):
    batch = 2 if groups == 1 else 1
    check(
        Blocks.sequence(24, 6), causal=causal, heads=heads, groups=groups, per_head=per_head, batch=batch, widths=(5, 6)
    )


@pytest.mark.parametrize("grid", ["2-D", "array_split", "sequence"])
@pytest.mark.parametrize("normalize, per_head, mask, dtype", [(True, False, True, F32), (False, True, False, F32)])
def test_quadratic(grid, normalize, per_head, mask, dtype):
    check(GRIDS[grid], normalize=normalize, per_head=per_head, mask=mask, dtype=dtype, batch=2)


@pytest.mark.parametrize(
    "widths, normalize", [((12, 20, 7), True), ((12, 20), True), ((12, 20), "official"), ((5, 6), False)]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_quadratic_denominators(widths, normalize, dtype):
    check(Blocks.grid((4, 10), (2, 2)), widths=widths, normalize=normalize, heads=4, groups=2, dtype=dtype)


def test_quadratic_rectangular():
    check(GRIDS["2-D"], key_blocks=Blocks.grid((41,), (4,)), per_head=True, mask=True)


@pytest.mark.parametrize(
    "grids, expected",
    [(("even", "2-D"), 1), (("sequence", "runs"), 1), (("even", "runs"), 0), (("sequence", "even"), 0)],
)
def test_quadratic_where_both_are_cut_in_the_same_way(grids, expected):
    blocks, key_blocks = (GRIDS[grid] for grid in grids)
    inputs = inputs_for(blocks, key_blocks, 1, 2, 1, (8, 8), False, True, F32, False)
    with recorded_launches() as launched:
        mhla(*inputs, blocks=blocks, key_blocks=key_blocks, impl="triton")
    assert [*map(kernel_of, launched)].count("quadratic") == expected


def test_which_shapes_are_quadratic():
    assert triton_impl.use_quadratic(256, 16, (64, 64), False)  # DiT at 256 pixels
    assert not triton_impl.use_quadratic(1024, 16, (64, 64), False)  # at 512 pixels
    assert triton_impl.use_quadratic(662, 16, (64, 64), False)  # docs/kernels.md
    assert not triton_impl.use_quadratic(663, 16, (64, 64), False)
    assert not triton_impl.use_quadratic(256, 16, (64, 64), True)
    assert not triton_impl.use_quadratic(256, 16, (64, 256), False)
