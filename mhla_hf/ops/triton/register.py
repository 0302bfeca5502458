"""The Triton form as two `torch.library` operators, forward and backward, and `triton_mhla` in front of them.

Forward: summaries of keys and values, their mixture, outputs. Backward: both are computed again, so that only inputs, output
and one over the denominator are kept; then the gradients. As custom operators they are opaque to torch.compile, which then
needs one graph for all lengths. Their namespace carries NAMESPACE, so that bundles of different versions never meet; a
second copy of the same version uses the first one's.
"""

import torch

from ..namespace import NAMESPACE
from ..reference import divide_or_zero, official_denominator
from ..torch_layout import align_sequences, mixing_of_sequences
from ..torch_operator import RowScaleFree
from .attend import dkdv_kernel, dq_kernel, forward_kernel
from .common import cut_of, spell
from .mix import mix_states, mix_states_grads
from .summaries import summaries
from .tuning import CHUNK, INTERPRETED, WIDEST, as_argument, as_matrix, dot_kind, in_rows, on_device, tiles, triton

TRITON_SPACE = f"mhla_{NAMESPACE}"
TRITON_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor mixing, Tensor? key_mask, Tensor? starts, Tensor? edges, SymInt[] cut, "
    "SymInt[] key_cut, bool causal, bool normalize, float scale, ScalarType dtype)"
)


def triton_mhla(
    q, k, v, mixing, *, blocks, key_blocks=None, causal=False, normalize=True, scale=None, q_den=None, k_den=None,
    key_mask=None, cu_seqlens=None, starts=None, unrounded=False,
):  # fmt: skip
    """o [B, T, H, V] in v's dtype (fp32 if unrounded); arguments as in `mhla`, checked, and let pass by `triton_refusal`.

    A denominator of other features than the numerator's is a call of its own with ones for values; the official one is
    PyTorch's.
    """
    cut = spell(blocks)
    key_cut = cut if key_blocks is None else spell(key_blocks)
    with torch.autocast(q.device.type, enabled=False):
        edges = None
        if cu_seqlens is not None:
            source, _, *places = align_sequences(cu_seqlens, q.shape[1], blocks.block_size)
            mixing, source = mixing_of_sequences(mixing, *places), source.view(-1, blocks.block_size)
            first = source[:, 0].clamp(min=0)
            edges = torch.stack((first, first + (source >= 0).sum(1)), 1).to(torch.int32)
        elif causal:
            mixing = mixing[..., : blocks.num_blocks, : blocks.num_blocks]
        starts = None if starts is None else starts.to(q.device).contiguous()
        dtype = torch.float32 if unrounded else v.dtype
        where = None if key_mask is None else key_mask.contiguous(), starts, edges, cut, key_cut, causal
        if not normalize:
            scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
            return TRITON_FORWARD(q, k, v, mixing, *where, False, scale, dtype)[0]
        mixing = RowScaleFree.apply(mixing, causal)
        if normalize is True and q_den is None:
            return TRITON_FORWARD(q, k, v, mixing, *where, True, 1.0, dtype)[0]
        num = TRITON_FORWARD(q, k, v, mixing, *where, False, 1.0, torch.float32)[0]
        q, k = (q, k) if q_den is None else (q_den, k_den)
        if normalize == "official":
            k = k if key_mask is None else torch.where(key_mask[:, :, None, None], k, 0)
            return divide_or_zero(num, official_denominator(q, k, mixing.float(), blocks, 1.0)).to(dtype)
        ones = v.new_ones((), dtype=torch.float32).expand(*k.shape[:3], 16)  # a width whose strides 16 divides
        den = TRITON_FORWARD(q, k, ones, mixing, *where, False, 1.0, torch.float32)[0][..., 0]
        return divide_or_zero(num, den).to(dtype)


def triton_refusal(q, k, v, k_den=None):
    """Why these tensors cannot go through the kernels, as the end of a sentence; None if they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"q is on {q.device.type}, where triton runs only with TRITON_INTERPRET=1 set before the import"
    if q.device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_properties(q.device).major < 8:
        return "the GPU is older than sm_80"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "the kernels compute in fp32, not in fp64"
    widest = max(x.shape[3] for x in (k, v, k_den) if x is not None)
    if widest > WIDEST:
        return f"heads are {widest} wide, more than {WIDEST}"
    return None


class Call:
    """One call of either operator: what they share. Arguments as in TRITON_SCHEMA."""

    def __init__(self, q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale):
        self.rows = cut_of(cut, q.device, starts, edges)
        self.columns = self.rows if key_cut == cut else cut_of(key_cut, q.device)
        self.mixing, self.padded, self.dot_as = in_rows(mixing.float()), starts is not None, dot_kind(q, k, v)
        self.constants = {"K": q.shape[3], "V": v.shape[3], "CAUSAL": causal, "DOT": self.dot_as}
        self.key_mask, self.scale, self.group = key_mask, scale, q.shape[2] // k.shape[2]
        self.chunks = tiles(self.columns.span, CHUNK) if causal else None
        self.sums = {"causal": causal, "with_z": normalize}
        self.s = summaries(k, v, self.columns, self.dot_as, heads=k.shape[2], key_mask=key_mask, **self.sums)
        self.state_heads = q.shape[2] if mixing.dim() == 3 else k.shape[2]
        self.states = self.mix(self.s, self.state_heads)

    def mix(self, sums, heads, transposed=False):
        """`mix_states` of summaries and of their z, which may be None."""
        mixed = {"heads": heads, "chunks": self.chunks, "transposed": transposed}
        return [None if s is None else mix_states(self.mixing, s, **mixed) for s in sums]

    def launch(self, kernel, arguments, results, cut, *shares):
        """Start a kernel for results [B, T, heads, W], by the name of the tile of W, on the tokens of `cut`."""
        batch, _, heads, _ = next(iter(results.values())).shape
        count = cut.blocks * heads * batch

        def grid(sizes):
            lanes = max(tiles(x.shape[3], sizes[tile]) for tile, x in results.items())
            return (lanes * tiles(cut.span, sizes["BT"]) * count,)

        place = self.key_mask, cut.places, cut.tokens, cut.size, cut.span, cut.blocks, heads
        arguments = (
            *arguments,
            *map(as_argument, results.values()),
            *as_matrix(self.mixing),
            *place,
            *shares,
            self.scale,
        )
        kernel.launch(grid, arguments, self.constants)

    def room(self, x, *shape, dtype=None):
        """Memory for a result; zeros where tokens before `starts` are written by no block."""
        make = torch.zeros if self.padded else torch.empty
        return make(shape or x.shape, dtype=dtype or x.dtype, device=x.device)

    def mixing_grad(self, dstates, dm_own):
        """The gradient of the mixing, from those of states and, causal, dm_own [B, H, M * chunks, K] from within chunks."""
        pairs = zip(dstates, self.s, strict=True)
        dm = sum(mix_states_grads(dp, s, self.mixing.shape, self.chunks) for dp, s in pairs if s is not None)
        if dm_own is not None:
            own = dm_own.unflatten(2, (-1, self.chunks)).sum((0, 3, 4))
            dm = dm + torch.diag_embed(own if self.mixing.dim() == 3 else own.sum(0))
        return dm


def triton_forward(q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, dtype):
    """o [B, T, H, V] in `dtype`, and one over the denominator, fp32 [B, T, H] (empty if not normalized)."""
    q, k, v = (in_rows(x) for x in (q, k, v))
    with on_device(q), torch.autocast(q.device.type, enabled=False):
        call = Call(q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale)
        o = call.room(v, *q.shape[:3], v.shape[3], dtype=dtype)
        inv = call.room(q, *q.shape[:3], dtype=torch.float32) if normalize else None
        given = *map(as_argument, (q, k, v)), *call.states, inv
        call.launch(forward_kernel, given, {"BV": o}, call.rows, call.group, q.shape[2] // call.state_heads)
    return o, q.new_empty(0, dtype=torch.float32) if inv is None else inv


def triton_backward(
    do, o, inv, q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, dtype
):
    """Gradients of q, k, v and mixing."""
    do, q, k, v = (in_rows(x) for x in (do, q, k, v))
    with on_device(q), torch.autocast(q.device.type, enabled=False):
        call = Call(q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale)
        dq, dk, dv = (call.room(x) for x in (q, k, v))
        inv, r = (inv, torch.empty_like(inv)) if normalize else (None, None)
        shape = q.shape[0], q.shape[2], call.s[0].shape[2], q.shape[3]
        dm_own = torch.empty(shape, dtype=torch.float32, device=q.device) if causal else None
        tokens = *map(as_argument, (q, k, v, do)), as_argument(o) if normalize else None
        given = *tokens, inv, *call.states, r, dm_own
        call.launch(dq_kernel, given, {"BK": dq}, call.rows, call.group, q.shape[2] // call.state_heads)
        dstates = summaries(q, do, call.rows, call.dot_as, heads=call.state_heads, inv=inv, r=r, **call.sums)
        dsums = call.mix(dstates, k.shape[2], transposed=True)
        call.launch(dkdv_kernel, (*tokens[:4], inv, r, *dsums), {"BK": dk, "BV": dv}, call.columns, call.group)
        dm = call.mixing_grad(dstates, dm_own) * scale
    return dq, dk, dv, dm.to(mixing.dtype)


def triton_forward_fake(q, k, v, mixing, key_mask, starts, edges, cut, key_cut, causal, normalize, scale, dtype):
    """The shapes of `triton_forward`."""
    inv = q.new_empty(q.shape[:3] if normalize else (0,), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype), inv


def triton_backward_fake(do, o, inv, q, k, v, mixing, key_mask, starts, edges, cut, key_cut, *options):
    """The shapes of `triton_backward`."""
    return tuple(x.new_empty(x.shape) for x in (q, k, v, mixing))


def keep_for_backward(ctx, inputs, output):
    """What the backward pass reads: the inputs, and where normalized the output and one over its denominator."""
    o, inv = output
    ctx.save_for_backward(o if inputs[10] else inv, inv, *inputs[:7])
    ctx.options = inputs[7:]


def triton_gradients(ctx, do, _):
    """The autograd formula of `triton_forward`."""
    return *TRITON_BACKWARD(do, *ctx.saved_tensors, *ctx.options), *[None] * 9


def registered_operator(name, schema, function, fake, gradients=None, keep=None):
    """The operator of that name in this version's namespace, registered unless an equal copy of this file has done so."""
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, name):
        operator = torch.library.custom_op(f"{TRITON_SPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if gradients is not None:
            operator.register_autograd(gradients, setup_context=keep)
    return getattr(space, name)


BACKWARD_SCHEMA = f"(Tensor do, Tensor o, Tensor inv, {TRITON_SCHEMA} -> (Tensor, Tensor, Tensor, Tensor)"
FORWARD_SCHEMA = f"({TRITON_SCHEMA} -> (Tensor, Tensor)"
TRITON_BACKWARD = registered_operator("backward", BACKWARD_SCHEMA, triton_backward, triton_backward_fake)
TRITON_FORWARD = registered_operator(
    "forward", FORWARD_SCHEMA, triton_forward, triton_forward_fake, triton_gradients, keep_for_backward
)
