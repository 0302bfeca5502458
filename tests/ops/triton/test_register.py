"""The kernels against the definition in fp64, forward and every gradient, in triton's interpreter; with TRITON_INTERPRET=0
on a GPU. New memory is filled with NaN, so an element that no kernel writes shows."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tools.ops_cases import distance, run
from torch._dynamo.testing import CompileCounter
from triton.runtime import interpreter

from mhla_hf.checkpoints.bundle import make_source
from mhla_hf.ops import checks
from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.triton import register, summaries
from mhla_hf.ops.triton.common import blocks_as_numbers
from mhla_hf.ops.triton.register import TRITON_BACKWARD, TRITON_FORWARD
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
    "images": Blocks.grid((5, 7), (2, 3), others=((4, 3), (2, 6))),
    "even": Blocks.grid((4, 6), (2, 2)),
    "even 3-D": Blocks.grid((2, 4, 4), (2, 2, 2)),
    "runs": Blocks.grid((4, 6), (2, 1), prefix=12),
}
KEYS = Blocks.grid((4, 7), (2, 2))

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"
)


@pytest.fixture(autouse=True)
def poisoned():
    """New memory is filled with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def features(batch, tokens, groups=1):
    return [torch.rand(batch, tokens, *shape, device=DEVICE) for shape in ((2, 8), (groups, 8), (groups, 12))]


def check(
    blocks, *, key_blocks=None, batch=1, heads=2, groups=1, widths=(12, 20), per_head=False, normalize=True, dtype=F32,
    dtypes=None, mask=False, **options,
):  # fmt: skip
    """Kernels against the definition in fp64 on the same rounded inputs: the output and every gradient, none NaN.

    With a denominator, the gradient of a mixing whose queries see one block only is 0, for its scale cancels: exactly so.
    """
    keys, (width, value_width, *den_width) = key_blocks or blocks, widths
    shapes = {"q": (blocks, heads, width), "k": (keys, groups, width), "v": (keys, groups, value_width)}
    x = {name: torch.randn(batch, cut.length, h, w) for name, (cut, h, w) in shapes.items()}
    if normalize and not den_width:
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    mixing = torch.rand(*(heads,) * per_head, blocks.num_blocks, keys.num_blocks, device=DEVICE)
    if den_width:
        sizes = ((blocks, heads), (keys, groups))
        x["q_den"], x["k_den"] = (torch.rand(batch, n.length, h, *den_width) for n, h in sizes)
    dtypes = dtypes or (dtype,) * len(x)
    x = {name: t.to(DEVICE, kind) for (name, t), kind in zip(x.items(), dtypes, strict=True)}
    options = {**options, "blocks": blocks, "key_blocks": key_blocks, "normalize": normalize}
    options = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    if mask:
        options["key_mask"] = (torch.rand(keys.length, batch, device=DEVICE) > 0.3).T  # rows are not contiguous
    grad = torch.randn(batch, blocks.length, heads, value_width, device=DEVICE).to(x["v"].dtype)
    x["mixing"] = mixing
    sides = {"reference": {name: t.double() for name, t in x.items()}, "triton": x}
    want, got = (run(mhla, inputs, {**options, "impl": impl}, grad) for impl, inputs in sides.items())
    want, got = ({"o": o, **grads} for o, grads in (want, got))
    errors = {name: distance(got[name], want[name]) for name in got}
    assert all(a.isfinite().all() for a in got.values()), errors
    if normalize and float(want["mixing"].norm()) < 1e-9 * float(want["v"].norm()):
        assert not got["mixing"].any()
        errors.pop("mixing")
    least = TOLERANCE[dtypes[2]] if normalize or len(set(dtypes)) == 1 else 0
    assert all(error <= max(TOLERANCE[got[name].dtype], least) for name, error in errors.items()), errors


def turns(number, name):
    """Options of a case: eight numbers are all combinations of mask, mixing per head and denominator."""
    normalize, one = number % 2 == 0, name == "one block"  # whose mixing is one number: noise in bf16
    options = {"normalize": normalize, "dtype": F32 if normalize or one else BF16}
    return {**options, "per_head": number // 2 % 2 == 1, "mask": number // 4 % 2 == 1}


CASES = [  # name, blocks, options
    *(("both ways", x, turns(n, x)) for n, x in enumerate(x for x in GRIDS if x != "even 3-D")),
    ("rectangular", "2-D", {"key_blocks": KEYS, "mask": True, "groups": 2, "dtype": BF16}),
    ("own denominator", "2-D", {"widths": (12, 20, 7), "per_head": True, "mask": True, "dtype": BF16}),
    ("official", "even 3-D", {"groups": 2, "widths": (12, 20, 7), "per_head": True, "mask": True}),
    ("causal", (37, 8), {"per_head": True}),
    ("causal", (200, 130), {"per_head": True}),
    ("dtypes", (37, 8), {"dtypes": (F32, F32, BF16), "causal": True}),
    ("dtypes", (37, 8), {"dtypes": (F16, F16, F32), "normalize": False, "causal": True}),
    ("causal", (160, 40), {"normalize": False, "mask": True, "dtype": F16}),
    # six blocks: with two, causal and normalized, one number is all of the mixing's gradient, mostly rounding
    ("causal", (11, 2), {"widths": (17, 33), "heads": 1, "dtype": F16}),
    ("widths", (11, 2), {"widths": (1, 1), "heads": 1, "normalize": False}),
    ("causal", (6, 2), {"widths": (128, 256), "heads": 1, "dtype": BF16, "normalize": False}),
    ("causal", (21, 8), {"starts": (0, 7, 21), "widths": (12, 20, 5)}),
    ("causal", (45, 8), {"starts": (11, 45), "heads": 1, "dtype": BF16, "mask": True}),
    ("causal", (60, 8), {"cu_seqlens": (0, 20, 20, 37, 60), "widths": (12, 20, 7)}),
    ("causal", (230, 70), {"cu_seqlens": (0, 20, 20, 115, 230), "normalize": False, "per_head": True, "dtype": F16}),
    ("grouped heads", (24, 6), {"heads": 3, "groups": 1, "per_head": True, "batch": 2, "widths": (5, 6)}),
]


@pytest.mark.parametrize("name, blocks, options", CASES, ids=str)
def test_every_form(name, blocks, options):
    blocks = GRIDS[blocks] if isinstance(blocks, str) else Blocks.sequence(*blocks)
    options = {key: torch.tensor(x) if key in ("starts", "cu_seqlens") else x for key, x in options.items()}
    if "starts" in options:
        options["starts"] = options["starts"].repeat_interleave(2)[::2]  # not contiguous
    options = {"normalize": "official", **options} if name == "official" else options
    causal = options.pop("causal", name == "causal")
    check(blocks, causal=causal, batch=options.pop("batch", len(options.get("starts", [0]))), **options)


@pytest.mark.parametrize("normalize, per_head, dtype", [(True, True, BF16), (False, False, F32)])
def test_long_blocks_in_parts(normalize, per_head, dtype, monkeypatch):
    """Few long blocks are summed up by several programs each."""
    monkeypatch.setattr(summaries, "MIN_PART_TOKENS", 64)
    assert summaries.part_span(150, 2) == 128
    options = {"normalize": normalize, "per_head": per_head, "dtype": dtype, "mask": per_head}
    check(Blocks.grid((2, 150), (2, 1)), **options)
    if not normalize:
        check(Blocks.sequence(230, 150), key_blocks=Blocks.sequence(200, 70), groups=2, **options)


@pytest.mark.parametrize("causal, axis", [(False, 0), (True, 1), (True, 2)], ids=["rows", "tokens", "heads"])
def test_offsets_beyond_two_to_the_31(causal, axis, monkeypatch):
    """The last row, token or head of every tensor, gradients among them, begins past element 2^31 of untouched memory."""
    builder = interpreter.interpreter_builder  # which looks for overflows of integers here
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=True))

    def spread(shape, dtype=torch.bfloat16):
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides[axis if len(shape) == 4 else 0] = 2**31 // (shape[axis if len(shape) == 4 else 0] - 1) + 64
        with monkeypatch.context() as filling:
            filling.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
            memory = torch.empty(2**31 + 2**16, dtype=dtype, device=DEVICE)
        return memory.as_strided(shape, strides).fill_(math.nan)

    def room(call, x, *shape, dtype=None):
        shape = shape or x.shape
        return spread(shape) if len(shape) == 4 else torch.empty(shape, dtype=dtype or x.dtype, device=DEVICE)

    inputs, mixing = [x.to(torch.bfloat16) for x in features(2, 12, groups=2)], torch.rand(3, 3, device=DEVICE)
    far, far_mixing = [spread(x.shape).copy_(x) for x in inputs], spread((3, 3), torch.float32).copy_(mixing)
    options, results = {"blocks": Blocks.sequence(12, 5), "causal": causal, "impl": "triton"}, []
    for tensors, weights in ((inputs, mixing), (far, far_mixing)):
        tensors = [x.detach().requires_grad_() for x in tensors]
        o = mhla(*tensors, weights, **options)
        results.append([o, *torch.autograd.grad(o, tensors, torch.ones_like(o))])
        monkeypatch.setattr(register.KernelCall, "allocate", room)
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(max(x.stride()) > 2**26 for x in results[1])


class NothingReadBack(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises where the host asks for numbers of a tensor, which a CUDA graph's capture does not allow."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal):
            raise RuntimeError(f"{function} reads a tensor back.")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("padding", ["none", "mask", "starts", "packed", "official"])
def test_captured_calls_read_nothing_back(padding, monkeypatch):
    """Forward and backward can be recorded in a CUDA graph; on a GPU they are."""
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
        graph = torch.cuda.CUDAGraph()
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
    graphs = CompileCounter()

    def loss(q, k, v, mixing, **padding):
        o = mhla(q, k, v, mixing, blocks=Blocks.sequence(q.shape[1], 8), causal=causal, impl="triton", **padding)
        return o.square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (24, 29, 40):
        inputs = [x.requires_grad_() for x in features(1, tokens)]
        mixing = torch.rand(-(-tokens // 8), -(-tokens // 8), device=DEVICE, requires_grad=True)
        given = {"key_mask": torch.rand(1, tokens, device=DEVICE) > 0.3, "starts": torch.tensor([5], device=DEVICE)}
        given = {name: x for name, x in given.items() if name == padding}
        got = torch.autograd.grad(compiled(*inputs, mixing, **given), (*inputs, mixing))
        want = torch.autograd.grad(loss(*inputs, mixing, **given), (*inputs, mixing))
        assert all(distance(x, y) <= 1e-6 for x, y in zip(got, want, strict=True))
    assert graphs.frame_count == 1


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


def test_refusals_name_the_reason(monkeypatch):
    def refuse(x, words):
        with pytest.raises(ValueError, match=f"expected 'auto' or 'torch': {words}"):
            mhla(x, x, x, torch.rand(2, 2, device=x.device), blocks=Blocks.sequence(4, 2), impl="triton")

    refuse(torch.rand(1, 4, 1, 300, device=DEVICE), "heads are 300 wide, and the kernels take at most 256")
    monkeypatch.setattr(register, "INTERPRETED", False)
    refuse(torch.rand(1, 4, 1, 3), "q is on cpu, where triton runs only with TRITON_INTERPRET=1")
    monkeypatch.setattr(register, "triton", None)
    refuse(torch.rand(1, 4, 1, 3), "triton is not installed")


IN_A_BUNDLE = """
import sys
sys.modules["mhla_hf"] = None
import torch, {module} as bundle
x, mixing = [torch.rand(1, 24, 2, 6).requires_grad_() for _ in range(3)], torch.rand(4, 4)
for causal, blocks in ((False, bundle.Blocks.grid((4, 6), (2, 2))), (True, bundle.Blocks.sequence(24, 6))):
    o = [bundle.mhla(*x, mixing, impl=impl, blocks=blocks, causal=causal) for impl in ("triton", "torch")]
    ours, theirs = (torch.autograd.grad(y.square().sum(), x) for y in o)
    assert all((a - b).norm() < 1e-5 * b.norm() for a, b in zip([o[0], *ours], [o[1], *theirs]))
"""


@pytest.mark.skipif(not INTERPRETED, reason="sets the interpreter itself")
def test_a_bundle_has_its_own_kernels_where_triton_is(tmp_path):
    name, text = make_source("models.language.language_model")
    (tmp_path / name).write_text(text)
    code = IN_A_BUNDLE.format(module=name.removesuffix(".py"))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
