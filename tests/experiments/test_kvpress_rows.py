"""The rows by which kvpress' presses and our conversions are compared; kvpress itself is not installed here."""

import copy

import pytest
import torch
from tools.small_scores import small_llama

from experiments.kvpress_rows import AFTER, FULL, feed, folder_rows, prefill, row_parts
from mhla_hf import convert

LENGTH = 600


@pytest.fixture(scope="module")
def models():
    teacher = small_llama(vocab_size=64, max_position_embeddings=2048)
    return {"same": teacher, "converted": convert(copy.deepcopy(teacher), layers=[1]).eval()}


@torch.no_grad()
@pytest.mark.parametrize("name", ["same", "converted"])
def test_what_is_fed_after_the_cache_is_what_one_pass_gives(models, name):
    """The cache can be used again."""
    ids, model = torch.randint(64, (LENGTH + 100,)), models[name]
    expected = model(input_ids=ids[None]).logits[0, LENGTH:]
    cache, _ = prefill(model, ids[:LENGTH])
    for _ in range(2):
        torch.testing.assert_close(feed(model, cache, ids[LENGTH:], LENGTH), expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_teacher_loses_nothing(models):
    rows = dict(folder_rows(models["same"], models, row_parts(torch.randint(64, (LENGTH + AFTER,)), LENGTH, 0)))
    assert rows["same"]["kl"] == pytest.approx(0, abs=1e-6) and rows["same"]["kept"] == 1
    assert rows["same"]["recall"] == rows[FULL]["recall"]
    assert rows["converted"]["kl"] > 1e-6 and 0.5 < rows["converted"]["kept"] < 1
