"""Settings that cannot be right are refused in one sentence, whether a person makes them or a file holds them."""

import pytest
from tools.small_models import refused

from mhla_hf import MHLASettings
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.settings import check_settings

SETTINGS = [
    ({"block_size": 10**9}, "block_size: got 1000000000, expected a whole number from 1 to 65536"),
    ({"layout": [2, 0]}, "layout: got [2, 0]"),
    ({"mixing_form": "decay"}, "mixing_form: got 'decay'"),
    ({"cpe": 2}, "cpe: got 2, expected 0 or an odd"),
    ({"feature_map": "gelu"}, "feature_map"),
    ({"normalize": "yes"}, "normalize"),
    ({"impl": "cuda"}, "impl"),
    ({"layers": "1/3"}, "layers"),
    ({"layers": [1, 1]}, "layers"),
    ({"salient": -1}, "salient: got -1"),
    ({"rope": "near"}, 'rope: got "near" with layout=None'),
    ({"softmax_heads": {1: [0]}}, "softmax_heads: got {'1': [0]} with windowed=False, expected None"),
    ({"windowed": True, "salient_blocks": 2}, "salient_blocks: got 2, expected 0 without windows on a grid"),
    ({"windowed": True, "feature_map": "identity"}, 'feature_map: got "identity" with windowed=True'),
    ({"windowed": True, "block_size": 2}, "sinks"),
    ({"windowed": True, "normalize": False}, "normalize: got False with windowed=True"),
    ({"windowed": True, "rope": "after"}, "rope: got 'after' with windowed=True"),
    ({"windowed": True, "impl": "reference"}, "impl: got 'reference' with windowed=True"),
]


@pytest.mark.parametrize(("values", "name"), SETTINGS)
def test_settings(values, name):
    with refused(name, "got", "expected"):
        MHLASettings(**values)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"format_version": 3}, "format_version: got 3, expected 4, the version of this release"),
        ({"format_version": True}, "format_version: got"),
        ({"blok": 1}, "'blok'"),
    ],
)
def test_settings_from_a_file(values, word):
    with refused(word):
        MHLASettings.from_dict(values)


@pytest.mark.parametrize(
    ("values", "both_ways", "name"),
    [
        ({"normalize": "official"}, False, "normalize"),
        ({"cpe": 3}, False, "cpe"),
        ({"windowed": True, "gate": True}, False, "gate: got True, expected False for a model"),
        ({"windowed": True, "output_norm": True}, False, "output_norm: got True"),
        ({"windowed": True}, True, "sinks: got 4, expected 0 for a model"),
        ({"windowed": True, "sinks": 0, "salient": 2}, True, "salient: got 2"),
        ({"windowed": True, "sinks": 0, "softmax_heads": {1: [0]}}, True, "softmax_heads: got {'1': [0]}, expected"),
    ],
)
def test_settings_that_do_not_suit_a_model_of_sequences(values, both_ways, name):
    with refused(name, "got", "expected"):
        check_settings(MHLASettings(**values), "a model", both_ways=both_ways)


def test_a_model_from_scratch_has_no_window():
    with refused("windowed: got True, expected False for a model from scratch"):
        MHLA(MHLASettings(windowed=True), num_heads=2, num_kv_heads=1, key_dim=4, value_dim=4, hidden_size=8)
