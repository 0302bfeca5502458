"""Whatever card a test makes is one that the Hub takes."""

import pytest
from loopback_hub import refusals

from mhla_hf.share import card


@pytest.fixture(autouse=True)
def every_card_is_valid(monkeypatch):
    def render(*given, rendered=card._render, **context):
        text = rendered(*given, **context)
        assert refusals(text) == []
        return text

    monkeypatch.setattr(card, "_render", render)
