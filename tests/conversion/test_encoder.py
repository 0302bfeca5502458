"""Conversion of encoders with text: MHLA heads that learned without labels, and what is told of it."""

import copy
import json
import pickle
import resource
from pathlib import Path

import pytest
import torch
from tools.small_encoders import SLIDING, softmax_encoder
from tools.small_models import refused
from tools.small_scores import TRAINING, small_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.conversion import encoder
from mhla_hf.conversion.encoder import Checkpoint, embed
from mhla_hf.conversion.fit import OutputFit
from mhla_hf.conversion.teacher import mhla_layers, softmax_instead
from mhla_hf.hub.card import write_first_card
from mhla_hf.hub.facts import Person

SMALL = {"block_size": 8, "progress": False}
TEXT = torch.randint(3, 60, (6000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def teacher():
    return softmax_encoder("bert")


def converted(teacher, **options):
    return mhla_hf.convert(copy.deepcopy(teacher), **{**SMALL, "text": TEXT, **options})


@pytest.mark.parametrize("settings", [{}, {"window": 2}, {"layers": [0, 2]}])
def test_it_comes_closer_to_the_original(teacher, settings):
    model = converted(teacher, **settings)
    told = model.config.mhla_measured
    assert list(told["fitted"]["cosine"]) == ["16", "64"] and told["text"] == "a tensor of tokens"
    losses = [1 - told[stage]["cosine"]["64"] for stage in ("fitted", "converted")]
    assert 0 <= losses[0] < 0.5 * losses[1]
    assert "softmax_heads" not in told and "cache_bytes" not in told
    assert model.config.mhla["layers"] == settings.get("layers", [0, 1, 2])
    for name, value in teacher.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), f"{name} of the base has changed"
    ids = TEXT[:64].view(1, 64)
    assert float((embed(model, ids) * embed(teacher, ids)).sum()) < 1 - 1e-4, "MHLA changes nothing"
    with softmax_instead(model):
        torch.testing.assert_close(embed(model, ids), embed(teacher, ids))


@pytest.mark.parametrize("model_type", [*SLIDING[:1], "eurobert", "roberta"])
def test_other_types(model_type):
    """Layers that stay softmax, grouped heads, and positions that begin later."""
    base = softmax_encoder(model_type)
    model = converted(base)
    told = model.config.mhla_measured
    assert list(told["fitted"]["cosine"]) == (["15", "62"] if model_type == "roberta" else ["16", "64"])
    assert set(mhla_layers(model)) == ({0, 2} if model_type in SLIDING else {0, 1, 2})
    assert told["fitted"]["cosine"] != told["converted"]["cosine"]


@pytest.mark.parametrize(("model_type", "head"), [("bert", "Model"), ("distilbert", "ForMaskedLM")])
def test_the_command_and_the_card(tmp_path, monkeypatch, capsys, model_type, head):
    """It leaves nothing of its checkpoint."""
    monkeypatch.chdir(tmp_path)
    run = Checkpoint.run
    leave = lambda *given: (run(*given), Path("out.part.tmp-1").touch())  # noqa: E731
    monkeypatch.setattr(Checkpoint, "run", leave)  # as a process that is killed while it saves its progress
    tokenizer = small_tokenizer()
    softmax = softmax_encoder(model_type, head, vocab_size=len(tokenizer))
    softmax.save_pretrained("base")
    tokenizer.save_pretrained("base")
    Path("text.txt").write_text(TRAINING)
    settings = ["--layers", "1,2", "--set", "block_size=8"]
    assert main(["convert", "base", "out", "--text", "text.txt", *settings]) == 0
    told = capsys.readouterr().out
    measured = json.loads(Path("out/config.json").read_text())["mhla_measured"]
    fitted = [f"{value:.4f}" for value in measured["fitted"]["cosine"].values()]
    assert "cosine, 64 tokens" in told and all(value in told for value in fitted)
    card = write_first_card(Path("out"), Person("toy", None, "mit")).read_text()
    assert f"| all heads MHLA | {fitted[0]} | {fitted[1]} |" in card
    assert "What the conversion kept" in card and "KV heads" not in card and "Nothing was measured" not in card
    assert main(["convert", "base", "plain", *settings]) == 0
    distill = "mhla-hf distill plain --teacher base --out plain-distilled --recipe encoder --data TEXT"
    assert capsys.readouterr().out.endswith(f", layers [1, 2] of 3 are MHLA; next, distill it: {distill}\n")
    auto = AutoModel if head == "Model" else AutoModelForMaskedLM
    model, info = auto.from_pretrained("plain", output_loading_info=True)
    assert type(model).__name__ == f"MHLA{type(softmax).__name__}" and not info["missing_keys"]
    assert len(AutoTokenizer.from_pretrained("plain")) == len(tokenizer) and not list(tmp_path.glob("*.part*"))


def test_what_is_refused(teacher):
    model = copy.deepcopy(teacher)
    for options, words in (
        ({"text": "self"}, ('text: got "self" with BertModel', "which writes no text")),
        ({"text": TEXT, "keep": 0.5}, ("keep: got 0.5 with an encoder, expected None.",)),
        (
            {"text": TEXT[:90]},
            ("text: got 90 tokens, expected at least 102: 6 rows longer than a window and a block (16",),
        ),
        ({"text": TEXT, "mixing_form": "softmax"}, ("text: got a text along with windowed=False",)),
    ):
        with refused(*words):
            mhla_hf.convert(model, **SMALL, **options)
    assert type(model) is type(teacher)


def test_dtypes_and_training_mode_come_back(teacher):
    model = converted(copy.deepcopy(teacher).bfloat16().train(), effort=0.05)
    core = mhla_layers(model)[0].mhla
    assert model.training and core.q_map.weight.dtype == torch.bfloat16 and core.mixing.rate.dtype == torch.float32


def test_a_seed_repeats_it_and_a_stop_does_not_change_it(teacher, tmp_path, monkeypatch):
    options = {"seed": 5, "effort": 0.1}
    expected, file = converted(teacher, **options).state_dict(), tmp_path / "stopped.pt"
    monkeypatch.setattr(encoder, "SAVE_EVERY", 0.0)

    def step(self, inputs, whole=OutputFit.step):
        if self.done == 4:
            raise KeyboardInterrupt
        return whole(self, inputs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OutputFit, "step", step)
        converted(teacher, checkpoint=file, **options)
    resumed = converted(teacher, checkpoint=file, **options)
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, expected[name]), f"{name} differs after a stop"


def test_a_checkpoint_that_does_not_fit_is_one_sentence(teacher, tmp_path):
    """A limit on the size of files stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))
    try:
        with refused("checkpoint: got", "expected a place with room to write (the disk is full, or"):
            converted(teacher, effort=0.1, checkpoint=tmp_path / "part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
    with refused("checkpoint: got", "which cannot be made in"):
        converted(teacher, checkpoint=Path(__file__) / "part")


def test_a_checkpoint_of_another_conversion_is_refused(teacher, tmp_path):
    options = {"text": TEXT[:900], "effort": 0.1, "checkpoint": tmp_path / "part"}
    converted(teacher, **options)
    teacher = copy.deepcopy(teacher)
    for other in ({"effort": 0.2}, {"window": 2}, {}):
        teacher.config.is_other = not other
        with refused("checkpoint: got", "another conversion, expected a new file"):
            converted(teacher, **{**options, **other})


@pytest.mark.parametrize("content", [b"", pickle.dumps(print), None], ids=["empty", "pickle", "folder"])
def test_a_file_that_is_no_checkpoint_is_refused(teacher, tmp_path, content):
    file = tmp_path / "part"
    file.mkdir() if content is None else file.write_bytes(content)
    model = copy.deepcopy(teacher)
    with refused("checkpoint: got", "part', which is not a checkpoint of a conversion", "expected a new file"):
        mhla_hf.convert(model, text=TEXT, checkpoint=file, **SMALL)
    assert type(model) is type(teacher)
