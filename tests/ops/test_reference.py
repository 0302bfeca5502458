"""The definition itself, against sums written out token by token, and against plain linear attention."""

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


def test_official_denominator_written_out():
    """sum_b mixing[i, b] <q at the same slot of block b, z_b>: differs from the paper's, which has q[t] itself."""
    blocks = Blocks.grid((2, 4), (1, 2))
    q, k, v = (torch.rand(1, 8, 1, 3, dtype=torch.float64) for _ in range(3))
    mixing = torch.rand(2, 2, dtype=torch.float64)
    slots = [[0, 1, 4, 5], [2, 3, 6, 7]]
    official = mhla_reference(q, k, v, mixing, blocks=blocks, normalize="official", scale=1.0)
    numerator = mhla_reference(q, k, v, mixing, blocks=blocks, normalize=False, scale=1.0)
    for block in range(2):
        for place, token in enumerate(slots[block]):
            den = sum(mixing[block, b] * (q[0, slots[b][place], 0] @ k[0, slots[b], 0].sum(0)) for b in range(2))
            torch.testing.assert_close(official[0, token, 0], numerator[0, token, 0] / den)
    assert not torch.allclose(official, mhla_reference(q, k, v, mixing, blocks=blocks))


def test_packed_and_padded_rows_are_the_sequences_alone():
    mixing = torch.rand(4, 4, dtype=torch.float64)
    pieces = [[torch.rand(1, n, 2, 3, dtype=torch.float64) for _ in range(3)] for n in (5, 11, 1)]
    alone = [mhla_reference(*p, mixing, blocks=Blocks.sequence(p[0].shape[1], 3), causal=True) for p in pieces]
    packed = [torch.cat(parts, 1) for parts in zip(*pieces, strict=True)]
    cuts = torch.tensor([0, 5, 16, 17])
    o = mhla_reference(*packed, mixing, blocks=Blocks.sequence(17, 3), causal=True, cu_seqlens=cuts)
    torch.testing.assert_close(o, torch.cat(alone, 1))
    padded = [torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 11 - x.shape[1], 0), value=9.0) for x in parts])
              for parts in zip(*pieces, strict=True)]  # fmt: skip
    o = mhla_reference(*padded, mixing, blocks=Blocks.sequence(11, 3), causal=True, starts=torch.tensor([6, 0, 10]))
    for row, expected in enumerate(alone):
        torch.testing.assert_close(o[row, 11 - expected.shape[1] :], expected[0])
        assert not o[row, : 11 - expected.shape[1]].any()
