"""The Hub on the loopback interface does what the real client expects of one: a check of the tests' own ground.

Run: pytest tests/test_loopback_hub.py
"""

import random
import re
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session
from loopback_schema import refusals

WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"config.json": b"{}\n", "sub/notes.txt": b"words\n", "model.safetensors": WEIGHTS}


GOOD = """license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
base_model: user/model
language: [en]
tags: [mhla]
model-index:
- name: toy
  results:
  - task: {type: text-to-video}
    dataset: {name: vbench, type: vbench}
    metrics:
    - {type: total, value: 0.8}
"""
# a change to GOOD -> what the server says
FAULTS = {
    "apache-2.0": ("apache2", '"license" must be one of'),
    "license: apache-2.0\n": ("license: other\n", '"license_name" is required'),
    "text-to-video\nbase": ("text2video\nbase", '"pipeline_tag" must be one of'),
    "library_name: diffusers": ("library_name: Diffusers 0.42", '"library_name": .* fails to match'),
    "user/model": ("../model", '"base_model": .* fails to match'),
    "[en]": ("[en-US]", '"language": .* fails to match'),
    "tags: [mhla]": ("tags: mhla", '"tags" must be an array'),
    "language: [en]": ("language:", '"language" is not allowed to be empty'),
    "name: toy": ("title: toy", r'"model-index\[0\]\.name" is required'),
    "{type: text-to-video}": ("{type: 3}", r"results\[0\]\.task\.type"),
    "type: vbench": ("type: a b/c", r"results\[0\]\.dataset\.type"),
    "value: 0.8": ("value: true", "needs a type and a value"),
}


@pytest.mark.parametrize("before", FAULTS)
def test_what_is_wrong_with_a_card_is_said(hub, before):
    after, said = FAULTS[before]
    ModelCard(f"---\n{GOOD}---\n").validate()
    changed = GOOD.replace(before, after, 1)
    assert changed != GOOD
    asked = {"content": f"---\n{changed}---\n", "repoType": "model"}
    answer = get_session().post(f"{hub.endpoint}/api/validate-yaml", json=asked)
    messages = [error["message"] for error in answer.json()["errors"]]
    assert answer.status_code == 400 and len(messages) == 1 and re.search(said, messages[0]), messages


def test_a_card_without_front_matter_or_scores_is_refused():
    assert refusals("# A model\n") == ["front matter is missing or no object"]
    assert "front matter" in refusals("---\nlicense: [\n---\n")[0]
    assert "with results" in refusals("---\nlicense: mit\nmodel-index: [{name: a}]\n---\n")[0]
    assert refusals("---\nlicense: mit\nmodel-index: 3\n---\n") == ['"model-index" must be an array']


@pytest.fixture
def api(hub):
    return HfApi()


@pytest.fixture
def folder(tmp_path):
    for path, data in FILES.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    return tmp_path / "model"


def test_a_repository_lives(hub, api, folder, tmp_path):
    assert api.whoami()["name"] == "tester"
    assert api.create_repo("tester/one", private=True).repo_id == "tester/one"
    assert api.create_repo("tester/one", exist_ok=True).repo_id == "tester/one"
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo("tester/one")
    first = api.upload_folder(repo_id="tester/one", folder_path=folder, commit_message="first")
    assert hub.sent("PUT", "/storage/") == 1
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "sub" / "notes.txt").unlink()
    second = api.upload_folder(repo_id="tester/one", folder_path=folder, delete_patterns="sub/*")
    assert hub.sent("PUT", "/storage/") == 1  # the weights were there
    api.create_tag("tester/one", tag="v1", revision=first.oid)
    api.create_branch("tester/one", branch="dev", revision="v1")
    names = [commit.title for commit in api.list_repo_commits("tester/one")]
    assert names[1:] == ["first", "initial commit"]
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs("tester/one").tags} == {"v1": first.oid}
    assert api.repo_info("tester/one").sha == second.oid and api.repo_info("tester/one").private
    tree = {file.path: file for file in api.list_repo_tree("tester/one", revision="dev", recursive=True)}
    assert set(tree) == {".gitattributes", *FILES} and tree["model.safetensors"].lfs.size == len(WEIGHTS)
    here = snapshot_download("tester/one", revision="v1", cache_dir=tmp_path / "cache")
    for path, data in FILES.items():
        assert Path(here, path).read_bytes() == data
    again = hf_hub_download("tester/one", "config.json", revision=second.oid, cache_dir=tmp_path / "cache")
    assert Path(again).read_text() == '{"a": 1}'
    api.delete_repo("tester/one")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("tester/one")


def test_parts_are_joined_and_hashed(hub, api, folder):
    hub.part_size = 100_000
    api.create_repo("tester/parts")
    hub.fault("503", path=r"/storage/.*/2$")
    hub.fault("cut", path=r"/storage/.*/3$")
    api.upload_folder(repo_id="tester/parts", folder_path=folder)
    assert hub.repos["tester/parts"].files()["model.safetensors"] == WEIGHTS
    assert hub.sent("PUT", r"/storage/.*/\d$") == 5


def test_what_must_be_refused(hub, api, folder):
    api.create_repo("tester/one")
    api.create_repo("tester/hidden", private=True)
    hub.put("other/one", FILES)
    file = CommitOperationAdd("a.txt", b"a")
    for token, name in ((False, "tester/hidden"), (False, "tester/none"), ("hf_wrong", "tester/one")):
        with pytest.raises(HfHubHTTPError, match="401"):
            api.repo_info(name, token=token)
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_commit("other/one", [file], commit_message="mine now")
    with pytest.raises(HfHubHTTPError, match="403"):
        api.create_repo("other/two")
    with pytest.raises(RevisionNotFoundError):
        api.repo_info("tester/one", revision="nowhere")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("tester/one", "nothing.json")
    with pytest.raises(HfHubHTTPError, match="A commit has happened since"):
        api.create_commit("tester/one", [file], commit_message="late", parent_commit="0" * 40)
    with pytest.raises(ValueError, match="license"):
        ModelCard("---\nlicense: nonsense\n---\n").validate()
    hub.fault("damage", method="PUT")
    with pytest.raises(RuntimeError, match=r"model\.safetensors") as caught:
        api.upload_folder(repo_id="tester/one", folder_path=folder)
    assert "BadDigest" in str(caught.value.__cause__)
    assert list(hub.repos["tester/one"].files()) == [".gitattributes"]


def test_a_pull_request_leaves_main_alone(hub, api):
    hub.put("other/one", FILES)
    made = api.create_commit("other/one", [CommitOperationAdd("a.txt", b"a")], commit_message="idea", create_pr=True)
    assert made.pr_num == 1 and made.pr_revision == "refs/pr/1"
    assert "a.txt" not in hub.repos["other/one"].files() and hub.repos["other/one"].files("refs/pr/1")["a.txt"] == b"a"
    assert api.repo_info("other/one", revision="refs/pr/1").sha == made.oid


@pytest.mark.parametrize("kind", ["503", "cut", "cut after", "short"])
def test_a_download_goes_on_after_a_fault(hub, kind, tmp_path):
    hub.put("tester/one", FILES)
    hub.fault(kind, path="/cdn/", method="GET")
    if kind == "503":
        with pytest.raises(HfHubHTTPError, match="503"):
            hf_hub_download("tester/one", "model.safetensors", cache_dir=tmp_path)
    file = hf_hub_download("tester/one", "model.safetensors", cache_dir=tmp_path)
    assert Path(file).read_bytes() == WEIGHTS and not hub.faults


def test_the_client_does_not_notice_a_changed_byte(hub, tmp_path):
    """Why a pushed model carries SHA256SUMS: the client compares sizes, not hashes."""
    hub.put("tester/one", FILES)
    hub.fault("damage", path="/cdn/", method="GET")
    file = hf_hub_download("tester/one", "model.safetensors", cache_dir=tmp_path)
    assert Path(file).read_bytes() != WEIGHTS
