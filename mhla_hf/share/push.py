"""push(): a model becomes a repository, all of it in one commit, or nothing.

Everything is checked before the first byte goes out (`folder_checks.py`). Then the large files are sent, and one commit
puts all files in place and deletes what an older model left: whoever loads the repository meets the old model or the new.
"""

import contextlib
import dataclasses
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from ..checkpoints.files import SHARD_SIZE, temporary_folder
from ..checkpoints.save import CARD_FILE
from .card import plain_card
from .facts import find_license
from .folder_checks import stage_folder

logger = logging.getLogger("mhla_hf")
HTTPError = HfHubHTTPError.__bases__[0]  # of the library that the client uses: no answer at all is one, too
STALE = (".safetensors", ".json", ".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".model")


@dataclasses.dataclass(frozen=True)
class Pushed:
    """What a push made.

    revision: id of the commit, for `from_pretrained(..., revision=...)`. url: of the commit or the pull request; both are
    empty after a dry run. new: False when the repository held exactly this model already, or nothing was sent. left: files
    and folders that are no part of a model and stayed. files: path in the repository -> bytes.
    """

    repo_id: str
    revision: str
    url: str
    new: bool
    left: tuple[str, ...] = ()
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)


def push(
    what: object, repo_id: str, *, private: bool = False, create_pr: bool = False, tags: str | Sequence[str] = (),
    revision: str | None = None, draft: bool = False, message: str | None = None, tokenizer: object = None,
    license: str | None = None, base_model: str | None = None, token: str | bool | None = None, dry_run: bool = False,
    progress: bool = True,
) -> Pushed:  # fmt: skip
    """Share a model on the Hub: check everything, send it, put it in place with one commit.

    Args:
        what: folder of a saved MHLA model or of a pipeline with one, of which only the model's own files go out; or the
            model or pipeline itself, with its `tokenizer`.
        repo_id: "user/name"; made when it is not there. private: one that is there must be so already.
        create_pr: open a pull request instead of committing; the repository must be there.
        tags: names that the commit gets, such as "v1". revision: branch to commit to (default: main), made when missing.
        draft: let a converted language model without scores for recall and generation pass.
        message: first line of the commit. token: of the Hub; default: the one of `hf auth login` or HF_TOKEN.
        license, base_model: for the card of a model that has none.
        dry_run: check everything and list the files, without the network; nothing is sent. A model without a card then
            needs its `license`, which otherwise may be read from the card of `base_model`.
        progress: show progress bars.

    Raises:
        ValueError, TypeError: something is wrong with the arguments or the folder; nothing was committed.
        OSError: the Hub refused or could not be reached.
    """
    tags = [tags] if isinstance(tags, str) else list(tags)
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id is {repo_id!r}; expected the user or organization too, such as user/{repo_id}")
    if bad := [tag for tag in tags if not re.fullmatch(r"(?![0-9a-f]{40}$)\w[\w.+-]*", tag)]:
        raise ValueError(f"tags: got {bad[0]!r}, expected a name such as v1")
    if create_pr and (tags or private or revision):
        raise ValueError("create_pr goes with none of tags, private and revision: a pull request is made to main")
    with contextlib.ExitStack() as stack:
        aside = stack.enter_context(temporary_folder(tempfile.gettempdir(), "mhla_hf-push-"))
        folder, card = _as_folder(what, tokenizer, aside / "saved"), None
        logger.info("push: checking %s", what if isinstance(what, str | Path) else type(what).__name__)
        if (license is not None or base_model is not None) and folder.is_dir():
            if (folder / CARD_FILE).is_file():
                raise ValueError(f"license and base_model are for a model without a card, not for {str(folder)!r}")
            if dry_run and license is None:
                raise ValueError(
                    f"license: got none in a dry run, which does not ask the Hub for that of {base_model!r}"
                )
            terms = find_license(None if dry_run else base_model, None, license)
            card = plain_card(folder, repo_id, base_model, terms)
        left = stage_folder(folder, aside / "model", repo_id=repo_id, card=card, draft=draft)
        place = aside / "model"
        files = {path.relative_to(place).as_posix(): path.stat().st_size for path in files_of(place)}
        if dry_run:
            return Pushed(repo_id, "", "", False, left, files)
        if not progress:
            stack.enter_context(disable_progress_bars())
        options = {"private": private, "create_pr": create_pr, "tags": tags, "revision": revision}
        sent = send(place, repo_id, **options, message=message, token=token)
        return dataclasses.replace(sent, left=left, files=files)


def send(place, repo_id, *, private=False, create_pr=False, tags=(), revision=None, message=None, token=None) -> Pushed:
    """Put all files of a checked folder into a repository; arguments as `push`. Safe to do again: nothing is made twice."""
    additions = [CommitOperationAdd(file.relative_to(place).as_posix(), file) for file in files_of(place)]
    paths = {addition.path_in_repo for addition in additions}
    api, branch = HfApi(token=token, library_name="mhla_hf"), revision or "main"
    try:
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise ValueError(f"private: {repo_id} is there and public; make it private on the Hub first")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        head = api.model_info(repo_id, revision=branch).sha
        refs = api.list_repo_refs(repo_id).tags if tags else ()
        if taken := [ref for ref in refs if ref.name in tags and ref.target_commit != head]:
            raise ValueError(f"tags: {taken[0].name!r} is taken by commit {taken[0].target_commit} of {repo_id}")
        held = api.list_repo_files(repo_id, revision=head)
        stale = [CommitOperationDelete(path) for path in held if path.endswith(STALE) and path not in paths]
        logger.info("push: sending %d files to %s", len(additions), repo_id)
        where = {"revision": branch, "create_pr": create_pr}
        # with gitignore_content, else the repository's own .gitignore would leave files out in silence
        api.preupload_lfs_files(repo_id, additions, gitignore_content="", free_memory=False, **where)
        message = message or "Push with mhla_hf"
        made = api.create_commit(repo_id, [*additions, *stale], commit_message=message, parent_commit=head, **where)
        new = made.oid != head
        for tag in tags:
            if new or tag not in {ref.name for ref in refs}:
                api.create_tag(repo_id, tag=tag, revision=made.oid)
    except (HTTPError, OSError, RuntimeError) as error:
        said = " ".join(str(error.__cause__ if type(error) is RuntimeError else error).split())
        advice = "the repository holds the old model or the new one, whole: push again"
        raise OSError(f"push to {repo_id}: {said}; {advice}") from error
    return Pushed(repo_id, made.oid, made.pr_url or made.commit_url, new)


def files_of(place) -> list[Path]:
    """All files in a folder, sorted."""
    return sorted(file for file in Path(place).rglob("*") if file.is_file())


def _as_folder(what, tokenizer, place: Path) -> Path:
    """The folder itself, or `place`, in which the model or pipeline is saved."""
    if isinstance(what, str | Path):
        if tokenizer is not None:
            raise ValueError("tokenizer goes with a model given as an object; a folder holds its own")
        return Path(what)
    if not callable(getattr(what, "save_pretrained", None)):
        raise TypeError(f"what is a {type(what).__name__}; expected a folder, a model or a pipeline")
    what.save_pretrained(place, max_shard_size=SHARD_SIZE)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    return place
