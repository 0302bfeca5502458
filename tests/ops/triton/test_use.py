"""What people do with the kernels: decode, compile, pad, hold huge tensors, ask for them in vain. In the interpreter."""

import math
import subprocess
import sys

import pytest
import torch
from ops_cases import distance

from mhla_hf.checkpoints.bundle import make_source
from mhla_hf.ops import checks
from mhla_hf.ops.api import mhla, mhla_step
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.reference import mhla_reference
from mhla_hf.ops.triton import register
from mhla_hf.ops.triton.common import spell
from mhla_hf.ops.triton.register import TRITON_BACKWARD, TRITON_FORWARD
from mhla_hf.ops.triton.tuning import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"),
    pytest.mark.usefixtures("poisoned"),
]


def features(batch, tokens, heads=2, groups=1, width=8, value_width=12, dtype=torch.float32):
    """q, k, v of positive features."""
    shapes = ((heads, width), (groups, width), (groups, value_width))
    return [torch.rand(batch, tokens, *shape, device=DEVICE).to(dtype) for shape in shapes]


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
        monkeypatch.setattr(register.Call, "room", room)
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
    cut = spell(Blocks.sequence(12, 4))
    arguments = (q, k, v, mixing, None, None, None, cut, cut, causal, normalize, 0.5, dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(TRITON_FORWARD, arguments, test_utils=checks)
    with torch.no_grad():
        o, inv = TRITON_FORWARD(*arguments)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(TRITON_BACKWARD, (torch.randn_like(o), o, inv, *plain), test_utils=checks)


def test_a_second_copy_uses_the_first_ones_operator():
    again = register.registered_operator("forward", "()", None, None)
    assert again is TRITON_FORWARD or again._qualified_op_name == TRITON_FORWARD._qualified_op_name


def test_refusals_name_the_reason(monkeypatch):
    blocks, wide = Blocks.sequence(4, 2), torch.rand(1, 4, 1, 300, device=DEVICE)
    with pytest.raises(ValueError, match="expected another one, for heads are 300 wide, more than 256"):
        mhla(wide, wide, wide, torch.rand(2, 2, device=DEVICE), blocks=blocks, impl="triton")
    narrow = torch.rand(1, 4, 1, 3)
    monkeypatch.setattr(register, "INTERPRETED", False)
    with pytest.raises(ValueError, match="for q is on cpu, where triton runs only with TRITON_INTERPRET=1"):
        mhla(narrow, narrow, narrow, torch.rand(2, 2), blocks=blocks, impl="triton")
    monkeypatch.setattr(register, "triton", None)
    with pytest.raises(ValueError, match="for triton is not installed"):
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
    name, text = make_source("models.language")
    (tmp_path / name).write_text(text)
    code = IN_A_BUNDLE.format(folder=str(tmp_path), module=name.removesuffix(".py"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [float(x) < 1e-5 for x in done.stdout.split()] == [True, True]
