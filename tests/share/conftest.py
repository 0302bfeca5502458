"""Whatever card a test makes is one that the Hub takes."""

import pytest
from loopback_schema import refusals

from mhla_hf.share import card, card_shelf


@pytest.fixture(autouse=True)
def every_card_is_valid(monkeypatch):
    """Whatever card a test makes, the server's schema takes it."""

    def check_for_the_server(text, facts, check=card.check_front):
        check(text, facts)
        assert refusals(text) == []

    for module in (card, card_shelf):
        monkeypatch.setattr(module, "check_front", check_for_the_server)
