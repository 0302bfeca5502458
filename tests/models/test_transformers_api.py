"""What differs between releases of transformers: what one lacks is not there, and no cache is lost in silence."""

import tomllib
from pathlib import Path

import pytest
import torch
from tools.small_models import CACHE, converted_model, refused, scratch_model, softmax_model, tokens
from tools.small_types import small_model_of
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.models.derived_classes import base_classes, find_derived_class
from mhla_hf.models.families import CAUSAL, Family
from mhla_hf.models.language.causal_attention import ATTENTION_NAME, WINDOWED_SWAP
from mhla_hf.models.transformers_api import TESTED_TRANSFORMERS, config_class_of

ROOT = Path(__file__).parents[2]


def test_a_type_that_this_release_lacks_is_not_there():
    family = Family("type_of_tomorrow", CAUSAL, "text-generation")
    assert config_class_of(family.base) is None and base_classes(family) == {}
    for name in ("MHLATypeOfTomorrowConfig", "MHLATypeOfTomorrowForCausalLM", "MHLATypeOfTomorrowAttention"):
        with pytest.raises(AttributeError, match=name):
            find_derived_class(name, [((family,), WINDOWED_SWAP)])


@pytest.mark.parametrize("make", [converted_model, scratch_model])
def test_a_cache_that_does_not_reach_the_layer_is_refused(make, monkeypatch):
    """As with transformers 5.24 before this code knew its `cache=`: the second step would read nothing of the first."""
    model = make()
    monkeypatch.setattr("mhla_hf.models.language.cache.find_cache", lambda kwargs: None)
    with refused("cache", "expected as many keys as queries and no cache", TESTED_TRANSFORMERS[1]), torch.no_grad():
        cache = model(tokens(1, 12), use_cache=True)[CACHE]
        model(tokens(1, 1), **{CACHE: cache})


def test_the_promise_is_what_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, newest = TESTED_TRANSFORMERS
    assert f"transformers>={oldest.removesuffix('.0')},<6" in project["dependencies"]
    assert f"\ntransformers=={newest}\n" in (ROOT / "constraints.txt").read_text()


def test_experts_of_a_loaded_model_are_those_of_its_base(tmp_path):
    mhla_hf.convert(softmax_model("mixtral")).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded)._can_set_experts_implementation()
    assert loaded.config._experts_implementation == softmax_model("mixtral").config._experts_implementation
    loaded.set_experts_implementation("grouped_mm")
    assert loaded.config._experts_implementation == "grouped_mm"


def test_no_softmax_layer_left_means_no_softmax_mask():
    """Layers of a base that have no attention, as Qwen3-Next's, do not count."""
    model = mhla_hf.convert(small_model_of("qwen3_next"), layers="all", block_size=8)
    assert model.config._attn_implementation == ATTENTION_NAME
