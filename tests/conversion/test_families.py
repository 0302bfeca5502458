"""One record per family says what it is."""

import diffusers
import pytest
import transformers
from tools.small_models import FAMILIES as LANGUAGE_ROWS
from tools.small_towers import TOWERS
from tools.small_types import TYPES
from tools.tiny_pipelines import TRANSFORMERS, tiny_transformer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mhla_hf
from mhla_hf.conversion.model_family import mhla_class
from mhla_hf.models.derived_classes import base_classes
from mhla_hf.models.families import DIFFUSION, FAMILIES, LANGUAGE, VISION
from mhla_hf.models.transformers_api import family_of_class
from mhla_hf.nn.settings import MHLASettings


def test_every_family_has_a_row_in_the_tests():
    assert set(LANGUAGE_ROWS) <= set(TYPES) == {family.base for family in LANGUAGE}
    assert {CONFIG_MAPPING[family.base].__name__ for family in VISION} == {config for config, _ in TOWERS.values()}
    rows = {type(tiny_transformer(name)) for name in TRANSFORMERS}
    assert rows == {getattr(diffusers, name) for family in DIFFUSION for name in family.classes}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.base)
def test_a_record_names_classes_that_exist(family):
    library = diffusers if family in DIFFUSION else transformers
    for name in family.classes if family in DIFFUSION else base_classes(family):
        made = mhla_class(family, getattr(library, name))
        assert issubclass(made, getattr(library, name)) and getattr(mhla_hf, made.__name__) is made
        assert family_of_class(name) is family_of_class(made.__name__) is family
    MHLASettings(**family.kind.defaults)
