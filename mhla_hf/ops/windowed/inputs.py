"""The arguments of windowed attention as one record."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .decays import Decays


@dataclass(frozen=True)
class WindowedOptions:
    """Options of near and far attention that are fixed for a layer; `attention.py` has the formula."""

    block_size: int  # tokens per block, C
    window: int = 2  # blocks in the window, the query's own included
    sinks: int = 4  # number of tokens at the start of a sequence that are always near; 0 without a softmax
    scale: float = 1.0  # multiplier of q k^T
    normalize: bool = True  # whether outputs are divided by the sum of the weights
    impl: str = "auto"  # as in `mhla`, for steps in the pages of a serving engine; all else is PyTorch
    unrounded: bool = True  # whether outputs stay in the dtype of the sums, at least fp32, instead of v's
    both_ways: bool = False  # whether queries see later tokens, too; those of the next `window - 1` blocks are near
    salient: int = 0  # tokens per KV head that stay visible after they have left the window (`salient.py`)


class WindowedInputs(NamedTuple):
    """The arguments of near and far attention; `attention.py` has the formula."""

    q: Tensor  # [B, T, H, D], queries of the near part, rotated; features if `balance` is None
    k: Tensor  # [B, T, G, D], its keys
    v: Tensor  # [B, T, G, V], values
    q_features: Tensor  # [B, T, H, K], queries of the far part
    decays: Decays  # the mixing of the far part
    balance: Tensor | None  # [H], the log of the multiplier of far weights beside e^score; None without a softmax
    options: WindowedOptions
    key_mask: Tensor | None = None  # bool [B, T], as in `mhla`
    starts: Tensor | None = None  # int64 [B], as in `mhla`; not along with cu_seqlens
    cu_seqlens: Tensor | None = None  # int32 or int64 [N + 1], as in `mhla`; ignored by a state
