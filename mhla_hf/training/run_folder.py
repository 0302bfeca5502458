"""The folder of a training run: what lies where, who may write, and how a stop at any moment leaves it whole.

While a run goes on, all of its state lies beside the output, in `<out>.state/`: `step-N/` (the last states), `runs/`
(trackers) and a lock. `<out>` appears, by one rename, when everything in it is there. Unusual: every state says what run it
is of (`run.json`, the fingerprint), and a run that is anything else is refused by name; and what its files are (SHA256SUMS),
so that a damaged one is known, and passed over for the one before it.
"""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from ..checkpoints.checksums import SUMS_FILE, hash_file, read_sums, render_sums
from ..checkpoints.files import write_json, write_text

try:
    import fcntl
except ImportError:
    fcntl = None

RECORD = "train.json"
IDENTITY = "run.json"
NAMES = {
    "student": "student (its configuration or weights; one from scratch needs torch.manual_seed)",
    "teacher": "teacher (its configuration or weights)",
    "data": "data or tokenizer",
}


class RunFolder:
    """The paths of one run, and everything that is written to them.

    out: the folder to make. fingerprint: JSON-able dict that says what the run is. main: whether this process writes.
    """

    def __init__(self, out, fingerprint, *, main=True):
        self.out = Path(os.path.abspath(Path(out).expanduser()))
        self.state = self.out.with_name(self.out.name + ".state")
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.main = main
        self.lock = None
        self.damaged = []

    def finished(self):
        """True when `out` holds this very run, done. ValueError when it holds anything else."""
        if not self.out.exists():
            return False
        if not self.out.is_dir():
            raise ValueError(f"out: {str(self.out)!r} is a file; expected a folder, or a path where one can be made")
        record = self.out / RECORD
        if record.is_file():
            self._compare(_read_json(record).get("fingerprint", {}))
            return True
        if any(self.out.iterdir()):
            raise ValueError(f"out: the folder {str(self.out)!r} holds other files; expected a new or an empty folder")
        return False

    def latest(self):
        """The newest whole state, or None when there is no state; newer ones are in `damaged`.

        ValueError: the state is that of another run, or all are damaged.
        """
        self.damaged = []
        for state in sorted(self._states(), reverse=True):
            if _is_whole(state):
                self._compare(_read_json(state / IDENTITY))
                return state
            self.damaged.append(state)
        if self.damaged:
            raise ValueError(
                f"out: every state in {str(self.state)!r} is damaged (files are missing or changed); expected a whole one, "
                "or no such folder, to begin again"
            )
        return None

    def newest(self):
        """The last state that was written, or None."""
        return max(self._states(), default=None)

    def check_room(self, needed):
        """ValueError when the folder cannot be made or `needed` bytes do not fit. Leaves nothing behind."""
        place = next(parent for parent in (self.state, *self.state.parents) if parent.exists())
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".mhla_hf-", dir=place))
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise ValueError(f"out: {str(self.out)!r} cannot be written ({error.strerror}: {place})") from None
        if free < needed:
            raise ValueError(
                f"out: {str(self.out)!r} needs about {needed / 1e6:,.0f} MB for the states and the model, "
                f"and {free / 1e6:,.0f} MB are free"
            )

    def begin(self):
        """Make the state folder, lock it, and clear what a killed run left half done and what `latest` found damaged."""
        with self._errors("the run's state"):
            self.state.mkdir(parents=True, exist_ok=True)
            self._lock()
            left = (*self.state.glob("*.tmp-*"), *self.out.parent.glob(f"{self.out.name}.tmp-*"))
            for rest in (*left, *self.damaged):
                shutil.rmtree(rest) if rest.is_dir() else rest.unlink()

    def aside(self, target):
        """Where `target` is written before it is renamed: a new, empty folder."""
        aside = target.with_name(f"{target.name}.tmp-{os.getpid()}")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        return aside

    def state_path(self, step):
        """The folder of the state after `step` optimizer steps of the whole run."""
        return self.state / f"step-{step:09d}"

    def seal(self, aside):
        """Note in a state what run it is of, and what its files are."""
        write_json(aside / IDENTITY, self.fingerprint)
        write_text(aside / SUMS_FILE, render_sums(_sums(aside)))

    def prune(self, keep):
        """Remove all but the newest `keep` states."""
        for old in sorted(self._states())[:-keep]:
            shutil.rmtree(old)

    def finish(self, aside):
        """Make the finished folder `aside` the output and remove the state."""
        if self.out.exists():
            self.out.rmdir()
        os.replace(aside, self.out)
        self.clear()

    def clear(self):
        """Remove the state of a finished run."""
        self.release()
        if self.main and self.state.exists():
            shutil.rmtree(self.state)

    def release(self):
        """Let others write."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    @contextlib.contextmanager
    def writing(self, target, what):
        """Give a folder aside for `target`; whatever goes wrong in writing removes it and is said in one sentence."""
        with self._errors(what):
            aside = self.aside(target)
            try:
                yield aside
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self, what):
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            last = self.newest()
            rest = f"the state in {str(last)!r} is whole" if last else "nothing was kept"
            raise OSError(f"out: {what} of {str(self.out)!r} cannot be written ({_reason(error)}); {rest}") from error

    def _states(self):
        return [path for path in self.state.glob("step-*") if ".tmp-" not in path.name]

    def _lock(self):
        if fcntl is None:
            return
        self.lock = (self.state / "lock").open("w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ValueError(f"out: another process is training into {str(self.out)!r} now") from None

    def _compare(self, before):
        for key, new in self.fingerprint.items():
            old = before.get(key)
            if old == new:
                continue
            if key == "stages":
                key, old, new = _first_difference(old or [], new)
            if key in NAMES:
                change = f"another {NAMES[key]}"
            else:
                change = f"{key} {old!r}, not {new!r}"
            raise ValueError(
                f"out: {str(self.out)!r} was begun with {change}; give what it was begun with, or another folder"
            )


def _sums(state):
    files = (file for file in state.rglob("[!.]*") if file.is_file() and file.name != SUMS_FILE)  # not a .DS_Store
    return {file.relative_to(state).as_posix(): hash_file(file) for file in files}


def _is_whole(state):
    try:
        return read_sums((state / SUMS_FILE).read_text(encoding="utf-8"), state) == _sums(state)
    except (OSError, ValueError):
        return False


def _read_json(path):
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"out: {str(path)!r} is damaged ({error}); expected the record of a training run") from None
    if not isinstance(content, dict):
        raise ValueError(f"out: {str(path)!r} is damaged; expected the record of a training run")
    return content


def _first_difference(old, new):
    for before, now in zip(old, new, strict=False):
        for key in now:
            if before.get(key) != now[key]:
                return f"{key} in stage {now['name']!r}", before.get(key), now[key]
    return "stages", len(old), len(new)


def _reason(error):
    cause = getattr(error, "strerror", None) or " ".join(str(error).split())
    return cause[:200] or type(error).__name__
