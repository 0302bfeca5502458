"""The options of windowed attention as one record."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowedOptions:
    """Options of windowed attention that are fixed for a layer, causal (`salient.py`) or bidirectional (`two_way.py`)."""

    block_size: int  # tokens per block, C
    window: int = 2  # blocks: the query's own and `window - 1` before it; in `two_way.py`, also `window - 1` after it
    sinks: int = 4  # number of tokens at the start of a sequence that are always visible; 0 in `two_way.py`
    scale: float = 1.0  # multiplier of q k^T
    salient: int = 0  # tokens per KV head that stay visible after they have left the window; 0 in `two_way.py`

    @property
    def tokens_before_drop(self) -> int:
        """The largest T, a multiple of the block size, such that T tokens without padding all see every earlier one."""
        return (self.window + (self.salient + self.sinks) // self.block_size) * self.block_size
