"""push(): a model becomes a repository, all of it in one commit, or nothing.

Everything is checked before the first byte goes out (`folder_checks.py`). Then the large files are sent, those that are
there already are not sent again, and one commit puts all files in place: whoever loads the repository meets the old model
or the new one. Unusual: when an answer is lost, the Hub is asked what it holds, so a commit that did arrive is not made
twice; and the Hub's own listing has to agree with the folder, file by file, before a push is called done.
"""

import contextlib
import dataclasses
import logging
import re
import tempfile
import time
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from huggingface_hub.utils.sha import git_hash

from ..checkpoints.checksums import SUMS_FILE, render_sums
from ..checkpoints.files import SHARD_SIZE
from .card import CARD_FILE
from .facts import read_json
from .folder_checks import CheckedFolder, check_folder, find_kind
from .plain_card import plain_card

logger = logging.getLogger("mhla_hf")
NOTHING = "nothing was committed"
UNKNOWN = "whether the commit was made is not known"
WAITS = (1, 4)  # seconds before a request that the Hub could not serve is made again
STALE = (".safetensors", ".json", ".py", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".model")
# What goes wrong on the way: answers other than success, and (the client's own base class) no answer at all.
HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
FAILURES = (HTTP_ERROR, OSError, RuntimeError)


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
        ValueError, TypeError: something is wrong with the arguments or the folder; nothing was sent.
        OSError: the Hub refused or could not be reached; the sentence says what is there and what to do.
    """
    tags = [tags] if isinstance(tags, str) else list(tags)
    _check_arguments(repo_id, tags, revision, create_pr, private)
    with _as_folder(what, tokenizer) as folder, _bars(progress):
        logger.info("push: checking %s", what if isinstance(what, str | Path) else type(what).__name__)
        card = _card_for(folder, repo_id, license, base_model)
        checked = check_folder(folder, repo_id=repo_id, card=card, draft=draft)
        return send(
            checked,
            repo_id,
            private=private,
            create_pr=create_pr,
            tags=tags,
            revision=revision,
            message=message,
            token=token,
        )


def send(
    checked: CheckedFolder, repo_id, *, private=False, create_pr=False, tags=(), revision=None, message=None, token=None
) -> Pushed:
    """The half of `push` that talks to the Hub; arguments as there."""
    sending = _Sending(checked, repo_id, private, create_pr, list(tags), revision or "main", message, token)
    try:
        return sending.run()
    except FAILURES as error:
        raise sending.explain(error) from error


def _check_arguments(repo_id, tags, revision, create_pr, private) -> None:
    try:
        validate_repo_id(repo_id)
    except (HFValidationError, TypeError):
        raise ValueError(f"repo_id is {repo_id!r}; expected a Hub id such as user/model") from None
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id is {repo_id!r}; expected the user or organisation too, such as user/{repo_id}")
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
    """The plain card of a folder without README.md, when a licence is given; ValueError when both are there."""
    if (folder / CARD_FILE).is_file():
        if license is not None or base_model is not None:
            given = "license" if license is not None else "base_model"
            raise ValueError(f"{given} is what {folder / CARD_FILE} says; give it only for a model without a card")
        return None
    if (license is None and base_model is None) or not folder.is_dir():
        return None
    kind = find_kind(folder)
    names = read_json(folder, "model_index.json" if kind == "pipeline" else "config.json")
    class_name = names.get("_class_name") or (names.get("architectures") or ["a model"])[0]
    return plain_card(repo_id, kind, class_name, license=license, base_model=base_model)


class _Sending:
    """One push on its way; `doing` says what is being tried, `there` what the Hub holds should it fail."""

    def __init__(self, checked, repo_id, private, create_pr, tags, branch, message, token):
        self.checked, self.repo_id, self.private, self.create_pr = checked, repo_id, private, create_pr
        self.tags, self.branch = tags, branch
        self.api = HfApi(token=token, library_name="mhla_hf")
        self.message = message or "Push with mhla_hf"
        self.doing, self.there = "asking for the repository", NOTHING

    def run(self) -> Pushed:
        """All of it. Safe to do again at any time: what is there is not sent or made twice."""
        contents = {**self.checked.files, **self.checked.rewritten}
        additions = [CommitOperationAdd(path, content) for path, content in contents.items()]
        digests = {addition.path_in_repo: addition.upload_info.sha256.hex() for addition in additions}
        additions.append(CommitOperationAdd(SUMS_FILE, render_sums(digests).encode()))
        self.checked.check_unchanged()
        head = self._open()
        self.doing = "reading what is there"
        there = self._listing(head)
        stale = sorted(path for path in there if path.endswith(STALE) and path not in {*digests, SUMS_FILE})
        new = bool(stale) or not self._holds(there, additions)
        self._check_tags(head, new)
        if not new:
            self.there = f"the model was there already, as commit {head}"
            self._tag(head)
            return Pushed(
                self.repo_id, head, f"{self.api.endpoint}/{self.repo_id}/commit/{head}", False, self.checked.left
            )
        self.doing = "checking the card"
        self._validate_card()
        requests = self._pull_requests() if self.create_pr else {}
        self._send_large(additions)
        self.checked.check_unchanged()
        operations = [*additions, *(CommitOperationDelete(path) for path in stale)]
        revision, url = self._commit(operations, additions, head, requests)
        self.there = f"the model is there, whole, as commit {revision}"
        self._tag(revision)
        return Pushed(self.repo_id, revision, url, True, self.checked.left)

    def _open(self) -> str:
        """The commit that the branch is at; the repository and the branch are made when they are missing."""
        try:
            info = self._patiently(self.api.model_info, self.repo_id)
        except RepositoryNotFoundError as error:
            if self.create_pr:
                raise ValueError(
                    f"create_pr: {self.repo_id} is not there, or not to be seen with this token; push without it to make it"
                ) from error
            self.doing = "making the repository"
            self._patiently(self.api.create_repo, self.repo_id, private=self.private, exist_ok=True)
            info = self._patiently(self.api.model_info, self.repo_id)
        if self.private and not info.private:
            raise ValueError(f"private: {self.repo_id} is there and public; make it private on the Hub first")
        if self.branch == "main":
            return info.sha
        try:
            return self._patiently(self.api.model_info, self.repo_id, revision=self.branch).sha
        except RevisionNotFoundError:
            self.doing = f"making the branch {self.branch}"
            self._patiently(self.api.create_branch, self.repo_id, branch=self.branch, exist_ok=True)
            return self._patiently(self.api.model_info, self.repo_id, revision=self.branch).sha

    def _validate_card(self) -> None:
        """The Hub's own opinion of the card."""
        self.doing = "checking the card"
        try:
            self._patiently(ModelCard(self.checked.card).validate)
        except ValueError as error:
            said = " ".join(re.findall(r'"message": ?"((?:[^"\\\\]|\\\\.)*)"', str(error))) or str(error)
            raise ValueError(
                f"{CARD_FILE}: the Hub refuses the card's front matter: {' '.join(said.split())}"
            ) from error

    def _send_large(self, additions) -> None:
        """Every large file arrives, and its sha256 is what the commit will name; the client tries each several times."""
        self.doing = "sending the files"
        logger.info("push: sending %d files to %s", len(additions), self.repo_id)
        try:
            self.api.preupload_lfs_files(
                self.repo_id,
                additions,
                revision=self.branch,
                create_pr=self.create_pr,
                gitignore_content="",  # else the repository's own .gitignore would leave files out in silence
                free_memory=False,
            )
        except ValueError as error:
            if isinstance(error, HTTP_ERROR):
                raise
            raise RuntimeError(str(error)) from error

    def _listing(self, revision: str) -> dict:
        """path -> the Hub's entry for every file at a revision."""
        entries = self._patiently(
            lambda: list(self.api.list_repo_tree(self.repo_id, revision=revision, recursive=True))
        )
        return {entry.path: entry for entry in entries if hasattr(entry, "blob_id")}

    def _holds(self, there: dict, additions) -> bool:
        """Whether a listing shows each of our files with our bytes."""
        for addition in additions:
            entry = there.get(addition.path_in_repo)
            if entry is None or entry.size != addition.upload_info.size:
                return False
            if entry.lfs is not None:
                same = entry.lfs.sha256 == addition.upload_info.sha256.hex()
            else:
                with addition.as_file() as file:
                    same = entry.blob_id == git_hash(file.read())
            if not same:
                return False
        return True

    def _check_tags(self, head: str, new: bool) -> None:
        """A tag that is taken by another commit is refused before anything is sent."""
        if not self.tags:
            return
        refs = self._patiently(self.api.list_repo_refs, self.repo_id)
        for ref in refs.tags:
            if ref.name in self.tags and (new or ref.target_commit != head):
                raise ValueError(f"tags: {ref.name!r} is taken by commit {ref.target_commit} of {self.repo_id}")
        self.known_tags = {ref.name for ref in refs.tags}

    def _tag(self, revision: str) -> None:
        for tag in self.tags:
            if tag not in self.known_tags:
                self.doing = f"setting the tag {tag}"
                self._patiently(self.api.create_tag, self.repo_id, tag=tag, revision=revision, exist_ok=True)

    def _pull_requests(self) -> dict[str, str]:
        """ref -> commit of the pull requests that are open."""
        refs = self._patiently(self.api.list_repo_refs, self.repo_id, include_pull_requests=True)
        return {ref.ref: ref.target_commit for ref in refs.pull_requests or ()}

    def _commit(self, operations, additions, head, requests) -> tuple[str, str]:
        """(commit, url); when an answer is lost, what the Hub holds decides whether it is asked again."""
        for wait in (*WAITS, None):
            self.doing, self.there = "committing", UNKNOWN
            try:
                made = self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=self.message,
                    revision=self.branch,
                    create_pr=self.create_pr,
                    parent_commit=head,
                )
            except FAILURES as error:
                found = self._arrived(additions, head, requests)
                if found is not None:
                    return found
                self.there = NOTHING
                if wait is None or not _passing(error):
                    raise
                time.sleep(wait)
                continue
            self.doing = "comparing what is there with the folder"
            self.there = f"commit {made.oid} was made"
            if not self._holds(self._listing(made.oid), additions):
                raise RuntimeError("the Hub lists other files in the commit than were sent")
            return made.oid, made.pr_url or made.commit_url

    def _arrived(self, additions, head, requests) -> tuple[str, str] | None:
        """(commit, url) of a commit that was made although the answer did not come; None when there is none."""
        place = f"{self.api.endpoint}/{self.repo_id}"
        if self.create_pr:
            for ref, oid in self._pull_requests().items():
                if ref not in requests and self._holds(self._listing(oid), additions):
                    return oid, f"{place}/discussions/{ref.rpartition('/')[2]}"
            return None
        now = self._patiently(self.api.model_info, self.repo_id, revision=self.branch).sha
        if now != head and self._holds(self._listing(now), additions):
            return now, f"{place}/commit/{now}"
        return None

    def _patiently(self, call, *arguments, **options):
        """`call(...)`, again after a while when the Hub could not serve it."""
        for wait in WAITS:
            try:
                return call(*arguments, **options)
            except FAILURES as error:
                if not _passing(error):
                    raise
                time.sleep(wait)
        return call(*arguments, **options)

    def explain(self, error) -> OSError:
        """What happened, what is there now, and what to do, in one sentence."""
        cause = error if isinstance(error, HTTP_ERROR) else error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        said = getattr(cause, "server_message", None) or str(cause)
        reason = " ".join(said.strip().split("\n")[0].split()).rstrip(".") or type(cause).__name__
        if cause is not error and not isinstance(error, HTTP_ERROR):
            reason = f"{' '.join(str(error).split()).rstrip('.')}: {reason}"
        todo = "push again: what has arrived is not sent again"
        if status == 401 or isinstance(cause, PermissionError):
            todo = "log in with a token that may write (hf auth login, or HF_TOKEN) and push again"
        elif status == 403:
            todo = f"take a token that may write to {self.repo_id.split('/')[0]}, or open a pull request"
        elif status in (409, 412):
            todo = "somebody else wrote to the repository meanwhile: look at it and push again"
        where = f" ({status})" if status is not None and str(status) not in reason else ""
        return OSError(f"push to {self.repo_id}: {self.doing} failed{where}: {reason}; {self.there}; {todo}")


def _passing(error) -> bool:
    """Whether the same request may succeed a little later: a busy server, a lost connection."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, HTTP_ERROR)
