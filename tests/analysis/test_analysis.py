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
from mhla_hf.analysis.figures import tile_matrix
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
    assert all(record[key] for key in ("hardware", "versions", "commit", "command", "date"))
    printed = capsys.readouterr().out
    assert "model.stages.0.blocks.1.attn" in printed and "of the largest one" in printed
    mixing = json.loads((tmp_path / "out" / "mixing.json").read_text())
    assert next(iter(mixing["mhla"].values()))["layout"] == [4, 4] and mixing["softmax"] == {}
    drawn = {path.name: Image.open(path).size[0] for path in (tmp_path / "out").glob("*.png")}
    assert drawn.keys() == {"layers.png", "maps.png", "mixing-mhla.png"} and min(drawn.values()) > 400


def test_language_models_from_folders_and_a_folder_of_pictures(shelf, tmp_path):
    models = [shelf / "llama", shelf / "converted"]
    record = mhla_hf.analyze(models, out=tmp_path / "out", samples=2, length=64, progress=False)
    kinds = [[layer["kind"] for layer in model["layers"]] for model in record["models"].values()]
    assert kinds == [["softmax"] * 3, ["softmax", "mhla", "mhla"]]
    assert record["inputs"]["llama"] == "2 sequences of 64 tokens of pydoc_data.topics"
    assert (tmp_path / "out" / "mixing-converted.png").exists()
    record = mhla_hf.analyze(str(shelf / "mhla"), data=shelf / "pictures", samples=3, progress=False)
    assert record["inputs"] == {"mhla": "3 images of pictures"}


def test_live_models_keep_their_mode_and_every_tolerance_is_told():
    given = {"input_ids": tokens(1, 40), "use_cache": False}
    before = softmax_model().train()
    short = mhla_hf.analyze({"before": before, "after": converted_model()}, given, progress=False)
    assert all(module.training for module in before.modules())
    long = mhla_hf.analyze({"long": before.eval()}, given | {"input_ids": tokens(1, 80)}, progress=False)
    assert not any(module.training for module in before.modules())
    assert list(short["models"]) == ["before", "after"] and short["inputs"]["after"] == "given by the caller"
    both = {"models": {**short["models"], **long["models"]}}
    assert "singular values above 2.4e-06, 4.8e-06 of the largest" in render_analysis(both)


BAD = {
    "no such folder": ("{shelf}/none", "none"),
    "samples": ("{shelf}/mhla --samples 0", "samples: got 0"),
    "too many": ("{shelf}/mhla --data {shelf}/pictures --samples 4", "samples: got 4, expected at most the 3 images"),
    "length beyond": ("{shelf}/llama --length 100000", "length: got 100000"),
    "out a file": ("{shelf}/mhla --out {shelf}/file", "file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(shelf, capsys, name):
    arguments, said = BAD[name]
    assert main(["analyze", *arguments.format(shelf=shelf).split(), "--quiet"]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.err.count("\n") == 1 and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("models", "given", "said"),
    [
        (nn.Linear(2, 2), None, "inputs: got none for a Linear"),
        (nn.Linear(2, 2), {"input": torch.randn(1, 2)}, "got Linear, in which no attention was seen"),
        (converted_model(), {"input_ids": tokens(1, 1), "use_cache": False}, r"got \[1\] tokens"),
        (converted_model(), {"input_ids": tokens(1, 16), "use_cache": True}, "expected whole sequences"),
    ],
)
def test_what_cannot_be_looked_at(models, given, said):
    with pytest.raises(ValueError, match=said):
        mhla_hf.analyze(models, given, progress=False)


def test_digits_are_the_same_for_everyone():
    (train, labels), (test, _) = load_digits(16)
    assert train.shape == (1300, 1, 16, 16) and test.shape == (497, 1, 16, 16) and train.dtype == torch.uint8
    assert train[0].sum() == 18739 and labels[:5].tolist() == [6, 5, 5, 7, 9]


def test_a_grids_mixing_is_drawn_in_its_place():
    picture = tile_matrix(torch.arange(36.0).view(6, 6).numpy(), (2, 3))
    assert picture.shape == (4, 9) and picture[:2, :3].ravel().tolist() == list(range(6))
    assert picture[2:, 6:].ravel().tolist() == list(range(30, 36))


def test_a_pipeline_and_a_transformer_of_diffusers():
    pipe = PIPELINES["dit"]()
    pipe.set_progress_bar_config(disable=True)
    call = {"class_labels": [0, 1], "num_inference_steps": 2, "output_type": "np"}
    softmax = mhla_hf.analyze(pipe, call, progress=False)["models"]["DiTPipeline"]["layers"]
    assert {layer["kind"] for layer in softmax} == {"softmax"} and softmax[0]["layer"].endswith("attn1")
    mhla_hf.convert(pipe, layout=[2, 2])
    layers = mhla_hf.analyze(pipe, call, progress=False)["models"]["DiTPipeline"]["layers"]
    assert [layer["layer"] for layer in layers] == [layer["layer"] for layer in softmax]
    assert all(layer["kind"] == "mhla" and layer["rank_max"] <= layer["bound"] for layer in layers)
    alone = mhla_hf.analyze(pipe.transformer, inputs("dit"), progress=False)
    assert [layer["kind"] for layer in alone["models"]["MHLADiTTransformer2DModel"]["layers"]] == ["mhla"] * len(layers)
