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


def check_tensor(name, x, q, expected="a floating-point tensor", dtypes=None):
    """That x is a tensor of one of the dtypes (None: floating point), where q is."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() if dtypes is None else x.dtype in dtypes):
        came = x.dtype if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"{name} is {came}; expected {expected}.")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device}; expected {q.device}, where q is.")


def check_features(q, k, v, q_den, k_den, normalize):
    """Shapes, dtypes and devices of the five feature tensors."""
    named = {"q": q, "k": k, "v": v}
    if q_den is not None or k_den is not None:
        if q_den is None or k_den is None or not normalize:
            raise ValueError("q_den or k_den came; expected both or neither, and only where there is a denominator.")
        named |= {"q_den": q_den, "k_den": k_den}
    for name, x in named.items():
        check_tensor(name, x, q)
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} is {list(x.shape)}; expected [batch, tokens, heads, width], no axis empty.")
    (batch, _, heads, width), (_, keys, groups, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != width:
        raise ValueError(f"k is {list(k.shape)}; expected [{batch}, S, G, {width}] to go with q {list(q.shape)}.")
    if heads % groups != 0:
        raise ValueError(f"k has {groups} heads; expected a divisor of q's {heads}.")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v is {list(v.shape)}; expected [{batch}, {keys}, {groups}, V] to go with k {list(k.shape)}.")
    if q_den is not None and q_den.shape[:3] != q.shape[:3]:
        raise ValueError(f"q_den is {list(q_den.shape)}; expected {[*q.shape[:3]]} and a width, as in q.")
    if k_den is not None and k_den.shape != (*k.shape[:3], q_den.shape[3]):
        raise ValueError(f"k_den is {list(k_den.shape)}; expected {[*k.shape[:3], q_den.shape[3]]}.")


def check_options(scale, normalize, impl):
    """The options that are not tensors."""
    if not isinstance(normalize, bool) and normalize != "official":
        raise ValueError(f"normalize is {normalize!r}; expected True, False or 'official'.")
    if scale is not None and (not isinstance(scale, int | float) or not math.isfinite(scale) or scale == 0):
        raise ValueError(f"scale is {scale!r}; expected None or a finite number other than 0.")
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; expected one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


def check_blocks(q, k, blocks, key_blocks, causal, normalize):
    """That the blocks cover the tokens, and fit the form asked for."""
    if key_blocks is None and k.shape[1] != q.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens and q {q.shape[1]}; expected key_blocks, how the keys are cut.")
    for name, cut, x in (("blocks", blocks, q), ("key_blocks", blocks if key_blocks is None else key_blocks, k)):
        if not isinstance(cut, Blocks):
            raise TypeError(f"{name} is {cut!r}; expected a Blocks.")
        if cut.length != x.shape[1]:
            raise ValueError(f"{name} covers {cut.length} tokens; expected {x.shape[1]}, as there are.")
    same = key_blocks is None or key_blocks == blocks
    if causal and (blocks.block_size is None or not same):
        raise ValueError("causal is True; expected blocks from Blocks.sequence, the same ones for queries and keys.")
    if normalize == "official" and (causal or not same or not blocks.equal):
        raise ValueError("normalize is 'official'; expected equal blocks, the same for queries and keys, not causal.")


def check_padding(q, k, causal, key_mask, cu_seqlens, starts):
    """The three ways to say which tokens are real."""
    if key_mask is not None:
        check_tensor("key_mask", key_mask, q, "a bool tensor, True for real keys", (torch.bool,))
        if key_mask.shape != k.shape[:2]:
            raise ValueError(f"key_mask is {list(key_mask.shape)}; expected {list(k.shape[:2])}, [batch, keys].")
    if starts is not None:
        if not causal or cu_seqlens is not None:
            raise ValueError("starts came; expected it only with causal=True and without cu_seqlens.")
        check_starts(starts, q)
    if cu_seqlens is not None:
        if not causal or q.shape[0] != 1:
            raise ValueError(f"cu_seqlens came with causal={causal} and batch {q.shape[0]}; expected True and 1.")
        check_cu_seqlens(cu_seqlens, q)


def check_starts(starts, q):
    """int64 [B], 0 to T; on any device."""
    check_tensor("starts", starts, starts, "an int64 tensor", (torch.int64,))
    if starts.shape != q.shape[:1]:
        raise ValueError(f"starts is {list(starts.shape)}; expected [{q.shape[0]}], one number per sequence.")
    if values_can_be_read(q.device) and (int(starts.min()) < 0 or int(starts.max()) > q.shape[1]):
        raise ValueError(f"starts holds {int(starts.min())} to {int(starts.max())}; expected 0 to {q.shape[1]}.")


def check_cu_seqlens(cu_seqlens, q):
    """int32 or int64 [N + 1], rising from 0 to T."""
    check_tensor("cu_seqlens", cu_seqlens, q, "an int32 or int64 tensor", (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens is {list(cu_seqlens.shape)}; expected one axis, [sequences + 1].")
    if not values_can_be_read(q.device):
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != q.shape[1] or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens is {cu_seqlens.tolist()}; expected numbers rising from 0 to {q.shape[1]}.")


def check_mixing(mixing, q, blocks, key_blocks, causal, cu_seqlens):
    """That the mixing matrix has the rows and columns the blocks need."""
    if causal:
        needed = blocks.num_blocks
        if cu_seqlens is not None:
            longest = int(cu_seqlens.diff().max()) if values_can_be_read(q.device) else 1
            needed = (longest - 1) // blocks.block_size + 1
        check_mixing_shape(mixing, q, needed)
        return
    check_mixing_shape(mixing, q)
    wanted = blocks.num_blocks, key_blocks.num_blocks
    if mixing.shape[-2:] != wanted:
        raise ValueError(f"mixing is {list(mixing.shape)}; expected {wanted[0]} rows, {wanted[1]} columns.")


def check_mixing_shape(mixing, q, needed=0):
    """[Mq, Mk] or [H, Mq, Mk], floating point, where q is; Mq and Mk at least `needed`."""
    check_tensor("mixing", mixing, q)
    if mixing.dim() not in (2, 3) or (mixing.dim() == 3 and mixing.shape[0] != q.shape[2]):
        raise ValueError(f"mixing is {list(mixing.shape)}; expected [Mq, Mk] or [{q.shape[2]}, Mq, Mk].")
    if min(mixing.shape[-2:]) < needed:
        raise ValueError(f"mixing is {list(mixing.shape)}; expected at least {needed} rows and columns, one per block.")


def check_state(state, q, k, v, normalize, k_den):
    """That the state was made for tensors like these."""
    if not isinstance(state, MHLAState):
        raise TypeError(f"state is a {type(state).__name__}; expected an MHLAState.")
    if state.normalize != normalize:
        raise ValueError(f"normalize is {normalize!r}; expected {state.normalize}, as in the state.")
    batch, groups, _, width, value_width = state.summaries.shape
    made = batch, state.prefix.shape[1], groups, width, value_width
    den = None if state.window_k_den is None else state.window_k_den.shape[3]
    came = q.shape[0], q.shape[2], *k.shape[2:], v.shape[3]
    if (made, den) != (came, None if k_den is None else k_den.shape[3]):
        raise ValueError(
            f"state is for batch {batch}, {made[1]} query and {groups} key heads, widths {width} and {value_width}, "
            f"k_den {den} wide; expected one for q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and k_den "
            f"{None if k_den is None else list(k_den.shape)}."
        )
    if state.summaries.device != q.device:
        raise ValueError(f"state is on {state.summaries.device}; expected {q.device}, where q is.")


def check_step(q, k, mixing, state, starts):
    """The tokens of a step, and that the mixing has a row for every block they reach."""
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k has {k.shape[1]} tokens; expected q's {q.shape[1]}.")
    if starts is not None:
        check_starts(starts, q)
    longest = int((state.length if starts is None else state.length - starts.cpu()).max()) + q.shape[1]
    check_mixing_shape(mixing, q, max(1, -(-longest // state.block_size)))


def values_can_be_read(device):
    """Not where torch.compile traces, nor while a CUDA graph is captured, which a copy to the host would break."""
    return not (torch.compiler.is_compiling() or is_capturing(device))


def is_capturing(device: torch.device) -> bool:
    """Whether work on the device is being recorded for a CUDA graph, when no number can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
