"""A push ends complete or not at all, over HTTP with the real client; what the Hub holds afterwards is what is judged."""

import random
from types import SimpleNamespace
from unittest import mock

import pytest
from huggingface_hub import HfApi, ModelCard
from tools.small_repos import CARD, save_carded, save_model, score, small_scratch, spoil
from tools.small_scores import small_llama, small_tokenizer
from transformers import LlamaForSequenceClassification

import mhla_hf
from mhla_hf.cli.main import main
from mhla_hf.hub.card import write_card
from mhla_hf.hub.push import push, send

NAME = "tester/mhla"
WHOLE = "the repository holds the old or the new model: push again"


def converted(seed=0):
    # a source file of the size that is sent apart
    return mhla_hf.convert(small_llama(seed), layers="2/3", windowed=False, block_size=32, num_blocks=4)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    place = tmp_path_factory.mktemp("shelf")
    save_carded(place / "old", converted(1))
    save_carded(place / "new", converted(2))
    return place


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def held(repo, revision="main"):
    return {path: data for path, data in repo.files(revision).items() if path != ".gitattributes"}


def test_everything_arrives_in_one_commit(hub, shelf, unvisited, capsys):
    assert main(["push", str(shelf / "new"), NAME, "--private", "--tag", "v1", "--tag", "best", "--quiet"]) == 0
    repo = hub.repos[NAME]
    oid = repo.refs["refs/heads/main"]
    assert capsys.readouterr().out == f"{hub.endpoint}/{NAME}/commit/{oid}\nrevision {oid}\n"
    assert len(repo.commits) == 2
    hub.visibility = "private"  # of a new repository, unless another is asked for
    for name, options in {"a": {}, "b": {"private": False}}.items():
        send(shelf / "new", f"tester/{name}", **options)
    assert [each.private for each in hub.repos.values()] == [True, True, False]
    assert repo.refs["refs/tags/v1"] == repo.refs["refs/tags/best"] == oid
    assert held(repo) == content(shelf / "new")


def test_a_dry_run_checks_and_lists_and_sends_nothing(hub, shelf, unvisited, capsys, caplog):
    dry = push(shelf / "new", NAME, dry_run=True)
    sizes = {file.name: file.stat().st_size for file in (shelf / "new").iterdir()}
    assert (dry.revision, dry.url, dry.new, dict(dry.files)) == ("", "", False, sizes)
    assert main(["push", str(shelf / "new"), NAME, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"{sizes['model.safetensors']:,}  model.safetensors\n" in printed
    assert printed.endswith(f"{sum(sizes.values()):,}  bytes; nothing was sent\n")
    with pytest.raises(ValueError, match="license: got None, expected a license, as a dry run reads no card"):
        push(converted(), NAME, base_model="base/llama", dry_run=True)
    assert {method for method, *_ in hub.log} == {"GET"}
    hub.fault("503", times=9)
    assert push(shelf / "new", NAME, dry_run=True).deleted == ()
    assert "push: cannot tell which files of tester/mhla would be deleted (" in caplog.text


def test_a_second_push_changes_only_what_changed(hub, shelf):
    first = send(shelf / "old", NAME, tags=["v1"])
    assert first.new and hub.sent("PUT", "/storage/") == 2
    again = send(shelf / "old", NAME, tags=["v1"])
    assert (again.revision, again.new) == (first.revision, False) and len(hub.repos[NAME].commits) == 2
    assert hub.sent("POST", "/tag/") == 1
    second = send(shelf / "new", NAME)
    assert hub.sent("PUT", "/storage/") == 3  # the source file was there
    repo = hub.repos[NAME]
    assert held(repo) == content(shelf / "new") and held(repo, "v1") == content(shelf / "old")
    assert repo.commits[second.revision].parent == first.revision
    with pytest.raises(ValueError, match="private: got tester/mhla, which is public, expected a private"):
        send(shelf / "new", NAME, private=True)
    with pytest.raises(ValueError, match=r"tags: got 'v1', which is taken by commit \w{40} of tester/mhla"):
        send(shelf / "old", NAME, tags=["v1"])
    assert held(repo) == content(shelf / "new")


def test_files_of_an_older_model_go_if_that_is_asked_for_and_all_others_stay(hub, shelf, unvisited, capsys):
    others = {"handler.py": b"import os", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}", "LICENSE": b"mine"}
    others |= {"sample.json": b"{}", ".gitignore": b"model.safetensors\nconfig.json\n"}
    old = {"model-00001-of-00002.safetensors": b"\0" * 10, "tokenizer.model": b"old", "train.json": b"{}"}
    before = hub.put(NAME, old | others) or hub.repos[NAME].refs["refs/heads/main"]
    assert push(shelf / "new", NAME, dry_run=True).deleted == tuple(sorted(old))
    assert main(["push", str(shelf / "new"), NAME, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("bytes; nothing was sent; to delete files, the push needs --delete-stale\n")
    with pytest.raises(ValueError, match=r"delete_stale: got False, and .* holds 3 files of an older model \(mod"):
        send(shelf / "new", NAME)
    assert hub.sent("POST", "/commit/|/storage/") == 0 and hub.repos[NAME].refs["refs/heads/main"] == before
    assert main(["push", str(shelf / "new"), NAME, "--delete-stale", "--quiet"]) == 0
    assert held(hub.repos[NAME]) == content(shelf / "new") | others


def test_a_pull_request_and_a_branch(hub, shelf):
    hub.put("other/mhla", {"README.md": CARD.encode()})
    made = send(shelf / "new", "other/mhla", create_pr=True)
    repo = hub.repos["other/mhla"]
    assert made.url == f"{hub.endpoint}/other/mhla/discussions/1"
    assert held(repo, "refs/pr/1") == content(shelf / "new") and held(repo) == {"README.md": CARD.encode()}
    with pytest.raises(OSError, match="Repository Not Found"):
        send(shelf / "new", "other/none", create_pr=True)
    send(shelf / "old", NAME)
    send(shelf / "new", NAME, revision="dev")
    assert held(hub.repos[NAME]) == content(shelf / "old")
    assert held(hub.repos[NAME], "dev") == content(shelf / "new")


def test_who_may_not_write_who_was_too_late_and_ctrl_c(hub, shelf, monkeypatch):
    hub.put("other/mhla", {"README.md": b""})
    with pytest.raises(OSError, match="don't have the rights to write below other"):
        send(shelf / "new", "other/mhla")
    with pytest.raises(OSError, match=r"push to tester/mhla: .*401"):
        send(shelf / "new", NAME, token=False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match=f"interrupted; {WHOLE}"):
        patch.setattr(HfApi, "preupload_lfs_files", mock.Mock(side_effect=KeyboardInterrupt))
        send(shelf / "new", NAME)
    assert held(hub.repos[NAME]) == {}
    sending, faster = HfApi.preupload_lfs_files, {"README.md": b"faster"}
    meanwhile = lambda *given, **options: (sending(*given, **options), hub.put(NAME, faster))  # noqa: E731
    monkeypatch.setattr(HfApi, "preupload_lfs_files", meanwhile)
    with pytest.raises(OSError, match="A commit has happened since"):
        send(shelf / "new", NAME)
    assert held(hub.repos[NAME]) == faster


ARGUMENTS = {
    "no user": ({"repo_id": "mhla"}, "repo_id: got 'mhla', expected a user or organization before it"),
    "nothing": ({"what": None}, "what: got NoneType, expected a folder, a model or a pipe"),
    "tag": ({"tags": ["v 1"]}, "tags: got 'v 1'"),
    "request and tag": ({"create_pr": True, "tags": "v1"}, "create_pr: got True with tags, private or revision"),
    "tokenizer of a folder": ({"tokenizer": 1}, "tokenizer: got int with a folder"),
    "license of a card": ({"license": "mit"}, r"license: got a value, expected None, as .* has a card"),
    "other name": ({"repo_id": "tester/other"}, r"got the card of 'tester/mhla', expected one written with"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_refused_before_anything_is_sent(hub, shelf, unvisited, case):
    changed, said = ARGUMENTS[case]
    arguments = {"what": shelf / "new", "repo_id": NAME} | changed
    with pytest.raises((ValueError, TypeError), match=said):
        push(**arguments)
    assert hub.log == []


def test_a_model_in_memory(hub, unvisited, monkeypatch):
    model = small_scratch()
    made = push(model, "tester/scratch", tokenizer=small_tokenizer(), license="apache-2.0", progress=False)
    files = hub.repos["tester/scratch"].files(made.revision)
    assert {"modeling_mhla.py", "model.safetensors", "tokenizer.json", "config.json"} <= set(files)
    card = files["README.md"].decode()
    assert "license: apache-2.0" in card and "Nothing was measured yet" in card
    assert 'AutoModelForCausalLM.from_pretrained("tester/scratch", trust_remote_code=True)' in card
    base = LlamaForSequenceClassification(small_llama(num_labels=1).config)
    reward = mhla_hf.convert(base, layers="2/3", block_size=32)
    made = push(reward, "tester/reward", license="apache-2.0", progress=False)
    card = hub.repos["tester/reward"].files(made.revision)["README.md"].decode()
    assert "pipeline_tag: text-classification" in card and "AutoModelForSequenceClassification" in card
    with pytest.raises(ValueError, match=r"README\.md: got no card"):
        push(model, "tester/scratch2")
    with pytest.raises(ValueError, match="no result for recall and generation"):
        push(converted(), "tester/converted", license="apache-2.0")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match=r"what: got '.*saved', with 0.0 MiB of free space, expected at least .* MiB"):
        push(model, "tester/scratch3", license="apache-2.0")


def test_after_evaluate_the_card_has_the_scores(hub, unvisited, tmp_path):
    """Without a card so far; the license is the base's; with other weights than were judged, nothing is sent."""
    hub.put("base/evaluated", {"README.md": b"---\nlicense: mit\n---\n"})
    folder = score(save_model(tmp_path / "mine", converted()))
    with pytest.raises(ValueError, match=r"license: got 'apache-2.0', expected 'mit' as stated by base/evaluated"):
        push(folder, NAME, base_model="base/evaluated", license="apache-2.0")
    made = push(folder, NAME, base_model="base/evaluated", progress=False)
    data = ModelCard(hub.repos[NAME].files(made.revision)["README.md"].decode()).data
    assert (data.license, data.base_model) == ("mit", "base/evaluated")
    write_card(folder, name=NAME, base_model="base/evaluated", license="mit")
    assert held(hub.repos[NAME], made.revision) == content(folder)
    for file in ("README.md", "card.json"):
        (folder / file).unlink()
    spoil(3.0)(folder)
    with pytest.raises(ValueError, match="expected scores of the weights in the folder") as caught:
        push(folder, NAME, license="mit")
    assert str(folder) in str(caught.value) and len(hub.repos[NAME].commits) == 2


@pytest.mark.parametrize("seed", range(6))
def test_all_or_nothing_under_random_faults(hub, shelf, seed):
    """One push through faults and, where it broke off, one without: the old model or the new one, made once."""
    rng = random.Random(seed)
    send(shelf / "old", NAME)
    old, new = content(shelf / "old"), content(shelf / "new")
    for _ in range(rng.randint(1, 3)):
        hub.fault(rng.choice(["503", "cut", "cut after"]), skip=rng.randrange(12), times=rng.choice([1, 2, 7, 40]))
    try:
        send(shelf / "new", NAME, tags=["v1"])
    except OSError as error:
        assert str(error).endswith(f"{WHOLE}.")
        assert held(hub.repos[NAME]) in (old, new)
    hub.faults.clear()
    made, repo = send(shelf / "new", NAME, tags=["v1"]), hub.repos[NAME]
    assert held(repo) == held(repo, made.revision) == held(repo, "v1") == new
    assert sum(held(repo, oid) == new for oid in repo.commits) == 1
