"""What is refused before the first byte goes out: one thing is wrong with a good folder, and one sentence says which.

Run: pytest tests/hub/test_folder_checks.py
"""

import dataclasses
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_cards import TRAIN
from small_repos import CARD, save_carded, save_model, score
from small_scores import make_result, small_llama

import mhla_hf
from mhla_hf.checksums import check_sums, read_sums
from mhla_hf.hub import folder_checks
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.hub.folder_checks import check_folder, check_front_matter
from mhla_hf.hub.leaks import check_leaks
from mhla_hf.hub.plain_card import plain_card
from mhla_hf.scores.results import Results, fingerprint_folder

TOKEN = "hf_" + "aB3" * 12


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A converted model with everything, and a pipeline's skeleton around its weights."""
    place = tmp_path_factory.mktemp("shelf")
    save_carded(place / "model", mhla_hf.convert(small_llama(), layers="2/3", block_size=32, num_blocks=4))
    pipe = place / "pipe"
    (pipe / "transformer").mkdir(parents=True)
    shutil.copy(place / "model" / "modeling_mhla.py", pipe / "transformer" / "modeling_mhla_dit.py")
    save_file({"weight": torch.zeros(3)}, pipe / "transformer" / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "DiTPipeline", "transformer": ["modeling_mhla_dit", "MHLADiT"], "vae": [None, None]}
    (pipe / "model_index.json").write_text(json.dumps({**index, "scheduler": ["diffusers", "DDIMScheduler"]}))
    (pipe / "README.md").write_text(CARD)
    return place


@pytest.fixture
def folder(shelf, tmp_path, monkeypatch):
    """A copy of the model that may be broken; loading it elsewhere is left out here."""
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)
    return shutil.copytree(shelf / "model", tmp_path / "mhla")


def edit(folder, file, **changes):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | changes))


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
    (folder / "notes.txt").symlink_to("/etc/hostname")


def link_folder(folder):
    (folder / "more").symlink_to(folder.parent)


def disguised(folder):
    (folder / "notes.txt").write_bytes(pickle.dumps({"a": 1}))


def as_bytes(file, data):
    return lambda folder: (folder / file).write_bytes(data)


RUNS_CODE = {2: b"\x80\x02cposix\nsystem\nq\x00X\x02\x00\x00\x00idq\x01\x85Rq\x02.", 0: b"cposix\nsystem\n(S'id'\ntR."}


def zipped(folder):
    torch.save({"a": torch.zeros(2)}, folder / "vocab.txt")


BROKEN = {
    # code
    "source changed": (append("modeling_mhla.py", "\nimport os\n"), r"modeling_mhla\.py: the bundle was changed after"),
    "source by another": (put("modeling_mhla.py", "import os\n"), r"modeling_mhla\.py: text must be a bundle made by"),
    "other code": (put("helper.py", "x = 1\n"), r"helper\.py is not made by mhla_hf"),
    "no source": (drop("modeling_mhla.py"), r"no modeling_mhla\*\.py beside config\.json|AutoConfig"),
    # weights
    "pickled": (put("pytorch_model.bin", "x"), r"pytorch_model\.bin: weights are shared as safetensors only"),
    "pickled optimiser": (put("optimizer.pt", "x"), r"optimizer\.pt: weights are shared as safetensors only"),
    "pickle in disguise": (disguised, r"notes\.txt is no text although it is called so"),
    "archive in disguise": (zipped, r"vocab\.txt is no text although it is called so"),
    "a pickle called picture": (as_bytes("a.png", RUNS_CODE[2]), r"a\.png does not begin as a \.png file does"),
    "a pickle called video": (as_bytes("a.mp4", RUNS_CODE[2]), r"a\.mp4 does not begin as a \.mp4 file does"),
    "a pickle called tokenizer": (as_bytes("tokenizer.model", RUNS_CODE[2]), r"tokenizer\.model does not begin as a"),
    "an old pickle called tokenizer": (as_bytes("tokenizer.model", RUNS_CODE[0]), r"tokenizer\.model is a pickle although"),
    "an old pickle called text": (as_bytes("a.txt", RUNS_CODE[0]), r"a\.txt is a pickle although it is called otherwise"),
    "old pickled data": (as_bytes("a.md", pickle.dumps({"a": 1}, protocol=0)), r"a\.md is a pickle although"),
    "no weights": (drop("model.safetensors"), r"holds no \.safetensors file"),
    "not a number": (spoil("model.norm.weight", float("nan")), r"'model\.norm\.weight' holds NaN or infinity"),
    "infinite": (spoil("model.embed_tokens.weight", float("inf")), r"'model\.embed_tokens\.weight' holds NaN or"),
    "truncated": (truncate, r"model\.safetensors is no whole safetensors file"),
    "empty": (put("model.safetensors", ""), r"model\.safetensors is no whole safetensors file"),
    "other weights than were judged": (spoil("model.norm.weight", 3.0), "was scored with other weights"),
    "shard outside": (shard("../../secret.safetensors"), r"names the file '\.\./\.\./secret\.safetensors', which is not"),
    "shard missing": (shard("model-00002-of-00002.safetensors"), "names the file 'model-00002-of-00002.safetensors'"),
    "index and whole": (
        put("model.safetensors.index.json", '{"weight_map": {"a": "model.safetensors"}}'), "are both there"),
    # configuration
    "no config": (drop("config.json"), r"holds neither config\.json nor model_index\.json"),
    "config no JSON": (put("config.json", "{"), r"config\.json is not JSON"),
    "other JSON no JSON": (put("generation_config.json", "{]"), r"generation_config\.json is not JSON"),
    "a softmax model": (put("config.json", '{"model_type": "llama"}'), "names no MHLA class in auto_map"),
    "code of another repository": (
        lambda f: edit(f, "config.json", auto_map={"AutoModelForCausalLM": "evil/code--modeling.Model"}),
        "auto_map.AutoModelForCausalLM is 'evil/code--modeling.Model', expected a class of a modeling_mhla"),
    "code outside": (
        lambda f: edit(f, "config.json", auto_map={"AutoModelForCausalLM": "../modeling_mhla.Model"}),
        r"auto_map.AutoModelForCausalLM is '\.\./modeling_mhla\.Model'"),
    "code that is not there": (
        lambda f: edit(f, "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.Tokenizer", None]}),
        "tokenizer_config.json: auto_map.AutoTokenizer is 'tokenization_x.Tokenizer'"),
    "a value that leads up": (lambda f: edit(f, "config.json", vocab_file="../../etc/passwd"), "leads out of the folder"),
    "a model's origin": (
        lambda f: edit(f, "config.json", _name_or_path="/fsx/anna/a b"), "_name_or_path is '/fsx/anna/a b', which leads"),
    "an absolute value": (lambda f: edit(f, "config.json", data="/etc/passwd"), "data is '/etc/passwd', which leads out"),
    # text
    "a token": (append("README.md", f"token {TOKEN}\n"), r"README\.md.*holds what looks like a Hugging Face token|shows"),
    "a token in a record": (lambda f: edit(f, "generation_config.json", hint=TOKEN), r"Face token \(hf_aB3\.\.\.\): take"),
    "a token in a name": (put(f"{TOKEN}.txt", "x"), r"the name of a file or folder \(hf_a\.\.\.\) holds what looks like"),
    "a private key": (put("notes.txt", "-----BEGIN OPENSSH PRIVATE KEY-----\n"), r"notes\.txt:1 .*a private key"),
    "a token in a vocabulary": (lambda f: edit(f, "tokenizer.json", hint=TOKEN), r"tokenizer\.json:1 holds what looks like"),
    "a home folder": (put("notes.txt", "a\nsee /home/anna/data.txt\n"), r"notes\.txt:2 names the local path '/home/anna"),
    **{f"a folder in {root}": (put("notes.txt", f"x={root}/anna/x"), f"notes\\.txt:1 names the local path '{root}/anna/x'")
       for root in ("/Volumes", "/content/drive", "/kaggle/input", "/lustre", "/nfs", "/fsx", "/gpfs", "/cluster/u")},
    "a Windows folder": (put("notes.txt", r"C:\Users\anna\x"), r"names the local path 'C:\\\\Users"),
    "a home folder, short": (put("notes.txt", "cp ~/secret.txt ."), "names the local path '~/secret.txt'"),
    "metadata of weights": (
        lambda f: save_file(load_file(f / "model.safetensors"), f / "model.safetensors", metadata={"by": "/home/anna/x"}),
        r"model\.safetensors:1 names the local path"),
    # files
    "an unknown kind": (put("model.gguf", "x"), r"model\.gguf is not a kind of file that a model needs \(\.gguf\)"),
    "a link out": (link_out, r"notes\.txt is a link out of the folder"),
    "a linked folder": (link_folder, "is a link"),
    # card
    "no card": (drop("README.md", "card.json"), r"README\.md does not exist"),
    "no licence": (put("README.md", "---\ntags: [a]\n---\n"), "license is None, expected an identifier of the Hub"),
    "no front matter": (put("README.md", "# Model\n"), "license is None, expected an identifier of the Hub"),
    "a wrong number": (
        lambda f: (f / "README.md").write_text((f / "README.md").read_text().replace("0.5000", "0.6000")),
        "shows 0.6000 where the files say 0.5000"),
    "no scores": (drop("card.json", "results.json"), "has no result for recall and generation: evaluate it and"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_says_what_is_wrong(folder, case):
    damage, said = BROKEN[case]
    damage(folder)
    with pytest.raises(ValueError, match=said) as caught:
        check_folder(folder)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


def test_a_good_folder_passes_and_what_is_not_shared_is_left_out(folder, caplog):
    caplog.set_level("INFO", "mhla_hf")
    for place in (".git", ".cache", "__pycache__", "runs", "checkpoint-10"):
        (folder / place).mkdir()
        (folder / place / "thing.bin").write_bytes(b"\x80")
    (folder / ".env").write_text(TOKEN)
    (folder / "SHA256SUMS").write_text("old")
    (folder / "LICENSE").write_text("text")
    binaries = {"plot.png": b"\x89PNG\r\n\x1a\n\0\0", "photo.jpg": b"\xff\xd8\xff\xe0", "moving.gif": b"GIF89a"}
    binaries |= {
        "small.webp": b"RIFF\0\1\2\3WEBPVP8",
        "film.mp4": b"\0\0\0\x20ftypisom",
        "film.webm": b"\x1a\x45\xdf\xa3\1",
    }
    binaries |= {"tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2", "tiktoken.model": b"IQ== 0\nIg== 1\n"}
    for name, data in binaries.items():
        (folder / name).write_bytes(data)
    score(folder)
    write_card(folder, name="tester/mhla", license="apache-2.0")
    (folder / "link.md").symlink_to(folder / "README.md")
    checked = check_folder(folder, repo_id="tester/mhla")
    assert checked.kind == "language" and checked.card == (folder / "README.md").read_text()
    assert set(checked.files) == {
        "README.md", "card.json", "config.json", "generation_config.json", "model.safetensors", "modeling_mhla.py",
        "results.json", "tokenizer.json", "tokenizer_config.json", "LICENSE", "link.md", *binaries,
    }  # fmt: skip
    assert f"push: checkpoint-10 in {folder} stays here: states of a training run are not shared" in caplog.text


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
    checked = check_folder(folder)
    sent = {path: checked.rewritten.get(path) or file.read_bytes() for path, file in checked.files.items()}
    (tmp_path / "sent").mkdir()
    for path, data in sent.items():
        (tmp_path / "sent" / path).write_bytes(data)
    check_card(tmp_path / "sent")
    assert f"`{COMMANDS[command]}`" in checked.card and "Its texts lay in y." in checked.card
    assert all(place not in data for data in sent.values() for place in (b"somewhere", b"anna", b"/home", b"no root"))
    assert {record.command for record in Results.read(tmp_path / "sent")} == {COMMANDS[command]}
    train = json.loads(sent["train.json"])
    assert (train["data"]["name"], train["command"]) == ("topics.txt", 'x "c"')


def test_records_are_shared_without_the_folders_of_this_computer(tmp_path, monkeypatch):
    """A distillation called with absolute paths notes them; what is sent is still a card that can be proven."""
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)
    folder = save_model(tmp_path / "mhla", mhla_hf.convert(small_llama(), layers="2/3", block_size=32, num_blocks=4))
    record = make_result(
        fingerprint=fingerprint_folder(folder), model=str(folder), command=f"evaluate {folder} --x=/home/a/b"
    )
    Results([dataclasses.replace(record, task=task) for task in ("a_recall", "a_generation")]).write(folder)
    write_card(folder, name="tester/mhla", license="mit")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    checked = check_folder(folder)
    assert set(checked.rewritten) == {"README.md", "results.json"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    sent = tmp_path / "sent"
    sent.mkdir()
    for path in checked.files:
        (sent / path).write_bytes(checked.rewritten.get(path) or checked.files[path].read_bytes())
    assert "`evaluate mhla --x=b`" in checked.card and str(tmp_path) not in checked.card
    check_card(sent)


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
LACKS = {
    "recall": "- Recall of single facts from far back was not measured.",
    "generation": "- Generation was not measured.",
}


@pytest.mark.parametrize("tasks", MEASURED)
def test_recall_and_generation_are_asked_of_converted_language_models(folder, tasks):
    write_card(score(folder, tasks), name="tester/mhla", license="apache-2.0")
    absent, text = MEASURED[tasks], (folder / "README.md").read_text()
    assert [name for name, said in LACKS.items() if said in text] == absent
    if absent:
        said = f"no result for {' and '.join(absent)}: evaluate it and write the card again, or push it"
        with pytest.raises(ValueError, match=said):
            check_folder(folder)
    assert check_folder(folder, draft=bool(absent)).kind == "language"


def test_scores_of_a_part_of_a_task_are_no_scores_of_recall_and_generation(folder):
    few = [dataclasses.replace(record, limit=1, samples=1) for record in Results.read(folder)]
    Results(few).write(folder)
    text = write_card(folder, name="tester/mhla", license="apache-2.0").read_text()
    assert all(said in text for said in LACKS.values()) and "### Recall\n" in text
    with pytest.raises(ValueError, match="no result for recall and generation"):
        check_folder(folder)


def test_a_model_from_scratch_needs_no_scores(folder, tmp_path):
    scratch = mhla_hf.MHLAForCausalLM(
        mhla_hf.MHLAConfig.preset(
            "tiny", vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
    )
    save_model(tmp_path / "scratch", scratch)
    assert check_folder(tmp_path / "scratch", card=CARD).card == CARD


PIPELINES = {
    "as it is": ({}, None),
    "no source for the component": ({"transformer": ["modeling_mhla_wan", "MHLAWan"]}, "comes from 'modeling_mhla_wan'"),
    "saved again after loading": (
        {"transformer": ["diffusers_modules.local.modeling_mhla_dit", "MHLADiT"]}, "comes from 'diffusers_modules.local"),
    "an unknown library": ({"vae": ["os", "system"]}, "vae comes from 'os'"),
    "a pipeline of one's own": ({"_class_name": ["pipeline", "Mine"]}, "_class_name is"),
}  # fmt: skip


@pytest.mark.parametrize("case", PIPELINES)
def test_components_of_a_pipeline(shelf, tmp_path, monkeypatch, case):
    changes, said = PIPELINES[case]
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)
    pipe = shutil.copytree(shelf / "pipe", tmp_path / "pipe")
    edit(pipe, "model_index.json", **changes)
    if said is None:
        assert check_folder(pipe).kind == "pipeline"
    else:
        with pytest.raises(ValueError, match=said):
            check_folder(pipe)


def test_what_would_not_load_elsewhere_is_refused(shelf, tmp_path):
    """The real clean process: a weight of the model is not in the file."""
    folder = shutil.copytree(shelf / "model", tmp_path / "mhla")
    weights(lambda tensors: tensors.pop("model.layers.1.self_attn.mhla.mixing.weight"))(folder)
    drop("card.json", "results.json")(folder)
    with pytest.raises(ValueError, match=r"in a process without mhla_hf the model lacks the weight .*mixing"):
        check_folder(folder, draft=True)


FRONT = {
    "license: apache-2.0": None,
    "license: other\nlicense_name: mine\nlicense_link: https://a.b/c": None,
    "license: mit\nbase_model: user/model\ntags: [mhla]\nlanguage: en": None,
    "license: mit\nbase_model: [user/model, user/other]\ndatasets: [user/data]": None,
    "license: apache2.0": "license is 'apache2.0', expected an identifier",
    "license: unknown": "license is 'unknown'",
    "license: [mit, apache-2.0]": r"license is \['mit'",
    "license: other": "'other' needs license_name",
    "license: other\nlicense_name: mine": "'other' needs license_link",
    "license: mit\ntags: mhla": "tags is 'mhla', expected a list",
    "license: mit\nbase_model: ./llama": "base_model is './llama', expected a Hub id",
    "license: mit\ndatasets: [3]": r"datasets is \[3\]",
    "license: mit\npipeline_tag: [a]": r"pipeline_tag is \['a'\]",
    "license: mit\n  tags: [": "front matter that cannot be read",
    "license: mit\nmodel-index:\n- name: a\n  results: 3": "front matter that cannot be read",
}


@pytest.mark.parametrize("front", FRONT)
def test_front_matter(front):
    text, said = f"---\n{front}\n---\n\n# A model\n", FRONT[front]
    if said is None:
        check_front_matter(text, "README.md")
    else:
        with pytest.raises(ValueError, match=said):
            check_front_matter(text, "README.md")


HARMLESS = (
    "see https://example.org/home/anna/data and http://a.b/tmp/x",
    "/usr/bin/python, a/tmp/b, out/home/x, 1/2, and/or, ~5 %, /",
    "the token hf_transfer and the module sk-learn, task-based-learning-with-a-very-long-name-indeed-yes",
    "password: required; the api_key is yours, api_key = os.environ, secret_key=some_variable_of_yours, password=None",
    '{"password": 30921, "apikey": 118, "api_key": null, "access_token": 1234567890, "passwd": 1030921,"x": 1}',
    "a regular expression such as C:\\d+ and a time 12:30",
)


def test_harmless_text_passes(monkeypatch):
    for text in HARMLESS:
        check_leaks("README.md", text.encode(), ("/root", "/srv/somewhere"))
    check_leaks("tokenizer.json", b'{"/home/x": 3, "~/a": 4}')
    monkeypatch.setenv("HF_TOKEN", "my-very-own-token")
    with pytest.raises(ValueError, match=r"notes\.txt:2 holds your own Hugging Face token") as caught:
        check_leaks("notes.txt", b"a\nmy-very-own-token")
    assert "my-very" not in str(caught.value)
    with pytest.raises(ValueError, match="names the local path '/elsewhere/me/too'"):
        check_leaks("notes.txt", b"in /elsewhere/me/too", ("/elsewhere/me",))


SECRETS = (
    "AKIAIOSFODNN7EXAMPLE", "aws_secret_access_key = " + "a1/+" * 10, "ghp_" + "a1B2" * 9, "github_pat_" + "a1_B" * 11,
    "glpat-" + "a1B2c" * 4, "sk-" + "a1B2" * 12, "sk-ant-api-" + "a1B2" * 12, "AIza" + "a1B2c" * 7, "xoxb-" + "1234a" * 5,
    "WANDB_API_KEY=" + "0a" * 20, "api_org_" + "AbCd" * 9, "pypi-AgEIcHlwaS5vcmc" + "A1b2" * 20, "npm_" + "a1B2" * 9,
    "eyJhbGciOiJIUzI1" + ".eyJzdWIiOiIxMjM0" + ".dozjgNryP4J3jVmN", "API_KEY=abcdef0123456789abcdef", "password: hunter2",
    "my_secret_key: '0123456789abcdef'", "db_password=pa55word",
    "https://anna:geheim@example.org/x", "-----BEGIN RSA PRIVATE KEY-----",
)  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_found_and_not_repeated(secret):
    with pytest.raises(ValueError, match=r"notes\.txt:3 holds what looks like") as caught:
        check_leaks("notes.txt", f'{{\n"a": 1,\n"b": "{secret}"}}'.encode())
    assert secret not in str(caught.value)


def test_checksums_are_read_as_they_were_written(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("words\n")
    os.system(f"cd {tmp_path} && sha256sum 'sub/a b.txt' > SHA256SUMS")
    check_sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text((tmp_path / "SHA256SUMS").read_text() + f"{'0' * 64}  not-here.txt\n")
    check_sums(tmp_path)
    (tmp_path / "sub" / "a b.txt").write_text("wordz\n")
    with pytest.raises(ValueError, match=r"a b\.txt was changed after the model was pushed"):
        check_sums(tmp_path)
    for bad in ("nonsense", f"{'0' * 64}  ../up", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  a"):
        with pytest.raises(ValueError, match="expected lines of a sha256 and a path"):
            read_sums(bad, "SHA256SUMS")


def test_a_card_without_a_number():
    text = plain_card("tester/wan", "pipeline", "WanPipeline", license="apache-2.0", base_model=None)
    check_front_matter(text, "README.md")
    assert "pipeline_tag: text-to-video" in text and "library_name: diffusers" in text
    assert 'DiffusionPipeline.from_pretrained("tester/wan", trust_remote_code=True)' in text
    assert "a transformer class of diffusers itself would find its weights here" in text
    with pytest.raises(ValueError, match="license is missing"):
        plain_card("tester/wan", "pipeline", "WanPipeline", license=None)
