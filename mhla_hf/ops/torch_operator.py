"""MHLA in PyTorch: one autograd function for all options, by batched matrix products over blocks and heads.

Only the inputs and, in the normalized form, the output and its denominator are saved; the backward pass recomputes the rest.
Tokens of padded or packed batches are moved so that every sequence begins at a block edge; their outputs are moved back.

Letters in shapes: R pairs of row and head, M query blocks of C tokens, N key blocks of D tokens; q [R, M, C, K],
k [R, N, D, K], v [R, N, D, V], and the mixing matrix m [R or 1, M, N]. Shorter blocks are padded with zeros.

Without a causal mask, o_i = q_i P_i with P_i = sum_b m_ib S_b, where S_b = k_b^T v_b is the summary of block b. If causal,
P_i = sum_{b<i} m_ib S_b, and a block acts on itself through m_ii tril(q_i k_i^T). Since m_ii is the same within a block, a
long block is cut into n chunks of c tokens with running sums of their summaries: the cost of a token does not grow with the
block size.

The backward pass gets num_grad [R, M, C, V], the gradient of the numerator (the sum of weight * v), and den_grad [R, M, C],
the gradient of the denominator (the sum of the weights), or None if not normalized.
"""

from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks
from .inputs import MHLAInputs, MHLAOptions
from .reference import divide_or_zero, official_denominator, without_row_scale
from .torch_layout import BlockCut, DifferentiableOnce, Heads, TokenMove, align_blocks, mixing_of_sequences

# With at least this many elements of q per head, the CPU computes head by head, to stay in its cache; measured.
HEAD_BY_HEAD_SIZE = 32768


def torch_mhla(inputs: MHLAInputs) -> Tensor:
    """Compute `mhla`: [B, T, H, V] in v's dtype or, if `unrounded`, in the dtype of the sums."""
    q, k, v, mixing, options, q_den, k_den, _, cu_seqlens, starts = inputs.without_masked_keys()
    blocks, normalize = options.blocks, options.normalize
    tokens = TokenMove()
    if blocks.block_size is not None:
        tokens, block, _, sequence_id = align_blocks(q, blocks.block_size, None, starts, cu_seqlens)
        if sequence_id is not None:
            mixing = mixing_of_sequences(mixing, block, sequence_id)
            blocks = Blocks.sequence(len(block) * blocks.block_size, blocks.block_size)
            options = options._replace(blocks=blocks, key_blocks=blocks)
    q, k, v, q_den, k_den = tokens.move(q, k, v, q_den, k_den)
    if normalize is False or (normalize is True and q_den is None):
        o = BlockedAttention.apply(q, k, v, mixing, options)
    else:  # the denominator takes a pass of its own
        sum_dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
        mixing = RowScaleFree.apply(mixing.to(sum_dtype), options.causal)
        options = options._replace(normalize=False, unrounded=True)
        num = BlockedAttention.apply(q, k, v, mixing, options)
        if q_den is not None and k_den is not None:
            q, k = q_den, k_den
        if normalize == "official":
            with torch.autocast(q.device.type, enabled=False):
                den = official_denominator(q, k, mixing, blocks, options.scale)
        else:
            den = BlockedAttention.apply(q, k, num.new_ones(*k.shape[:3], 1), mixing, options).squeeze(3)
        o = divide_or_zero(num, den)
        o = o if inputs.options.unrounded else o.to(v.dtype)
    return tokens.take_back(o)


class RowScaleFree(torch.autograd.Function):
    """Returns the mixing matrix unchanged; the backward pass applies `without_row_scale` to its gradient.

    Numerator and denominator must both read this result, so that their gradients, which may nearly cancel, are added first.
    """

    @staticmethod
    def forward(ctx: Any, mixing: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(mixing)
        ctx.causal = causal
        return mixing.view_as(mixing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mixing,) = ctx.saved_tensors
        return without_row_scale(grad, mixing, ctx.causal), None


class BlockedAttention(torch.autograd.Function):
    """Computes o [B, T, H, V] = sum weight * v, divided by the sum of the weights if `normalize`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mixing: Tensor, options: MHLAOptions) -> Tensor:
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
        ctx.options = options
        ctx.save_for_backward(q, k, v, mixing, None if den is None else o, den)
        return o

    @staticmethod
    def backward(ctx: Any, o_grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixing, o, den = ctx.saved_tensors
        options, inputs = ctx.options, (q, k, v, mixing)
        work = HeadWork(q, k, v, options)
        compute_grads = causal_grads if options.causal else full_grads
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            grads = [  # zeros where the gradients of several heads are added up
                torch.zeros_like(x, dtype=work.sum_dtype)
                if x.dim() < 4 or x.shape[2] < q.shape[2]
                else torch.empty_like(x)
                for x in inputs
            ]
            q_grad, k_grad, v_grad, mixing_grad = grads
            for heads in work.groups:
                num_grad, den_grad = heads.take(o_grad), None
                if den is not None:  # o = num / den
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
            grads = [grad.to(x.dtype) for x, grad in zip(inputs, grads, strict=True)]
        if torch.is_grad_enabled():  # create_graph=True: without this, the gradients would pass for constants
            grads = [DifferentiableOnce.apply(x, o_grad, *inputs) for x in grads]
        return *grads, None


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
        """Cut q, k, and v of some heads into blocks, [R, M, C, K], [R, N, D, K], and [R, N, D, V]."""
        return self.query_cut.split(heads.take(q)), self.key_cut.split(heads.take(k)), self.key_cut.split(heads.take(v))


def full_sums(q: Tensor, k: Tensor, v: Tensor, m: Tensor, with_den: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sum of weight * v over all keys [R, M, C, V] and, if `with_den`, of the weights [R, M, C] (else None)."""
    num = q @ mix_blocks(m, k.mT @ v)
    den = (q @ mix_blocks(m, k.sum(2)[..., None])).squeeze(3) if with_den else None
    return num, den


def mix_blocks(m: Tensor, summary: Tensor) -> Tensor:
    """Mix summaries, sum_b m_ib S_b (paper eq. 5): [R or 1, M, N] and [R, N, K, V] -> [R, M, K, V]."""
    return torch.matmul(m, summary.flatten(2)).unflatten(2, summary.shape[2:])


def causal_sums(q: Tensor, k: Tensor, v: Tensor, m: Tensor, with_den: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of `full_sums` over only the keys at and before each query."""
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
    """Cut blocks into n chunks of equal size: [R, M, C, K] -> [R * M * n, C / n, K].

    For C > 128, a chunk has 64 to 128 tokens or, if none of these sizes divides C, 32 to 63; otherwise, n is 1.
    """
    size = x.shape[2]
    divisors = [c for c in (*range(64, 129), *range(63, 31, -1)) if size % c == 0] if size > 128 else []
    return x.reshape(-1, divisors[0] if divisors else size, x.shape[3])


def chunk_scores(q: Tensor, k: Tensor, rows: int, count: int) -> Tensor:
    """Compute tril(q k^T) of every chunk, [R * M * n, c, K] -> [R, M, n * c * c], for `rows` R and `count` M."""
    return torch.bmm(q, k.mT).tril_().view(rows, count, -1)


def diagonal_mixing(m: Tensor) -> Tensor:
    """Return the weight m_ii of each block for itself, [R or 1, M, 1]."""
    return m.diagonal(dim1=-2, dim2=-1)[..., None]


def chunk_summaries(k: Tensor, v: Tensor, rows: int, count: int) -> Tensor:
    """Compute the summary S = k^T v of every chunk (paper eq. 4): [R, M, n, K * V], for `rows` R and `count` M."""
    return torch.bmm(k.mT, v).view(rows, count, -1, k.shape[2] * v.shape[2])


def chunk_prefix(summary: Tensor, m: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mix summaries [R, M, n, X] for each chunk: earlier blocks b weigh m_ib, earlier chunks of its own block i weigh m_ii.

    Also returns `running`, the sum over the earlier chunks of the same block; None if n is 1.
    """
    is_one = summary.shape[2] == 1
    earlier = torch.matmul(m.tril(-1), summary.squeeze(2) if is_one else summary.sum(2))[:, :, None]
    if is_one:
        return earlier, None
    # A sum that excludes the chunk itself; subtracting it from an inclusive sum would cancel small values.
    running = torch.nn.functional.pad(summary[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
    return torch.addcmul(earlier, running, diagonal_mixing(m)[..., None]), running


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
    earlier_grad, total = (x.squeeze(2) if running is None else x.sum(2) for x in (prefix_grad, summary))
    summary_grad = torch.matmul(m.tril(-1).mT, earlier_grad)[:, :, None]
    dm = torch.bmm(earlier_grad, total.mT).tril_(-1)
    if running is None:
        return summary_grad, dm
    later = torch.nn.functional.pad(prefix_grad.flip(2)[:, :, :-1], (0, 0, 1, 0)).cumsum(2).flip(2)
    summary_grad = torch.addcmul(summary_grad, later, diagonal_mixing(m)[..., None])
    return summary_grad, dm + torch.diag_embed(torch.linalg.vecdot(prefix_grad.flatten(2), running.flatten(2)))
