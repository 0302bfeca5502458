"""What a decoder has to remember: `MHLAState`.

Every row of the batch has its own position, so left-padded rows of very different lengths share one state. Three things are
kept: the summaries of the closed blocks; their mixture for the open block (the prefix), refreshed once per block; and a
window of the last two blocks' keys and values. Attention inside the open block reads the window, so nothing is ever
subtracted from a sum, and taking tokens back (`crop`) is exact as long as they are in the window. Nothing has a gradient.
"""

from dataclasses import dataclass

import torch


class RowState:
    """A dataclass of tensors, [B, ..] each: what a decoder remembers of B rows. Methods that change it work in place."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in self.tensors().values())

    def leave_inference_mode(self) -> None:
        """Tensors of inference mode cannot be written outside of it: copies can."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, value in self.tensors().items():
            if value.is_inference():
                setattr(self, name, value.clone())

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index` (int64 [B'], repeats allowed), in that order; addresses stay where their number does."""
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            chosen = value.index_select(0, index.to(value.device))
            if chosen.shape == value.shape:
                value.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times, the copies side by side."""
        rows = len(next(iter(self.tensors().values())))
        self.select(torch.arange(rows).repeat_interleave(times))


@dataclass
class MHLAState(RowState):
    """State of B rows of dense causal mixing.

    block_size C; normalize: the kind of denominator (True or False); summaries [B, G, N, K, V] of closed blocks and z
    [B, G, N, K] of their keys (None unless normalized), fp32 (fp64 for fp64 inputs), capacity N growing by doubling;
    prefix [B, H, K, V] and prefix_z [B, H, K]: sum over closed blocks b of mixing[i, b] times summary b, for the
    block i in prefix_block (-1: none yet); window_k, window_v, window_k_den: [B, 2C, G, K or V] in the inputs' dtype, the
    token at position p in slot p % 2C, masked tokens as zeros; length: tokens seen per row; oldest: first position the
    window still holds (prefix_block, length and oldest int64 [B], on the CPU).
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
        """A state that has seen nothing. dtype: the inputs'. den_dim: width of the k_den that will come, if one will.

        ValueError for "official", which has no causal form.
        """
        if normalize not in (True, False):
            raise ValueError(f"normalize is {normalize!r}; expected True or False, which can be decoded.")
        exact = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
        z_dim, separate = key_dim if den_dim is None else den_dim, normalize and den_dim is not None
        window, own = (batch, 2 * block_size, num_kv_heads), {"dtype": dtype, "device": device}
        return MHLAState(
            block_size=block_size,
            normalize=bool(normalize),
            summaries=torch.zeros(batch, num_kv_heads, 1, key_dim, value_dim, **exact),
            z=torch.zeros(batch, num_kv_heads, 1, z_dim, **exact) if normalize else None,
            prefix=torch.zeros(batch, num_heads, key_dim, value_dim, **exact),
            prefix_z=torch.zeros(batch, num_heads, z_dim, **exact) if normalize else None,
            prefix_block=torch.full((batch,), -1),
            window_k=torch.zeros(*window, key_dim, **own),
            window_v=torch.zeros(*window, value_dim, **own),
            window_k_den=torch.zeros(*window, z_dim, **own) if separate else None,
            length=torch.zeros(batch, dtype=torch.int64),
            oldest=torch.zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row, exactly.

        ValueError if that is more than a block, more than a row has, or further back than the window reaches after an
        earlier crop.
        """
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.block_size:
            raise ValueError(f"crop got {count!r} tokens; expected 0 to {self.block_size}, the tokens of one block.")
        length = self.length - count
        if bool((length < 0).any()):
            shortest = int(self.length.min())
            raise ValueError(f"crop got {count} tokens; expected at most {shortest}, the shortest row's length.")
        if bool((length < self.oldest).any()):
            reach = int((self.length - self.oldest).min())
            raise ValueError(f"crop got {count} tokens; expected at most {reach}, what the window still holds.")
        self.length = length
        self.prefix_block = torch.where(self.prefix_block > length // self.block_size, -1, self.prefix_block)

    def reserve(self, closed: int) -> None:
        """Make room for `closed` summaries, at least doubling when there is too little."""
        room = self.summaries.shape[2]
        if closed <= room:
            return
        extra = max(closed, 2 * room) - room
        self.summaries = torch.nn.functional.pad(self.summaries, (0, 0, 0, 0, 0, extra))
        if self.z is not None:
            self.z = torch.nn.functional.pad(self.z, (0, 0, 0, extra))
