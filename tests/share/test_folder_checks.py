"""What is refused before the first byte goes out: one thing is wrong with a good folder, and one sentence says which."""

import dataclasses
import hashlib
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_cards import TRAIN
from small_repos import CARD, save_carded, save_model, score
from small_scores import make_result, small_llama

import mhla_hf
from mhla_hf.checkpoints.bundle import check_bundle
from mhla_hf.evaluation.records import Results
from mhla_hf.share import folder_checks
from mhla_hf.share.card import check_card, write_card
from mhla_hf.share.facts import not_measured
from mhla_hf.share.folder_checks import stage_folder

TOKEN = "hf_" + "aB3" * 12
RUNS_CODE = {2: b"\x80\x02cposix\nsystem\nq\x00X\x02\x00\x00\x00idq\x01\x85Rq\x02.", 0: b"cposix\nsystem\n(S'id'\ntR."}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A converted model with everything, and a pipeline's skeleton around its weights."""
    place = tmp_path_factory.mktemp("shelf")
    save_carded(place / "model", mhla_hf.convert(small_llama(), layers="2/3", block_size=32, num_blocks=4))
    pipe = place / "pipe"
    (pipe / "transformer").mkdir(parents=True)
    shutil.copy(place / "model" / "modeling_mhla.py", pipe / "transformer" / "modeling_mhla_dit.py")
    config = {"_class_name": "MHLADiTTransformer2DModel", "num_layers": 2, "mhla": mhla_hf.MHLASettings().to_dict()}
    (pipe / "transformer" / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.zeros(3)}, pipe / "transformer" / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "DiTPipeline", "transformer": ["modeling_mhla_dit", "MHLADiT"], "vae": [None, None]}
    (pipe / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "DDIMScheduler"]}))
    (pipe / "README.md").write_text(CARD)
    return place


@pytest.fixture
def folder(shelf, tmp_path, unvisited):
    """A copy of the model that may be broken; loading it elsewhere is left out here."""
    return shutil.copytree(shelf / "model", tmp_path / "mhla")


def edit(folder, file, **changes):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


def forge(folder):
    """Code that mhla_hf did not make, under a hash that fits it."""
    source = folder / "modeling_mhla.py"
    text = source.read_text() + "print('mine')\n"
    made = re.search(r"\nsha256: (\w+)\n", text)[1]
    lines = ("\nsha256: {}\n", '\nNAMESPACE = "{}"\n')
    for line in lines:
        text = text.replace(line.format(made), line.format("package"))
    forged = hashlib.sha256(text.encode()).hexdigest()[:12]
    for line in lines:
        text = text.replace(line.format("package"), line.format(forged), 1)
    assert check_bundle(text)["sha256"] == forged
    source.write_text(text)


def put(file, text):
    return lambda folder: (folder / file).write_text(text)


def append(file, text):
    return lambda folder: (folder / file).write_text((folder / file).read_text() + text)


def drop(*files):
    return lambda folder: [(folder / file).unlink() for file in files]


def weights(change):
    def carry_out(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return carry_out


def spoil(name, value):
    def change(tensors):
        tensors[name].view(-1)[5] = value

    return weights(change)


def truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-40])


def shard(named):
    def carry_out(folder):
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        names = load_file(folder / "model-00001-of-00001.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, named)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return carry_out


def link_out(folder):
    drop("tokenizer.json")(folder)
    (folder / "tokenizer.json").symlink_to("/etc/hostname")


def link_nowhere(folder):
    drop("generation_config.json")(folder)
    (folder / "generation_config.json").symlink_to("nothing")


def pipe_of(name):
    def carry_out(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return carry_out


def as_bytes(file, data):
    return lambda folder: (folder / file).write_bytes(data)


def zipped(folder):
    torch.save({"a": torch.zeros(2)}, folder / "vocab.txt")


BROKEN = {
    # code
    "source changed": (append("modeling_mhla.py", "\nimport os\n"), r"modeling_mhla\.py: the bundle was changed after"),
    "source by another": (put("modeling_mhla.py", "import os\n"), r"modeling_mhla\.py: text must be a bundle made by"),
    "no source": (drop("modeling_mhla.py"), r"no modeling_mhla\*\.py beside config\.json|AutoConfig"),
    # weights
    **{f"a pickle called tokenizer, protocol {number}": (as_bytes("tokenizer.model", data),
       r"tokenizer\.model does not begin as a \.model") for number, data in RUNS_CODE.items()},
    "no weights": (drop("model.safetensors"), r"holds no \.safetensors file"),
    "not a number": (spoil("model.norm.weight", float("nan")), r"'model\.norm\.weight' holds NaN or infinity"),
    "truncated": (truncate, r"model\.safetensors is no whole safetensors file"),
    "other weights than were judged": (spoil("model.norm.weight", 3.0), "was scored with other weights"),
    "shard outside": (shard("../../secret.safetensors"), r"names the file '\.\./\.\./secret\.safetensors', which is not"),
    "shard missing": (shard("model-00002-of-00002.safetensors"), "names the file 'model-00002-of-00002.safetensors'"),
    "index and whole": (
        put("model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors"}}'), "are both there"),
    # configuration
    "no config": (drop("config.json"), r'holds no config\.json with "mhla" settings' ),
    "config no JSON": (put("config.json", "{"), r"config\.json is not JSON"),
    "a nest of lists": (put("generation_config.json", "[" * 5000 + "]" * 5000), r"is not JSON|nested too deep"),
    "a softmax model": (put("config.json", '{"model_type": "llama"}'), 'no config.json with "mhla" settings'),
    "code outside": (
        lambda f: edit(f, "config.json", auto_map={"AutoModelForCausalLM": "../modeling_mhla.Model"}),
        r"auto_map.AutoModelForCausalLM is '\.\./modeling_mhla\.Model'"),
    "code that is not there": (
        lambda f: edit(f, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.Tokenizer", None]}),
        "tokenizer_config.json: auto_map.AutoTokenizer is 'tokenization_x.Tokenizer'"),
    "code of another repository, as a list": (
        lambda f: edit(f, "tokenizer_config.json", auto_map=["someone/evil--tok.Evil", None]),
        "tokenizer_config.json: auto_map is 'someone/evil--tok.Evil', expected a class of a modeling_mhla"),
    "code of another repository, deep down": (
        lambda f: edit(f, "config.json", text_config={"auto_map": {"AutoModel": "someone/evil--tok.Evil"}}),
        "config.json: text_config.auto_map.AutoModel is 'someone/evil--tok.Evil', expected a class"),
    "another repository's pipeline, by a name with a space": (
        lambda f: edit(f, "config.json", custom_pipelines={"task": {"impl": "someone/evil--pipe.Pipe ", "pt": []}}),
        "config.json: custom_pipelines.task.impl is 'someone/evil--pipe.Pipe ', which is code of another repository"),
    "another repository's generation": (
        put("generation_config.json", '{"custom_generate": "someone/evil"}'),
        "generation_config.json: custom_generate is 'someone/evil', which is code of another repository"),
    "code that was changed and hashed anew": (
        forge, "modeling_mhla.py is not the source that this mhla_hf makes"),
    "a value that leads up": (lambda f: edit(f, "config.json", vocab_file="../../etc/passwd"), "leads out of the folder"),
    "a model's origin": (
        lambda f: edit(f, "config.json", _name_or_path="/fsx/anna/a b"), "_name_or_path is '/fsx/anna/a b', which leads"),
    "an absolute value": (lambda f: edit(f, "config.json", data="/etc/passwd"), "data is '/etc/passwd', which leads out"),
    # text
    "a token": (
        lambda f: (drop("card.json")(f), append("README.md", f"token {TOKEN}\n")(f)),
        r"README\.md:\d+ holds what looks like a key, token"),
    "a token in a record": (
        lambda f: edit(f, "generation_config.json", hint=TOKEN), r"json:hint holds what looks like a key, token or p"),
    "a private key": (put("LICENSE", "a\n-----BEGIN OPENSSH PRIVATE KEY-----\n"), r"LICENSE:2 holds .*Private Key"),
    "metadata of weights": (
        lambda f: save_file(load_file(f / "model.safetensors"), f / "model.safetensors", metadata={"by": "/home/anna/x"}),
        r"model\.safetensors:1 names the local path"),
    # files
    "a link out": (link_out, r"tokenizer\.json is no regular file in the folder"),
    "a link to nothing": (link_nowhere, r"generation_config\.json is no regular file in the folder"),
    "a configuration that waits for a writer": (pipe_of("config.json"), r"config\.json is no regular file"),
    # card
    "no card": (drop("README.md", "card.json"), r"README\.md does not exist"),
    "no license": (put("README.md", "---\ntags: [a]\n---\n"), "license is None, expected a license of the Hub"),
    "a wrong number": (
        lambda f: (f / "README.md").write_text((f / "README.md").read_text().replace("0.5000", "0.6000")),
        r"README\.md is not what the files beside it say"),
    "front matter that is none": (put("README.md", "---\nlicense: mit\n  tags: [\n---\n"), "front matter that cannot be"),
    "no scores": (drop("card.json", "results.json"), "has no result for recall and generation: evaluate it and"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_says_what_is_wrong(folder, tmp_path, case):
    damage, said = BROKEN[case]
    damage(folder)
    with pytest.raises(ValueError, match=said) as caught:
        stage_folder(folder, tmp_path / "staged")
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


SHARED = {
    "LICENSE": b"text", "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "tiktoken.model": b"IQ== 0\nIg== 1\n",
    "preprocessor_config.json": b"{}", "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
}  # fmt: skip
# What may be secret, run code or do harm; none of it is on the list.
LEFT = {
    ".env": TOKEN.encode(), "checkpoint-10/optimizer.pt": RUNS_CODE[2], "runs/events": b"x", "plot.png": b"x",
    "pytorch_model.bin": RUNS_CODE[2], "x.SAFETENSORS": RUNS_CODE[2], "evil.PY": b"import os", "helper.py": b"x = 1",
    "notes.txt": RUNS_CODE[0] + b"\xff", "model.gguf": b"x", "adapter_model.safetensors": b"x",
    "model.fp16.safetensors": b"x", "a\nb.txt": b"x", "a\u2028b.json": b"x", f"{TOKEN}.txt": b"x",
    "Config.json": b"{}",
}  # fmt: skip


def inside(folder):
    return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def test_what_is_on_the_list_goes_out_and_the_rest_stays_and_is_named(folder, tmp_path, monkeypatch, caplog):
    """What is loaded elsewhere is exactly what goes out."""
    seen = []
    monkeypatch.setattr(folder_checks, "check_visit", lambda place, *given: seen.extend(inside(place)))
    (folder / "additional_chat_templates").mkdir()
    for name, data in SHARED.items():
        (folder / name).write_bytes(data)
    write_card(score(folder), name="tester/mhla", license="apache-2.0")
    own = set(inside(folder))
    for name, data in LEFT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "SHA256SUMS").write_text("old")
    os.mkfifo(folder / "waits")
    (folder / "broken.json").symlink_to("nothing")
    (folder / "secrets").symlink_to("/etc")
    left = stage_folder(folder, tmp_path / "staged", repo_id="tester/mhla")
    assert set(seen) == set(inside(tmp_path / "staged")) == own and set(SHARED) < own
    for name in own - {"results.json", "card.json"}:
        assert (tmp_path / "staged" / name).read_bytes() == (folder / name).read_bytes(), name
    assert set(left) == {name.split("/")[0] for name in LEFT} | {"waits", "broken.json", "secrets"}
    (line,) = [record.message for record in caplog.records if "stay" in record.message]
    assert all(ascii(name) in line for name in left) and "\n" not in line and "\u2028" not in line


# command -> the same without places: quoted words with spaces, any root, no root
COMMANDS = {
    "evaluate '/home/anna/my models/secret client/x' --tasks copa": "evaluate 'x' --tasks copa",
    "evaluate '--out=/somewhere/anna b/x y' --a \"/c d/e\"": "evaluate '--out=x y' --a \"e\"",
    "evaluate --x=/somewhere/a/b ~/c /q": "evaluate --x=b c /q",
    "evaluate 'data/my own.txt' a/b https://a.b/c 'https://a.b/c d' it's": (
        "evaluate 'data/my own.txt' a/b https://a.b/c 'https://a.b/c d' it's"
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_record_of_any_absolute_path_keeps_its_last_part(folder, tmp_path, command):
    """In train.json, results.json and card.json, and so on the card, which can be proven from what is sent."""
    Results([dataclasses.replace(r, command=command, model="/no root/x y") for r in Results.read(folder)]).write(folder)
    (folder / "train.json").write_text(json.dumps(TRAIN | {"command": 'x "/home/a b/c"'}))
    write_card(folder, name="tester/mhla", license="apache-2.0", limits=["Its texts lay in /somewhere/private/y."])
    stage_folder(folder, tmp_path / "sent")
    check_card(tmp_path / "sent")
    sent = {path: (tmp_path / "sent" / path).read_bytes() for path in inside(tmp_path / "sent")}
    card = sent["README.md"].decode()
    assert f"`{COMMANDS[command]}`" in card and "Its texts lay in y." in card
    assert all(place not in data for data in sent.values() for place in (b"somewhere", b"anna", b"/home", b"no root"))
    assert {record.command for record in Results.read(tmp_path / "sent")} == {COMMANDS[command]}
    train = json.loads(sent["train.json"])
    assert (train["data"]["name"], train["command"]) == ("topics.txt", 'x "c"')


# tasks -> what the card has to say was not measured
MEASURED = {
    ("heldout_recall", "heldout_cloze"): ["generation"],
    ("heldout_generation",): ["recall"],
    ("heldout_cloze",): ["recall", "generation"],
    ("needle_generation_512",): ["recall"],
    ("needle_recall_512",): ["generation"],
    ("longbench_passage_retrieval_en",): ["generation"],
    ("longbench_gov_report", "niah_single_1"): [],
    ("wmt16-ro-en", "ruler_vt"): [],
    ("raindrop", "fdaxyz"): ["recall", "generation"],
}


@pytest.mark.parametrize("tasks", MEASURED)
def test_which_scores_tell_of_recall_and_generation(tasks):
    assert not_measured([make_result(task=task) for task in tasks]) == MEASURED[tasks]
    assert not_measured([make_result(task=task, limit=1) for task in tasks]) == ["recall", "generation"]


def test_recall_and_generation_are_asked_of_converted_language_models(folder, tmp_path):
    text = write_card(score(folder, ("heldout_recall",)), name="tester/mhla", license="apache-2.0").read_text()
    assert "- Generation was not measured." in text and "- Recall of single facts" not in text
    with pytest.raises(ValueError, match="no result for generation: evaluate it and write the card again, or push it"):
        stage_folder(folder, tmp_path / "refused")
    stage_folder(folder, tmp_path / "draft", draft=True)
    sizes = {
        "vocab_size": 400,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    scratch = mhla_hf.MHLAForCausalLM(mhla_hf.MHLAConfig.preset("tiny", **sizes))
    save_model(tmp_path / "scratch", scratch)
    stage_folder(tmp_path / "scratch", tmp_path / "staged", card=CARD)
    assert (tmp_path / "staged" / "README.md").read_text() == CARD


PIPELINES = {
    "as it is": ({}, None),
    "no source for the component": ({"transformer": ["modeling_mhla_wan", "MHLAWan"]}, "comes from 'modeling_mhla_wan'"),
    "saved again after loading": (
        {"transformer": ["diffusers_modules.local.modeling_mhla_dit", "MHLADiT"]}, "comes from 'diffusers_modules.local"),
    "an unknown library": ({"vae": ["os", "system"]}, "vae comes from 'os'"),
    "a pipeline of one's own": ({"_class_name": ["pipeline", "Mine"]}, "_class_name is"),
}  # fmt: skip


@pytest.mark.parametrize("case", PIPELINES)
def test_components_of_a_pipeline(shelf, tmp_path, unvisited, case):
    changes, said = PIPELINES[case]
    pipe = shutil.copytree(shelf / "pipe", tmp_path / "pipe")
    edit(pipe, "model_index.json", **changes)
    if said is None:
        assert stage_folder(pipe, tmp_path / "staged") == ()
    else:
        with pytest.raises(ValueError, match=said):
            stage_folder(pipe, tmp_path / "staged")


def test_what_would_not_load_elsewhere_is_refused(shelf, tmp_path):
    """The real clean process: a weight of the model is not in the file."""
    folder = shutil.copytree(shelf / "model", tmp_path / "mhla")
    weights(lambda tensors: tensors.pop("model.layers.1.self_attn.mhla.mixing.weight"))(folder)
    drop("card.json", "results.json")(folder)
    with pytest.raises(ValueError, match=r"in a process without mhla_hf the model lacks the weight .*mixing"):
        stage_folder(folder, tmp_path / "staged", draft=True)
