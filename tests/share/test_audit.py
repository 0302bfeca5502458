"""audit(): a good model passes, each damage is found by the check that is there for it, bad input is one sentence."""

import copy
import functools
import inspect
import json
import shutil
from pathlib import Path

import pytest
import torch
from small_models import CACHE, scratch_model, shaken
from small_repos import forge, looking_llama, save_carded, spoil
from small_scores import HELD_OUT, save_llama, small_llama, small_tokenizer
from small_towers import softmax_tower
from small_types import small_model_of
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import mhla_hf
from mhla_hf.cli import main
from mhla_hf.share import audit_checks
from mhla_hf.share.audit import FINDING, NOT_APPLICABLE, render_audit, run_check
from mhla_hf.share.audit_checks import CHECKS, MAX_TOKENS, AuditSubject

MHLA_ONLY = ["source", "loads elsewhere", "state", "far part"]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A softmax model, what it was converted to with a card, and things that are none or broken; never changed."""
    place = tmp_path_factory.mktemp("shelf")
    save_llama(place / "llama")
    save_carded(place / "mhla", shaken(mhla_hf.convert(small_llama(), layers=[0, 2], block_size=32, window=2)))
    save_llama(place / "other", vocab_size=401)
    softmax_tower("ViTForImageClassification").save_pretrained(place / "vit")
    small_llama().save_pretrained(place / "mute")
    (place / "empty").mkdir()
    (place / "pipe").mkdir()
    (place / "pipe" / "model_index.json").write_text("{}")
    (place / "short.txt").write_text("Few words.")
    (place / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    return place


@pytest.fixture
def folder(shelf, tmp_path, monkeypatch):
    """A copy of the MHLA model that may be broken; loading it elsewhere takes seconds and is left out here."""
    monkeypatch.setattr(audit_checks, "check_isolated_load", lambda *given: "m.MHLALlamaForCausalLM")
    return shutil.copytree(shelf / "mhla", tmp_path / "mhla")


def verdicts(folder, **options):
    """(names of the checks with a finding, name -> row) of an audit of short texts."""
    record = mhla_hf.audit(folder, **{"tokens": 256, "progress": False, **options})
    rows = {row["name"]: row for row in record["checks"]}
    found = [name for name, row in rows.items() if row["verdict"] == FINDING]
    assert list(rows) == list(CHECKS) and record["findings"] == len(found)
    page = render_audit(record)
    assert all(f"\n{FINDING}: {name}: {rows[name]['reason']}\n" in page for name in found)
    assert all("\n" not in row["reason"] and bool(row["reason"]) == (row["verdict"] in (FINDING, NOT_APPLICABLE))
               for row in rows.values())  # fmt: skip
    return found, rows


def test_a_good_model_passes_every_check(shelf, tmp_path, capsys):
    out = tmp_path / "new" / "audit.json"
    line = ["audit", str(shelf / "mhla"), "--teacher", str(shelf / "llama"), "--out", str(out), "--quiet"]
    assert main(line) == 0
    page, record = capsys.readouterr().out, json.loads(out.read_text())
    assert {row["verdict"] for row in record["checks"]} == {"ok", "measured"}
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert page == render_audit(record) + "\n" and page.endswith("findings: 0\n")
    assert all(f"\n{name} " in page for name in CHECKS) and "MHLA in layers [0, 2]" in page
    assert all(record[key] for key in ("hardware", "versions", "commit", "command", "date", "fingerprint"))
    rows = {row["name"]: row for row in record["checks"]}
    assert record["tokens"] == 768 == rows["long text"]["details"]["tokens"]
    assert list(rows["far part"]["details"]) == ["0", "2"] and 0 < rows["far part"]["value"] < 1
    assert list(rows["recall"]["details"]["teacher"]) == ["32", "64", "128", "160"]
    assert rows["KL"]["value"] > 0 and rows["KL"]["stderr"] > 0 and 0 < rows["agreement"]["value"] < 1
    assert rows["loads elsewhere"]["value"] == "MHLALlamaForCausalLM"


def test_a_stock_model_passes_what_applies(shelf):
    found, rows = verdicts(shelf / "llama")
    assert found == []
    assert [name for name in MHLA_ONLY if rows[name]["reason"] == "the model has no MHLA"] == MHLA_ONLY
    assert rows["recall"]["verdict"] == "measured" and rows["KL"]["verdict"] == NOT_APPLICABLE
    assert (
        rows["cache"]["verdict"] == rows["packing"]["verdict"] == "ok" and rows["card"]["reason"] == "there is no card"
    )


def test_a_model_is_as_good_as_itself_and_another_is_not(shelf, monkeypatch, capsys):
    bars = []
    monkeypatch.setattr(audit_checks.AuditSubject, "watch", lambda subject, steps: bars.append(len(steps)) or steps)
    _, rows = verdicts(shelf / "llama", teacher=shelf / "llama", progress=True)
    # cache (chunks, token by token), long text and drift, recall of two models, texts beside the teacher, writing of both
    assert bars == [4, 97, 33, 33, 8, 4, 32, 32] and "audit: claims" in capsys.readouterr().err
    values = [rows[name]["value"] for name in ("recall", "KL", "agreement", "writing")]
    assert values == [0.0, 0.0, 1.0, 1.0] and rows["writing"]["details"]["same"] == 16


def test_a_card_of_somebody_else_cannot_be_checked(folder):
    (folder / "card.json").unlink()
    (folder / "results.json").unlink()
    found, rows = verdicts(folder)
    assert found == [] and "mhla_hf did not write" in rows["card"]["reason"]
    assert rows["claims"]["reason"] == "no results.json says where the numbers are from"


NAN = float("nan")


def change(file, old, new):
    def carry_out(folder):
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return carry_out


LOGITS = ["cache", "causality", "batches", "left padding", "packing", "long text", "drift", "recall"]
BALANCE, FAR = (f"model.layers.{layer}.self_attn.mhla.mixing.balance" for layer in (0, 2))
NUMBER = ('"value": 0.5', '"value": 0.75')
DAMAGED = {  # what is done -> the findings, and the words of the first
    "a weight is NaN": (spoil(NAN), ["weights", *LOGITS, "scores"], "got NaN or infinity in the weight 'model.norm.weight'"),
    "a mixing weight is NaN": (spoil(NAN, BALANCE), ["weights", "loads", "scores"], f"infinity in the weight '{BALANCE}'"),
    "a weight is missing": (spoil(None), ["loads", "scores"], "lacks 1 of its weights, such as 'model.norm.weight'"),
    "other weights than were judged": (spoil(3.0), ["scores"], "of other weights, expected scores of these"),
    "the source was changed": (
        change("modeling_mhla.py", "import copy", "import copy  # mine"), ["source", "loads elsewhere", "scores"],
        "got a bundle that was edited"),
    "the source is missing": (
        lambda folder: (folder / "modeling_mhla.py").unlink(), ["source", "loads elsewhere", "scores"],
        "there is no modeling_mhla.py"),
    "nothing comes from afar": (spoil(-1e4, FAR), ["far part", "scores"], "the window layer 2 has 0.0 of its weights"),
    "a number on the card": (change("README.md", "value: 0.5", "value: 0.75"), ["card", "claims"], "README.md: got"),
    "a number in the records": (change("results.json", *NUMBER), ["card", "claims"], "README.md: got other text"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_found(folder, case):
    damage, checks, said = DAMAGED[case]
    damage(folder)
    found, rows = verdicts(folder)
    assert found == checks and said in rows[checks[0]]["reason"]
    if "loads" in found:
        assert rows["cache"]["reason"] == "the model does not load"


def test_code_of_unknown_origin_is_not_run(folder, monkeypatch, capsys):
    forge(folder)
    monkeypatch.setattr(audit_checks, "check_isolated_load", lambda *given: pytest.fail("it ran"))
    _, rows = verdicts(folder)
    assert rows["source"]["value"].startswith("intact, of another mhla_hf")
    assert rows["loads elsewhere"]["verdict"] == NOT_APPLICABLE and "mine" not in capsys.readouterr().out


def wrong(change_given=None, change_logits=None):
    """A class's forward, but with other arguments, or with logits that are changed in a way that depends on them."""

    def wrap(forward):
        @functools.wraps(forward)
        def changed(self, **given):
            output = forward(self, **(change_given(dict(given)) if change_given else given))
            if change_logits is not None and output.logits.numel():
                output.logits = change_logits(output.logits, given)
            return output

        return changed

    return wrap


def without(name):
    return lambda given: {key: value for key, value in given.items() if key != name}


def growing(forward):
    @functools.wraps(forward)
    def changed(self, **given):
        output = forward(self, **given)
        if output.get(CACHE) is not None:
            output[CACHE].layers[0].extra = torch.zeros(output[CACHE].get_seq_length())
        return output

    return changed


WRONG = {  # check -> how a forward is made wrong
    "cache": wrong(None, lambda x, given: x * (1 + 1e-3) if given.get(CACHE) is not None else x),
    "causality": wrong(None, lambda x, given: x + 0.01 * x.roll(-1, 1)),
    "batches": wrong(None, lambda x, given: x + 0.01 * x.mean(0, keepdim=True) if len(x) > 1 else x),
    "left padding": wrong(without("attention_mask")),
    "packing": wrong(without("position_ids")),
    "long text": wrong(None, lambda x, given: torch.where(torch.tensor(given["input_ids"].shape[1] > 400), NAN, x)),
    "state": growing,
}


@pytest.mark.parametrize("check", WRONG)
def test_a_wrong_forward_is_found(shelf, monkeypatch, check):
    model = AutoModelForCausalLM.from_pretrained(shelf / "mhla")
    cls = type(model)
    assert run(check, bare(model, tokens=768))["verdict"] == "ok"
    monkeypatch.setattr(cls, "forward", WRONG[check](cls.forward), raising=False)
    assert "position_ids" in inspect.signature(cls.forward).parameters
    assert run(check, bare(model, tokens=768))["verdict"] == FINDING


def bare(model, **changes):
    """A model in memory as the checks take it, with a text of random tokens."""
    ids = torch.randint(3, 60, (500,), generator=torch.Generator().manual_seed(0))
    given = {"tokens": 300, "device": torch.device("cpu"), "trust_remote_code": False, "loaded": model, **changes}
    return AuditSubject(Path(), model.config, None, ids, **given)


def run(check, subject):
    return run_check(check, *CHECKS[check], subject)


def test_packed_rows_that_the_base_does_not_keep_apart_either():
    name = "qwen3_next"
    for model in (small_model_of(name), mhla_hf.convert(small_model_of(name), layers="all", block_size=8, window=2)):
        row = run("packing", bare(model))
        assert row["verdict"] == NOT_APPLICABLE and "Qwen3NextForCausalLM of transformers does not" in row["reason"]


def test_learned_positions_end_where_they_end():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 100}
    subject = bare(GPT2LMHeadModel(GPT2Config(**sizes)).eval())
    assert subject.long == subject.short == 100
    assert [run(check, subject)["verdict"] for check in ("cache", "left padding", "long text")] == ["ok"] * 3
    assert bare(small_llama(), tokens=MAX_TOKENS).long == 4 * 192


HEDGEHOG = {"window": 2, "feature_map": "hedgehog", "num_decays": 2, "rope": "before"}
HEDGEHOG |= {"free_decay": False, "length_power": False}


@pytest.mark.parametrize(("layers", "forgets"), [("all", True), ([0, 2, 3], False)])
def test_a_model_that_forgets_is_found_beside_its_teacher(layers, forgets):
    """In its window it recalls what its teacher does, beyond it nothing; with softmax in the layer that looks up, all."""
    teacher = looking_llama()
    model = mhla_hf.convert(copy.deepcopy(teacher), layers=layers, block_size=32, **HEDGEHOG)
    subject = bare(model, teacher=teacher)
    subject.ids = torch.tensor(small_tokenizer()(HELD_OUT[:4000])["input_ids"])
    recall, writing = run("recall", subject), run("writing", subject)
    gains = recall["details"]
    assert (recall["verdict"] == FINDING) == forgets and writing["verdict"] == "measured"
    assert gains["teacher"]["64"] > 0.6 and (gains["model"]["64"] < 0.2) == forgets
    assert gains["model"]["32"] == pytest.approx(gains["teacher"]["32"], abs=0.05)
    assert (writing["value"] < 0.9) == forgets and (writing["details"]["same"] == 16) != forgets


def test_half_precision_that_drifts_is_seen(monkeypatch):
    assert 0.5 < run("drift", bare(small_llama()))["value"] < 2 > run("drift", bare(scratch_model()))["value"]

    def drifting(logits, given):
        cache = given.get(CACHE)
        lost = 0 if cache is None or logits.dtype == torch.float32 else 1e-3 * cache.get_seq_length()
        return logits * (1 + lost)

    cls = type(small_llama())
    monkeypatch.setattr(cls, "forward", wrong(None, drifting)(cls.forward))
    row = run("drift", bare(small_llama()))
    assert row["value"] > 5 and row["verdict"] == "measured" and len(row["details"]["quarters"]) == 4


def test_a_teacher_without_numbers_is_a_finding_too(monkeypatch):
    model = small_llama()
    monkeypatch.setattr(audit_checks, "recall_gain", lambda model, ids, distance, rows: NAN if distance == 32 else 1.0)
    row = run("recall", bare(model))
    assert (row["verdict"], row["reason"], row["details"]) == (FINDING, "NaN or infinity", {})


def test_the_dense_form_passes_what_applies():
    subject = bare(scratch_model())
    rows = {name: run(name, subject) for name in list(CHECKS)[4:14]}
    assert [name for name, row in rows.items() if row["verdict"] == NOT_APPLICABLE] == ["state", "far part"]
    assert FINDING not in [row["verdict"] for row in rows.values()]


def test_a_model_from_scratch_that_mixes_packed_rows_up_is_found(monkeypatch):
    cls = mhla_hf.MHLAForCausalLM
    monkeypatch.setattr(cls, "forward", WRONG["packing"](cls.forward))
    row = run("packing", bare(scratch_model()))
    assert row["verdict"] == FINDING and "is more than" in row["reason"]


def test_half_precision_has_its_own_tolerance(shelf, tmp_path):
    found, rows = verdicts(save_llama(tmp_path / "half", dtype=torch.bfloat16))
    assert found == [] and rows["cache"]["tolerance"] == rows["long text"]["tolerance"] >= 0.02
    assert rows["weights"]["value"] == "finite, bfloat16" and 1e-4 < rows["cache"]["value"] < 0.02
    subject = bare(small_llama().to(torch.bfloat16))
    subject.rounding = 0.03
    assert subject.tolerance == pytest.approx(0.06) and bare(small_llama()).tolerance == 1e-4


BAD = {  # the command's arguments -> what is said
    "no folder": ("nothing", "folder: got 'nothing', which does not exist, expected the folder of a causal language model"),
    "a Hub id": ("me/model", "folder: got 'me/model', which does not exist"),
    "no model": ("empty", "model: got 'empty', which has no config.json"),
    "a classifier": ("vit", "folder: got 'vit', a ViTForImageClassification, expected the folder of a causal"),
    "a pipeline": ("pipe", "folder: got 'pipe', a pipeline, expected the folder of a causal"),
    "no tokenizer": ("mute", "model: got 'mute', expected a tokenizer that can be loaded"),
    "no text": ("llama --data nothing.txt", "nothing.txt: No such file"),
    "a short text": ("llama --data short.txt", "--data: got 'short.txt', which has 8 tokens, expected at least 64"),
    "no UTF-8": ("llama --data bytes.txt", "--data: got 'bytes.txt', which is not UTF-8"),
    "another vocabulary": ("llama --teacher other", "--teacher: got 'other' with a vocabulary of 401 tokens,"),
    "no teacher": ("llama --teacher empty", "model: got 'empty', which has no config.json"),
    "output in nowhere": ("llama --out short.txt/a.json", "got 'short.txt/a.json', which cannot be made in"),
    "no tokens": ("llama --tokens 0", "tokens: got 0, expected a whole number of at least 64"),
    "tokens no number": ("llama --tokens many", "invalid int value"),
    "no such device": ("llama --device abacus", "--device: got 'abacus', expected one that is available here"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(shelf, monkeypatch, capsys, case):
    monkeypatch.chdir(shelf)
    line, said = BAD[case]
    assert main(["audit", *line.split()]) == 2
    out, error = capsys.readouterr()
    assert out == "" and said in error and error.count("\n") == 1 and error.startswith("mhla-hf audit: "), error


def test_a_finding_is_exit_code_1(folder, capsys):
    spoil(3.0)(folder)
    assert main(["audit", str(folder), "--tokens", "64", "--quiet"]) == 1
    assert "FINDING: scores: " in capsys.readouterr().out
