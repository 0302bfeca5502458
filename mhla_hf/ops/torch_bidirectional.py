"""Bidirectional MHLA on blocks, and its gradients, for some heads at once.

o = q S~_i with S~_i = sum_b m_ib S_b: three matrix products. R heads, M query blocks of C tokens, N key blocks of D tokens:
q [R, M, C, K], k [R, N, D, K], v [R, N, D, V], m [R or 1, M, N]; where blocks differ in size the missing keys are zeros.
"""

import torch


def full_sums(q, k, v, m, with_den):
    """Sum of weight times v, [R, M, C, V], and the sum of the weights, [R, M, C] (None unless with_den)."""
    mixed = mix_blocks(m, k.mT @ v)
    return q @ mixed, (q @ mix_blocks(m, k.sum(2)[..., None])).squeeze(3) if with_den else None


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


def official_den(q, k, m):
    """The denominator of the authors' vision code, sum_b m_ib <q at the same slot of block b, z_b>, [R, M, C]."""
    return torch.matmul(m, (q @ k.sum(2)[..., None]).squeeze(3))


def official_den_grads(q, k, m, r):
    """Gradients of q, k and m [R, M, M] for r [R, M, C], that of `official_den`."""
    z = k.sum(2)[..., None]
    own = (q @ z).squeeze(3)
    down = torch.matmul(m.mT, r)[..., None]
    dz = (q.mT @ down).mT
    return down * z.mT, dz.expand_as(k), torch.bmm(r, own.mT)


def mix_blocks(m, summary):
    """sum_b m_ib S_b (paper eq. 5): [R or 1, M, N] and [R, N, K, V] -> [R, M, K, V]."""
    return torch.matmul(m, summary.flatten(2)).unflatten(2, summary.shape[2:])
