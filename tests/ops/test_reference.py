"""The definition itself, against sums written out token by token."""

import pytest
import torch
from tools.ops_cases import mhla_reference

from mhla_hf.ops.blocks import Blocks


def written_out(q, k, v, mixing, blocks, key_blocks, causal, normalize, scale):
    """o for one row, one head, by loops over tokens."""
    query_block, key_block = blocks.index().tolist(), key_blocks.index().tolist()
    o = torch.zeros(len(q), v.shape[1], dtype=torch.float64)
    for t in range(len(q)):
        keys = range(t + 1 if causal else len(k))
        weights = [mixing[query_block[t], key_block[s]] * scale * (q[t] @ k[s]) for s in keys]
        o[t] = sum(weight * v[s] for s, weight in enumerate(weights)) / (sum(weights) if normalize else 1)
    return o


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("form", ["causal", "grid", "cross"])
def test_against_loops(form, normalize):
    blocks = Blocks.sequence(7, 3) if form == "causal" else Blocks.grid((3, 3), (2, 2))
    key_blocks = Blocks.sequence(5, 2) if form == "cross" else blocks
    q = torch.rand(2, blocks.length, 4, 3, dtype=torch.float64)
    k, v = (torch.rand(2, key_blocks.length, 2, width, dtype=torch.float64) for width in (3, 2))
    mixing = torch.rand(4, blocks.num_blocks, key_blocks.num_blocks, dtype=torch.float64)
    options = {"blocks": blocks, "key_blocks": key_blocks, "causal": form == "causal", "normalize": normalize}
    scale = 0.7 if form == "causal" else None  # that of softmax attention
    o = mhla_reference(q, k, v, mixing, scale=scale, **options)
    for row in range(2):
        for head in range(4):
            one = (q[row, :, head], k[row, :, head // 2], v[row, :, head // 2], mixing[head])
            expected = written_out(*one, blocks, key_blocks, form == "causal", normalize, scale or 3**-0.5)
            torch.testing.assert_close(o[row, :, head], expected, rtol=1e-12, atol=1e-12)
