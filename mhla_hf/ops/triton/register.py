"""The Triton implementation: `triton_mhla`, on two `torch.library` operators, forward and backward.

The backward pass recomputes the mixed summaries: only the inputs, the output, and the inverse of the denominator are saved.
Custom operators are opaque to torch.compile, which then needs only one graph for all lengths.
"""

from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from ..inputs import MHLAInputs
from ..namespace import NAMESPACE
from ..reference import divide_or_zero, official_denominator
from ..torch_layout import align_sequences, mixing_of_sequences
from ..torch_operator import RowScaleFree
from .attend import dkdv_kernel, dq_kernel, forward_kernel
from .common import KernelBlocks, blocks_as_numbers, kernel_blocks
from .mix import mix_states, mix_states_grads
from .summaries import summaries
from .tuning import (
    CHUNK,
    INTERPRETED,
    MAX_HEAD_WIDTH,
    TunedKernel,
    contiguous_rows,
    dot_kind,
    mixing_arguments,
    triton,
    with_strides,
)

TRITON_SPACE = f"mhla_{NAMESPACE}"
SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", list[int]: "SymInt[]", int: "SymInt", bool: "bool", float: "float",
    torch.dtype: "ScalarType",
}  # fmt: skip
NUM_TENSORS = 7  # the first fields of `TritonInputs`
LANE_TILES = {"o": "BV", "dq": "BK", "dk": "BK", "dv": "BV"}  # tile sizes along the width of outputs


class TritonInputs(NamedTuple):
    """The arguments of the custom operator `forward`; `backward` takes do, o, and the inverse denominator before them.

    The scale is 1 if `normalize`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixing: Tensor
    key_mask: Tensor | None
    starts: Tensor | None
    edges: Tensor | None  # int32 [M, 2], the first token of each block of packed sequences and the one after its last
    blocks: list[int]  # from `blocks_as_numbers`
    key_blocks: list[int]
    causal: bool
    normalize: bool
    scale: float
    dtype: torch.dtype


def triton_mhla(inputs: MHLAInputs) -> Tensor:
    """Compute `mhla` by Triton kernels, for inputs that `triton_refusal` accepts.

    A denominator with features of its own takes a second call, with ones for values; PyTorch computes the official one.
    """
    q, k, v, mixing, options, q_den, k_den, key_mask, cu_seqlens, starts = inputs
    blocks, causal, normalize = options.blocks, options.causal, options.normalize
    edges = None
    with torch.autocast(q.device.type, enabled=False):
        if cu_seqlens is not None:
            assert blocks.block_size is not None  # causal blocks are those of a sequence
            source, _, block_index, sequence_id = align_sequences(cu_seqlens, q.shape[1], blocks.block_size)
            mixing = mixing_of_sequences(mixing, block_index, sequence_id)
            source = source.view(-1, blocks.block_size)  # [M, C], -1 where a block has no token
            first = source[:, 0].clamp(min=0)
            edges = torch.stack((first, first + (source >= 0).sum(1)), 1).to(torch.int32)
        dtype = torch.float32 if options.unrounded else v.dtype
        if normalize:
            mixing = RowScaleFree.apply(mixing.float(), causal)
        key_mask = None if key_mask is None else key_mask.contiguous()
        starts = None if starts is None else starts.to(q.device).contiguous()
        places = key_mask, starts, edges, blocks_as_numbers(blocks), blocks_as_numbers(options.key_blocks)
        in_kernel, scale = normalize is True and q_den is None, 1.0 if normalize else float(options.scale)
        call = TritonInputs(q, k, v, mixing, *places, causal, in_kernel, scale, dtype)
        if in_kernel or not normalize:
            return TRITON_FORWARD(*call)[0]
        call = call._replace(dtype=torch.float32)
        num = TRITON_FORWARD(*call)[0]
        if q_den is not None and k_den is not None:
            q, k = q_den, k_den
        if normalize == "official":
            k = k if key_mask is None else torch.where(key_mask[:, :, None, None], k, 0)
            return divide_or_zero(num, official_denominator(q, k, mixing, blocks, 1.0)).to(dtype)
        # A width of 16 makes all strides multiples of 16, on which Triton specializes its memory accesses.
        ones = v.new_ones((), dtype=torch.float32).expand(*k.shape[:3], 16)
        den = TRITON_FORWARD(*call._replace(q=q, k=k, v=ones))[0][..., 0]
        return divide_or_zero(num, den).to(dtype)


def triton_refusal(q: Tensor, k: Tensor, v: Tensor, k_den: Tensor | None = None) -> str | None:
    """Return why the kernels cannot run on these tensors, as a clause, or None if they can."""
    if triton is None:
        return "triton is not installed"
    if q.device.type != "cuda" and not INTERPRETED:
        return f"q is on {q.device.type}, where triton runs only with TRITON_INTERPRET=1 set before the import"
    if q.device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_properties(q.device).major < 8:
        return "the GPU is older than sm_80"
    if torch.float64 in (q.dtype, k.dtype, v.dtype):
        return "the kernels compute in fp32, not in fp64"
    widest = max(x.shape[3] for x in (k, v, k_den) if x is not None)
    if widest > MAX_HEAD_WIDTH:
        return f"heads are {widest} wide, and the kernels take at most {MAX_HEAD_WIDTH}"
    return None


class KernelCall:
    """Holds what the kernels of one forward or backward pass share, and launches those of `attend.py`."""

    def __init__(self, inputs: TritonInputs):
        self.q, self.k, self.v = (contiguous_rows(x) for x in inputs[:3])
        self.query_blocks = kernel_blocks(inputs.blocks, self.q.device, inputs.starts, inputs.edges)
        same_blocks = inputs.key_blocks == inputs.blocks
        self.key_blocks = self.query_blocks if same_blocks else kernel_blocks(inputs.key_blocks, self.q.device)
        self.mixing = contiguous_rows(inputs.mixing.float())
        self.has_starts = inputs.starts is not None
        self.num_chunks = triton.cdiv(self.key_blocks.span, CHUNK) if inputs.causal else None
        # Query heads that share both a KV head and the mixing matrix read the same mixed summaries (states).
        num_heads, num_kv_heads = self.q.shape[2], self.k.shape[2]
        self.num_state_heads = num_heads if self.mixing.dim() == 3 else num_kv_heads
        self.queries_per_state = num_heads // self.num_state_heads
        self.dot_as = dot_kind(self.q, self.k, self.v)
        self.arguments = {
            **mixing_arguments(self.mixing),
            "q": with_strides(self.q),
            "k": with_strides(self.k),
            "v": with_strides(self.v),
            "key_mask": inputs.key_mask,
            "queries_per_kv": num_heads // num_kv_heads,
            "scale": inputs.scale,
            "K": self.q.shape[3],
            "V": self.v.shape[3],
            "CAUSAL": inputs.causal,
            "DOT": self.dot_as,
        }

    def read_keys(self, inputs: TritonInputs) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
        """Compute the summaries S and z of the keys, and the arguments of a kernel that reads their mixture."""
        options = self.dot_as, self.k.shape[2], inputs.causal, inputs.normalize
        s, z = summaries(self.k, self.v, self.key_blocks, *options, key_mask=inputs.key_mask)
        sizes = self.num_state_heads, self.num_chunks
        states, states_z = (None if x is None else mix_states(self.mixing, x, *sizes) for x in (s, z))
        return s, z, {"states": states, "states_z": states_z, "queries_per_state": self.queries_per_state}

    def launch(self, kernel: TunedKernel, blocks: KernelBlocks, outputs: dict[str, Tensor], **arguments: Any) -> None:
        """Launch a kernel for the tokens of `blocks`; `outputs` are [B, T, heads, width] tensors by parameter name."""
        batch, _, num_heads, _ = next(iter(outputs.values())).shape

        def grid(sizes: dict[str, int]) -> tuple[int]:
            lane_tiles = max(triton.cdiv(x.shape[3], sizes[LANE_TILES[name]]) for name, x in outputs.items())
            return (lane_tiles * triton.cdiv(blocks.span, sizes["BT"]) * blocks.num_blocks * num_heads * batch,)

        kernel[grid](
            **{name: with_strides(x) for name, x in outputs.items()},
            **self.arguments,
            **arguments,
            **blocks.arguments(),
            span=blocks.span,
            num_heads=num_heads,
        )

    def allocate(self, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an output: zeros if there are `starts`, because kernels do not write tokens before them."""
        make = torch.zeros if self.has_starts else torch.empty
        return make(shape or like.shape, dtype=dtype or like.dtype, device=like.device)


def triton_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Implement `TRITON_FORWARD`: o [B, T, H, V] in `dtype`, and the inverse of the denominator, fp32 [B, T, H] or empty."""
    inputs = TritonInputs(*arguments)
    q, v = inputs.q, inputs.v
    with torch.cuda.device_of(q), torch.autocast(q.device.type, enabled=False):
        call = KernelCall(inputs)
        *_, read = call.read_keys(inputs)
        o = call.allocate(v, *q.shape[:3], v.shape[3], dtype=inputs.dtype)
        inv = call.allocate(q, *q.shape[:3], dtype=torch.float32) if inputs.normalize else None
        call.launch(forward_kernel, call.query_blocks, {"o": o}, inv=inv, **read)
    return o, q.new_empty(0, dtype=torch.float32) if inv is None else inv


def triton_backward(do: Tensor, o: Tensor, inv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """Implement `TRITON_BACKWARD`: the gradients of q, k, v, and mixing."""
    inputs = TritonInputs(*arguments)
    causal, normalize, do = inputs.causal, inputs.normalize, contiguous_rows(do)
    inv = inv if normalize else None
    with torch.cuda.device_of(do), torch.autocast(do.device.type, enabled=False):
        call = KernelCall(inputs)
        q, k, v, mixing, num_chunks = call.q, call.k, call.v, call.mixing, call.num_chunks
        s, z, read = call.read_keys(inputs)
        dq, dk, dv = (call.allocate(x) for x in (q, k, v))
        r = None if inv is None else torch.empty_like(inv)
        diagonal_grad = None
        if causal:  # [B, H, M * chunks, K]
            diagonal_grad = q.new_empty(q.shape[0], q.shape[2], s.shape[2], q.shape[3], dtype=torch.float32)
        grads = {"do": with_strides(do), "inv": inv, "r": r}
        result = {"o": with_strides(o) if normalize else None, "diagonal_grad": diagonal_grad}
        call.launch(dq_kernel, call.query_blocks, {"dq": dq}, **grads, **read, **result)
        # The gradients of the states are summaries of q and do, since o = q P.
        options = call.dot_as, call.num_state_heads, causal, normalize
        dstates, dstates_z = summaries(q, do, call.query_blocks, *options, v_factor=inv, z_factor=r)
        ds = mix_states(mixing, dstates, k.shape[2], num_chunks, transposed=True)
        dz = None if dstates_z is None else mix_states(mixing, dstates_z, k.shape[2], num_chunks, transposed=True)
        call.launch(dkdv_kernel, call.key_blocks, {"dk": dk, "dv": dv}, **grads, dstates=ds, dstates_z=dz)
        dmixing = mix_states_grads(dstates, s, mixing.dim(), num_chunks)
        if dstates_z is not None and z is not None:
            dmixing = dmixing + mix_states_grads(dstates_z, z, mixing.dim(), num_chunks)
        if diagonal_grad is not None:
            diagonal_grad = diagonal_grad.unflatten(2, (-1, num_chunks)).sum((0, 3, 4))  # [H, M]
            dmixing = dmixing + torch.diag_embed(diagonal_grad if mixing.dim() == 3 else diagonal_grad.sum(0))
    return dq, dk, dv, (dmixing * inputs.scale).to(inputs.mixing.dtype)


def triton_forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = TritonInputs(*arguments)
    q, v = inputs.q, inputs.v
    inv = q.new_empty(q.shape[:3] if inputs.normalize else (0,), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=inputs.dtype), inv


def triton_backward_fake(do: Tensor, o: Tensor, inv: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in TritonInputs(*arguments)[:4])


def save_for_triton_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    o, inv = output
    tensors, ctx.options = inputs[:NUM_TENSORS], inputs[NUM_TENSORS:]
    ctx.save_for_backward(o if TritonInputs(*inputs).normalize else inv, inv, *tensors)


def triton_gradients(ctx: Any, do: Tensor, inv_grad: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the inputs of `TRITON_FORWARD`; `inv_grad` is ignored, because no caller uses inv."""
    grads = TRITON_BACKWARD(do, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None for _ in TritonInputs._fields[4:]]


def register_operators() -> tuple[Any, Any]:
    """Return the custom operators `forward` and `backward`; register them unless another copy of this file already has."""
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, "forward"):
        # the fields of `TritonInputs` in torch's notation
        fields = ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(TritonInputs).items())
        schema = f"({fields}) -> (Tensor, Tensor)"
        forward = torch.library.custom_op(f"{TRITON_SPACE}::forward", triton_forward, mutates_args=(), schema=schema)
        forward.register_fake(triton_forward_fake)
        forward.register_autograd(triton_gradients, setup_context=save_for_triton_backward)
        schema = f"(Tensor do, Tensor o, Tensor inv, {fields}) -> (Tensor, Tensor, Tensor, Tensor)"
        backward = torch.library.custom_op(f"{TRITON_SPACE}::backward", triton_backward, mutates_args=(), schema=schema)
        backward.register_fake(triton_backward_fake)
    return space.forward, space.backward


TRITON_FORWARD, TRITON_BACKWARD = register_operators()
