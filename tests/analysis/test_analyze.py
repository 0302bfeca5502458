"""analyze(): models of every kind side by side, its files, its table, and bad input as one sentence."""

import json

import pytest
import torch
from PIL import Image
from small_models import converted_model, softmax_model, tokens
from small_scores import save_llama, save_mhla
from tiny_pipelines import PIPELINES, inputs
from torch import nn

import mhla_hf
from mhla_hf.analysis import render_analysis
from mhla_hf.analysis.figures import choose_colors, tiled
from mhla_hf.analysis.inputs import load_digits
from mhla_hf.cli import main
from mhla_hf.models.vision import MHLAForImageClassification
from mhla_hf.models.vision_configuration import MHLAVisionConfig

SMALL = {"image_size": 16, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    torch.manual_seed(0)
    for kind in ("softmax", "linear", "mhla"):
        config = MHLAVisionConfig.preset("digits", attention=kind, **SMALL)
        MHLAForImageClassification(config).save_pretrained(folder / kind)
    save_llama(folder / "llama")
    save_mhla(folder / "converted")
    (folder / "pictures").mkdir()
    for number in range(3):
        Image.new("RGB", (20, 20), (80 * number, 10, 30)).save(folder / "pictures" / f"{number}.png")
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    return folder


def test_classifiers_side_by_side(shelf, tmp_path, capsys):
    folders = [str(shelf / kind) for kind in ("softmax", "linear", "mhla")]
    assert main(["analyze", *folders, "--out", str(tmp_path / "out"), "--samples", "2", "--quiet"]) == 0
    record = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert list(record["models"]) == ["softmax", "linear", "mhla"]
    for kind, model in record["models"].items():
        assert [layer["kind"] for layer in model["layers"]] == [kind] * 2
        assert all(layer["rank_max"] <= layer["bound"] for layer in model["layers"])
    assert record["models"]["linear"]["mean"]["rank"] <= 8 < record["models"]["mhla"]["mean"]["rank"]
    assert record["inputs"]["mhla"] == "2 images of scikit-learn digits"
    for key in ("hardware", "versions", "commit", "command", "date"):
        assert record[key], key
    printed = capsys.readouterr().out
    assert "model.stages.0.blocks.1.attn" in printed and "of the largest singular value" in printed
    mixing = json.loads((tmp_path / "out" / "mixing.json").read_text())
    assert next(iter(mixing["mhla"].values()))["layout"] == [4, 4] and mixing["softmax"] == {}
    drawn = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert drawn == {"layers.png", "maps.png", "mixing-mhla.png"}
    for name in drawn:
        assert Image.open(tmp_path / "out" / name).size[0] > 400


def test_a_folder_of_pictures(shelf):
    record = mhla_hf.analyze(str(shelf / "mhla"), data=shelf / "pictures", samples=3, progress=False)
    assert record["inputs"] == {"mhla": "3 images of pictures"}
    with pytest.raises(ValueError, match="samples: got 4, expected at most the 3 images"):
        mhla_hf.analyze(str(shelf / "mhla"), data=shelf / "pictures", samples=4, progress=False)


def test_language_models_from_folders(shelf, tmp_path):
    record = mhla_hf.analyze(
        [shelf / "llama", shelf / "converted"], out=tmp_path / "out", samples=2, length=64, progress=False
    )
    kinds = [[layer["kind"] for layer in model["layers"]] for model in record["models"].values()]
    assert kinds == [["softmax"] * 3, ["softmax", "mhla", "mhla"]]
    assert record["inputs"]["llama"] == "2 sequences of 64 tokens of pydoc_data.topics"
    assert (tmp_path / "out" / "mixing.png").exists()


def test_a_live_model_keeps_its_mode():
    for training in (True, False):
        model = softmax_model().train(training)
        mhla_hf.analyze(model, inputs={"input_ids": tokens(1, 40), "use_cache": False}, progress=False)
        assert model.training is training and {module.training for module in model.modules()} == {training}


def test_every_tolerance_is_told():
    given = {"input_ids": tokens(1, 40), "use_cache": False}
    short = mhla_hf.analyze({"before": softmax_model(), "after": converted_model()}, given, progress=False)
    long = mhla_hf.analyze({"long": softmax_model()}, given | {"input_ids": tokens(1, 80)}, progress=False)
    assert list(short["models"]) == ["before", "after"] and short["inputs"]["after"] == "given by the caller"
    assert "rank at 2.4e-06 of the largest" in render_analysis(short)
    both = {"models": {**short["models"], **long["models"]}}
    assert "rank at 2.4e-06, 4.8e-06 of the largest" in render_analysis(both)


BAD = {
    "no such folder": ("{shelf}/none", "none"),
    "a file": ("{shelf}/file", "file"),
    "samples": ("{shelf}/mhla --samples 0", "samples: got 0"),
    "length beyond": ("{shelf}/llama --length 100000", "length: got 100000"),
    "tolerance": ("{shelf}/mhla --tolerance 2", "tolerance: got 2.0"),
    "device": ("{shelf}/mhla --device gpu", "gpu"),
    "out a file": ("{shelf}/mhla --out {shelf}/file", "file"),
    "data missing": ("{shelf}/llama --length 64 --data ./none.txt", "none.txt"),
    "no pictures": ("{shelf}/mhla --data {shelf}/empty", "empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(shelf, capsys, name):
    arguments, said = BAD[name]
    assert main(["analyze", *arguments.format(shelf=shelf).split(), "--quiet"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and "Traceback" not in printed.err


def test_models_that_cannot_be_guessed_for():
    with pytest.raises(ValueError, match="inputs: None was given for Linear"):
        mhla_hf.analyze(nn.Linear(2, 2), progress=False)
    with pytest.raises(ValueError, match="without its tokenizer"):
        mhla_hf.analyze(softmax_model(), progress=False)
    with pytest.raises(ValueError, match="models: none was given"):
        mhla_hf.analyze([], progress=False)
    with pytest.raises(ValueError, match="saw 1 token, expected at least 2"):
        mhla_hf.analyze(converted_model(), {"input_ids": tokens(1, 1), "use_cache": False}, progress=False)


def test_digits_are_the_same_for_everyone():
    (train, labels), (test, _) = load_digits(16)
    assert train.shape == (1300, 1, 16, 16) and test.shape == (497, 1, 16, 16) and train.dtype == torch.uint8
    assert torch.equal(train, load_digits(16)[0][0]) and train.max() > 200 and labels.bincount().min() > 100


def test_a_grids_mixing_is_drawn_in_its_place():
    matrix = torch.arange(36.0).view(6, 6)
    picture = tiled(matrix.numpy(), (2, 3))
    assert picture.shape == (4, 9)
    assert picture[:2, :3].ravel().tolist() == list(range(6)) and picture[2:, 6:].ravel().tolist() == list(
        range(30, 36)
    )
    assert len(set(choose_colors({"a": "mhla", "b": "mhla", "c": "softmax"}).values())) == 3


def test_a_pipeline_and_a_transformer_of_diffusers(tmp_path):
    pipe = PIPELINES["dit"]()
    pipe.set_progress_bar_config(disable=True)
    softmax = mhla_hf.analyze(pipe, samples=2, progress=False)["models"]["DiTPipeline"]["layers"]
    assert {layer["kind"] for layer in softmax} == {"softmax"} and softmax[0]["layer"].endswith("attn1")
    mhla_hf.convert(pipe, layout=[2, 2])
    record = mhla_hf.analyze({"converted": pipe}, samples=2, out=tmp_path / "out", progress=False)
    layers = record["models"]["converted"]["layers"]
    assert [layer["layer"] for layer in layers] == [layer["layer"] for layer in softmax]
    assert all(layer["kind"] == "mhla" and layer["rank_max"] <= layer["bound"] for layer in layers)
    assert all(layer["samples"] % 2 == 0 for layer in layers) and (tmp_path / "out" / "mixing.png").exists()
    alone = mhla_hf.analyze(pipe.transformer, inputs("dit"), progress=False)
    assert [layer["kind"] for layer in alone["models"]["MHLADiTTransformer2DModel"]["layers"]] == ["mhla"] * len(layers)
    pipe.save_pretrained(tmp_path / "pipe")
    again = mhla_hf.analyze(tmp_path / "pipe", samples=2, trust_remote_code=True, progress=False)["models"]["pipe"]
    assert again["layers"] == record["models"]["converted"]["layers"]
