"""`mhla-hf`: the whole way through it, its help, and bad input as one sentence that names the thing."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from tools.small_scores import HELD_OUT, TRAINING, WINDOW, make_tasks, save_llama, save_mhla, small_tokenizer
from tools.small_towers import save_photos, softmax_tower
from tools.tiny_pipelines import dit_pipeline, wan_pipeline
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    ViTImageProcessorPil,
)

import mhla_hf
from mhla_hf.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = "import sys; from mhla_hf_command import main; sys.exit(main())"  # what pip makes of the entry point
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
RECIPE = """
settings: {layers: all, block_size: 32, window: 2}
stages:
  - {name: transfer, loss: transfer, trainable: attention, steps: 2, lr: 1e-3, batch_size: 2, seq_len: 64}
  - {name: distill, loss: logits, steps: 2, lr: 1e-3, batch_size: 2, seq_len: 64}
run: {save_every: 2}
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A softmax model, an MHLA model, text, tasks and recipes, never changed; and things that are broken."""
    folder = tmp_path_factory.mktemp("shelf")
    save_llama(folder / "llama")
    save_mhla(folder / "mhla")
    (folder / "train.txt").write_text(TRAINING)
    make_tasks(folder / "tasks", HELD_OUT, small_tokenizer(), WINDOW)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "typo.yaml").write_text(RECIPE.replace("steps", "stepps"))
    save_llama(folder / "truncated")
    weights = folder / "truncated" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4000])
    (folder / "nul.txt").write_text(TRAINING + "\0" * 100)
    (folder / "full").mkdir()
    (folder / "full" / "letter.txt").write_text("mine")
    return folder


def test_an_image_classifier_is_converted(tmp_path, monkeypatch, capsys):
    softmax_tower("ViTForImageClassification").save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    assert main(["convert", str(tmp_path / "vit"), str(tmp_path / "out"), "--set", "layout=2,2"]) == 0
    assert "layers [0, 1] of 2 are MHLA" in capsys.readouterr().out
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert model.config.mhla["layout"] == [2, 2]
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").size["height"] == 32
    assert main(["info", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "form:       mixing_form softmax, layout [2, 2], feature_map relu, normalize True\n" in said
    assert "--recipe RECIPE" in said
    images = save_photos(tmp_path / "images", {".": 16})
    learning = ["--samples", str(images), "--keep", "1", "--effort", "0.1"]
    assert main(["convert", str(tmp_path / "vit"), str(tmp_path / "learned"), *learning]) == 0
    config = AutoModelForImageClassification.from_pretrained(tmp_path / "learned").config
    assert sum(map(len, config.mhla["softmax_heads"].values())) == 1 and config.mhla_measured["steps"] == 10
    assert f"fitted {config.mhla_measured['output']['fitted']:.4g}, with softmax layers" in capsys.readouterr().out
    softmax_tower("SiglipVisionModel").save_pretrained(tmp_path / "tower")
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    for line, words in (
        ("convert tower new", "'tower', a SiglipVisionModel, expected"),
        ("distill vit --recipe language_cpu --data notes.txt --out new", ", an image classifier, expected a"),
    ):
        assert main(line.split()) == 2 and not (tmp_path / "new").exists()
        assert words in capsys.readouterr().err


def test_an_adapter_is_merged(shelf, tmp_path, capsys):
    base = AutoModelForCausalLM.from_pretrained(shelf / "llama")
    model = mhla_hf.convert(base, layers="all", windowed=True, block_size=8, softmax_heads={0: [0]})
    mhla_hf.save_adapter(
        get_peft_model(model, mhla_hf.adapter_config(model, init_lora_weights=False)), tmp_path / "adapter"
    )
    command = ["merge", str(tmp_path / "adapter"), str(tmp_path / "out")]
    assert main([*command, "--model", str(shelf / "llama")]) == 0
    assert "MHLALlamaForCausalLM" in capsys.readouterr().out
    ids = torch.arange(40)[None]
    merged, tokenizer = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    expected = mhla_hf.load_adapter(AutoModelForCausalLM.from_pretrained(shelf / "llama"), tmp_path / "adapter")
    torch.testing.assert_close(merged(ids).logits, expected(ids).logits)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(shelf / "llama").get_vocab()
    assert main([*command, "--overwrite", "--model", str(tmp_path / "none")]) == 2
    assert "--model: got" in capsys.readouterr().err
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    assert main([*command, "--overwrite"]) == 2
    assert "--model: got None" in capsys.readouterr().err


@pytest.fixture
def place(shelf, monkeypatch):
    """The shelf as working folder; afterwards nothing on it may have changed."""
    monkeypatch.chdir(shelf)
    before = inventory(shelf)
    yield shelf
    assert inventory(shelf) == before


def inventory(folder):
    return {path: path.lstat().st_size for path in folder.rglob("*") if "__pycache__" not in path.parts}


EARLY = {  # said before anything is imported
    "": "COMMAND",
    "convert llama new --layer all": "--layer",
    "convert nobody/nothing new": "model: got 'nobody/nothing', which is not a folder, expected a model on the Hub",
    "convert llama full": "out: got 'full', which is not empty",
    "convert llama full/letter.txt/new": "full/letter.txt/new', which cannot be made in '",
    "convert llama new --text no.txt": "no.txt: No such file",
    "distill llama --recipe lite --out new": "--recipe: got 'lite', which is not a file",
    "distill llama --recipe recipe.yaml --set b.lr=1 --out new": "--set: got 'b.lr', expected one of transfer.*, distill.*",
    "distill llama --recipe typo.yaml --data train.txt --out new": "stepps",
    "evaluate llama --recipe recall --plot full": "--plot: got 'full', which is a folder, expected a PNG file",
    "push nothing me/model": "folder: got 'nothing', which is not a folder",
}
LATE = {
    "convert truncated new": "truncated/model.safetensors: got a damaged file, expected a complete",
    "convert mhla new": "is an MHLA model already",
    "convert llama new --set colour=red": "'colour'",
    "convert llama new --text none --keep 1": "--keep: got 1 without text or samples, expected None",
    "distill llama --recipe recipe.yaml --data nul.txt --out new": "--data: got 'nul.txt', whose",
    "distill mhla --recipe recipe.yaml --data train.txt --out new": "teacher",
    "push llama me/model --license mit": 'got no config.json with "mhla" settings',
}


@pytest.mark.parametrize("line", [*EARLY, *LATE])
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_written(place, capfd, monkeypatch, line):
    if line in EARLY:
        monkeypatch.setattr("mhla_hf._register.register", lambda: pytest.fail("imported before arguments were checked"))
    assert main(line.split()) == 2
    stdout, stderr = capfd.readouterr()
    assert stdout == "" and stderr.startswith("mhla-hf") and stderr.count("\n") == 1, stderr
    assert {**EARLY, **LATE}[line] in stderr


def test_help_has_an_example_of_each_command(place, capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    with pytest.raises(ValueError, match="half"):
        main(["convert", "llama", "new", "--layers", "half", "--debug"])
    for command in ("convert", "distill", "recipes", "info", "evaluate", "push"):
        assert f"  {command} " in text and main([command, "--help"]) == 0
        assert f"example:\n  mhla-hf {command}" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mhla_hf ")


def test_convert_distill_evaluate_info(place, tmp_path, capsys):
    converted, distilled = str(tmp_path / "converted"), str(tmp_path / "distilled")
    options = ["--text", "none", "--layers", "1,2", "--set", "block_size=32", "--set", "salient=8"]
    assert main(["convert", "llama", converted, *options]) == 0
    assert "layers [1, 2] of 3 are MHLA" in capsys.readouterr().out
    settings = json.loads(Path(converted, "config.json").read_text())["mhla"]
    assert (settings["layers"], settings["block_size"], settings["salient"]) == ([1, 2], 32, 8)
    recipe = ["--recipe", "recipe.yaml", "--data", "train.txt", "--quiet"]
    assert main(["distill", converted, "--teacher", "llama", "--out", distilled, *recipe]) == 0
    record = json.loads(Path(distilled, "train.json").read_text())
    assert record["command"].startswith("mhla-hf distill ")
    assert json.loads(Path(distilled, "config.json").read_text())["mhla"] == settings
    capsys.readouterr()
    assert main(["info", distilled, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scores"] == [] and told["mhla_layers"] == [1, 2] and told["layers"] == 3
    scored = f"evaluate {converted} {distilled} --recipe recall --tasks lookups_recall_* --quiet"
    changes = (f"lengths={WINDOW}", "depths=0,100", "items=1", "text=train.txt")
    scored = [*scored.split(), *(word for change in changes for word in ("--set", change))]
    assert main([*scored, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| task | metric | shots | samples | converted | distilled |" and len(lines) == 5
    assert main([*scored, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)["distilled"]
    assert {score["metric"] for score in scores} == {"acc", "acc_back_0", f"acc_back_{WINDOW}"}
    assert main(["info", distilled]) == 0
    page = capsys.readouterr().out
    attention = "2 of 3 layers are MHLA (all but 0), 2 of 6 KV heads keep softmax"
    assert page.startswith(f"{distilled}: MHLALlamaForCausalLM, from llama\nattention:  {attention}\n")
    assert page.count("\n") <= 12
    assert f"score:      lookups_recall_{WINDOW} acc " in page and "windowed True" in page
    assert " MiB with softmax alone" in page


def test_convert_replaces_only_when_told_and_only_an_mhla_model(place, tmp_path, monkeypatch, capsys):
    out = save_mhla(tmp_path / "out")
    (out / "vocab.txt").write_text("old")
    assert main(["convert", "llama", str(out)]) == 2
    assert (out / "vocab.txt").exists()
    assert main(["convert", "llama", str(out), "--text", "none", "--overwrite", "--dtype", "bfloat16"]) == 0
    assert not (out / "vocab.txt").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    capsys.readouterr()
    home, mixed = save_mhla(tmp_path / "home"), save_mhla(tmp_path / "mixed")
    (mixed / "thesis").mkdir()
    (mixed / "thesis" / "draft.txt").write_text("years of work")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(out)
    kept = inventory(tmp_path)
    refused = dict.fromkeys(("..", "~"), "contains the working or the home folder")
    refused |= {place / "llama": "holds no MHLA model", mixed: "draft.txt', expected nothing but the files of a model"}
    for given, says in refused.items():
        assert main(["convert", str(place / "llama"), str(given), "--text", "none", "--overwrite"]) == 2
        assert says in capsys.readouterr().err
        assert inventory(tmp_path) == kept


def test_too_little_room_is_said_before_anything_is_learned(place, monkeypatch, capsys):
    monkeypatch.setattr("mhla_hf.conversion.convert", lambda *given, **options: pytest.fail("learned already"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**17))
    assert main(["convert", "llama", "new", "--text", "train.txt", "--quiet"]) == 2
    assert "/new', with 0.1 MiB of free space, expected at least " in capsys.readouterr().err


def stop(*_, **options):
    """In place of the work of a command: save what is said of it in `options["saves"]`, then Ctrl-C."""
    if saves := options.get("saves"):
        saves.mkdir(parents=True)
    raise KeyboardInterrupt


DISTILL = "distill llama --recipe recipe.yaml --data train.txt --out"


@pytest.mark.parametrize(
    ("work", "line", "saved"),
    [
        ("conversion.convert", "convert llama {}/new/ --text train.txt", "new.part"),
        ("training.loop.distill", f"{DISTILL} {{}}/new", "new.state/step-000000002"),
    ],
)
def test_ctrl_c_says_what_the_same_command_resumes_from(place, tmp_path, monkeypatch, capsys, work, line, saved):
    command = [*line.format(tmp_path).split(), "--quiet"]
    for saves, says in ((None, ""), (tmp_path / saved, f"; the same command resumes from {tmp_path / saved}")):
        monkeypatch.setattr(f"mhla_hf.{work}", functools.partial(stop, saves=saves))
        assert main(command) == 130
        assert capsys.readouterr().err == f"mhla-hf: interrupted{says}\n"


def test_distill_takes_the_settings_of_a_recipe_from_the_command_line(place, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    given = "--max_steps 3 --batch-size 2 --learning-rate 2e-3 --device cpu --dtype bfloat16 --save-dtype float16"
    given += " --report-to tensorboard --set *.seq_len=64 --set distill.lr=5e-4 --set settings.block_size=32"
    given += " --set *.grad_accum=1"
    given += f" --set run.log_every=1 --recipe language_llama_lite --data train.txt --seed 1 --out {tmp_path / 'out'}"
    assert main(["distill", "llama", *given.split()]) == 0
    again = f"mhla-hf evaluate {tmp_path / 'out'} llama --recipe recall"
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: trained; next, evaluate it: {again}\n"
    lines = [line for line in caplog.messages if " of 3, loss " in line]
    assert len(lines) == 3 and lines[1].startswith("distill (1/1): step 2 of 3, loss ")
    record = json.loads((tmp_path / "out/train.json").read_text())
    told = [[stage[key] for key in ("steps", "batch_size", "seq_len", "lr")] for stage in record["stages"]]
    assert told == [[3, 2, 64, 5e-4]] and record["mixed_precision"] == "bf16"
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["mhla"]["block_size"] == 32 and config["dtype"] == "float16" and (tmp_path / "out/runs").is_dir()
    assert main(["distill", "llama", *given.split()]) == 0 and again in capsys.readouterr().out


def test_distill_takes_the_folder_of_a_pipeline(tmp_path, monkeypatch, capsys):
    """Softmax, which it converts, or converted, whose source has to be trusted; by the same recipe, the same weights."""
    monkeypatch.chdir(tmp_path)
    wan_pipeline().save_pretrained("wan")
    Path("prompts.txt").write_text("a cat walks\na dog\n")
    size = "size: [9, 64, 80], sampling_steps: 2, batch_size: 1"
    stage = f"{{name: transfer, loss: transfer, trainable: mhla, steps: 1, lr: 1e-2, {size}}}"
    settings = "task: diffusion\nsettings: {layers: [1], layout: [1, 2, 2]}\n"
    Path("small.yaml").write_text(f"{settings}stages: [{stage}]\n")
    given = ["--recipe", "small.yaml", "--data", "prompts.txt", "--device", "cpu"]
    assert main(["distill", "wan", *given, "--out", "direct"]) == 0
    assert capsys.readouterr().out == "direct: trained\n"
    assert main(["convert", "wan", "mhla", "--layers", "1", "--set", "layout=1,2,2"]) == 0
    assert "MHLAWanTransformer3DModel, layers [1] are MHLA" in capsys.readouterr().out
    assert main(["convert", "mhla", "new"]) == 2 and not Path("new").exists()
    assert "holds the source of its MHLA model" in capsys.readouterr().err
    converted = ["distill", "mhla", "--teacher", "wan", *given, "--out", "distilled"]
    assert main(converted) == 2 and "trust_remote_code" in capsys.readouterr().err
    assert main([*converted, "--trust-remote-code", "--set", "settings.gate=true"]) == 2
    assert "which is converted already, expected a softmax model" in capsys.readouterr().err
    assert main([*converted, "--trust-remote-code"]) == 0
    weights = [load_file(next(Path(out, "transformer").glob("*.safetensors"))) for out in ("direct", "distilled")]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-5)


def test_recipes_are_listed(capsys):
    assert main(["recipes", "--json"]) == 0
    recipes = {recipe["name"]: recipe for recipe in json.loads(capsys.readouterr().out)}
    assert [stage["steps"] for stage in recipes["language_llama_lite"]["stages"]] == [4882]
    assert recipes["wan_paper"]["base"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" and recipes["encoder"]["about"]
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipes) + 2 and lines[-1].split()[-1] != "0"
    assert next(line for line in lines if line.startswith("language_340m_scratch")).endswith(" 10,000")


PLAIN = """
info mhla
recipes
evaluate mhla --tasks here_cloze --include-path tasks --out {new}/s.json
convert llama {new}/made --text none
distill llama --recipe recipe.yaml --data train.txt --out {new}/trained
"""
CALLS = "import sys; from mhla_hf.cli.main import main; print([main(line.split()) for line in sys.argv[1:]])"


def test_without_a_terminal_there_is_plain_text_alone(shelf, tmp_path):
    plain = {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    kept = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("TQDM", "HF_HUB_DISABLE"))}
    environment = {**kept, **plain}
    command = [sys.executable, "-c", CALLS, *PLAIN.format(new=tmp_path).strip().splitlines()]
    done = subprocess.run(command, cwd=shelf, env=environment, capture_output=True, timeout=120)
    assert (done.stdout + done.stderr).isascii()
    stdout, stderr = done.stdout.decode(), done.stderr.decode()
    assert stdout.endswith("[0, 0, 0, 0, 0]\n") and "Traceback" not in stderr, stderr
    assert stderr.count("is finished: 4 steps") == 1
    assert "acc" in stdout and stdout.count("\r") == 0 and stderr.count("\r") < 5 and stderr.count("\n") < 40, stderr


def test_a_reader_may_leave_before_the_end():
    line = f"{sys.executable} -c '{SCRIPT}' recipes --json | head -n 1"
    done = subprocess.run(line, shell=True, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_words_are_completed(tmp_path):
    def words(line):
        said = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        said["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "words")
        command = [sys.executable, "-c", SCRIPT]
        subprocess.run(command, env=ENVIRONMENT | said, timeout=60)
        return (tmp_path / "words").read_text().split("\n")

    assert [word.strip() for word in words("mhla-hf dis")] == ["distill"]
    assert {"--save-dtype", "--set"} <= {word.strip() for word in words("mhla-hf distill --s")}


def test_a_pipeline_learns_from_class_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dit_pipeline().save_pretrained("dit")
    assert main(["convert", "dit", "new", "--samples", "prompts.pt"]) == 2
    assert "--samples: got 'prompts.pt', expected a .txt file of prompts, or class" in capsys.readouterr().err
    Path("prompts.txt").write_text("a cat")
    bad = {"prompts.txt": "got prompts with DiTPipeline, expected class labels", "no.txt": "which does not exist"}
    for samples, words in bad.items():
        assert main(["convert", "dit", "new", "--samples", samples]) == 2
        assert words in capsys.readouterr().err and not Path("new").exists()
    options = ["--effort", "0.05", "--set", "layout=2,2", "--dtype", "bfloat16"]
    assert main(["convert", "dit", "new", "--samples", "1,2", *options]) == 0
    weights = load_file("new/transformer/diffusion_pytorch_model.safetensors")
    assert torch.bfloat16 in {value.dtype for value in weights.values()}
    config = json.loads(Path("new/transformer/config.json").read_text())
    errors = config["mhla_measured"]["output"]
    assert errors["fitted"] < errors["converted"] and config["mhla"]["feature_map"] == "hedgehog"
    assert f"converted {errors['converted']:.4g}, fitted {errors['fitted']:.4g}" in capsys.readouterr().out
