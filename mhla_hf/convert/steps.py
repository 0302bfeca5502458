"""What every conversion does: choose the settings first, and put the new weights where the layer is at last."""

import difflib
from dataclasses import fields, replace

import torch

from ..nn.settings import MHLASettings


def chosen_settings(settings: MHLASettings | None, defaults: MHLASettings, layers, overrides: dict) -> MHLASettings:
    """The settings of one conversion: `defaults`, or `settings` in their place, then `overrides` and `layers`."""
    settings = defaults if settings is None else settings
    if not isinstance(settings, MHLASettings):
        raise TypeError(f"settings: got {type(settings).__name__}, expected MHLASettings.")
    known = [field.name for field in fields(settings)]
    if unknown := sorted(set(overrides) - set(known)):
        near = difflib.get_close_matches(unknown[0], known, n=1)
        wanted = repr(near[0]) if near else f"one of {', '.join(known)}"
        raise TypeError(f"settings: got unknown setting {unknown[0]!r}, expected {wanted}.")
    if layers is not None:
        overrides = {**overrides, "layers": layers}
    if overrides.get("mixing_form", "decay") != "decay":  # the default window stands on decays
        overrides = {"local": None, "free_decay": False, "feature_map": "hedgehog", **overrides}
    if overrides.get("local", settings.local) is None:  # what needs a window goes with it
        needed = {"rope": "before"} if settings.rope == "near" else {}
        overrides = {**needed, "length_power": False, **overrides}
    return replace(settings, **overrides)


def match_device_and_dtype(core: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put a new core where its layer is; the mixing stays fp32."""
    core.to(device)
    for name, parameter in core.named_parameters():
        if not name.startswith("mixing."):
            parameter.data = parameter.data.to(dtype)
