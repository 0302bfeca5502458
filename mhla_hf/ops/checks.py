"""Checks the inputs of the operator; errors are TypeError or ValueError, with messages `argument: got X, expected Y.`

Of tensors, only the values of `starts` and `cu_seqlens` are checked, because wrong ones would go unnoticed, and only where
they can be read: not under `torch.compile` or during CUDA graph capture. Mixing weights are checked when they are loaded.
"""

import math

import torch
from torch import Tensor

from .blocks import Blocks
from .state import MHLAState

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")


def check_tensor(
    name: str, x: object, q: Tensor, expected: str = "a floating-point tensor", *dtypes: torch.dtype
) -> None:
    """Check that x is a tensor on q's device with one of `dtypes`; without any, it must be a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected {expected}.")
    if x.dtype not in dtypes and (dtypes or not x.is_floating_point()):
        raise TypeError(f"{name}: got {x.dtype}, expected {expected}.")
    if x.device != q.device:
        raise ValueError(f"{name}: got a tensor on {x.device}, expected {q.device}, where q is.")


def check_shape(name: str, x: Tensor, *sizes: int | str) -> None:
    """Check the shape of x; a string stands for any size, and is its name in the message."""
    shape = [expected if isinstance(expected, str) else size for expected, size in zip(sizes, x.shape, strict=False)]
    if x.dim() != len(sizes) or shape != list(sizes):
        raise ValueError(f"{name}: got shape {list(x.shape)}, expected [{', '.join(map(str, sizes))}].")


def check_features(
    q: Tensor, k: Tensor, v: Tensor, q_den: Tensor | None, k_den: Tensor | None, normalize: bool | str
) -> None:
    features = {"q": q, "k": k, "v": v}
    if q_den is not None or k_den is not None:
        if q_den is None or k_den is None:
            raise ValueError("q_den: got only one of q_den and k_den, expected both or neither.")
        if not normalize:
            raise ValueError("q_den: got features for a denominator with normalize=False, expected None.")
        features.update(q_den=q_den, k_den=k_den)
    for name, x in features.items():
        check_tensor(name, x, q)
        if x.dim() != 4 or 0 in x.shape:
            expected = "[batch, tokens, heads, width] with no empty axis"
            raise ValueError(f"{name}: got shape {list(x.shape)}, expected {expected}.")
    batch, _, num_heads, width = q.shape
    num_kv_heads = k.shape[2]
    check_shape("k", k, batch, "S", "G", width)
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"k: got {num_kv_heads} heads, expected a divisor of {num_heads}, the number of heads of q.")
    check_shape("v", v, *k.shape[:3], "V")
    if q_den is not None and k_den is not None:
        check_shape("q_den", q_den, *q.shape[:3], "L")
        check_shape("k_den", k_den, *k.shape[:3], q_den.shape[3])


def check_options(scale: float | None, normalize: bool | str, impl: str = "auto") -> None:
    if not isinstance(normalize, bool) and normalize != "official":
        raise ValueError(f"normalize: got {normalize!r}, expected True, False or 'official'.")
    if scale is not None and (not isinstance(scale, int | float) or not math.isfinite(scale) or scale == 0):
        raise ValueError(f"scale: got {scale!r}, expected None or a finite number other than 0.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: got {impl!r}, expected one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


def check_blocks(
    q: Tensor, k: Tensor, blocks: Blocks, key_blocks: Blocks | None, causal: bool, normalize: bool | str
) -> None:
    """Check that the blocks cover the tokens and are allowed with the other options."""
    if key_blocks is None and k.shape[1] != q.shape[1]:
        got = f"None with {q.shape[1]} queries and {k.shape[1]} keys"
        raise ValueError(f"key_blocks: got {got}, expected Blocks of {k.shape[1]} tokens.")
    for name, partition, x in (("blocks", blocks, q), ("key_blocks", blocks if key_blocks is None else key_blocks, k)):
        if not isinstance(partition, Blocks):
            raise TypeError(f"{name}: got {partition!r}, expected Blocks.")
        if partition.length != x.shape[1]:
            raise ValueError(f"{name}: got blocks of {partition.length} tokens, expected {x.shape[1]} tokens.")
    same = key_blocks is None or key_blocks == blocks
    if causal and (blocks.block_size is None or not same):
        expected = "blocks from Blocks.sequence, and key_blocks that are None or the same"
        raise ValueError(f"causal: got True, expected {expected}.")
    if normalize == "official" and (causal or not same or not blocks.equal):
        expected = "blocks of equal size, the same for queries and keys, and causal=False"
        raise ValueError(f"normalize: got 'official', expected {expected}.")


def check_padding(
    q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, cu_seqlens: Tensor | None, starts: Tensor | None
) -> None:
    if key_mask is not None:
        check_tensor("key_mask", key_mask, q, "a bool tensor, True for real keys", torch.bool)
        check_shape("key_mask", key_mask, *k.shape[:2])
    if starts is not None:
        if not causal:
            raise ValueError("starts: got a tensor with causal=False, expected None.")
        if cu_seqlens is not None:
            raise ValueError("starts: got a tensor along with cu_seqlens, expected None.")
        check_starts(starts, q)
    if cu_seqlens is not None:
        if not causal or q.shape[0] != 1:
            got = f"a tensor with causal={causal} and a batch of {q.shape[0]}"
            raise ValueError(f"cu_seqlens: got {got}, expected causal=True and a batch of 1.")
        check_tensor("cu_seqlens", cu_seqlens, q, "an int32 or int64 tensor", torch.int32, torch.int64)
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, expected one axis, [sequences + 1].")
        if not values_can_be_read(q.device):
            return
        if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != q.shape[1] or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens: got {cu_seqlens.tolist()}, expected sorted values from 0 to {q.shape[1]}.")


def check_starts(starts: Tensor, q: Tensor) -> None:
    """Check that `starts` is int64 [B] with values from 0 to T, on any device."""
    check_tensor("starts", starts, starts, "an int64 tensor", torch.int64)
    check_shape("starts", starts, len(q))
    if values_can_be_read(q.device) and (int(starts.min()) < 0 or int(starts.max()) > q.shape[1]):
        got = f"values from {int(starts.min())} to {int(starts.max())}"
        raise ValueError(f"starts: got {got}, expected values from 0 to {q.shape[1]}.")


def check_mixing(
    mixing: Tensor, q: Tensor, blocks: Blocks, key_blocks: Blocks, causal: bool, cu_seqlens: Tensor | None
) -> None:
    """Check that `mixing` has a row per query block and a column per key block; if causal, it may have more.

    With `cu_seqlens`, the blocks of the longest sequence count, not those of all tokens.
    """
    num_blocks = blocks.num_blocks if causal else 0
    if cu_seqlens is not None:
        assert blocks.block_size is not None  # see `check_blocks`
        longest = int(cu_seqlens.diff().max()) if values_can_be_read(q.device) else 1
        num_blocks = (longest - 1) // blocks.block_size + 1
    check_mixing_shape(mixing, q, num_blocks)
    if not causal:
        check_shape("mixing", mixing, *mixing.shape[:-2], blocks.num_blocks, key_blocks.num_blocks)


def check_mixing_shape(mixing: Tensor, q: Tensor, num_blocks: int) -> None:
    """Check that `mixing` is [Mq, Mk] or [H, Mq, Mk] with Mq and Mk at least `num_blocks`."""
    check_tensor("mixing", mixing, q)
    if mixing.dim() not in (2, 3) or (mixing.dim() == 3 and mixing.shape[0] != q.shape[2]):
        raise ValueError(f"mixing: got shape {list(mixing.shape)}, expected [Mq, Mk] or [{q.shape[2]}, Mq, Mk].")
    if min(mixing.shape[-2:]) < num_blocks:
        expected = f"at least {num_blocks} rows and columns, one per block"
        raise ValueError(f"mixing: got shape {list(mixing.shape)}, expected {expected}.")


def check_step(
    state: MHLAState, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, k_den: Tensor | None, normalize: bool | str,
    starts: Tensor | None,
) -> None:  # fmt: skip
    """Check that features and options fit the state, and that `mixing` has a row for every block, new ones included."""
    if not isinstance(state, MHLAState):
        raise TypeError(f"state: got a {type(state).__name__}, expected an MHLAState.")
    if state.normalize != normalize:
        raise ValueError(f"normalize: got {normalize!r}, expected {state.normalize}, as in the state.")
    state_den_width, den_width = (None if x is None else x.shape[3] for x in (state.window_k_den, k_den))
    for name, got, expected in (
        ("batch", len(state.prefix), len(q)),
        ("query heads", state.prefix.shape[1], q.shape[2]),
        ("key heads", state.window_k.shape[2], k.shape[2]),
        ("key width", state.window_k.shape[3], k.shape[3]),
        ("value width", state.window_v.shape[3], v.shape[3]),
        ("k_den width", state_den_width, den_width),
    ):
        if got != expected:
            raise ValueError(f"state: got {got} for its {name}, expected {expected}, as in the new tokens.")
    if state.summaries.device != q.device:
        raise ValueError(f"state: got tensors on {state.summaries.device}, expected {q.device}, where q is.")
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k: got {k.shape[1]} tokens, expected {q.shape[1]}, as in q.")
    if starts is not None:
        check_starts(starts, q)
    longest = int((state.length if starts is None else state.length - starts.cpu()).max()) + q.shape[1]
    check_mixing_shape(mixing, q, max(1, -(-longest // state.block_size)))


def values_can_be_read(device: torch.device) -> bool:
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
