"""All settings of the attention in one dataclass, which `config.json` holds under "mhla"."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..ops.checks import IMPLEMENTATIONS

FORMAT_VERSION = 4
# Entries of config.json that only classes outside mhla_hf read. Softmax classes of transformers take `transformers_weights`
# as the name of the weights file, so their error shows this sentence. AutoTokenizer reads an unknown model type as "", and
# warns that the file has another one, unless some part of it has the model type "".
FOREIGN_ENTRIES: dict[str, Any] = {
    "transformers_weights": "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf "
    "installed",
    "tokenizer_only": {"model_type": ""},
}
MAX_BLOCKS = 16_384  # a mixing matrix of this size takes a gigabyte
MAX_BLOCK_SIZE = 65_536  # a cache allocates the keys and values of a block at its first step
MAX_WINDOW_BLOCKS = 1_024
MAX_SALIENT = 65_536


def is_whole(value: object, minimum: int, maximum: int = sys.maxsize) -> bool:
    """Return whether `value` is an int, and no bool, from `minimum` to `maximum`."""
    return type(value) is int and minimum <= value <= maximum


def is_layout(layout: object) -> bool:
    """Return whether `layout` is None, or a list of the numbers of blocks along 1 to 3 axes, at most `MAX_BLOCKS` in all."""
    if layout is None:
        return True
    if not isinstance(layout, list) or not 1 <= len(layout) <= 3:
        return False
    return all(is_whole(count, 1) for count in layout) and prod(layout) <= MAX_BLOCKS


def is_choice_of_layers(layers: object) -> bool:
    """Return whether `layers` is "all", "2/3", or a nonempty list of different layer indices."""
    if not isinstance(layers, list):
        return layers in ("all", "2/3")
    return len(layers) > 0 and all(is_whole(index, 0) for index in layers) and len(set(layers)) == len(layers)


def is_choice_of_heads(heads: object) -> bool:
    """Return whether `heads` is None, or a dict from layer indices (strings of digits) to nonempty lists of KV heads."""
    if not isinstance(heads, dict):
        return heads is None
    are_lists = all(isinstance(x, list) and x and all(is_whole(head, 0) for head in x) for x in heads.values())
    return are_lists and all(isinstance(layer, str) and layer.isdecimal() for layer in heads)


SettingCheck = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what the error says was expected


def one_of(*allowed: Any) -> SettingCheck:
    """Allow only these values; types must match, so that 1 does not pass for True."""

    def is_allowed(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in allowed)

    return is_allowed, f"one of {list(allowed)}"


def whole_number(minimum: int, maximum: int) -> SettingCheck:
    return (lambda value: is_whole(value, minimum, maximum)), f"a whole number from {minimum} to {maximum}"


SETTING_CHECKS: dict[str, SettingCheck] = {
    **dict.fromkeys(("learn_mixing", "windowed", "per_head", "output_norm", "gate"), one_of(True, False)),
    "block_size": whole_number(1, MAX_BLOCK_SIZE),
    "num_blocks": whole_number(1, MAX_BLOCKS),
    "layout": (is_layout, f"None, or 1 to 3 counts of blocks, each at least 1, with a product of at most {MAX_BLOCKS}"),
    "feature_map": one_of("relu", "plain_relu", "elu", "hedgehog", "softmax", "exp", "identity"),
    "normalize": one_of(True, False, "official"),
    "mixing_start": one_of("locality", "uniform"),
    "mixing_form": one_of("softmax", "direct", "free"),
    "window": whole_number(1, MAX_WINDOW_BLOCKS),
    "salient": whole_number(0, MAX_SALIENT),
    "salient_blocks": whole_number(0, MAX_BLOCKS),
    "sinks": (lambda value: is_whole(value, 0), "a whole number of at least 0"),
    "cpe": (lambda value: is_whole(value, 0) and (value % 2 == 1 or value == 0), "0 or an odd kernel size"),
    "rope": one_of("before", "after", "near"),
    "layers": (is_choice_of_layers, '"all", "2/3" or a list of different layer indices, each at least 0'),
    "softmax_heads": (is_choice_of_heads, "None, or a dict from layer indices to lists of KV heads, each at least 0"),
    "impl": one_of(*IMPLEMENTATIONS),
}


# Required values, in this order: of windowed encoders, of layers over a text and a grid, of windowed language models.
TWO_WAY_VALUES: dict[str, Any] = {"sinks": 0, "salient": 0, "softmax_heads": None}
JOINT_VALUES: dict[str, Any] = {"normalize": True, "output_norm": False, "sinks": 0, "salient": 0}
CAUSAL_VALUES = {"gate": False, "output_norm": False}


@dataclass
class MHLASettings:
    """Settings of the MHLA layers of a model. Saved in its configuration, and validated on creation and on loading.

    Args:
        block_size: Tokens per block of a sequence (the paper's chunk; 64 in section 5.4).
        num_blocks: Size M of the learned M x M mixing matrix, which extends to longer sequences (`Mixing`). For encoders,
            the number of blocks of the longest input.
        layout: Number of blocks along each axis of a grid of tokens: [rows, columns] for images, [frames, rows, columns] for
            video; block_size and num_blocks are then ignored. None for sequences.
        feature_map: "relu" (the paper's; max(x, 0) + 1e-6), "plain_relu" (max(x, 0), as in Sana), "elu" (elu(x) + 1),
            "identity", or a map that is learned per head: "softmax" (softmax(x W)), "hedgehog" (softmax(x W) and
            softmax(-x W), concatenated to twice the width), "exp" (e^(x W + b), with exponents of at most 6).
        normalize: True divides the output by the sum of the weights (eq. 4). False does not, and relies on `output_norm`
            (section 4.1). "official" uses the denominator of the released vision code (grids without text or class tokens).
        mixing_start: Initial mixing: "locality" (section 4.2: 1 - distance / number of blocks, rows summing to one) or
            "uniform" (plain linear attention).
        learn_mixing: Whether the mixing is trained.
        mixing_form: Parametrization of the mixing. "softmax" learns a matrix of logits (weights are positive, rows sum to
            one). "direct" learns the weights themselves, as released checkpoints do; negative weights are refused on
            loading. "free" is "direct" with weights of any sign (the released video checkpoints).
        windowed: Whether attention is exact softmax in a window of blocks. In language models, it is softmax over the last
            `window` blocks, the first `sinks` tokens, and `salient` tokens (`ops/windowed/salient.py`), and the settings of
            features and mixing have no effect. In encoders, all other tokens are read by MHLA, mixed by a learned decay per
            block of distance in place of a matrix, under one normalizer (`ops/windowed/two_way.py`). Where text and a grid
            share one attention, the window has the blocks of the grid that are fewer than `window` blocks from a token's own
            along every axis; the text has softmax in any case.
        window: Number of blocks in the softmax window, the current one included. In encoders, the window also has
            `window - 1` blocks after the current one; in grids, it has `window - 1` on either side along every axis.
        sinks: Number of tokens at the start of a sequence that stay visible; for language models with `windowed`.
        salient: Number of tokens per KV head that stay visible after they have left the window, those to which the head
            attended most; for language models with `windowed`.
        salient_blocks: Number of blocks that each head also reads by softmax (`choose_blocks`); for grids with `windowed`.
        per_head: Whether every query head has its own mixing matrix, instead of one per layer.
        output_norm: Whether RMSNorm is applied to each head's output (section 4.1 for language and video).
        gate: Whether the output is multiplied by silu(W x + b), initially 1, where x is the input of the layer.
        cpe: Kernel size of a depthwise convolution of v over the grid, initially zero, which is added to the output (the
            paper's CPE, appendix F.2); 0 for none. Grids only.
        rope: Where the rotary embedding is applied. "before": to q and k before the feature map (converted models).
            "after": to the features (the paper's order); the denominator uses the unrotated features. "near": to q and k in
            the softmax over text and window only, because features of rotated keys depend on absolute positions (layers in
            which text and a grid share one attention).
        layers: Layers that use MHLA: "all", "2/3" (all but layers 0, 3, 6, ..., which keep softmax), or a list, tuple, or
            range of layer indices.
        softmax_heads: KV heads that keep softmax, with the query heads that read them, as {layer index: [KV head, ...]}.
            Their keys and values stay in the cache in full. To keep all heads of a layer, leave it out of `layers` instead.
            For language models with `windowed`, and for grids.
        impl: Implementation of the operator: "auto", "torch", "triton", or "reference". With `windowed`, sequences
            allow only "auto" and "torch", which both run in PyTorch.

    Raises:
        ValueError: If a setting is invalid, or settings contradict each other.
    """

    block_size: int = 64
    num_blocks: int = 32
    layout: list[int] | tuple[int, ...] | None = None
    feature_map: str = "hedgehog"
    normalize: bool | str = True
    mixing_start: str = "locality"
    learn_mixing: bool = True
    mixing_form: str = "softmax"
    windowed: bool = False
    window: int = 2
    sinks: int = 4
    salient: int = 0
    salient_blocks: int = 0
    per_head: bool = False
    output_norm: bool = False
    gate: bool = False
    cpe: int = 0
    rope: str = "before"
    layers: str | list[int] | tuple[int, ...] = "all"
    softmax_heads: dict[str, list[int]] | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.layout, (list, tuple, range)):
            self.layout = list(self.layout)
        if isinstance(self.layers, (list, tuple, range)):
            self.layers = list(self.layers)
        if isinstance(self.softmax_heads, dict):
            sorted_heads = {str(layer): sorted(set(heads)) for layer, heads in self.softmax_heads.items()}
            self.softmax_heads = sorted_heads or None
        for name, (is_valid, expected) in SETTING_CHECKS.items():
            if not is_valid(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}.")
        self.layers = sorted(self.layers) if isinstance(self.layers, list) else self.layers
        self.check_combinations()

    def check_combinations(self) -> None:
        is_sequence = self.layout is None
        if self.rope == "near" and is_sequence:
            raise ValueError('rope: got "near" with layout=None, expected "before" or "after".')
        if self.softmax_heads and is_sequence and not self.windowed:
            raise ValueError(f"softmax_heads: got {self.softmax_heads} with windowed=False, expected None.")
        if self.salient_blocks and (is_sequence or not self.windowed):
            raise ValueError(f"salient_blocks: got {self.salient_blocks}, expected 0 without windows on a grid.")
        if not self.windowed:
            return
        if not self.normalize:
            raise ValueError("normalize: got False with windowed=True, expected True.")
        if is_sequence and self.rope != "before":
            raise ValueError(f'rope: got {self.rope!r} with windowed=True, expected "before".')
        if is_sequence and self.impl not in ("auto", "torch"):
            raise ValueError(f'impl: got {self.impl!r} with windowed=True, expected "auto" or "torch".')
        if is_sequence and self.feature_map == "identity":
            raise ValueError('feature_map: got "identity" with windowed=True, expected a map of nonnegative features.')
        if self.sinks > self.block_size:
            raise ValueError(f"sinks: got {self.sinks}, expected at most the block_size of {self.block_size}.")

    @property
    def core(self) -> str:
        """The kind of core that these settings select for a sequence or a grid without text: "matrix" or "windowed"."""
        return "windowed" if self.windowed else "matrix"

    def resolve_layers(self, num_layers: int) -> list[int]:
        """Return the indices of the MHLA layers; raises ValueError if there are none, or an index is too large."""
        if self.layers == "all":
            return list(range(num_layers))
        if isinstance(self.layers, str):  # "2/3"
            if not (layers := [i for i in range(num_layers) if i % 3]):
                raise ValueError(f'layers: got "2/3" for {num_layers} layer, expected a model of at least 2 layers.')
            return layers
        if self.layers[-1] >= num_layers:
            expected = f"at most {num_layers - 1} in a model of {num_layers} layers"
            raise ValueError(f"layers: got index {self.layers[-1]}, expected {expected}.")
        return list(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a dictionary for `config.json`, with the version of its format."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MHLASettings":
        """Create settings from what `to_dict` returns; missing ones have their defaults.

        Raises:
            ValueError: If `values` is no mapping, or has another format version, or an unknown or invalid setting.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"mhla: got {type(values).__name__}, expected a dictionary of settings.")
        version = (values := dict(values)).pop("format_version", FORMAT_VERSION)
        if type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"format_version: got {version!r}, expected {FORMAT_VERSION}, the version of this release."
            )
        if unknown := sorted(set(values) - set(SETTING_CHECKS)):
            raise ValueError(f"mhla: got unknown setting {unknown[0]!r}, expected a field of MHLASettings.")
        return cls(**values)


def check_settings(settings: MHLASettings, model: str, *, both_ways: bool = False) -> None:
    """Raise ValueError if settings do not suit a model of sequences; `model` is its name in the message.

    `both_ways` says whether every token sees all others.
    """
    if settings.normalize == "official":
        raise ValueError(f'normalize: got "official", expected true or false for {model}.')
    check_required(settings, model, {"layout": None, "cpe": 0})
    if settings.windowed:
        check_required(settings, model, TWO_WAY_VALUES if both_ways else CAUSAL_VALUES)


def check_required(settings: MHLASettings, model: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if getattr(settings, name) != value:
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected {value!r} for {model}.")


def check_grid_settings(
    settings: MHLASettings, model: str, axes: int, *, has_prefix: bool = False, joint: bool = False
) -> None:
    """Raise ValueError if settings do not suit a grid of tokens with this number of axes.

    `has_prefix` says whether tokens come before the grid, `joint` whether a text shares one attention with it.
    """
    if settings.normalize == "official" and has_prefix:
        raise ValueError(f'normalize: got "official", expected true or false for {model}, which has class tokens.')
    if settings.layout is None or len(settings.layout) != axes:
        raise ValueError(f"layout: got {settings.layout!r}, expected {axes} counts of blocks for {model}.")
    check_required(settings, model, JOINT_VALUES if joint else {"windowed": False})
    positions = ("before", "near") if joint else ("before", "after")
    if settings.rope not in positions:
        raise ValueError(f"rope: got {settings.rope!r}, expected one of {list(positions)} for {model}.")
    if settings.rope == "after" and settings.feature_map == "hedgehog":
        raise ValueError(
            f'feature_map: got "hedgehog" with rope="after", expected one as wide as the head for {model}.'
        )
    if joint and settings.mixing_form == "free":
        raise ValueError(f'mixing_form: got "free", expected "softmax" or "direct" for {model}.')
