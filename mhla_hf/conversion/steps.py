"""Steps that all conversions share: undoing a failed one, resolving and checking arguments, placing new weights."""

import contextlib
import copy
import difflib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..data import TokenRing
from ..nn.settings import MHLASettings, is_whole

MAX_SEED = 2**32 - 1


@contextlib.contextmanager
def converting(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context manager in which models are in eval mode, and which undoes their conversion after an exception or Ctrl-C.

    It restores the classes, attributes, children, and hooks of all modules, but no values of tensors: those of the base do
    not change. After a conversion, each module is in train or eval mode as before, and a new one in its parent's mode.
    """
    modules = [module for model in models for module in model.modules()]  # parents come before their children
    modes = [module.training for module in modules]
    saved = []
    for module in modules:
        attributes = dict(vars(module))
        tables = [(table, dict(table)) for table in attributes.values() if type(table) in (dict, OrderedDict)]
        saved.append((module, type(module), attributes, tables))
    try:
        for model in models:
            model.eval()
        yield
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
    except BaseException:
        for module, original_class, attributes, tables in saved:
            module.__class__ = original_class
            vars(module).clear()
            vars(module).update(attributes)
            for table, content in tables:
                table.clear()
                table.update(content)
        raise


class Requested(NamedTuple):
    """The settings that a caller of `convert` asks for; see there."""

    settings: MHLASettings | None = None
    layers: str | Sequence[int] | None = None
    overrides: Mapping[str, Any] = MappingProxyType({})

    def resolve(self, defaults: MHLASettings) -> MHLASettings:
        """Return `settings` or else `defaults`, with `overrides` and `layers` applied. Raise TypeError for unknown fields.

        For sequences, `mixing_form` sets windowed=False unless that is given: windowed attention has no mixing matrix.
        Without windows, rope="near" becomes "before", and with windows on a grid, what does not suit them becomes what does,
        each unless it is given, too.
        """
        settings = defaults if self.settings is None else self.settings
        if not isinstance(settings, MHLASettings):
            raise TypeError(f"settings: got {type(settings).__name__}, expected MHLASettings.")
        field_names = [field.name for field in fields(settings)]
        if unknown := sorted(set(self.overrides) - set(field_names)):
            similar = difflib.get_close_matches(unknown[0], field_names, n=1)
            expected = repr(similar[0]) if similar else f"one of {', '.join(field_names)}"
            raise TypeError(f"settings: got unknown setting {unknown[0]!r}, expected {expected}.")
        overrides = dict(self.overrides) if self.layers is None else {**self.overrides, "layers": self.layers}
        if "mixing_form" in overrides and settings.layout is None:
            overrides = {"windowed": False, **overrides}
        if settings.rope == "near" and not overrides.get("windowed", settings.windowed):
            overrides = {"rope": "before", **overrides}
        if settings.layout is not None and overrides.get("windowed"):
            rope = settings.rope if settings.rope == "near" else "before"
            overrides = {"normalize": True, "output_norm": False, "sinks": 0, "rope": rope, **overrides}
        return replace(settings, **overrides)


def drop_softmax_layers(settings: MHLASettings, num_heads: Callable[[int], int]) -> MHLASettings:
    """Return a copy whose `layers`, a list, has no layer of which `softmax_heads` has all heads.

    `num_heads` returns the number of KV heads of a layer. Raise ValueError if `softmax_heads` does not suit the layers.
    """
    layers: Any = list(settings.layers)
    softmax_heads = dict(settings.softmax_heads or {})
    for layer, heads in [*softmax_heads.items()]:
        if int(layer) not in settings.layers:
            raise ValueError(f"softmax_heads: got layer {layer}, expected one of the MHLA layers {settings.layers}.")
        if heads[-1] >= (count := num_heads(int(layer))):
            raise ValueError(f"softmax_heads: got head {heads[-1]} in layer {layer}, expected 0 to {count - 1}.")
        if len(heads) == count:
            layers.remove(int(layer))
            del softmax_heads[layer]
    if not layers:
        raise ValueError("softmax_heads: got all heads of all MHLA layers, expected at least one left for MHLA.")
    return replace(settings, layers=layers, softmax_heads=softmax_heads)


def match_device_and_dtype(core: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move a core to `device` and cast it to `dtype`, except for its mixing, which stays fp32; in place."""
    core.to(device)
    for name, parameter in core.named_parameters():
        if not name.startswith("mixing."):
            parameter.data = parameter.data.to(dtype)


def is_number(text: str) -> bool:
    """Return whether a text is a number of at least 0, in digits with at most one point."""
    return text.replace(".", "", 1).isdecimal()


def parse_share(keep: float | int | str, total: int) -> int | None:
    """Convert a share (0.0 to 1.0), a percentage, or a number to a number out of `total`; None if `keep` is none of these.

    For a percentage or a number, the result can exceed `total`.
    """
    if isinstance(keep, str) and keep.endswith("%") and is_number(keep[:-1]):
        return round(float(keep[:-1]) / 100 * total)
    if isinstance(keep, float) and 0 <= keep <= 1:
        return round(keep * total)
    return keep if isinstance(keep, int) and is_whole(keep, 0) else None


def row_length(source: Any, longest: int, settings: MHLASettings | None) -> int:
    """Return the tokens per row: `longest`, or a sixth of a text in memory if that is less.

    Raise ValueError if rows are not longer than the window of `settings` and a block: too few tokens are beyond the window.
    """
    shortest = 1
    if settings is not None:
        shortest = (settings.window + 1) * settings.block_size + 1
        if longest < shortest:
            got = f"{settings.window} with block_size {settings.block_size}"
            expected = f"(window + 1) * block_size below the {longest} tokens of a row"
            raise ValueError(f"window: got {got}, expected {expected}.")
    if not isinstance(source, TokenRing):
        return longest
    if (num_tokens := len(source.tokens)) < 6 * shortest:
        reason = f" longer than a window and a block ({shortest - 1} tokens)" if shortest > 1 else ""
        expected = f"at least {6 * shortest}: 6 rows{reason}"
        raise ValueError(f"text: got {num_tokens} tokens, expected {expected}.")
    return min(longest, num_tokens // 6)


def check_report(report: dict[str, Any]) -> None:
    """Raise ValueError if a score in a report is NaN or infinite."""
    try:
        json.dumps(report, allow_nan=False)
    except ValueError:
        raise ValueError(
            "model: got outputs that are not finite; convert it in a wider dtype, such as float32."
        ) from None


def leave_inference_mode(model: torch.nn.Module) -> None:
    """Replace tensors made under torch.inference_mode by copies, in place: no gradients pass through inference tensors."""
    for x in (*model.parameters(), *model.buffers()):
        if x.is_inference():
            torch.utils.swap_tensors(x, copy.deepcopy(x))


def check_learning(model: Any, effort: Any, seed: Any) -> None:
    """Raise ValueError if `effort` or `seed` of `convert` is not valid, or if the model is on the meta device."""
    if isinstance(model, torch.nn.Module) and all(x.is_meta for x in model.parameters()):
        raise ValueError(f"model: got {type(model).__name__} on the meta device, expected one with weights.")
    if not is_whole(seed, 0, MAX_SEED):
        raise ValueError(f"seed: got {seed!r}, expected a whole number from 0 to {MAX_SEED}.")
    if not isinstance(effort, int | float) or not 0 < effort < float("inf"):
        raise ValueError(f"effort: got {effort!r}, expected a finite number above 0.")
