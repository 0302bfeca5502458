"""The block of DiG (arXiv 2405.18428) for the DiT family: narrow q and k, gate, norm per head, SwiGLU, a local convolution.

In table 3 of the paper its gated linear attention is replaced and the rest is kept. Unusual: DiG turns the order of the
tokens from block to block, because gated linear attention looks back only; MHLA sees the whole grid, so that falls away.
"""

import torch
from diffusers.models.attention import BasicTransformerBlock, FeedForward
from torch import nn

DIG_SETTINGS = {"gate": True, "output_norm": True, "normalize": False}


class LocalConv(nn.Module):
    """A depthwise 3x3 convolution of the tokens of a grid, the identity at the start; it takes the place of what it gets."""

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The identity."""
        nn.init.dirac_(self.conv.weight, groups=self.conv.groups)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: torch.Tensor, grid) -> torch.Tensor:
        """`[B, T, C]` with T the row-major tokens of `grid` -> the same shape."""
        return self.conv(x.mT.unflatten(2, tuple(grid))).flatten(2).mT


class DiGBlock(BasicTransformerBlock):
    """A block of DiT that `become_dig_block` has turned into one of DiG."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        """As the base, and then the local convolution."""
        return self.local(super().forward(*args, **kwargs), self.grid_state.grid)


def become_dig_block(block: BasicTransformerBlock, grid_state) -> None:
    """Turn a DiT block with new weights into DiG's, in place: its attention is still to become MHLA.

    grid_state: of the model, whose `grid` is that of the running call.
    """
    attn = block.attn1
    width = attn.to_q.in_features
    narrow = width // 2
    attn.to_q, attn.to_k = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
    attn.to_v = nn.Linear(width, width, bias=False)
    attn.to_out[0] = nn.Linear(width, width, bias=False)
    attn.use_bias = False  # read by diffusers when it fuses the projections
    hidden = 256 * -(-int(width * 8 / 3) // 256)  # two thirds of four times the width, in full 256s
    block.ff = FeedForward(width, inner_dim=hidden, activation_fn="swiglu", bias=False)
    block.local = LocalConv(width)
    block.grid_state = grid_state
    block.__class__ = DiGBlock
