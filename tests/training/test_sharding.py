"""Several processes by `accelerate launch`, with FSDP2 and without: the numbers of one process, whatever is killed."""

import json
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from tools.launched import SETUPS, compare, fork_launched, kill, launch
from tools.small_scores import TRAINING, save_llama
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mhla_hf.cli.main import main
from mhla_hf.training.tasks.language import LanguageObjective

TOOLS = Path(__file__).parents[1] / "tools"
RECIPE = """\
settings: {layers: [1, 2], block_size: 16, windowed: false}
stages:
  - {name: transfer, loss: transfer, trainable: mhla, steps: 8, lr: 1e-2, warmup: 2, seq_len: 64, batch_size: 12}
  - {name: distill, loss: logits, steps: 20, lr: 1e-3, lr_mhla: 1e-2, warmup: 3, weight_decay: 0.01, seq_len: 64,
     batch_size: 12, ce_weight: 0.5, ema: 0.9}
run: {save_every: 3, log_every: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("launched")
    save_llama(place / "llama")
    (place / "text.txt").write_text(TRAINING)
    (place / "recipe.yaml").write_text(RECIPE)
    (place / "short.yaml").write_text(RECIPE.replace("steps: 8", "steps: 3").replace("steps: 20", "steps: 4"))
    return place


def line(out, recipe="recipe.yaml"):
    return "distill", "llama", "--recipe", recipe, "--data", "text.txt", "--out", out, "--quiet"


def test_two_sharded_processes_equal_one(place, monkeypatch):
    """Each holds half of every layer of student and teacher, and gathers one layer at a time."""
    monkeypatch.chdir(place)
    assert main(list(line("short-one", "short.yaml"))) == 0
    real = LanguageObjective.forward

    def forward(self, *arguments):
        for layer in (*self.student.model.layers, *self.teacher.model.layers):
            assert isinstance(layer, FSDPModule)
            for value in layer.parameters():
                assert isinstance(value, DTensor) and len(value.to_local()) <= (len(value) + 1) // 2
        return real(self, *arguments)

    monkeypatch.setattr(LanguageObjective, "forward", forward)
    fork_launched(place, "fsdp2_8gpu", 2, *line("short-two", "short.yaml"))
    compare(place / "short-one", place / "short-two")
    assert json.loads((place / "short-two" / "train.json").read_text())["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dit", "wan", "images"])
def test_other_kinds_of_models_sharded_equal_one_process(lab, tmp_path, kind):
    """With LoRA, moving averages and a test set; and killed amid LoRA, the last stage, and resumed by more processes."""
    script = TOOLS / "sharded_kinds.py"
    kill(tmp_path, "fsdp2_8gpu", 2, lambda: lab.newest(tmp_path / "4") >= 14, False, kind, "4", script=script)
    for setup, processes in ((None, 1), ("fsdp2_8gpu", 2), ("fsdp2_8gpu", 4)):
        code, text = launch(tmp_path, setup, processes, kind, f"{processes}", script=script)
        assert code == 0, text
    for several in ("2", "4"):
        compare(tmp_path / "1", tmp_path / several)
    assert json.loads((tmp_path / "4" / "train.json").read_text())["resumed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("setup", ["fsdp2_8gpu", "ddp"])
def test_killed_five_times_and_gone_on_with_other_numbers_of_processes(lab, place, setup, alone):
    """At the first state, at the border of the stages, in the second, while a state is written, and near the end."""
    out = f"killed-{setup}-{alone}"
    after = lambda step: lambda: lab.newest(place / out) >= step  # noqa: E731
    writing = lambda: lab.newest(place / out) >= 14 and any(place.glob(f"{out}.state/unfinished/*.tmp-*"))  # noqa: E731
    for processes, until in ((2, after(3)), (3, after(8)), (4, after(11)), (2, writing), (3, after(26))):
        assert kill(place, setup, processes, until, alone, *line(out)) < 60
        assert not (place / out).exists()
    for name, launcher, processes in (("one", None, 1), (out, setup, 2)):
        code, text = launch(place, launcher, processes, *line(name))
        assert code == 0, text
    compare(place / "one", place / out)
    assert json.loads((place / out / "train.json").read_text())["resumed"] == 5


SETUP_FILES = {"one_gpu_offload": (1, True), "fsdp2_8gpu": (8, False), "two_nodes": (16, False)}


@pytest.mark.parametrize("name", SETUP_FILES)
def test_accelerate_reads_the_setups(name):
    found = load_config_from_file(str(SETUPS / f"{name}.yaml"))
    assert (found.distributed_type, found.mixed_precision, found.fsdp_config["fsdp_version"]) == ("FSDP", "bf16", 2)
    assert (found.num_processes, found.fsdp_config["fsdp_offload_params"]) == SETUP_FILES[name]


ENGINES = {
    "DEEPSPEED": "distributed_type: got DEEPSPEED from the launcher, expected FSDP or data parallel",
    "FSDP FSDP_VERSION=1": "fsdp_version: got 1 from the launcher, expected 2",
}


@pytest.mark.parametrize("engine, says", ENGINES.items())
def test_other_engines_are_refused_and_nothing_is_written(lab, tmp_path, monkeypatch, engine, says):
    engine, *options = engine.split()
    for name, value in [(f"ACCELERATE_USE_{engine}", "true"), *(option.split("=") for option in options)]:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        lab.distill(tmp_path / "out")
    assert not any(tmp_path.iterdir())
