"""Feature maps against their formulas, in half precision."""

import pytest
import torch

from mhla_hf.nn.features import FeatureMap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_elu_is_exact_where_it_is_small(dtype):
    """e^x for negative x, which 1 + (e^x - 1) loses; and finite gradients where e^x overflows."""
    x = torch.linspace(-9, 9, 37).to(dtype).requires_grad_()
    y = FeatureMap("elu", 1, 1)(x)
    expected = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient.double(), expected.clamp(max=1), rtol=2 * torch.finfo(dtype).eps, atol=0)
