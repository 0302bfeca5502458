"""The model card: every number from a file, the same bytes when it is rendered again, true of what was measured here."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from tools.small_models import refused
from tools.small_repos import TRAIN, result, save_scored, scores, times
from tools.small_scores import make_result
from tools.tiny_pipelines import wan_pipeline

import mhla_hf
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.cli.main import main
from mhla_hf.evaluation.records import Results
from mhla_hf.hub.card import check_card, render_shelf, shelve, write_card

SHELF = Path(__file__).parents[2] / "model_cards"
CARDS = ("digits_vit",)


@pytest.fixture
def folders(tmp_path):
    """An MHLA model with all its files, its teacher (which states a license) and two yardsticks."""
    depths = [result("topics_recall", f"acc_back_{back}", 0.5, 0.1, True, samples=50) for back in (64, 512)]
    mine = save_scored(tmp_path / "mhla", [*scores(1.9251, 0.41), *depths, *times(1)])
    (mine / "train.json").write_text(json.dumps(TRAIN))
    taught = [*scores(1.9003, 0.87), *depths[:1], result("topics_generation", "exact_match", 0.75, 0.05, True)]
    teacher = save_scored(tmp_path / "teacher", [*taught, *times(0)])
    (teacher / "README.md").write_text("---\nlicense: afl-3.0\n---\n# Teacher\n")
    return mine, {
        "teacher": teacher,
        "hybrid": save_scored(tmp_path / "hybrid", scores(1.9049, 0.86)),
        "plain linear": save_scored(tmp_path / "linear", scores(1.9412, 0.22)),
    }


@pytest.fixture
def card(folders):
    mine, compared = folders
    words = {"about": "A demo.", "limits": ["It knows one book."], "language": ["en"]}
    return write_card(mine, name="somebody/toy-mhla", compared=compared, **words).read_text()


SHOWN = (  # sqrt(0.02² + (0.02 * 0.41 / 0.87)²) / 0.87 in the third line
    "| topics_bpb | bits_per_byte ↓ | 200 | 1.900 | 1.925 | 1.905 | 1.941 |",
    "0.870 ± 0.020 | 0.410 ± 0.020 | 0.860 ± 0.020 | 0.220 ± 0.020",
    "bits_per_byte of topics_bpb +1.3 %; acc of topics_recall -52.9 % ± 2.5 %",
    "- plain linear: bits_per_byte of topics_bpb +2.2 %; acc of topics_recall -74.7 % ± 2.4 %",
    "| topics_recall | acc_back_64 ↑ | 50 | 0.500 ± 0.100 | 0.500 ± 0.100 |  |  |",
    "- It knows one book.",
    f"at least {4 * 2 * 32 * 33 / (2 * 64 * 2 * 32):.2f} times the bytes of softmax's keys",
    "cache grows with the text",
    "| match | logits | all | 300 | 8 | 512 | 614400 | 0.001 (0.003) | 83 | 1.25 → 0.0625 |",
    "| 512 | 8 | 10 | 2 | 3 | 8 | 2 |",
    "| forward, time | softmax attention is faster at 512; MHLA from 2048 on. |",
    'AutoTokenizer.from_pretrained("somebody/toy-mhla", trust_remote_code=False)',  # asks nothing, runs nothing
    "float32 on Some CPU, 2 cores, 1 thread; seed 1234; lm_eval 0.4.13, torch 2.13.0:",
    "Weights: afl-3.0, that of the base model.",
)


def test_what_the_card_and_its_front_matter_show(card, folders):
    assert [text for text in SHOWN if text not in card] == []
    lost = re.search(r"Worse than the teacher, by more than two standard errors .*?: (.*)\.", card)[1]
    assert "acc of topics_recall (0.8700 → 0.4100)" in lost and "bits_per_byte of topics_bpb" in lost
    assert "seed 5; torch" in card and card.count("seed 5") == 1, "how times were measured is said beside them alone"
    assert (
        "KV 0" not in card and "cloze" not in lost and "Recall of single facts" not in card and "/somewhere" not in card
    )
    data = ModelCard(card).data
    assert (data.license, data.library_name, data.language) == ("afl-3.0", "transformers", ["en"])
    index = data.to_dict()["model-index"][0]
    assert index["name"] == "toy-mhla" and "base_model" not in data.to_dict() and "acc_back" not in card.split("---")[1]
    assert [entry["dataset"]["config"] for entry in index["results"]] == ["topics_bpb", "topics_cloze", "topics_recall"]
    assert index["results"][0]["metrics"][0]["value"] == 1.9251
    written = write_card(folders[0], name="toy", base_model="somebody/base", compared=folders[1])
    data = ModelCard.load(written).data
    assert (data.base_model, data.base_model_relation) == ("somebody/base", "finetune")


SCORES = {"perplexity": 16.4, "recall": -0.24}
MEASURED = {"text": "notes.txt", "tokens": 31744, "seed": 0, "original": SCORES, "fitted": {"kl": 0.0488, **SCORES}}
MEASURED |= {"kept": {"kl": 0.0107, **SCORES}, "softmax_heads": {"7": [0, 2]}}
MEASURED |= {"head_scores": {"0": [0.0, 0.1, 0.0], "7": [0.9, 0.2, 0.8]}}
SIZES = {
    "16384": {"softmax": 2**22, "converted": 2**19},
    "4096": {"softmax": 2**20, "converted": 2**19},
}  # as JSON sorts
MEASURED |= {"context": 4096, "cache_bytes": SIZES}
CURVE = [
    {"heads": 6, "kl": 0.0, "recall": 0.0, "answers": 0.75, "bytes": {"16384": 2**22, "4096": 2**20}},
    {"heads": 2, "kl": 0.3, "recall": -0.1, "answers": 0.5, "bytes": {"16384": 2**19, "4096": 2**19}},
]
MEASURED["curve"] = [CURVE[0], CURVE[1] | {"salient": 128, "chosen": True}]


@pytest.mark.parametrize(
    "salient, words",
    [(0, ("none of those between: ", "drop all")), (128, ("of those between the 128 to which", "keep 128"))],
)
def test_what_decoding_keeps_and_which_heads_kept_softmax(salient, words, tmp_path):
    mine = save_scored(tmp_path / "mhla", scores(1.9, 0.5))
    windowed = {"windowed": True, "salient": salient}
    edit(mine / "config.json", lambda config: config.update(mhla_measured=MEASURED) or config["mhla"].update(windowed))
    (mine / "results.json").write_text((mine / "results.json").read_text().replace("files:", "tensors:"))
    text = write_card(mine, name="toy", license="mit").read_text()
    lines = ["| with softmax heads | 0.0107 | 16.40 | -0.240 |", "| 7 | 0, 2 |", "| 4,096 | 1.0 | 0.5 |"]
    lines += ["| 6 |  | 0.0000 | 1.000 | 0.750 | 1.0 | 4.0 |", "| \\*2 | 128 | 0.3000 | 0.905 | 0.500 | 0.5 | 0.5 |"]
    lines += ["![What other choices keep, by the size of the cache](curve.png)", *words]
    lines.append("layer 01234567\nKV 0  .      #\nKV 1  .      .\nKV 2  .      #\n")
    assert [line for line in lines if line not in text] == [] and "cache grows with the text" not in text
    assert (mine / "curve.png").stat().st_size > 10_000
    check_card(mine)


def test_from_scratch_with_scores_that_are_not_finite_or_partial_and_without_train_and_speed(tmp_path):
    """What is no whole number stays out of the index; what was not measured is said."""
    records = [result("a", "ppl", None, None, False), result("b", "acc", 0.5, None, True, limit=5)]
    records = [*scores(1.9, 0.5)[:2], *records]
    mine = save_scored(tmp_path / "mhla", records, layers=(0, 1, 2, 3))
    text = write_card(mine, name="toy", license="mit").read_text()
    names = [r["dataset"]["name"] for r in ModelCard(text).data.to_dict()["model-index"][0]["results"]]
    assert names == ["topics_bpb", "topics_cloze"]
    assert "| a | ppl ↓ | 200 | not finite |" in text and "200 (limit)" in text and "Scores marked (limit)" in text
    assert "trained from scratch" in text and "| softmax layers | none |" in text and "## Speed" not in text
    assert "Speed was not measured." in text and "Recall of single facts from far back was not measured." in text
    assert "How the model was trained is not recorded here." in text
    check_card(mine)


def test_the_card_of_a_pipeline_is_read_from_its_family(tmp_path):
    mhla_hf.convert(wan_pipeline(), layers="2/3").save_pretrained(tmp_path / "mhla")
    judged = make_result(fingerprint=fingerprint_folder(tmp_path / "mhla"), task="judged", metric="distance")
    Results([judged]).write(tmp_path / "mhla")
    text = write_card(tmp_path / "mhla", name="me/mhla", license="mit").read_text()
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("diffusers", "text-to-video")
    assert data.to_dict()["model-index"][0]["results"][0]["task"]["type"] == "text-to-video"
    assert 'DiffusionPipeline.from_pretrained("me/mhla", trust_remote_code=True)' in text
    words = ("A video model with", "| softmax layers | 0 |", "| judged | distance ↑ |")
    assert [word for word in words if word not in text] == []
    assert "far-back detail" not in text and "Generation was not measured" not in text


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BAD = {
    "no results": (lambda m, c: (m / "results.json").unlink(), {}, "got no results.json with scores"),
    "no license": (lambda m, c: (c["teacher"] / "README.md").write_text("# A\n"), {}, "license: got none, and no card of"),
    "no seed": (lambda m, c: edit(m / "train.json", lambda j: j.pop("seed")), {}, "has no attribute 'seed'"),
    "base out of reach": (
        lambda m, c: None, {"base_model": "a/base", "compared": {}}, "license: got none, and no card of a/base states one"),
    "another license": (lambda m, c: None, {"license": "mit"}, "license: got 'mit', expected 'afl-3.0' as stated by"),
    "name": (lambda m, c: None, {"name": "../toy"}, "card: Repo id must"),
    "base is a path": (lambda m, c: None, {"base_model": "tests"}, "base_model: got the local path 'tests', expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_writes_nothing(folders, case, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    mine, compared = folders
    breaks, arguments, message = BAD[case]
    breaks(mine, compared)
    with refused(match=message):
        write_card(mine, **{"name": "toy", "compared": compared, **arguments})
    assert not (mine / "README.md").exists() and not (mine / "card.json").exists()


KEPT = {
    "no person": (lambda m: (m / "card.json").unlink(), r"card\.json: got format_version None, expected 1"),
    "an end of line": (lambda m: (m / "README.md").open("ab").write(b"\r\n"), "got text other than what its files"),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_card_is_true_when_rendering_it_again_gives_the_same_bytes(folders, card, tmp_path, case):
    for place in folders[1].values():
        place.rename(tmp_path / f"gone_{place.name}")
    check_card(folders[0])
    breaks, message = KEPT[case]
    breaks(folders[0])
    with pytest.raises(ValueError, match=message):
        check_card(folders[0])


@pytest.fixture
def shelf(folders, card, tmp_path):
    (tmp_path / "seeds.json").write_text('{"seeds": [0, 1]}')
    shelve(folders[0], tmp_path / "cards", "toy", tmp_path / "seeds.json")
    return tmp_path / "cards"


def test_folder_and_shelf_give_the_same_card(shelf, card, capsys):
    assert (shelf / "toy.md").read_text() == card
    path = shelf / "results" / "toy.json"
    assert json.loads(path.read_text())["over_seeds"] == {"seeds": [0, 1]}
    assert "results" not in yaml.safe_load((shelf / "toy.yaml").read_text())
    for spoil, says in (
        (lambda: path.write_text(path.read_text().replace("1.9003", "1.8")), "toy.md: got text other than"),
        (path.unlink, "toy.json: got no such file, expected the measurements"),
    ):
        spoil()
        assert main(["card", str(shelf), "--check"]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1


def test_the_command_renders_checks_writes_and_shelves(shelf, capsys, monkeypatch):
    monkeypatch.chdir(shelf.parent)
    assert main(["card", "cards"]) == 0 and main(["card", "cards", "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == ["cards/toy.md: rendered", "cards/toy.md: matches its files"]
    options = ["--name", "me/other", "--license", "afl-3.0", "--compare", "teacher=teacher", "--limit", "Small."]
    assert main(["card", "mhla", *options]) == 0 and main(["card", "mhla", "--check"]) == 0
    assert "- Small." in Path("mhla/README.md").read_text()
    assert main(["card", "mhla", "--shelve", "cards/other"]) == 0 and render_shelf("cards", check=True)
    for arguments, says in (
        ([], "--name: got None, expected the Hub id"),
        (["--name", "a", "--compare", "teacher"], "--compare: got 'teacher', expected LABEL=DIR"),
        (options, "mhla/README.md', which cannot be made"),  # before all weights are read for their fingerprint
    ):
        if arguments == options:
            monkeypatch.setattr("os.access", lambda *given: False)
            monkeypatch.setattr("mhla_hf.hub.facts.measure", lambda *given: pytest.fail("it was measured"))
        assert main(["card", "mhla", *arguments]) == 2 and says in capsys.readouterr().err


def test_the_cards_of_this_repository_are_what_their_files_say():
    assert sorted(path.stem for path in render_shelf(SHELF, check=True)) == sorted(CARDS)
