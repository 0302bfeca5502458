"""A push ends complete or not at all, over HTTP with the real client; what the Hub holds afterwards is what is judged."""

import json
import random
import shutil
import subprocess

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load
from small_repos import CARD, save_carded, save_model
from small_scores import small_llama, small_tokenizer

import mhla_hf
from mhla_hf.checkpoints.checksums import check_sums
from mhla_hf.cli import main
from mhla_hf.share import folder_checks
from mhla_hf.share import push as room
from mhla_hf.share.push import push, send

NAME = "tester/mhla"
NOTHING, WHOLE = "nothing was committed", "is there, whole"
NOT_OURS = {".gitattributes", "SHA256SUMS"}


def converted(seed=0):
    return mhla_hf.convert(small_llama(seed), layers="2/3", block_size=32, num_blocks=4)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two versions of a converted model with scores and card, and a pipeline's worth of trouble in neither."""
    place = tmp_path_factory.mktemp("shelf")
    save_carded(place / "old", converted(1))
    save_carded(place / "new", converted(2))
    return place


@pytest.fixture
def elsewhere(monkeypatch):
    """Pushes without the seconds that loading in a clean process takes; `test_share.py` has them."""
    monkeypatch.setattr(folder_checks, "check_visit", lambda *given: None)


@pytest.fixture(scope="module")
def checked(shelf):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_checks, "check_visit", lambda *given: None)
        return {name: folder_checks.check_folder(shelf / name) for name in ("old", "new")}


def content(checked):
    """path -> bytes of a folder that was checked."""
    return {path: file.read_bytes() for path, file in checked.files.items()}


def held(repo, revision="main"):
    """path -> bytes that a repository holds, without the Hub's file and the checksums."""
    return {path: data for path, data in repo.files(revision).items() if path not in NOT_OURS}


def test_everything_arrives_in_one_commit(hub, shelf, capsys, tmp_path):
    assert main(["push", str(shelf / "new"), NAME, "--private", "--tag", "v1", "--tag", "best", "--quiet"]) == 0
    repo = hub.repos[NAME]
    oid = repo.refs["refs/heads/main"]
    assert capsys.readouterr().out == f"{hub.endpoint}/{NAME}/commit/{oid}\nrevision {oid}\n"
    assert len(repo.commits) == 2 and repo.private
    assert repo.refs["refs/tags/v1"] == repo.refs["refs/tags/best"] == oid
    assert held(repo) == {p.name: p.read_bytes() for p in (shelf / "new").iterdir() if p.is_file()}
    for path, data in repo.files().items():
        (tmp_path / path).write_bytes(data)
    check_sums(tmp_path)
    proven = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, capture_output=True)
    assert proven.returncode == 0, proven.stderr
    assert set((tmp_path / "SHA256SUMS").read_text().split()[1::2]) == set(held(repo))


def test_what_is_no_part_of_the_model_stays_and_the_caller_hears_of_it(hub, shelf, elsewhere, tmp_path, caplog):
    folder = shutil.copytree(shelf / "new", tmp_path / "mine")
    (folder / "notes.txt").write_text("mine")
    (folder / "runs").mkdir()
    made, again = push(folder, NAME, progress=False), push(folder, NAME, progress=False)
    assert made.left == again.left == ("notes.txt", "runs") and (made.new, again.new) == (True, False)
    assert set(held(hub.repos[NAME])) == {file.name for file in (shelf / "new").iterdir()}
    assert caplog.text.count("'notes.txt', 'runs'") == 2


def test_a_second_push_changes_only_what_changed(hub, checked):
    first = send(checked["old"], NAME, tags=["v1"])
    assert first.new and hub.sent("PUT", "/storage/") == 2
    again = send(checked["old"], NAME, tags=["v1"])
    assert (again.revision, again.new) == (first.revision, False) and len(hub.repos[NAME].commits) == 2
    assert hub.sent("POST", "/tag/") == 1
    second = send(checked["new"], NAME)
    assert hub.sent("PUT", "/storage/") == 3  # the source file was there
    repo = hub.repos[NAME]
    assert held(repo) == content(checked["new"]) and held(repo, "v1") == content(checked["old"])
    assert repo.commits[second.revision].parent == first.revision


def test_what_would_still_be_loaded_goes(hub, checked):
    old = {"pytorch_model.bin": b"\x80\x02pickle", "tokenizer.model": b"old", "sample.png": b"png", "notes.md": b"mine"}
    old |= {"model-00001-of-00002.safetensors": b"\0" * 10, "evil.py": b"import os"}
    hub.put(NAME, old)
    send(checked["new"], NAME)
    assert held(hub.repos[NAME]) == {**content(checked["new"]), "sample.png": b"png", "notes.md": b"mine"}


def test_the_repositorys_own_gitignore_leaves_nothing_out(hub, checked):
    hub.put(NAME, {".gitignore": b"model.safetensors\nconfig.json\n"})
    send(checked["new"], NAME)
    assert content(checked["new"]).items() <= held(hub.repos[NAME]).items()


def test_a_pull_request_and_a_branch(hub, checked):
    hub.put("other/mhla", {"README.md": CARD.encode()})
    made = send(checked["new"], "other/mhla", create_pr=True)
    repo = hub.repos["other/mhla"]
    assert made.url == f"{hub.endpoint}/other/mhla/discussions/1"
    assert held(repo, "refs/pr/1") == content(checked["new"]) and held(repo) == {"README.md": CARD.encode()}
    with pytest.raises(ValueError, match="create_pr: other/none is not there"):
        send(checked["new"], "other/none", create_pr=True)
    send(checked["old"], NAME)
    send(checked["new"], NAME, revision="dev")
    assert held(hub.repos[NAME]) == content(checked["old"])
    assert held(hub.repos[NAME], "dev") == content(checked["new"])


def test_what_had_arrived_is_not_sent_again(hub, checked):
    hub.fault("503", path="/storage/", method="PUT", skip=1, times=6)
    with pytest.raises(OSError, match="nothing was committed; push again: what has arrived is not sent again"):
        send(checked["new"], NAME)
    assert held(hub.repos[NAME]) == {} and len(hub.repos[NAME].lfs) == 1
    whole = sum(size for method, path, size in hub.log if method == "PUT")
    hub.log.clear()
    send(checked["new"], NAME)
    assert held(hub.repos[NAME]) == content(checked["new"]) and hub.sent("PUT", "/storage/") == 1 and whole


def test_a_lost_answer_is_said_to_be_one_and_makes_no_second_commit(hub, checked):
    hub.fault("cut after", path="/commit/")
    with pytest.raises(OSError, match="whether the commit was made is not known; push again"):
        send(checked["new"], NAME)
    assert held(hub.repos[NAME]) == content(checked["new"])
    assert not send(checked["new"], NAME).new and len(hub.repos[NAME].commits) == 2


REFUSALS = {
    "token expired": (("401", "/commit/"), "nothing was committed; log in with a token that may write"),
    "token unknown": (("401", "/api/models/"), "nothing was committed; log in with a token that may write"),
    "arrived damaged": (
        ("damage", "/storage/"),
        r"BadDigest: the content does not match its sha256 \(400\); nothing was",
    ),
    "no answer": (("cut", "/preupload/", None, 0, 99), "Server disconnected.*; nothing was committed"),
    "busy for long": (("503", "/api/repos/create", None, 0, 99), r"\(503\); nothing was committed; push again"),
    "tag": (("503", "/tag/", None, 0, 99), r"the model is there, whole, as commit \w{40}; push again"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_message_says_what_is_there_and_what_to_do(hub, checked, case):
    fault, said = REFUSALS[case]
    hub.fault(*fault)
    with pytest.raises(OSError, match=said) as caught:
        send(checked["new"], NAME, tags=["v1"])
    assert str(caught.value).startswith(f"push to {NAME}: ") and "\n" not in str(caught.value)
    there = held(hub.repos[NAME]) if NAME in hub.repos else {}
    assert there == (content(checked["new"]) if case == "tag" else {})
    hub.faults.clear()
    send(checked["new"], NAME, tags=["v1"])
    assert held(hub.repos[NAME]) == held(hub.repos[NAME], "v1") == content(checked["new"])


def test_who_may_not_write(hub, checked, monkeypatch):
    hub.put("other/mhla", {"README.md": b""})
    with pytest.raises(OSError, match=r"\(403\).*nothing was committed; take a token that may write there"):
        send(checked["new"], "other/mhla")
    with pytest.raises(OSError, match="nothing was committed; log in"):
        send(checked["new"], NAME, token=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="offline mode is enabled"):
        send(checked["new"], NAME)


def test_somebody_else_was_faster(hub, checked, monkeypatch):
    send(checked["old"], NAME)
    sending = HfApi.preupload_lfs_files

    def and_meanwhile(api, *given, **options):
        sending(api, *given, **options)
        hub.put(NAME, {"README.md": b"faster"})
        monkeypatch.setattr(HfApi, "preupload_lfs_files", sending)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", and_meanwhile)
    with pytest.raises(OSError, match=r"\(412\).*nothing was committed; somebody else wrote to the repository"):
        send(checked["new"], NAME)
    assert held(hub.repos[NAME]) == {"README.md": b"faster"}


def test_a_file_that_changes_meanwhile_is_not_pushed(hub, shelf, elsewhere, tmp_path, monkeypatch):
    folder = shutil.copytree(shelf / "new", tmp_path / "mine")
    sending = HfApi.preupload_lfs_files

    def and_meanwhile(api, *given, **options):
        sending(api, *given, **options)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(HfApi, "preupload_lfs_files", and_meanwhile)
    with pytest.raises(ValueError, match=r"config\.json changed while it was pushed: nothing was committed"):
        push(folder, NAME)
    assert held(hub.repos[NAME]) == {}


def test_the_hubs_own_opinion_of_the_card(hub, shelf, elsewhere, tmp_path):
    """A server that does not know this license yet."""
    hub.licenses = hub.licenses - {"gemma"}
    folder = shutil.copytree(shelf / "new", tmp_path / "mine")
    for name in ("card.json", "results.json"):
        (folder / name).unlink()
    (folder / "README.md").write_text(CARD.replace("apache-2.0", "gemma"))
    with pytest.raises(ValueError, match=r"README\.md: the Hub refuses the card's front matter: .*license"):
        push(folder, NAME, draft=True)
    assert held(hub.repos[NAME]) == {} and not hub.sent("PUT", "")


ARGUMENTS = {
    "no user": ({"repo_id": "mhla"}, "repo_id is 'mhla'; expected the user or organization too"),
    "no id": ({"repo_id": "a/b/c"}, "repo_id is 'a/b/c'"),
    "bad id": ({"repo_id": "tester/--"}, "repo_id is 'tester/--'"),
    "tag": ({"tags": ["v 1"]}, "tags: got 'v 1'"),
    "tag like a commit": ({"tags": ["0" * 40]}, "tags: got"),
    "branch": ({"revision": "../main"}, r"revision: got '\.\./main'"),
    "request and tag": ({"create_pr": True, "tags": "v1"}, "tags does not go with create_pr"),
    "request and branch": ({"create_pr": True, "revision": "dev"}, "revision does not go with create_pr"),
    "tokenizer of a folder": ({"tokenizer": 1}, "tokenizer goes with a model"),
    "license of a card": ({"license": "mit"}, r"license is what .*README\.md says"),
    "no folder": ({"what": "nowhere"}, "folder must be a saved model's directory, got 'nowhere'"),
    "no model": ({"what": 3}, "what is a int; expected a folder, a model or a pipeline"),
    "other name": ({"repo_id": "tester/other"}, r"is the card of 'tester/mhla', not of 'tester/other'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_refused_before_anything_is_sent(hub, shelf, elsewhere, case):
    changed, said = ARGUMENTS[case]
    arguments = {"what": shelf / "new", "repo_id": NAME} | changed
    with pytest.raises((ValueError, TypeError), match=said):
        push(**arguments)
    assert hub.log == []


def test_private_means_private_and_a_tag_stays_where_it_is(hub, checked):
    send(checked["old"], NAME, tags=["v1"])
    with pytest.raises(ValueError, match="private: tester/mhla is there and public"):
        send(checked["new"], NAME, private=True)
    with pytest.raises(ValueError, match=r"tags: 'v1' is taken by commit \w{40} of tester/mhla"):
        send(checked["new"], NAME, tags=["v1"])
    assert held(hub.repos[NAME]) == content(checked["old"])


def test_a_model_in_memory(hub, elsewhere):
    model = mhla_hf.MHLAForCausalLM(
        mhla_hf.MHLAConfig.preset(
            "tiny", vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        )
    )
    made = push(model, "tester/scratch", tokenizer=small_tokenizer(), license="apache-2.0", progress=False)
    files = hub.repos["tester/scratch"].files(made.revision)
    assert {"modeling_mhla.py", "model.safetensors", "tokenizer.json", "config.json", "SHA256SUMS"} <= set(files)
    card = files["README.md"].decode()
    assert "license: apache-2.0" in card and "Nothing was measured yet" in card
    assert 'AutoModelForCausalLM.from_pretrained("tester/scratch", trust_remote_code=True)' in card
    with pytest.raises(ValueError, match=r"README\.md does not exist"):
        push(model, "tester/scratch2")
    with pytest.raises(ValueError, match="no result for recall and generation"):
        push(converted(), "tester/converted", license="apache-2.0")
    assert push(converted(), "tester/converted", license="apache-2.0", draft=True).new


def test_the_license_of_a_published_base_is_taken_from_its_card(hub, elsewhere):
    hub.put("base/llama", {"README.md": b"---\nlicense: llama3.2\n---\n"})
    made = push(converted(), NAME, base_model="base/llama", draft=True, progress=False)
    data = ModelCard(hub.repos[NAME].files(made.revision)["README.md"].decode()).data
    assert (data.license, data.base_model) == ("llama3.2", "base/llama")
    with pytest.raises(ValueError, match="license 'mit' is not what the card of base/llama states"):
        push(converted(), NAME, base_model="base/llama", license="mit", draft=True)


def test_files_over_the_limit_are_refused(tmp_path, monkeypatch):
    folder = save_model(tmp_path / "big", converted())
    (folder / "README.md").write_text(CARD)
    monkeypatch.setattr(folder_checks, "LARGEST", 100_000)
    (folder / "modeling_mhla.py").rename(tmp_path / "aside.py")
    with pytest.raises(ValueError, match=r"model\.safetensors has 0\.0 GB, .*max_shard_size='5GB'"):
        push(folder, NAME, draft=True)


def test_a_large_model_in_memory_arrives_in_parts(hub, elsewhere, tmp_path, monkeypatch):
    """SHARD_SIZE decides: 5 GB, here 60 kB. Every weight is in the part that the index names."""
    assert room.SHARD_SIZE == "5GB" and folder_checks.LARGEST == 5 * 10**9
    monkeypatch.setattr(room, "SHARD_SIZE", "60KB")
    model = converted()
    push(model, NAME, license="apache-2.0", draft=True, progress=False)
    files = hub.repos[NAME].files()
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    parts = {path: load(data) for path, data in files.items() if path.endswith(".safetensors")}
    assert len(parts) > 2 and set(parts) == set(index.values())
    assert all(len(files[path]) < 80_000 for path in parts)
    assert set(index) == set(model.state_dict()) - {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(parts[part][name], model.state_dict()[name]) for name, part in index.items())


@pytest.mark.parametrize("seed", range(24))
def test_all_or_nothing_under_random_faults(hub, checked, seed):
    """One push through faults and, where it broke off, one without: the old model or the new one, made once."""
    rng = random.Random(seed)
    send(checked["old"], NAME)
    old, new = content(checked["old"]), content(checked["new"])
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(["503", "401", "cut", "cut after", "damage"])
        method = "PUT" if kind == "damage" else None
        hub.fault(kind, "", method, skip=rng.randrange(12), times=rng.choice([1, 2, 7, 40]))
    said = ""
    try:
        made = send(checked["new"], NAME, tags=["v1"])
    except OSError as error:
        said = str(error)
    hub.faults.clear()
    repo = hub.repos[NAME]
    there = held(repo)
    assert there in (old, new) and "\n" not in said
    assert there == (old if NOTHING in said else new if WHOLE in said or not said else there)
    if said:
        made = send(checked["new"], NAME, tags=["v1"])
    assert held(repo) == held(repo, made.revision) == held(repo, "v1") == new
    assert sum(held(repo, oid) == new for oid in repo.commits) == 1
