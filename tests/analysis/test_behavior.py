"""What a language model does, in numbers: of models whose answer is known."""

from types import SimpleNamespace

import pytest
import torch
from small_models import VOCAB, converted_model, softmax_model, tokens
from torch import nn

from mhla_hf.analysis.behavior import (
    CUE_TOKENS,
    PASSAGE_TOKENS,
    batch_difference,
    cached_logits,
    causality_difference,
    continue_greedily,
    difference,
    layer_bytes,
    next_token_log_probs,
    packed_difference,
    recall_gain,
    whole_logits,
)

ROWS = [tokens(1, length, seed=length)[0] for length in (40, 21, 12)]


class Reminder(nn.Module):
    """Says with 5 nats the token that followed what stood before, up to `reach` tokens back."""

    device = torch.device("cpu")

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def forward(self, input_ids, use_cache, logits_to_keep):
        logits = torch.zeros(*input_ids.shape, 1000)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                for before in range(max(0, place - self.reach), place):
                    if ids[before] == token:
                        logits[row, place, ids[before + 1]] = 5.0
        return SimpleNamespace(logits=logits[:, logits_to_keep])


def test_recall_gain_by_distance():
    """A model that looks 100 tokens back gains on the second copy within them, and nothing beyond."""
    ids = torch.randperm(1000)
    near, far = (recall_gain(Reminder(100), ids, distance, 2) for distance in (64, 128))
    assert near > 3.0 and abs(far) < 0.1
    assert recall_gain(Reminder(0), ids, PASSAGE_TOKENS, 2) == 0.0 and CUE_TOKENS < PASSAGE_TOKENS


def test_a_difference_is_a_share_of_the_largest_and_nan_is_not_hidden():
    wanted = torch.tensor([1.0, -4.0])
    assert difference(wanted + torch.tensor([0.0, 0.2]), wanted) == pytest.approx(0.05)
    assert torch.tensor(difference(torch.tensor([float("nan"), -4.0]), wanted)).isnan()


class Spoiled(nn.Module):
    """Says NaN of rows whose mask names padding, and of no other."""

    device = torch.device("cpu")

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        logits = torch.ones(*input_ids.shape, 8)
        if attention_mask is not None:
            logits[~attention_mask.bool().all(1)] = float("nan")
        return SimpleNamespace(logits=logits, past_key_values=None)


def test_a_padded_row_of_nan_is_not_hidden_by_those_that_are_well():
    assert torch.tensor(batch_difference(Spoiled(), ROWS)).isnan()


@pytest.mark.parametrize("make", [softmax_model, lambda: converted_model(mixing_form="decay", local="softmax")])
def test_what_must_be_the_same_is(make):
    model, ids = make(), ROWS[0][None]
    places = torch.tensor([3, 20, 39])
    whole = whole_logits(model, ids)
    assert difference(whole_logits(model, ids, places), whole[:, places]) < 1e-5
    assert difference(cached_logits(model, ids, [1, 20, 18, 1], places), whole[:, places]) < 1e-5
    assert causality_difference(model, ids) < 1e-5
    assert batch_difference(model, ROWS) < 1e-5 and packed_difference(model, ROWS) < 1e-5
    written = continue_greedily(model, ids[:, :30], 10)
    assert torch.equal(written[:, 30:], whole_logits(model, written)[:, 29:-1].argmax(-1))
    told = next_token_log_probs(model, ids, torch.tensor([1, 5]))
    assert told[0, 1] == pytest.approx(float(whole[0, 4].log_softmax(-1)[ids[0, 5]]), rel=1e-4)


def test_bytes_of_layers():
    """MHLA by decays keeps as much of a longer text; softmax keeps each token: keys and values, 2 heads of 8, fp32."""
    ids = tokens(1, 64)
    model = converted_model(layers=[1], mixing_form="decay", local="softmax")
    first, second = layer_bytes(model, ids, 32, [1])
    assert first == second > 0
    assert layer_bytes(model, ids, 32, [0]) == [32 * 2 * 2 * 8 * 4, 64 * 2 * 2 * 8 * 4] and VOCAB == 64
