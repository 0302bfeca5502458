"""Every choice about the attention, in one dataclass: what `config.json` holds under "mhla".

A setting that cannot be right is refused where it is made, whether by a person or by a loaded file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from math import prod

from ..ops.checks import IMPLEMENTATIONS

FORMAT_VERSION = 2
# In config.json as `transformers_weights`, the name of a file that is not there, on which softmax classes stop.
NO_SOFTMAX = "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf installed"
FEATURE_MAPS = ("relu", "plain_relu", "elu", "hedgehog", "identity")
MIXING_STARTS = ("locality", "uniform")
MIXING_FORMS = ("softmax", "direct", "free", "decay")
MOST_BLOCKS = 16_384  # their matrix takes a gigabyte


@dataclass
class MHLASettings:
    """How MHLA layers are built. Saved with the model; checked when made and when loaded.

    Args:
        block_size: tokens in a block of a sequence (the paper's chunk; 64 in section 5.4).
        num_blocks: side M of the learned mixing matrix. Longer sequences work: rows beyond M repeat the last row by
            distance and continue it with a geometric tail (`Mixing`).
        layout: blocks per axis of a grid of tokens, for images [rows, columns] and video [frames, rows, columns]; then
            block_size and num_blocks have no meaning. None: the tokens are a sequence.
        feature_map: "relu" (the paper's; max(x, 0) + 1e-6), "plain_relu" (max(x, 0), Sana's), "elu" (elu(x) + 1),
            "identity", or "hedgehog" (learned per head: softmax(x W) and softmax(-x W) side by side, twice the width).
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
        local: None, or "softmax": exact softmax over the open block, the one before it and the first `sinks` tokens, and
            MHLA by decays for all between, under one normaliser (language models only; needs "decay").
        sinks: first tokens of a sequence that stay in the softmax of `local`.
        window_dropout: how often, in training, the block before the open one is left to the far part, 0 to 1.
        per_head: one mixing matrix per query head instead of one per layer.
        output_norm: RMSNorm over each head's output (section 4.1 for language and video).
        gate: multiply the output by silu(W x + b), starting at one.
        cpe: kernel size of a depthwise convolution of v over the grid that is added to the output (the paper's CPE, appendix
            F.2), starting at zero; 0 for none. Grids only.
        rope: "before" rotates q and k before the feature map (converted models), "after" rotates the features (the
            paper's order; the denominator, if any, then uses the un-rotated ones).
        layers: "all", "2/3" (softmax stays in layers 0, 3, 6, ...), or a list (tuple, range) of layer indices.
        impl: which implementation of the operator: "auto", "reference", "torch" or "triton".
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
    local: str | None = None
    sinks: int = 4
    window_dropout: float = 0.0
    per_head: bool = False
    output_norm: bool = False
    gate: bool = False
    cpe: int = 0
    rope: str = "before"
    layers: str | list[int] | tuple[int, ...] = "all"
    impl: str = "auto"

    def __post_init__(self):
        for name, least in (("block_size", 1), ("num_blocks", 1), ("num_decays", 1), ("sinks", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}.")
        if self.local is not None and self.mixing_form != "decay":
            raise ValueError(f'mixing_form: got {self.mixing_form!r} with local="softmax", expected "decay".')
        if not 0 <= self.window_dropout <= 1:
            raise ValueError(f"window_dropout: got {self.window_dropout!r}, expected 0 to 1.")
        if self.layout is not None:
            self.layout = _checked_layout(self.layout)
        for name, count in (("num_blocks", self.num_blocks), ("layout", prod(self.layout or ()))):
            if count > MOST_BLOCKS:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected at most {MOST_BLOCKS} blocks in all.")
        if (
            not isinstance(self.cpe, int)
            or isinstance(self.cpe, bool)
            or self.cpe < 0
            or (self.cpe and self.cpe % 2 == 0)
        ):
            raise ValueError(f"cpe: got {self.cpe!r}, expected 0 or an odd kernel size.")
        choices = {
            "feature_map": FEATURE_MAPS,
            "normalize": (True, False, "official"),
            "mixing_start": MIXING_STARTS,
            "mixing_form": MIXING_FORMS,
            "local": (None, "softmax"),
            "rope": ("before", "after"),
            "impl": IMPLEMENTATIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected one of {list(allowed)}.")
        for name in ("learn_mixing", "per_head", "output_norm", "gate"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected true or false.")
        if isinstance(self.layers, str):
            if self.layers not in ("all", "2/3"):
                raise ValueError(f'layers: got {self.layers!r}, expected "all", "2/3" or a list of layer indices.')
        else:
            self.layers = _checked_layer_indices(self.layers)

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

    def to_dict(self) -> dict:
        """Plain values for `config.json`, with the version of this format."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict) -> "MHLASettings":
        """The settings that `to_dict` wrote. A newer format, or a key this version does not know, is refused."""
        if not isinstance(values, dict):
            raise ValueError(
                f"mhla: got {type(values).__name__}, expected the dictionary of settings of an MHLA model."
            )
        version = values.get("format_version", FORMAT_VERSION)
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise ValueError(
                f"format_version: got {version!r}, expected at most {FORMAT_VERSION}; "
                "update mhla_hf to load this checkpoint."
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known - {"format_version"})
        if unknown:
            raise ValueError(f"mhla: got unknown setting {unknown[0]!r}, expected some of {sorted(known)}.")
        return cls(**{name: value for name, value in values.items() if name in known})


def _checked_layout(layout) -> list[int]:
    right = isinstance(layout, (list, tuple)) and 1 <= len(layout) <= 3
    if not right or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in layout):
        raise ValueError(f"layout: got {layout!r}, expected 1 to 3 counts of blocks, each at least 1.")
    return list(layout)


def _checked_layer_indices(layers) -> list[int]:
    if not isinstance(layers, Sequence) or isinstance(layers, (str, bytes)) or not layers:
        raise ValueError(f'layers: got {layers!r}, expected "all", "2/3" or a list of layer indices.')
    for index in layers:
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise ValueError(f"layers: got index {index!r}, expected whole numbers of at least 0.")
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers: got {list(layers)}, expected each index once.")
    return sorted(layers)
