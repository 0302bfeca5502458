"""What a decoder remembers of near and far attention (`local.py`): as much at token ten as at token ten million.

Each row stands at a position of its own. A ring holds the keys and values of the window and of one block more, so that
taking tokens back (`crop`, at most a block) costs no more than a rounding of the sums. The far part is R running summaries
and one of the block that enters them next, to which each new token adds one old one: every step does the same work, and
none reads a number on the host.
"""

from dataclasses import dataclass

import torch

from .decays import Decays
from .local import attend_local
from .state import RowState
from .torch_layout import TokenLayout, ring_slot
from .torch_local import LocalForm, combine, with_ones


@dataclass
class LocalState(RowState):
    """State of B rows, changed in place (its tensors keep their addresses); nothing has a gradient.

    k [B, S + W, G, D], v [B, S + W, G, V], valid bool [B, S + W]: the first S tokens (sinks), then a ring of
    W = (lag + 1) * C: `ring_slot` says which token is where. angles [B, S + W, 1, A]: how each of them was rotated, for the
    far part, which reads keys before their rotation; A is 0 where it does not.
    running [B, G, R, V + 1, K]: for the block i of the last token, the sum over j <= i - lag of lambda_r^(i - j) times
    summary j, transposed (its last row sums the keys); pending [B, G, V + 1, K]: as much of summary i - lag + 1 as has been
    read. Both fp32 at least, and transposed because V + 1 is an awkward width for the vector units that decode.
    position: tokens seen, int64 [B]; furthest: the most there were before any was taken back. cropped: tokens taken back
    whose part of the sums `rewind` has yet to undo.
    """

    block_size: int
    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor
    angles: torch.Tensor
    running: torch.Tensor
    pending: torch.Tensor
    position: torch.Tensor
    furthest: torch.Tensor
    cropped: int = 0

    @staticmethod
    @torch.inference_mode(False)  # whose tensors could not be written outside of it
    def empty(
        k: torch.Tensor, v: torch.Tensor, rates: int, features: int, form: LocalForm, angles: torch.Tensor | None = None
    ) -> "LocalState":
        """A state that has seen nothing, for keys, values and angles like k and v [B, T, G, ..] and angles [.., A]."""
        angles = k.new_zeros(0) if angles is None else angles
        batch, _, groups, value_dim = v.shape
        slots, exact = form.sinks + (form.lag + 1) * form.block_size, torch.promote_types(k.dtype, torch.float32)
        return LocalState(
            block_size=form.block_size,
            k=k.new_zeros(batch, slots, *k.shape[2:]),
            v=v.new_zeros(batch, slots, *v.shape[2:]),
            valid=k.new_zeros(batch, slots, dtype=torch.bool),
            angles=angles.new_zeros(batch, slots, 1, angles.shape[-1]),
            running=k.new_zeros(batch, groups, rates, value_dim + 1, features, dtype=exact),
            pending=k.new_zeros(batch, groups, value_dim + 1, features, dtype=exact),
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row. ValueError where the ring no longer has what was before them."""
        torch.maximum(self.furthest, self.position, out=self.furthest)
        back = int((self.furthest - self.position).max()) + count
        if back > self.block_size:
            raise ValueError(
                f"count: got {count}, expected a position at most a block of {self.block_size} tokens behind the furthest."
            )
        if count > int(self.position.min()):
            raise ValueError(f"count: got {count}, expected at most the {int(self.position.min())} tokens of a row.")
        self.cropped += count
        self.position.sub_(count)

    @torch.no_grad()
    def rewind(self, decays: Decays, map_keys, form: LocalForm) -> None:
        """Undo in the sums what `crop` took from the positions; map_keys: see `continue_local`."""
        decays, now = decays.to(self.running.dtype), (self.position - 1).clamp(min=0) // form.block_size
        was = (self.position + self.cropped - 1).clamp(min=0) // form.block_size
        left = self.summary(was - form.lag, form.block_size, map_keys, form)  # what entered as block `was` opened
        decay = torch.exp(decays.log_rate)[..., None, None]
        earlier = (self.running - decay**form.lag * left[:, :, None]) / decay
        now, was = (x.view(-1, 1, 1, 1, 1) for x in (now, was))
        # where nothing is far, or a rate keeps less than a rounding error, all that subtraction leaves is error
        earlier = torch.where((now >= form.lag) & (decay > torch.finfo(decay.dtype).eps), earlier, 0)
        self.running.copy_(torch.where(now < was, earlier, self.running))
        self.cropped = 0
        self.refresh_pending(map_keys, form)

    def refresh_pending(self, map_keys, form: LocalForm) -> None:
        """Sum `pending` anew from the ring."""
        last = self.position - 1
        count = torch.where(last >= 0, last % form.block_size + 1, 0)[:, None]
        block = last.clamp(min=0) // form.block_size - form.lag + 1
        self.pending.copy_(self.summary(block, count, map_keys, form))

    def summary(self, block, count, map_keys, form: LocalForm) -> torch.Tensor:
        """The transposed summary [B, G, V + 1, K] of each row's `block` [B], of its first `count` (or [B, 1]) tokens."""
        token = torch.arange(form.block_size, device=block.device)
        position = block[:, None] * form.block_size + token
        rows, place = torch.arange(len(block), device=block.device)[:, None], self.slot(position, form)
        far = self.valid[rows, place] & (position >= form.sinks) & (token < count)
        fk = map_keys(self.k[rows, place], self.angles[rows, place])
        fk = torch.where(far[..., None, None], fk, 0).to(self.running.dtype)
        v = with_ones(torch.where(far[..., None, None], self.v[rows, place], 0)).to(self.running.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return v.permute(0, 2, 3, 1) @ fk.transpose(1, 2)

    def slot(self, position: torch.Tensor, form: LocalForm) -> torch.Tensor:
        """Where the token at `position` is; anywhere for one before the first."""
        return ring_slot(position, self.k.shape[1], form.sinks)


def continue_local(q, k, v, fq, map_keys, decays: Decays, balance, form: LocalForm, state: LocalState, *, fresh: bool,
                   key_mask=None, starts=None, angles=None):  # fmt: skip
    """o [B, T, H, V] (as in `local_attention`) of T new tokens of every row; `state` goes on by them.

    q, k, v, fq, decays, balance, form, key_mask and starts as in `local_attention`. map_keys: a function of keys
    [B, N, G, D] and their angles [B, N, 1, A] that returns the far part's features [B, N, G, K]. angles: of k, [B, T, 1, A];
    None is A = 0. fresh: the state has seen nothing. Gradients flow among the new tokens, not through the state.
    """
    if angles is None:
        angles = state.angles.new_zeros(*q.shape[:2], 1, 0)
    if state.cropped:
        state.rewind(decays, map_keys, form)
    if q.shape[1] == 1 and not fresh:
        real = None if key_mask is None else key_mask[:, 0]
        own = None if starts is None else starts.to(q.device) == 0
        with torch.autocast(q.device.type, enabled=False):
            return local_step(q, k, v, fq, map_keys, decays, balance, form, state, real, own, angles)
    size, steps, before = form.block_size, q.shape[1], state.position.clone()
    count = torch.full_like(before, steps) if starts is None else steps - starts.to(q.device)
    first = torch.zeros_like(before) if fresh else ((before - 1).clamp(min=0) // size - form.lag + 1).clamp(min=0)
    blocks, slots = (steps + size - 1) // size + (0 if fresh else form.lag), 0 if fresh else state.k.shape[1]
    layout = TokenLayout(before, count, steps, first, blocks, size, slots, q.device, form.sinks)
    valid = key_mask if key_mask is not None else torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    valid = layout.place_keys(state.valid, valid) & layout.filled
    k, v = layout.place_keys(state.k, k), layout.place_keys(state.v, v)
    angles = layout.place_keys(state.angles, angles)
    q, fq, fk = layout.place_queries(q), layout.place_queries(fq), map_keys(k, angles)
    with torch.no_grad():
        for held, laid in ((state.k, k), (state.v, v), (state.valid, valid), (state.angles, angles)):
            layout.keep(held, laid)
        state.position.copy_(before + count)
    past = {"now": (before + count - 1).clamp(min=0) // size}
    if not fresh:
        past |= {"carried": state.running.mT, "opened": (before - 1).clamp(min=0) // size}
        if form.sinks:
            past["sink"] = tuple(held[:, : form.sinks] for held in (state.k, state.v, state.valid))
    with torch.autocast(q.device.type, enabled=False):
        o, running = attend_local(q, k, v, fq, fk, valid, decays, balance, form, layout.blocks, **past)
    with torch.no_grad():
        state.running.copy_(running.mT)
        state.refresh_pending(map_keys, form)
    return layout.take_back(o)


@torch.no_grad()
def local_step(q, k, v, fq, map_keys, decays: Decays, balance, form: LocalForm, state: LocalState, real=None, own=None,
               angles=None):  # fmt: skip
    """One new token of every row: o [B, 1, H, V] in the dtype of the sums; `state` goes on by it.

    Arguments as of `continue_local`. real: bool [B], whose token is no padding. own: bool [B], whose row goes on by it, be
    it padding after its first token; other rows are left as they are. The same graph for every position.
    """
    size, lag, exact, p = form.block_size, form.lag, state.running.dtype, state.position
    heads = (len(p), k.shape[2], q.shape[2] // k.shape[2])  # [B, G, H / G]
    decays = decays.to(exact)
    rows, slot, inside = torch.arange(len(p), device=p.device), state.slot(p, form), p % size
    for ring, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        new = new if real is None else new.masked_fill(~real[:, None, None], 0)
        ring[rows, slot] = new.to(ring.dtype)
    if angles is not None:
        state.angles[rows, slot] = angles[:, 0].to(state.angles.dtype)
    state.valid[rows, slot] = torch.ones_like(p, dtype=torch.bool) if real is None else real

    opens = inside == 0 if own is None else (inside == 0) & own
    opens = opens.view(-1, 1, 1, 1, 1)
    decay = torch.exp(decays.log_rate)[..., None, None]
    state.running.mul_(torch.where(opens, decay, 1))
    state.running.addcmul_(torch.where(opens, decay**lag, 0), state.pending[:, :, None])
    old = p - (lag - 1) * size
    place = state.slot(old, form)
    enters = (old >= form.sinks) & state.valid[rows, place]
    enters = enters if own is None else enters & own
    entering = map_keys(state.k[rows, place][:, None], state.angles[rows, place][:, None])[:, 0]
    entering = entering.masked_fill(~enters[:, None, None], 0).to(exact)
    left_v = with_ones(state.v[rows, place]).to(exact)
    state.pending.mul_(~opens[..., 0]).addcmul_(left_v[..., None], entering[:, :, None])

    slots = torch.arange(state.k.shape[1], device=p.device)
    age = (p[:, None] - slots + form.sinks) % (len(slots) - form.sinks)  # in the ring
    last = inside + (lag - 1) * size
    seen = state.valid & torch.where(slots < form.sinks, slots <= p[:, None], age <= last[:, None])
    score = (q.reshape(*heads, -1).to(exact) @ state.k.permute(0, 2, 3, 1).to(exact)) * form.scale
    fq = fq[:, 0].to(exact)
    if decays.power is not None:
        fq = fq * decays.by_length(p // size, lag)[..., None]
    weighed = fq.view(*heads, 1, -1) * decays.weight.view(*heads[1:], -1, 1)
    far = weighed.flatten(3) @ state.running.mT.flatten(2, 3)
    near_v, has_far = state.v.transpose(1, 2).to(exact), (p >= lag * size).view(-1, 1, 1, 1)
    of_heads = (x if x is None else x.to(exact).view(*heads[1:], 1) for x in (decays.weight.sum(-1), balance))
    o = combine(score, seen[:, None, None], near_v, far, *of_heads, has_far, form).flatten(1, 2)[:, None]
    state.position.add_(1 if own is None else own)
    return o if own is None else o.masked_fill(~own.view(-1, 1, 1, 1), 0)
