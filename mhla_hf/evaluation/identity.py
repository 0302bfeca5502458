"""What decides a score besides the model, as a hash: the bytes of files, and what a user's own function does.

A score is known only where all of it is unchanged. Unusual: a function has no bytes of its own, so its code is hashed with
whatever it reaches: constants, variables it closes over, the weights of modules, functions and classes of its own file.
What comes from a library counts by its name.
"""

import functools
import hashlib
import json
import re
import types

import numpy
import torch
from tqdm import tqdm

from ..checkpoints.checksums import hash_file
from ..checkpoints.fingerprint import fingerprint_model
from .samples import hash_of

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def hash_files(files, folder, what="files", progress=False):
    """Of the paths of `files` below `folder` and their bytes; 16 hex digits. progress: a bar called `what` on stderr."""
    shown = tqdm(sorted(files), desc=what, disable=not progress)
    return hash_of([[file.relative_to(folder).as_posix(), hash_file(file)] for file in shown])


def hash_thing(thing):
    """Of what a function, or an object that holds data and functions, does; 16 hex digits, the same in every process."""
    inner = thing.func if isinstance(thing, functools.partial) else thing
    return hash_of(_told(thing, getattr(inner, "__module__", None), {}))


def _told(thing, owner, seen):
    """`thing` as JSON can say it. owner: name of the module whose code is followed. seen: id -> thing, told before."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if id(thing) in seen:
        return "again"
    seen[id(thing)] = thing  # kept alive, so that no other gets its id
    tell = functools.partial(_told, owner=owner, seen=seen)
    if isinstance(thing, torch.nn.Module):
        shown = ADDRESS.sub("", repr(thing))
        return [_name(type(thing)), shown, fingerprint_model(thing), tell(type(thing).forward)]
    if isinstance(thing, (torch.Tensor, numpy.ndarray)):
        return _told_numbers(thing)
    if isinstance(thing, dict):
        return sorted([repr(key), tell(value)] for key, value in thing.items() if isinstance(key, PLAIN))
    if isinstance(thing, (list, tuple)):
        return [tell(value) for value in thing]
    if isinstance(thing, (set, frozenset)):
        return sorted(json.dumps(tell(value)) for value in thing)
    if isinstance(thing, types.FunctionType):
        return _told_function(thing, owner, tell)
    if isinstance(thing, types.CodeType):
        return [thing.co_code.hex(), thing.co_names, [tell(value) for value in thing.co_consts]]
    if isinstance(thing, types.MethodType):
        return [tell(thing.__func__), tell(thing.__self__)]
    if isinstance(thing, functools.partial):
        return [tell(thing.func), tell(thing.args), tell(thing.keywords)]
    if isinstance(thing, type):
        own = vars(thing).items() if thing.__module__ == owner else ()
        return [_name(thing), [[name, tell(value)] for name, value in sorted(own) if callable(value)]]
    if isinstance(thing, (types.ModuleType, types.BuiltinFunctionType)):
        return thing.__name__
    if hasattr(thing, "to_json_string"):  # a processor or configuration of transformers
        return [_name(type(thing)), thing.to_json_string()]
    return [tell(type(thing)), tell(getattr(thing, "__dict__", None))]


def _told_function(function, owner, tell):
    """Code, defaults, what is closed over and, for a function of the owner, the globals that its code names."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    named = sorted(_names(function.__code__)) if function.__module__ == owner else []
    reached = [[name, tell(function.__globals__[name])] for name in named if name in function.__globals__]
    return [tell(function.__code__), tell(function.__defaults__), tell(function.__kwdefaults__), tell(held), reached]


def _names(code):
    """Global names in a code object and the ones in it."""
    inner = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return {*code.co_names, *(name for value in inner for name in _names(value))}


def _told_numbers(values):
    array = (
        values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if torch.is_tensor(values) else values
    )
    return [str(values.dtype), list(values.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"
