"""What a decoder remembers of near and far attention (`local.py`): as much at token ten as at token ten million.

Each row stands at a position of its own. A ring holds the keys and values of the window and of one block more, so that
taking tokens back (`crop`, at most a block) is exact. The far part is R running summaries and one of the block that enters
them next, to which each new token adds one old one: every step does the same work, and none reads a number on the host.
"""

from dataclasses import dataclass

import torch

from .decays import Decays
from .local import LocalForm, attend_local, join, with_ones
from .reference import divide_or_zero


@dataclass
class LocalState:
    """State of B rows, changed in place (its tensors keep their addresses); nothing has a gradient.

    k [B, W, G, D], v [B, W, G, V], valid bool [B, W]: the ring of W = (lag + 1) * C tokens, position p in slot p % W.
    sink_k, sink_v [B, S, G, ..], sink_valid [B, S]: the first tokens.
    running [B, G, R, K, V + 1]: for the block i of the last token, the sum over j <= i - lag of lambda_r^(i - j) times
    summary j (its last column sums the keys); pending [B, G, K, V + 1]: as much of summary i - lag + 1 as has been read.
    Both fp32 at least.
    position: tokens seen, int64 [B]; furthest: the most there ever were. cropped: tokens taken back whose part of the sums
    `rewind` has yet to undo.
    """

    block_size: int
    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor
    sink_k: torch.Tensor
    sink_v: torch.Tensor
    sink_valid: torch.Tensor
    running: torch.Tensor
    pending: torch.Tensor
    position: torch.Tensor
    furthest: torch.Tensor
    cropped: int = 0

    @staticmethod
    def empty(k: torch.Tensor, v: torch.Tensor, rates: int, features: int, form: LocalForm) -> "LocalState":
        """A state that has seen nothing, for keys and values like k and v [B, T, G, ..]."""
        (batch, _, groups, width), value_dim = k.shape, v.shape[3]
        ring, exact = (form.lag + 1) * form.block_size, torch.promote_types(k.dtype, torch.float32)
        return LocalState(
            block_size=form.block_size,
            k=k.new_zeros(batch, ring, groups, width),
            v=v.new_zeros(batch, ring, groups, value_dim),
            valid=k.new_zeros(batch, ring, dtype=torch.bool),
            sink_k=k.new_zeros(batch, form.sinks, groups, width),
            sink_v=v.new_zeros(batch, form.sinks, groups, value_dim),
            sink_valid=k.new_zeros(batch, form.sinks, dtype=torch.bool),
            running=k.new_zeros(batch, groups, rates, features, value_dim + 1, dtype=exact),
            pending=k.new_zeros(batch, groups, features, value_dim + 1, dtype=exact),
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def leave_inference_mode(self) -> None:
        """Tensors of inference mode cannot be written outside of it: copies can."""
        if not torch.compiler.is_compiling() and self.position.is_inference() > torch.is_inference_mode_enabled():
            for name, value in self.tensors().items():
                setattr(self, name, value.clone())

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(value.nbytes for value in self.tensors().values())

    def select(self, index: torch.Tensor) -> None:
        """Keep the rows of `index` (int64 [B'], repeats allowed), in that order; in place where their number stays."""
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            chosen = value.index_select(0, index.to(value.device))
            if chosen.shape == value.shape:
                value.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def reorder(self, index: torch.Tensor) -> None:
        """Put row index[i] in place i (beam search); index int64 [B]."""
        self.select(index)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times, the copies side by side."""
        self.select(torch.arange(len(self.position)).repeat_interleave(times))

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row. ValueError where the ring no longer has what was before them."""
        self.leave_inference_mode()
        back = int((self.furthest - self.position).max()) + count
        if back > self.block_size:
            raise ValueError(
                f"count: got {count}, expected a position at most a block of {self.block_size} tokens behind the furthest."
            )
        if count > int(self.position.min()):
            raise ValueError(f"count: got {count}, expected at most the {int(self.position.min())} tokens of a row.")
        self.cropped += count
        self.position.sub_(count)

    def rewind(self, decays: Decays, map_keys, form: LocalForm) -> None:
        """Undo in the sums what `crop` took from the positions; map_keys: from the ring's keys to features."""
        decays, now = decays.to(self.running.dtype), (self.position - 1).clamp(min=0) // form.block_size
        was = (self.position + self.cropped - 1).clamp(min=0) // form.block_size
        left = self.summary(was - form.lag, form.block_size, map_keys, form)  # what entered as block `was` opened
        decay = torch.exp(decays.log_rate)[..., None, None].clamp_min(torch.finfo(left.dtype).tiny)
        earlier = (self.running - decay**form.lag * left[:, :, None]) / decay
        self.running.copy_(torch.where((now < was).view(-1, 1, 1, 1, 1), earlier, self.running))
        read = (self.position - 1) % form.block_size + 1
        count = torch.where(self.position > 0, read, 0)[:, None]
        self.pending.copy_(self.summary(now - form.lag + 1, count, map_keys, form))
        self.cropped = 0

    def summary(self, block, count, map_keys, form: LocalForm) -> torch.Tensor:
        """The summary [B, G, K, V + 1] of the first `count` (a number, or [B, 1]) tokens of each row's `block` [B]."""
        slot = torch.arange(form.block_size, device=block.device)
        position = block[:, None] * form.block_size + slot
        rows, place = torch.arange(len(block), device=block.device)[:, None], position % self.k.shape[1]
        far = self.valid[rows, place] & (position >= form.sinks) & (slot < count)
        fk = torch.where(far[..., None, None], map_keys(self.k[rows, place]), 0).to(self.running.dtype)
        v = with_ones(self.v[rows, place]).to(self.running.dtype)
        return fk.permute(0, 2, 3, 1) @ v.transpose(1, 2)

    def leaving(self, k: torch.Tensor, form: LocalForm) -> torch.Tensor:
        """The key [B, 1, G, D] that the step with the new key k adds to `pending`: that of `lag - 1` blocks ago."""
        if form.lag == 1:
            return k
        rows = torch.arange(len(k), device=k.device)
        return self.k[rows, (self.position - (form.lag - 1) * form.block_size) % self.k.shape[1]][:, None]


@torch.no_grad()
def local_step(q, k, v, fq, fk_leaving, decays: Decays, balance, form: LocalForm, state: LocalState, real=None):
    """One new token of every row: o [B, 1, H, V] in the dtype of the sums; `state` goes on by it.

    q, k, v, fq as in `local_attention`; fk_leaving: features of `state.leaving(k)`. real: bool [B], rows without a token are
    left as they are. The same graph for every position.
    """
    size, lag, ring = form.block_size, form.lag, state.k.shape[1]
    groups, exact = k.shape[2], state.running.dtype
    decays, p = decays.to(exact), state.position
    real = torch.ones_like(p, dtype=torch.bool) if real is None else real
    rows, slot = torch.arange(len(p), device=p.device), p % ring
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        held[rows, slot] = torch.where(real[:, None, None], new.to(held.dtype), 0)
    state.valid[rows, slot] = real
    if form.sinks:
        here = (torch.arange(form.sinks, device=p.device) == p[:, None]) & real[:, None]
        for held, new in ((state.sink_k, k), (state.sink_v, v), (state.sink_valid, here)):
            write(held, here, new)

    opens = ((p % size == 0) & real).view(-1, 1, 1, 1)
    decay = torch.exp(decays.log_rate)[..., None, None]
    rolled = decay * state.running + decay**lag * state.pending[:, :, None]
    state.running.copy_(torch.where(opens[..., None], rolled, state.running))
    old = p - (lag - 1) * size
    enters = real & (old >= form.sinks) & state.valid[rows, old % ring]
    left_v = with_ones(state.v[rows, old % ring]).to(exact)
    added = torch.where(enters[:, None, None], fk_leaving[:, 0], 0).to(exact)[..., None] * left_v[:, :, None]
    state.pending.copy_(torch.where(opens, 0, state.pending) + added)

    fq = by_group(fq, groups, exact)[:, :, None]  # [B, G, 1, N, K]
    far = (decays.spread(fq) @ state.running[:, :, None].flatten(3, 4))[:, :, 0]
    near_k, near_v = state.k, with_ones(state.v)
    position = p[:, None] - (p[:, None] - torch.arange(ring, device=p.device)) % ring  # the last one in each slot
    block = p // size
    seen = state.valid & (position >= ((block - lag + 1) * size).clamp(min=0)[:, None])
    if form.sinks:
        near_k, near_v = (
            torch.cat([state.sink_k, near_k], 1),
            torch.cat([with_ones(state.sink_v), near_v], 1),
        )
        seen = torch.cat([state.sink_valid & (block >= lag)[:, None], seen], 1)
    near_k, near_v, seen = near_k.to(exact), near_v.to(exact).transpose(1, 2), seen[:, None, None]
    score = (by_group(q, groups, exact) @ near_k.permute(0, 2, 3, 1)) * form.scale
    if balance is None:
        own = decays.weight.sum(-1).view(groups, -1, 1)
        o = (torch.where(seen, score, 0) * own) @ near_v + form.scale * far
    else:
        o = join(score, seen, near_v, far, balance.to(exact).view(groups, -1, 1), (block >= lag).view(-1, 1, 1, 1))
    o = divide_or_zero(o[..., :-1], o[..., -1]) if form.normalize else o[..., :-1]
    state.position.add_(real)
    torch.maximum(state.furthest, state.position, out=state.furthest)
    return torch.where(real[:, None, None], o.flatten(1, 2), 0)[:, None]


def by_group(x, groups, exact):
    """[B, 1, H, K] -> [B, G, H / G, K] in the exact dtype."""
    return x[:, 0].unflatten(1, (groups, -1)).to(exact)


class TokenLayout:
    """New tokens behind those of a state, each row from the block edge `lag - 1` blocks before its open block.

    count: int64 [B] or None, how many of the T new tokens of each row are its own (the last ones: padding is on the left).
    """

    def __init__(self, state: LocalState, steps: int, form: LocalForm, count: torch.Tensor | None, fresh: bool):
        size, device = form.block_size, state.position.device
        self.steps, self.size, self.before = steps, size, state.position.clone()
        self.count = torch.full_like(state.position, steps) if count is None else count
        self.open = (state.position - 1).clamp(min=0) // size
        self.first = torch.zeros_like(self.open) if fresh else (self.open - form.lag + 1).clamp(min=0)
        blocks = (steps + size - 1) // size + (0 if fresh else form.lag)
        self.place = self.first[:, None] + torch.arange(blocks, device=device)
        self.position = self.first[:, None] * size + torch.arange(blocks * size, device=device)
        self.ring, ring = not fresh, state.k.shape[1]
        token = (self.position - self.before[:, None] + (steps - self.count)[:, None]).clamp(min=0, max=steps - 1)
        self.token = token
        self.source = (
            token if fresh else torch.where(self.position < self.before[:, None], self.position % ring, token + ring)
        )
        self.rows = torch.arange(len(token), device=device)[:, None]
        self.filled = self.position < (self.before + self.count)[:, None]

    def place_keys(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """[B, W, ..] of the ring and [B, T, ..] -> [B, M * C, ..]."""
        return (torch.cat([held, new.to(held.dtype)], 1) if self.ring else new)[self.rows, self.source]

    def place_queries(self, q: torch.Tensor) -> torch.Tensor:
        """[B, T, ..] -> [B, M * C, ..]."""
        return q[self.rows, self.token]

    def take_back(self, o: torch.Tensor) -> torch.Tensor:
        """[B, M * C, ..] -> [B, T, ..], zeros for padding."""
        token = torch.arange(self.steps, device=o.device) - (self.steps - self.count)[:, None]
        place = token + (self.before - self.first * self.size)[:, None]
        real = (token >= 0).view(*token.shape, *[1] * (o.dim() - 2))
        return torch.where(real, o[self.rows, place.clamp(min=0)], 0)


def local_extend(
    q, k, v, fq, fk, valid, decays: Decays, balance, form: LocalForm, state: LocalState, layout: TokenLayout
):
    """o [B, T, H, V] of T new tokens, any number of blocks; `state` goes on by them.

    All tensors are laid out by `layout`: q, fq by `place_queries`; k, v, valid by `place_keys`; fk: features of that k.
    Gradients flow among the new tokens, not through the state.
    """
    valid = valid & layout.filled
    if form.sinks:
        keep_sinks(k, v, valid, form, state, layout)
    held = {}
    if layout.ring:
        held = {"carried": state.running, "opened": layout.open}
        if form.sinks:
            held["sink"] = state.sink_k, state.sink_v, state.sink_valid
    end = layout.before + layout.count
    held["now"] = (end - 1).clamp(min=0) // form.block_size
    o, running = attend_local(q, k, v, fq, fk, valid, decays, balance, form, layout.place, **held)
    absorb_blocks(k, v, fk, valid, running, end, form, state, layout)
    return layout.take_back(o)


@torch.no_grad()
def keep_sinks(k, v, valid, form, state, layout):
    """The first tokens of each row, as far as they are among those of `layout`."""
    position = torch.arange(form.sinks, device=k.device)
    new = position >= layout.before[:, None]
    place = (position - layout.first[:, None] * layout.size).clamp(0, k.shape[1] - 1)
    for held, laid in ((state.sink_k, k), (state.sink_v, v), (state.sink_valid, valid)):
        write(held, new, laid[layout.rows, place])


def write(held, new, values):
    """values where new [B, N] in held [B, N, ..], in place."""
    held.copy_(torch.where(new.view(*new.shape, *[1] * (held.dim() - 2)), values.to(held.dtype), held))


@torch.no_grad()
def absorb_blocks(k, v, fk, valid, running, end, form, state, layout):
    """The state behind the tokens of `layout`."""
    size, lag, exact = form.block_size, form.lag, state.running.dtype
    state.running.copy_(running)
    now = (end - 1).clamp(min=0) // size
    slot = torch.arange(size, device=end.device)
    position = (now - lag + 1)[:, None] * size + slot
    place = (position - layout.first[:, None] * size).clamp(0, k.shape[1] - 1)
    enters = (position >= form.sinks) & (slot <= ((end - 1) % size)[:, None])
    enters = enters & (end > 0)[:, None] & valid[layout.rows, place]
    left_k = torch.where(enters[..., None, None], fk[layout.rows, place], 0).to(exact)
    left_v = with_ones(torch.where(enters[..., None, None], v[layout.rows, place], 0).to(exact))
    state.pending.copy_(left_k.permute(0, 2, 3, 1) @ left_v.transpose(1, 2))

    ring = state.k.shape[1]
    position = (end - 1)[:, None] - ((end - 1)[:, None] - torch.arange(ring, device=end.device)) % ring
    place = position - layout.first[:, None] * size
    new = (place >= 0) & (position >= layout.before[:, None])
    for held, laid in ((state.k, k), (state.v, v), (state.valid, valid)):
        write(held, new, laid[layout.rows, place.clamp(0, k.shape[1] - 1)])
    state.position.copy_(end)
    torch.maximum(state.furthest, end, out=state.furthest)
