"""The core against the formula of the paper, written out token by token and independently of `ops`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from small_models import converted_model, tokens

from mhla_hf import MHLASettings
from mhla_hf.nn.core import MHLA, OutputNorm
from mhla_hf.nn.features import FeatureMap
from mhla_hf.nn.mixing import Mixing, extend_causal


def by_hand(core, q, k, v, hidden=None):
    """o_t = sum over s <= t of m[b(t), b(s)] <phi(q_t), phi(k_s)> v_s, normalised or not; fp64, loops."""
    settings, block = core.settings, core.settings.block_size
    phi = {"q": core.q_map, "k": core.k_map}
    features = {}
    for name, x in (("q", q), ("k", k)):
        if settings.feature_map == "hedgehog":
            y = torch.stack([x[:, :, h] @ phi[name].weight[h] for h in range(x.shape[2])], 2)
            features[name] = torch.cat([F.softmax(y, -1), F.softmax(-y, -1)], -1)
        elif settings.feature_map == "relu":
            features[name] = x.clamp_min(0) + 1e-6
        else:
            features[name] = x if settings.feature_map == "identity" else F.elu(x) + 1
    length, heads = q.shape[1], q.shape[2]
    mixing = core.mixing(-(-length // block)).double()
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for h in range(heads):
        m = mixing[h] if mixing.ndim == 3 else mixing
        g = h // (heads // k.shape[2])
        for t in range(length):
            total, weights = 0.0, 0.0
            for s in range(t + 1):
                w = m[t // block, s // block] * (features["q"][:, t, h] * features["k"][:, s, g]).sum(-1)
                total, weights = total + w[:, None] * v[:, s, g], weights + w
            out[:, t, h] = total / weights[:, None] if settings.normalize else total * features["q"].shape[-1] ** -0.5
    if settings.output_norm:
        out = out * (out.pow(2).mean(-1, keepdim=True) + core.norm.eps).rsqrt() * core.norm.weight
    if settings.gate:
        out = out * F.silu(F.linear(hidden, core.gate.weight, core.gate.bias)).view_as(out)
    return out


@pytest.mark.parametrize(
    ("feature_map", "normalize", "extra"),
    [
        ("hedgehog", True, {}),
        ("relu", False, {"gate": True, "output_norm": True}),
        ("elu", True, {"per_head": True}),
        ("identity", False, {"per_head": True}),
    ],
)
def test_core_is_the_paper(feature_map, normalize, extra):
    settings = MHLASettings(block_size=4, num_blocks=3, feature_map=feature_map, normalize=normalize, **extra)
    core = MHLA(settings, num_heads=4, num_kv_heads=2, key_dim=6, value_dim=5, hidden_size=7).double()
    with torch.no_grad():
        for p in core.parameters():
            p += 0.3 * torch.randn_like(p)
    q, k, v = torch.randn(2, 18, 4, 6), torch.randn(2, 18, 2, 6), torch.randn(2, 18, 2, 5)
    q, k, v, hidden = q.double(), k.double(), v.double(), torch.randn(2, 18, 7).double()
    expected = by_hand(core, q, k, v, hidden)
    got = core(q, k, v, hidden_states=hidden)
    # feature maps and mixing are computed in fp32 whatever comes in
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-6)


def test_hedgehog_starts_as_two_softmaxes_of_x():
    x = torch.randn(2, 5, 3, 8)
    torch.testing.assert_close(FeatureMap("hedgehog", 3, 8)(x), torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))


@pytest.mark.parametrize(
    ("side", "feature_map", "impl"),
    [("left", "hedgehog", "triton"), ("right", "relu", "torch"), ("left", "relu", "reference")],
)
def test_padding_may_hold_anything(side, feature_map, impl):
    """Outputs of real tokens and every gradient are those of padding that holds zeros."""
    core = MHLA(
        MHLASettings(block_size=4, num_blocks=3, feature_map=feature_map, impl=impl),
        num_heads=2, num_kv_heads=1, key_dim=6, value_dim=5, hidden_size=7,
    )  # fmt: skip
    inputs = [torch.randn(2, 10, heads, width) for heads, width in ((2, 6), (1, 6), (1, 5))]
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :3] = False
    real = real if side == "left" else real.flip(1)
    starts, direction = real.int().argmax(1), torch.randn(2, 10, 2, 5) * real[:, :, None, None]
    results = []
    for value in (0.0, float("nan"), float("inf")):
        given = [torch.where(real[:, :, None, None], x, value).requires_grad_() for x in inputs]
        o = core(*given, starts=starts, key_mask=real)
        gradients = torch.autograd.grad(o, [*given, *core.parameters()], direction)
        assert not any(x[~real].any() for x in gradients[:3])
        results.append((o[real], *gradients))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_embedding_may_be_nan(side):
    """Real tokens have the logits of their row alone, also of the token after, from the cache."""
    model = converted_model()
    model.get_input_embeddings().weight.data[0] = float("nan")  # tied: the padding token's own logit is NaN
    row, new = tokens(1, 11), tokens(2, 1, seed=1)
    padding = torch.zeros(1, 5, dtype=torch.long)
    rows = torch.cat([tokens(1, 16, seed=2), torch.cat([padding, row] if side == "left" else [row, padding], 1)])
    mask = (rows != 0).long()
    with torch.no_grad():
        together = model(rows, attention_mask=mask, use_cache=True)
        alone = model(row, use_cache=True)
        got = together.logits[1][mask[1].bool()]
        torch.testing.assert_close(got[:, 1:], alone.logits[0, :, 1:], rtol=1e-4, atol=1e-5)
        if side == "left":
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            got = model(new, attention_mask=mask, past_key_values=together.past_key_values).logits[1]
            alone = model(new[1:], past_key_values=alone.past_key_values).logits[0]
            torch.testing.assert_close(got[:, 1:], alone[:, 1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_norm_rounds_once(dtype):
    """Whatever the dtypes, it computes in fp32; in that of a whole model in half precision it answers in that."""
    norm = OutputNorm(16, 1e-6)
    norm.weight.data.uniform_(0.5, 2.0).copy_(norm.weight.data.to(dtype))
    o = torch.randn(2, 5, 3, 16).to(dtype).requires_grad_()
    mixed = norm(o)
    assert mixed.dtype == torch.float32
    (expected,) = torch.autograd.grad(mixed.square().sum(), o)
    half = norm.to(dtype)(o)
    assert half.dtype == dtype and torch.equal(half, mixed.to(dtype))
    (gradient,) = torch.autograd.grad(half.float().square().sum(), o)
    assert (gradient - expected).float().norm() <= 1e-2 * expected.float().norm()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_output_norm_sees_sums_that_fp16_cannot_hold(impl):
    """In one pass, and in one that fills a cache with steps after it."""
    settings = MHLASettings(
        block_size=4, num_blocks=3, feature_map="identity", normalize=False, output_norm=True, impl=impl
    )
    core = MHLA(settings, num_heads=1, num_kv_heads=1, key_dim=1, value_dim=1, hidden_size=1).half()
    q = torch.ones(1, 10, 1, 1, dtype=torch.float16)
    v = (3e4 * q).requires_grad_()
    core.mixing.requires_grad_(False)
    out = core(q, q, v)
    out.sum().backward()
    assert torch.equal(out, q) and v.grad.isfinite().all()
    cache = SimpleNamespace(state=None, mixing_for=lambda mixing, new, size: 4 * mixing(3))
    with torch.no_grad():
        outputs = [core(q[:, part], q[:, part], v[:, part], cache=cache) for part in map(slice, (0, 5, 6), (5, 6, 10))]
    assert torch.equal(torch.cat(outputs, 1), q)


@pytest.mark.parametrize("form", ["softmax", "direct"])
def test_locality_start_is_the_papers(form):
    core = Mixing(5, form=form).core()
    start = torch.tensor([[1 - abs(i - j) / 5 if j <= i else 0.0 for j in range(5)] for i in range(5)])
    torch.testing.assert_close(core, start / start.sum(-1, keepdim=True))


def test_mixing_beyond_its_rows():
    mixing = Mixing(6)
    core, longer = mixing(6), mixing(20)
    assert torch.equal(longer[:6, :6], core) and torch.equal(mixing(11), mixing(20)[:11, :11])
    assert torch.equal(longer, longer.tril()) and (longer.diagonal() > 0).all()
    # Row 6 repeats the last learned row by distance; further blocks decay.
    torch.testing.assert_close(longer[6, 1:7], core[5])
    assert (longer[19, :14].diff() >= 0).all()
    uniform = Mixing(4, start="uniform")(9)
    assert torch.equal(uniform[8], uniform[8, :1].expand(9))
    per_head = Mixing(4, 3)
    assert per_head(9).shape == (3, 9, 9)
    assert extend_causal(torch.ones(1, 1), 5).sum() == 15
