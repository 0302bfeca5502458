"""Every rule about the inputs of the operator, once: each function refuses what cannot be right, in one sentence.

Checks look at shapes, dtypes and devices; at values only where wrong ones would be silent (`starts`, `cu_seqlens`),
and not where there are none to look at: under `torch.compile`, and while a CUDA graph is captured. The values of
`mixing` are checked when weights are loaded.
"""

import math

import torch

from .blocks import Blocks
from .state import MHLAState

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")


def check_features(q, k, v, q_den, k_den, normalize):
    """Shapes, dtypes and devices of the five feature tensors."""
    if (q_den is None) != (k_den is None):
        given, missing = ("k_den", "q_den") if q_den is None else ("q_den", "k_den")
        raise ValueError(f"{given} came without {missing}; expected both or neither.")
    if q_den is not None and not normalize:
        raise ValueError("q_den and k_den came with normalize=False; expected them only where there is a denominator.")
    named = [("q", q), ("k", k), ("v", v)] + ([("q_den", q_den), ("k_den", k_den)] if q_den is not None else [])
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor.")
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} is {list(x.shape)}; expected [batch, tokens, heads, width], no axis empty.")
        if not x.is_floating_point():
            raise TypeError(f"{name} is {x.dtype}; expected a floating-point dtype.")
        if x.is_meta:
            raise ValueError(f"{name} is on the meta device, which holds no numbers; expected a real device.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is.")
    (batch, tokens, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"k is {list(k.shape)}; expected [{batch}, S, G, {width}] to go with q {list(q.shape)}.")
    if heads % groups != 0:
        raise ValueError(f"k has {groups} heads; expected a divisor of q's {heads}.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {list(v.shape)}; expected [{batch}, {keys}, {groups}, V] to go with k {list(k.shape)}.")
    if q_den is not None and q_den.shape[:3] != q.shape[:3]:
        raise ValueError(f"q_den is {list(q_den.shape)}; expected [{batch}, {tokens}, {heads}, L] as in q.")
    if k_den is not None and k_den.shape != (batch, keys, groups, q_den.shape[3]):
        raise ValueError(f"k_den is {list(k_den.shape)}; expected {[batch, keys, groups, q_den.shape[3]]}.")


def check_options(q, scale, normalize, impl):
    """The options that are not tensors."""
    if not isinstance(normalize, bool) and normalize != "official":
        raise ValueError(f"normalize is {normalize!r}; expected True, False or 'official'.")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale is {scale!r}; expected a number or None.")
    if scale is not None and (not math.isfinite(scale) or scale == 0):
        raise ValueError(f"scale is {scale!r}; expected a finite number other than 0.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; expected one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


def check_blocks(q, k, blocks, key_blocks, causal, normalize):
    """That the blocks cover the tokens, and fit the form asked for."""
    for name, cut, tokens, kind in (
        ("blocks", blocks, q.shape[1], "query"),
        ("key_blocks", key_blocks, k.shape[1], "key"),
    ):
        if cut is None and name == "key_blocks":
            continue
        if not isinstance(cut, Blocks):
            raise TypeError(f"{name} is {cut!r}; expected a Blocks.")
        if cut.length != tokens:
            raise ValueError(f"{name} covers {cut.length} tokens; expected the {tokens} {kind} tokens.")
    if key_blocks is None and k.shape[1] != q.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens and q {q.shape[1]}; expected key_blocks, how the keys are cut.")
    same = key_blocks is None or key_blocks == blocks
    if causal and (blocks.block_size is None or not same):
        raise ValueError("causal is True; expected blocks from Blocks.sequence, the same ones for queries and keys.")
    if normalize == "official" and (causal or not same or not blocks.equal):
        raise ValueError("normalize is 'official'; expected equal blocks, the same for queries and keys, not causal.")


def check_padding(q, k, blocks, causal, key_mask, cu_seqlens, starts):
    """The three ways to say which tokens are real."""
    if key_mask is not None:
        if not isinstance(key_mask, torch.Tensor) or key_mask.dtype != torch.bool:
            raise TypeError(f"key_mask is {describe_dtype(key_mask)}; expected a bool tensor, True for real keys.")
        if key_mask.shape != k.shape[:2]:
            raise ValueError(f"key_mask is {list(key_mask.shape)}; expected {list(k.shape[:2])}, [batch, keys].")
        if key_mask.device != q.device:
            raise ValueError(f"key_mask is on {key_mask.device}; expected {q.device}, where q is.")
    if starts is not None:
        if not causal or cu_seqlens is not None:
            raise ValueError("starts came; expected it only with causal=True and without cu_seqlens.")
        check_starts(starts, q)
    if cu_seqlens is not None:
        if not causal or q.shape[0] != 1:
            raise ValueError(f"cu_seqlens came with causal={causal} and batch {q.shape[0]}; expected True and 1.")
        check_cu_seqlens(cu_seqlens, q)


def check_starts(starts, q):
    """int64 [B], 0 to T."""
    if not isinstance(starts, torch.Tensor) or starts.dtype != torch.int64:
        raise TypeError(f"starts is {describe_dtype(starts)}; expected an int64 tensor.")
    if starts.shape != q.shape[:1]:
        raise ValueError(f"starts is {list(starts.shape)}; expected [{q.shape[0]}], one number per sequence.")
    if not values_can_be_read(q.device):
        return
    if int(starts.min()) < 0 or int(starts.max()) > q.shape[1]:
        raise ValueError(f"starts holds {int(starts.min())} to {int(starts.max())}; expected 0 to {q.shape[1]}.")


def check_cu_seqlens(cu_seqlens, q):
    """int32 or int64 [N + 1], rising from 0 to T."""
    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is {describe_dtype(cu_seqlens)}; expected an int32 or int64 tensor.")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}; expected one axis, [sequences + 1].")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}; expected {q.device}, where q is.")
    if not values_can_be_read(q.device):
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != q.shape[1] or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens is {cu_seqlens.tolist()}; expected numbers rising from 0 to {q.shape[1]}.")


def check_mixing(mixing, q, blocks, key_blocks, causal, cu_seqlens):
    """That the mixing matrix has the rows and columns the blocks need."""
    check_mixing_shape(mixing, q)
    rows, columns = mixing.shape[-2:]
    if not causal:
        if (rows, columns) != (blocks.num_blocks, key_blocks.num_blocks):
            wanted = blocks.num_blocks, key_blocks.num_blocks
            raise ValueError(f"mixing is {list(mixing.shape)}; expected {wanted[0]} rows, {wanted[1]} columns.")
        return
    needed = blocks.num_blocks
    if cu_seqlens is not None:
        if not values_can_be_read(q.device):
            return
        needed = (int(cu_seqlens.diff().max()) - 1) // blocks.block_size + 1
    if min(rows, columns) < needed:
        raise ValueError(f"mixing is {list(mixing.shape)}; expected at least {needed} rows and columns, one per block.")


def check_mixing_shape(mixing, q):
    """[Mq, Mk] or [H, Mq, Mk], floating point, where q is."""
    if not isinstance(mixing, torch.Tensor) or not mixing.is_floating_point():
        raise TypeError(f"mixing is {describe_dtype(mixing)}; expected a floating-point tensor.")
    if mixing.dim() not in (2, 3) or (mixing.dim() == 3 and mixing.shape[0] != q.shape[2]):
        raise ValueError(f"mixing is {list(mixing.shape)}; expected [Mq, Mk] or [{q.shape[2]}, Mq, Mk].")
    if mixing.device != q.device:
        raise ValueError(f"mixing is on {mixing.device}; expected {q.device}, where q is.")


def check_state(state, q, k, v, normalize, k_den):
    """That the state was made for tensors like these."""
    if not isinstance(state, MHLAState):
        raise TypeError(f"state is a {type(state).__name__}; expected an MHLAState.")
    if normalize == "official" or state.normalize != normalize:
        raise ValueError(f"normalize is {normalize!r}; expected {state.normalize}, as in the state.")
    if (state.window_k_den is not None) != (k_den is not None):
        raise ValueError(f"k_den {'is missing' if k_den is None else 'came'}; expected the same as before.")
    batch, groups, _, width, value_width = state.summaries.shape
    if (q.shape[0], q.shape[2], *k.shape[2:], v.shape[3]) != (batch, state.prefix.shape[1], groups, width, value_width):
        raise ValueError(
            f"state is for batch {batch}, {state.prefix.shape[1]} query and {groups} key heads, "
            f"widths {width} and {value_width}; "
            f"expected one for q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}."
        )
    if k_den is not None and k_den.shape[3] != state.window_k_den.shape[3]:
        raise ValueError(f"k_den is {k_den.shape[3]} wide; expected {state.window_k_den.shape[3]}, as in the state.")
    if state.summaries.device != q.device:
        raise ValueError(f"state is on {state.summaries.device}; expected {q.device}, where q is.")


def check_step(q, k, mixing, state, starts):
    """The tokens of a step, and that the mixing has a row for every block they reach."""
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens; expected q's {q.shape[1]}.")
    if starts is not None:
        check_starts(starts, q)
    longest = int((state.length if starts is None else state.length - starts.cpu()).max()) + q.shape[1]
    reached = max(1, -(-longest // state.block_size))
    check_mixing_shape(mixing, q)
    if min(mixing.shape[-2:]) < reached:
        raise ValueError(f"mixing is {list(mixing.shape)}; expected at least {reached} rows and columns.")


def values_can_be_read(device):
    """Not where torch.compile traces, nor while a CUDA graph is captured, which a copy to the host would break."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    """Whether work on the device is being recorded for a CUDA graph, when no number can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def describe_dtype(x):
    """What came, for a message: the dtype of a tensor, else the type."""
    return str(x.dtype) if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
