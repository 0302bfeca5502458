"""What must hold beside equality: no NaN, autocast changes nothing, little is saved, torch.compile takes it whole."""

import pytest
import torch
from tools.ops_cases import distance, run

from mhla_hf.ops.api import mhla
from mhla_hf.ops.blocks import Blocks

FORMS = {
    "causal": {"blocks": Blocks.sequence(300, 64), "causal": True},
    "long_blocks": {"blocks": Blocks.sequence(300, 160), "causal": True},
    "grid": {"blocks": Blocks.grid((15, 20), (4, 3)), "causal": False},
    "sequence": {"blocks": Blocks.sequence(300, 64), "causal": False},
    "official": {"blocks": Blocks.sequence(300, 60), "causal": False, "normalize": "official"},
}


def tensors(blocks, dtype=torch.float32, batch=2, heads=4, groups=2, width=8):
    counts = {"q": heads, "k": groups, "v": groups}
    made = {name: torch.rand(batch, blocks.length, count, width).to(dtype) for name, count in counts.items()}
    return {**made, "mixing": torch.rand(blocks.num_blocks, blocks.num_blocks)}


@pytest.mark.parametrize("impl", ["torch", "reference", "triton"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_dead_features_give_zero_not_nan(form, normalize, impl):
    """relu can kill every feature of a token: 0/0 is 0, and every gradient is finite."""
    options = {"normalize": normalize, **FORMS[form], "impl": impl}
    x = tensors(options["blocks"], heads=2, groups=1)
    x["q"][:, ::3] = 0
    x["k"][0] = 0
    plain = {**options, "normalize": False, "scale": 1.0, "impl": "reference"}
    weights, _ = run(mhla, {**x, "v": torch.ones_like(x["v"])}, plain)
    assert (weights == 0).any()  # there is something to guard
    o, grads = run(mhla, x, options, torch.randn(*x["q"].shape[:3], 8))
    assert o.isfinite().all() and not o[weights == 0].any()
    for name, grad in grads.items():
        assert grad.isfinite().all(), name


@pytest.mark.parametrize(
    "impl, dtype, mixing_dtype", [("torch", torch.float64, torch.float32), ("triton", torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("form", ["causal", "own_den", "official"])
def test_the_gradient_of_a_mixing_in_lower_precision_is_rounded_once(form, impl, dtype, mixing_dtype):
    """The parts of numerator and denominator nearly cancel where one block outweighs the others, as with dead features."""
    options = {**FORMS.get(form, FORMS["causal"]), "impl": impl}
    x = tensors(options["blocks"], dtype, heads=2, groups=1, width=1)
    x["k"][:, 60:] *= 1e-6
    if form == "own_den":
        x |= {"q_den": torch.rand(2, 300, 2, 8).to(dtype), "k_den": torch.rand(2, 300, 1, 8).to(dtype)}
    x["mixing"] = torch.randn(x["mixing"].shape).to(mixing_dtype)
    direction = torch.randn(2, 300, 2, 1)
    _, grads = run(mhla, x, options, direction)
    _, exact = run(mhla, {**x, "mixing": x["mixing"].to(dtype)}, options, direction)
    assert torch.equal(grads["mixing"], exact["mixing"].to(mixing_dtype))


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
@pytest.mark.parametrize("form", [*FORMS, "starts", "own_den"])
def test_nothing_of_a_masked_token_leaks(form, impl):
    """Not even NaN in its key or value, or before `starts` in its query: neither forward nor backward."""
    options = {**FORMS.get(form, FORMS["causal"]), "impl": impl}
    x, real = tensors(options["blocks"], heads=2, groups=1), torch.rand(2, 300) < 0.7
    options["key_mask"], direction = real.clone(), torch.randn(2, 300, 2, 8)
    if form == "starts":
        options["starts"] = torch.tensor([0, 70])
        real[1, :70] = False
    if form == "own_den":
        x |= {"q_den": torch.rand(2, 300, 2, 8), "k_den": torch.rand(2, 300, 1, 8)}
    expected, expected_grads = run(mhla, x, options, direction)
    poison = torch.where(torch.arange(300) % 2 == 0, float("nan"), float("inf"))[None, :, None, None]
    if form == "starts":
        x["q"][1, :70] = poison[0, :70]
    for name in {"k", "v", "k_den"} & x.keys():
        x[name] = torch.where(real[:, :, None, None], x[name], poison)
    got, grads = run(mhla, x, options, direction)
    assert torch.equal(got, expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name
        assert name not in ("k", "v", "k_den") or not grad[~real].any(), name


@pytest.mark.parametrize("impl", ["reference", "torch", "triton"])
def test_output_norm_is_of_the_sum_before_it_is_rounded(impl):
    """For the sake of one rounding instead of two; sums that fp16 cannot hold are in `tests/nn/test_core.py`."""
    options = {"blocks": Blocks.grid((3, 4), (1, 2)), "causal": False}
    x = tensors(options["blocks"], groups=4)
    x = {**{name: x[name].add(0.5).bfloat16() for name in "qkv"}, "mixing": x["mixing"]}
    x["v"] = x["v"] - 1

    def normed(q, k, v, mixing, **options):
        o = mhla(q, k, v, mixing, unrounded=True, **options)
        return torch.nn.functional.rms_norm(o, (8,), torch.linspace(0.5, 2.0, 8, dtype=o.dtype), 1e-6).to(v.dtype)

    direction = torch.randn(2, 12, 4, 8).bfloat16()
    got, grads = run(normed, x, {**options, "impl": impl}, direction)
    exact = {name: value.double() for name, value in x.items()}
    expected, expected_grads = run(normed, exact, {**options, "impl": "reference"}, direction.double())
    assert got.dtype == torch.bfloat16 and torch.equal(got, run(normed, x, {**options, "impl": impl})[0])
    assert distance(got, expected) < (8e-3 if impl == "triton" else 2e-3)
    for name in "qkv":
        assert distance(grads[name], expected_grads[name]) < 2e-2, name


@pytest.mark.parametrize("form", ["causal", "grid"])
def test_autocast_changes_nothing(form):
    options, x = FORMS[form] | {"impl": "torch"}, tensors(FORMS[form]["blocks"])
    direction = torch.randn(2, 300, 4, 8)
    expected, expected_grads = run(mhla, x, options, direction)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(mhla, x, options, direction)
    assert got.dtype == torch.float32 and torch.equal(got, expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name


@pytest.mark.parametrize("form", ["grid", "starts", "packed"])
def test_compiles_without_a_break(form):
    given = {"starts": {"starts": torch.tensor([3, 100])}, "packed": {"cu_seqlens": torch.tensor([0, 100, 300])}}
    options = FORMS.get(form, FORMS["causal"]) | given.get(form, {})
    x = tensors(options["blocks"], batch=1 if form == "packed" else 2)
    direction = torch.randn(*x["q"].shape[:3], 8)
    expected, expected_grads = run(mhla, x, options, direction)
    compiled = torch.compile(lambda *args, **kwargs: mhla(*args, **kwargs), fullgraph=True, backend="aot_eager")
    got, grads = run(compiled, x, options, direction)
    assert distance(got, expected) < 1e-6
    for name in ("q", "k", "v"):
        assert distance(grads[name], expected_grads[name]) < 1e-4, name
    assert (grads["mixing"] - expected_grads["mixing"]).abs().max() < 1e-3 * direction.norm()


@pytest.mark.parametrize("normalize", [True, False])
def test_saves_no_more_than_softmax_attention(normalize):
    """Bytes of the distinct storages that a forward pass keeps for its backward pass."""
    q, k, v = (torch.rand(1, 2048, 4, 64, requires_grad=True) for _ in range(3))
    mixing, kept = torch.rand(32, 32, requires_grad=True), {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        o = mhla(q, k, v, mixing, blocks=Blocks.sequence(2048, 64), causal=True, normalize=normalize)
    softmax = 4 * q.nbytes  # SDPA keeps q, k, v, and its output
    assert o.requires_grad and sum(kept.values()) <= (1.05 if normalize else 0.77) * softmax


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_frozen_inputs_and_second_derivatives(impl):
    """A gradient penalty is refused, and not taken for a constant: the loss is linear in the output."""
    x = tensors(Blocks.sequence(20, 8))
    q = x["q"].requires_grad_()
    o = mhla(q, x["k"], x["v"], x["mixing"], blocks=Blocks.sequence(20, 8), causal=True, impl=impl)
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative" if impl == "torch" else "backward"):
        grad.sum().backward()
