"""Bidirectional MHLA for encoders: every token attends to all tokens of its sequence, and a learned matrix mixes blocks."""

from typing import Any

from torch import Tensor

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.torch_layout import align_blocks
from .core import MHLACore, mixing_options, prepare_operands
from .grid import GridMixing
from .settings import MHLASettings, check_settings


class SequenceMHLA(MHLACore):
    """Bidirectional MHLA over sequences of at most `settings.num_blocks` blocks (paper sections 4.1 and 4.2).

    Blocks are counted from the first real token of each row. Shorter rows use the top left part of the mixing matrix, so the
    result for a row does not depend on the other rows of the batch.
    """

    mixing: GridMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, **widths: Any):
        check_settings(settings, "an encoder", both_ways=True)
        mixing = GridMixing((settings.num_blocks,), **mixing_options(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, **widths)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, hidden_states: Tensor | None = None, starts: Tensor | None = None,
        key_mask: Tensor | None = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend to all real tokens of each row. Arguments and result are those of `TwoWayMHLA.forward`.

        The scale is ignored: it cancels in the normalized form; without `normalize`, it is always K**-0.5.

        Raises:
            ValueError: If there are more than `settings.num_blocks` blocks, or an argument is invalid (see `mhla`).
        """
        settings, length = self.settings, q.shape[1]
        blocks = Blocks.sequence(length, settings.block_size)
        if blocks.num_blocks > settings.num_blocks:
            longest = settings.num_blocks * settings.block_size
            raise ValueError(f"input_ids: got {length} tokens, expected at most {longest}, num_blocks * block_size.")
        q, k, v, options = prepare_operands(self, q, k, v, key_mask, None)
        aligned = align_blocks(q, settings.block_size, key_mask, starts, None)
        q, k, v = aligned.tokens.move(q, k, v)
        mixing = self.mixing(self.mixing.layout)[..., : blocks.num_blocks, : blocks.num_blocks]
        o: Any = mhla(q, k, v, mixing, blocks=blocks, key_mask=aligned.valid, impl=settings.impl, **options)
        return self.finish_output(aligned.tokens.take_back(o), hidden_states, v.dtype)
