"""The core against the formula of the paper, written out token by token and independently of `ops`."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tools.ops_cases import check_that_padding_may_hold_anything, core_by_hand

from mhla_hf import MHLASettings
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.features import FeatureMap
from mhla_hf.nn.mixing import Mixing, extend_causal


def by_hand(core, q, k, v, hidden):
    """o_t = sum over s <= t of m[b(t), b(s)] <phi(q_t), phi(k_s)> v_s, normalized or not; fp64."""
    settings = core.settings

    def phi(x, feature_map):
        if settings.feature_map == "hedgehog":
            y = torch.einsum("bthk,hkf->bthf", x, feature_map.weight)
            return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
        return {"relu": x.clamp_min(0) + 1e-6, "identity": x, "elu": F.elu(x) + 1}[settings.feature_map]

    each = q.shape[2] // k.shape[2]
    fq, fk, v = phi(q, core.q_map), phi(k, core.k_map).repeat_interleave(each, 2), v.repeat_interleave(each, 2)
    block = torch.arange(q.shape[1]) // settings.block_size
    m = core.mixing(int(block[-1]) + 1).double()[..., block, :][..., block]
    w = (torch.einsum("bthk,bshk->bhts", fq, fk) * m).tril()
    return core_by_hand(core, w, v, hidden, fq.shape[-1] ** -0.5)


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_map": "hedgehog", "normalize": True},
        {"feature_map": "relu", "normalize": False, "gate": True, "output_norm": True},
        {"feature_map": "elu", "normalize": True, "per_head": True},
        {"feature_map": "identity", "normalize": False, "per_head": True},
    ],
)
def test_core_is_the_paper(settings):
    settings = MHLASettings(block_size=4, num_blocks=3, **settings)
    core = MHLA(settings, num_heads=4, num_kv_heads=2, key_dim=6, value_dim=5, hidden_size=7).double()
    with torch.no_grad():
        for p in core.parameters():
            p += 0.3 * torch.randn_like(p)
    q, k, v, hidden = (torch.randn(2, 18, *shape).double() for shape in ((4, 6), (2, 6), (2, 5), (7,)))
    # feature maps and mixing are computed in fp32 whatever comes in
    o = core(q, k, v, hidden_states=hidden)
    torch.testing.assert_close(o, by_hand(core, q, k, v, hidden), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("side", "feature_map", "impl"),
    [("left", "hedgehog", "triton"), ("right", "relu", "torch"), ("left", "relu", "reference")],
)
def test_padding_may_hold_anything(side, feature_map, impl):
    settings = MHLASettings(block_size=4, num_blocks=3, feature_map=feature_map, impl=impl)
    core = MHLA(settings, num_heads=2, num_kv_heads=1, key_dim=6, value_dim=5, hidden_size=7)
    inputs = [torch.randn(2, 10, heads, width) for heads, width in ((2, 6), (1, 6), (1, 5))]
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :3] = False
    real = real if side == "left" else real.flip(1)
    check_that_padding_may_hold_anything(core, inputs, real, starts=real.int().argmax(1))


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_output_norm_sees_sums_that_fp16_cannot_hold(impl):
    form = {"feature_map": "identity", "normalize": False, "output_norm": True}
    settings = MHLASettings(block_size=4, num_blocks=3, impl=impl, **form)
    core = MHLA(settings, num_heads=1, num_kv_heads=1, key_dim=1, value_dim=1, hidden_size=1).half()
    q = torch.ones(1, 10, 1, 1, dtype=torch.float16)
    v = (3e4 * q).requires_grad_()
    core.mixing.requires_grad_(False)
    out = core(q, q, v)
    out.sum().backward()
    assert torch.equal(out, q) and v.grad.isfinite().all()
    with torch.no_grad():
        cache = SimpleNamespace(state=None, seen_tokens=0, mixing=4 * core.mixing(3))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elu_is_exact_where_it_is_small(dtype):
    """e^x for negative x, which 1 + (e^x - 1) loses; and finite gradients where e^x overflows."""
    x = torch.linspace(-9, 9, 37).to(dtype).requires_grad_()
    y = FeatureMap("elu", 1, 1)(x)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient.double(), expected.clamp(max=1), rtol=2 * torch.finfo(dtype).eps, atol=0)
