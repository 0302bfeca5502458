"""The state of a decoder: `MHLAState` for dense causal mixing, and `RowState`, which all decoder states share.

Every row of the batch has its own position, so left-padded rows of very different lengths share one state. `MHLAState`
keeps three things: the summaries of closed blocks; their mixture for the open block (the prefix), which is refreshed once
per block; and a window with the keys and values of the last two blocks. Attention inside the open block reads the window.
Nothing is ever subtracted from a sum, so `crop` is exact for all tokens that are still in the window. States have no
gradient.
"""

from dataclasses import dataclass

import torch


class RowState:
    """Base class of decoder states: dataclasses whose tensors all have the batch as their first axis.

    All methods that change a state work in place.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all fields that are tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def nbytes(self) -> int:
        """Return the number of bytes that the tensors take."""
        return sum(value.nbytes for value in self.tensors().values())

    def leave_inference_mode(self) -> None:
        """Replace tensors that were created in inference mode, which cannot be written outside of it, by ordinary copies.

        Does nothing in inference mode and under torch.compile.
        """
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, value in self.tensors().items():
            if value.is_inference():
                setattr(self, name, value.clone())

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Keep the rows listed in `index`, in that order.

        As long as the number of rows stays the same, the tensors keep their addresses, which CUDA graphs rely on.

        Args:
            index: int64 [B'], the rows to keep; a row may appear several times.
        """
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            selected = value.index_select(0, index.to(value.device))
            if selected.shape == value.shape:
                value.copy_(selected)
            else:
                setattr(self, name, selected)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times; the copies of a row are next to each other."""
        num_rows = len(next(iter(self.tensors().values())))
        self.select(torch.arange(num_rows).repeat_interleave(times))


@dataclass
class MHLAState(RowState):
    """The decoder state of dense causal mixing, for B rows.

    C is the block size, N the capacity for closed blocks, and L the width of the keys that the denominator reads (K unless
    it has features of its own). Sums are in fp32, or in fp64 for fp64 inputs.

    Args:
        block_size: Tokens per block, C.
        normalize: Whether outputs are divided by the sum of the weights.
        summaries: [B, G, N, K, V], the summaries of closed blocks; N doubles when it is exhausted.
        z: [B, G, N, L], the sums of the denominator's keys in these blocks; None unless `normalize`.
        prefix: [B, H, K, V], the sum over closed blocks b of mixing[i, b] times summary b, for i = `prefix_block`.
        prefix_z: [B, H, L], the same for `z`; None unless `normalize`.
        prefix_block: int64 [B] on the CPU, the query block that the prefix was mixed for; -1 if there is none yet.
        window_k: [B, 2 * C, G, K] in the dtype of the inputs. The token at position p is in slot p % (2 * C), masked
            tokens as zeros.
        window_v: [B, 2 * C, G, V], likewise.
        window_k_den: [B, 2 * C, G, L], likewise; None if the denominator uses the same features as the numerator.
        length: int64 [B] on the CPU, number of tokens that each row has seen.
        oldest: int64 [B] on the CPU, the first position that the window still holds.
    """

    block_size: int
    normalize: bool
    summaries: torch.Tensor
    z: torch.Tensor | None
    prefix: torch.Tensor
    prefix_z: torch.Tensor | None
    prefix_block: torch.Tensor
    window_k: torch.Tensor
    window_v: torch.Tensor
    window_k_den: torch.Tensor | None
    length: torch.Tensor
    oldest: torch.Tensor

    @staticmethod
    def empty(
        batch: int, num_kv_heads: int, num_heads: int, key_dim: int, value_dim: int, block_size: int, *,
        normalize: bool = True, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
        den_dim: int | None = None,
    ) -> "MHLAState":  # fmt: skip
        """Create a state that has seen no tokens.

        Args:
            batch: Number of rows, B.
            num_kv_heads: Number of key/value heads, G.
            num_heads: Number of query heads, H.
            key_dim: Width of keys, K.
            value_dim: Width of values, V.
            block_size: Tokens per block, C.
            normalize: Whether outputs are divided by the sum of the weights.
            dtype: The dtype of the inputs.
            device: The device of the inputs.
            den_dim: Width of `k_den`; None if the denominator uses the same features as the numerator.

        Raises:
            ValueError: If `normalize` is "official", which has no causal form.
        """
        if normalize not in (True, False):
            raise ValueError(f"normalize: got {normalize!r}, expected True or False for decoding.")
        sum_dtype = torch.promote_types(dtype, torch.float32)
        z_dim = key_dim if den_dim is None else den_dim
        window = (batch, 2 * block_size, num_kv_heads)
        z = prefix_z = window_k_den = None
        if normalize:
            z = torch.zeros(batch, num_kv_heads, 1, z_dim, dtype=sum_dtype, device=device)
            prefix_z = torch.zeros(batch, num_heads, z_dim, dtype=sum_dtype, device=device)
            if den_dim is not None:
                window_k_den = torch.zeros(*window, den_dim, dtype=dtype, device=device)
        return MHLAState(
            block_size=block_size,
            normalize=bool(normalize),
            summaries=torch.zeros(batch, num_kv_heads, 1, key_dim, value_dim, dtype=sum_dtype, device=device),
            z=z,
            prefix=torch.zeros(batch, num_heads, key_dim, value_dim, dtype=sum_dtype, device=device),
            prefix_z=prefix_z,
            prefix_block=torch.full((batch,), -1),
            window_k=torch.zeros(*window, key_dim, dtype=dtype, device=device),
            window_v=torch.zeros(*window, value_dim, dtype=dtype, device=device),
            window_k_den=window_k_den,
            length=torch.zeros(batch, dtype=torch.int64),
            oldest=torch.zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every row, in place and without rounding errors.

        Raises:
            ValueError: If `count` is not an int from 0 to the block size, is more than the shortest row has, or reaches
                further back than the window does after an earlier crop.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.block_size:
            raise ValueError(f"count: got {count!r}, expected 0 to {self.block_size}, the tokens of one block.")
        length = self.length - count
        if bool((length < 0).any()):
            shortest = int(self.length.min())
            raise ValueError(f"count: got {count}, expected at most {shortest}, the length of the shortest row.")
        if bool((length < self.oldest).any()):
            reach = int((self.length - self.oldest).min())
            raise ValueError(f"count: got {count}, expected at most {reach}, the tokens that the window still holds.")
        self.length = length
        self.prefix_block = torch.where(self.prefix_block > length // self.block_size, -1, self.prefix_block)

    def reserve(self, num_closed: int) -> None:
        """Make room for `num_closed` summaries, in place; a capacity that is too small is at least doubled."""
        capacity = self.summaries.shape[2]
        if num_closed <= capacity:
            return
        extra = max(num_closed, 2 * capacity) - capacity
        self.summaries = torch.nn.functional.pad(self.summaries, (0, 0, 0, 0, 0, extra))
        if self.z is not None:
            self.z = torch.nn.functional.pad(self.z, (0, 0, 0, extra))
