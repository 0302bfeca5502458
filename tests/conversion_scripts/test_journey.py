"""conversion/wan.py, sana.py, dit.py and language.py as a user runs them, on small models."""

import json

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file
from tools.small_scores import TRAINING, save_llama
from tools.small_vbench import make_python
from tools.tiny_pipelines import PIPELINES, generate
from transformers import AutoModelForCausalLM

MATCH = "{name: match, loss: prediction, steps: 2, lr: 1e-3, batch_size: 2, sampling_steps: 2, SIZE}"
TRANSFER = MATCH.replace("name: match, loss: prediction", "name: transfer, loss: transfer, trainable: mhla")
TRAIN = "{name: train, loss: denoising, steps: 2, lr: 1e-3, batch_size: 2}"
SAMPLING = "{height: 64, width: 80, num_frames: 9, num_inference_steps: 1, max_sequence_length: 16}"
SCORE = f"kind: video\nabout: one dimension\ntasks: [color]\nsettings: {{videos: 1, fps: 16, sampling: {SAMPLING}}}\n"
SCRATCH = "{preset: DiT-S/8, input_size: 16, out_channels: 4, num_layers: 1, mhla: {layout: [2, 2], cpe: 3}}"


def prepare(place, family, stages, settings):
    """Arguments of the family's script for a run of a few steps on a tiny pipeline in a folder."""
    PIPELINES[family]().save_pretrained(place / "base")
    (place / "prompts.txt").write_text("a cat\n\na dog walks\n")
    (place / "latents").mkdir()
    latents = {"latents": torch.randn(4, 4, 16, 16), "class_labels": torch.arange(4)}
    save_file(latents, place / "latents" / "0.safetensors")
    recipe = f"task: diffusion\nbase: facebook/DiT-XL-2-256\nsettings: {settings}\nstages: [{', '.join(stages)}]\n"
    (place / "short.yaml").write_text(recipe)
    data = "latents" if family == "dit" else "prompts.txt"
    places = {"recipe": "short.yaml", "model": "base", "data": data, "out": "mine"}
    return [part for key, name in places.items() for part in (f"--{key}", str(place / name))]


@pytest.mark.parametrize(
    ("family", "stages", "settings", "size"),
    [("wan", (TRANSFER, MATCH), "{layers: [1], layout: [1, 2, 2]}", "size: [9, 64, 80]"),
     ("sana", (MATCH,), "{layers: [1], layout: [2, 2]}", "size: [32, 32]"), ("dit", (TRAIN,), SCRATCH, "")]
)  # fmt: skip
def test_from_a_pipeline_to_a_card(run, family, stages, settings, size, tmp_path, capsys, monkeypatch):
    arguments = prepare(tmp_path, family, [stage.replace("SIZE", size) for stage in stages], settings)
    if family == "wan":
        (tmp_path / "score.yaml").write_text(SCORE)
        arguments += ["--judge", str(tmp_path / "score.yaml"), "--set", f"python={make_python(tmp_path / 'bench')}"]
        monkeypatch.chdir(tmp_path)  # samples go to out/
    for _ in range(2):
        run(family, *arguments, "--license", "mit")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "mine", trust_remote_code=True, dtype=torch.float32)
    assert type(pipe.transformer).__name__.startswith("MHLA")
    assert generate(pipe).isfinite().all()
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "MHLA" in card and ("converted from softmax" in card and "| vbench | color" in card) is (family == "wan")
    record = json.loads((tmp_path / "mine" / "train.json").read_text())
    assert str(tmp_path) not in json.dumps({key: value for key, value in record.items() if key != "command"})
    assert "finished already: nothing to do" in capsys.readouterr().err


def test_what_is_missing_is_missed_before_training_and_the_card_names_the_model_that_was_given(run, refused, tmp_path):
    """Not the recipe's base, and the license of the folder's own card."""
    arguments = prepare(tmp_path, "dit", [TRAIN], SCRATCH)
    assert "license: got none" in refused("dit", *arguments)
    lines = "license: other\nlicense_name: ours\nlicense_link: https://example.org/ours\n"
    (tmp_path / "base" / "README.md").write_text(f"---\n{lines}---\n# Base\n")
    said = refused("dit", *arguments, "--data", tmp_path / "none.txt")
    assert f"dit.py: data: got '{tmp_path}/none.txt', which does not exist, expected a file of prompts.\n" in said
    assert not list(tmp_path.glob("mine*"))
    run("dit", *arguments)
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "facebook" not in card and "license_name: ours\nlicense_link: https://example.org/ours" in card


STAGE = "{{name: {0}, loss: {0}, steps: 3, lr: 1e-3, seq_len: 32, batch_size: 2, trainable: {1}}}"
STAGES = {True: [STAGE.format("transfer", "mhla"), STAGE.format("logits", "all")], False: [STAGE.format("lm", "all")]}


@pytest.mark.parametrize("converts", [True, False])
def test_a_language_model(run, tmp_path, capsys, converts):
    model, recipe, out = save_llama(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "short.yaml", tmp_path / "out"
    scratch = f"settings: {{preset: tiny, vocab_size: 400}}\ntokenizer: {model}\n"
    settings = "settings: {layers: all, block_size: 16, windowed: false}\n" if converts else scratch
    recipe.write_text(f"{settings}stages: [{', '.join(STAGES[converts])}]\n")
    (tmp_path / "text.txt").write_text(TRAINING)
    arguments = ["--recipe", recipe, "--data", tmp_path / "text.txt", "--out", out]
    arguments += ["--model", model] if converts else []
    for _ in range(2):
        run("language", *arguments)
    assert "finished already: nothing to do" in capsys.readouterr().err
    trained = AutoModelForCausalLM.from_pretrained(out)
    name, dtype = ("MHLALlamaForCausalLM", torch.bfloat16) if converts else ("MHLAForCausalLM", torch.float32)
    assert (type(trained).__name__, trained.dtype) == (name, dtype) and (out / "tokenizer.json").exists()
