"""Bad input is named in one sentence; a refused step leaves its state alone."""

import copy
import logging

import pytest
import torch
from tools.small_models import refused

from mhla_hf.ops import api
from mhla_hf.ops.api import mhla, mhla_step
from mhla_hf.ops.blocks import Blocks


def good():
    """Legal arguments of a causal call: batch 2, 10 tokens, 4 query and 2 key heads, widths 3 and 5, blocks of 4."""
    features = {"q": torch.rand(2, 10, 4, 3), "k": torch.rand(2, 10, 2, 3), "v": torch.rand(2, 10, 2, 5)}
    return {**features, "mixing": torch.rand(3, 3), "blocks": Blocks.sequence(10, 4), "causal": True}


DEN = {"q_den": torch.rand(2, 10, 4, 6), "k_den": torch.rand(2, 10, 2, 6)}
DOUBLE = torch.rand(2, 10, 4, 3, dtype=torch.float64)
ONE = {"q": torch.rand(1, 10, 4, 3), "k": torch.rand(1, 10, 2, 3), "v": torch.rand(1, 10, 2, 5)}

BAD = {
    "q_not_a_tensor": ({"q": [1.0]}, "q: got list, expected a floating-point tensor"),
    "k_meta": ({"k": torch.empty(2, 10, 2, 3, device="meta")}, "k: got a tensor on meta"),
    "k_heads": ({"k": torch.rand(2, 10, 3, 3), "v": torch.rand(2, 10, 3, 5)}, "k: got 3 heads"),
    "k_tokens": ({"k": torch.rand(2, 9, 2, 3), "v": torch.rand(2, 9, 2, 5)}, "key_blocks: got None with 10 queries"),
    "v_heads": ({"v": torch.rand(2, 10, 4, 5)}, "v: got shape [2, 10, 4, 5]"),
    "q_den_alone": ({"q_den": DEN["q_den"]}, "q_den: got only one of q_den and k_den"),
    "k_den_shape": ({**DEN, "k_den": torch.rand(2, 10, 2, 7)}, "k_den: got shape [2, 10, 2, 7]"),
    "den_without_denominator": ({**DEN, "normalize": False}, "features for a denominator with normalize=False"),
    "mixing_heads": ({"mixing": torch.rand(2, 3, 3)}, "mixing: got shape [2, 3, 3]"),
    "mixing_large_not_causal": ({"mixing": torch.rand(4, 4), "causal": False}, "mixing: got shape [4, 4]"),
    "blocks_number": ({"blocks": 4}, "blocks: got 4"),
    "blocks_grid_causal": ({"blocks": Blocks.grid((2, 5), (1, 3))}, "causal: got True"),
    "normalize_word": ({"normalize": "paper"}, "normalize: got 'paper'"),
    "official_causal": ({"normalize": "official"}, "normalize: got 'official'"),
    "scale_zero": ({"scale": 0}, "scale: got 0"),
    "impl_triton": ({"impl": "triton", "q": DOUBLE}, "expected 'auto' or 'torch': the kernels compute in fp32, not in"),
    "impl_unknown": ({"impl": "cuda"}, "impl: got 'cuda'"),
    "mask_shape": ({"key_mask": torch.ones(10, 2, dtype=torch.bool)}, "key_mask: got shape [10, 2]"),
    "mask_dtype": ({"key_mask": torch.ones(2, 10)}, "key_mask: got torch.float32"),
    "starts_not_causal": ({"starts": torch.tensor([0, 1]), "causal": False}, "starts: got a tensor with causal=False"),
    "cu_batch": ({"cu_seqlens": torch.tensor([0, 10])}, "cu_seqlens: got a tensor with causal=True and a batch of 2"),
    "cu_short": ({**ONE, "cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens: got [0, 9]"),
    "state_not_causal": ({"return_state": True, "causal": False}, "return_state: got True"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, words = BAD[name]
    with refused(words, "expected", kind=(TypeError, ValueError)):
        mhla(**{**good(), **change})


BAD_STEPS = {
    "state_kind": ({"state": {}}, "state: got a dict"),
    "state_normalize": ({"normalize": False}, "normalize: got False, expected True"),
    "state_batch": ({"q": ONE["q"], "k": ONE["k"], "v": ONE["v"]}, "state: got 2 for its batch"),
    "k_tokens": ({"k": torch.rand(2, 4, 2, 3), "v": torch.rand(2, 4, 2, 5)}, "k: got 4 tokens"),
    "mixing_small": ({"mixing": torch.rand(4, 4)}, "mixing: got shape [4, 4], expected at least 5 rows"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_step_leaves_the_state(name):
    call = {**good(), "mixing": torch.rand(5, 5)}
    _, state = mhla(**call, return_state=True)
    before = copy.deepcopy(state)
    call.pop("blocks"), call.pop("causal")
    change, words = BAD_STEPS[name]
    with refused(words, kind=(TypeError, ValueError)):
        mhla_step(**{**call, "state": state, **change})
    assert all(torch.equal(x, before.tensors()[name]) for name, x in state.tensors().items())


@pytest.mark.parametrize(
    "act, words",
    [
        (lambda s: s.crop(5), "count: got 5, expected an int from 0 to 4, the block size."),
        (lambda s: (s.crop(4), s.crop(4)), "count: got 4, expected at most 2, the tokens that can still be removed."),
        (lambda s: (s.select(torch.tensor([1])), s.crop(4)), "expected at most 3, the length of the shortest row."),
    ],
)
def test_bad_state_calls(act, words):
    _, state = mhla(**good(), starts=torch.tensor([0, 7]), return_state=True)
    if "removed" in words:
        state.select(torch.tensor([0]))
    with refused(words):
        act(state)


def test_auto_says_once_what_it_took(caplog):
    api.ANNOUNCED_CHOICES.clear()
    with caplog.at_level(logging.INFO, logger="mhla_hf"):
        for _ in range(3):
            mhla(**good())
        mhla(**good(), impl="reference")
    assert caplog.messages == ["mhla: impl='auto' took 'torch', the fastest implementation for cpu tensors."]
