"""The forward pass in PyTorch, by blocks and for several heads at once: nothing but batched matrix products.

Letters in shapes: R heads, M query blocks of C tokens, N key blocks of D tokens; q [R, M, C, K], k [R, N, D, K],
v [R, N, D, V], and the mixing matrix m [R or 1, M, N]. Blocks with fewer keys than the largest are padded with zeros.

Without a causal mask, o_i = q_i P_i with P_i = sum_b m_ib S_b, where S_b = k_b^T v_b is the summary of block b. With one,
earlier blocks act through P_i = sum_{b<i} m_ib S_b, and a block acts on itself through m_ii tril(q_i k_i^T). The weight m_ii
is the same within a block, so a long block is cut into n chunks of c tokens with running sums of their summaries: the cost
of a token does not grow with the block size.
"""

import torch
from torch import Tensor

from .inputs import MHLAOptions
from .reference import divide_or_zero
from .torch_layout import BlockCut, Heads

# Elements of q per head above which the CPU computes head by head: below, measured, the overhead of the calls costs more
# than staying in the cache gains.
HEAD_BY_HEAD_SIZE = 32768


def blocked_forward(
    q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: MHLAOptions
) -> tuple[Tensor, Tensor | None]:
    """Compute o = num / den, where num is the sum of weight * v and den that of the weights, for a boolean `normalize`.

    Returns o [B, T, H, V] and den [B, T, H, 1], or num and None if not normalized.
    """
    work = HeadWork(q, k, v, options)
    o = v.new_empty(*q.shape[:3], v.shape[3], dtype=work.sum_dtype if options.unrounded else v.dtype)
    den = q.new_empty(*q.shape[:3], 1, dtype=work.sum_dtype) if options.normalize else None
    compute_sums = causal_sums if options.causal else full_sums
    with torch.autocast(q.device.type, enabled=False):
        for heads in work.groups:
            m = heads.take_mixing(mixing, options.scale)
            head_num, head_den = compute_sums(*work.split(heads, q, k, v), m, bool(options.normalize))
            if head_den is not None and den is not None:
                head_num = divide_or_zero(head_num, head_den)
                heads.write(work.query_cut.merge(head_den[..., None]), den)
            heads.write(work.query_cut.merge(head_num), o)
    return o, den


class HeadWork:
    """Divides the work of the forward or the backward pass: tokens into blocks, and heads into groups."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: MHLAOptions):
        self.sum_dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        self.query_cut = BlockCut(options.blocks, q.device)
        same_blocks = options.key_blocks == options.blocks
        self.key_cut = self.query_cut if same_blocks else BlockCut(options.key_blocks, q.device)
        one_by_one = q.device.type == "cpu" and q.shape[1] * q.shape[3] >= HEAD_BY_HEAD_SIZE
        self.groups = Heads.groups(q, self.sum_dtype, one_by_one and not torch.compiler.is_compiling())

    def split(self, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cut q, k, and v of some heads into blocks: [R, M, C, K], [R, N, D, K], and [R, N, D, V] (see top of file)."""
        return self.query_cut.split(heads.take(q)), self.key_cut.split(heads.take(k)), self.key_cut.split(heads.take(v))


def full_sums(q: Tensor, k: Tensor, v: Tensor, m: Tensor, with_den: bool) -> tuple[Tensor, Tensor | None]:
    """Compute two sums over all keys: of weight * v, [R, M, C, V], and of weights, [R, M, C] (None unless `with_den`)."""
    num = q @ mix_blocks(m, k.mT @ v)
    den = (q @ mix_blocks(m, k.sum(2)[..., None])).squeeze(3) if with_den else None
    return num, den


def mix_blocks(m: Tensor, summary: Tensor) -> Tensor:
    """Mix summaries, sum_b m_ib S_b (paper eq. 5): [R or 1, M, N] and [R, N, K, V] -> [R, M, K, V]."""
    return torch.matmul(m, summary.flatten(2)).unflatten(2, summary.shape[2:])


def causal_sums(q: Tensor, k: Tensor, v: Tensor, m: Tensor, with_den: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of `full_sums` over the keys at and before each query: [R, M, C, V], and [R, M, C] or None."""
    rows, count, size, _ = q.shape
    q, k, v = cut_chunks(q), cut_chunks(k), cut_chunks(v)
    weight = chunk_scores(q, k, rows, count).mul_(diagonal_mixing(m)).view(len(q), q.shape[1], -1)
    prefix, _ = chunk_prefix(chunk_summaries(k, v, rows, count), m)
    num = torch.bmm(q, prefix.view(len(q), -1, v.shape[2])).baddbmm_(weight, v).view(rows, count, size, -1)
    if not with_den:
        return num, None
    prefix_z, _ = chunk_prefix(k.sum(1).view(rows, count, -1, k.shape[2]), m)
    den = torch.bmm(q, prefix_z.view(len(q), -1, 1)).squeeze(2) + weight.sum(2)
    return num, den.view(rows, count, size)


def cut_chunks(x: Tensor) -> Tensor:
    """Cut blocks into n chunks of 64 to 128 tokens, or 32 to 63 if no such number divides C: [R * M * n, C / n, K].

    A block of up to 128 tokens, or of a size without such a divisor, is one chunk.
    """
    size = x.shape[2]
    divisors = [c for c in (*range(64, 129), *range(63, 31, -1)) if size % c == 0] if size > 128 else []
    return x.reshape(-1, divisors[0] if divisors else size, x.shape[3])


def chunk_scores(q: Tensor, k: Tensor, rows: int, count: int) -> Tensor:
    """Compute tril(q k^T) within every chunk: q, k [R * M * n, c, K] -> [R, M, n * c * c], with `rows` R and `count` M."""
    return torch.bmm(q, k.mT).tril_().view(rows, count, -1)


def diagonal_mixing(m: Tensor) -> Tensor:
    """Return the weight m_ii of each block for itself, [R or 1, M, 1]."""
    return m.diagonal(dim1=-2, dim2=-1)[..., None]


def chunk_summaries(k: Tensor, v: Tensor, rows: int, count: int) -> Tensor:
    """Compute the summary S = k^T v of every chunk (paper eq. 4): [R, M, n, K * V], with `rows` R and `count` M."""
    return torch.bmm(k.mT, v).view(rows, count, -1, k.shape[2] * v.shape[2])


def chunk_prefix(summary: Tensor, m: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute what every chunk reads of earlier summaries [R, M, n, X]: blocks mixed by m, and m_ii times earlier chunks.

    Also returns `running`, the sum over the earlier chunks of the same block; None if n is 1.
    """
    if summary.shape[2] == 1:
        return mix_earlier(m, summary.squeeze(2))[:, :, None], None
    # A sum that excludes the chunk itself; subtracting it from an inclusive sum would cancel small values.
    running = torch.nn.functional.pad(summary[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
    earlier = mix_earlier(m, summary.sum(2))
    return torch.addcmul(earlier[:, :, None], running, diagonal_mixing(m)[..., None]), running


def mix_earlier(m: Tensor, summary: Tensor) -> Tensor:
    """Mix the summaries of earlier blocks, sum_{b<i} m_ib S_b: [R or 1, M, M] and [R, M, X] -> [R, M, X]."""
    return torch.matmul(m.tril(-1), summary)
