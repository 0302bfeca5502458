"""`push`: check a model (`folder_checks.py`), and upload it to the Hub in one commit."""

import contextlib
import dataclasses
import logging
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from ..checkpoints.file_io import SHARD_SIZE, PathLike, check_writable, summarize_error, temporary_folder
from ..checkpoints.save import CARD_FILE, count_bytes, is_model_file
from ..conversion.model_family import note_classes
from .facts import Person, find_license
from .folder_checks import stage_folder

logger = logging.getLogger("mhla_hf")
WHOLE = "the repository holds the old or the new model: push again"
# The HTTP library's base class, which also covers a server that does not respond.
HTTPError: Any = HfHubHTTPError.__bases__[0]


@dataclasses.dataclass(frozen=True)
class Pushed:
    """What a push changed on the Hub, or what a dry run would send and delete."""

    repo_id: str
    revision: str  # id of the commit; empty after a dry run
    url: str  # of the commit or pull request; empty after a dry run
    new: bool  # whether the repository changed
    left: tuple[str, ...] = ()  # files and folders that are not part of the model and were not sent
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)  # path in the repository -> bytes
    deleted: tuple[str, ...] = ()  # files of an older model, deleted or to be deleted


def push(
    what: object, repo_id: str, *, private: bool | None = None, create_pr: bool = False, tags: str | Sequence[str] = (),
    revision: str | None = None, draft: bool = False, message: str | None = None, tokenizer: object = None,
    license: str | None = None, base_model: str | None = None, token: str | bool | None = None,
    delete_stale: bool = False, dry_run: bool = False, progress: bool = True,
) -> Pushed:  # fmt: skip
    """Check a model and upload it to the Hub in one commit.

    Args:
        what: Folder of a saved MHLA model or of a pipeline with one; or the model or pipeline itself. Of a folder, only the
            files of the model are sent.
        repo_id: "user/name"; created if it does not exist.
        private: Whether to create a private repository (default: as its owner's settings say). With True, an existing one
            must already be private.
        create_pr: Whether to open a pull request instead of committing. The repository must exist.
        tags: Tags for the commit, such as "v1".
        revision: Branch to commit to (default: main), created if it does not exist.
        draft: Whether to accept a converted language model without scores for recall and generation.
        message: First line of the commit message.
        tokenizer: Tokenizer to save with a model that is passed as an object.
        license: License of a model that has no card, for a new card.
        base_model: Hub id of the softmax original, for a new card.
        token: Hub token (default: from `hf auth login` or HF_TOKEN).
        delete_stale: Whether to delete, in the same commit, the files of an older model that the new one lacks: those in
            its folders with the name of a weights, configuration, tokenizer, record or source file. Without it, a repository
            with such files is refused. Other files always stay.
        dry_run: Whether to check everything, and only list the files to send and to delete. A dry run asks the Hub for
            nothing but the names of the repository's files, so a model without a card needs `license`, even if the card of
            `base_model` states one.
        progress: Whether to show progress bars.

    Returns:
        The commit and the files; see `Pushed`.

    Raises:
        ValueError, TypeError: An argument or the folder is not valid; nothing was committed.
        OSError: The Hub refused or could not be reached.
    """
    tags = [tags] if isinstance(tags, str) else list(tags)
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id: got {repo_id!r}, expected a user or organization before it: user/{repo_id}.")
    if invalid := [tag for tag in tags if not re.fullmatch(r"(?![0-9a-f]{40}$)\w[\w.+-]*", tag)]:
        raise ValueError(f"tags: got {invalid[0]!r}, expected a name such as v1.")
    if create_pr and (tags or private or revision):
        raise ValueError("create_pr: got True with tags, private or revision, expected none of them.")
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(temporary_folder(tempfile.gettempdir(), "mhla_hf-push-"))
        folder = _save_to_folder(what, tokenizer, temporary / "saved")
        person = None
        logger.info("push: checking %s", what if isinstance(what, str | Path) else type(what).__name__)
        if (license is not None or base_model is not None) and folder.is_dir():
            person = _describe_author(folder, repo_id, license, base_model, dry_run)
        staging = temporary / "model"
        left = stage_folder(folder, staging, repo_id=repo_id, person=person, draft=draft)
        files = {path.relative_to(staging).as_posix(): path.stat().st_size for path in list_files(staging)}
        if dry_run:
            return Pushed(repo_id, "", "", False, left, files, foresee_deletions(repo_id, revision, token, files))
        if not progress:
            stack.enter_context(disable_progress_bars())
        pushed = send(
            staging, repo_id, private=private, create_pr=create_pr, tags=tags, revision=revision, message=message,
            token=token, delete_stale=delete_stale,
        )  # fmt: skip
        return dataclasses.replace(pushed, left=left, files=files)


def send(
    folder: Path, repo_id: str, *, private: bool | None = None, create_pr: bool = False, tags: Sequence[str] = (),
    revision: str | None = None, message: str | None = None, token: str | bool | None = None, delete_stale: bool = False,
) -> Pushed:  # fmt: skip
    """Commit all files of a checked folder to a repository, created if needed. After an interruption, call it again."""
    additions = [CommitOperationAdd(file.relative_to(folder).as_posix(), file) for file in list_files(folder)]
    paths = {addition.path_in_repo for addition in additions}
    api = HfApi(token=token, library_name="mhla_hf")
    branch = revision or "main"
    try:
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise ValueError(f"private: got {repo_id}, which is public, expected a private repository.")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        head = api.model_info(repo_id, revision=branch).sha
        existing_tags = api.list_repo_refs(repo_id).tags if tags else []
        if taken := [tag for tag in existing_tags if tag.name in tags and tag.target_commit != head]:
            holder = f"commit {taken[0].target_commit} of {repo_id}"
            raise ValueError(f"tags: got {taken[0].name!r}, which is taken by {holder}, expected another.")
        stale = find_stale(api.list_repo_files(repo_id, revision=head), paths)
        if stale and not delete_stale:
            count, names = "1 file" if len(stale) == 1 else f"{len(stale)} files", ", ".join(stale[:3])
            start = f"delete_stale: got False, and {repo_id} holds {count} of an older model"
            raise ValueError(f"{start} ({names}{', ...' * (len(stale) > 3)}), expected True, which deletes them.")
        logger.info("push: sending %d files to %s", len(additions), repo_id)
        # Not `upload_folder`: without `gitignore_content`, the repository's own .gitignore would silently drop files.
        target: Any = {"repo_id": repo_id, "revision": branch, "create_pr": create_pr}
        api.preupload_lfs_files(additions=additions, gitignore_content="", free_memory=False, **target)
        operations: list[Any] = [*additions, *map(CommitOperationDelete, stale)]
        message = message or "Push with mhla_hf"
        commit_info = api.create_commit(operations=operations, commit_message=message, parent_commit=head, **target)
        is_new = commit_info.oid != head
        for tag_name in tags:
            if is_new or tag_name not in {tag.name for tag in existing_tags}:
                api.create_tag(repo_id, tag=tag_name, revision=commit_info.oid)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"interrupted; {WHOLE}") from stop
    except (HTTPError, OSError, RuntimeError) as error:
        reason = " ".join(str(error.__cause__ if type(error) is RuntimeError else error).split()).removesuffix(".")
        raise OSError(f"push to {repo_id}: {reason}; {WHOLE}.") from error
    url = commit_info.pr_url or commit_info.commit_url
    return Pushed(repo_id, commit_info.oid, url, is_new, deleted=tuple(stale))


def find_stale(old_paths: Iterable[str], new_paths: Collection[str]) -> list[str]:
    """Return the files of an older model that the new one does not replace, and that might be loaded with it."""
    folders = {PurePosixPath(path).parent for path in new_paths}
    others = [PurePosixPath(path) for path in old_paths if path not in new_paths]
    return sorted(str(path) for path in others if path.parent in folders and is_model_file(path.name))


def foresee_deletions(
    repo_id: str, revision: str | None, token: str | bool | None, new_paths: Collection[str]
) -> tuple[str, ...]:
    """Return the files that a push would delete. Log a warning if the Hub cannot be asked."""
    for branch in (revision or "main", "main"):  # a new branch begins as a copy of main
        try:
            old_paths = HfApi(token=token, library_name="mhla_hf").list_repo_files(repo_id, revision=branch)
            return tuple(find_stale(old_paths, new_paths))
        except (RepositoryNotFoundError, RevisionNotFoundError):
            continue
        except (HTTPError, OSError) as error:
            logger.warning("push: cannot tell which files of %s would be deleted (%s)", repo_id, summarize_error(error))
            break
    return ()


def list_files(folder: PathLike) -> list[Path]:
    return sorted(file for file in Path(folder).rglob("*") if file.is_file())


def _describe_author(folder: Path, repo_id: str, license: str | None, base_model: str | None, dry_run: bool) -> Person:
    """Return the author's part for the first card of a model. Raise ValueError if the folder has a card."""
    if (folder / CARD_FILE).is_file():
        argument = "base_model" if license is None else "license"
        raise ValueError(f"{argument}: got a value, expected None, as {str(folder)!r} has a card.")
    if dry_run and license is None:
        raise ValueError("license: got None, expected a license, as a dry run reads no card on the Hub.")
    terms = find_license(None if dry_run else base_model, None, license)
    return Person(repo_id, base_model, **terms)  # type: ignore[arg-type]


def _save_to_folder(what: object, tokenizer: Any, target: Path) -> Path:
    """Return `what` if it is a folder; else save it to `target`."""
    if isinstance(what, str | Path):
        if tokenizer is not None:
            raise ValueError(f"tokenizer: got {type(tokenizer).__name__} with a folder, expected None.")
        return Path(what)
    save_pretrained = getattr(what, "save_pretrained", None)
    if not callable(save_pretrained):
        raise TypeError(f"what: got {type(what).__name__}, expected a folder, a model or a pipeline.")
    check_writable(target, "what", count_bytes(what))
    note_classes(what)
    save_pretrained(target, max_shard_size=SHARD_SIZE)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    return target
