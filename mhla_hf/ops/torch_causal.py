"""Causal MHLA on blocks, and its gradients, for some heads at once: nothing but batched matrix products.

Earlier blocks act through the mixed summaries P_i = sum_{b<i} m_ib S_b, the own block through m_ii tril(q k^T). Inside a
block the weight does not change, so a long block is cut into chunks whose summaries run on: the cost of a token does not
grow with the block. R heads, M blocks of C tokens, n chunks to a block: q, k [R, M, C, K], v [R, M, C, V], m [R or 1, M, M].
"""

import torch


def causal_sums(q, k, v, m, with_den):
    """Sum of weight times v, [R, M, C, V], and the sum of the weights, [R, M, C] (None unless with_den)."""
    rows, count, size, _ = q.shape
    q, k, v = cut_chunks(q), cut_chunks(k), cut_chunks(v)
    weight = own_scores(q, k, rows, count)
    weight.mul_(own_weights(m))
    weight = weight.view(len(q), q.shape[1], -1)
    prefix, _ = chunk_prefix(summaries_of(k, v, rows, count), m)
    num = torch.bmm(q, prefix.view(len(q), -1, v.shape[2])).baddbmm_(weight, v)
    num = num.view(rows, count, size, -1)
    if not with_den:
        return num, None
    prefix_z, _ = chunk_prefix(k.sum(1).view(rows, count, -1, k.shape[2]), m)
    den = torch.bmm(q, prefix_z.view(len(q), -1, 1)).squeeze(2) + weight.sum(2)
    return num, den.view(rows, count, size)


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


def cut_chunks(x):
    """[R, M, C, K] -> [R * M * n, C / n, K]."""
    return x.reshape(-1, chunk_size(x.shape[2]), x.shape[3])


def chunk_size(size):
    """Tokens handled quadratically: a whole block of up to 128, of a longer one its divisor next above 64 (or below it)."""
    if size <= 128:
        return size
    divisors = [c for c in (*range(64, 129), *range(63, 31, -1)) if size % c == 0]
    return divisors[0] if divisors else size


def own_scores(q, k, rows, count):
    """tril(q k^T) of every chunk, [R, M, n * c * c]."""
    return torch.bmm(q, k.mT).tril_().view(rows, count, -1)


def own_weights(m):
    """m_ii, [R or 1, M, 1]."""
    return m.diagonal(dim1=-2, dim2=-1)[..., None]


def summaries_of(k, v, rows, count):
    """S = k^T v of every chunk (paper eq. 4), [R, M, n, K * V]."""
    return torch.bmm(k.mT, v).view(rows, count, -1, k.shape[2] * v.shape[2])


def chunk_prefix(summary, m):
    """What each chunk sees of earlier chunks, [R, M, n, X], and the part from its own block without m_ii (None if n = 1)."""
    if summary.shape[2] == 1:
        return mix_earlier(m, summary.squeeze(2))[:, :, None], None
    running = torch.nn.functional.pad(summary[:, :, :-1], (0, 0, 1, 0)).cumsum(2)  # a difference would lose small sums
    earlier = mix_earlier(m, summary.sum(2))
    return torch.addcmul(earlier[:, :, None], running, own_weights(m)[..., None]), running


def chunk_prefix_grads(dprefix, summary, running, m):
    """Gradients of the summaries [R, M, n, X] and of m [R, M, M], for that of the prefix."""
    if running is None:
        dsummary, dm = mix_earlier_grads(dprefix.squeeze(2), summary.squeeze(2), m)
        return dsummary[:, :, None], dm
    dsummary, dm = mix_earlier_grads(dprefix.sum(2), summary.sum(2), m)
    later = torch.nn.functional.pad(dprefix.flip(2)[:, :, :-1], (0, 0, 1, 0)).cumsum(2).flip(2)
    dsummary = torch.addcmul(dsummary[:, :, None], later, own_weights(m)[..., None])
    return dsummary, dm + torch.diag_embed(torch.linalg.vecdot(dprefix.flatten(2), running.flatten(2)))


def mix_earlier(m, summary):
    """sum_{b<i} m_ib S_b, [R, M, X]: by strips of query blocks, so that little of the empty triangle is computed."""
    m = m.tril(-1)
    if torch.compiler.is_compiling():
        return torch.matmul(m, summary)
    m, mixed = m.expand(len(summary), -1, -1), torch.empty_like(summary)
    for first, end in strips(m.shape[2]):
        torch.bmm(m[:, first:end, :end], summary[:, :end], out=mixed[:, first:end])
    return mixed


def mix_earlier_grads(dmixed, summary, m):
    """Gradients of summary [R, M, X] and m [R, M, M] for dmixed, that of `mix_earlier`."""
    m = m.tril(-1)
    if torch.compiler.is_compiling():
        return torch.matmul(m.mT, dmixed), torch.bmm(dmixed, summary.mT).tril(-1)
    m, dsummary = m.expand(len(summary), -1, -1), torch.empty_like(summary)
    dm = torch.zeros_like(m, memory_format=torch.contiguous_format)
    for first, end in strips(m.shape[2]):
        torch.bmm(m[:, first:, first:end].mT, dmixed[:, first:], out=dsummary[:, first:end])
        torch.bmm(dmixed[:, first:end], summary[:, :end].mT, out=dm[:, first:end, :end])
    return dsummary, dm.tril_(-1)


def strips(count):
    """0 to `count` in at most eight runs of at least 32 (the last may be shorter)."""
    step = max(32, -(-count // 8))
    return [(first, min(first + step, count)) for first in range(0, count, step)]
