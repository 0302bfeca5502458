"""The Triton form as `torch.library` operators, forward, backward and forward with a norm, and `triton_mhla` in front.

As custom operators they are opaque to torch.compile, which then needs one graph for all lengths. Their namespace carries
NAMESPACE, so that bundles of different versions never meet; a second copy of the same version uses the first one's.
"""

import torch

from .namespace import NAMESPACE
from .reference import without_row_scale
from .torch_layout import align_sequences
from .triton_common import INTERPRETED, WIDEST, in_rows, spell, triton
from .triton_impl import Call

TRITON_SPACE = f"mhla_{NAMESPACE}"
TRITON_OPTIONS = (
    "Tensor? key_mask, Tensor? starts, Tensor? edges, SymInt[] cut, SymInt[] key_cut, bool causal, str normalize, "
    "float scale, float? eps, bool unrounded=False"
)
TRITON_SCHEMA = f"(Tensor q, Tensor k, Tensor v, Tensor mixing, Tensor? q_den, Tensor? k_den, {TRITON_OPTIONS})"
TRITON_NORMED_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor mixing, Tensor weight, Tensor? key_mask, SymInt[] cut, SymInt[] key_cut, "
    "float scale, float? eps, float norm_eps)"
)
TRITON_BACK_SCHEMA = f"(Tensor grad, Tensor o, Tensor inv, {TRITON_SCHEMA[1:]}"


def triton_mhla(
    q,
    k,
    v,
    mixing,
    *,
    blocks,
    key_blocks=None,
    causal=False,
    normalize=True,
    scale=None,
    q_den=None,
    k_den=None,
    key_mask=None,
    cu_seqlens=None,
    starts=None,
    unrounded=False,
    eps=None,
    norm=None,
):
    """o [B, T, H, V] in v's dtype (fp32 if unrounded); arguments as in `mhla`, already checked, and `triton_refusal`
    had nothing to say.

    eps: a number if the kernels are to take relu(q) + eps and relu(k) + eps; not causal, and no q_den. norm: the weight and
    eps of an RMSNorm that the kernels are to take along; not causal, not normalised, and without gradients.
    """
    kind = (
        "official" if normalize == "official" else "no" if not normalize else "shared" if q_den is None else "separate"
    )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    edges = None
    if cu_seqlens is not None:
        source, _, mixing = align_sequences(cu_seqlens, q.shape[1], blocks.block_size, mixing)
        source = source.view(-1, blocks.block_size)
        first = source[:, 0].clamp(min=0)
        edges = torch.stack((first, first + (source >= 0).sum(1)), 1).to(torch.int32)
    elif causal:
        mixing = mixing[..., : blocks.num_blocks, : blocks.num_blocks]
    starts = None if starts is None else starts.to(q.device)
    cut = spell(blocks)
    key_cut = cut if key_blocks is None else spell(key_blocks)
    if norm is not None:
        return TRITON_NORMED(q, k, v, mixing, norm[0], key_mask, cut, key_cut, scale, eps, norm[1])
    return TRITON_FORWARD(
        q, k, v, mixing, q_den, k_den, key_mask, starts, edges, cut, key_cut, causal, kind, scale, eps, unrounded
    )[0]  # fmt: skip


def triton_refusal(q, k, v, k_den=None):
    """Why these tensors cannot go through the kernels, as the end of a sentence; None if they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"q is on {q.device.type}, where triton runs only with TRITON_INTERPRET=1 set before the import"
    if q.device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_properties(q.device).major < 8:
        return "the GPU is older than sm_80"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "the kernels compute in fp32, not in fp64"
    widest = max(x.shape[3] for x in (k, v, k_den) if x is not None)
    if widest > WIDEST:
        return f"heads are {widest} wide, more than {WIDEST}"
    return None


def triton_forward(
    q, k, v, mixing, q_den, k_den, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps, unrounded=False
):
    """o [B, T, H, V] and 1 / denominator [B, T, H]."""
    call = Call(q, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps)
    with torch.autocast(q.device.type, enabled=False):
        return call.run(*(in_rows(x) for x in (q, k, v, q_den, k_den)), unrounded)


def triton_forward_fake(
    q, k, v, mixing, q_den, k_den, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps, unrounded=False
):
    """The shapes of `triton_forward`."""
    inv = q.new_empty(q.shape[:3] if normalize != "no" else (0,), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32 if unrounded else v.dtype), inv


def triton_normed(q, k, v, mixing, weight, key_mask, cut, key_cut, scale, eps, norm_eps):
    """o [B, T, H, V] of the un-normalised form without causality, after an RMSNorm over V. No gradients."""
    call = Call(q, mixing, key_mask, None, None, cut, key_cut, False, "no", scale, eps)
    with torch.autocast(q.device.type, enabled=False):
        return call.run_normed(*(in_rows(x) for x in (q, k, v)), weight.contiguous(), norm_eps)


def triton_normed_fake(q, k, v, mixing, weight, key_mask, cut, key_cut, scale, eps, norm_eps):
    """The shape of `triton_normed`."""
    return v.new_empty(*q.shape[:3], v.shape[3])


def triton_backward(
    grad, o, inv, q, k, v, mixing, q_den, k_den, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps,
    unrounded=False,
):  # fmt: skip
    """Gradients of q, k, v, mixing, q_den and k_den, the last two empty where there are none."""
    call = Call(q, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps)
    tensors = [in_rows(x) for x in (grad, q, k, v, q_den, k_den)]
    with torch.autocast(q.device.type, enabled=False):
        *grads, dm, dq_den, dk_den = call.run_back(*tensors, o.contiguous(), inv)
        if normalize != "no":
            dm = without_row_scale(dm, call.mixing, causal)
    extra = (q.new_empty(0) if x is None else x for x in (dq_den, dk_den))
    return *grads, dm.to(mixing.dtype), *extra


def triton_backward_fake(
    grad, o, inv, q, k, v, mixing, q_den, k_den, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, eps,
    unrounded=False,
):  # fmt: skip
    """The shapes of `triton_backward`."""
    extra = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q_den, k_den))
    return *(x.new_empty(x.shape) for x in (q, k, v, mixing)), *extra


def keep_for_backward(ctx, inputs, output):
    """What the backward pass reads: the inputs, the output and 1 / denominator."""
    ctx.save_for_backward(*output, *inputs[:9])
    ctx.options = inputs[9:]


def triton_gradients(ctx, grad, _):
    """The autograd formula of `triton_forward`."""
    o, inv, *inputs = ctx.saved_tensors
    *grads, dq_den, dk_den = TRITON_BACKWARD(grad, o, inv, *inputs, *ctx.options)
    pair = (None, None) if inputs[4] is None else (dq_den, dk_den)
    return *grads, *pair, *(None,) * 10


def registered_operator(name, schema, function, fake):
    """The operator of that name in this version's namespace, registered unless an equal copy of this file has done so."""
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, name):
        torch.library.custom_op(f"{TRITON_SPACE}::{name}", function, mutates_args=(), schema=schema)
        torch.library.register_fake(f"{TRITON_SPACE}::{name}", fake)
        if name == "forward":
            torch.library.register_autograd(
                f"{TRITON_SPACE}::forward", triton_gradients, setup_context=keep_for_backward
            )
    return getattr(space, name)


TRITON_BACKWARD = registered_operator(
    "backward",
    f"{TRITON_BACK_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    triton_backward,
    triton_backward_fake,
)
TRITON_FORWARD = registered_operator(
    "forward", f"{TRITON_SCHEMA} -> (Tensor, Tensor)", triton_forward, triton_forward_fake
)
TRITON_NORMED = registered_operator("normed", f"{TRITON_NORMED_SCHEMA} -> Tensor", triton_normed, triton_normed_fake)
