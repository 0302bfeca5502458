"""The folders of a training run, which survive a killed process.

A finished run creates `<out>` by one rename. Until then, `<out>.state/` has the states `step-N/`, `runs/`, `previews/`, a
lock, and `unfinished/`, where states and the result are written and then renamed. A nonempty `<out>.state/` without
`unfinished/` is refused. In a state, `run.json` identifies the only run that may resume from it, with all files' checksums.
"""

import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..checkpoints.file_io import atomic_folder, check_writable, read_json, write_json
from ..checkpoints.fingerprint import fingerprint_model, hash_file, hash_json
from ..checkpoints.load import summarize_error

RECORD = "train.json"
IDENTITY = "run.json"
STATE_PATTERN = "step-" + 9 * "[0-9]"
RUN_OUTPUTS = ("runs", "previews")  # folders that are moved into `<out>` at the end
NUM_KEPT_STATES = 2
# Names in error messages for keys of a run's identity.
IDENTITY_NAMES = {
    "student": "student (its configuration or weights; one from scratch needs torch.manual_seed)",
    "data": "data or tokenizer",
    "stages": "recipe (its stages)",
    "sharded": "kind of launch (with or without FSDP)",
}
# Fields of a configuration that do not change what a model computes.
VOLATILE_ENTRIES = {
    "_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "auto_map",
    "_class_name", "_diffusers_version", "_use_default_values",
}  # fmt: skip
# Student -> {output folder: hash of the student when that run began}. In a notebook, a run is resumed with the object that
# it has trained, so the weights cannot be hashed again.
INITIAL_HASHES: weakref.WeakKeyDictionary[Any, dict[Path, str]] = weakref.WeakKeyDictionary()


def identify(model: Any, is_student: bool = False) -> str:
    """Return a hash of a model's weights and configuration and, of a student, the names of its frozen parameters."""
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    config = {key: value for key, value in config.items() if key not in VOLATILE_ENTRIES}
    frozen = [name for name, parameter in model.named_parameters() if is_student and not parameter.requires_grad]
    return hash_json([config, fingerprint_model(model), *frozen], 32)


class RunFolder:
    """The folder `out`, which a run creates, and the folder of the run's state."""

    def __init__(self, out: Any) -> None:
        if not isinstance(out, (str, os.PathLike)):
            raise TypeError(f"out: got {type(out).__name__}, expected the path of a folder to create.")
        self.out = Path(os.path.abspath(Path(out).expanduser()))
        self.state = self.out.with_name(self.out.name + ".state")
        self.unfinished = self.state / "unfinished"
        self.lock = FileLock(self.state / "lock")
        self.identity: dict[str, Any] = {}

    def find(self, identity: dict[str, Any], student: Any) -> Path | Literal["finished"] | None:
        """Set `identity`; return "finished", the newest state to resume from, or None. Refuse the folder of another run."""
        current = json.loads(json.dumps(identity))
        initial_hashes = INITIAL_HASHES.setdefault(student, {})
        self.identity = {**current, "student": initial_hashes.get(self.out, current["student"])}
        latest: Path | Literal["finished"] | None = "finished"
        if (record := read_json(self.out / RECORD)) is not None:
            earlier = record.get("fingerprint", {})
        else:
            self.check_free()
            latest = self.newest_state()
            earlier = (read_json(latest / IDENTITY) or {}) if latest else None
        if earlier is None:
            self.identity = current
        elif changed := [key for key, value in self.identity.items() if earlier.get(key) != value]:
            begun = f"where a run began with another {IDENTITY_NAMES.get(changed[0], changed[0])}"
            raise ValueError(f"out: got {str(self.out)!r}, {begun}, expected the same one or another folder.")
        initial_hashes[self.out] = self.identity["student"]
        return latest

    def check_free(self) -> None:
        """Raise ValueError if the folder of the result or the state cannot be made, or holds other files."""
        check_writable(self.out, "out")
        start = f"out: got {str(self.out)!r}"
        if self.out.is_file() or (self.out.exists() and any(self.out.iterdir())):
            raise ValueError(f"{start}, which is a file or holds other files, expected a new or empty folder.")
        if self.state.is_dir() and any(self.state.iterdir()) and not self.unfinished.is_dir():
            place = f"{str(self.state)!r}, which holds other files"
            raise ValueError(f"{start}, whose state would go to {place}, expected another name.")

    def begin(self) -> None:
        """Create the state folder, lock it (ValueError if it is locked), and remove unfinished files of a killed run."""
        with self._explain_errors("the run's state"):
            self.unfinished.mkdir(parents=True, exist_ok=True)
            try:
                self.lock.acquire(blocking=False)
            except Timeout:
                got = f"{str(self.out)!r}, into which another process is training now"
                raise ValueError(f"out: got {got}, expected another folder.") from None
            for path in self.unfinished.iterdir():
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def new_state(self, step: int) -> Iterator[Path]:
        """Yield an empty folder, which becomes the newest state at the end. The oldest states are removed."""
        target = self.state / f"step-{step:09d}"
        with self._explain_errors("a state"), atomic_folder(target, parent=self.unfinished) as temporary:
            yield temporary
            write_json(temporary / IDENTITY, {**self.identity, "files": _compute_checksums(temporary)})
        for old_state in self._list_states()[:-NUM_KEPT_STATES]:
            shutil.rmtree(old_state.rename(self.unfinished / old_state.name))

    def find_damage(self, state: Path) -> str:
        """Return "<file> is missing" or "<file> is damaged" if a file of a state does not match its checksum; else ""."""
        checksums = _compute_checksums(state)
        for name, checksum in (read_json(state / IDENTITY) or {})["files"].items():
            if checksums.get(name) != checksum:
                return f"{name} is {'damaged' if name in checksums else 'missing'}"
        return ""

    @contextlib.contextmanager
    def result(self) -> Iterator[Path]:
        """Yield an empty folder. At the end, move `RUN_OUTPUTS` into it, rename it to `out`, and clear the state folder."""
        with self._explain_errors("the model"), atomic_folder(self.out, parent=self.unfinished) as temporary:
            yield temporary
            for name in RUN_OUTPUTS:
                if (self.state / name).exists():
                    os.replace(self.state / name, temporary / name)
        self.clear()

    def clear(self) -> None:
        """Release the lock, and remove what the run wrote to its state folder, but no other files."""
        self.lock.release()
        if not self.unfinished.is_dir():
            return
        Path(self.lock.lock_file).unlink(missing_ok=True)
        for folder in (*(self.state / name for name in RUN_OUTPUTS), *self._list_states(), self.unfinished):
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.state.rmdir()

    @contextlib.contextmanager
    def _explain_errors(self, content: str) -> Iterator[None]:
        """Turn an error while writing `content` into an OSError that names the output folder."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or summarize_error(error)
            intact = "; earlier states are intact" if self._list_states() else ""
            got = f"{str(self.out)!r}, where {content} cannot be written ({reason}{intact})"
            raise OSError(f"out: got {got}, expected a place with room to write.") from error

    def newest_state(self) -> Path | None:
        return max(self._list_states(), default=None)

    def _list_states(self) -> list[Path]:
        return sorted(self.state.glob(STATE_PATTERN))


def merge_records(first: dict[str, Any], last: dict[str, Any], unit: str) -> dict[str, Any]:
    """Merge the records of the runs that trained a pipeline's two transformers; `unit` is `Task.unit`."""
    merged = last | {key: first[key] + last[key] for key in ("parameters", "steps", unit, "resumed", "seconds")}
    for key, name in (("stages", "name"), ("history", "stage")):
        merged[key] = [
            {**entry, name: f"{component}: {entry[name]}"}
            for component, record in (("high noise", first), ("low noise", last))
            for entry in record[key]
        ]
    return merged


def unreadable_state(state: Path, reason: str) -> ValueError:
    expected = "an intact state: delete it to resume from the previous state"
    return ValueError(f"out: got the state {str(state)!r}, which cannot be read ({reason}), expected {expected}.")


def _compute_checksums(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / IDENTITY)
    return {file.relative_to(folder).as_posix(): hash_file(file) for file in files}
