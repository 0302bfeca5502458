"""Causal attention of a near and a far part under one normalizer: softmax over a window, MHLA by decays before it.

With block i = t // block_size, the near keys of token t are those of its own block and of the `lag - 1` blocks before, and
the first `sinks` tokens of the sequence; every other token is far. The two parts speak the unit of the softmax:

    o_t = (sum_near e^(z_ts - c) v_s + e^(balance - c) sum_far m[i, j] <fq_t, fk_s> v_s) / (the same with 1 for v_s)

with z_ts = scale * <q_t, k_s>. Without a balance the near part is linear too, m[i, i] <q_t, k_s> with features for q and k:
MHLA by decays and nothing else. All is differentiable PyTorch of static control flow, except for the kernel that may read
what a block sees (`form.impl`): one graph for all lengths.
"""

import torch

from .api import choose_implementation
from .decays import Decays, block_distances, decayed_sums, powers
from .torch_layout import MoveTokens, align_sequences, shift_to_start
from .torch_local import LocalForm, by_block_and_group, near_and_far, resize_tokens, with_ones
from .triton.local import local_fault, local_kind, triton_near_and_far
from .triton.register import triton_refusal

SEGMENT = 2048  # tokens that are worked on at once where no gradient is asked for


def local_attention(
    q, k, v, fq, fk, decays: Decays, balance, form: LocalForm, *, key_mask=None, starts=None, cu_seqlens=None
):
    """o [B, T, H, V] in the dtype of the sums (at least fp32), or in v's where the form allows it.

    q [B, T, H, D], k [B, T, G, D]: rotated queries and keys of the near part (with balance None, features). v [B, T, G, V].
    fq [B, T, H, K], fk [B, T, G, K]: features of the far part. balance: [H], see the top of this file, or None.
    key_mask, starts, cu_seqlens: as in `mhla`.
    """
    tokens, size = q.shape[1], form.block_size
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    back = place = sequence = None
    if starts is not None:
        if cu_seqlens is not None:
            raise ValueError("starts came with cu_seqlens; expected one of them.")
        source, back = shift_to_start(starts.to(q.device), tokens)
    if cu_seqlens is not None:
        source, back, place, sequence = align_sequences(cu_seqlens, tokens, size)
    if back is not None:
        q, k, v, fq, fk = (MoveTokens.apply(x, source, back) for x in (q, k, v, fq, fk))
        rows = torch.arange(len(valid), device=q.device)[:, None]
        valid = (source >= 0) & valid[rows, source.clamp(min=0)]
    if place is None:
        place = torch.arange((q.shape[1] + size - 1) // size, device=q.device)
    o, _ = attend_local(q, k, v, fq, fk, valid, decays, balance, form, place[None], sequence=sequence)
    return o if back is None else MoveTokens.apply(o, back, source)


def two_way_attention(q, k, v, fq, fk, decays: Decays, balance, form: LocalForm, *, key_mask=None):
    """o [B, T, H, V] in the dtype of the sums (at least fp32), of tokens that see later ones as they see earlier ones.

    As `local_attention`, with `form.both_ways`, without sinks, and with |i - j| in the place of i - j. The summaries of all
    blocks are mixed by a matrix per key/value head: what that costs grows with the square of their number.
    """
    count = (q.shape[1] + form.block_size - 1) // form.block_size
    place = torch.arange(count, device=q.device)[None]
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    real = torch.arange(count * form.block_size, device=q.device) < q.shape[1]
    valid = resize_tokens(valid, count * form.block_size) & real
    summaries = block_summaries(fk, v, valid, place, form)
    decays = decays.to(summaries.dtype)
    distance = block_distances(count, summaries).abs()
    mixing = powers(decays.log_rate, distance).masked_fill(distance < form.lag, 0).transpose(1, 2)  # [G, M, R, M]
    mixed = (mixing.flatten(1, 2) @ summaries.flatten(3)).view(*summaries.shape[:3], -1, *summaries.shape[3:])
    return near_and_far(q, k, v, fq, mixed, valid, decays.weight, balance, None, place, form)


def attend_local(
    q, k, v, fq, fk, valid, decays, balance, form, place, *, sequence=None, sink=None, carried=None, opened=None, now=None
):  # fmt: skip
    """Outputs [B, T, H, V] of tokens that begin at a block edge, M blocks of C; shapes as in `local_attention`.

    valid: bool [B, T], tokens that are keys. place: int [B or 1, M], the index of each block in its sequence. sequence: int
    [M], its number where several are packed. sink: sink keys and values (k, v, valid) [B, S, G, ...] from a state, else
    they are found among the tokens. carried: [B, G, R, K, V + 1], the running sums of a state whose last block is `opened`,
    int [B], and whose sequence is that of the first block; now: int [B], the last block behind these tokens. Returns the
    outputs and the running sums there (None without `now`). Without gradients a long sequence is taken `SEGMENT` tokens at
    a time: memory and cost per token do not grow.
    """
    if form.sinks and sink is None:
        sink = find_sinks(k, v, valid, form, sequence)
    impl = choose_implementation(
        form.impl,
        q.device,
        lambda: triton_refusal(q, k, v),
        lambda: local_fault(*local_kind(q, v, fq, decays, balance, form)),
    )
    size, count = form.block_size, place.shape[1]
    real = torch.arange(count * size, device=q.device) < q.shape[1]
    tensors = q, k, v, fq, fk, resize_tokens(valid, count * size) & real
    step = max(SEGMENT // size, form.lag)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, decays.weight))
    if count <= 2 * step or recorded or sequence is not None or torch.compiler.is_compiling():
        o, summaries = attend_segment(*tensors, decays, balance, form, place, sequence, sink, carried, opened, impl)
        return o, None if now is None else advance(carried, summaries, decays, form.lag, place, opened, now)
    outputs = []
    for first in range(0, count, step):
        begin, end = max(first - form.lag, 0), min(first + step, count)
        here = place[:, begin:end]
        parts = (x[:, begin * size : end * size] for x in tensors)
        o, summaries = attend_segment(*parts, decays, balance, form, here, None, sink, carried, opened, impl)
        outputs.append(o[:, (first - begin) * size :])
        last = here[:, -1] if now is None else torch.minimum(here[:, -1], now)
        carried, opened = advance(carried, summaries, decays, form.lag, here, opened, last), last
    return torch.cat(outputs, 1), carried


def advance(carried, summaries, decays, lag, place, opened, now):
    """Running sums [B, G, R, K, V + 1] as of block `now` [B], from those as of `opened` and the summaries of blocks `place`.

    Of these, blocks up to `opened - lag` are in the old sums.
    """
    log_rate, distance = decays.log_rate.to(summaries.dtype), now[:, None] - place
    weight = torch.exp(log_rate[None, ..., None] * distance.clamp(min=0)[:, None, None])
    new = (distance >= lag) if opened is None else (distance >= lag) & (place > (opened - lag)[:, None])
    weight = torch.where(new[:, None, None], weight, 0)  # [B, G, R, M]
    running = (weight @ summaries.flatten(3)).unflatten(3, summaries.shape[3:])
    if carried is None:
        return running
    return running + torch.exp(log_rate * (now - opened)[:, None, None])[..., None, None] * carried


def attend_segment(q, k, v, fq, fk, valid, decays, balance, form, place, sequence, sink, carried, opened, impl):
    """`attend_local` all at once, of valid [B, M * C]: its outputs, and the summaries [B, G, M, K, V + 1]."""
    summaries = block_summaries(fk, v, valid, place, form)
    decays = decays.to(summaries.dtype)
    mixed = decayed_sums(summaries.flatten(3), decays.log_rate, form.lag, sequence).unflatten(4, summaries.shape[3:])
    if carried is not None:
        passed = (place - opened[:, None]).clamp(min=0)[:, None, :, None]  # blocks before it hold no new token
        decay = torch.exp(decays.log_rate[:, None] * passed)  # [B, G, M, R]
        if sequence is not None:
            decay = torch.where((sequence == sequence[0])[:, None], decay, 0)
        mixed = mixed + decay[..., None, None] * carried[:, :, None]
    if decays.power is not None:
        scale = decays.by_length(place, form.lag).repeat_interleave(form.block_size, 1)  # [B or 1, M * C, H]
        fq = fq * resize_tokens(scale, fq.shape[1])[..., None].to(fq.dtype)
    given = fq, mixed, valid, decays.weight, balance, sink, place, form
    attend = triton_near_and_far if impl == "triton" else near_and_far
    return attend(q, k, v, *given), summaries


def block_summaries(fk, v, valid, place, form):
    """What the far keys and values of each block sum to, and in a last column the keys: [B, G, M, K, V + 1]."""
    exact = torch.float64 if torch.float64 in (fk.dtype, v.dtype) else torch.float32
    fk, v = (resize_tokens(x, valid.shape[1]) for x in (fk, v))
    fk = torch.where((valid & ~sink_tokens(place, form))[..., None, None], fk, 0)
    v = with_ones(torch.where(valid[..., None, None], v, 0))
    fk, v = (by_block_and_group(x, v.shape[2], form.block_size, exact) for x in (fk, v))
    return fk.mT @ v  # paper eq. 4


def sink_tokens(place, form):
    """Which tokens are sinks and so never far: bool [B or 1, M * C]."""
    slot = torch.arange(form.block_size, device=place.device)
    position = (place[:, :, None] * form.block_size + slot).flatten(1)
    return position < form.sinks


def find_sinks(k, v, valid, form, sequence):
    """The first tokens of each sequence: k, v and valid, [B, S, G, ...], or [B, M, S, G, ...] for packed ones."""
    if sequence is None:
        return tuple(x[:, : form.sinks] for x in (k, v, valid))
    first = torch.searchsorted(sequence, sequence) * form.block_size  # of the same sequence
    token = (first[:, None] + torch.arange(form.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return tuple(x[:, token] for x in (k, v, valid))
