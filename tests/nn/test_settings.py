"""Settings that cannot be right are refused in one sentence, whether a person makes them or a file holds them."""

import pytest
from tools.small_models import refused

from mhla_hf import MHLASettings

SETTINGS = [
    ({"block_size": 10**9}, "block_size: got 1000000000, expected a whole number from 1 to 65536"),
    ({"num_decays": 65}, "num_decays"),
    ({"layout": [2, 0]}, "layout: got [2, 0]"),
    ({"layout": [2], "mixing_form": "decay"}, "mixing_form: got"),
    ({"cpe": 2}, "cpe: got 2, expected 0 or an odd"),
    ({"feature_map": "gelu"}, "feature_map"),
    ({"normalize": "yes"}, "normalize"),
    ({"impl": "cuda"}, "impl"),
    ({"layers": "1/3"}, "layers"),
    ({"windowed": True}, "mixing_form"),
    ({"windowed": True, "mixing_form": "decay", "feature_map": "identity"}, "feature_map"),
    ({"windowed": True, "mixing_form": "decay", "block_size": 2}, "sinks"),
    ({"windowed": True, "mixing_form": "decay", "normalize": False}, "normalize"),
    ({"windowed": True, "mixing_form": "decay", "salient": -1}, "salient: got -1"),
    (
        {"windowed": True, "mixing_form": "decay", "salient": 2, "output_norm": True},
        "salient: got 2 with gate or output_norm",
    ),
    ({"mixing_form": "decay", "salient": 2}, "salient: got 2 with windowed=False, expected 0"),
    ({"mixing_form": "decay", "rope": "after"}, "rope"),
    ({"mixing_form": "decay", "impl": "reference"}, "impl"),
    ({"window_dropout": 2}, "window_dropout"),
    ({"layers": [1, 1]}, "layers"),
]


@pytest.mark.parametrize(("values", "name"), SETTINGS)
def test_settings(values, name):
    with refused(name, "got", "expected"):
        MHLASettings(**values)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"format_version": 4}, "update mhla_hf"),
        ({"format_version": True}, "format_version: got"),
        ({"blok": 1}, "'blok'"),
    ],
)
def test_settings_from_a_file(values, word):
    with refused(word):
        MHLASettings.from_dict(values)


@pytest.mark.parametrize(
    ("values", "core"),
    [
        ({}, "matrix"),
        ({"mixing_form": "decay"}, "decay"),
        ({"mixing_form": "decay", "windowed": True}, "decay"),
        ({"mixing_form": "decay", "windowed": True, "window": 1, "salient": 3}, "salient"),
    ],
)
def test_settings_say_which_core_attends(values, core):
    assert MHLASettings(**values).core == core
    assert MHLASettings.from_dict(MHLASettings(**values).to_dict()).core == core
