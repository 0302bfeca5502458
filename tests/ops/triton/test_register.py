"""The kernels against the definition in fp64, forward and every gradient, in triton's interpreter.

tests/conftest.py sets TRITON_INTERPRET=1 before anything imports triton; with TRITON_INTERPRET=0 and a GPU the same cases
run on the GPU. New memory is filled with NaN, so an element that no kernel writes shows.
"""

import pytest
import torch
from ops_cases import distance

from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import summaries
from mhla_hf.ops.triton.tuning import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-5, BF16: 1.5e-2, F16: 5e-3}
GRIDS = {
    "sequence": Blocks.sequence(37, 8),
    "one block": Blocks.sequence(20, 32),
    "array_split": Blocks.grid((26,), (4,)),
    "2-D": Blocks.grid((5, 7), (2, 3)),
    "3-D": Blocks.grid((3, 4, 4), (2, 2, 2)),
    "prefix": Blocks.grid((5, 6), (2, 3), prefix=3),
    "even": Blocks.grid((4, 6), (2, 2)),
    "even 3-D": Blocks.grid((2, 4, 4), (2, 2, 2)),
    "thirds": Blocks.sequence(24, 6),
    "runs": Blocks.grid((4, 6), (2, 1), prefix=12),
}
KEYS = Blocks.grid((4, 7), (2, 2))

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    pytest.mark.usefixtures("poisoned"),
]


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
    errors = {name: distance(x, y) for name, x, y in zip(names, got, want, strict=False)}
    assert all(x.isfinite().all() for x in got), errors
    if normalize and float(want[4].norm()) < 1e-9 * float(want[3].norm()):
        assert not got[4].any()
        errors.pop("dmixing")
    assert all(value <= TOLERANCE[dtype] for value in errors.values()), errors


def turns(number, name):
    """Options of the case of that number: eight are all combinations of mask, mixing per head and denominator."""
    normalize, one = number % 2 == 0, name == "one block"  # whose mixing is one number: noise in bf16
    options = {"normalize": normalize, "dtype": F32 if normalize or one else BF16}
    return {**options, "per_head": number // 2 % 2 == 1, "mask": number // 4 % 2 == 1}


CASES = [  # name, blocks, options
    *(("both ways", x, turns(n, x)) for n, x in enumerate(x for x in GRIDS if x not in ("even 3-D", "thirds"))),
    ("rectangular", "2-D", {"key_blocks": KEYS, "mask": True, "groups": 2, "dtype": BF16}),
    ("rectangular", "sequence", {"key_blocks": KEYS, "normalize": False, "per_head": True, "groups": 2}),
    ("own denominator", "2-D", {"widths": (12, 20, 7), "per_head": True, "mask": True, "dtype": BF16}),
    (
        "official",
        "thirds",
        {"normalize": "official", "widths": (12, 20, 7), "per_head": True, "mask": True, "groups": 2},
    ),
    ("official", "even 3-D", {"normalize": "official", "dtype": BF16, "groups": 2}),
    ("causal", (37, 8), {"per_head": True}),
    ("causal", (37, 8), {"normalize": False, "mask": True}),
    ("causal", (150, 70), {"mask": True}),
    ("causal", (150, 70), {"normalize": False, "per_head": True}),
    ("causal", (20, 32), {}),
    ("causal", (64, 32), {"normalize": False, "mask": True}),
    ("causal", (200, 130), {"per_head": True}),
    # with few blocks the mixing's gradient is small beside the terms it is the difference of
    ("causal", (37, 6), {"dtype": BF16}),
    ("causal", (160, 40), {"normalize": False, "mask": True, "dtype": F16}),
    ("causal", (300, 70), {"dtype": BF16}),
    # six blocks: with two, causal and normalized, one number is all of the mixing's gradient, mostly rounding
    ("causal", (11, 2), {"widths": (64, 64), "heads": 1}),
    ("widths", (11, 2), {"widths": (72, 72), "heads": 1, "dtype": BF16}),
    ("causal", (11, 2), {"widths": (17, 33), "heads": 1, "dtype": F16}),
    ("widths", (11, 2), {"widths": (1, 1), "heads": 1, "normalize": False}),
    ("causal", (6, 2), {"widths": (128, 256), "heads": 1, "dtype": BF16, "normalize": False}),
    ("causal", (21, 8), {"starts": (0, 7, 21), "widths": (12, 20, 5)}),
    ("causal", (100, 70), {"starts": (11, 100), "normalize": False, "per_head": True, "widths": (5, 33)}),
    ("causal", (45, 8), {"starts": (11, 45), "heads": 1, "dtype": BF16, "mask": True}),
    ("causal", (60, 8), {"cu_seqlens": (0, 20, 20, 37, 60), "widths": (12, 20, 7)}),
    ("causal", (230, 70), {"cu_seqlens": (0, 20, 20, 115, 230), "normalize": False, "per_head": True, "dtype": F16}),
    ("causal", (24, 6), {"heads": 6, "groups": 2, "widths": (5, 6)}),
    ("grouped heads", (24, 6), {"heads": 3, "groups": 1, "per_head": True, "batch": 2, "widths": (5, 6)}),
]


@pytest.mark.parametrize("name, blocks, options", CASES, ids=str)
def test_every_form(name, blocks, options):
    blocks = GRIDS[blocks] if isinstance(blocks, str) else Blocks.sequence(*blocks)
    options = {key: torch.tensor(x) if key in ("starts", "cu_seqlens") else x for key, x in options.items()}
    check(blocks, causal=name == "causal", batch=options.pop("batch", len(options.get("starts", "1"))), **options)


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
        assert distance(x, y) <= max(TOLERANCE[x.dtype], TOLERANCE[dtypes[2]] if normalize else 0), x.dtype


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
