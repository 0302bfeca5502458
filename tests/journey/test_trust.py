"""Nothing of ours runs the code that comes with somebody's model, or asks whether it may, unless the caller said so."""

import ast
import builtins
import importlib
import json
from pathlib import Path

import pytest
from official_checkpoints import into_pipeline
from tools.small_scores import save_llama
from tools.small_towers import save_photos, softmax_tower
from tools.tiny_pipelines import wan_pipeline
from transformers import ViTImageProcessorPil

from mhla_hf.cli.main import main

ROOT = Path(__file__).parents[2]
LANGUAGE = "language_cpu"


@pytest.fixture
def questions(shelf, monkeypatch):
    asked = []
    monkeypatch.setattr(builtins, "input", lambda question="": asked.append(question) or "y")
    return asked


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A language model, a classifier, a vision tower and a pipeline of someone who wants code to run; text and images."""
    place = tmp_path_factory.mktemp("shelf")
    save_llama(place / "llama")
    softmax_tower("ViTForImageClassification").save_pretrained(place / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(place / "vit")
    wan_pipeline().save_pretrained(place / "wan")
    edit(place / "wan/model_index.json", tokenizer=["transformers", "CLIPProcessor"])  # which asks AutoTokenizer
    ViTImageProcessorPil().save_pretrained(place / "wan/tokenizer")
    (place / "wan/tokenizer/config.json").write_text("{}")
    for name in ("llama", "vit", "wan/tokenizer"):
        (place / name / "evil.py").write_text(f"import pathlib\npathlib.Path({str(place / 'ran')!r}).touch()\n")
        autos = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForImageClassification")
        edit(place / name / "config.json", model_type="evil", auto_map=dict.fromkeys(autos, "evil.Thing"))
    save_photos(place / "images", {"train/ant": 1, "train/bee": 1, "val/ant": 1, "val/bee": 1})
    (place / "notes.txt").write_text("a few words " * 5000)
    return place


def edit(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


COMMANDS = {
    "convert": "convert llama new --text none",
    "convert a pipeline": "convert wan new",
    "distill": f"distill llama --recipe {LANGUAGE} --data notes.txt --out new",
    "distill a pipeline": "distill wan --recipe wan_hybrid --data notes.txt --max-steps 1 --out new",
    "evaluate": "evaluate llama --recipe recall",
    "evaluate a classifier": "evaluate vit --recipe table_2_imagenet --set data=images/val",
    "experiments.demo.__main__.py": "--model llama --out new --data notes.txt",
    "language.py": f"--model llama --recipe {LANGUAGE} --data notes.txt --out new",
    "image_classifier.py": "--model vit --data images --out new",
    "wan.py": "--model wan --out new",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_and_no_script_asks_or_runs_code(shelf, tmp_path, monkeypatch, capsys, questions, name):
    monkeypatch.chdir(shelf)
    words = COMMANDS[name].replace(" new", f" {tmp_path / 'new'}").split()
    if name.endswith(".py"):
        with pytest.raises(ValueError) as caught:
            importlib.import_module(name.removesuffix(".py")).main(words)
        said = str(caught.value)
    else:
        main(words)
        said = capsys.readouterr().err
    assert not questions and not (shelf / "ran").exists()
    # a tokenizer is still found without the code beside it; a model is not
    assert "wan" in words[1] or "custom code" in said or "can be loaded" in said, said


def test_a_pipeline_for_an_official_checkpoint_asks_nothing(shelf, questions):
    model = type("MHLAWanTransformer3DModel", (), {})()
    with pytest.raises(ValueError):
        into_pipeline(model, str(shelf / "wan"))
    assert not questions and not (shelf / "ran").exists()


CODE = "someone/evil--code.Thing"
NAMED = {"custom_pipelines": {"text-generation": {"impl": CODE}}, "auto_map": {"AutoConfig": CODE}}
NAMED["custom_generate"] = CODE
NO_CODE = {"some_number": 3, "tokenizer_class": "TokenizersBackend", "transformers.js_config": {"dtype": "q4"}}


def test_a_converted_model_keeps_all_of_a_configuration_but_names_of_code(shelf, tmp_path, caplog):
    save_llama(tmp_path / "llama")
    softmax_tower("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    for name in ("llama", "vit"):
        edit(tmp_path / name / "config.json", **NAMED, **NO_CODE)
    edit(tmp_path / "llama/tokenizer_config.json", auto_map={"AutoTokenizer": [CODE, None]})
    edit(tmp_path / "llama/generation_config.json", **NAMED, _from_model_config=False, max_new_tokens=7)
    edit(tmp_path / "vit/preprocessor_config.json", auto_map={"AutoImageProcessor": CODE})
    for name in ("llama", "vit"):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "new" / name), "--text", "none"]) == 0
        for file in (tmp_path / "new" / name).glob("*.json"):
            assert "evil" not in file.read_text(), file.name
        kept = json.loads((tmp_path / "new" / name / "config.json").read_text())
        assert {key: kept[key] for key in NO_CODE} == NO_CODE
    assert json.loads((tmp_path / "new/llama/generation_config.json").read_text())["max_new_tokens"] == 7
    assert "does not keep auto_map, custom_generate, custom_pipelines of its base" in caplog.text


def test_every_loader_that_could_ask_is_told_whom_to_trust():
    silent = []
    for file in [file for room in ("mhla_hf", "experiments", "conversion") for file in (ROOT / room).rglob("*.py")]:
        for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
            asks = ast.unparse(call.func).startswith("Auto") and ast.unparse(call.func).endswith(".from_pretrained")
            if asks and not {"trust_remote_code", None} & {keyword.arg for keyword in call.keywords}:
                silent.append(f"{file.name}:{call.lineno}")
    assert not silent
