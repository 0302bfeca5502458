"""Values in YAML and as arguments: what is wrong with them is one sentence of one form."""

import pytest

from mhla_hf.checkpoints.file_io import read_yaml
from mhla_hf.checkpoints.values import Number, at_least, checked, fraction_below_one, positive, read_settings


@checked
class Shop:
    name: str
    rate: Number = positive(1e-3)
    share: Number | None = fraction_below_one(None)
    count: int = at_least(2, 3)

    def validate_name(self):
        if not self.name:
            raise ValueError("name is empty")


WRONG = [
    ({"rate": 1}, "name: got nothing, expected a value."),
    ({"name": "a", "rated": 1}, "rated: got an unknown name, expected one of name, rate, share, count."),
    ({"name": "a", "rate": 0}, "rate: got 0, expected a number above 0."),
    ({"name": "a", "rate": "fast"}, "rate: got 'fast', expected int | float."),
    ({"name": "a", "share": 1}, "share: got 1, expected a number of at least 0 and below 1."),
    ({"name": "a", "count": 1}, "count: got 1, expected a whole number of at least 2."),
    ({"name": "a", "count": True}, "count: got True, expected int."),
    ({"name": ""}, "name is empty"),
    (["name"], "got ['name'], expected a mapping."),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_what_is_wrong_is_one_sentence(values, said):
    with pytest.raises(ValueError) as caught:
        read_settings(Shop, values, "shop: ")
    assert str(caught.value) == f"shop: {said}"


def test_made_by_a_person_it_says_the_same():
    with pytest.raises(ValueError) as caught:
        Shop("a", 0)
    assert str(caught.value) == "rate: got 0, expected a number above 0."
    assert Shop("a", 1, share=0).count == 3


def test_yaml_knows_numbers_without_a_point(tmp_path):
    (tmp_path / "a.yaml").write_text("name: 1e-3b\nrate: 1e-3\nshare: -1E-2\n")
    assert read_yaml(tmp_path / "a.yaml", "shop") == {"name": "1e-3b", "rate": 0.001, "share": -0.01}
    with pytest.raises(ValueError, match=r"shop '.*a.yaml': share: got -0.01, expected"):
        read_yaml(tmp_path / "a.yaml", "shop", Shop)
