"""Softmax attention with its logsumexp, forward and backward, by the fused kernels of PyTorch.

The backward kernels take the output and the logsumexp of the forward pass. If these come from a softmax over more keys than
the kernel gets, its gradients are still exact: P = e^(S - lse) are the weights in that softmax, and dS = P (dP - <dO, o>).
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

SOFTMAX_LOG = logging.getLogger("mhla_hf")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
EFFICIENT = "_scaled_dot_product_efficient_attention"
# These operators are private in PyTorch, so they are called only if they have these signatures.
SIGNATURES = {
    FLASH: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp)",
    f"{FLASH}_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
    "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    EFFICIENT: "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None) -> "
    "(Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)",
    f"{EFFICIENT}_backward": "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, "
    "Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, "
    "bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
}
ALIGNMENT = 8  # of head widths and of the rows of a mask, in elements, for EFFICIENT


def is_known(operator: str) -> bool:
    """Return whether PyTorch has the operator with its signature in `SIGNATURES`."""
    packet = getattr(torch.ops.aten, operator, None)
    return packet is not None and str(packet.default._schema) == f"aten::{operator}{SIGNATURES[operator]}"


FUSED_KERNELS = {
    device: name
    for device, name in (("cpu", FLASH), ("cuda", EFFICIENT))
    if is_known(name) and is_known(f"{name}_backward")
}
WARNED_DEVICES: set[str] = set()


def fused_kernel(q: Tensor) -> str | None:
    """Return the fused operator for q's device and dtype, or None; warn once per device that has none."""
    name, device = FUSED_KERNELS.get(q.device.type), q.device.type
    if name is None and device not in WARNED_DEVICES and not torch.compiler.is_compiling():
        WARNED_DEVICES.add(device)
        SOFTMAX_LOG.warning(
            "mhla_hf: this version of PyTorch has no known fused softmax on %s, so a slower softmax runs.", device
        )
    return None if name == EFFICIENT and q.dtype == torch.float64 else name


def causal_softmax(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Compute causal softmax attention of q [B, T, H, D], k [B, T, G, D], and v [B, T, G, V]: [B, T, H, V]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def softmax_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute softmax attention: q [N, H, T, D], k [N, H, S, D], v [N, H, S, V], and a mask [N or 1, 1, T or 1, S] to add.

    Returns o [N, H, T, V] in v's dtype and the logsumexp [N, H, T] in at least fp32.
    """
    kernel, width = fused_kernel(q), v.shape[-1]
    if kernel is None:
        score = masked_scores(q, k, mask, scale)
        lse = score.logsumexp(-1)
        return (torch.exp(score - lse[..., None]) @ v.to(score.dtype)).to(v.dtype), lse
    q, k, v = same_width(q, k, v)
    if kernel == FLASH:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        bias = mask.expand(*q.shape[:3], -1)
        o, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, False, scale=scale
        )
        lse = lse[:, :, : q.shape[2]]
    return o[..., :width], lse


def softmax_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, and v; o and lse may be those of a softmax over these keys and others."""
    kernel, widths = fused_kernel(q), (q.shape[-1], v.shape[-1])
    if kernel is None:
        weight = torch.exp(masked_scores(q, k, mask, scale) - lse[..., None])
        wide_do, wide_o, wide_v = (x.to(weight.dtype) for x in (do, o, v))
        d_score = scale * weight * (wide_do @ wide_v.mT - (wide_do * wide_o).sum(-1, keepdim=True))
        dq, dk, dv = d_score @ k.to(weight.dtype), d_score.mT @ q.to(weight.dtype), weight.mT @ wide_do
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    q, k, v, o, do = same_width(q, k, v, o, do)
    if kernel == FLASH:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        bias = mask.expand(*q.shape[:3], -1)
        lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # as the forward kernel pads it
        no_seed = torch.empty(0, dtype=torch.int64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, bias, o, lse, no_seed, no_seed, 0.0, [True, True, True, False], False, scale=scale
        )[:3]
    dq, dk, dv = grads
    return dq[..., : widths[0]], dk[..., : widths[0]], dv[..., : widths[1]]


def masked_scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the scores with the mask added, in at least fp32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return (q.to(dtype) @ k.to(dtype).mT) * scale + mask


def same_width(*tensors: Tensor) -> list[Tensor]:
    """Pad heads with zeros to one width; on a GPU, to a multiple of `ALIGNMENT`, contiguous."""
    width, on_gpu = max(x.shape[-1] for x in tensors), tensors[0].is_cuda
    if on_gpu:
        width += -width % ALIGNMENT
    padded = [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
    # Kernels assume a stride of 1 in the last axis; padding may leave another.
    return [x.contiguous() if on_gpu or x.stride(-1) != 1 else x for x in padded]


def make_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to add to scores: 0 where `visible` [..., S] is True, else half the lowest number of `dtype`."""
    num_keys = visible.shape[-1]
    mask = torch.zeros(*visible.shape[:-1], num_keys + -num_keys % ALIGNMENT, dtype=dtype, device=visible.device)
    return mask[..., :num_keys].masked_fill_(~visible, torch.finfo(dtype).min / 2)


def no_key(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which queries see no key, from their logsumexp under a mask of `make_mask` in `dtype`."""
    return lse < torch.finfo(dtype).min / 4
