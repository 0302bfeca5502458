"""The repository's own cards: each is what its results file says, number by number, and says how it was measured.

Run: pytest tests/share/test_card_shelf.py
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from small_cards import SPEED, TRAIN, result, save_model, scores

from mhla_hf.cli import main
from mhla_hf.share.card import write_card
from mhla_hf.share.card_shelf import check, render, shelve, shelved, shelved_facts
from mhla_hf.share.folder_checks import check_front_matter
from mhla_hf.share.leaks import check_leaks

SHELF = Path(__file__).parents[2] / "model_cards"
TAGS = {  # what the Hub is told, and how many rows of the card's tables hold a number at least
    "demo": ("transformers", "text-generation", 40),
    "digits_dit": ("diffusers", "unconditional-image-generation", 16),
    "digits_vit": ("transformers", "image-classification", 12),
}


def test_every_model_of_the_repository_is_there():
    assert shelved(SHELF) == sorted(TAGS)


@pytest.mark.parametrize("name", shelved(SHELF))
def test_every_card_is_what_was_measured(name):
    check(SHELF, name)
    text = (SHELF / f"{name}.md").read_text(encoding="utf-8")
    check_front_matter(text, name)
    facts = shelved_facts(SHELF, name)
    if facts.speed is None:
        assert "- Speed was not measured." in text and "## Speed" not in text and name != "demo"
    else:
        timed = text[text.index("## Speed and memory") : text.index("### Time")]
        speed = facts.speed
        for said in (speed["hardware"], f"seed {speed['seed']}", f"`{speed['command']}`", "torch 2."):
            assert said in timed
    trained = text[text.index("## Recipe") : text.index("## How to load")]
    train = facts.train
    for said in (train["hardware"], f"seed {train['seed']}", train["versions"]["torch"], f"`{train['command']}`"):
        assert said in trained
    told = text[text.index("## How the scores were measured") :]
    for record in [*facts.records, *(record for records in facts.compared.values() for record in records)]:
        for said in (
            record.hardware,
            f"seed {record.seed}",
            f"`{record.command}`",
            record.versions["torch"],
            record.commit,
        ):
            assert said in told, (record.task, said)
        assert f"{record.value:.4f}" in text
        assert "+changed" not in record.commit or any("+changed" in limit for limit in facts.limits), record.task


@pytest.mark.parametrize("name", shelved(SHELF))
def test_what_several_seeds_gave_says_how_it_was_measured(name):
    measured = json.loads((SHELF / "results" / f"{name}.json").read_text(encoding="utf-8"))
    over = measured["over_seeds"]
    assert over["hardware"] and over["versions"]["torch"] and over["command"] and over["date"] and over["commit"]
    assert [int(seed) for seed in over["seeds"]] == [0, 1, 2]
    assert measured["train"]["command"].split()[:2] == over["command"].split()[:2]
    for path in (SHELF / f"{name}.yaml", SHELF / f"{name}.md", SHELF / "results" / f"{name}.json"):
        check_leaks(path.name, path.read_bytes())


def scores_of(name):
    """label -> metric -> value of seed 0, and what several seeds gave."""
    facts = shelved_facts(SHELF, name)
    scores = {"MHLA": facts.records, **facts.compared}
    over = json.loads((SHELF / "results" / f"{name}.json").read_text(encoding="utf-8"))["over_seeds"]
    return {label: {record.metric: record.value for record in records} for label, records in scores.items()}, over


def test_the_classifiers_scores_are_seed_0_of_all_seeds():
    """By two ways: `mhla_hf.evaluate` on pictures in files, and the training's own judge on tensors."""
    scores, over = scores_of("digits_vit")
    students = {row["attention"]: row["distilled"] for row in over["students"] if row["seed"] == 0}
    assert {label: found["acc"] for label, found in scores.items()} == {"teacher": over["teacher"], **students}


def test_the_digit_painters_scores_are_seed_0_of_all_seeds():
    scores, over = scores_of("digits_dit")
    names = {"MHLA": "MHLA, distilled on the digits", "teacher": "softmax"}
    for label, found in scores.items():
        row = over["models"][names.get(label, label.removesuffix(", from scratch"))][0]
        assert found["Fréchet distance (digits judge)"] == row["frechet"] and found["held-out loss"] == row["loss"]
        assert found["accuracy (digits judge)"] == row["accuracy"] / 100
    assert len(scores) == len(over["models"]) == 6


@pytest.mark.parametrize("name", shelved(SHELF))
def test_the_hub_takes_every_card(hub, name):
    """Over HTTP, by the real client; the scores come back as they were measured."""
    facts = shelved_facts(SHELF, name)
    sent = ModelCard((SHELF / f"{name}.md").read_text(encoding="utf-8"))
    sent.validate()
    assert hub.sent("POST", "/api/validate-yaml") == 1
    shown = {(score.dataset_type, score.metric_type): score.metric_value for score in sent.data.eval_results}
    assert shown and shown.items() <= {(record.task, record.metric): record.value for record in facts.records}.items()
    assert (sent.data.library_name, sent.data.pipeline_tag) == TAGS[name][:2]


@pytest.mark.parametrize("name", shelved(SHELF))
def test_a_wrong_number_in_any_table_is_found(name, tmp_path):
    shutil.copytree(SHELF, tmp_path / "cards")
    path = tmp_path / "cards" / f"{name}.md"
    lines = path.read_text(encoding="utf-8").split("\n")
    tables = [number for number, line in enumerate(lines) if re.match(r"\| .*\d", line)]
    assert len(tables) >= TAGS[name][2]
    for number in tables:
        last = re.findall(r"\d+", lines[number])[-1]
        wrong = lines[number][::-1].replace(last[::-1], str(int(last) + 1)[::-1], 1)[::-1]
        path.write_text("\n".join([*lines[:number], wrong, *lines[number + 1 :]]), encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{name}\.md:{number + 1}: shows "):
            check(tmp_path / "cards", name)


@pytest.fixture
def shelf(tmp_path):
    """A shelf with one card, from a model's folder with all its files."""
    depths = [result("topics_recall", f"acc_back_{back}", 0.5, 0.1, True, samples=50) for back in (64, 512)]
    mine = save_model(tmp_path / "mhla", [*scores(1.9251, 0.41), *depths])
    (mine / "train.json").write_text(json.dumps(TRAIN))
    rows = [{**row, "softmax_mib": 8.0, "mhla_mib": 2.0} for row in SPEED["rows"]]
    (mine / "speed.json").write_text(json.dumps({**SPEED, "rows": rows}))
    teacher = [*scores(1.9003, 0.87), *depths[:1], result("topics_generation", "exact_match", 0.75, 0.05, True)]
    compared = {
        "teacher": save_model(tmp_path / "teacher", teacher),
        "plain linear": save_model(tmp_path / "linear", depths),
    }
    write_card(mine, name="me/toy", license="mit", compared=compared)
    shelve(mine, tmp_path / "cards", "toy", over_seeds={"seeds": [0, 1]})
    return tmp_path / "cards"


def test_folder_and_shelf_give_the_same_card(shelf):
    assert (shelf / "toy.md").read_text() == (shelf.parent / "mhla" / "README.md").read_text()
    assert json.loads((shelf / "results" / "toy.json").read_text())["over_seeds"] == {"seeds": [0, 1]}
    assert "results" not in yaml.safe_load((shelf / "toy.yaml").read_text())
    assert shelved(shelf) == ["toy"]
    check(shelf, "toy")


def test_the_recovery_card_shows_recall_by_depth_generation_memory_and_what_it_cost(shelf):
    text = (shelf / "toy.md").read_text()
    assert "| task | metric | tokens back | samples | teacher | MHLA | plain linear |" in text
    assert "| topics_recall | acc | 64 | 50 | 0.5000 ± 0.1000 | 0.5000 ± 0.1000 | 0.5000 ± 0.1000 |" in text
    assert "| topics_recall | acc | 512 | 50 |  | 0.5000 ± 0.1000 | 0.5000 ± 0.1000 |" in text
    assert text.index("| topics_recall | acc | 64") < text.index("| topics_recall | acc | 512")
    assert "### Generation\n\n| task" in text and "| topics_generation | exact_match ↑ | 0 | 200 | 0.7500" in text
    assert "| training | 1,843,200 tokens in 0.07 hours on Some CPU, 2 cores, 1 thread |" in text
    assert "| forward, memory | MHLA is smaller at every length measured, from 512 on. |" in text
    assert "| forward | 512 | 8 | 2 | 4.00 |" in text and "| softmax layers | 0, 3 |" in text
    assert "acc_back" not in text.split("---")[1]


def test_what_a_person_writes_is_rendered_and_what_was_measured_is_proven(shelf):
    person = yaml.safe_load((shelf / "toy.yaml").read_text())
    (shelf / "toy.yaml").write_text(yaml.dump({**person, "limits": ["MMLU 88.8"]}))
    with pytest.raises(ValueError, match=r"about and limits: '88\.8' is no number of this model's files"):
        render(shelf, "toy")
    (shelf / "toy.yaml").write_text(yaml.dump({**person, "limits": ["It is a toy."]}))
    with pytest.raises(ValueError, match="It is a toy"):
        check(shelf, "toy")
    render(shelf, "toy")
    check(shelf, "toy")
    path = shelf / "results" / "toy.json"
    content = json.loads(path.read_text())
    content["compared"]["teacher"][0]["value"] = 1.8
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"shows 1\.9003 where the files say 1\.8"):
        check(shelf, "toy")


def spoil(shelf, how):
    path = shelf / "results" / "toy.json"
    content = json.loads(path.read_text())
    if how == "no person":
        (shelf / "toy.yaml").unlink()
    elif how == "no results":
        path.unlink()
    elif how == "an orphan":
        (shelf / "never_run.yaml").write_text("name: never/run\n")
    elif how == "person with numbers":
        (shelf / "toy.yaml").write_text(yaml.dump({**yaml.safe_load((shelf / "toy.yaml").read_text()), "acc": 0.9}))
    elif how == "no hardware":
        content["results"][0]["hardware"] = ""
    elif how == "null seed":
        content["results"][0]["seed"] = None
    elif how == "no speed command":
        content["speed"].pop("command")
    elif how == "no command":
        content["compared"]["teacher"][0]["command"] = ""
    elif how == "no seed":
        content["train"].pop("seed")
    elif how == "old format":
        content["format_version"] = 0
    elif how == "no card":
        (shelf / "toy.md").unlink()
    if how in ("no hardware", "null seed", "no speed command", "no command", "no seed", "old format"):
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no person", "toy.yaml"),
        ("no results", "has no .*results/toy.json: a card says what was measured"),
        ("an orphan", "never_run.yaml has no"),
        ("person with numbers", "must have exactly name, base_model"),
        ("no hardware", "its own score of topics_bpb does not say how it was measured"),
        ("null seed", "its own score of topics_bpb does not say how it was measured"),
        ("no speed command", 'must say "seed" .* and "command"'),
        ("no command", "teacher score of topics_bpb does not say"),
        ("no seed", "has no 'seed'"),
        ("old format", "must have format_version 1"),
        ("no card", "toy.md does not exist"),
    ],
)
def test_a_damaged_shelf_is_one_sentence(shelf, how, says):
    spoil(shelf, how)
    with pytest.raises(ValueError, match=says) as caught:
        for name in shelved(shelf):
            check(shelf, name)
    assert "\n" not in str(caught.value)


def test_the_command_renders_checks_writes_and_shelves(shelf, capsys, monkeypatch):
    monkeypatch.chdir(shelf.parent)
    assert main(["card", "cards"]) == 0 and main(["card", "cards", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == ["cards/toy.md: rendered", "cards/toy.md: every number proven"]
    options = ["--name", "me/other", "--license", "mit", "--compare", "teacher=teacher", "--limit", "Small."]
    assert main(["card", "mhla", *options]) == 0 and main(["card", "mhla", "--check"]) == 0
    assert "- Small." in Path("mhla/README.md").read_text()
    assert main(["card", "mhla", "--shelve", "cards/other"]) == 0
    assert shelved("cards") == ["other", "toy"]
    assert main(["card", "mhla"]) == 2 and "name is None" in capsys.readouterr().err
    assert main(["card", "mhla", "--name", "a", "--compare", "teacher"]) == 2
    assert "compare is 'teacher'; expected LABEL=DIR" in capsys.readouterr().err
