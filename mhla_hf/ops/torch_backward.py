"""The backward pass in PyTorch, by blocks and for several heads at once; letters and shapes as in `torch_forward.py`.

Summaries and scores are recomputed. Two gradients come in: num_grad [R, M, C, V] of the sum of weight * v, and
den_grad [R, M, C] of the sum of the weights, which is None if not normalized.
"""

import torch
from torch import Tensor

from .inputs import MHLAOptions
from .reference import divide_or_zero, without_row_scale
from .torch_forward import (
    HeadWork,
    chunk_prefix,
    chunk_scores,
    chunk_summaries,
    cut_chunks,
    diagonal_mixing,
    mix_blocks,
)


def blocked_backward(
    o_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, o: Tensor | None, den: Tensor | None,
    options: MHLAOptions,
) -> list[Tensor]:  # fmt: skip
    """Compute the gradients of q, k, v, and mixing from those of the output, and from o and den if normalized."""
    work, inputs = HeadWork(q, k, v, options), (q, k, v, mixing)
    compute_grads = causal_grads if options.causal else full_grads
    with torch.autocast(q.device.type, enabled=False):
        grads = [  # several heads add to some of them
            torch.zeros_like(x, dtype=work.sum_dtype) if x.dim() < 4 or x.shape[2] < q.shape[2] else torch.empty_like(x)
            for x in inputs
        ]
        q_grad, k_grad, v_grad, mixing_grad = grads
        for heads in work.groups:
            num_grad, den_grad = heads.take(o_grad), None
            if o is not None and den is not None:  # o = num / den
                num_grad = divide_or_zero(num_grad, heads.take(den).squeeze(2))
                den_grad = work.query_cut.split(-(num_grad * heads.take(o)).sum(2, keepdim=True)).squeeze(3)
            m = heads.take_mixing(mixing, options.scale)
            num_grad = work.query_cut.split(num_grad)
            dq, dk, dv, dm = compute_grads(*work.split(heads, q, k, v), m, num_grad, den_grad)
            heads.write(work.query_cut.merge(dq), q_grad)
            heads.write(work.key_cut.merge(dk), k_grad)
            heads.write(work.key_cut.merge(dv), v_grad)
            heads.add_mixing_grad(dm * options.scale, mixing_grad)
        if options.normalize:
            grads[3] = without_row_scale(mixing_grad, mixing, options.causal)
    return [grad.to(x.dtype) for x, grad in zip(inputs, grads, strict=True)]


def full_grads(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, num_grad: Tensor, den_grad: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the gradients of `full_sums` with respect to q, k, v, and m [R, M, N]."""
    summary = k.mT @ v
    mixed_grad = q.mT @ num_grad
    dq = num_grad @ mix_blocks(m, summary).mT
    summary_grad = mix_blocks(m.mT, mixed_grad)
    dk = v @ summary_grad.mT
    dm = torch.bmm(mixed_grad.flatten(2), summary.flatten(2).mT)
    if den_grad is not None:
        z = k.sum(2)
        mixed_z_grad = (q.mT @ den_grad[..., None]).squeeze(3)
        dq += den_grad[..., None] * torch.matmul(m, z)[:, :, None]
        dk += torch.matmul(m.mT, mixed_z_grad)[:, :, None]
        dm += torch.bmm(mixed_z_grad, z.mT)
    return dq, dk, k @ summary_grad, dm


def causal_grads(
    q: Tensor, k: Tensor, v: Tensor, m: Tensor, num_grad: Tensor, den_grad: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the gradients of `causal_sums` with respect to q, k, v, and m [R, M, M]."""
    rows, count, size, _ = q.shape
    q, k, v, num_grad = (cut_chunks(x) for x in (q, k, v, num_grad))
    diagonal = diagonal_mixing(m)
    summary = chunk_summaries(k, v, rows, count)
    prefix, running = chunk_prefix(summary, m)
    score = chunk_scores(q, k, rows, count)
    weight_grad = torch.bmm(num_grad, v.mT)
    if den_grad is not None:
        den_grad = den_grad.reshape(len(num_grad), -1, 1)
        weight_grad += den_grad
    weight_grad = weight_grad.tril_().view(rows, count, -1)
    diagonal_grad = torch.linalg.vecdot(score, weight_grad)
    score_grad = weight_grad.mul_(diagonal).view(len(q), q.shape[1], -1)
    weight = score.mul_(diagonal).view_as(score_grad)

    dq = torch.bmm(num_grad, prefix.view(len(q), -1, v.shape[2]).mT).baddbmm_(score_grad, k)
    prefix_grad = torch.bmm(q.mT, num_grad).view_as(summary)
    summary_grad, dm = chunk_prefix_grads(prefix_grad, summary, running, m)
    summary_grad = summary_grad.view(len(q), -1, v.shape[2])
    dk = torch.bmm(v, summary_grad.mT).baddbmm_(score_grad.mT, q)
    dv = torch.bmm(k, summary_grad).baddbmm_(weight.mT, num_grad)
    if den_grad is not None:
        z = k.sum(1).view(rows, count, -1, k.shape[2])
        prefix_z, running_z = chunk_prefix(z, m)
        dq += den_grad * prefix_z.view(len(q), 1, -1)
        z_grad, dm_from_z = chunk_prefix_grads(torch.bmm(q.mT, den_grad).view_as(z), z, running_z, m)
        dk += z_grad.view(len(q), 1, -1)
        dm = dm + dm_from_z
    dm = dm + torch.diag_embed(diagonal_grad)
    dq, dk, dv = (x.view(rows, count, size, -1) for x in (dq, dk, dv))
    return dq, dk, dv, dm


def chunk_prefix_grads(
    prefix_grad: Tensor, summary: Tensor, running: Tensor | None, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `chunk_prefix` with respect to the summaries, [R, M, n, X], and m, [R, M, M]."""
    if running is None:
        summary_grad, dm = mix_earlier_grads(prefix_grad.squeeze(2), summary.squeeze(2), m)
        return summary_grad[:, :, None], dm
    summary_grad, dm = mix_earlier_grads(prefix_grad.sum(2), summary.sum(2), m)
    later = torch.nn.functional.pad(prefix_grad.flip(2)[:, :, :-1], (0, 0, 1, 0)).cumsum(2).flip(2)
    summary_grad = torch.addcmul(summary_grad[:, :, None], later, diagonal_mixing(m)[..., None])
    return summary_grad, dm + torch.diag_embed(torch.linalg.vecdot(prefix_grad.flatten(2), running.flatten(2)))


def mix_earlier_grads(mixed_grad: Tensor, summary: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `mix_earlier` with respect to the summaries, [R, M, X], and m, [R, M, M]."""
    return torch.matmul(m.tril(-1).mT, mixed_grad), torch.bmm(mixed_grad, summary.mT).tril_(-1)
