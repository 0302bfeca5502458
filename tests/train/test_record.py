"""train.json, the trackers and the progress bar."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mhla_hf.training.loop import Stage


def test_record(lab, tmp_path):
    lab.distill(tmp_path / "out", stages=lab.stages(20), seed=3, command="mhla-hf distill ...")
    record = json.loads((tmp_path / "out" / "train.json").read_text())
    assert (record["steps"], record["tokens"], record["seed"]) == (40, 40 * 4 * 48, 3)
    assert record["command"] == "mhla-hf distill ..."
    assert {"torch", "transformers", "accelerate", "mhla_hf"} <= set(record["versions"])
    assert record["hardware"]
    assert [stage["name"] for stage in record["stages"]] == ["transfer", "logits"]
    assert [stage["tokens"] for stage in record["stages"]] == [20 * 4 * 48] * 2
    assert record["seconds"] == pytest.approx(sum(stage["seconds"] for stage in record["stages"]), abs=0.01)
    assert [(entry["stage"], entry["step"], entry["total"]) for entry in record["history"]] == [
        ("transfer", 10, 10),
        ("transfer", 20, 20),
        ("logits", 10, 30),
        ("logits", 20, 40),
    ]
    assert set(record["history"][-1]) == {
        "stage",
        "step",
        "total",
        "tokens",
        "loss",
        "kl",
        "ce",
        "lr",
        "seconds",
        "grad_norm",
    }
    assert record["history"][-1]["tokens"] == record["tokens"]


def test_history_is_the_mean_since_the_last_entry(lab, tmp_path):
    stage = Stage("lm", "lm", 6, 1e-3, seq_len=48, batch_size=4)
    losses = {}
    for every in (1, 4):
        out = tmp_path / str(every)
        lab.distill(out, None, lab.student(), stages=[stage], log_every=every, save_every=3)
        losses[every] = [entry["loss"] for entry in json.loads((out / "train.json").read_text())["history"]]
    assert losses[4] == pytest.approx([sum(losses[1][:4]) / 4, sum(losses[1][4:]) / 2], rel=1e-6)


def test_tensorboard(lab, tmp_path):
    lab.distill(tmp_path / "out", stages=lab.stages(8), tracker="tensorboard", log_every=2)
    events = EventAccumulator(str(tmp_path / "out" / "runs"))
    events.Reload()
    assert {"transfer/loss", "transfer/lr", "logits/kl", "logits/ce", "logits/grad_norm"} <= set(
        events.Tags()["scalars"]
    )
    history = json.loads((tmp_path / "out" / "train.json").read_text())["history"]
    points = {event.step: event.value for event in events.Scalars("logits/kl")}
    assert points == pytest.approx({entry["total"]: entry["kl"] for entry in history if "kl" in entry}, rel=1e-6)


def test_bars_on_request_only(lab, tmp_path, capsys):
    lab.distill(tmp_path / "a", None, lab.student(), stages=lab.lm(4), progress=True)
    shown = capsys.readouterr().err
    assert "lm (1/1): 100%" in shown
    assert "a is finished: 4 steps in" in shown
    lab.distill(tmp_path / "b", None, lab.student(), stages=lab.lm(4))
    silent = capsys.readouterr()
    assert silent.out == ""
    assert "lm (1/1)" not in silent.err


def test_record_names_no_place_on_this_machine(lab, tmp_path):
    rows = "".join(json.dumps({"input_ids": part.tolist()}) + "\n" for part in lab.tokens().split(100))
    (tmp_path / "book.jsonl").write_text(rows)
    lab.teacher().save_pretrained(tmp_path / "original")
    teacher = type(lab.teacher()).from_pretrained(tmp_path / "original")
    lab.distill(tmp_path / "out", teacher, data=tmp_path / "book.jsonl", stages=lab.stages(2))
    text = (tmp_path / "out" / "train.json").read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["data"]["name"] == "book.jsonl"
    assert json.loads(text)["teacher"] == "original"
