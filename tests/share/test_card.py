"""The model card: every number from a file, provable from the folder alone, nothing written before all is checked.

Run: pytest tests/share/test_card.py
"""

import json
import re

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from small_cards import SPEED, TRAIN, result, save_model, scores

from mhla_hf.nn.settings import MHLASettings
from mhla_hf.share.card import check_card, write_card
from mhla_hf.share.card_sections import cache_ratio, crossover


@pytest.fixture
def folders(tmp_path):
    """An MHLA model with all its files, its teacher (which states a licence) and two yardsticks."""
    mine = save_model(tmp_path / "mhla", scores(1.9251, 0.41))
    (mine / "train.json").write_text(json.dumps(TRAIN))
    (mine / "speed.json").write_text(json.dumps(SPEED))
    return mine, {
        "teacher": save_model(
            tmp_path / "teacher", scores(1.9003, 0.87), readme="---\nlicense: afl-3.0\n---\n# Teacher\n"
        ),
        "hybrid": save_model(tmp_path / "hybrid", scores(1.9049, 0.86)),
        "plain linear": save_model(tmp_path / "linear", scores(1.9412, 0.22)),
    }


@pytest.fixture
def card(folders):
    mine, compared = folders
    path = write_card(
        mine,
        name="somebody/toy-mhla",
        compared=compared,
        language=["en"],
        about="A demo.",
        limits=["It knows one book."],
    )
    return path.read_text()


def test_recovery_table_in_the_order_of_the_question(card):
    assert "| task | metric | shots | samples | teacher | MHLA | hybrid | plain linear |" in card
    assert "| topics_bpb | bits_per_byte ↓ | 0 | 200 | 1.9003 | 1.9251 | 1.9049 | 1.9412 |" in card
    assert "0.8700 ± 0.0200 | 0.4100 ± 0.0200 | 0.8600 ± 0.0200 | 0.2200 ± 0.0200" in card
    assert "| topics_bpb | bits_per_byte | +1.31 % | +0.24 % | +2.15 % |" in card
    # sqrt(0.02² + (0.02 * 0.41 / 0.87)²) / 0.87
    assert "| topics_recall | acc | -52.87 % ± 2.54 % | -1.15 % ± 3.23 % | -74.71 % ± 2.37 % |" in card


def test_limits_say_what_was_lost(card):
    lost = re.search(
        r"Worse than the teacher, by more than two standard errors where these are known: (.*)\.", card
    ).group(1)
    assert "acc of topics_recall (0.8700 → 0.4100)" in lost and "bits_per_byte of topics_bpb" in lost
    assert "cloze" not in lost
    assert "- It knows one book." in card and "Trained on sequences of 512 tokens" in card
    assert "Recall of single facts" not in card


def test_settings_recipe_and_speed(card):
    assert "2 of the 4 layers" in card and "2 kept softmax" in card
    assert "| MHLA layers | 1, 2 |" in card and "| softmax layers | 0, 3 |" in card
    assert "| block size | 64 |" in card and "| num blocks | 32 |" in card and "| feature map | hedgehog |" in card
    assert "| match | logits | all | 300 | 8 | 512 | 614400 | 0.001 (0.003) | 83 | 1.25 → 0.0625 |" in card
    assert "In all 1843200 tokens in 250 s, seed 3" in card
    assert "topics.txt" in card and "/somewhere" not in card
    assert "Measured on Some CPU, 2 cores, 1 thread; seed 5; torch 2.13.0; `mhla-hf demo --quick`" in card
    assert card.index("| forward | 512 | 8 | 10 | 0.80 |") < card.index("| forward | 2048 | 90 | 30 | 3.00 |")
    assert "- forward: softmax attention is faster at 512; MHLA from 2048 on." in card
    assert "- decode: softmax attention is faster at every length measured, up to 512." in card


@pytest.mark.parametrize(
    ("softmax", "sentence"),
    [
        ((1, 1, 1), "softmax attention is faster at every length measured, up to 1024."),
        ((3, 3, 3), "MHLA is faster at every length measured, from 256 on."),
        ((1, 3, 1), "softmax attention is faster at 256, 1024, the longest length measured."),
        ((3, 1, 3), "softmax attention is faster at 512; MHLA from 1024 on."),
    ],
)
def test_who_is_faster_where(softmax, sentence):
    """No length is given to the one that was slower there."""
    rows = [{"length": 256 << i, "softmax_ms": ms, "mhla_ms": 2} for i, ms in enumerate(softmax)]
    assert crossover(rows) == sentence


def test_a_stage_with_one_entry_has_one_loss(folders):
    mine, compared = folders
    stages = [{**TRAIN["stages"][0], "first_loss": 0.4239, "last_loss": 0.4239}, TRAIN["stages"][1]]
    (mine / "train.json").write_text(json.dumps({**TRAIN, "stages": stages}))
    text = write_card(mine, name="toy", compared=compared).read_text()
    assert "0.4239 on average |" in text and "1.25 → 0.0625 |" in text and "0.4239 →" not in text


def test_the_cache_is_said_to_grow(card):
    """A block's summary is 2 x 32 x 33 numbers of fp32 here, and the keys and values of its 64 tokens are 64 x 2 x 32."""
    assert "the cache grows with the text" in card and "at least 0.52 times the bytes of softmax's keys" in card
    llama = {"hidden_size": 2048, "num_attention_heads": 32, "dtype": "bfloat16", "mhla": MHLASettings().to_dict()}
    assert cache_ratio(llama) == 4 * 2 * 64 * 65 / (2 * 64 * 2 * 64)


def test_loading_licence_citation(card):
    assert (
        'name = "somebody/toy-mhla"' in card
        and "AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)" in card
    )
    assert "AutoTokenizer.from_pretrained(name, trust_remote_code=False)" in card  # asks nothing, runs nothing
    assert "Weights: afl-3.0, that of the base model." in card
    assert "arXiv:2601.07832" in card and "https://arxiv.org/abs/2601.07832" in card


def test_front_matter_is_model_card_data(card):
    data = ModelCard(card).data
    assert data.license == "afl-3.0" and data.library_name == "transformers" and data.language == ["en"]
    index = data.to_dict()["model-index"][0]
    assert index["name"] == "toy-mhla"
    assert [entry["dataset"]["config"] for entry in index["results"]] == ["topics_bpb", "topics_cloze", "topics_recall"]
    assert [len(entry["metrics"]) for entry in index["results"]] == [1, 1, 1]
    assert index["results"][0]["metrics"][0]["value"] == 1.9251
    assert "base_model" not in data.to_dict()


def test_each_number_says_how_it_was_measured(card):
    measured = card[card.index("## How the scores were measured") :]
    for text in ("Some CPU, 2 cores, 1 thread", "seed 1234", "lm_eval 0.4.13", "commit deadbeef", "`mhla-hf evaluate"):
        assert text in measured


def test_a_person_may_repeat_what_was_measured_and_count(folders):
    about = "Made of Llama-3.2 with torch 2.13.0 in 2 steps; bits per byte are 1.9251, +1.31 percent, see 2601.07832."
    write_card(folders[0], name="toy", compared=folders[1], about=about, limits=["It knows 1 book of 64 pages."])
    assert about in (folders[0] / "README.md").read_text()
    check_card(folders[0])


def test_published_base_is_named_as_finetune(folders):
    mine, compared = folders
    data = ModelCard.load(write_card(mine, name="toy", base_model="somebody/base", compared=compared)).data
    assert data.base_model == "somebody/base" and data.base_model_relation == "finetune"


def test_scores_that_are_not_finite_or_partial_stay_out_of_the_index(tmp_path):
    records = [*scores(1.9, 0.5), result("a", "ppl", None, None, False), result("b", "acc", 0.5, None, True, limit=5)]
    mine = save_model(tmp_path / "mhla", records)
    text = write_card(mine, name="toy", license="mit").read_text()
    names = [r["dataset"]["name"] for r in ModelCard(text).data.to_dict()["model-index"][0]["results"]]
    assert names == ["topics_bpb", "topics_cloze", "topics_recall"]
    assert "| a | ppl ↓ | 0 | 200 | not finite |" in text and "200 (limit)" in text
    assert "Scores marked (limit)" in text


def test_from_scratch_without_train_and_speed_says_so(tmp_path):
    mine = save_model(tmp_path / "mhla", [result("topics_cloze", "acc", 0.5, 0.1, True)], layers=(0, 1, 2, 3))
    text = write_card(mine, name="toy", license="mit").read_text()
    assert "trained from scratch" in text and "## Scores" in text and "| softmax layers | none |" in text
    assert "Speed was not measured." in text and "Recall of single facts from far back was not measured." in text
    assert "How the model was trained is not recorded here." in text and "## Speed" not in text
    check_card(mine)


def test_card_is_proven_from_the_folder_alone(folders, card, tmp_path):
    mine, compared = folders
    for place in compared.values():
        place.rename(tmp_path / f"gone_{place.name}")
    check_card(mine)
    assert sorted(path.name for path in mine.iterdir()) == sorted(
        ["README.md", "card.json", "config.json", "model.safetensors", "results.json", "speed.json", "train.json"]
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("1.9251 |", "1.9151 |", r"README\.md:\d+: shows 1\.9151 where the files say 1\.9251"),
        ("value: 1.9251", "value: 1.0251", r"shows 1\.0251 where the files say 1\.9251"),
        ("+1.31 %", "+0.31 %", r"shows 0\.31 where the files say 1\.31"),
        ("| block size | 64 |", "| block size | 32 |", "shows 32 where the files say 64"),
        ("MHLA from 2048 on", "MHLA from 1024 on", "shows 1024 where the files say 2048"),
        ("license: afl-3.0", "license: mit", "is 'license: mit' where the files say 'license: afl-3.0'"),
        ("knows one book", "knows all books", "where the files say '- It knows one book.'"),
    ],
)
def test_changed_card_is_named(folders, card, before, after, message):
    path = folders[0] / "README.md"
    assert before in card
    path.write_text(card.replace(before, after, 1))
    with pytest.raises(ValueError, match=message):
        check_card(folders[0])


def test_changed_scores_are_noticed(folders, card):
    mine = folders[0]
    content = json.loads((mine / "results.json").read_text())
    content["results"][0]["value"] = 1.5
    (mine / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"shows 1\.9251 where the files say 1\.5"):
        check_card(mine)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BAD = {
    "no folder": (lambda m, c: m.rename(m.with_name("moved")), {}, "folder must be a model's directory"),
    "no config": (lambda m, c: (m / "config.json").unlink(), {}, "holds no config.json"),
    "config is no JSON": (lambda m, c: (m / "config.json").write_text("{"), {}, r"config\.json is not JSON"),
    "config is a list": (lambda m, c: (m / "config.json").write_text("[]"), {}, "holds a list, expected an object"),
    "softmax model": (lambda m, c: edit(m / "config.json", lambda j: j.pop("mhla")), {}, 'has no "mhla" settings'),
    "unknown setting": (
        lambda m, c: edit(m / "config.json", lambda j: j["mhla"].update(colour=1)),
        {},
        "unknown setting 'colour'",
    ),
    "newer settings": (
        lambda m, c: edit(m / "config.json", lambda j: j["mhla"].update(format_version=9)),
        {},
        "format_version: got 9",
    ),
    "no results": (lambda m, c: (m / "results.json").unlink(), {}, "holds no results.json with scores"),
    "damaged results": (lambda m, c: (m / "results.json").write_text("x"), {}, "is not a results file"),
    "other weights": (
        lambda m, c: save_file({"weight": torch.zeros(2)}, m / "model.safetensors"),
        {},
        "scored with other weights",
    ),
    "teacher without scores": (lambda m, c: (c["teacher"] / "results.json").unlink(), {}, "holds no results.json"),
    "teacher's other weights": (
        lambda m, c: save_file({"weight": torch.zeros(2)}, c["teacher"] / "model.safetensors"),
        {},
        "scored with other weights",
    ),
    "no such teacher": (
        lambda m, c: c.update(teacher=m / "none"),
        {},
        r"compared\['teacher'\] must be a model's directory",
    ),
    "label taken": (lambda m, c: c.update(MHLA=c["hybrid"]), {}, "label must be plain words other than 'MHLA'"),
    "label breaks the table": (lambda m, c: c.update({"a|b": c["hybrid"]}), {}, r"label must be plain words .* 'a\|b'"),
    "no licence": (
        lambda m, c: (c["teacher"] / "README.md").write_text("# Teacher\n"),
        {},
        "license is missing: .*README.md states no licence",
    ),
    "no card at the base": (
        lambda m, c: (c["teacher"] / "README.md").unlink(),
        {},
        r"license is missing: .*README.md \(no such file\) states no licence",
    ),
    "no base and none given": (lambda m, c: c.clear(), {}, "license is missing: no base states a licence"),
    "base out of reach": (
        lambda m, c: c.clear(),
        {"base_model": "somebody/base"},
        r"the card of somebody/base \(not readable: \w+\) states no licence",
    ),
    "another licence": (lambda m, c: None, {"license": "mit"}, "license 'mit' is not what .* states: 'afl-3.0'"),
    "licence in prose": (lambda m, c: c.clear(), {"license": "Free for all"}, "expected an identifier of the Hub"),
    "licence the Hub does not know": (
        lambda m, c: c.clear(),
        {"license": "psf-2.0"},
        "license is 'psf-2.0', expected an",
    ),
    "unknown licence": (lambda m, c: c.clear(), {"license": "unknown"}, "'unknown' is no licence"),
    "other licence": (lambda m, c: c.clear(), {"license": "other"}, "'other' needs license_name"),
    "broken base card": (
        lambda m, c: (c["teacher"] / "README.md").write_text("---\nlicense: [\n---\n"),
        {},
        "front matter that cannot be read",
    ),
    "name": (lambda m, c: None, {"name": "../toy"}, "name must be a Hub id"),
    "base is no id": (lambda m, c: None, {"base_model": "a/b/c"}, "base_model must be a Hub id"),
    "base is a path": (lambda m, c: None, {"base_model": "tests"}, "base_model 'tests' is a local path"),
    "limits is a text": (lambda m, c: None, {"limits": [""]}, "limits must be a list of texts"),
    "an unproven number": (
        lambda m, c: None,
        {"about": "Scores 99.9 on MMLU."},
        "about and limits: '99.9' is no number of this model's files",
    ),
    "an unproven change": (lambda m, c: None, {"about": "Change: -17.67 %, no more."}, "'17.67 %' is no number"),
    "an unproven percentage": (lambda m, c: None, {"limits": ["Right in 64 % of cases."]}, "'64 %' is no number"),
    "an unproven percentage in words": (lambda m, c: None, {"limits": ["64 percent are right."]}, "'64 percent' is no"),
    "about is no text": (lambda m, c: None, {"about": 3}, "about must be a text, got 3"),
    "train without seed": (
        lambda m, c: edit(m / "train.json", lambda j: j.pop("seed")),
        {},
        "train.json has no 'seed'",
    ),
    "train with a broken stage": (
        lambda m, c: edit(m / "train.json", lambda j: j["stages"][1].update(last_loss=None)),
        {},
        "every stage needs last_loss as a number",
    ),
    "speed without hardware": (
        lambda m, c: edit(m / "speed.json", lambda j: j.pop("hardware")),
        {},
        'must say "hardware"',
    ),
    "speed without a command": (
        lambda m, c: edit(m / "speed.json", lambda j: j.pop("command")),
        {},
        'must say "seed" .* and "command"',
    ),
    "speed without a seed": (
        lambda m, c: edit(m / "speed.json", lambda j: j.update(seed=None)),
        {},
        'must say "seed" .* and "command"',
    ),
    "a score without a seed": (
        lambda m, c: edit(m / "results.json", lambda j: j["results"][0].update(seed=None)),
        {},
        "its own score of topics_bpb does not say how it was measured",
    ),
    "a teacher's score without a command": (
        lambda m, c: edit(c["teacher"] / "results.json", lambda j: j["results"][1].update(command="")),
        {},
        "teacher score of topics_cloze does not say how it was measured",
    ),
    "speed without rows": (
        lambda m, c: edit(m / "speed.json", lambda j: j.update(rows=[])),
        {},
        'measurements in "rows"',
    ),
    "speed of nothing": (
        lambda m, c: edit(m / "speed.json", lambda j: j["rows"][0].update(mhla_ms=0)),
        {},
        "mhla_ms of 'forward' at 2048 must be milliseconds above 0, got 0",
    ),
    "speed without length": (
        lambda m, c: edit(m / "speed.json", lambda j: j["rows"][0].update(length="long")),
        {},
        'every row needs "what"',
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(folders, case, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    mine, compared = folders
    breaks, arguments, message = BAD[case]
    breaks(mine, compared)
    with pytest.raises(ValueError, match=message) as caught:
        write_card(mine, **{"name": "toy", "compared": compared, **arguments})
    assert "\n" not in str(caught.value)
    assert not (mine / "README.md").exists() and not (mine / "card.json").exists()


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda m: (m / "README.md").unlink(), r"README\.md does not exist"),
        (lambda m: (m / "card.json").unlink(), r"card\.json does not exist"),
        (lambda m: edit(m / "card.json", lambda j: j.update(format_version=7)), "must have format_version 1"),
        (lambda m: edit(m / "card.json", lambda j: j.update(colour=7)), "'colour' is unknown or missing"),
        (lambda m: edit(m / "card.json", lambda j: j["compared"]["teacher"][0].pop("seed")), "'seed' is missing"),
        (lambda m: (m / "train.json").unlink(), "where the files say"),
        (
            lambda m: (m / "README.md").write_text((m / "README.md").read_text().split("\n## Known failures")[0]),
            "lines where the files give",
        ),
    ],
)
def test_check_refuses(folders, card, breaks, message):
    breaks(folders[0])
    with pytest.raises(ValueError, match=message) as caught:
        check_card(folders[0])
    assert "\n" not in str(caught.value)
