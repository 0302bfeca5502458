"""What every converted model of transformers is made of: its configuration, its class, and the swap of one attention module.

No class is written out. Each is made on first use from the base's own, so that a family costs one record; weight names are
the base's plus `mhla.*` in each attention.
"""

import copy
import functools
import inspect
import re
import sys
import types

import transformers
from torch import nn

from ..nn.settings import NO_SOFTMAX, MHLASettings
from .families import Family
from .pretrained import MHLAPreTrainedMixin
from .transformers_api import config_class_name, config_class_of, copy_weight_renames, set_attention_function


class MHLAOverlayConfig:
    """What a converted model's configuration adds to its base's: `mhla`, checked when made and when loaded.

    In `config.json` also `transformers_weights`, which names no file: softmax classes refuse the folder by it, which they
    would load but for `mhla.*`; this class drops it.
    """

    def __post_init__(self, **kwargs):
        values = kwargs.pop("mhla", None)
        if values is not None:
            kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)
        if values is not None:
            settings = MHLASettings.from_dict(values.to_dict() if isinstance(values, MHLASettings) else values)
            settings.layers = settings.resolve_layers(self.num_hidden_layers)
            self.mhla = settings.to_dict()

    def to_dict(self) -> dict:
        """As the base, and what stops softmax classes."""
        values = super().to_dict()
        return {**values, "transformers_weights": NO_SOFTMAX} if values.get("mhla") is not None else values


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixed into the base's class: builds the base, then makes the layers that `config.mhla` lists MHLA by `install`.

    prepare: called before the body runs, as by `forward_preparing`; None: nothing is. While the base is built the
    configuration is of its base's class, by which heads find their body.
    """

    prepare = None

    def __init__(self, config, *args, **kwargs):
        if not isinstance(config, self.config_class) or getattr(config, "mhla", None) is None:
            what = "with `mhla`; use mhla_hf.convert(model) on a softmax model"
            raise ValueError(f"config: got {type(config).__name__}, expected {self.config_class.__name__} {what}.")
        own, config.__class__ = type(config), self.config_class.__bases__[1]
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.__class__ = own
        self.install(self, MHLASettings.from_dict(config.mhla))

    def class_names(self) -> list[str]:
        """Of the body and the heads that the base's family has."""
        return [f"MHLA{name}" for name in base_classes(self.family)]


MODEL_NAME = re.compile("(LMHead|Vision)?Model$")
_OVERLAYS = {}  # every class that is made here, by what it is made of: each is made once


def overlay_class(base: type, mixin: type, entry: str, **namespace) -> type:
    """`MHLALlamaAttention(mixin, LlamaAttention)` for `LlamaAttention`.

    entry: the module in which a process that unpickles it finds it by name; in a bundle that is this one.
    """
    if base not in _OVERLAYS:
        namespace["__module__"] = __name__.replace("models.overlay", entry)
        _OVERLAYS[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
    return _OVERLAYS[base]


def base_classes(family: Family) -> dict[str, type]:
    """The classes of a family's base that there are, by name."""
    found = {name: getattr(transformers, name, None) for name in family.classes}
    config = config_class_of(family.base)
    return {
        name: cls for name, cls in found.items() if cls is not None and getattr(cls, "config_class", None) is config
    }


def overlay_config_class(family: Family) -> type:
    """The configuration class of a converted family: `MHLALlamaConfig(LlamaConfig)` for "llama"."""
    base = config_class_of(family.base)
    types = {"model_type": f"mhla_{family.base}", "base_model_type": family.base}
    doc = f"`{base.__name__}` with `mhla`, the settings of its MHLA layers."
    return overlay_class(base, MHLAOverlayConfig, family.entry, __doc__=doc, **types)


def overlay_model_class(family: Family, base: type, mixin: type) -> type:
    """A model class of a converted family: `MHLALlamaForCausalLM(mixin, LlamaForCausalLM)`."""
    config = overlay_config_class(family)
    copy_weight_renames(family.base, config.model_type)
    doc = f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists."
    members = {"__doc__": doc, "config_class": config, "source_entry": family.entry, "family": family}
    # transformers looks for a decorator in the source of the class's module, which is ours here: ask the base instead.
    members["_can_set_experts_implementation"] = classmethod(lambda cls: base._can_set_experts_implementation())
    if mixin.prepare is not None:
        members["forward"] = forward_preparing(base.forward, mixin.prepare)
    return overlay_class(base, mixin, family.entry, **members)


@functools.cache
def calls_interface(attention_class: type) -> bool:
    """Whether the forward of this class asks transformers for "the attention function", in the way all its models do."""
    return "attention_interface" in inspect.unwrap(attention_class.forward).__code__.co_varnames


def attention_sizes(attention: nn.Module, config) -> dict[str, int]:
    """Heads and widths of an attention module of transformers, as the MHLA cores take them."""
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_key_value_heads: got {groups}, expected a divisor of the {heads} attention heads.")
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"num_heads": heads, "num_kv_heads": heads // getattr(attention, "num_key_value_groups", 1)}
    latent = {"key_dim": getattr(attention, "qk_head_dim", width), "value_dim": getattr(attention, "v_head_dim", width)}
    return sizes | latent  # which differ in latent attention


def forward_preparing(forward, prepare):
    """The forward of a model that may be a body: then `prepare` is called before, as by `prepare_inner_body`.

    A hook would not do: callers of `model.forward`, such as sentence-transformers, run none.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def own_forward(self, *args, **kwargs):
        if self.base_model is self:
            args, kwargs = prepare(self, args, kwargs, names)
        return forward(self, *args, **kwargs)

    return own_forward


def prepare_inner_body(model: nn.Module, prepare) -> None:
    """Call `prepare(body, args, kwargs, names)`, which gives both anew, before the body of a head runs.

    names: of the arguments of the body's forward.
    """
    if (body := model.base_model) is not model:
        names = tuple(inspect.signature(type(body).forward).parameters)[1:]
        body.register_forward_pre_hook(functools.partial(prepare, names=names), with_kwargs=True)


def swap_attention(attention: nn.Module, mixed: type, core: nn.Module, name: str) -> None:
    """Turn one attention module of transformers into MHLA, in place.

    mixed: its new class, see `overlay_class`. core: its new child `mhla`. name: of the attention function that it
    calls from now on, in a configuration of its own.
    """
    core.train(attention.training)
    attention.__class__ = mixed
    if "_old_forward" in attention.__dict__:  # accelerate keeps the forward that its hooks wrap
        attention._old_forward = types.MethodType(mixed.forward, attention)
    attention.config = copy.copy(attention.config)
    set_attention_function(attention.config, name)
    attention.add_module("mhla", core)


def overlay_named(name: str, families: tuple[Family, ...], model_mixin: type, attention_mixin: type):
    """What the modules of converted families have under `name`: a configuration, a model or an attention class."""
    own = name.removeprefix("MHLA")
    for family in families if name.startswith("MHLA") else ():
        if own == config_class_name(family.base):
            return overlay_config_class(family)
        if own in family.classes and own in base_classes(family):
            return overlay_model_class(family, base_classes(family)[own], model_mixin)
        if own.endswith("Attention") and own.startswith(MODEL_NAME.sub("", family.classes[0])):
            for base in base_classes(family).values():
                if hasattr(module := sys.modules[base.__module__], own):
                    return overlay_class(getattr(module, own), attention_mixin, family.entry)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}, expected one of {[f.base for f in families]}."
    )
