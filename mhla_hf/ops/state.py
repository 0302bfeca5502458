"""The state of a decoder: `MHLAState` for dense causal mixing, and `RowState`, the base class of all decoder states.

`MHLAState` keeps the summary (the sum of k v^T) of every closed block, one whose tokens have all been seen; the prefix, the
mixture of these summaries for the current, open block, computed once per block; and a window with the keys and values of
the last two blocks. Nothing is ever subtracted from a sum, so `crop` is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class RowState:
    """Base class of decoder states: dataclasses of tensors without gradients, whose first axis is the batch.

    States change in place. Every row has its own position.
    """

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.tensors().values())

    def leave_inference_mode(self) -> None:
        """Copy tensors that were created in inference mode, which cannot be written outside of it."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, value in self.tensors().items():
            if value.is_inference():
                setattr(self, name, value.clone())

    @torch.inference_mode(False)
    def select(self, index: Tensor) -> None:
        """Keep the rows listed in `index` int64 [rows], in that order; a row may appear several times.

        If the number of rows stays the same, the tensors keep their addresses, as CUDA graphs need.
        """
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            selected = value.index_select(0, index.to(value.device))
            setattr(self, name, value.copy_(selected) if selected.shape == value.shape else selected)

    def repeat(self, times: int) -> None:
        """Repeat every row, with its copies next to each other."""
        num_rows = len(next(iter(self.tensors().values())))
        self.select(torch.arange(num_rows).repeat_interleave(times))


@dataclass
class MHLAState(RowState):
    """The decoder state of dense causal mixing, for B rows.

    C is the block size, N the capacity for closed blocks, and L the width of the denominator's keys (K unless they are
    features of their own). Sums are in fp32, or in fp64 for fp64 inputs; int64 tensors are on the CPU. In the windows, the
    token at position p is in slot p % (2 * C), masked tokens as zeros.
    """

    block_size: int  # tokens per block, C
    normalize: bool  # whether outputs are divided by the sum of the weights; `z` and `prefix_z` are None if not
    summaries: Tensor  # [B, G, N, K, V], the summaries of closed blocks; N doubles when it is exhausted
    z: Tensor | None  # [B, G, N, L], the sums of the denominator's keys in these blocks
    prefix: Tensor  # [B, H, K, V], the sum over closed blocks b of mixing[i, b] times summary b, for i = `prefix_block`
    prefix_z: Tensor | None  # [B, H, L], the same sum over `z`
    prefix_block: Tensor  # int64 [B], the query block that the prefix was mixed for; -1 if it is yet to be mixed
    window_k: Tensor  # [B, 2 * C, G, K] in the dtype of the inputs
    window_v: Tensor  # [B, 2 * C, G, V]
    window_k_den: Tensor | None  # [B, 2 * C, G, L]; None if the denominator uses the same features as the numerator
    length: Tensor  # int64 [B], number of tokens that each row has seen
    oldest: Tensor  # int64 [B], the first position that the windows still hold

    @staticmethod
    def empty(
        batch: int, num_kv_heads: int, num_heads: int, key_dim: int, value_dim: int, block_size: int, *,
        normalize: bool = True, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
        den_dim: int | None = None,
    ) -> "MHLAState":  # fmt: skip
        """Create a state that has seen no tokens.

        Args:
            batch, num_kv_heads, num_heads, key_dim, value_dim, block_size: B, G, H, K, V, and C.
            normalize: Whether outputs are divided by the sum of the weights.
            dtype, device: Those of the inputs.
            den_dim: Width of `k_den`; None if the denominator uses the same features as the numerator.

        Raises:
            ValueError: If `normalize` is "official", which has no causal form.
        """
        if normalize not in (True, False):
            raise ValueError(f"normalize: got {normalize!r}, expected True or False for decoding.")
        sum_dtype = torch.promote_types(dtype, torch.float32)
        z_dim = key_dim if den_dim is None else den_dim

        def sums(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=sum_dtype, device=device)

        def window(width: int) -> Tensor:
            return torch.zeros(batch, 2 * block_size, num_kv_heads, width, dtype=dtype, device=device)

        return MHLAState(
            block_size=block_size,
            normalize=bool(normalize),
            summaries=sums(num_kv_heads, 1, key_dim, value_dim),
            z=sums(num_kv_heads, 1, z_dim) if normalize else None,
            prefix=sums(num_heads, key_dim, value_dim),
            prefix_z=sums(num_heads, z_dim) if normalize else None,
            prefix_block=torch.full((batch,), -1),
            window_k=window(key_dim),
            window_v=window(value_dim),
            window_k_den=None if den_dim is None or not normalize else window(den_dim),
            length=torch.zeros(batch, dtype=torch.int64),
            oldest=torch.zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every row, without rounding errors.

        Raises:
            ValueError: If `count` is not an int from 0 to the block size, or exceeds the length of the shortest row or the
                number of tokens that the window still holds after an earlier crop.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.block_size:
            raise ValueError(f"count: got {count!r}, expected an int from 0 to {self.block_size}, the block size.")
        length = self.length - count
        if bool((length < 0).any()):
            shortest = int(self.length.min())
            raise ValueError(f"count: got {count}, expected at most {shortest}, the length of the shortest row.")
        if bool((length < self.oldest).any()):
            reach = int((self.length - self.oldest).min())
            raise ValueError(f"count: got {count}, expected at most {reach}, the tokens that can still be removed.")
        self.length = length
        self.prefix_block = torch.where(self.prefix_block > length // self.block_size, -1, self.prefix_block)
