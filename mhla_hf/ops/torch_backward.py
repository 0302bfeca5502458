"""The backward pass in PyTorch, on blocks, for some heads at once. Letters and shapes as in `torch_forward.py`.

Summaries and scores are computed again. g [R, M, C, V] is the gradient of the sum of weight times v, r [R, M, C] that of the
sum of the weights (None where nothing is normalized).
"""

import torch

from .reference import divide_or_zero, without_row_scale
from .torch_forward import HeadWork, chunk_prefix, cut_chunks, mix_blocks, own_scores, own_weights, summaries_of


def blocked_backward(grad, q, k, v, mixing, o, den, form):
    """Gradients of q, k, v and mixing for that of o."""
    work, inputs = HeadWork(q, k, v, form), (q, k, v, mixing)
    take_grads = causal_grads if work.causal else full_grads
    with torch.autocast(q.device.type, enabled=False):
        grads = [room_for(x, q.shape[2], work.exact) for x in inputs]
        for heads in work.groups:
            g, r = heads.take(grad), None
            if work.normalize:
                g = divide_or_zero(g, heads.take(den).squeeze(2))
                r = work.rows.split(-(g * heads.take(o)).sum(2, keepdim=True)).squeeze(3)
            m = heads.take_mixing(mixing, work.scale)
            dq, dk, dv, dm = take_grads(*work.parts(heads, q, k, v), m, work.rows.split(g), r)
            heads.give(work.rows.merge(dq), grads[0])
            heads.give(work.columns.merge(dk), grads[1])
            heads.give(work.columns.merge(dv), grads[2])
            heads.give_mixing(dm * work.scale, grads[3])
        if work.normalize:
            grads[3] = without_row_scale(grads[3], mixing, work.causal)
    return [dx.to(x.dtype) for x, dx in zip(inputs, grads, strict=True)]


def room_for(x, heads, exact):
    """Where the gradient of an input goes; zeros where contributions of several heads are added up."""
    added = x.dim() < 4 or x.shape[2] < heads
    return torch.zeros_like(x, dtype=exact) if added else torch.empty_like(x)


def full_grads(q, k, v, m, g, r):
    """Gradients of q, k, v and m [R, M, N], for g [R, M, C, V], that of the sum with v, r [R, M, C], without (or None)."""
    summary = k.mT @ v
    dmixed = q.mT @ g
    dq = g @ mix_blocks(m, summary).mT
    dsummary = mix_blocks(m.mT, dmixed)
    dk = v @ dsummary.mT
    dm = torch.bmm(dmixed.flatten(2), summary.flatten(2).mT)
    if r is not None:
        z = k.sum(2)
        dmixed_z = (q.mT @ r[..., None]).squeeze(3)
        dq += r[..., None] * torch.matmul(m, z)[:, :, None]
        dk += torch.matmul(m.mT, dmixed_z)[:, :, None]
        dm += torch.bmm(dmixed_z, z.mT)
    return dq, dk, k @ dsummary, dm


def causal_grads(q, k, v, m, g, r):
    """Gradients of q, k, v and m [R, M, M], for g [R, M, C, V], that of the sum with v, r [R, M, C], without (or None)."""
    rows, count, size, _ = q.shape
    q, k, v, g = cut_chunks(q), cut_chunks(k), cut_chunks(v), cut_chunks(g)
    own = own_weights(m)
    summary = summaries_of(k, v, rows, count)
    prefix, running = chunk_prefix(summary, m)
    score = own_scores(q, k, rows, count)
    dweight = torch.bmm(g, v.mT)
    if r is not None:
        r = r.reshape(len(g), -1, 1)
        dweight += r
    dweight = dweight.tril_().view(rows, count, -1)
    dm_own = torch.linalg.vecdot(score, dweight)
    dscore = dweight.mul_(own).view(len(q), q.shape[1], -1)
    weight = score.mul_(own).view_as(dscore)

    dq = torch.bmm(g, prefix.view(len(q), -1, v.shape[2]).mT).baddbmm_(dscore, k)
    dprefix = torch.bmm(q.mT, g).view_as(summary)
    dsummary, dm = chunk_prefix_grads(dprefix, summary, running, m)
    dsummary = dsummary.view(len(q), -1, v.shape[2])
    dk = torch.bmm(v, dsummary.mT).baddbmm_(dscore.mT, q)
    dv = torch.bmm(k, dsummary).baddbmm_(weight.mT, g)
    if r is not None:
        z = k.sum(1).view(rows, count, -1, k.shape[2])
        prefix_z, running_z = chunk_prefix(z, m)
        dq += r * prefix_z.view(len(q), 1, -1)
        dz, dm_z = chunk_prefix_grads(torch.bmm(q.mT, r).view_as(z), z, running_z, m)
        dk += dz.view(len(q), 1, -1)
        dm = dm + dm_z
    dm = dm + torch.diag_embed(dm_own)
    return *(x.view(rows, count, size, -1) for x in (dq, dk, dv)), dm


def chunk_prefix_grads(dprefix, summary, running, m):
    """Gradients of the summaries [R, M, n, X] and of m [R, M, M], for that of the prefix."""
    if running is None:
        dsummary, dm = mix_earlier_grads(dprefix.squeeze(2), summary.squeeze(2), m)
        return dsummary[:, :, None], dm
    dsummary, dm = mix_earlier_grads(dprefix.sum(2), summary.sum(2), m)
    later = torch.nn.functional.pad(dprefix.flip(2)[:, :, :-1], (0, 0, 1, 0)).cumsum(2).flip(2)
    dsummary = torch.addcmul(dsummary[:, :, None], later, own_weights(m)[..., None])
    return dsummary, dm + torch.diag_embed(torch.linalg.vecdot(dprefix.flatten(2), running.flatten(2)))


def mix_earlier_grads(dmixed, summary, m):
    """Gradients of summary [R, M, X] and m [R, M, M] for dmixed, that of `mix_earlier`."""
    return torch.matmul(m.tril(-1).mT, dmixed), torch.bmm(dmixed, summary.mT).tril_(-1)
