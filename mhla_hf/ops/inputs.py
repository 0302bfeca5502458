"""The arguments of an operator as one record, which is passed whole. `mhla` makes and checks its own once."""

from typing import NamedTuple

import torch

from .blocks import Blocks


class MHLAOptions(NamedTuple):
    """The arguments of `mhla` that are no tensors; `key_blocks` and `scale` are never None here."""

    blocks: Blocks
    key_blocks: Blocks
    causal: bool
    normalize: bool | str
    scale: float
    unrounded: bool


class MHLAInputs(NamedTuple):
    """The arguments of `mhla`, checked. A causal mixing matrix has M rows and columns, except for packed sequences.

    In a step, the options' blocks are those of the new tokens, as if there were no others.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mixing: torch.Tensor
    options: MHLAOptions
    q_den: torch.Tensor | None = None
    k_den: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    starts: torch.Tensor | None = None
