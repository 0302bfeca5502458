"""What is refused before the first byte goes out: one thing is wrong with a good folder, and one sentence says which."""

import dataclasses
import json
import os
import re
import shutil

import pytest
from tools.small_repos import CARD, TRAIN, forge, save_carded, save_model, score, small_scratch, spoil
from tools.small_scores import make_result, small_llama
from tools.tiny_pipelines import dit_pipeline

import mhla_hf
from mhla_hf.evaluation.records import Results
from mhla_hf.hub import folder_checks
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.hub.facts import Person, list_unmeasured
from mhla_hf.hub.folder_checks import stage_folder

TOKEN = "hf_" + "aB3" * 12


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A converted model with everything, and a pipeline."""
    place = tmp_path_factory.mktemp("shelf")
    save_carded(place / "model", mhla_hf.convert(small_llama(), layers="2/3", block_size=32, num_blocks=4))
    mhla_hf.convert(dit_pipeline()).save_pretrained(place / "pipe")
    (place / "pipe" / "README.md").write_text(CARD)
    return place


@pytest.fixture
def folder(shelf, tmp_path, unvisited):
    """A copy of the model that may be broken; loading it elsewhere is left out here."""
    return shutil.copytree(shelf / "model", tmp_path / "mhla")


def put(file, text):
    return lambda folder: (folder / file).write_text(text)


def edit(file, **values):
    def damage(folder):
        content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**content, **values}))

    return damage


def drop(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


def shard_outside(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    put("model.safetensors.index.json", '{"weight_map": {"a": "../../secret.safetensors"}}')(folder)


BROKEN = {
    "source changed": (put("modeling_mhla.py", "import os\n"), "modeling_mhla.py: got unknown code, expected the"),
    "code that was changed and hashed anew": (forge, "modeling_mhla.py: got source of another version of mhla_hf, or ch"),
    "no weights": (drop("model.safetensors"), "got no weights file"),
    "not a number": (spoil(float("nan")), "got NaN or infinity in the weight 'model.norm.weight'"),
    "shard outside": (shard_outside, "got the shard '../../secret.safetensors', expected a file beside"),
    "no config": (drop("config.json"), 'got no config.json with "mhla" settings'),
    "a link out": (lambda f: (f / "LICENSE").symlink_to("/etc/hostname"), "LICENSE: got a folder or a link to elsewhere,"),
    "no card": (drop("README.md", "card.json"), "README.md: got no card, expected one; push writes it if license"),
    "no license": (put("README.md", "---\ntags: [a]\n---\n"), "got the license None, expected a license of the Hub"),
    "a wrong number": (put("README.md", CARD), "README.md: got text other than what its files"),
    "front matter that is none": (put("README.md", "---\nlicense: mit\n  tags: [\n---\n"), "README.md: got metadata"),
    "a token": (
        lambda f: (drop("card.json")(f), put("README.md", f"{CARD}token {TOKEN}\n")(f)), "README.md: got a Hugging"),
    "a place on a computer": (
        put("generation_config.json", '{"cache": "/fsx/anna/a"}'), "config.json: got the local path '/fsx/anna/a'"),
    "a pipeline's code": (
        edit("config.json", custom_pipelines={"a": {"impl": "a/b--c.D"}}), "config.json: got custom_pipelines {'a':"),
    "a head's code": (
        edit("config.json", auto_map={"AutoModel": "a/b--c.D"}), "config.json: got 'a/b--c.D' for AutoModel, expected a"),
    "a processor's code": (
        edit("preprocessor_config.json", auto_map={"AutoImageProcessor": "modeling_mhla.D"}),
        "preprocessor_config.json: got auto_map {'AutoImageProcessor':"),
    "a way to generate": (
        edit("generation_config.json", custom_generate="a/b"), "got custom_generate 'a/b', which names code, exp"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_says_what_is_wrong(folder, tmp_path, case):
    damage, said = BROKEN[case]
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        stage_folder(folder, tmp_path / "staged")
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


SHARED = {
    "LICENSE": b"text", "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "tiktoken.model": b"IQ== 0\nIg== 1\n",
    "preprocessor_config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
}  # fmt: skip
# What may be secret, run code or do harm; none of it is on the list.
LEFT = [".env", "checkpoint-10/optimizer.pt", "runs/events", "pytorch_model.bin", "evil.PY", f"{TOKEN}.txt"]
LEFT += ["adapter_model.safetensors", "model.fp16.safetensors", "a\nb.txt", "a\u2028b.json", "Config.json"]


def inside(folder):
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def test_what_is_on_the_list_goes_out_and_the_rest_stays_and_is_named(folder, tmp_path, monkeypatch, caplog):
    """What is loaded elsewhere is exactly what goes out."""
    seen = []
    monkeypatch.setattr(folder_checks, "check_isolated_load", lambda place, *given: seen.extend(inside(place)))
    (folder / "additional_chat_templates").mkdir()
    for name, data in SHARED.items():
        (folder / name).write_bytes(data)
    write_card(score(folder), name="tester/mhla", license="apache-2.0")
    own = set(inside(folder))
    for name in LEFT:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
    os.mkfifo(folder / "waits")
    (folder / "broken.json").symlink_to("nothing")
    (folder / "secrets").symlink_to("/etc")
    left = stage_folder(folder, tmp_path / "staged", repo_id="tester/mhla")
    assert set(seen) == set(inside(tmp_path / "staged")) == own and set(SHARED) < own
    for name in own - {"results.json", "card.json"}:
        assert (tmp_path / "staged" / name).read_bytes() == (folder / name).read_bytes(), name
    assert set(left) == {name.split("/")[0] for name in LEFT} | {"waits", "broken.json", "secrets"}
    (line,) = [record.message for record in caplog.records if "not sent" in record.message]
    assert all(ascii(name) in line for name in left) and "\n" not in line and "\u2028" not in line


def test_records_and_the_card_keep_the_last_part_of_an_absolute_path(folder, tmp_path):
    command = "evaluate --x=/somewhere/a/b ~/c /q 'my own.txt' a/b https://a.b/c file:///somewhere/d e:/somewhere/f"
    command += r" C:\somewhere\g"
    records = [dataclasses.replace(record, command=command) for record in Results.read(folder)]
    Results(records).write(folder)
    (folder / "train.json").write_text(json.dumps(TRAIN | {"command": 'x "/home/anna/c"'}))
    write_card(folder, name="tester/mhla", license="apache-2.0", limits=["Its texts lay in /somewhere/private/y."])
    stage_folder(folder, tmp_path / "sent")
    check_card(tmp_path / "sent")
    sent = {path: (tmp_path / "sent" / path).read_bytes() for path in inside(tmp_path / "sent")}
    card = sent["README.md"].decode()
    assert "`evaluate --x=b c /q 'my own.txt' a/b https://a.b/c file://d f g`" in card
    assert "Its texts lay in y." in card
    assert all(place not in data for data in sent.values() for place in (b"somewhere", b"anna"))
    train = json.loads(sent["train.json"])
    assert (train["data"]["name"], train["command"]) == ("topics.txt", 'x "c"')


MEASURED = {  # tasks -> what the card has to say was not measured
    ("heldout_recall", "heldout_cloze"): ["generation"],
    ("codes_generation_512",): ["recall"],
    ("longbench_gov_report", "niah_single_1"): [],
    ("raindrop", "fdaxyz"): ["recall", "generation"],
}


def test_recall_and_generation_are_asked_of_converted_language_models(folder, tmp_path):
    for tasks, absent in MEASURED.items():
        assert list_unmeasured([make_result(task=task) for task in tasks]) == absent, tasks
        assert list_unmeasured([make_result(task=task, limit=1) for task in tasks]) == ["recall", "generation"]
    text = write_card(score(folder, ("heldout_recall",)), name="tester/mhla", license="apache-2.0").read_text()
    assert "- Generation was not measured." in text and "- Recall of single facts" not in text
    with pytest.raises(ValueError, match=r"no result for generation, expected .*; evaluate with the recipe recall"):
        stage_folder(folder, tmp_path / "refused")
    stage_folder(folder, tmp_path / "draft", draft=True)
    save_model(tmp_path / "scratch", small_scratch())
    stage_folder(tmp_path / "scratch", tmp_path / "staged", person=Person("tester/scratch", None, "mit"))
    assert "license: mit" in (tmp_path / "staged" / "README.md").read_text()


def test_of_a_pipeline_the_files_of_its_components_go_out(shelf, tmp_path, unvisited):
    (shelf / "pipe" / "transformer" / "notes").write_text("mine")
    assert stage_folder(shelf / "pipe", tmp_path / "staged") == ("transformer/notes",)
    assert {"model_index.json", "transformer/config.json"} < set(inside(tmp_path / "staged"))


PLACES = [r"C:\Users\anna\x", "D:/data/anna/x", r"=C:\\Users\\anna", r"(\\server\share\x)", "/home/anna/x"]
PLACES += ["//server/share/x", "file:///C:/Users/anna/x"]
NO_PLACES = [r"a \\ b\frac{c}{d}", r"{a\\b\end{pmatrix}", "https://a.b/c", "//cdn.example.com/a/b", "a:b/c/d", "Q:\nA"]


def test_what_is_an_absolute_path():
    assert [text for text in PLACES + NO_PLACES if folder_checks.LOCAL_PATH.search(text)] == PLACES
