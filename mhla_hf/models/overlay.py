"""Makes the classes of converted models of transformers from those of their bases, and swaps attention modules.

No class is written out. Each is made on first use, so that a family needs one record only. Weights have the names of the
base, plus `mhla.*` in each attention module.
"""

import copy
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from ..nn.settings import NO_SOFTMAX, MHLASettings
from .families import Family
from .pretrained import MHLAPreTrainedMixin
from .transformers_api import config_class_name, config_class_of, copy_weight_renames, set_attention_function


class MHLAOverlayConfig:
    """Adds `mhla`, the settings, to the configuration class of a base, as the first of the bases.

    `config.json` also gets `transformers_weights`, which names a file that does not exist. Without it a softmax class would
    load the folder and ignore the weights `mhla.*`; with it, that is an error. This class drops the entry.
    """

    def __post_init__(self: Any, **kwargs: Any) -> None:
        """Run the base's, then check `mhla` and list its layers."""
        values = kwargs.pop("mhla", None)
        if values is not None:
            kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)  # type: ignore[misc]
        if values is not None:
            settings = MHLASettings.from_dict(values.to_dict() if isinstance(values, MHLASettings) else values)
            settings.layers = settings.resolve_layers(self.num_hidden_layers)
            self.mhla = settings.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Return the base's dictionary, with the entry that stops softmax classes."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        return {**values, "transformers_weights": NO_SOFTMAX} if values.get("mhla") is not None else values


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixin for model classes: builds the base model, then converts the layers that `config.mhla` lists to MHLA.

    It must come first among the bases of a class.

    Attributes:
        install: Called with the model and its `MHLASettings`; converts the layers.
        prepare: Called before each forward pass of the body (see `forward_preparing`), or None.
        family: The `Family` of the base model.
    """

    prepare: Any = None

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any):
        if not isinstance(config, self.config_class) or getattr(config, "mhla", None) is None:
            expected = f"{self.config_class.__name__} with `mhla`; use mhla_hf.convert(model) on a softmax model"
            raise ValueError(f"config: got {type(config).__name__}, expected {expected}.")
        # Heads look their body up by the class of the configuration, which therefore is the base's in the meantime.
        config_class, config.__class__ = type(config), self.config_class.__bases__[1]
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        finally:
            config.__class__ = config_class
        self.install(self, MHLASettings.from_dict(config.mhla))

    def class_names(self: Any) -> list[str]:
        """Return the names of the family's classes, body and heads."""
        return [f"MHLA{name}" for name in base_classes(self.family)]


# The end of a class name that follows the name of the model.
MODEL_NAME = re.compile("(LMHead|Vision)?Model$")
# The classes that were made, by their bases: each is made once.
_OVERLAYS: dict[type, Any] = {}


def overlay_class(base: type, mixin: type, entry: str, **namespace: Any) -> Any:
    """Return the MHLA class of a base, such as `MHLALlamaAttention(mixin, LlamaAttention)`.

    Args:
        base: Class of transformers.
        mixin: The first of the bases.
        entry: Module in which pickle finds the class by its name; in a bundle, that is the bundle's module.
        **namespace: Further attributes of the class.
    """
    if base not in _OVERLAYS:
        namespace["__module__"] = __name__.replace("models.overlay", entry)
        _OVERLAYS[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
    return _OVERLAYS[base]


def base_classes(family: Family) -> dict[str, Any]:
    """Return the classes of a family's base that this release of transformers has, by name."""
    classes = {name: getattr(transformers, name, None) for name in family.classes}
    config = config_class_of(family.base)
    return {
        name: cls for name, cls in classes.items() if cls is not None and getattr(cls, "config_class", None) is config
    }


def overlay_config_class(family: Family) -> Any:
    """Return the configuration class of a converted family: `MHLALlamaConfig(LlamaConfig)` for "llama"."""
    base: Any = config_class_of(family.base)
    model_types = {"model_type": f"mhla_{family.base}", "base_model_type": family.base}
    doc = f"`{base.__name__}` with `mhla`, the settings of its MHLA layers."
    return overlay_class(base, MHLAOverlayConfig, family.entry, __doc__=doc, **model_types)


def overlay_model_class(family: Family, base: Any, mixin: Any) -> Any:
    """Return a model class of a converted family, such as `MHLALlamaForCausalLM(mixin, LlamaForCausalLM)`."""
    config = overlay_config_class(family)
    copy_weight_renames(family.base, config.model_type)
    doc = f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists."
    members: dict[str, Any] = {
        "__doc__": doc,
        "config_class": config,
        "source_entry": family.entry,
        "family": family,
    }
    # transformers looks for a decorator in the source of the class's module, which is ours; so this asks the base.
    members["_can_set_experts_implementation"] = classmethod(lambda cls: base._can_set_experts_implementation())
    if mixin.prepare is not None:
        members["forward"] = forward_preparing(base.forward, mixin.prepare)
    return overlay_class(base, mixin, family.entry, **members)


@functools.cache
def calls_interface(attention_class: Any) -> bool:
    """Return whether the forward of a class looks up an attention function, by the local variable that all models use."""
    return "attention_interface" in inspect.unwrap(attention_class.forward).__code__.co_varnames


def attention_sizes(attention: nn.Module, config: Any) -> dict[str, int]:
    """Return the numbers of heads and the widths of an attention module, as arguments of an MHLA core.

    Args:
        attention: Attention module of transformers.
        config: Configuration of the model.

    Raises:
        ValueError: The number of heads is not a multiple of the number of KV heads.
    """
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_key_value_heads: got {groups}, expected a divisor of the {heads} attention heads.")
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"num_heads": heads, "num_kv_heads": heads // getattr(attention, "num_key_value_groups", 1)}
    # In latent attention, keys and values differ in width.
    widths = {"key_dim": getattr(attention, "qk_head_dim", width), "value_dim": getattr(attention, "v_head_dim", width)}
    return sizes | widths


def forward_preparing(forward: Callable[..., Any], prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a model so that `prepare` is called before it if the model is a body rather than a head.

    A hook would not do: callers of `model.forward`, such as sentence-transformers, skip hooks.

    Args:
        forward: The forward of the base.
        prepare: As in `prepare_inner_body`.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def prepared_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.base_model is self:
            args, kwargs = prepare(self, args, kwargs, names)
        return forward(self, *args, **kwargs)

    return prepared_forward


def prepare_inner_body(model: Any, prepare: Callable[..., Any]) -> None:
    """Call a function before every call of the body, if `model` is a head on one.

    Args:
        model: The model.
        prepare: Function of the body, the positional and keyword arguments of the call, and the parameter names of the
            body's forward. It returns the new positional and keyword arguments.
    """
    if (body := model.base_model) is not model:
        names = tuple(inspect.signature(type(body).forward).parameters)[1:]
        body.register_forward_pre_hook(functools.partial(prepare, names=names), with_kwargs=True)


def swap_attention(attention: Any, mixed: Any, core: nn.Module, name: str) -> None:
    """Turn an attention module of transformers into MHLA, in place.

    Args:
        attention: The module.
        mixed: Its new class, from `overlay_class`.
        core: Its new child `mhla`.
        name: The attention function to select, in a copy of the configuration for this module alone.
    """
    core.train(attention.training)
    attention.__class__ = mixed
    if "_old_forward" in attention.__dict__:  # the forward that accelerate's hooks wrap
        attention._old_forward = types.MethodType(mixed.forward, attention)
    attention.config = copy.copy(attention.config)
    set_attention_function(attention.config, name)
    attention.add_module("mhla", core)


def overlay_named(name: str, families: tuple[Family, ...], model_mixin: type, attention_mixin: type) -> Any:
    """Return the class that a module of converted families has under a name; its module-level `__getattr__`.

    Args:
        name: Name of a configuration, model, or attention class, such as "MHLALlamaForCausalLM".
        families: The families of the module.
        model_mixin, attention_mixin: Mixins of their model and attention classes.

    Raises:
        AttributeError: No family has such a class.
    """
    base_name = name.removeprefix("MHLA")
    for family in families if name.startswith("MHLA") else ():
        if base_name == config_class_name(family.base):
            return overlay_config_class(family)
        if base_name in family.classes and base_name in base_classes(family):
            return overlay_model_class(family, base_classes(family)[base_name], model_mixin)
        if base_name.endswith("Attention") and base_name.startswith(MODEL_NAME.sub("", family.classes[0])):
            for base in base_classes(family).values():
                if hasattr(module := sys.modules[base.__module__], base_name):
                    return overlay_class(getattr(module, base_name), attention_mixin, family.entry)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}, expected one of {[f.base for f in families]}."
    )
