"""The Triton implementation as two `torch.library` operators, forward and backward, and `triton_mhla` on top of them.

The forward pass computes summaries of keys and values, mixes them, and computes the outputs. The backward pass computes the
first two again, so that only the inputs, the output, and the inverse of the denominator are saved, and then the gradients.

Custom operators are opaque to torch.compile, which then needs only one graph for all lengths. Their namespace carries
NAMESPACE, so that bundles of different versions never collide; a second copy of the same version uses the operators that
the first one registered.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch

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
    num_tiles,
    on_device,
    triton,
    with_strides,
)

TRITON_SPACE = f"mhla_{NAMESPACE}"
SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[int]: "SymInt[]",
    int: "SymInt",
    bool: "bool",
    float: "float",
    torch.dtype: "ScalarType",
}
NUM_TENSORS = 7  # the first fields of `TritonInputs`
LANE_TILES = {"o": "BV", "dq": "BK", "dk": "BK", "dv": "BV"}  # the tile size along the width of each output


class TritonInputs(NamedTuple):
    """The arguments of the custom operators `forward` and, after do, o, and inv, `backward`.

    Args:
        q, k, v, mixing, key_mask, starts, causal: As in `MHLAInputs` and `MHLAOptions`.
        edges: int32 [M, 2], the first token of each block and the one after its last, for packed sequences.
        blocks, key_blocks: From `blocks_as_numbers`.
        normalize: Whether to divide by the sum of the weights.
        scale: Multiplier of the outputs; must be 1 if `normalize`.
        dtype: Dtype of the outputs.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mixing: torch.Tensor
    key_mask: torch.Tensor | None
    starts: torch.Tensor | None
    edges: torch.Tensor | None
    blocks: list[int]
    key_blocks: list[int]
    causal: bool
    normalize: bool
    scale: float
    dtype: torch.dtype


def triton_mhla(inputs: MHLAInputs) -> torch.Tensor:
    """Compute `mhla` by Triton kernels, on inputs that `triton_refusal` accepts.

    A denominator with features of its own takes a second call of the operator, with ones for values. The official
    denominator is computed in PyTorch.

    Returns:
        [B, T, H, V] in v's dtype, or in fp32 if `unrounded`.
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
        call = TritonInputs(
            q,
            k,
            v,
            mixing,
            None if key_mask is None else key_mask.contiguous(),
            None if starts is None else starts.to(q.device).contiguous(),
            edges,
            blocks_as_numbers(blocks),
            blocks_as_numbers(options.key_blocks),
            causal,
            normalize=normalize is True and q_den is None,
            scale=1.0 if normalize else float(options.scale),
            dtype=dtype,
        )
        if call.normalize or not normalize:
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


def triton_refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_den: torch.Tensor | None = None) -> str | None:
    """Return why the kernels cannot run on these tensors, as a clause without a period; None if they can."""
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
    """Holds what the kernels of one forward or backward pass share, and launches the kernels.

    Args:
        inputs: The arguments of the operator. The last axes of q, k, and v must be contiguous.
    """

    def __init__(self, inputs: TritonInputs):
        q, k, v, mixing = inputs[:4]
        self.query_blocks = kernel_blocks(inputs.blocks, q.device, inputs.starts, inputs.edges)
        same_blocks = inputs.key_blocks == inputs.blocks
        self.key_blocks = self.query_blocks if same_blocks else kernel_blocks(inputs.key_blocks, q.device)
        self.mixing = contiguous_rows(mixing.float())
        self.key_mask = inputs.key_mask
        self.scale = inputs.scale
        self.has_starts = inputs.starts is not None
        self.dot_as = dot_kind(q, k, v)
        self.constants = {"K": q.shape[3], "V": v.shape[3], "CAUSAL": inputs.causal, "DOT": self.dot_as}
        self.group = q.shape[2] // k.shape[2]
        self.num_chunks = num_tiles(self.key_blocks.span, CHUNK) if inputs.causal else None
        # Query heads that share both a KV head and the mixing matrix read the same state.
        self.num_state_heads = q.shape[2] if mixing.dim() == 3 else k.shape[2]
        self.share = q.shape[2] // self.num_state_heads

    def launch(
        self, kernel: TunedKernel, blocks: KernelBlocks, outputs: dict[str, torch.Tensor], **arguments: Any
    ) -> None:
        """Launch a kernel of `attend.py`; it writes its results to `outputs`.

        Args:
            kernel: The kernel.
            blocks: The blocks of the tokens for which it computes outputs.
            outputs: Output tensors [B, T, heads, width] by parameter name.
            **arguments: The kernel's arguments that this `KernelCall` does not hold.
        """
        batch, _, num_heads, _ = next(iter(outputs.values())).shape

        def grid(sizes: dict[str, int]) -> tuple[int]:
            lane_tiles = max(num_tiles(x.shape[3], sizes[LANE_TILES[name]]) for name, x in outputs.items())
            return (lane_tiles * num_tiles(blocks.span, sizes["BT"]) * blocks.num_blocks * num_heads * batch,)

        kernel[grid](
            **arguments,
            **{name: with_strides(x) for name, x in outputs.items()},
            **mixing_arguments(self.mixing),
            key_mask=self.key_mask,
            tables=blocks.tables,
            num_tokens=blocks.num_tokens,
            block_size=blocks.block_size,
            span=blocks.span,
            num_blocks=blocks.num_blocks,
            num_heads=num_heads,
            group=self.group,
            scale=self.scale,
            **self.constants,
        )

    def allocate(self, like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate an output on the device of `like`, with the shape and dtype of `like` unless others are given.

        The output is zeroed if the call has `starts`, because kernels do not write tokens before them.
        """
        make = torch.zeros if self.has_starts else torch.empty
        return make(shape or like.shape, dtype=dtype or like.dtype, device=like.device)

    def mixing_grad(
        self,
        s: torch.Tensor,
        z: torch.Tensor | None,
        dstates: torch.Tensor,
        dstates_z: torch.Tensor | None,
        diagonal_grad: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the gradient of the mixing matrix.

        Args:
            s, z: Summaries of keys and values, from `summaries`; z and dstates_z are None if not normalized.
            dstates, dstates_z: The gradients of the mixed summaries, also from `summaries`.
            diagonal_grad: [B, H, M * chunks, K], written by `dq_kernel`; None if not causal.

        Returns:
            fp32 [Mq, Mk] or [H, Mq, Mk], not yet multiplied by `scale`.
        """
        grad = mix_states_grads(dstates, s, self.mixing.dim(), self.num_chunks)
        if dstates_z is not None and z is not None:
            grad = grad + mix_states_grads(dstates_z, z, self.mixing.dim(), self.num_chunks)
        if diagonal_grad is not None:
            diagonal_grad = diagonal_grad.unflatten(2, (-1, self.num_chunks)).sum((0, 3, 4))  # [H, M]
            grad = grad + torch.diag_embed(diagonal_grad if self.mixing.dim() == 3 else diagonal_grad.sum(0))
        return grad


def triton_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Implement the custom operator `TRITON_FORWARD` with the arguments of `TritonInputs`, which computes the forward pass.

    Returns:
        o: [B, T, H, V] in `dtype`.
        inv: fp32 [B, T, H], the inverse of the denominator; empty if not normalized.
    """
    inputs = TritonInputs(*arguments)
    q, k, v = (contiguous_rows(x) for x in inputs[:3])
    with on_device(q), torch.autocast(q.device.type, enabled=False):
        call = KernelCall(inputs._replace(q=q, k=k, v=v))
        s, z = summaries(
            k,
            v,
            call.key_blocks,
            call.dot_as,
            num_heads=k.shape[2],
            causal=inputs.causal,
            with_z=inputs.normalize,
            key_mask=inputs.key_mask,
        )
        states = mix_states(call.mixing, s, call.num_state_heads, call.num_chunks)
        states_z = None if z is None else mix_states(call.mixing, z, call.num_state_heads, call.num_chunks)
        o = call.allocate(v, *q.shape[:3], v.shape[3], dtype=inputs.dtype)
        inv = call.allocate(q, *q.shape[:3], dtype=torch.float32) if inputs.normalize else None
        call.launch(
            forward_kernel,
            call.query_blocks,
            {"o": o},
            q=with_strides(q),
            k=with_strides(k),
            v=with_strides(v),
            states=states,
            states_z=states_z,
            inv=inv,
            share=call.share,
        )
    return o, q.new_empty(0, dtype=torch.float32) if inv is None else inv


def triton_backward(
    do: torch.Tensor, o: torch.Tensor, inv: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement the custom operator `TRITON_BACKWARD`, which computes the backward pass.

    Args:
        do: [B, T, H, V], the gradient of the output.
        o, inv: Results of `triton_forward`; ignored if not normalized.
        *arguments: The arguments of `TritonInputs`.

    Returns:
        The gradients of q, k, v, and mixing, each with the shape and dtype of its input.
    """
    inputs = TritonInputs(*arguments)
    do, q, k, v = (contiguous_rows(x) for x in (do, *inputs[:3]))
    causal, normalize = inputs.causal, inputs.normalize
    inv = inv if normalize else None
    with on_device(q), torch.autocast(q.device.type, enabled=False):
        call = KernelCall(inputs._replace(q=q, k=k, v=v))
        s, z = summaries(
            k,
            v,
            call.key_blocks,
            call.dot_as,
            num_heads=k.shape[2],
            causal=inputs.causal,
            with_z=inputs.normalize,
            key_mask=inputs.key_mask,
        )
        states = mix_states(call.mixing, s, call.num_state_heads, call.num_chunks)
        states_z = None if z is None else mix_states(call.mixing, z, call.num_state_heads, call.num_chunks)
        dq, dk, dv = (call.allocate(x) for x in (q, k, v))
        r = None if inv is None else torch.empty_like(inv)
        diagonal_grad = None
        if causal:
            shape = q.shape[0], q.shape[2], s.shape[2], q.shape[3]
            diagonal_grad = torch.empty(shape, dtype=torch.float32, device=q.device)
        tokens = {"q": with_strides(q), "k": with_strides(k), "v": with_strides(v), "do": with_strides(do)}
        call.launch(
            dq_kernel,
            call.query_blocks,
            {"dq": dq},
            **tokens,
            o=with_strides(o) if normalize else None,
            inv=inv,
            states=states,
            states_z=states_z,
            r=r,
            diagonal_grad=diagonal_grad,
            share=call.share,
        )
        # The gradients of the states are summaries of q and do, since o = q P.
        dstates, dstates_z = summaries(
            q,
            do,
            call.query_blocks,
            call.dot_as,
            num_heads=call.num_state_heads,
            causal=causal,
            with_z=normalize,
            v_factor=inv,
            z_factor=r,
        )
        dsummaries = mix_states(call.mixing, dstates, k.shape[2], call.num_chunks, transposed=True)
        dsummaries_z = None
        if dstates_z is not None:
            dsummaries_z = mix_states(call.mixing, dstates_z, k.shape[2], call.num_chunks, transposed=True)
        call.launch(
            dkdv_kernel,
            call.key_blocks,
            {"dk": dk, "dv": dv},
            **tokens,
            inv=inv,
            r=r,
            dstates=dsummaries,
            dstates_z=dsummaries_z,
        )
        dmixing = call.mixing_grad(s, z, dstates, dstates_z, diagonal_grad) * inputs.scale
    return dq, dk, dv, dmixing.to(inputs.mixing.dtype)


def triton_forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors with the shapes and dtypes of `triton_forward`, for tracing."""
    inputs = TritonInputs(*arguments)
    q, v = inputs.q, inputs.v
    inv = q.new_empty(q.shape[:3] if inputs.normalize else (0,), dtype=torch.float32)
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=inputs.dtype), inv


def triton_backward_fake(
    do: torch.Tensor, o: torch.Tensor, inv: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Return tensors with the shapes and dtypes of `triton_backward`, for tracing."""
    return tuple(x.new_empty(x.shape) for x in TritonInputs(*arguments)[:4])


def save_for_triton_backward(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the inputs of `triton_forward` in `ctx`, and its outputs if they are normalized, for the backward pass."""
    o, inv = output
    tensors, ctx.options = inputs[:NUM_TENSORS], inputs[NUM_TENSORS:]
    ctx.save_for_backward(o if TritonInputs(*inputs).normalize else inv, inv, *tensors)


def triton_gradients(ctx: Any, do: torch.Tensor, inv_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Autograd formula of `TRITON_FORWARD`: compute the gradients of q, k, v, and mixing by `TRITON_BACKWARD`.

    `inv_grad` is ignored, because inv is internal.
    """
    grads = TRITON_BACKWARD(do, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None for _ in TritonInputs._fields[4:]]


def register_operator(
    name: str,
    schema: str,
    function: Callable,
    fake: Callable,
    gradients: Callable | None = None,
    setup_context: Callable | None = None,
) -> Any:
    """Register a custom operator in the namespace `TRITON_SPACE`, unless an equal copy of this file already has.

    Args:
        name: Name in the namespace `TRITON_SPACE`.
        schema: Schema of the operator, as `torch.library.custom_op` takes it.
        function: The implementation.
        fake: The implementation for tracing.
        gradients: The autograd formula; None if the operator is not differentiable.
        setup_context: Saves what `gradients` reads.

    Returns:
        The registered operator.
    """
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, name):
        operator = torch.library.custom_op(f"{TRITON_SPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if gradients is not None:
            operator.register_autograd(gradients, setup_context=setup_context)
    return getattr(space, name)


def operator_schema(record: Any) -> str:
    """Return the parameters of a custom operator whose arguments are the fields of a NamedTuple, in torch's notation."""
    return ", ".join(f"{SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(record).items())


TRITON_SCHEMA = operator_schema(TritonInputs)
TRITON_BACKWARD = register_operator(
    "backward",
    f"(Tensor do, Tensor o, Tensor inv, {TRITON_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    triton_backward,
    triton_backward_fake,
)
TRITON_FORWARD = register_operator(
    "forward",
    f"({TRITON_SCHEMA}) -> (Tensor, Tensor)",
    triton_forward,
    triton_forward_fake,
    triton_gradients,
    save_for_triton_backward,
)
