"""What cannot be on a card is refused in one sentence, and nothing is written."""

import json

import pytest
import torch
from safetensors.torch import save_file
from small_cards import SPEED, TRAIN, save_model, scores

from mhla_hf.share.card import check_card, write_card


@pytest.fixture
def folders(tmp_path):
    mine = save_model(tmp_path / "mhla", scores(1.9251, 0.41))
    (mine / "train.json").write_text(json.dumps(TRAIN))
    (mine / "speed.json").write_text(json.dumps(SPEED))
    readme = "---\nlicense: afl-3.0\n---\n# Teacher\n"
    return mine, {"teacher": save_model(tmp_path / "teacher", scores(1.9003, 0.87), readme=readme)}


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def other_weights(folder):
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")


def changed(file, change, of="mine"):
    return lambda mine, compared: edit((mine if of == "mine" else compared["teacher"]) / file, change)


def as_is(mine, compared):
    pass


FILES = {
    "no folder": (lambda m, c: m.rename(m.with_name("moved")), "folder must be a model's directory"),
    "no config": (lambda m, c: (m / "config.json").unlink(), "holds no config.json"),
    "config is no JSON": (lambda m, c: (m / "config.json").write_text("{"), r"config\.json is not JSON"),
    "config is a list": (lambda m, c: (m / "config.json").write_text("[]"), "holds a list, expected an object"),
    "softmax model": (changed("config.json", lambda j: j.pop("mhla")), 'has no "mhla" settings'),
    "unknown setting": (changed("config.json", lambda j: j["mhla"].update(colour=1)), "unknown setting 'colour'"),
    "newer settings": (changed("config.json", lambda j: j["mhla"].update(format_version=9)), "format_version: got 9"),
    "no results": (lambda m, c: (m / "results.json").unlink(), "holds no results.json with scores"),
    "damaged results": (lambda m, c: (m / "results.json").write_text("x"), "is not a results file"),
    "other weights": (lambda m, c: other_weights(m), "scored with other weights"),
    "teacher without scores": (lambda m, c: (c["teacher"] / "results.json").unlink(), "holds no results.json"),
    "teacher's other weights": (lambda m, c: other_weights(c["teacher"]), "scored with other weights"),
    "no such teacher": (lambda m, c: c.update(teacher=m / "no"), r"compared\['teacher'\] must be a model's directory"),
    "label taken": (lambda m, c: c.update(MHLA=c["teacher"]), "label must be plain words other than 'MHLA'"),
    "label breaks the table": (lambda m, c: c.update({"a|b": c["teacher"]}), r"label must be plain words .* 'a\|b'"),
    "no license": (lambda m, c: (c["teacher"] / "README.md").write_text("# A\n"), "license is missing: .*README.md states"),
    "no card at the base": (lambda m, c: (c["teacher"] / "README.md").unlink(), r"README.md \(not readable: FileNotFound"),
    "no base and none given": (lambda m, c: c.clear(), "license is missing: no base states a license"),
    "broken base card": (
        lambda m, c: (c["teacher"] / "README.md").write_text("---\nlicense: [\n---\n"), "front matter that cannot be read"),
    "train without seed": (changed("train.json", lambda j: j.pop("seed")), "train: .*'seed'"),
    "train without tokens": (changed("train.json", lambda j: j.pop("tokens")), "train: the run and each of its stages must"),
    "a stage without a loss": (
        changed("train.json", lambda j: j["stages"][1].update(last_loss=None)), r"stages\[1\]: Field 'last_loss'"),
    "speed without hardware": (changed("speed.json", lambda j: j.pop("hardware")), "speed: .*'hardware'"),
    "speed without a command": (changed("speed.json", lambda j: j.pop("command")), "speed: .*'command'"),
    "speed without a seed": (changed("speed.json", lambda j: j.update(seed=None)), "speed: Field 'seed'"),
    "speed without rows": (changed("speed.json", lambda j: j.update(rows=[])), "speed: rows and command must not be"),
    "speed of nothing": (
        changed("speed.json", lambda j: j["rows"][0].update(mhla_ms=0)), "mhla_ms of 'forward' at 2048 must be above 0"),
    "speed without length": (changed("speed.json", lambda j: j["rows"][0].update(length="a")), r"rows\[0\]: Field 'length'"),
    "a score without a seed": (
        changed("results.json", lambda j: j["results"][0].update(seed=None)), "its own score of topics_bpb does not say"),
    "a teacher's score without a command": (
        changed("results.json", lambda j: j["results"][1].update(command=""), "teacher"),
        "teacher score of topics_cloze does not say how it was measured"),
}  # fmt: skip
ARGUMENTS = {
    "base out of reach": (
        {"base_model": "a/base", "compared": {}},
        r"the card of a/base \(not readable: \w+\) states no",
    ),
    "another license": ({"license": "mit"}, "license 'mit' is not what .* states: 'afl-3.0'"),
    "unknown license": ({"license": "unknown", "compared": {}}, "'unknown' is no license"),
    "other license": ({"license": "other", "compared": {}}, "'other' needs license_name"),
    "name": ({"name": "../toy"}, "name must be a Hub id"),
    "base is no id": ({"base_model": "a/b/c"}, "base_model must be a Hub id"),
    "base is a path": ({"base_model": "tests"}, "base_model 'tests' is a local path"),
    "limits hold a number": ({"limits": [3]}, "card: Invalid item at index 0 in list 'limits'"),
    "about is no text": ({"about": 3}, "card: Field 'about' expected str, got int"),
}
BAD = {name: (breaks, {}, says) for name, (breaks, says) in FILES.items()}
BAD |= {name: (as_is, arguments, says) for name, (arguments, says) in ARGUMENTS.items()}


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


KEPT = {
    "no card": (lambda m: (m / "README.md").unlink(), r"README\.md does not exist"),
    "no person": (lambda m: (m / "card.json").unlink(), r"card\.json does not exist"),
    "newer": (lambda m: edit(m / "card.json", lambda j: j.update(format_version=7)), "must have format_version 1"),
    "unknown key": (lambda m: edit(m / "card.json", lambda j: j.update(colour=7)), "unexpected .* 'colour'"),
    "half a score": (
        lambda m: edit(m / "card.json", lambda j: j["compared"]["teacher"][0].pop("seed")), "'seed' is missing"),
    "other scores": (
        lambda m: edit(m / "results.json", lambda j: j["results"][0].update(value=1.7)), "is not what the files"),
    "no training": (lambda m: (m / "train.json").unlink(), "is not what the files"),
    "half a card": (
        lambda m: (m / "README.md").write_text((m / "README.md").read_text().split("\n## Known")[0]), "not what the files"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_check_refuses(folders, case):
    write_card(folders[0], name="toy", compared=folders[1])
    breaks, message = KEPT[case]
    breaks(folders[0])
    with pytest.raises(ValueError, match=message) as caught:
        check_card(folders[0])
    assert "\n" not in str(caught.value)
