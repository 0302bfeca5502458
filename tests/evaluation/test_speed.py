"""Speed by length: models timed together get comparable records, the cache's size is exact, the card reads them."""

import re

import pytest
import torch
from small_scores import make_result, save_llama, save_mhla, small_llama

import mhla_hf
from mhla_hf.evaluation.records import Results
from mhla_hf.evaluation.speed import speed_of_records
from mhla_hf.share.card import check_card, write_card
from mhla_hf.speed import cache_bytes

SETTINGS = {"lengths": [32, 64], "decode_tokens": 2, "rounds": 1}


@pytest.fixture
def folders(tmp_path):
    return [save_llama(tmp_path / "teacher"), save_mhla(tmp_path / "mhla")]


def judge(folders, **changes):
    settings = {**SETTINGS, **changes.pop("settings", {})}
    return mhla_hf.evaluate(folders, recipe="speed", settings=settings, progress=False, **changes)


def test_models_timed_together_make_the_cards_tables(folders, monkeypatch):
    compared = judge(folders)
    assert {record.metric for record in compared["mhla"]} == {
        f"{metric}_{length}" for metric in ("forward_ms", "decode_ms", "cache_mib") for length in (32, 64)
    }
    cache = compared["teacher"].find("speed", "cache_mib_64")
    assert cache.value == 2 * 3 * 64 * 32 * 4 / 2**20 and cache.higher_is_better is False and cache.samples == 1
    monkeypatch.setattr("mhla_hf.evaluation.speed.measure_speed", None)
    assert judge(folders)["mhla"] == compared["mhla"], "what is known is not timed again"
    text = write_card(folders[1], name="toy", license="mit", compared={"teacher": folders[0]}).read_text()
    assert "### Memory" in text and "| decode, per token | 64 | 0.0469 |" in text
    assert "| speed |" not in text.split("## Speed and memory")[0] and "forward_ms_32" not in text.split("---")[1]
    check_card(folders[1])


def test_times_that_were_not_measured_together_are_not_compared(folders):
    one, two = judge(folders[:1]), judge(folders[1:])
    columns = {"softmax": one["teacher"], "mhla": two["mhla"]}
    assert speed_of_records(columns) is None
    assert speed_of_records({**columns, "mhla": [make_result()]}) is None
    assert len(Results.read(folders[1])) == 6


def test_a_cache_counts_each_storage_once():
    keys = torch.zeros(4, 8)
    assert cache_bytes({"keys": keys, "view": [keys[:2], (keys.T,)], "other": torch.zeros(2)}) == 4 * 8 * 4 + 8


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lengths": []}, "lengths is []"),
        ({"lengths": ["long"]}, "lengths is ['long']"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_bad_settings_are_one_sentence(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        judge({"llama": small_llama()}, settings=settings)
