"""The folder of a training run: what lies where, what run it is of, who may write, and how a stop leaves it whole.

While a run goes on, all of its state lies beside the output, in `<out>.state/`: `step-N/` (the last states), `runs/`
(trackers) and a lock. Each state says what run it is of (`run.json`), and a run that is anything else is refused by name.
`<out>` appears, by one rename, when everything in it is there.
"""

import contextlib
import json
import os
import shutil
import weakref
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..checkpoints.files import folder_aside, read_json, write_json
from ..checkpoints.fingerprint import fingerprint_model, hash_of
from ..checkpoints.load import first_line

RECORD = "train.json"
IDENTITY = "run.json"
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
    return hash_of([config, fingerprint_model(model), *frozen], 32)


class RunFolder:
    """The paths of one run, and everything that is written to them. out: the folder to make; TypeError: it is no path."""

    def __init__(self, out):
        if not isinstance(out, (str, os.PathLike)):
            raise TypeError(f"out: got {type(out).__name__}; expected a folder to make")
        self.out = Path(os.path.abspath(Path(out).expanduser()))
        self.state = self.out.with_name(self.out.name + ".state")
        self.lock = FileLock(self.state / "lock")

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
        state = max(self._states(), default=None)
        if state is not None:
            self._compare(read_json(state / IDENTITY) or {})
        return state

    def begin(self):
        """Make the state folder, lock it, and clear what a killed run left half done."""
        with self._errors("the run's state"):
            self.state.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire(blocking=False)
            except Timeout:
                raise ValueError(f"out: another process is training into {str(self.out)!r} now") from None
            for rest in (*self.state.glob("*.tmp-*"), *self.out.parent.glob(f"{self.out.name}.tmp-*")):
                shutil.rmtree(rest)

    @contextlib.contextmanager
    def new_state(self, step):
        """A folder aside for the state after `step` optimizer steps of the whole run; it becomes the newest one."""
        with self._errors("a state"), folder_aside(self.state / f"step-{step:09d}") as aside:
            yield aside
            write_json(aside / IDENTITY, self.identity)
        for old in sorted(self._states())[:-KEPT_STATES]:
            shutil.rmtree(old)

    @contextlib.contextmanager
    def result(self):
        """A folder aside for the model and its record; it becomes `out`, and the state goes."""
        with self._errors("the model"), folder_aside(self.out) as aside:
            yield aside
            if (self.state / "runs").exists():
                os.replace(self.state / "runs", aside / "runs")
        self.clear()

    def clear(self):
        """Remove the state of a finished run."""
        self.lock.release()
        shutil.rmtree(self.state, ignore_errors=True)

    @contextlib.contextmanager
    def _errors(self, what):
        """Whatever goes wrong in writing is said in one sentence."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            whole = "; the states before it are whole" if any(self._states()) else ""
            raise OSError(f"out: {what} of {str(self.out)!r} cannot be written ({reason}){whole}") from error

    def _states(self):
        return [path for path in self.state.glob("step-*") if ".tmp-" not in path.name]

    def _compare(self, before):
        if changed := [key for key, new in self.identity.items() if before.get(key) != new]:
            what = NAMES.get(changed[0], changed[0])
            raise ValueError(
                f"out: {str(self.out)!r} was begun with another {what}; expected the same, or another folder"
            )
