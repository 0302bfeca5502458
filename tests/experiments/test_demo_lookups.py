"""Lookups in a text, which only attention can answer, and the heads for it that a Llama starts with."""

import random
import re

import torch
from tools.small_scores import HELD_OUT
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.demo import lookups
from experiments.demo.lookups import start_lookups
from experiments.demo.text import make_tokenizer, read_text
from mhla_hf.evaluation.recall import choose_words, filler_lines, make_text

TOKENIZER = make_tokenizer(read_text()[0][:100_000], 600, 256)
WORDS = choose_words(TOKENIZER)


def encode(text):
    return TOKENIZER(text, add_special_tokens=False, verbose=False)["input_ids"]


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


def test_the_heads_find_the_name_before_any_training():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, attention_bias=True, tie_word_embeddings=True, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    start_lookups(model)
    found = []
    for seed in range(40):
        facts, options = [("lookups", depth) for depth in (10, 50, 90)], {"examples": {"lookups": 0}}
        text, questions = make_text(TOKENIZER, filler_lines(HELD_OUT), 256, facts, random.Random(seed), **options)
        question = questions[seed % 3]
        ids = torch.tensor([encode(text + question.prompt + question.answer)])
        with torch.no_grad():
            attentions = model(ids[:, :-1], output_attentions=True).attentions
        assert attentions[0][0, :2].diagonal(-1, -2, -1).mean() > 0.7
        place = len(encode(text[: question.end])) - 2  # of the value, before the end of its line
        assert ids[0, place] == ids[0, -1]
        found.append(attentions[1][0, :2, -1, place].amax())
    assert torch.stack(found).mean() > 0.15, "of some 200 places"
