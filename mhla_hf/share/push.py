"""push(): a model becomes a repository, all of it in one commit, or nothing.

Everything is checked before the first byte goes out (`folder_checks.py`). Then the large files are sent, and one commit
puts all files in place and deletes what an older model left: whoever loads the repository meets the old model or the new.
"""

import contextlib
import dataclasses
import logging
import re
import tempfile
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from huggingface_hub.utils.sha import git_hash

from ..checkpoints.checksums import SUMS_FILE, render_sums
from ..checkpoints.files import SHARD_SIZE
from .card import CARD_FILE, plain_card
from .facts import read_json
from .folder_checks import CheckedFolder, check_folder, find_kind

logger = logging.getLogger("mhla_hf")
NOTHING = "nothing was committed"
UNKNOWN = "whether the commit was made is not known"
STALE = (".safetensors", ".json", ".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".model")
# What goes wrong on the way: answers other than success, and (the client's own base class) no answer at all.
HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
FAILURES = (HTTP_ERROR, OSError, RuntimeError)
TODO = {
    401: "log in with a token that may write (hf auth login, or HF_TOKEN) and push again",
    403: "take a token that may write there, or open a pull request",
    409: "somebody else wrote to the repository meanwhile: look at it and push again",
}
TODO[412] = TODO[409]


@dataclasses.dataclass(frozen=True)
class Pushed:
    """What a push made.

    repo_id; revision: id of the commit (40 hex digits), for `from_pretrained(..., revision=...)`; url: of the commit, or of
    the pull request; new: False when the repository held exactly this model already and no commit was made; left: files and
    folders, by their paths in the pushed folder, that are no part of a model and stayed where they are.
    """

    repo_id: str
    revision: str
    url: str
    new: bool
    left: tuple[str, ...] = ()


def push(
    what,
    repo_id,
    *,
    private=False,
    create_pr=False,
    tags=(),
    revision=None,
    draft=False,
    message=None,
    tokenizer=None,
    license=None,
    base_model=None,
    token=None,
    progress=True,
) -> Pushed:
    """Share a model on the Hub: check everything, send it, put it in place with one commit.

    Args:
        what: folder of a saved MHLA model or of a pipeline with one, of which only the model's own files go out; or the
            model or pipeline itself.
        repo_id: "user/name"; made when it is not there.
        private: whether a new repository is private; one that is there must be what is asked for.
        create_pr: open a pull request instead of committing; the repository must be there.
        tags: names that the commit gets, such as "v1". revision: branch to commit to (default: main), made when missing.
        draft: let a converted language model without scores for recall and generation pass.
        message: first line of the commit. tokenizer: goes with a model that is given as an object.
        license, base_model: for the card of a model that has none; never beside a README.md.
        token: of the Hub; default: the one of `hf auth login` or HF_TOKEN. progress: show progress bars.

    Returns:
        Pushed: what is there now, and at which revision.

    Raises:
        ValueError, TypeError: something is wrong with the arguments or the folder; nothing was committed.
        OSError: the Hub refused or could not be reached; the sentence says what is there and what to do.
    """
    tags = [tags] if isinstance(tags, str) else list(tags)
    _check_arguments(repo_id, tags, revision, create_pr, private)
    with _as_folder(what, tokenizer) as folder, _bars(progress):
        logger.info("push: checking %s", what if isinstance(what, str | Path) else type(what).__name__)
        card = _card_for(folder, repo_id, license, base_model)
        checked = check_folder(folder, repo_id=repo_id, card=card, draft=draft)
        options = {"private": private, "create_pr": create_pr, "tags": tags, "revision": revision}
        return send(checked, repo_id, **options, message=message, token=token)


def send(
    checked: CheckedFolder, repo_id, *, private=False, create_pr=False, tags=(), revision=None, message=None, token=None
) -> Pushed:
    """The half of `push` that talks to the Hub; arguments as there. Safe to do again: nothing is made twice."""
    contents = {**checked.files, **checked.rewritten}
    additions = [CommitOperationAdd(path, content) for path, content in contents.items()]
    digests = {addition.path_in_repo: addition.upload_info.sha256.hex() for addition in additions}
    additions.append(CommitOperationAdd(SUMS_FILE, render_sums(digests).encode()))
    checked.check_unchanged()
    api, options, there = HfApi(token=token, library_name="mhla_hf"), {"revision": revision or "main"}, NOTHING
    try:
        head = _open(api, repo_id, private, options["revision"], create_pr)
        held = {entry.path: entry for entry in api.list_repo_tree(repo_id, revision=head, recursive=True)}
        stale = [path for path in held if path.endswith(STALE) and path not in {*digests, SUMS_FILE}]
        new = bool(stale) or not all(_is_held(held.get(addition.path_in_repo), addition) for addition in additions)
        missing_tags = _check_tags(api, repo_id, tags, None if new else head)
        oid, url = head, f"{api.endpoint}/{repo_id}/commit/{head}"
        if new:
            _validate_card(checked.card)
            logger.info("push: sending %d files to %s", len(additions), repo_id)
            options["create_pr"] = create_pr
            # with gitignore_content, else the repository's own .gitignore would leave files out in silence
            api.preupload_lfs_files(repo_id, additions, gitignore_content="", free_memory=False, **options)
            checked.check_unchanged()
            there, message = UNKNOWN, message or "Push with mhla_hf"
            operations = [*additions, *map(CommitOperationDelete, stale)]
            made = api.create_commit(repo_id, operations, commit_message=message, parent_commit=head, **options)
            oid, url = made.oid, made.pr_url or made.commit_url
        there = f"the model is there, whole, as commit {oid}"
        for tag in missing_tags:
            api.create_tag(repo_id, tag=tag, revision=oid, exist_ok=True)
    except FAILURES as error:
        raise _explain(error, repo_id, there) from error
    return Pushed(repo_id, oid, url, new, checked.left)


def _check_arguments(repo_id, tags, revision, create_pr, private) -> None:
    try:
        validate_repo_id(repo_id)
    except (HFValidationError, TypeError):
        raise ValueError(f"repo_id is {repo_id!r}; expected a Hub id such as user/model") from None
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id is {repo_id!r}; expected the user or organization too, such as user/{repo_id}")
    for name, values in (("tags", tags), ("revision", [revision] if revision is not None else [])):
        for value in values:
            good = isinstance(value, str) and re.fullmatch(r"[\w][\w.+-]*(/[\w.+-]+)*", value) and ".." not in value
            if not good or re.fullmatch(r"[0-9a-f]{40}", value):
                raise ValueError(f"{name}: got {value!r}, expected a name such as v1")
    if create_pr and (tags or private or revision not in (None, "main")):
        given = "tags" if tags else "private" if private else "revision"
        raise ValueError(f"{given} does not go with create_pr: a pull request is made to main, and tagged when merged")


@contextlib.contextmanager
def _as_folder(what, tokenizer):
    """The folder itself, or a temporary one in which the model or pipeline was saved."""
    if isinstance(what, str | Path):
        if tokenizer is not None:
            raise ValueError("tokenizer goes with a model given as an object; a folder holds its own")
        yield Path(what)
        return
    if not callable(getattr(what, "save_pretrained", None)):
        raise TypeError(f"what is a {type(what).__name__}; expected a folder, a model or a pipeline")
    with tempfile.TemporaryDirectory(prefix="mhla_hf-push-") as place:
        folder = Path(place, "model")
        what.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        yield folder


@contextlib.contextmanager
def _bars(progress: bool):
    """The Hub client's progress bars, as asked for."""
    hidden = are_progress_bars_disabled()
    if not progress:
        disable_progress_bars()
    try:
        yield
    finally:
        if not progress and not hidden:
            enable_progress_bars()


def _card_for(folder: Path, repo_id: str, license, base_model) -> str | None:
    """The plain card of a folder without README.md, when a license is given; ValueError when both are there."""
    given = {"license": license, "base_model": base_model}
    said = next((name for name, value in given.items() if value is not None), None)
    if (folder / CARD_FILE).is_file() and said:
        raise ValueError(f"{said} is what {folder / CARD_FILE} says; give it only for a model without a card")
    if (folder / CARD_FILE).is_file() or not said or not folder.is_dir():
        return None
    kind = find_kind(folder)
    names = read_json(folder, "model_index.json" if kind == "pipeline" else "config.json")
    class_name = names.get("_class_name") or (names.get("architectures") or ["a model"])[0]
    return plain_card(repo_id, kind, class_name, **given)


def _open(api, repo_id, private, branch, create_pr) -> str:
    """The commit that the branch is at; the repository and the branch are made when they are missing."""
    try:
        info = api.model_info(repo_id)
    except RepositoryNotFoundError as error:
        if create_pr:
            raise ValueError(
                f"create_pr: {repo_id} is not there, or not to be seen with this token; push without it to make it"
            ) from error
        api.create_repo(repo_id, private=private, exist_ok=True)
        info = api.model_info(repo_id)
    if private and not info.private:
        raise ValueError(f"private: {repo_id} is there and public; make it private on the Hub first")
    try:
        return api.model_info(repo_id, revision=branch).sha
    except RevisionNotFoundError:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
        return api.model_info(repo_id, revision=branch).sha


def _is_held(entry, addition) -> bool:
    """Whether the Hub's entry for a path, None where there is none, is this file."""
    if getattr(entry, "lfs", None) is not None:
        return entry.lfs.sha256 == addition.upload_info.sha256.hex()
    with addition.as_file() as file:
        return getattr(entry, "blob_id", None) == git_hash(file.read())


def _check_tags(api, repo_id, tags, head) -> list[str]:
    """The tags that are to be made; ValueError for one that a commit other than `head` (None: any) has."""
    known = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo_id).tags} if tags else {}
    for tag in tags:
        if known.get(tag, head) != head:
            raise ValueError(f"tags: {tag!r} is taken by commit {known[tag]} of {repo_id}")
    return [tag for tag in tags if tag not in known]


def _validate_card(card: str) -> None:
    """The Hub's own opinion of the card."""
    try:
        ModelCard(card).validate()
    except ValueError as error:
        said = " ".join(re.findall(r'"message": ?"((?:[^"\\]|\\.)*)"', str(error))) or str(error)
        raise ValueError(f"{CARD_FILE}: the Hub refuses the card's front matter: {' '.join(said.split())}") from error


def _explain(error, repo_id: str, there: str) -> OSError:
    """What happened, what is there now, and what to do, in one sentence."""
    cause = error if isinstance(error, HTTP_ERROR) else error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if there == UNKNOWN and status is not None and status < 500:
        there = NOTHING  # an answer, and it was no
    reason = (getattr(cause, "server_message", None) or str(cause)).strip() or type(cause).__name__
    reason = " ".join(reason.split("\n")[0].split()).rstrip(".") + (f" ({status})" if status else "")
    todo = TODO.get(status, "push again: what has arrived is not sent again")
    return OSError(f"push to {repo_id}: {reason}; {there}; {todo}")
