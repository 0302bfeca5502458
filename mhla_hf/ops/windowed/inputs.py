"""The arguments of windowed attention as one record."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .decays import Decays


@dataclass(frozen=True)
class WindowedOptions:
    """Options of near and far attention that are fixed for a layer; `attention.py` has the formula.

    Args:
        block_size: Tokens per block, C.
        window: Blocks in the window, the query's own included.
        sinks: Number of tokens at the start of a sequence that are always near; 0 without a softmax.
        scale: Multiplier of q k^T.
        normalize: Whether outputs are divided by the sum of the weights.
        impl: "auto", "torch" or "triton", as in `mhla`, for steps in the pages of a serving engine; all else is PyTorch.
        unrounded: Whether outputs stay in the dtype of the sums, at least fp32, instead of v's.
        both_ways: Whether queries see later tokens, too; the window then has `window - 1` blocks on either side.
        salient: Number of tokens per KV head that stay visible after they have left the window (`salient.py`).
    """

    block_size: int
    window: int = 2
    sinks: int = 4
    scale: float = 1.0
    normalize: bool = True
    impl: str = "auto"
    unrounded: bool = True
    both_ways: bool = False
    salient: int = 0


class WindowedInputs(NamedTuple):
    """The arguments of near and far attention; `attention.py` has the formula.

    Args:
        q: [B, T, H, D], queries of the near part, rotated; features if `balance` is None.
        k: [B, T, G, D], its keys.
        v: [B, T, G, V], values.
        q_features: [B, T, H, K], queries of the far part.
        decays: The mixing of the far part.
        balance: [H], the log of the multiplier of far weights beside e^score; None without a softmax.
        options: The options.
        key_mask: bool [B, T], as in `mhla`.
        starts: int64 [B], as in `mhla`; not along with cu_seqlens.
        cu_seqlens: int32 or int64 [N + 1], as in `mhla`; ignored by a state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_features: Tensor
    decays: Decays
    balance: Tensor | None
    options: WindowedOptions
    key_mask: Tensor | None = None
    starts: Tensor | None = None
    cu_seqlens: Tensor | None = None
