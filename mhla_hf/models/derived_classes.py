"""Derives the classes of converted models from their bases in transformers, and swaps their attention modules.

No class is written out: `MHLALlamaForCausalLM`, `MHLALlamaConfig`, and `MHLALlamaAttention` are made from Llama's when they
are first used. Weights have the names of the base, plus `mhla.*` in each attention module.
"""

import copy
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..nn.settings import FOREIGN_ENTRIES, MHLASettings
from .families import Family
from .pretrained import MHLAPreTrainedMixin
from .transformers_api import (
    class_names,
    config_class_name,
    config_class_of,
    copy_weight_renames,
    set_attention_function,
)


@dataclass(frozen=True)
class AttentionSwap:
    """Describes how the attention modules of one kind of model are replaced by MHLA."""

    function_name: str  # name under which transformers knows MHLA's attention function
    mixin: type  # first base of the MHLA attention classes
    find_attentions: Callable[[nn.Module], dict[int, Any]]  # finds a model's attention modules, by layer index
    core_sizes: Callable[[Any, Any], dict[str, Any]]  # (attention, config) -> a core's arguments after `settings`
    matrix_core: Any = None  # core class if `MHLASettings.core` is "matrix"; None if a checkpoint's source lacks it
    windowed_core: Any = None  # if it is "windowed"
    prepare: Callable[..., Any] | None = None  # changes the arguments of the headless model's forward
    finish: Callable[[Any, MHLASettings], None] | None = None  # called when all layers are swapped
    replaces_masks: bool = True  # whether a model without softmax names MHLA in its config, to build no T x T mask


class MHLAConfigMixin:
    """Adds the settings, `mhla`, to a configuration class of transformers; must come first among the bases of a class."""

    def __post_init__(self: Any, mhla: Any = None, **kwargs: Any) -> None:
        if mhla is None:
            return super().__post_init__(**kwargs)  # type: ignore[misc]
        super().__post_init__(**{name: x for name, x in kwargs.items() if name not in FOREIGN_ENTRIES})  # type: ignore[misc]
        settings = MHLASettings.from_dict(mhla.to_dict() if isinstance(mhla, MHLASettings) else mhla)
        settings.layers = settings.resolve_layers(self.num_hidden_layers)
        self.mhla = settings.to_dict()

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {**values, **FOREIGN_ENTRIES} if values.get("mhla") is not None else values


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Builds the base, then turns attention into MHLA in the layers of `config.mhla`; must come first among the bases."""

    family: Family
    swap: AttentionSwap

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any):
        if not isinstance(config, self.config_class) or getattr(config, "mhla", None) is None:
            expected = f"{self.config_class.__name__} with `mhla`; use mhla_hf.convert(model) on a softmax model"
            raise ValueError(f"config: got {type(config).__name__}, expected {expected}.")
        # The base looks up classes by the class of its configuration, so it gets a copy of `config` of the base's class.
        base_class = self.config_class.__bases__[1]
        base_config = base_class.__new__(base_class)
        vars(base_config).update(vars(config))
        super().__init__(base_config, *args, **kwargs)  # type: ignore[call-arg]
        vars(config).update(vars(base_config))
        for module in self.modules():
            for name in [name for name, value in vars(module).items() if value is base_config]:
                setattr(module, name, config)
        self.install_mhla(MHLASettings.from_dict(config.mhla))

    def install_mhla(self: Any, settings: MHLASettings) -> None:
        """Turn attention into MHLA, in place, in the layers `settings.layers` (indices); ValueError if the core is None."""
        swap, config = self.swap, self.config
        attentions = swap.find_attentions(self)
        core_class = getattr(swap, f"{settings.core}_core")
        if core_class is None:
            expected = f"{not settings.windowed}, the only form in the code of this {type(self).__name__}"
            raise ValueError(f"windowed: got {settings.windowed}, expected {expected}.")
        layers: Any = settings.layers
        for attention in (attentions[index] for index in layers):
            core = core_class(settings, **swap.core_sizes(attention, config))
            swap_attention(attention, derived_class(type(attention), swap.mixin), core, swap.function_name)
        if swap.finish is not None:
            swap.finish(self, settings)
        # Compare with the attention modules, not with all layers: a base may have layers without attention.
        if swap.replaces_masks and set(layers) == set(attentions) and not settings.softmax_heads:
            set_attention_function(config, swap.function_name)
        if swap.prepare is not None and (body := self.base_model) is not self:
            names = tuple(inspect.signature(type(body).forward).parameters)[1:]  # of the hook's positional arguments
            body.register_forward_pre_hook(functools.partial(swap.prepare, names=names), with_kwargs=True)
        self.source_entry = self.family.kind.sources[settings.core]


# What follows the name of the model in a class name.
HEAD_NAME = re.compile(r"(For[A-Z]\w*|LMHeadModel|(Vision)?Model)$")
_DERIVED: dict[type, Any] = {}  # base -> the one class derived from it


def derived_class(base: type, mixin: type, **namespace: Any) -> Any:
    """Return the MHLA class of a base, made once; pickle finds it by name in `converted.py` or the saved source file."""
    if base not in _DERIVED:
        namespace["__module__"] = __name__.replace("derived_classes", "converted")
        _DERIVED[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
    return _DERIVED[base]


def model_name(family: Family) -> str:
    """Return the common start of a family's class names, such as "Llama"; "" if transformers lacks the model type."""
    return HEAD_NAME.sub("", next(iter(class_names(family)), ""))


def base_classes(family: Family) -> dict[str, Any]:
    """Return the softmax model classes of a family in this release of transformers, by name."""
    classes = {name: getattr(transformers, name, None) for name in class_names(family)}
    config = config_class_of(family.base)
    return {name: cls for name, cls in classes.items() if cls is not None and cls.config_class is config}


def derived_config_class(family: Family) -> Any:
    base: Any = config_class_of(family.base)
    types = {"model_type": f"mhla_{family.base}", "base_model_type": family.base}
    return derived_class(base, MHLAConfigMixin, __doc__=f"`{base.__name__}` with `mhla`.", **types)


def derived_model_class(family: Family, base: Any, swap: AttentionSwap) -> Any:
    config = derived_config_class(family)
    copy_weight_renames(family.base, config.model_type)
    members: dict[str, Any] = {
        "__doc__": f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists.",
        "config_class": config,
        "family": family,
        "swap": swap,
        "saved_classes": tuple(f"MHLA{name}" for name in base_classes(family)),
        # transformers decides this by the source of the class's module, which is ours and not the base's.
        "_can_set_experts_implementation": classmethod(lambda cls: base._can_set_experts_implementation()),
    }
    if swap.prepare is not None:
        members["forward"] = wrap_forward(base.forward, swap.prepare)
    return derived_class(base, MHLAHeadMixin, **members)


@functools.cache
def calls_interface(attention_class: Any) -> bool:
    """Return whether an attention class uses `ALL_ATTENTION_FUNCTIONS`, so that it can become MHLA; others stay softmax."""
    forward: Any = inspect.unwrap(attention_class.forward)
    return any(forward.__globals__.get(name) is ALL_ATTENTION_FUNCTIONS for name in forward.__code__.co_names)


def is_attention(module: Any) -> bool:
    return hasattr(module, "mhla") or calls_interface(type(module))  # type: ignore[arg-type]


def attention_sizes(attention: nn.Module, config: Any) -> dict[str, int]:
    """Return an MHLA core's arguments, except `settings` and `norm_eps`; ValueError if KV heads do not divide the heads."""
    num_heads, num_groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if isinstance(num_groups, int) and num_heads % num_groups:
        expected = f"a divisor of the {num_heads} attention heads"
        raise ValueError(f"num_key_value_heads: got {num_groups}, expected {expected}.")
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_heads // getattr(attention, "num_key_value_groups", 1),
        "key_dim": getattr(attention, "qk_head_dim", width),  # latent attention has two widths
        "value_dim": getattr(attention, "v_head_dim", width),
        "hidden_size": config.hidden_size,
    }


def wrap_forward(forward: Callable[..., Any], prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that `prepare` changes the arguments of a headless model; a hook would miss `model.forward(...)`."""
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def prepared_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.base_model is self:
            args, kwargs = prepare(self, args, kwargs, names)
        return forward(self, *args, **kwargs)

    return prepared_forward


def change_class(module: Any, new_class: Any) -> None:
    """Change the class of a module in place, also in the forward that accelerate's hooks wrap."""
    module.__class__ = new_class
    if "_old_forward" in vars(module):
        module._old_forward = types.MethodType(new_class.forward, module)


def swap_attention(attention: Any, mhla_class: Any, core: nn.Module, function_name: str) -> None:
    """Turn an attention module into MHLA, in place, with a copy of the configuration that selects `function_name`."""
    core.train(attention.training)
    change_class(attention, mhla_class)
    attention.config = copy.copy(attention.config)
    set_attention_function(attention.config, function_name)
    attention.add_module("mhla", core)


def find_derived_class(name: str, kinds: Iterable[tuple[tuple[Family, ...], AttentionSwap]]) -> Any:
    """Return the MHLA class of this name, for `__getattr__` of a module; raise AttributeError if no family has it."""
    base_name = name.removeprefix("MHLA")
    candidates = [(family, swap) for families, swap in kinds for family in families if name.startswith("MHLA")]
    for family, swap in candidates:
        if base_name == config_class_name(family.base):
            return derived_config_class(family)
        if base_name in class_names(family) and base_name in base_classes(family):
            return derived_model_class(family, base_classes(family)[base_name], swap)
        if base_name.endswith("Attention") and base_name.startswith(model_name(family)):
            for base in base_classes(family).values():
                if hasattr(module := sys.modules[base.__module__], base_name):
                    return derived_class(getattr(module, base_name), swap.mixin)
    raise AttributeError(f"module {__name__.replace('derived_classes', 'converted')!r} has no MHLA class {name!r}.")
