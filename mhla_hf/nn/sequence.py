"""MHLA by a mixing matrix over whole sequences, where every token sees every other of its own row: a core of encoders.

Blocks have a fixed size and are counted from the first real token of each row, and a shorter row uses the leading part of
the mixing matrix: what a row gets depends on nothing that it is batched with.
"""

import torch

from ..ops.api import mhla
from ..ops.blocks import Blocks
from ..ops.torch_layout import MoveTokens, shift_to_start
from .core import MHLACore, check_encoder, mixing_choices
from .grid import GridMixing
from .settings import MHLASettings


class SequenceMHLA(MHLACore):
    """Bidirectional multi-head linear attention over `[B, T, H, K]` queries (sections 4.1 and 4.2).

    Args: as `MHLACore`, which makes its own `GridMixing` of `settings.num_blocks` blocks in a row.
    """

    def __init__(self, settings: MHLASettings, *, num_heads: int, **widths):
        check_encoder(settings)
        mixing = GridMixing((settings.num_blocks,), **mixing_choices(settings, num_heads))
        super().__init__(settings, mixing, num_heads=num_heads, **widths)

    def forward(self, q, k, v, *, hidden_states=None, starts=None, key_mask=None, scale=None) -> torch.Tensor:
        """Attend.

        Args:
            q: `[B, T, H, K]`. k: `[B, T, G, K]`. v: `[B, T, G, V]`; T is at most `num_blocks` blocks.
            hidden_states: `[B, T, hidden_size]`, the layer's input; read by the gate.
            starts: int64 `[B]`, first real token of each row, with key_mask; None: rows begin with one.
            key_mask: bool `[B, T]`, False where a token is padding.
            scale: of the base's softmax; not used, a constant cancels in the normalized form and is fixed in the other.

        Returns:
            `[B, T, H, V]` in v's dtype.
        """
        settings, length = self.settings, q.shape[1]
        blocks = Blocks.sequence(length, settings.block_size)
        if blocks.num_blocks > settings.num_blocks:
            longest = settings.num_blocks * settings.block_size
            raise ValueError(f"input_ids: got {length} tokens, expected at most the {longest} of this encoder.")
        q, k, v, options = self.operands(q, k, v, key_mask, None)
        if starts is not None:
            there, back = shift_to_start(starts, length)
            q, k, v = (MoveTokens.apply(x, there, back) for x in (q, k, v))
            key_mask = key_mask.gather(1, there.clamp_min(0)) & (there >= 0)
        mixing = self.mixing(self.mixing.layout)[..., : blocks.num_blocks, : blocks.num_blocks]
        o = mhla(q, k, v, mixing, blocks=blocks, key_mask=key_mask, impl=settings.impl, **options)
        if starts is not None:
            o = MoveTokens.apply(o, back, there)
        return self.finish_output(o, hidden_states, v.dtype)
