"""`mhla` and `mhla_step`: the two functions everything else calls, and the choice of who does the work.

Inputs are checked here, by `checks.py`; the implementations expect checked inputs.
"""

import logging

import torch

from .blocks import Blocks
from .checks import check_blocks, check_features, check_mixing, check_options, check_padding, check_state, check_step
from .reference import mhla_reference
from .state import MHLAState
from .torch_decode import append_tokens, own_tokens, torch_step
from .torch_operator import torch_mhla
from .triton.check import kernel_fault, kernel_kind
from .triton.decode import attend_one, decode_fault, decode_kind
from .triton.register import triton_mhla, triton_refusal

FORMS = {"reference": mhla_reference, "torch": torch_mhla, "triton": triton_mhla}
OPERATOR_LOG = logging.getLogger("mhla_hf")
KERNEL_DEVICES = ("cuda",)
ANNOUNCED_CHOICES = set()


def mhla(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor, *, blocks: Blocks,
    key_blocks: Blocks | None = None, causal: bool = False, normalize: bool | str = True, scale: float | None = None,
    q_den: torch.Tensor | None = None, k_den: torch.Tensor | None = None, key_mask: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, starts: torch.Tensor | None = None, unrounded: bool = False,
    return_state: bool = False, impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, MHLAState]:  # fmt: skip
    """Multi-Head Linear Attention (paper eq. 4 to 6; causal form: section 4.3 and appendix C).

    With b(t) the block of token t: o[t] = sum_s w[t, s] v[s], w[t, s] = mixing[b(t), b(s)] * scale * <q[t], k[s]>,
    divided by sum_s w[t, s] if `normalize` (0/0 is 0). q and k are feature-mapped. Returns
    o [B, T, H, V] in v's dtype, or (o, MHLAState) with `return_state`. Sums are at least fp32, also under autocast.
    Differentiable in all tensors, once.

    q: [B, T, H, K]. k: [B, S, G, K], v: [B, S, G, V]; query head h uses key/value head h // (H // G). Floating point.
    mixing: [Mq, Mk] or [H, Mq, Mk], rows for query blocks. Causal: any matrix with at least blocks.num_blocks rows and
        columns; its leading part is used, its upper triangle ignored (zero gradient).
    blocks: the blocks of the T query tokens; key_blocks: of the S keys (the same if None). Causal: `Blocks.sequence`.
    normalize: True, False, or "official", the denominator of the authors' vision code, which is not the paper's (not
        causal, equal blocks). q_den [B, T, H, L], k_den [B, S, G, L]: features for the denominator where they differ.
    scale: a number; None is K**-0.5. It cancels where normalized.
    key_mask: bool [B, S], True for real keys; the others weigh nothing but still count as positions.
    starts: int64 [B], causal only: first real token of each left-padded row; its block 0 begins there, keys before it
        weigh nothing and outputs before it are 0.
    cu_seqlens: int32 or int64 [N + 1], causal only, B = 1: sequence n is tokens cu_seqlens[n] to cu_seqlens[n + 1],
        with blocks of its own. Then mixing needs rows for the longest sequence only.
    unrounded: o in the dtype of the sums instead of v's, for what follows (fp16 overflows where nothing is normalized).
    return_state: causal only; the state continues with `mhla_step` and has no gradient.
    impl: "reference" (the T x T definition), "torch", "triton" (CPU tensors in triton's interpreter only), or "auto",
        which takes triton on a GPU where it can and where a small call of the kind, run once, agreed with fp64, else
        torch, and logs once what it took and why.

    Raises TypeError or ValueError, in one sentence, for anything else.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(scale, normalize, impl)
    check_blocks(q, k, blocks, key_blocks, causal, normalize)
    check_padding(q, k, causal, key_mask, cu_seqlens, starts)
    check_mixing(mixing, q, blocks, key_blocks or blocks, causal, cu_seqlens)
    if return_state and (not causal or cu_seqlens is not None):
        raise ValueError("return_state is True; expected so only with causal=True and without cu_seqlens.")
    form = {"blocks": blocks, "causal": causal, "normalize": normalize, "unrounded": unrounded}
    asked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mixing, q_den, k_den))
    kind = {**form, "masked": key_mask is not None, "backward": asked}
    choice = choose_implementation(
        impl,
        q.device,
        lambda: triton_refusal(q, k, v, k_den),
        lambda: kernel_fault(*kernel_kind(q, k, v, q_den, **kind)),
    )
    options = {"key_blocks": key_blocks, "scale": scale, "q_den": q_den, "k_den": k_den, "key_mask": key_mask}
    o = FORMS[choice](q, k, v, mixing, **form, **options, cu_seqlens=cu_seqlens, starts=starts)
    if not return_state:
        return o
    return o, state_after(q, k, v, blocks.block_size, normalize, k_den, key_mask, starts)


@torch.no_grad()
def mhla_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor, state: MHLAState, *, normalize: bool = True,
    scale: float | None = None, q_den: torch.Tensor | None = None, k_den: torch.Tensor | None = None,
    starts: torch.Tensor | None = None, unrounded: bool = False, impl: str = "auto",
) -> tuple[torch.Tensor, MHLAState]:  # fmt: skip
    """Continue causal MHLA by T >= 1 tokens: the outputs `mhla` gives for them in the whole sequence (appendix C).

    q [B, T, H, K], k [B, T, G, K], v [B, T, G, V] and the options as in `mhla`; state: from `mhla(...,
    return_state=True)`, an earlier step or `MHLAState.empty`, changed in place. starts: int64 [B]; tokens of this
    call before it are ignored and not counted (left padding in a first chunk). mixing must have a row for every block
    reached. Returns (o [B, T, H, V] in v's dtype, state). No gradients. There is one form of the step, in PyTorch; with
    impl="triton" a kernel does the attention of single tokens.

    Raises TypeError or ValueError, in one sentence, before the state is touched.
    """
    check_features(q, k, v, q_den, k_den, normalize)
    check_options(scale, normalize, impl)
    check_state(state, q, k, v, normalize, k_den)
    check_step(q, k, mixing, state, starts)
    impl = "torch" if impl == "auto" and q.shape[1] > 1 else impl  # there is a kernel for single tokens
    choice = choose_implementation(
        impl,
        q.device,
        lambda: triton_refusal(q, k, v, k_den),
        lambda: decode_fault(*decode_kind(q, k, v, q_den, normalize)),
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):
        attend = attend_one if choice == "triton" else None
        return torch_step(q, k, v, mixing, state, scale, q_den, k_den, starts, unrounded, attend), state


@torch.no_grad()
def state_after(q, k, v, block_size, normalize, k_den, key_mask, starts):
    """The state of a decoder that has seen all of k and v."""
    widths = q.shape[0], k.shape[2], q.shape[2], k.shape[3], v.shape[3], block_size
    options = {"dtype": torch.promote_types(k.dtype, v.dtype), "device": k.device, "normalize": normalize}
    state = MHLAState.empty(*widths, **options, den_dim=None if k_den is None else k_den.shape[3])
    if key_mask is not None:
        k, v, k_den = (None if x is None else torch.where(key_mask[:, :, None, None], x, 0) for x in (k, v, k_den))
    with torch.autocast(q.device.type, enabled=False):
        append_tokens(k, v, k_den, state, own_tokens(state, k.shape[1], starts))
    return state


def choose_implementation(impl, device, find_refusal, find_fault):
    """The implementation on a device; says once what "auto" took. ValueError where Triton is asked in vain.

    find_refusal, find_fault: say why the kernels cannot be used, and why they cannot be trusted; None if they can.
    """
    if impl not in ("auto", "triton"):
        return impl
    on_cpu = device.type not in KERNEL_DEVICES
    refusal = None if impl == "auto" and on_cpu else find_refusal()
    if impl == "triton":
        if refusal is not None:
            raise ValueError(f"impl is 'triton'; expected another one, for {refusal}.")
        return impl
    choice, why, level = "torch", refusal, logging.INFO
    if on_cpu:
        why = f"the fastest form this version has for {device.type} tensors"
    elif refusal is None:
        why = find_fault()
        level = logging.WARNING if why is not None else level
    if why is None:
        choice, why = "triton", f"whose kernels agreed with fp64 on {device}"
    if not torch.compiler.is_compiling() and (choice, why) not in ANNOUNCED_CHOICES:
        ANNOUNCED_CHOICES.add((choice, why))
        OPERATOR_LOG.log(level, "mhla: impl='auto' took %r, %s.", choice, why)
    return choice
