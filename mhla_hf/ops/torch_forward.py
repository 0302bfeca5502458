"""The forward pass in PyTorch, on blocks, for some heads at once: nothing but batched matrix products.

Letters: R heads, M query blocks of C tokens, N key blocks of D tokens; q [R, M, C, K], k [R, N, D, K], v [R, N, D, V],
m [R or 1, M, N]; where blocks differ in size the missing keys are zeros. Without causality o = q P_i with P_i = sum_b m_ib
S_b. Causal: earlier blocks act through P_i = sum_{b<i} m_ib S_b, the own block through m_ii tril(q k^T). Inside a block the
weight does not change, so a long block is cut into chunks (n of them, of c tokens) whose summaries run on: the cost of a
token does not grow with the block.
"""

import torch

from .reference import divide_or_zero
from .torch_layout import BlockCut, Heads

HEAD_BY_HEAD_SIZE = 32768  # numbers in one head's q; measured: below, the calls cost more than the cache gives


def blocked_forward(q, k, v, mixing, form):
    """o [B, T, H, V], and where normalized the denominator [B, T, H, 1] (else None); `form` as in `HeadWork`.

    o is num / den, num the sum of weight * v, den that of the weights.
    """
    work = HeadWork(q, k, v, form)
    o = v.new_empty(*q.shape[:3], v.shape[3], dtype=work.exact if work.unrounded else v.dtype)
    den = q.new_empty(*q.shape[:3], 1, dtype=work.exact) if work.normalize else None
    with torch.autocast(q.device.type, enabled=False):
        for heads in work.groups:
            sums = causal_sums if work.causal else full_sums
            num, own_den = sums(*work.parts(heads, q, k, v), heads.take_mixing(mixing, work.scale), work.normalize)
            if work.normalize:
                num = divide_or_zero(num, own_den)
                heads.give(work.rows.merge(own_den[..., None]), den)
            heads.give(work.rows.merge(num), o)
    return o, den


class HeadWork:
    """What forward and backward have in common: the cut into blocks, the heads, and which sums are taken.

    form: blocks, key_blocks, causal, normalize (True or False), scale and unrounded of `mhla`.
    """

    def __init__(self, q, k, v, form):
        blocks, key_blocks, self.causal, self.normalize, self.scale, self.unrounded = form
        self.exact = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        self.rows = BlockCut(blocks, q.device)
        self.columns = self.rows if key_blocks == blocks else BlockCut(key_blocks, q.device)
        one_by_one = q.device.type == "cpu" and q.shape[1] * q.shape[3] >= HEAD_BY_HEAD_SIZE
        self.groups = Heads.groups(q, self.exact, one_by_one and not torch.compiler.is_compiling())

    def parts(self, heads, q, k, v):
        """q, k, v of some heads, by block."""
        return self.rows.split(heads.take(q)), self.columns.split(heads.take(k)), self.columns.split(heads.take(v))


def full_sums(q, k, v, m, with_den):
    """Sum of weight times v, [R, M, C, V], and the sum of the weights, [R, M, C] (None unless with_den)."""
    mixed = mix_blocks(m, k.mT @ v)
    return q @ mixed, (q @ mix_blocks(m, k.sum(2)[..., None])).squeeze(3) if with_den else None


def mix_blocks(m, summary):
    """sum_b m_ib S_b (paper eq. 5): [R or 1, M, N] and [R, N, K, V] -> [R, M, K, V]."""
    return torch.matmul(m, summary.flatten(2)).unflatten(2, summary.shape[2:])


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


def mix_earlier(m, summary):
    """sum_{b<i} m_ib S_b, [R, M, X]."""
    return torch.matmul(m.tril(-1), summary)
