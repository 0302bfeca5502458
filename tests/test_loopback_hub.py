"""The Hub on the loopback interface does what the real client expects of one: a check of the tests' own ground."""

import random
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from loopback_hub import refusals

WEIGHTS = random.Random(0).randbytes(300_000)
FILES = {"config.json": b"{}\n", "sub/notes.txt": b"words\n", "model.safetensors": WEIGHTS}
GOOD = "license: apache-2.0\nlibrary_name: diffusers\npipeline_tag: text-to-video\nbase_model: user/model\nlanguage: [en]\n"
# a change to GOOD -> what the server says
FAULTS = {
    "apache-2.0": ("apache2", '"license" must be one of'),
    "license: apache-2.0\n": ("license: other\n", '"license_name" is required'),
    "text-to-video\n": ("text2video\n", '"pipeline_tag" must be one of'),
    "library_name: diffusers": ("library_name: Diffusers 0.42", '"library_name": .* fails to match'),
    "user/model": ("../model", '"base_model": .* fails to match'),
}


@pytest.mark.parametrize("before", FAULTS)
def test_what_is_wrong_with_a_card_is_said(hub, before):
    after, said = FAULTS[before]
    ModelCard(f"---\n{GOOD}---\n").validate()
    with pytest.raises(ValueError, match=said.replace('"', r"\\?\"")):
        ModelCard(f"---\n{GOOD.replace(before, after, 1)}---\n").validate()
    assert refusals("# A model\n") == ["front matter is missing or no object"]


@pytest.fixture
def folder(tmp_path):
    for path, data in FILES.items():
        (tmp_path / "model" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / path).write_bytes(data)
    return tmp_path / "model"


def test_a_repository_lives(hub, folder, tmp_path):
    api = HfApi()
    assert api.whoami()["name"] == "tester"
    assert api.create_repo("tester/one", private=True).repo_id == "tester/one"
    assert api.create_repo("tester/one", exist_ok=True).repo_id == "tester/one"
    first = api.upload_folder(repo_id="tester/one", folder_path=folder, commit_message="first")
    assert hub.sent("PUT", "/storage/") == 1
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "sub" / "notes.txt").unlink()
    second = api.upload_folder(repo_id="tester/one", folder_path=folder, delete_patterns="sub/*")
    assert hub.sent("PUT", "/storage/") == 1  # the weights were there
    api.create_tag("tester/one", tag="v1", revision=first.oid)
    api.create_branch("tester/one", branch="dev", revision="v1")
    assert {ref.name: ref.target_commit for ref in api.list_repo_refs("tester/one").tags} == {"v1": first.oid}
    assert api.repo_info("tester/one").sha == second.oid and api.repo_info("tester/one").private
    tree = {file.path: file for file in api.list_repo_tree("tester/one", revision="dev", recursive=True)}
    assert set(tree) == {".gitattributes", *FILES} and tree["model.safetensors"].lfs.size == len(WEIGHTS)
    here = snapshot_download("tester/one", revision="v1", cache_dir=tmp_path / "cache")
    assert {path: Path(here, path).read_bytes() for path in FILES} == FILES
    api.delete_repo("tester/one")
    with pytest.raises(RepositoryNotFoundError):
        api.repo_info("tester/one")


def test_what_must_be_refused(hub, folder):
    api, file = HfApi(), CommitOperationAdd("a.txt", b"a")
    api.create_repo("tester/one")
    api.create_repo("tester/hidden", private=True)
    hub.put("other/one", FILES)
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
    hub.fault("damage", method="PUT")
    with pytest.raises(RuntimeError, match=r"model\.safetensors") as caught:
        api.upload_folder(repo_id="tester/one", folder_path=folder)
    assert "BadDigest" in str(caught.value.__cause__)
    assert list(hub.repos["tester/one"].files()) == [".gitattributes"]


def test_a_pull_request_leaves_main_alone(hub):
    hub.put("other/one", FILES)
    file = CommitOperationAdd("a.txt", b"a")
    made = HfApi().create_commit("other/one", [file], commit_message="idea", create_pr=True)
    assert made.pr_num == 1 and made.pr_revision == "refs/pr/1"
    assert "a.txt" not in hub.repos["other/one"].files() and hub.repos["other/one"].files("refs/pr/1")["a.txt"] == b"a"
