"""The kernels against the definition in fp64, forward and every gradient, in triton's interpreter; and what people do with
them: compile, pad, capture, hold huge tensors, ask for them in vain.

tests/conftest.py sets TRITON_INTERPRET=1 before anything imports triton; with TRITON_INTERPRET=0 and a GPU the same cases
run on the GPU. New memory is filled with NaN, so an element that no kernel writes shows.
"""

import math
import subprocess
import sys
import traceback

import pytest
import torch
from tools.ops_cases import DEVICE, KERNELS, distance, features

from mhla_hf.checkpoints.bundle import make_source
from mhla_hf.ops import checks
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import register, summaries
from mhla_hf.ops.triton.common import blocks_as_numbers
from mhla_hf.ops.triton.register import TRITON_BACKWARD, TRITON_FORWARD
from mhla_hf.ops.triton.tuning import INTERPRETED, TunedKernel

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {F32: 1e-5, BF16: 1.5e-2, F16: 5e-3}
GRIDS = {
    "sequence": Blocks.sequence(37, 8),
    "one block": Blocks.sequence(20, 32),
    "array_split": Blocks.grid((26,), (4,)),
    "2-D": Blocks.grid((5, 7), (2, 3)),
    "3-D": Blocks.grid((3, 4, 4), (2, 2, 2)),
    "prefix": Blocks.grid((5, 6), (2, 3), prefix=3),
    "images": Blocks.grid((5, 7), (2, 3), others=((4, 3), (2, 6))),
    "even": Blocks.grid((4, 6), (2, 2)),
    "even 3-D": Blocks.grid((2, 4, 4), (2, 2, 2)),
    "thirds": Blocks.sequence(24, 6),
    "runs": Blocks.grid((4, 6), (2, 1), prefix=12),
}
KEYS = Blocks.grid((4, 7), (2, 2))

pytestmark = KERNELS


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


OFFICIAL = {"normalize": "official", "groups": 2}
CASES = [  # name, blocks, options
    *(("both ways", x, turns(n, x)) for n, x in enumerate(x for x in GRIDS if x not in ("even 3-D", "thirds"))),
    ("rectangular", "2-D", {"key_blocks": KEYS, "mask": True, "groups": 2, "dtype": BF16}),
    ("rectangular", "sequence", {"key_blocks": KEYS, "normalize": False, "per_head": True, "groups": 2}),
    ("own denominator", "2-D", {"widths": (12, 20, 7), "per_head": True, "mask": True, "dtype": BF16}),
    ("official", "thirds", {**OFFICIAL, "widths": (12, 20, 7), "per_head": True, "mask": True}),
    ("official", "even 3-D", {**OFFICIAL, "dtype": BF16}),
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
    monkeypatch.setattr(summaries, "MIN_PART_TOKENS", 64)
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


@pytest.mark.parametrize("name, causal", [("key_mask", False), ("starts", True)])
def test_padding_in_any_memory_layout(name, causal):
    """A mask whose columns lie one after the other, starts of which each is the second of two numbers."""
    inputs = [x.requires_grad_() for x in (*features(2, 12), torch.rand(4, 4, device=DEVICE))]
    values = torch.tensor([2, 5], device=DEVICE) if causal else torch.rand(2, 12, device=DEVICE) > 0.4
    padding = torch.stack((values, values + 7), -1)[..., 0] if causal else values.T.contiguous().T
    assert not padding.is_contiguous()
    blocks = Blocks.sequence(12, 3) if causal else Blocks.grid((4, 3), (2, 2))
    results = []
    for given in (padding, padding.contiguous()):
        o = mhla(*inputs, blocks=blocks, causal=causal, impl="triton", **{name: given})
        results.append((o, *torch.autograd.grad(o.float().square().sum(), inputs)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.usefixtures("overflow_watched")
@pytest.mark.parametrize("form, apart", [("sequence", "rows"), ("causal", "tokens"), ("causal", "heads")])
def test_offsets_beyond_two_to_the_31(form, apart, monkeypatch):
    """The last row, token or head of each tensor, outputs and gradients among them, begins past element 2^31 of memory that
    nobody touches in between; so does the last row of the mixing."""
    inputs, made = [x.to(torch.bfloat16) for x in features(2, 12, groups=2)], []

    def unfilled(dtype):
        with monkeypatch.context() as filling:
            filling.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            return torch.empty(2**31 + 2**16, dtype=dtype, device=DEVICE)

    def spread(shape):
        """A tensor of that shape, full of NaN."""
        strides, axis = [math.prod(shape[i + 1 :]) for i in range(4)], ("rows", "tokens", "heads").index(apart)
        strides[axis] = 2**31 // (shape[axis] - 1) + 64
        made.append(unfilled(torch.bfloat16).as_strided(shape, strides))
        return made[-1].fill_(math.nan)

    def far_rows(x):
        """The mixing, its rows so far apart that its diagonal is not within 32 bits."""
        return unfilled(torch.float32).as_strided((3, 3), (2**30 + 16, 1)).copy_(x)

    def room(call, x, *shape, dtype=None):
        shape = shape or x.shape
        return spread(shape) if len(shape) == 4 else torch.empty(shape, dtype=dtype or x.dtype, device=DEVICE)

    mixing, results = torch.rand(3, 3, device=DEVICE), []
    options = {"blocks": Blocks.sequence(12, 5), "causal": form == "causal", "impl": "triton"}
    for tensors, weights in ((inputs, mixing), ([spread(x.shape).copy_(x) for x in inputs], far_rows(mixing))):
        tensors = [x.detach().requires_grad_() for x in tensors]
        o = mhla(*tensors, weights, **options)
        results.append([o, *torch.autograd.grad(o, tensors, torch.ones_like(o))])
        monkeypatch.setattr(register.KernelCall, "allocate", room)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert len(made) == 7 and all(max(x.stride()) > 2**26 for x in results[1])


class NothingReadBack(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where the host asks for numbers of a tensor, which a CUDA graph's capture does not allow."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal):
            raise RuntimeError(f"{function} reads a tensor back.")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padding", ["none", "mask", "starts", "packed", "official"])
def test_captured_calls_read_nothing_back(padding, monkeypatch):
    """Forward and backward: all of it can be recorded in a CUDA graph; on a GPU it is, and replayed with other numbers."""
    q, k, v = (x.requires_grad_() for x in features(1 if padding == "packed" else 2, 20))
    mixing = torch.rand(8, 8, device=DEVICE)
    options = {
        "none": {},
        "mask": {"key_mask": torch.rand(2, 20, device=DEVICE) > 0.3},
        "starts": {"starts": torch.tensor([0, 7], device=DEVICE)},
        "packed": {"cu_seqlens": torch.tensor([0, 9, 20], device=DEVICE)},
        "official": {"normalize": "official", "causal": False, "blocks": Blocks.grid((4, 5), (2, 1))},
    }[padding]
    options = {"causal": True, "blocks": Blocks.sequence(20, 8), "impl": "triton", **options}
    mixing = mixing[:2, :2] if padding == "official" else mixing

    def step():
        o = mhla(q, k, v, mixing, **options)
        return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]

    want = [x.clone() for x in step()]
    if DEVICE == "cuda":
        graph, found = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            found = step()
        graph.replay()
    else:
        monkeypatch.setattr(checks, "is_capturing", lambda device: True)
        with NothingReadBack():
            found = step()
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("causal, padding", [(True, "starts"), (False, "key_mask")])
def test_compiles_to_one_graph_for_all_lengths(causal, padding):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def loss(q, k, v, mixing, **padding):
        o = mhla(q, k, v, mixing, blocks=Blocks.sequence(q.shape[1], 8), causal=causal, impl="triton", **padding)
        return o.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
    for tokens in (24, 29, 40):
        inputs = [x.requires_grad_() for x in features(1, tokens)]
        mixing = torch.rand(-(-tokens // 8), -(-tokens // 8), device=DEVICE, requires_grad=True)
        given = {"key_mask": torch.rand(1, tokens, device=DEVICE) > 0.3, "starts": torch.tensor([5], device=DEVICE)}
        given = {name: x for name, x in given.items() if name == padding}
        got = torch.autograd.grad(compiled(*inputs, mixing, **given), (*inputs, mixing))
        want = torch.autograd.grad(loss(*inputs, mixing, **given), (*inputs, mixing))
        assert all(distance(x, y) <= 1e-6 for x, y in zip(got, want, strict=True))
    assert len(graphs) == 1


@pytest.mark.parametrize("causal, normalize, dtype", [(True, True, torch.float32), (False, False, torch.bfloat16)])
def test_opcheck(causal, normalize, dtype):
    q, k, v = (x.requires_grad_() for x in features(1, 12))
    mixing = torch.rand(3, 3, device=DEVICE, requires_grad=True)
    cut = blocks_as_numbers(Blocks.sequence(12, 4))
    arguments = (q, k, v, mixing, None, None, None, cut, cut, causal, normalize, 0.5, dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(TRITON_FORWARD, arguments, test_utils=checks)
    with torch.no_grad():
        o, inv = TRITON_FORWARD(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(TRITON_BACKWARD, (torch.randn_like(o), o, inv, *plain), test_utils=checks)


def test_a_second_copy_uses_the_first_ones_operator():
    again = register.register_operator("forward", "()", None, None)
    assert again is TRITON_FORWARD or again._qualified_op_name == TRITON_FORWARD._qualified_op_name


def test_refusals_name_the_reason(monkeypatch):
    blocks, wide = Blocks.sequence(4, 2), torch.rand(1, 4, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="expected another one: heads are 300 wide, and the kernels take at most 256"):
        mhla(wide, wide, wide, torch.rand(2, 2, device=DEVICE), blocks=blocks, impl="triton")
    narrow = torch.rand(1, 4, 1, 3)
    monkeypatch.setattr(register, "INTERPRETED", False)
    with pytest.raises(ValueError, match="another one: q is on cpu, where triton runs only with TRITON_INTERPRET=1"):
        mhla(narrow, narrow, narrow, torch.rand(2, 2), blocks=blocks, impl="triton")
    monkeypatch.setattr(register, "triton", None)
    with pytest.raises(ValueError, match="another one: triton is not installed"):
        mhla(narrow, narrow, narrow, torch.rand(2, 2), blocks=blocks, impl="triton")


IN_A_BUNDLE = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.modules["mhla_hf"] = None
sys.path.insert(0, {folder!r})
import torch
import {module} as bundle
assert bundle.triton is not None
torch.manual_seed(0)
q, k, v = (torch.rand(1, 24, 2, 6).requires_grad_() for _ in range(3))
mixing = torch.rand(4, 4).requires_grad_()
for causal, blocks in ((False, bundle.Blocks.grid((4, 6), (2, 2))), (True, bundle.Blocks.sequence(24, 6))):
    grads = []
    for impl in ("triton", "torch"):
        o = bundle.mhla(q, k, v, mixing, impl=impl, blocks=blocks, causal=causal)
        grads.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v, mixing))])
    print(max(float((x - y).norm() / y.norm()) for x, y in zip(*grads)))
"""


@pytest.mark.skipif(not INTERPRETED, reason="sets the interpreter itself")
def test_a_bundle_has_its_own_kernels_where_triton_is(tmp_path):
    """Without the package; where triton is absent too the tests of the hub load every bundle."""
    name, text = make_source("models.language.language_model")
    (tmp_path / name).write_text(text)
    code = IN_A_BUNDLE.format(folder=str(tmp_path), module=name.removesuffix(".py"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [float(x) < 1e-5 for x in done.stdout.split()] == [True, True]


def test_few_calls_lie_between_the_operator_and_its_kernels(monkeypatch):
    """At most five from `mhla` to each launch, so that a stack trace can be read."""
    depths, launcher = {}, TunedKernel.__getitem__

    def recorded(self, grid):
        frames = [frame for frame in traceback.extract_stack() if "/mhla_hf/ops/" in frame.filename]
        depths[self.jitted.fn.__name__] = len(frames)
        return launcher(self, grid)

    monkeypatch.setattr(TunedKernel, "__getitem__", recorded)
    blocks = Blocks.sequence(100, 16)
    mhla(*features(1, 100), torch.rand(7, 7, device=DEVICE), blocks=blocks, causal=True, impl="triton")
    assert depths == {"summaries_kernel": 4, "mix_kernel": 5, "forward_kernel": 4}
