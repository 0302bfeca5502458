"""The operator: `mhla` for whole sequences and grids, `mhla_step` for decoding, and the choice of the implementation.

The implementations expect inputs that were checked here.
"""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks
from .checks import check_blocks, check_features, check_mixing, check_options, check_padding, check_step
from .inputs import MHLAInputs, MHLAOptions
from .reference import mhla_reference
from .state import MHLAState
from .torch_decode import append_tokens, torch_step
from .torch_operator import torch_mhla
from .triton.check import kernel_fault
from .triton.register import triton_mhla, triton_refusal

OPERATOR_LOG = logging.getLogger("mhla_hf")
KERNEL_DEVICES = ("cuda",)
ANNOUNCED_CHOICES: set[tuple[str, str]] = set()


class OutputAndState(NamedTuple):
    """Outputs o [B, T, H, V], and the state from which `mhla_step` continues."""

    o: Tensor
    state: MHLAState


def mhla(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, *, blocks: Blocks,
    key_blocks: Blocks | None = None, causal: bool = False, normalize: bool | str = True, scale: float | None = None,
    q_den: Tensor | None = None, k_den: Tensor | None = None, key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None, starts: Tensor | None = None, unrounded: bool = False,
    return_state: bool = False, impl: str = "auto",
) -> Tensor | OutputAndState:  # fmt: skip
    """Compute multi-head linear attention (paper eq. 4 to 6; causal form: section 4.3 and appendix C).

    With b(t) the block of token t, o[t] = sum_s w[t, s] v[s] over all s (s <= t if causal), divided by sum_s w[t, s] if
    `normalize` (0/0 is 0), where w[t, s] = mixing[b(t), b(s)] * scale * <q[t], k[s]>. Sums are in fp32 or fp64,
    also under autocast. Second derivatives need `impl="reference"`.

    Shapes: B rows, T queries, S keys, H query heads, G KV heads. K, V, and L are the widths of keys, values, and the
    features of the denominator.

    Args:
        q: [B, T, H, K], feature-mapped queries, floating point.
        k: [B, S, G, K], feature-mapped keys. Query head h uses KV head h // (H // G).
        v: [B, S, G, V], values.
        mixing: [Mq, Mk] or [H, Mq, Mk], one row per query block, one column per key block. If causal, further rows
            and columns may follow; these and the upper triangle are ignored and get a gradient of zero.
        blocks: The blocks of the T queries; `Blocks.sequence` if causal.
        key_blocks: The blocks of the S keys; None if queries and keys have the same blocks.
        causal: Whether a query sees only the keys at and before its own position.
        normalize: Whether to divide by the sum of the weights. "official" divides by the denominator of the authors' vision
            code, which differs from the paper's (only if not causal, with equal blocks that queries and keys share).
        scale: Multiplier of <q[t], k[s]>; None is K**-0.5. It cancels in the normalized form.
        q_den: [B, T, H, L], features of the queries for the denominator if they differ from q.
        k_den: [B, S, G, L], likewise for the keys.
        key_mask: bool [B, S], True for real keys. Masked keys weigh nothing but still count as positions.
        cu_seqlens: int32 or int64 [N + 1], borders of packed sequences (causal, B = 1). Each has its own blocks, so `mixing`
            only needs rows for the longest one.
        starts: int64 [B], index of the first real token of each left-padded row (causal). Block 0 begins there; tokens
            before it weigh nothing, and their outputs are 0.
        unrounded: Whether to return outputs in the dtype of the sums, for a norm that follows: unnormalized outputs may
            overflow fp16.
        return_state: Whether to also return the state from which `mhla_step` continues (causal, no cu_seqlens). It has no
            gradient.
        impl: "reference" (the T x T definition), "torch", "triton", or "auto", which takes Triton on a GPU if a small test
            call agreed with fp64, else PyTorch, and logs its choice once.

    Returns:
        o [B, T, H, V] in v's dtype (with `unrounded`, that of the sums); with `return_state`, the named tuple (o, state).

    Raises:
        TypeError, ValueError: If an argument is invalid; the message names it.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(scale, normalize, impl)
    check_blocks(q, k, blocks, key_blocks, causal, normalize)
    check_padding(q, k, causal, key_mask, cu_seqlens, starts)
    check_mixing(mixing, q, blocks, key_blocks or blocks, causal, cu_seqlens)
    if return_state and (not causal or cu_seqlens is not None):
        raise ValueError("return_state: got True, expected False, or causal=True without cu_seqlens.")
    key_blocks = blocks if key_blocks is None else key_blocks
    if causal and cu_seqlens is None:
        mixing = mixing[..., : blocks.num_blocks, : blocks.num_blocks]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = MHLAOptions(blocks, key_blocks, causal, normalize, scale, unrounded)
    inputs = MHLAInputs(q, k, v, mixing, options, q_den, k_den, key_mask, cu_seqlens, starts)
    implementations = {"triton": triton_mhla, "torch": torch_mhla, "reference": mhla_reference}
    o = implementations[choose_implementation(impl, q, k, v, k_den)](inputs)
    return OutputAndState(o, state_after(inputs)) if return_state else o


@torch.no_grad()
def mhla_step(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, state: MHLAState, *, normalize: bool = True,
    scale: float | None = None, q_den: Tensor | None = None, k_den: Tensor | None = None,
    starts: Tensor | None = None, unrounded: bool = False,
) -> OutputAndState:  # fmt: skip
    """Continue causal MHLA by T >= 1 tokens, with the outputs that `mhla` gives for them in the whole sequence (appendix C).

    The step is computed in PyTorch, without gradients.

    Args:
        q: [B, T, H, K], queries of the new tokens.
        k: [B, T, G, K], keys of the new tokens.
        v: [B, T, G, V], values of the new tokens.
        mixing: As in `mhla`, with a row and a column for every block up to that of the last new token.
        state: From `mhla(..., return_state=True)`, an earlier step, or `MHLAState.empty`; changed in place.
        starts: int64 [B], index of each row's first real token in this call. Tokens before it are ignored and not counted.
        normalize, scale, q_den, k_den, unrounded: As in `mhla`.

    Returns:
        The named tuple (o, state), with o [B, T, H, V] in v's dtype (with `unrounded`, that of the sums).

    Raises:
        TypeError, ValueError: If an argument is invalid; the state is then unchanged.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(scale, normalize)
    check_step(state, q, k, v, mixing, k_den, normalize, starts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    blocks = Blocks.sequence(q.shape[1], state.block_size)
    options = MHLAOptions(blocks, blocks, True, normalize, scale, unrounded)
    inputs = MHLAInputs(q, k, v, mixing, options, q_den, k_den, starts=starts)
    with torch.autocast(q.device.type, enabled=False):
        return OutputAndState(torch_step(inputs, state), state)


@torch.no_grad()
def state_after(inputs: MHLAInputs) -> MHLAState:
    """Compute the state of a decoder that has seen all tokens of the inputs."""
    q, k, v, k_den = inputs.q, inputs.k, inputs.v, inputs.k_den
    block_size = inputs.options.blocks.block_size
    assert block_size is not None  # causal blocks are those of a sequence
    state = MHLAState.empty(
        len(k), k.shape[2], q.shape[2], k.shape[3], v.shape[3], block_size,
        normalize=bool(inputs.options.normalize), dtype=torch.promote_types(k.dtype, v.dtype), device=k.device,
        den_dim=None if k_den is None else k_den.shape[3],
    )  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        append_tokens(inputs.without_masked_keys(), state)
    return state


def choose_implementation(impl: str, q: Tensor, k: Tensor, v: Tensor, k_den: Tensor | None) -> str:
    """Resolve "auto" to "torch" or "triton" (see `kernel_fault`), and log each choice the first time it is made.

    Raises ValueError if `impl` is "triton" and the kernels cannot run.
    """
    if impl not in ("auto", "triton"):
        return impl
    device, choice, level = q.device, "torch", logging.INFO
    if impl == "auto" and device.type not in KERNEL_DEVICES:
        reason = f"the fastest implementation for {device.type} tensors"
    elif (refusal := triton_refusal(q, k, v, k_den)) is not None:
        if impl == "triton":
            raise ValueError(f"impl: got 'triton', expected 'auto' or 'torch': {refusal}.")
        reason = refusal
    elif impl == "triton":
        return impl
    elif (fault := kernel_fault(device)) is not None:
        reason, level = fault, logging.WARNING
    else:
        choice, reason = "triton", f"whose kernels agreed with fp64 on {device}"
    if not torch.compiler.is_compiling() and (choice, reason) not in ANNOUNCED_CHOICES:
        ANNOUNCED_CHOICES.add((choice, reason))
        OPERATOR_LOG.log(level, "mhla: impl='auto' took %r, %s.", choice, reason)
    return choice
