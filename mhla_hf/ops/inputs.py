"""The arguments of an operator as one record, which is passed whole. `mhla` makes and checks its own once."""

from typing import NamedTuple

import torch

from .blocks import Blocks
from .decays import Decays, LocalForm


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


class WindowedInputs(NamedTuple):
    """The arguments of near and far attention; `local.py` has the formula.

    Args:
        q: [B, T, H, D], queries of the near part, rotated; features if `balance` is None.
        k: [B, T, G, D], its keys.
        v: [B, T, G, V], values.
        q_features: [B, T, H, K], queries of the far part.
        decays: The mixing of the far part.
        balance: [H], the log of the multiplier that brings far weights to the scale of e^score; None without a softmax.
        form: The options.
        key_mask: bool [B, T], as in `mhla`.
        starts: int64 [B], as in `mhla`; not along with cu_seqlens.
        cu_seqlens: Int [N + 1], as in `mhla`; ignored by a state.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_features: torch.Tensor
    decays: Decays
    balance: torch.Tensor | None
    form: LocalForm
    key_mask: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
