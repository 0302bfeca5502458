"""The model card: every number from a file, the same bytes when it is rendered again, true of what was measured here."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from small_cards import SPEED, TRAIN, result, save_model, scores

from mhla_hf.cli import main
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.share.card import (
    cache_ratio,
    check_card,
    crossover,
    plain_card,
    render_card,
    shelf_facts,
    shelf_names,
    shelve,
    write_card,
)
from mhla_hf.share.facts import Row
from mhla_hf.share.leaks import check_leaks

SHELF = Path(__file__).parents[2] / "model_cards"
TAGS = {  # what the Hub is told
    "demo": ("transformers", "text-generation"),
    "digits_dit": ("diffusers", "unconditional-image-generation"),
    "digits_vit": ("transformers", "image-classification"),
}


@pytest.fixture
def folders(tmp_path):
    """An MHLA model with all its files, its teacher (which states a license) and two yardsticks."""
    depths = [result("topics_recall", f"acc_back_{back}", 0.5, 0.1, True, samples=50) for back in (64, 512)]
    mine = save_model(tmp_path / "mhla", [*scores(1.9251, 0.41), *depths])
    (mine / "train.json").write_text(json.dumps(TRAIN))
    rows = [{**row, "softmax_mib": 8.0, "mhla_mib": 2.0} for row in SPEED["rows"]]
    (mine / "speed.json").write_text(json.dumps({**SPEED, "rows": rows}))
    readme = "---\nlicense: afl-3.0\n---\n# Teacher\n"
    taught = [*scores(1.9003, 0.87), *depths[:1], result("topics_generation", "exact_match", 0.75, 0.05, True)]
    return mine, {
        "teacher": save_model(tmp_path / "teacher", taught, readme=readme),
        "hybrid": save_model(tmp_path / "hybrid", scores(1.9049, 0.86)),
        "plain linear": save_model(tmp_path / "linear", scores(1.9412, 0.22)),
    }


@pytest.fixture
def card(folders):
    mine, compared = folders
    words = {"about": "A demo.", "limits": ["It knows one book."], "language": ["en"]}
    return write_card(mine, name="somebody/toy-mhla", compared=compared, **words).read_text()


SHOWN = (
    # scores, in the order of the question, and their change
    "| task | metric | shots | samples | teacher | MHLA | hybrid | plain linear |",
    "| topics_bpb | bits_per_byte ↓ | 0 | 200 | 1.9003 | 1.9251 | 1.9049 | 1.9412 |",
    "0.8700 ± 0.0200 | 0.4100 ± 0.0200 | 0.8600 ± 0.0200 | 0.2200 ± 0.0200",
    "| topics_bpb | bits_per_byte | +1.31 % | +0.24 % | +2.15 % |",
    # sqrt(0.02² + (0.02 * 0.41 / 0.87)²) / 0.87
    "| topics_recall | acc | -52.87 % ± 2.54 % | -1.15 % ± 3.23 % | -74.71 % ± 2.37 % |",
    "| topics_recall | acc | 64 | 50 | 0.5000 ± 0.1000 | 0.5000 ± 0.1000 |  |  |",
    "| topics_recall | acc | 512 | 50 |  | 0.5000 ± 0.1000 |  |  |",
    "| topics_generation | exact_match ↑ | 0 | 200 | 0.7500",
    # what was lost
    "- It knows one book.",
    "- Trained on sequences of 512 tokens",
    "- Generation was not measured.",
    "the cache grows with the text",
    "at least 0.52 times the bytes of softmax's keys",
    # settings, training, speed
    "2 of the 4 layers",
    "2 kept softmax",
    "| MHLA layers | 1, 2 |",
    "| softmax layers | 0, 3 |",
    "| training | 1,843,200 tokens in 0.07 hours on Some CPU, 2 cores, 1 thread |",
    "| block size | 64 |",
    "| feature map | hedgehog |",
    "| match | logits | all | 300 | 8 | 512 | 614400 | 0.001 (0.003) | 83 | 1.25 → 0.0625 |",
    "In all 1843200 tokens in 250 s, seed 3",
    "Data: topics.txt.",
    "Measured on Some CPU, 2 cores, 1 thread; seed 5; torch 2.13.0; `mhla-hf demo --quick`",
    "| forward | 512 | 8 | 10 | 0.80 |\n| forward | 2048 | 90 | 30 | 3.00 |",
    "| forward, time | softmax attention is faster at 512; MHLA from 2048 on. |",
    "| forward | 512 | 8 | 2 | 4.00 |",
    "| forward, memory | MHLA is smaller at every length measured, from 512 on. |",
    # how to load it, how it was measured, whose it is
    'AutoModelForCausalLM.from_pretrained("somebody/toy-mhla", trust_remote_code=True)',
    'AutoTokenizer.from_pretrained("somebody/toy-mhla", trust_remote_code=False)',  # asks nothing, runs nothing
    "- float32 on Some CPU, 2 cores, 1 thread; seed 1234; lm_eval 0.4.13, torch 2.13.0:\n  - teacher, topics_bpb",
    "commit deadbeef; 2026-01-01T00:00:00+00:00; `mhla-hf evaluate",
    "Weights: afl-3.0, that of the base model.",
    "arXiv:2601.07832",
)


def test_what_the_card_shows(card):
    assert [text for text in SHOWN if text not in card] == []
    lost = re.search(r"Worse than the teacher, by more than two standard errors .*?: (.*)\.", card)[1]
    assert "acc of topics_recall (0.8700 → 0.4100)" in lost and "bits_per_byte of topics_bpb" in lost
    assert "cloze" not in lost and "Recall of single facts" not in card and "/somewhere" not in card


def test_front_matter_is_model_card_data(card, folders):
    data = ModelCard(card).data
    assert data.license == "afl-3.0" and data.library_name == "transformers" and data.language == ["en"]
    index = data.to_dict()["model-index"][0]
    assert index["name"] == "toy-mhla" and "base_model" not in data.to_dict() and "acc_back" not in card.split("---")[1]
    assert [entry["dataset"]["config"] for entry in index["results"]] == ["topics_bpb", "topics_cloze", "topics_recall"]
    assert index["results"][0]["metrics"][0]["value"] == 1.9251
    mine, compared = folders
    data = ModelCard.load(write_card(mine, name="toy", base_model="somebody/base", compared=compared)).data
    assert data.base_model == "somebody/base" and data.base_model_relation == "finetune"


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
    assert crossover([Row("forward", 256 << i, ms, 2) for i, ms in enumerate(softmax)]) == sentence


def test_a_cache_in_half_precision():
    llama = {"hidden_size": 2048, "num_attention_heads": 32, "dtype": "bfloat16", "mhla": MHLASettings().to_dict()}
    assert cache_ratio(llama) == 4 * 2 * 64 * 65 / (2 * 64 * 2 * 64)


def test_a_stage_with_one_entry_has_one_loss(folders):
    mine, compared = folders
    stages = [{**TRAIN["stages"][0], "first_loss": 0.4239, "last_loss": 0.4239}, TRAIN["stages"][1]]
    (mine / "train.json").write_text(json.dumps({**TRAIN, "stages": stages}))
    text = write_card(mine, name="toy", compared=compared).read_text()
    assert "0.4239 on average |" in text and "1.25 → 0.0625 |" in text and "0.4239 →" not in text


def test_scores_that_are_not_finite_or_partial_stay_out_of_the_index(tmp_path):
    records = [*scores(1.9, 0.5), result("a", "ppl", None, None, False), result("b", "acc", 0.5, None, True, limit=5)]
    text = write_card(save_model(tmp_path / "mhla", records), name="toy", license="mit").read_text()
    names = [r["dataset"]["name"] for r in ModelCard(text).data.to_dict()["model-index"][0]["results"]]
    assert names == ["topics_bpb", "topics_cloze", "topics_recall"]
    assert "| a | ppl ↓ | 0 | 200 | not finite |" in text and "200 (limit)" in text and "Scores marked (limit)" in text


def test_from_scratch_without_train_and_speed_says_so(tmp_path):
    mine = save_model(tmp_path / "mhla", [result("topics_cloze", "acc", 0.5, 0.1, True)], layers=(0, 1, 2, 3))
    text = write_card(mine, name="toy", license="mit").read_text()
    assert "trained from scratch" in text and "## Scores" in text and "| softmax layers | none |" in text
    assert "Speed was not measured." in text and "Recall of single facts from far back was not measured." in text
    assert "How the model was trained is not recorded here." in text and "## Speed" not in text
    check_card(mine)


def test_a_card_without_a_number():
    text = plain_card("tester/wan", "pipeline", "WanPipeline", license="apache-2.0", base_model=None)
    assert "pipeline_tag: text-to-video" in text and "library_name: diffusers" in text and "license: apache-2.0" in text
    assert 'DiffusionPipeline.from_pretrained("tester/wan", trust_remote_code=True)' in text
    assert "a transformer class of diffusers itself would find its weights here" in text and "## License" not in text
    with pytest.raises(ValueError, match="license is missing"):
        plain_card("tester/wan", "pipeline", "WanPipeline", license=None)


CHANGED = {
    "a number": ("1.9251 |", "1.9151 |"),
    "a score of the front matter": ("value: 1.9251", "value: 1.0251"),
    "the license": ("license: afl-3.0", "license: mit"),
    "a sentence": ("knows one book", "knows all books"),
    "an end of line": ("# toy-mhla\n", "# toy-mhla\r\n"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_card_is_true_when_rendering_it_again_gives_the_same_bytes(folders, card, tmp_path, case):
    """From the folder alone."""
    mine, compared = folders
    for place in compared.values():
        place.rename(tmp_path / f"gone_{place.name}")
    check_card(mine)
    before, after = CHANGED[case]
    assert before in card
    (mine / "README.md").write_text(card.replace(before, after, 1), newline="")
    with pytest.raises(ValueError, match=r"README\.md:\d+ is not what the files say: ") as caught:
        check_card(mine)
    assert "\n" not in str(caught.value)


@pytest.fixture
def shelf(folders, card, tmp_path):
    shelve(folders[0], tmp_path / "cards", "toy", over_seeds={"seeds": [0, 1]})
    return tmp_path / "cards"


def test_folder_and_shelf_give_the_same_card(shelf, card):
    assert (shelf / "toy.md").read_text() == card == render_card(shelf_facts(shelf, "toy"))
    assert json.loads((shelf / "results" / "toy.json").read_text())["over_seeds"] == {"seeds": [0, 1]}
    assert "results" not in yaml.safe_load((shelf / "toy.yaml").read_text()) and shelf_names(shelf) == ["toy"]


SPOILED = {
    "no person": (lambda s: (s / "toy.yaml").unlink(), r"toy\.yaml"),
    "no results": (lambda s: (s / "results" / "toy.json").unlink(), "toy.json does not exist: a card says what was"),
    "an orphan": (lambda s: (s / "never_run.yaml").write_text("name: never/run\n"), "never_run.json does not exist"),
    "no card": (lambda s: (s / "toy.md").unlink(), r"toy\.md does not exist"),
    "person with numbers": (
        lambda s: (s / "toy.yaml").write_text((s / "toy.yaml").read_text() + "acc: 0.9\n"), r"toy\.yaml: .*'acc'"),
    "a number of the results": (
        lambda s: (s / "results" / "toy.json").write_text(
            (s / "results" / "toy.json").read_text().replace("1.9003", "1.8")), "is not what the files say: '.*1.8000"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_a_damaged_shelf_is_one_sentence(shelf, case, capsys):
    spoil, says = SPOILED[case]
    spoil(shelf)
    assert main(["card", str(shelf), "--check"]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said) and said.count("\n") == 1


def test_the_command_renders_checks_writes_and_shelves(shelf, capsys, monkeypatch):
    monkeypatch.chdir(shelf.parent)
    assert main(["card", "cards"]) == 0 and main(["card", "cards", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == ["cards/toy.md: rendered", "cards/toy.md: says what its files say"]
    options = ["--name", "me/other", "--license", "afl-3.0", "--compare", "teacher=teacher", "--limit", "Small."]
    assert main(["card", "mhla", *options]) == 0 and main(["card", "mhla", "--check"]) == 0
    assert "- Small." in Path("mhla/README.md").read_text()
    assert main(["card", "mhla", "--shelve", "cards/other"]) == 0 and shelf_names("cards") == ["other", "toy"]
    assert main(["card", "mhla"]) == 2 and "name is None" in capsys.readouterr().err
    assert main(["card", "mhla", "--name", "a", "--compare", "teacher"]) == 2
    assert "compare is 'teacher'; expected LABEL=DIR" in capsys.readouterr().err


@pytest.mark.parametrize("name", TAGS)
def test_the_cards_of_this_repository(hub, name):
    """The Hub takes each over HTTP, and each score says on what, with which versions and seed, and by which command."""
    assert shelf_names(SHELF) == sorted(TAGS)
    facts, text = shelf_facts(SHELF, name), (SHELF / f"{name}.md").read_text(encoding="utf-8")
    assert text == render_card(facts)
    for path in (SHELF / f"{name}.yaml", SHELF / f"{name}.md", SHELF / "results" / f"{name}.json"):
        check_leaks(path.name, path.read_bytes())
    card = ModelCard(text)
    card.validate()
    assert hub.sent("POST", "/api/validate-yaml") == 1
    shown = {(score.dataset_type, score.metric_type): score.metric_value for score in card.data.eval_results}
    assert shown and shown.items() <= {(record.task, record.metric): record.value for record in facts.records}.items()
    assert (card.data.library_name, card.data.pipeline_tag) == TAGS[name]
    for record in [*facts.records, *(record for records in facts.compared.values() for record in records)]:
        about = (record.hardware, f"seed {record.seed}", f"`{record.command}`", record.versions["torch"], record.commit)
        assert [said for said in (*about, f"{record.value:.4f}") if said not in text] == [], record.task
        assert "+changed" not in record.commit or any("+changed" in limit for limit in facts.person.limits), record.task


def scores_of(name):
    """label -> metric -> value of seed 0, and what several seeds gave."""
    facts = shelf_facts(SHELF, name)
    over = json.loads((SHELF / "results" / f"{name}.json").read_text(encoding="utf-8"))["over_seeds"]
    assert over["hardware"] and over["versions"]["torch"] and over["command"] and over["date"] and over["commit"]
    models = {"MHLA": facts.records, **facts.compared}
    return {label: {record.metric: record.value for record in records} for label, records in models.items()}, over


def test_the_digits_scores_are_seed_0_of_all_seeds():
    """The classifier's by two ways: `mhla_hf.evaluate` on pictures in files, and the training's own judge on tensors."""
    scores, over = scores_of("digits_vit")
    students = {row["attention"]: row["distilled"] for row in over["students"] if row["seed"] == 0}
    assert {label: found["acc"] for label, found in scores.items()} == {"teacher": over["teacher"], **students}
    scores, over = scores_of("digits_dit")
    names = {"MHLA": "MHLA, distilled on the digits", "teacher": "softmax"}
    for label, found in scores.items():
        row = over["models"][names.get(label, label.removesuffix(", from scratch"))][0]
        assert found["Fréchet distance (digits judge)"] == row["frechet"] and found["held-out loss"] == row["loss"]
        assert found["accuracy (digits judge)"] == row["accuracy"] / 100
    assert len(scores) == len(over["models"]) == 6
