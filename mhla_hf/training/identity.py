"""What student and teacher are known by, so that a run is never gone on with as another: configuration and every weight.

Unusual: the object that a run has trained is not what that run began with; it is remembered for as long as it lives, so
that the same call with the same object, as in a notebook, goes on or finds the run finished.
"""

import hashlib
import json
import weakref

from ..checkpoints.fingerprint import fingerprint_model

VOLATILE = ("_name_or_path", "transformers_version", "dtype", "use_cache", "architectures", "auto_map")
VOLATILE += ("_class_name", "_diffusers_version", "_use_default_values")
# student -> {folder: (what it was known by when the run began, what it is known by since the run let it go)}
LET_GO = weakref.WeakKeyDictionary()


def identify_teacher(model) -> str:
    """A hash of configuration and weights; a second per gigabyte or so."""
    return _digest(model, ())


def identify_student(model) -> str:
    """The same, and of what is frozen."""
    return _digest(model, [name for name, value in model.named_parameters() if not value.requires_grad])


def as_begun(model, out, now) -> str:
    """What `model`, known by `now`, was known by when the run into `out` began, if that run let it go as it is; or `now`."""
    begun, left = LET_GO.get(model, {}).get(out, (None, None))
    return begun if now == left else now


def let_go(model, out, begun) -> None:
    """Remember `model` as what the run into `out` has made of the student that was known by `begun`."""
    LET_GO.setdefault(model, {})[out] = begun, identify_student(model)


def _digest(model, more):
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(model.config)
    config = {key: value for key, value in config.items() if key not in VOLATILE}
    text = json.dumps([config, fingerprint_model(model), *more], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
