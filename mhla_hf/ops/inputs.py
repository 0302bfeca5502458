"""The arguments of `mhla` as one record."""

from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks


class MHLAOptions(NamedTuple):
    """The arguments of `mhla` that are not tensors; `key_blocks` and `scale` are never None here."""

    blocks: Blocks
    key_blocks: Blocks
    causal: bool
    normalize: bool | str
    scale: float
    unrounded: bool


class MHLAInputs(NamedTuple):
    """The checked arguments of `mhla`; a causal mixing matrix is cut to the number of blocks unless sequences are packed.

    In `mhla_step`, the tensors and blocks are of the new tokens only, and the mixing matrix is not cut.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    options: MHLAOptions
    q_den: Tensor | None = None
    k_den: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    starts: Tensor | None = None

    def without_masked_keys(self) -> "MHLAInputs":
        """Return the inputs without a `key_mask`, with zeros for masked keys and values instead."""
        if self.key_mask is None:
            return self
        is_key = self.key_mask[:, :, None, None]
        k, v = torch.where(is_key, self.k, 0), torch.where(is_key, self.v, 0)
        k_den = None if self.k_den is None else torch.where(is_key, self.k_den, 0)
        return self._replace(k=k, v=v, k_den=k_den, key_mask=None)
