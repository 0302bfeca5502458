"""Studies: the same table after a stop, the rule that judges a claim, recipes that hold, bad input as one sentence."""

import json

import pytest
import torch
import yaml
from PIL import Image

from experiments.studies import study as study_module
from experiments.studies.__main__ import main
from experiments.studies.report import judge_claim, over_seeds, render_study, run_study
from experiments.studies.scaling import render_scaling, study_scaling, time_scaling
from experiments.studies.study import RECIPES, folder_of, read_study
from mhla_hf.models.vision import MHLAForImageClassification

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
TINY = {
    "model": {"image_size": 16, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    "mhla": {"layout": [2, 2], "cpe": 0},
    "stage": {"batch_size": 8, "lr": "5e-3", "shift": 1},
    "epochs": 2,
    "seeds": 2,
    "rows": {"softmax": {"attention": "softmax"}, "MHLA, learned": {"attention": "mhla"}},
    "claims": [["MHLA, learned", "softmax"], ["softmax", "MHLA, learned", "rank"]],
}


def write(folder, **changes):
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Sixteen pictures of two classes to train on, eight to test on."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 8), ("test", 4)):
        for kind in ("dark", "light"):
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                level = (200 if kind == "light" else 20) + number
                Image.new("RGB", (16, 16), (level, level, 40)).save(root / split / kind / f"{number}.png")
    return root


def stable(results):
    """What does not depend on the clock."""
    rows = {row: {k: v for k, v in found.items() if k != "seconds"} for row, found in results["rows"].items()}
    return json.dumps([rows, results["claims"], results["data"], results["seeds"]], sort_keys=True)


def test_a_stopped_study_ends_as_the_one_that_was_not(photos, tmp_path, monkeypatch):
    recipe = write(tmp_path)
    options = {"data": photos, "seeds": 1, "progress": False, "say": lambda _: None}
    whole = run_study(recipe, tmp_path / "whole", **options)
    train, calls = study_module.distill, []

    def stopping(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*arguments, **options)

    monkeypatch.setattr(study_module, "distill", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_study(recipe, tmp_path / "part", **options)
    assert not (tmp_path / "part" / "results.json").exists()
    again = run_study(recipe, tmp_path / "part", **options)
    assert len(calls) == 2 + 1 and stable(whole) == stable(again)
    for name in ("accuracy.png", "layers.png", "mixing.png", "table.md"):
        assert (tmp_path / "part" / name).stat().st_size > 100
    assert json.loads((tmp_path / "part" / "results.json").read_text())["call"] == again["call"]
    assert whole["call"]["trained"] == 2 and again["call"]["trained"] == 1
    row = again["rows"]["MHLA, learned"]
    assert len(row["by_epoch"]) == 2 and row["by_epoch"][-1] == row["accuracy"] and row["mixing_moved"][0]["mean"] > 0
    assert again["data"] == {"name": photos.name, "train": 16, "test": 8}
    model = MHLAForImageClassification.from_pretrained(folder_of(tmp_path / "part", "MHLA, learned", 0))
    assert model.config.num_labels == 2 and model.config.num_channels == 3
    assert render_study(again) + "\n" == (tmp_path / "part" / "table.md").read_text()
    more = run_study(recipe, tmp_path / "part", **options | {"seeds": 2})
    assert more["claims"][0]["interval"] is not None and again["claims"][0]["interval"] is None
    assert more["rows"]["softmax"]["accuracy"]["values"][:1] == again["rows"]["softmax"]["accuracy"]["values"]
    with pytest.raises(ValueError, match="was started with another"):
        run_study(recipe, tmp_path / "part", data=photos, epochs=3, progress=False)


def test_a_claim_is_judged_on_the_same_seeds():
    def rows(a, b):
        return {"a": {"accuracy": over_seeds(a)}, "b": {"accuracy": over_seeds(b)}}

    clear = judge_claim(rows([0.9, 0.8, 0.7], [0.8, 0.7, 0.59]), "a", "b")
    assert clear["verdict"] == "holds" and clear["difference"] == pytest.approx(0.31 / 3)
    assert judge_claim(rows([0.9, 0.8, 0.7], [0.8, 0.7, 0.59]), "b", "a")["verdict"] == "does not hold"
    open_claim = judge_claim(rows([0.9, 0.5, 0.7], [0.6, 0.7, 0.7]), "a", "b")
    assert open_claim["verdict"] == "undecided" and open_claim["interval"][0] < 0 < open_claim["interval"][1]
    alone = judge_claim(rows([0.9], [0.1]), "a", "b")
    assert (alone["difference"], alone["interval"], alone["verdict"]) == (pytest.approx(0.8), None, "undecided")


@pytest.mark.parametrize("name", NAMES)
def test_every_study_of_the_package_builds_its_models(name):
    study = read_study(name)
    parameters = {}
    for row in study.rows:
        config = study.config(row)
        model = MHLAForImageClassification(config)
        parameters[row] = sum(value.numel() for key, value in model.named_parameters() if ".mixing." not in key)
        assert any(".mhla." in key for key in model.state_dict()) is (config.attention != "softmax")
        with torch.no_grad():
            assert model.eval()(torch.zeros(1, 1, *config.image_sides())).logits.shape == (1, 10)
    assert set(NAMES) == {"images", "start", "blocks", "cpe", "resolution"}
    assert name in ("cpe", "resolution") or len(set(parameters.values())) == 1


def test_scaling_times_everything_and_goes_on(tmp_path):
    row = time_scaling(4, counts=(1, 2, 4, 8), heads=1, width=8, rounds=1, seconds=0)
    assert [cell["blocks"] for cell in row["mhla"]] == [1, 4, 16] and row["softmax"] > 0
    first = study_scaling(tmp_path, sides=(2, 4), seconds=0, progress=False)
    again = study_scaling(tmp_path, sides=(2, 4), seconds=0, progress=False)
    assert first["rows"] == again["rows"] and (tmp_path / "scaling.png").stat().st_size > 10_000
    table = render_scaling(first)
    assert "| plain linear (M = 1) | M = 4 | M = 16 |" in table and "(" in table.splitlines()[-1]
    with pytest.raises(ValueError, match="another folder"):
        study_scaling(tmp_path, sides=(2,), progress=False)


BAD = {
    "no such study": (
        "begin",
        {},
        "study: got 'begin', which is not a file, expected a YAML file or one of blocks, cpe",
    ),
    "a claim about nothing": ("tiny.yaml", {"claims": [["GLA", "softmax"]]}, "claims: got 'GLA'"),
    "seeds": ("start --seeds 0", {}, "seeds: got 0"),
    "scaling with data": ("scaling --data photos", {}, "no --data"),
    "data without a test": ("tiny.yaml --data {photos}/train", {}, "which has no test split"),
    "a test class that is not trained": ("tiny.yaml --data odd", {}, "test: got 'odd' with the class 'other'"),
    "out": ("tiny.yaml --out .", {}, "holds other files and no study.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(photos, tmp_path, monkeypatch, name):
    arguments, content, said = BAD[name]
    write(tmp_path, **content)
    for place in ("odd/train/dark", "odd/train/light", "odd/test/other"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / place / "0.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        main([*arguments.format(photos=photos).split(), "--quiet"])
    assert said in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "tiny.yaml"]
