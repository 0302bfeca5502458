"""Bidirectional MHLA for encoders: every token attends to all tokens of its sequence, and a learned matrix mixes blocks.

Blocks have a fixed size and are counted from the first real token of each row. Shorter rows use the top left part of the
mixing matrix, so the result for a row does not depend on the other rows of the batch.
"""

from typing import Any

import torch

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.torch_layout import MoveTokens, shift_to_start
from .core import MHLACore, mixing_options, prepare_operands
from .grid import GridMixing
from .settings import MHLASettings, check_settings


class SequenceMHLA(MHLACore):
    """Bidirectional MHLA over sequences, which mixes `settings.num_blocks` blocks along one axis (sections 4.1 and 4.2)."""

    mixing: GridMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, **widths: Any):
        check_settings(settings, "an encoder", both_ways=True)
        mixing = GridMixing((settings.num_blocks,), **mixing_options(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, **widths)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        hidden_states: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Attend to all real tokens of each row; see `TwoWayMHLA.forward` for the arguments.

        The scale is ignored: it would cancel in the normalized form, and the other form always takes K**-0.5.
        """
        settings, length = self.settings, q.shape[1]
        blocks = Blocks.sequence(length, settings.block_size)
        if blocks.num_blocks > settings.num_blocks:
            longest = settings.num_blocks * settings.block_size
            raise ValueError(f"input_ids: got {length} tokens, expected at most the {longest} of this encoder.")
        q, k, v, options = prepare_operands(self, q, k, v, key_mask, None)
        if starts is not None:
            assert key_mask is not None  # see `starts`
            source, inverse = shift_to_start(starts, length)
            q, k, v = (MoveTokens.apply(x, source, inverse) for x in (q, k, v))
            key_mask = key_mask.gather(1, source.clamp_min(0)) & (source >= 0)
        mixing = self.mixing(self.mixing.layout)[..., : blocks.num_blocks, : blocks.num_blocks]
        o = mhla(q, k, v, mixing, blocks=blocks, key_mask=key_mask, impl=settings.impl, **options)
        assert isinstance(o, torch.Tensor)  # no state was asked for
        if starts is not None:
            o = MoveTokens.apply(o, inverse, source)
        return self.finish_output(o, hidden_states, v.dtype)
