"""Lookups in a text, which only attention can answer, and the heads for it that a Llama starts with."""

import re

from tools.small_scores import HELD_OUT

from experiments.demo import lookups
from experiments.demo.text import make_tokenizer, read_text
from mhla_hf.evaluation.recall import choose_words

TOKENIZER = make_tokenizer(read_text()[0][:100_000], 600, 256)
WORDS = choose_words(TOKENIZER)


def test_a_name_comes_back_with_its_last_value_and_the_text_is_kept(monkeypatch):
    monkeypatch.setattr(lookups, "LEAST", 2 * len(HELD_OUT))
    added = lookups.add_lookups(HELD_OUT, WORDS)
    lookup = re.compile(r"- (\w+) (\w+)\n")
    lines = added.splitlines(keepends=True)
    known, back, new = {}, 0, 0
    for line in lines:
        if (found := lookup.fullmatch(line)) and found[1] in WORDS[0]:
            back += known.get(found[1]) == found[2]
            new += known.get(found[1]) != found[2]
            known[found[1]] = found[2]
    assert back > new > 20
    kept = "".join(line for line in lines if not ((found := lookup.fullmatch(line)) and found[1] in WORDS[0]))
    assert kept == 2 * HELD_OUT and added[: len(added) // 2] != added[len(added) // 2 :]
