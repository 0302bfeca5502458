"""The folder of a training run: what lies where, what run it is of, who may write, and how a stop leaves it whole.

While a run goes on, all of its state lies beside the output, in `<out>.state/`: `step-N/` (the last states), `runs/`
(trackers), `unfinished/` (what is being written), a lock, and a mark that the folder is a run's; no other folder is written
to or cleared. Each state says what run it is of and has a checksum of each of its files (`run.json`), and a run that is
anything else is refused by name. `<out>` appears, by one rename, when everything in it is there.
"""

import contextlib
import json
import os
import shutil
import weakref
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..checkpoints.file_io import atomic_folder, read_json, write_json
from ..checkpoints.fingerprint import fingerprint_model, hash_file, hash_json
from ..checkpoints.load import summarize_error

RECORD = "train.json"
IDENTITY = "run.json"
MARK = "of_a_run_of_mhla_hf"
STATES = "step-" + 9 * "[0-9]"
KEPT_STATES = 2
NAMES = {
    "student": "student (its configuration or weights; one from scratch needs torch.manual_seed)",
    "data": "data or tokenizer",
    "stages": "recipe (its stages)",
    "sharded": "kind of launch (with or without FSDP)",
}
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "auto_map")
VOLATILE += ("_class_name", "_diffusers_version", "_use_default_values")
# student -> {folder: what it was known by when the run into the folder began}: in a notebook, the same call comes again
# with an object that the run has trained meanwhile
BEGUN = weakref.WeakKeyDictionary()


def identify(model, frozen=()) -> str:
    """A hash of configuration, weights and the names of what is `frozen`; a second per gigabyte or so."""
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    config = {key: value for key, value in config.items() if key not in VOLATILE}
    return hash_json([config, fingerprint_model(model), *frozen], 32)


class RunFolder:
    """The paths of one run, and everything that is written to them. out: the folder to make; TypeError: it is no path."""

    def __init__(self, out):
        if not isinstance(out, (str, os.PathLike)):
            raise TypeError(f"out: got {type(out).__name__}; expected a folder to make")
        self.out = Path(os.path.abspath(Path(out).expanduser()))
        self.state = self.out.with_name(self.out.name + ".state")
        self.unfinished, self.lock = self.state / "unfinished", FileLock(self.state / "lock")

    def find(self, identity, student):
        """Look for the run: "finished", the newest state to go on from, or None when there is nothing yet.

        identity: JSON-able, what makes the run this run. ValueError: there is another run, or what is there is none.
        """
        now, begun = json.loads(json.dumps(identity)), BEGUN.setdefault(student, {})
        self.identity = now | {"student": begun.get(self.out, now["student"])}
        found = self._find()
        if found is None:
            self.identity = now
        begun[self.out] = self.identity["student"]
        return found

    def _find(self):
        if (self.out / RECORD).is_file():
            self._compare(read_json(self.out / RECORD).get("fingerprint", {}))
            return "finished"
        if self.out.is_file() or (self.out.exists() and any(self.out.iterdir())):
            raise ValueError(f"out: {str(self.out)!r} is a file or holds other files; expected a new or empty folder")
        if self.state.is_dir() and any(self.state.iterdir()) and not (self.state / MARK).is_file():
            raise ValueError(
                f"out: {str(self.state)!r}, for the run's state, holds other files; expected no such folder"
            )
        state = max(self._states(), default=None)
        if state is not None:
            known = read_json(state / IDENTITY)
            if known is None:
                raise unreadable(state, f"{IDENTITY} is missing")
            self._compare(known)
        return state

    def begin(self):
        """Make the state folder, lock it, and clear what a killed run left half done."""
        with self._errors("the run's state"):
            self.state.mkdir(parents=True, exist_ok=True)
            (self.state / MARK).touch()
            try:
                self.lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(f"out: another process is training into {str(self.out)!r} now") from None
            shutil.rmtree(self.unfinished, ignore_errors=True)

    @contextlib.contextmanager
    def new_state(self, step):
        """A folder aside for the state after `step` optimizer steps of the whole run; it becomes the newest one."""
        with self._errors("a state"), atomic_folder(self.state / f"step-{step:09d}", parent=self.unfinished) as aside:
            yield aside
            write_json(aside / IDENTITY, self.identity | {"files": _checksums(aside)})
        for old in sorted(self._states())[:-KEPT_STATES]:
            shutil.rmtree(old.rename(self.unfinished / old.name))

    def damage_of(self, state):
        """What makes the folder `state` another than was written, in a few words; "" if nothing does."""
        known, found = read_json(state / IDENTITY).get("files") or {}, _checksums(state)
        changed = [name for name in known if found.get(name) != known[name]]
        if changed:
            return f"{changed[0]} is {'damaged' if changed[0] in found else 'missing'}"
        return "" if known else f"{IDENTITY} has no checksums"

    @contextlib.contextmanager
    def result(self):
        """A folder aside for the model and its record; it becomes `out`, and the state goes."""
        with self._errors("the model"), atomic_folder(self.out, parent=self.unfinished) as aside:
            yield aside
            if (self.state / "runs").exists():
                os.replace(self.state / "runs", aside / "runs")
        self.clear()

    def clear(self):
        """Remove the state of a finished run; what others put beside it stays, and so does the folder then."""
        self.lock.release()
        if not (self.state / MARK).is_file():
            return
        for folder in (self.unfinished, self.state / "runs", *self._states()):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.lock.lock_file, self.state / MARK):
            Path(file).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.state.rmdir()

    @contextlib.contextmanager
    def _errors(self, what):
        """Whatever goes wrong in writing is said in one sentence."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or summarize_error(error)
            if "inline_container" in reason or "unexpected pos" in reason:  # torch.save does not say why
                reason = "the disk is full, or a file exceeds its limit"
            whole = "; the states before it are whole" if any(self._states()) else ""
            raise OSError(f"out: {what} of {str(self.out)!r} cannot be written ({reason}){whole}") from error

    def _states(self):
        return list(self.state.glob(STATES))

    def _compare(self, before):
        if changed := [key for key, new in self.identity.items() if before.get(key) != new]:
            what = NAMES.get(changed[0], changed[0])
            raise ValueError(
                f"out: {str(self.out)!r} was begun with another {what}; expected the same, or another folder"
            )


def unreadable(state, why):
    """The error of a state that a run cannot go on from."""
    what = f"the state {str(state)!r} cannot be read ({why})"
    return ValueError(f"out: {what}; without it the run goes on from the one before")


def _checksums(folder):
    """sha256 by name of every file in a state, but for the one that holds them."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / IDENTITY)
    return {file.relative_to(folder).as_posix(): hash_file(file) for file in files}
