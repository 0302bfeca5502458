"""The decoder state of near and far attention (`attention.py`), whose size is constant.

A ring holds the keys and values of the window and of one block more, so that `crop` can take back up to a block of tokens,
at the cost of a rounding error in the sums. The far part is R running sums and a pending summary of the block that enters
them next. Each new token adds one old token to the pending summary, so every step does the same work, and reads no value on
the host. Every row has its own position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import divide_or_zero
from ..state import RingState
from ..torch_layout import TokenMove, TokenPlaces, ring_slot, take_tokens, visible_slots
from .attention import BlockRun, PastSums, SinkTokens, attend_run, far_range, merge_near_and_far, with_ones
from .decays import Decays
from .fused_softmax import causal_softmax, make_mask, softmax_forward
from .inputs import WindowedInputs, WindowedOptions

# Maps keys [B, N, G, D] and the cosines and sines of their rotation [B, N, 1, A] to features [B, N, G, K].
KeyMap = Callable[[Tensor, Tensor], Tensor]


@dataclass
class WindowedState(RingState):
    """The decoder state of near and far attention, for B rows; changed in place, without gradients.

    Sums are those of `PastSums` at the block of the last token, at least fp32, and transposed because V + 1 is an awkward
    width for vector units.
    """

    cos_sin: Tensor  # [B, S, 1, A], cosines and sines of the rotation of keys, which the far part undoes; A may be 0
    running: Tensor  # [B, G, R, V + 1, K], the sums
    pending: Tensor  # [B, G, V + 1, K], the incomplete summary of the block that enters `running` next
    cropped: int = 0  # number of cropped tokens that are still in the sums, until `rewind` removes them

    @staticmethod
    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def empty(
        k: Tensor, v: Tensor, num_rates: int, num_features: int, options: WindowedOptions, cos_sin: Tensor | None = None
    ) -> "WindowedState":
        """Create an empty state with the sizes and dtypes of k, v [B, T, G, ...], and cos_sin [..., A] (None: unrotated)."""
        cos_sin = k.new_zeros(0) if cos_sin is None else cos_sin
        batch, _, num_kv_heads, value_dim = v.shape
        num_slots = options.sinks + (options.window + 1) * options.block_size
        sum_dtype = torch.promote_types(k.dtype, torch.float32)
        return WindowedState(
            block_size=options.block_size,
            k=k.new_zeros(batch, num_kv_heads, num_slots, k.shape[-1]),
            v=v.new_zeros(batch, num_kv_heads, num_slots, value_dim),
            valid=k.new_zeros(batch, num_slots, dtype=torch.bool),
            cos_sin=cos_sin.new_zeros(batch, num_slots, 1, cos_sin.shape[-1]),
            running=k.new_zeros(batch, num_kv_heads, num_rates, value_dim + 1, num_features, dtype=sum_dtype),
            pending=k.new_zeros(batch, num_kv_heads, value_dim + 1, num_features, dtype=sum_dtype),
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every row; the next `continue_windowed` corrects the sums."""
        super().crop(count)
        self.cropped += count

    @torch.no_grad()
    def rewind(self, decays: Decays, map_keys: KeyMap, options: WindowedOptions) -> None:
        """Remove cropped tokens from `running` and `pending`; the arguments are those of `continue_windowed`."""
        decays = decays.to(self.running.dtype)
        block = (self.position - 1).clamp(min=0) // options.block_size
        old_block = (self.position + self.cropped - 1).clamp(min=0) // options.block_size
        # What entered when `old_block` was opened.
        entered = self.summary(old_block - options.window, options.block_size, map_keys, options)
        decay = torch.exp(decays.log_rate)[..., None, None]
        earlier = (self.running - decay**options.window * entered[:, :, None]) / decay
        is_far = ((block - options.window + 1) * options.block_size > options.sinks).view(-1, 1, 1, 1, 1)
        block, old_block = (x.view(-1, 1, 1, 1, 1) for x in (block, old_block))
        # Where nothing is far, or where a rate keeps less than a rounding error, the subtraction leaves only error.
        earlier = torch.where(is_far & (decay > torch.finfo(decay.dtype).eps), earlier, 0)
        self.running.copy_(torch.where(block < old_block, earlier, self.running))
        self.cropped = 0
        self.refresh_pending(map_keys, options)

    def refresh_pending(self, map_keys: KeyMap, options: WindowedOptions) -> None:
        """Recompute `pending` from the ring."""
        last = self.position - 1
        count = torch.where(last >= 0, last % options.block_size + 1, 0)[:, None]
        block = last.clamp(min=0) // options.block_size - options.window + 1
        self.pending.copy_(self.summary(block, count, map_keys, options))

    def summary(self, block: Tensor, count: Tensor | int, map_keys: KeyMap, options: WindowedOptions) -> Tensor:
        """Compute the transposed summary [B, G, V + 1, K] of the first `count` tokens of `block` [B], from the ring."""
        place_in_block = torch.arange(options.block_size, device=block.device)
        position = block[:, None] * options.block_size + place_in_block
        rows = torch.arange(len(block), device=block.device)[:, None]
        slot = ring_slot(position, self.k.shape[2], options.sinks)
        is_far = self.valid[rows, slot] & (position >= options.sinks) & (place_in_block < count)
        k, v = (x.transpose(1, 2)[rows, slot] for x in (self.k, self.v))
        k_features = map_keys(k, self.cos_sin[rows, slot])
        k_features = torch.where(is_far[..., None, None], k_features, 0).to(self.running.dtype)
        v = with_ones(torch.where(is_far[..., None, None], v, 0)).to(self.running.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return v.permute(0, 2, 3, 1) @ k_features.transpose(1, 2)


def continue_windowed(
    inputs: WindowedInputs, map_keys: KeyMap, state: WindowedState, *, fresh: bool, cos_sin: Tensor | None = None
) -> Tensor:
    """Compute `windowed_attention` for T new tokens of every row from the state of earlier tokens, and update the state.

    Gradients flow among new tokens, but not through the state; a single token after earlier ones gets none.

    Args:
        inputs: Those of the new tokens; cu_seqlens is ignored.
        map_keys: Computes the features of keys for the far part; see `KeyMap`.
        state: The state; changed in place.
        fresh: Whether the state is empty, so that it need not be read.
        cos_sin: [B, T, 1, A], cosines and sines of the rotation of the keys; None if there is none.

    Returns:
        [B, T, H, V] in v's dtype or, with `options.unrounded`, in at least fp32; zeros for padding.
    """
    q, k, v, q_features, decays, _, options, key_mask, starts, _ = inputs
    if cos_sin is None:
        cos_sin = state.cos_sin.new_zeros(*q.shape[:2], 1, 0)
    if state.cropped:
        state.rewind(decays, map_keys, options)
    if q.shape[1] == 1 and not fresh:
        with torch.autocast(q.device.type, enabled=False):
            return windowed_step(inputs, map_keys, state, cos_sin)
    if fresh and starts is None and key_mask is None and not torch.compiler.is_compiling():
        return attend_from_start(inputs, map_keys, state, cos_sin)
    size, num_tokens, before, num_slots = options.block_size, q.shape[1], state.position.clone(), state.valid.shape[1]
    padding = torch.zeros_like(before) if starts is None else starts.to(q.device)
    num_blocks = (num_tokens + size - 1) // size
    first_block = torch.zeros_like(before)
    if not fresh:  # begin early enough to cover the window of the open block
        num_blocks = num_blocks + options.window
        first_block = ((before - 1).clamp(min=0) // size - options.window + 1).clamp(min=0)
    places = TokenPlaces(before, padding, num_tokens, 0 if fresh else num_slots, num_slots, options.sinks, q.device)
    first = first_block[:, None] * size
    source = places.find(first + torch.arange(num_blocks * size, device=q.device))
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    held = state.k.transpose(1, 2), state.v.transpose(1, 2), state.valid, state.cos_sin
    tokens = [k, v, valid, cos_sin]
    if not fresh:
        tokens = [torch.cat([old, new.to(old.dtype)], 1) for old, new in zip(held, tokens, strict=True)]
    k, v, valid, cos_sin = (take_tokens(x, source) for x in tokens)
    move = TokenMove(*places.move_new(first, num_blocks * size))
    q, q_features = move.move(q, q_features)
    k_features = map_keys(k, cos_sin)
    past = sink_tokens = None
    first_query_block = 0
    if not fresh:
        past = PastSums(state.running.mT, (before - 1).clamp(min=0) // size)
        if q.device.type == "cpu" and not torch.compiler.is_compiling():  # else reading positions would cost more
            first_query_block = int((before // size - first_block).min())
    with torch.no_grad():
        for old, x in zip(held, tokens, strict=True):
            places.write(old, x)
        state.position.add_(num_tokens - padding)
        state.refresh_pending(map_keys, options)
    if not fresh and options.sinks:  # which may be new tokens, written above
        sink_tokens = SinkTokens(*(x[:, None, : options.sinks] for x in held[:3]))
    inputs = inputs._replace(q=q, k=k, v=v, q_features=q_features)
    blocks = first_block[:, None] + torch.arange(num_blocks, device=q.device)
    run = BlockRun(inputs, k_features, blocks, valid, None, sink_tokens, past, first_query_block)
    return move.take_back(attend_and_keep_sums(run, state))


def attend_from_start(inputs: WindowedInputs, map_keys: KeyMap, state: WindowedState, cos_sin: Tensor) -> Tensor:
    """Compute `continue_windowed` for whole sequences, where no token has to be moved."""
    q, k, v, q_features, _, balance, options, *_ = inputs
    num_tokens, size = q.shape[1], options.block_size
    fill_state(k, v, map_keys, state, options, cos_sin)
    first_far, end = far_range(num_tokens, options)
    if balance is not None and not torch.is_grad_enabled():
        if num_tokens <= options.window * size:  # nothing is far
            return causal_softmax(q, k, v, options.scale)
        q_features = q_features[:, first_far - num_tokens + q_features.shape[1] :]  # if it does not begin there already
    end = num_tokens if q_features.shape[1] == num_tokens else end
    k_features = map_keys(k[:, :end], cos_sin[:, :end])
    blocks = torch.arange((num_tokens + size - 1) // size, device=q.device)[None]
    return attend_and_keep_sums(BlockRun(inputs._replace(q_features=q_features), k_features, blocks), state)


def attend_and_keep_sums(run: BlockRun, state: WindowedState) -> Tensor:
    """Compute the outputs of a run [B, T, H, V], and write its running sums into the state, which holds its tokens."""
    with torch.autocast(run.inputs.q.device.type, enabled=False):
        o, running = attend_run(run, (state.position - 1).clamp(min=0) // state.block_size)
    assert running is not None  # `attend_run` returns sums for an end block
    with torch.no_grad():
        state.running.copy_(running.mT)
    return o


@torch.no_grad()
def fill_state(
    k: Tensor, v: Tensor, map_keys: KeyMap, state: WindowedState, options: WindowedOptions, cos_sin: Tensor
) -> None:
    """Put T tokens of every row into an empty state, and sum the pending ones."""
    kept, slots = state.fill(k, v, options.sinks)
    state.cos_sin[:, slots] = cos_sin[:, kept]
    if k.shape[1] > (options.window - 1) * options.block_size:  # else none is pending
        state.refresh_pending(map_keys, options)


@torch.no_grad()
def windowed_step(inputs: WindowedInputs, map_keys: KeyMap, state: WindowedState, cos_sin: Tensor) -> Tensor:
    """Compute `continue_windowed` for one token of every row, [B, 1, H, V] in the dtype of the sums.

    The computation does not depend on positions, so one compiled graph serves all steps. Rows with `starts` of 1 do not take
    part: they get zeros, and the position and the sums of their state stay as they are.
    """
    q, k, v, q_features, decays, _, options, key_mask, starts, _ = inputs
    plan = plan_step(state.position, state.k.shape[2], options)
    rows = torch.arange(len(plan.slot), device=plan.slot.device)
    is_key = torch.ones_like(plan.opens) if key_mask is None else key_mask[:, 0]
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        held[rows, :, plan.slot] = new.masked_fill(~is_key[:, None, None], 0).to(held.dtype)
    state.cos_sin[rows, plan.slot] = cos_sin[:, 0].to(state.cos_sin.dtype)
    state.valid[rows, plan.slot] = is_key
    opens, enters = plan.opens, plan.enters & state.valid[rows, plan.old_slot]
    takes_part = None if starts is None else starts.to(q.device) == 0
    if takes_part is not None:
        opens, enters = opens & takes_part, enters & takes_part

    # At the first token of a block, the sums decay and the pending summary enters.
    opens = opens.view(-1, 1, 1, 1, 1)
    decay = torch.exp(decays.log_rate.to(state.running.dtype))[..., None, None]
    state.running.mul_(torch.where(opens, decay, 1))
    pending = state.pending[:, :, None]
    state.running.addcmul_(torch.where(opens, decay**options.window, 0), pending)
    pending.mul_(~opens)
    old_k, old_v = (x[rows, :, plan.old_slot] for x in (state.k, state.v))
    k_features = map_keys(old_k[:, None], state.cos_sin[rows, plan.old_slot][:, None])[:, 0]
    k_features = k_features.to(state.pending.dtype).masked_fill(~enters[:, None, None], 0)
    state.pending.addcmul_(with_ones(old_v).to(state.pending.dtype)[..., None], k_features[:, :, None])

    mask = make_mask((plan.visible & state.valid)[:, None, None], state.k.dtype)
    o = attend_token(q[:, 0], q_features[:, 0], state.k, state.v, state.running, mask, plan.block, inputs)[:, None]
    state.position.add_(1 if takes_part is None else takes_part)
    return o if takes_part is None else o.masked_fill(~takes_part.view(-1, 1, 1, 1), 0)


class StepPlan(NamedTuple):
    """What one new token per row reads and writes; it depends on positions alone, so layers can share it."""

    slot: Tensor  # int64 [B], the slot of the new token
    old_slot: Tensor  # int64 [B], that of the token `window - 1` blocks before it, which enters the pending summary
    enters: Tensor  # bool [B], whether there is such a token, and it is no sink
    opens: Tensor  # bool [B], whether the new token is the first of a block
    block: Tensor  # int64 [B], the block of the new token
    visible: Tensor  # bool [B, S], the slots that the new token sees, if all hold real tokens


def plan_step(position: Tensor, num_slots: int, options: WindowedOptions) -> StepPlan:
    """Plan the step of the tokens at `position` int64 [B], for a state with `num_slots` slots per row."""
    size, window, sinks = options.block_size, options.window, options.sinks
    old_position = position - (window - 1) * size
    visible = visible_slots(position, num_slots, size, window, sinks)
    slot, old_slot = (ring_slot(x, num_slots, sinks) for x in (position, old_position))
    return StepPlan(slot, old_slot, old_position >= sinks, position % size == 0, position // size, visible)


def attend_token(
    q: Tensor, q_features: Tensor, k: Tensor, v: Tensor, running: Tensor, mask: Tensor, block: Tensor,
    inputs: WindowedInputs,
) -> Tensor:  # fmt: skip
    """Compute the output of one token per row that the state already holds: o [B, H, V] in the dtype of the sums.

    q is [B, H, D], q_features [B, H, K]; k, v, and running are those of a `WindowedState`, the mask [B, 1, 1, S] is from
    `make_mask`, and `block` int64 [B] that of the token. The inputs are read for decays, balance, and options only.
    """
    options, sum_dtype, num_kv_heads = inputs.options, running.dtype, k.shape[1]
    decays = inputs.decays.to(sum_dtype)
    weight = decays.weight  # [H, R], or [B, H, R] with a power
    if decays.power is not None:
        weight = weight * decays.length_scale(block, options.window)[..., None]
    weighted = q_features.to(sum_dtype)[:, :, None] * weight[..., None]  # [B, H, R, K]
    far = weighted.flatten(2).unflatten(1, (num_kv_heads, -1)) @ running.mT.flatten(2, 3)  # [B, G, H / G, V + 1]
    queries = q.unflatten(1, (num_kv_heads, -1))
    if inputs.balance is None:
        near_k, near_v = k.to(sum_dtype), with_ones(v).to(sum_dtype)
        score = (queries.to(sum_dtype) @ near_k.mT).masked_fill(mask != 0, 0)
        total_weight = decays.weight.sum(-1).view(num_kv_heads, -1, 1)
        both = options.scale * (score * total_weight @ near_v + far)
        o = divide_or_zero(both[..., :-1], both[..., -1]) if options.normalize else both[..., :-1]
    else:
        queries = queries.to(k.dtype)
        near, lse = softmax_forward(queries, k, v, mask, options.scale)
        balance = inputs.balance.to(sum_dtype).view(num_kv_heads, -1)
        o, _ = merge_near_and_far(near, lse.to(sum_dtype), far, balance, mask.dtype)
    return o.flatten(1, 2)
