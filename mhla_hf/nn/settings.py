"""Every choice about the attention, in one dataclass: what `config.json` holds under "mhla".

A setting that cannot be right is refused where it is made, whether by a person or by a loaded file.
"""

import sys
from dataclasses import asdict, dataclass
from math import prod

from ..ops.checks import IMPLEMENTATIONS

FORMAT_VERSION = 3
# In config.json as `transformers_weights`, the name of a file that is not there, on which softmax classes stop.
NO_SOFTMAX = "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf installed"
MOST_BLOCKS = 16_384  # their matrix takes a gigabyte
LARGEST_BLOCK = 65_536  # tokens, whose keys and values a cache makes room for at its first step
MOST_DECAYS = 64
MOST_WINDOW = 1_024


def is_whole(value, least: int, most: int = sys.maxsize) -> bool:
    """Whether `value` is a whole number from `least` to `most`; True and False are none."""
    return type(value) is int and least <= value <= most


def is_layout(layout) -> bool:
    """Whether `layout` is None or one count of blocks per axis."""
    right = isinstance(layout, list) and 1 <= len(layout) <= 3 and all(is_whole(count, 1) for count in layout)
    return layout is None or (right and prod(layout) <= MOST_BLOCKS)


def is_choice_of_layers(layers) -> bool:
    """Whether `layers` is "all", "2/3" or a list of different indices."""
    if not isinstance(layers, list):
        return layers in ("all", "2/3")
    return len(layers) > 0 and all(is_whole(index, 0) for index in layers) and len(set(layers)) == len(layers)


def is_choice_of_heads(heads) -> bool:
    """Whether `heads` is None, or a list of different KV heads for each layer, by its index as a string."""
    if not isinstance(heads, dict):
        return heads is None
    right = [isinstance(layer, str) and layer.isdecimal() and isinstance(own, list) for layer, own in heads.items()]
    return all(right) and all(own and all(is_whole(head, 0) for head in own) for own in heads.values())


def one_of(*allowed) -> tuple:
    """The rule of a setting with few values; 1 is not True."""
    return (lambda value: (type(value), value) in [(type(one), one) for one in allowed]), f"one of {list(allowed)}"


RULES = {  # of each setting: whether a value is right, and what is
    "block_size": (lambda value: is_whole(value, 1, LARGEST_BLOCK), f"a whole number from 1 to {LARGEST_BLOCK}"),
    "num_blocks": (lambda value: is_whole(value, 1, MOST_BLOCKS), f"a whole number from 1 to {MOST_BLOCKS}"),
    "layout": (is_layout, f"1 to 3 counts of blocks, each at least 1, and at most {MOST_BLOCKS} blocks in all"),
    "feature_map": one_of("relu", "plain_relu", "elu", "hedgehog", "softmax", "exp", "identity"),
    "normalize": one_of(True, False, "official"),
    "mixing_start": one_of("locality", "uniform"),
    "learn_mixing": one_of(True, False),
    "mixing_form": one_of("softmax", "direct", "free", "decay"),
    "free_decay": one_of(True, False),
    "length_power": one_of(True, False),
    "num_decays": (lambda value: is_whole(value, 1, MOST_DECAYS), f"a whole number from 1 to {MOST_DECAYS}"),
    "local": one_of(None, "softmax"),
    "window": (lambda value: is_whole(value, 1, MOST_WINDOW), f"a whole number from 1 to {MOST_WINDOW}"),
    "sinks": (lambda value: is_whole(value, 0), "a whole number of at least 0"),
    "window_dropout": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
    "per_head": one_of(True, False),
    "output_norm": one_of(True, False),
    "gate": one_of(True, False),
    "cpe": (lambda value: is_whole(value, 0) and (value % 2 == 1 or value == 0), "0 or an odd kernel size"),
    "rope": one_of("before", "after", "near"),
    "layers": (is_choice_of_layers, '"all", "2/3" or a list of layer indices, each at least 0 and there once'),
    "softmax_heads": (is_choice_of_heads, "a dictionary of layer indices and lists of KV heads, each at least 0"),
    "impl": one_of(*IMPLEMENTATIONS),
}


@dataclass
class MHLASettings:
    """How MHLA layers are built. Saved with the model; checked when made and when loaded.

    Args:
        block_size: tokens in a block of a sequence (the paper's chunk; 64 in section 5.4).
        num_blocks: side M of the learned mixing matrix. Longer sequences work: rows beyond M repeat the last row by
            distance and continue it with a geometric tail (`Mixing`). Of an encoder: as many as its longest input has.
        layout: blocks per axis of a grid of tokens, for images [rows, columns] and video [frames, rows, columns]; then
            block_size and num_blocks have no meaning. None: the tokens are a sequence.
        feature_map: "relu" (the paper's; max(x, 0) + 1e-6), "plain_relu" (max(x, 0), Sana's), "elu" (elu(x) + 1),
            "identity", or one that is learned per head: "softmax" (of x W), "hedgehog" (softmax(x W) and softmax(-x W) side
            by side, twice the width), "exp" (e^(x W + b), at most e^6).
        normalize: True divides by the summed weights (eq. 4), False leaves that to `output_norm` (section 4.1), "official"
            is the released vision code's denominator (not for causal models).
        mixing_start: "locality" (section 4.2: 1 - distance / number of blocks, rows summing to one) or "uniform" (plain
            linear attention).
        learn_mixing: False freezes the mixing at its start.
        mixing_form: "softmax" keeps a matrix of logits (rows sum to one, weights positive); "direct" keeps the weights
            themselves, as released checkpoints do (negative ones are refused when loaded); "free" too, of any sign (the
            released video checkpoints); "decay" is a sum of `num_decays` exponentials of the distance per head, which needs
            no matrix: its cost is linear and its decoding state constant. It starts at plain linear attention.
        num_decays: R of the "decay" form, the first of them without decay.
        free_decay: the first of them decays, too, by a learned rate.
        length_power: the far weights of a block from which n blocks are far are divided by n^a, with a learned per head
            (with `local`).
        local: None, or "softmax": exact softmax over the last `window` blocks and the first `sinks` tokens, and MHLA by
            decays for all others, under one normalizer (language models and encoders; needs "decay").
        window: blocks of the softmax of `local`, the open one included; of an encoder as many on the other side, too.
        sinks: first tokens of a sequence that stay in the softmax of `local`; 0 for an encoder.
        window_dropout: how often, in training, all blocks before the open one are left to the far part, 0 to 1.
        per_head: one mixing matrix per query head instead of one per layer.
        output_norm: RMSNorm over each head's output (section 4.1 for language and video).
        gate: multiply the output by silu(W x + b), starting at one.
        cpe: kernel size of a depthwise convolution of v over the grid that is added to the output (the paper's CPE, appendix
            F.2), starting at zero; 0 for none. Grids only.
        rope: "before" rotates q and k before the feature map (converted models), "after" rotates the features (the
            paper's order; the denominator, if any, then uses the un-rotated ones), "near" rotates them for the softmax of
            `local` alone: features of rotated keys are functions of absolute positions, which do not hold beyond the lengths
            they were fitted at.
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...), or a list (tuple, range) of layer indices.
        softmax_heads: KV heads that keep softmax in these layers, with the query heads that read them, and so their whole
            past in the cache: {layer index: [KV head, ...]}. A layer that lists all of its KV heads is not in `layers`.
            Needs "decay".
        impl: which implementation of the operator: "auto", "torch" or "triton"; without decays also "reference".
    """

    block_size: int = 64
    num_blocks: int = 32
    layout: list[int] | tuple[int, ...] | None = None
    feature_map: str = "hedgehog"
    normalize: bool | str = True
    mixing_start: str = "locality"
    learn_mixing: bool = True
    mixing_form: str = "softmax"
    num_decays: int = 2
    free_decay: bool = False
    length_power: bool = False
    local: str | None = None
    window: int = 2
    sinks: int = 4
    window_dropout: float = 0.0
    per_head: bool = False
    output_norm: bool = False
    gate: bool = False
    cpe: int = 0
    rope: str = "before"
    layers: str | list[int] | tuple[int, ...] = "all"
    softmax_heads: dict[str, list[int]] | None = None
    impl: str = "auto"

    def __post_init__(self):
        for name in ("layout", "layers"):
            if isinstance(getattr(self, name), (list, tuple, range)):
                setattr(self, name, list(getattr(self, name)))
        if isinstance(self.softmax_heads, dict):
            own = {str(layer): sorted(set(heads)) for layer, heads in self.softmax_heads.items()}
            self.softmax_heads = own or None
        for name, (is_right, expected) in RULES.items():
            if not is_right(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}.")
        if isinstance(self.layers, list):
            self.layers = sorted(self.layers)
        decay, local = self.mixing_form == "decay", self.local is not None
        if decay and self.layout is not None:
            what = 'expected "softmax", "direct" or "free" for grids'
            raise ValueError(f'mixing_form: got "decay" with a layout, {what}.')
        if decay and self.rope == "after":
            raise ValueError('rope: got "after" with mixing_form="decay", expected "before".')
        if decay and self.impl == "reference":
            raise ValueError('impl: got "reference" with mixing_form="decay", expected "auto", "torch" or "triton".')
        if self.free_decay and not decay:
            raise ValueError(f'free_decay: got true with mixing_form={self.mixing_form!r}, expected "decay".')
        if self.length_power and not local:
            raise ValueError('length_power: got true without local="softmax", expected false.')
        if self.rope == "near" and not local:
            raise ValueError('rope: got "near" without local="softmax", expected "before" or "after".')
        if self.softmax_heads and (not decay or self.gate):
            got = "gate=true" if decay else f"mixing_form={self.mixing_form!r}"
            raise ValueError(f'softmax_heads: got some with {got}, expected mixing_form="decay" and no gate.')
        if local and not decay:
            raise ValueError(f'mixing_form: got {self.mixing_form!r} with local="softmax", expected "decay".')
        if local and not self.normalize:
            raise ValueError('normalize: got false with local="softmax", expected true.')
        if local and self.sinks > self.block_size:
            raise ValueError(f"sinks: got {self.sinks}, expected at most the block_size of {self.block_size}.")

    def resolve_layers(self, num_layers: int) -> list[int]:
        """The indices of the layers that are MHLA in a model of `num_layers` layers, in order."""
        if self.layers == "all":
            return list(range(num_layers))
        if self.layers == "2/3":
            chosen = [i for i in range(num_layers) if i % 3]
            if not chosen:
                raise ValueError(f'layers: got "2/3" for a model of {num_layers} layer, which would convert none.')
            return chosen
        if self.layers[-1] >= num_layers:
            raise ValueError(
                f"layers: got index {self.layers[-1]}, expected less than the model's {num_layers} layers."
            )
        return list(self.layers)

    def to_dict(self) -> dict[str, object]:
        """Plain values for `config.json`, with the version of this format."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> "MHLASettings":
        """The settings that `to_dict` wrote. A newer format, or a key this version does not know, is refused."""
        if not isinstance(values, dict):
            raise ValueError(f"mhla: got {type(values).__name__}, expected a dictionary of settings.")
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if not is_whole(version, 1, FORMAT_VERSION):
            what = f"expected 1 to {FORMAT_VERSION}; update mhla_hf to load a newer checkpoint"
            raise ValueError(f"format_version: got {version!r}, {what}.")
        if unknown := sorted(set(values) - set(RULES)):
            raise ValueError(f"mhla: got unknown setting {unknown[0]!r}, expected a field of MHLASettings.")
        return cls(**values)
