"""MHLA, multi-head linear attention (arXiv 2601.07832): mhla_hf.models.converted_local in one file.

Folded from the source of mhla_hf for loading with trust_remote_code=True; needs no mhla_hf.
Change the package, not this file. License of the code: Apache-2.0.

format: 1
entry: models.converted_local
made by mhla_hf: 0.1.0
sha256: 75a40649d7d1
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import partial
from math import log
from math import prod
from pathlib import Path
from typing import Any
from typing import NamedTuple
from typing import no_type_check
import copy
import functools
import inspect
import logging
import os
import re
import sys
import types
import warnings

from safetensors import SafetensorError
from safetensors import safe_open
from torch import nn
from transformers.cache_utils import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.cache_utils import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.cache_utils import StaticLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.initialization import copy_
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
import torch
import torch.nn.functional as F
import transformers


# mhla_hf/ops/decays.py

SCAN_GROUP = 8  # blocks per group of the two-level scan; blocks before a group arrive as one running sum


@dataclass
class Decays:
    """R exponential decays per head, which together stand for a mixing matrix.

    Query heads that share a KV head also share its rates, and so its running sums: query head h uses the rates of KV head
    h // (H // G).

    Args:
        weight: [H, R], the weights w of the query heads.
        log_rate: [G, R], log(lambda) of the KV heads, at most 0.
        power: [H] or None. If set, the weights of a query block are divided by n^power, where n is the number of blocks
            that are far from it. The sum over n blocks of features grows with n, while the sum of a softmax hardly does.
    """

    weight: torch.Tensor
    log_rate: torch.Tensor
    power: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Decays":
        """Return the same decays in another dtype."""
        power = None if self.power is None else self.power.to(dtype)
        return Decays(self.weight.to(dtype), self.log_rate.to(dtype), power)

    def matrix(self, num_blocks: int, lag: int = 1) -> torch.Tensor:
        """Materialize the mixing matrix, as the reference implementation and plots need it.

        Args:
            num_blocks: Number of rows and columns, M.
            lag: The smallest block distance that counts as far; matters only with a `power`.

        Returns:
            [H, M, M], lower triangular.
        """
        log_rate = self.log_rate.repeat_interleave(len(self.weight) // len(self.log_rate), 0)
        power = powers(log_rate, block_distances(num_blocks, log_rate).clamp(min=0))  # [H, R, M, M]
        matrix = (self.weight[..., None, None] * power).sum(1).tril()
        block = torch.arange(num_blocks, device=matrix.device)
        return matrix if self.power is None else matrix * self.length_scale(block, lag).T[..., None]

    def length_scale(self, block: torch.Tensor, lag: int) -> torch.Tensor:
        """Return n^-power for query blocks with these indices, int of any shape -> [.., H]; needs a `power`."""
        assert self.power is not None
        num_far = (block - lag + 1).clamp(min=1)
        return torch.exp(-self.power * num_far.to(self.power.dtype).log()[..., None])


@dataclass(frozen=True)
class LocalForm:
    """The options of near and far attention that are fixed for a layer; `local.py` has the formula.

    Args:
        block_size: Tokens per block, C.
        lag: Blocks in the window, the open block included: block i - lag is the nearest one that is far from block i.
        sinks: Number of tokens at the start of a sequence that are always near; 0 without a softmax.
        scale: Factor of q k^T.
        normalize: Whether outputs are divided by the sum of the weights.
        impl: "auto", "torch" or "triton", as in `mhla`. A single token after a state always takes "torch".
        unrounded: Whether outputs stay in the dtype of the sums. Otherwise the Triton kernel writes them in v's dtype.
    """

    block_size: int
    lag: int = 2
    sinks: int = 4
    scale: float = 1.0
    normalize: bool = True
    impl: str = "auto"
    unrounded: bool = True


def expand_query_features(q_features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply query features by the weight of each decay, so that one matmul mixes and reads all R running sums.

    Args:
        q_features: [B, G, M, N, K]; N enumerates the query heads of a KV head, and within each its tokens.
        weight: [H, R], the weights of the decays.

    Returns:
        [B, G, M, N, R * K].
    """
    weight = weight.view(q_features.shape[1], 1, -1, 1, weight.shape[1], 1)  # [G, 1, H / G, 1, R, 1]
    q_features = q_features.unflatten(3, (weight.shape[2], -1))[..., None, :]  # [B, G, M, H / G, C, 1, K]
    return (q_features * weight).flatten(5).flatten(3, 4)


def powers(log_rate: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Return lambda^distance: log_rate [G, R] and a distance of any shape -> [G, R, *distance.shape]."""
    return torch.exp(log_rate.view(*log_rate.shape, *[1] * distance.dim()) * distance)


def block_distances(count: int, like: torch.Tensor) -> torch.Tensor:
    """Return the distances i - j between `count` blocks, int [count, count], on the device of `like`."""
    block = torch.arange(count, device=like.device)
    return block[:, None] - block[None, :]


def decayed_sums(
    summaries: torch.Tensor, log_rate: torch.Tensor, lag: int = 1, sequence_id: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the running sums of every block i: sum over j <= i - lag of lambda_r^(i - j) S_j.

    The scan has two levels. Within a group of `SCAN_GROUP` blocks a small matrix computes the sums; what comes from earlier
    groups is the sum of whole groups, of which there are an eighth as many, computed by another matrix.

    Args:
        summaries: [B, G, M, X], the flattened summary S of each block.
        log_rate: [G, R], log(lambda).
        lag: The smallest distance between a block and the blocks it sums.
        sequence_id: int [M], the packed sequence that each block belongs to; a sum never crosses sequences.

    Returns:
        [B, G, M, R, X].
    """
    num_blocks, num_rates = summaries.shape[2], log_rate.shape[1]
    num_groups = (num_blocks + SCAN_GROUP - 1) // SCAN_GROUP + 1  # never 1, which torch.compile would specialize on
    offset = min(lag - 1, num_blocks)
    padding = num_groups * SCAN_GROUP - num_blocks
    summaries = torch.nn.functional.pad(summaries[:, :, : num_blocks - offset], (0, 0, offset, padding))
    grouped = summaries.unflatten(2, (num_groups, SCAN_GROUP))  # index i holds S_{i - lag + 1}

    in_group = torch.arange(SCAN_GROUP, device=summaries.device)
    distance = block_distances(SCAN_GROUP, summaries)
    within = powers(log_rate, (distance - 1).clamp(min=0)).masked_fill(distance < 1, 0)  # [G, R, i, j]
    within = within.permute(0, 2, 1, 3)[:, None]  # [G, 1, i, R, j]
    to_group_end = powers(log_rate, SCAN_GROUP - 1 - in_group)[:, None]  # [G, 1, R, j]
    group_distance = block_distances(num_groups, summaries)
    across = powers(log_rate, SCAN_GROUP * (group_distance - 1).clamp(min=0)).masked_fill(group_distance < 1, 0)
    from_group_start = powers(log_rate, in_group).transpose(1, 2)[:, None, ..., None]  # [G, 1, i, R, 1]
    if sequence_id is not None:
        # Zero every path on which a summary would reach a block of another sequence. The padding values -1, -2, and -3
        # differ from each other and from every sequence, so padding matches nothing.
        pad = torch.nn.functional.pad
        reader = pad(sequence_id, (0, padding), value=-1).view(num_groups, SCAN_GROUP)
        source = pad(sequence_id[: num_blocks - offset], (offset, padding), value=-2).view(num_groups, SCAN_GROUP)
        last = source[:, -1]
        previous_last = torch.cat([last.new_full((1,), -3), last[:-1]])
        within = within.masked_fill(reader[:, :, None, None] != source[:, None, None, :], 0)
        to_group_end = to_group_end.masked_fill((source != last[:, None])[:, None], 0)
        across = across.masked_fill(previous_last[:, None] != last[None, :], 0)
        from_group_start = from_group_start.masked_fill((reader != previous_last[:, None])[..., None, None], 0)

    group_sums = (to_group_end @ grouped).permute(0, 1, 3, 2, 4)  # [B, G, R, groups, X]
    from_earlier = (across @ group_sums).permute(0, 1, 3, 2, 4)[:, :, :, None]  # [B, G, groups, 1, R, X]
    sums = (within.flatten(-3, -2) @ grouped).unflatten(3, (SCAN_GROUP, num_rates)) + from_group_start * from_earlier
    return sums.flatten(2, 3)[:, :, :num_blocks] * torch.exp(lag * log_rate)[:, None, :, None]


# mhla_hf/ops/state.py

class RowState:
    """Base class of decoder states: dataclasses whose tensors all have the batch as their first axis.

    All methods that change a state work in place.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by field name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def nbytes(self) -> int:
        """Return the number of bytes that the tensors take."""
        return sum(value.nbytes for value in self.tensors().values())

    def leave_inference_mode(self) -> None:
        """Replace tensors made in inference mode, which cannot be written outside of it, by ordinary copies."""
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return
        for name, value in self.tensors().items():
            if value.is_inference():
                setattr(self, name, value.clone())

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Keep the rows listed in `index`, in that order.

        As long as the number of rows stays the same, the tensors keep their addresses, which CUDA graphs rely on.

        Args:
            index: int64 [B'], the rows to keep; a row may appear several times.
        """
        self.leave_inference_mode()
        for name, value in self.tensors().items():
            selected = value.index_select(0, index.to(value.device))
            if selected.shape == value.shape:
                value.copy_(selected)
            else:
                setattr(self, name, selected)

    def repeat(self, times: int) -> None:
        """Repeat every row `times` times; the copies of a row are next to each other."""
        num_rows = len(next(iter(self.tensors().values())))
        self.select(torch.arange(num_rows).repeat_interleave(times))


# mhla_hf/ops/checks.py

IMPLEMENTATIONS = ("auto", "reference", "torch", "triton")


def is_capturing(device: torch.device) -> bool:
    """Whether the current CUDA stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# mhla_hf/ops/reference.py

def divide_or_zero(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Divide [..., V] by [...], with 0 where the denominator vanishes; the backward pass is finite there, too."""
    vanishes = denominator.abs() < torch.finfo(denominator.dtype).tiny
    quotient = numerator / torch.where(vanishes, 1, denominator)[..., None]
    return torch.where(vanishes[..., None], 0, quotient)


# mhla_hf/ops/torch_layout.py

class MoveTokens(torch.autograd.Function):
    """Gather tokens: y[b, p] = x[b, source[b, p]], or zeros where `source` is -1.

    Called as `MoveTokens.apply(x, source, inverse)` with x [B, T, H, K] and source int64 [B or 1, P]. `inverse`, int64
    [B or 1, T], is the gather in the opposite direction, by which the backward pass is a gather, too, not a scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, inverse)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return torch.where((source >= 0)[..., None, None], x[rows, source.clamp(min=0)], 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        source, inverse = ctx.saved_tensors
        return MoveTokens.apply(grad, inverse, source), None, None


def shift_to_start(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `source` and `inverse` of `MoveTokens`, int64 [B, T], that move the first real token of each row to place 0."""
    place = torch.arange(num_tokens, device=starts.device)
    starts = starts[:, None]
    source, inverse = place + starts, place - starts
    return torch.where(source < num_tokens, source, -1), torch.where(inverse >= 0, inverse, -1)


def align_sequences(
    cu_seqlens: torch.Tensor, num_tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute how to move packed sequences so that each begins at a block edge.

    The number of blocks M depends only on the number of tokens and sequences, not on the values of `cu_seqlens`, which
    therefore need not be read on the host: it is the most blocks that so many sequences can need.

    Args:
        cu_seqlens: int [N + 1], the borders of the sequences.
        num_tokens: T.
        block_size: C.

    Returns:
        source: int64 [1, M * C], for `MoveTokens`.
        inverse: int64 [1, T], for `MoveTokens`.
        block_index: int64 [M], the index of each block in its sequence.
        sequence_id: int64 [M], the sequence of each block; unused blocks at the end have an id of their own, N.
    """
    borders = cu_seqlens.long()
    last_block = ((borders.diff() + block_size - 1) // block_size).cumsum(0)
    first_block = torch.nn.functional.pad(last_block, (1, 0))
    token = torch.arange(num_tokens, device=borders.device)
    token_sequence = torch.searchsorted(borders, token, right=True) - 1
    inverse = first_block[token_sequence] * block_size + token - borders[token_sequence]
    num_blocks = (num_tokens + (len(borders) - 1) * (block_size - 1)) // block_size
    source = torch.full((num_blocks * block_size,), -1, device=borders.device).index_copy(0, inverse, token)
    block = torch.arange(num_blocks, device=borders.device)
    sequence_id = torch.searchsorted(last_block, block, right=True)
    return source[None], inverse[None], block - first_block[sequence_id], sequence_id


def ring_slot(position: torch.Tensor, num_slots: int, sinks: int = 0) -> torch.Tensor:
    """Return the slot that holds the token at `position`: the first `sinks` tokens keep their own, the rest share a ring."""
    return torch.where(position < sinks, position, sinks + position % (num_slots - sinks))


class TokenLayout:
    """Lays out the new tokens of every row, after the tokens that a state holds, from a block edge on.

    All index tensors may be on the CPU while the tokens are on `device`.

    Args:
        before: int64 [B], the tokens that each row had seen. The state holds the last of them as `ring_slot` says.
        num_new: int64 [B], how many of the new tokens are real. These are the last ones, since padding is on the left.
        num_columns: The number of new tokens with padding, T.
        first_block: int64 [B], the block of each row at which the layout begins.
        num_blocks: The number of blocks in the layout, M.
        block_size: Tokens per block, C.
        num_slots: Slots of the state; 0 if it holds nothing.
        device: The device of the tokens.
        sinks: How many of the slots are for sink tokens.

    Attributes:
        blocks: int64 [B, M], the index of each block.
        filled: bool [B, M * C], the places of the layout that hold a token.
    """

    def __init__(
        self,
        before: torch.Tensor,
        num_new: torch.Tensor,
        num_columns: int,
        first_block: torch.Tensor,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device,
        sinks: int = 0,
    ):
        self.before = before
        self.num_new = num_new
        self.num_columns = num_columns
        self.first_position = first_block * block_size
        self.num_slots = num_slots
        self.sinks = sinks
        self.device = device
        self.blocks = first_block[:, None] + torch.arange(num_blocks, device=first_block.device)
        position = self.first_position[:, None] + torch.arange(num_blocks * block_size, device=first_block.device)
        new_token = (position - before[:, None] + (num_columns - num_new)[:, None]).clamp(min=0, max=num_columns - 1)
        source = new_token
        if num_slots:  # slots and new tokens are concatenated, so new tokens come after `num_slots`
            held_slot = ring_slot(position, num_slots, sinks)
            source = torch.where(position < before[:, None], held_slot, new_token + num_slots)
        self.new_token = new_token.to(device)
        self.source = source.to(device)
        self.filled = (position < (before + num_new)[:, None]).to(device)
        self.rows = torch.arange(len(before), device=device)[:, None]

    def place_keys(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Lay out held and new tokens: [B, slots, ..] and [B, T, ..] -> [B, M * C, ..]; arbitrary where not `filled`."""
        return (torch.cat([held, new.to(held.dtype)], 1) if self.num_slots else new)[self.rows, self.source]

    def place_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Lay out new tokens alone: [B, T, ..] -> [B, M * C, ..]; arbitrary where there is none."""
        return q[self.rows, self.new_token]

    def take_back(self, o: torch.Tensor) -> torch.Tensor:
        """Return outputs to the order of the new tokens: [B, M * C, ..] -> [B, T, ..], zeros for padding."""
        new_index = (
            torch.arange(self.num_columns, device=self.before.device) - (self.num_columns - self.num_new)[:, None]
        )
        place = (new_index + (self.before - self.first_position)[:, None]).clamp(min=0).to(self.device)
        is_real = (new_index >= 0).to(self.device)
        return torch.where(is_real.view(*is_real.shape, *[1] * (o.dim() - 2)), o[self.rows, place], 0)

    def keep(self, held: torch.Tensor, laid_out: torch.Tensor) -> None:
        """Write the newest tokens of the layout, [B, M * C, ..], into the slots of `held` [B, slots, ..], in place."""
        end = (self.before + self.num_new - 1)[:, None]
        num_slots = held.shape[1]
        slot = torch.arange(num_slots, device=end.device)
        newest_in_slot = end - (end - slot + self.sinks) % (num_slots - self.sinks)
        position = torch.where(slot < self.sinks, slot, newest_in_slot)
        is_new = (position >= torch.maximum(self.before, self.first_position)[:, None]) & (position <= end)
        is_new = (is_new & (ring_slot(position, num_slots, self.sinks) == slot)).to(self.device)
        place = (position - self.first_position[:, None]).clamp(0, laid_out.shape[1] - 1).to(self.device)
        values = laid_out[self.rows, place].to(held.dtype)
        held.copy_(torch.where(is_new.view(*is_new.shape, *[1] * (held.dim() - 2)), values, held))


# mhla_hf/ops/namespace.py

NAMESPACE = "75a40649d7d1"


# mhla_hf/ops/triton/tuning.py

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = None

INTERPRETED = triton is not None and triton.knobs.runtime.interpret
CHUNK = 64  # tokens per tile; in causal blocks, the tokens that are handled quadratically
MAX_HEAD_WIDTH = 256
# Kernel parameters that vary with the length or the number of heads. Triton would otherwise compile anew for each value
# that is 1 or divisible by 16.
LENGTH_PARAMETERS = {
    "num_tokens",
    "block_size",
    "span",
    "num_parts",
    "num_blocks",
    "num_columns",
    "mixing_head_stride",
    "mixing_row_stride",
    "group",
}


def kernel(function: Callable) -> Any:
    """Compile a function with `triton.jit`, without specializing on `LENGTH_PARAMETERS`."""
    if triton is None:
        return function
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return triton.jit(function, do_not_specialize=[name for name in names if name in LENGTH_PARAMETERS])


class TunedKernel:
    """A kernel whose tile sizes `triton.autotune` chooses, once for every combination of the constants named in `key`.

    Kernels write their outputs and never read them, so they can be run repeatedly for timing.

    Args:
        function: The kernel, not yet compiled.
        configurations: Returns for the constants of a launch the tile sizes to try, each with num_warps and num_stages. The
            interpreter takes the first.
        key: Names of constants.
    """

    def __init__(self, function: Callable, configurations: Callable[[dict], list[dict]], key: tuple[str, ...]):
        self.jitted = kernel(function)
        self.configurations = configurations
        self.tuner = None
        if triton is not None and not INTERPRETED:
            placeholders = [
                triton.Config({}, num_warps=warps) for warps in (4, 8)
            ]  # pruning puts `choices` in their place
            prune = {"early_config_prune": lambda configs, named_args, **arguments: self.choices(arguments)}
            tune = triton.autotune(placeholders, key=list(key), prune_configs_by=prune, cache_results=True)
            self.tuner = tune(self.jitted)

    def choices(self, constants: dict[str, Any]) -> list[Any]:
        """Return the configurations that fit into the shared memory of this GPU, at least one."""
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        available = getattr(properties, "shared_memory_per_block_optin", 65536)
        configurations = self.configurations(constants)
        fitting = [config for config in configurations if shared_bytes(constants["DOT"], config) <= available]
        return [
            triton.Config(sizes, num_warps=sizes.pop("num_warps"), num_stages=sizes.pop("num_stages"))
            for sizes in fitting or configurations[-1:]
        ]

    def launch(self, grid: Callable[[dict], tuple[int]], arguments: dict[str, Any], constants: dict[str, Any]) -> None:
        """Launch the kernel.

        Args:
            grid: Returns the number of programs, given a dictionary with the constants and the tile sizes.
            arguments: The run-time arguments by parameter name.
            constants: The compile-time constants by parameter name, without the tile sizes.
        """
        constants = {**constants, "enable_fp_fusion": True}
        if self.tuner is not None:
            self.tuner[grid](**arguments, **constants)
        else:
            self.jitted[grid](**arguments, **constants, **self.configurations(constants)[0])


def tuned(configurations: Callable[[dict], list[dict]], *key: str) -> Callable[[Callable], TunedKernel]:
    """Decorator that makes a kernel a `TunedKernel`."""
    return lambda function: TunedKernel(function, configurations, key)


def token_tiles(constants: dict[str, Any], max_lanes: int = 128) -> list[dict[str, int]]:
    """List the tile sizes to try for kernels on tokens: those of a rule, then its neighbors.

    The rule takes heads as a whole up to `max_lanes` lanes (up to 32 in fp32), so that tiles stay in registers. Wider heads
    are divided into equally many parts for keys and values.
    """
    K = next_lanes(constants["K"])
    V = next_lanes(constants["V"])
    is_bf16 = constants["DOT"] == "bf16"
    num_parts = max(1, max(K, V) // (max_lanes if is_bf16 else 32))
    BK, BV = max(16, K // num_parts), max(16, V // num_parts)
    warps = 4 if is_bf16 and max(BK, BV) <= 64 else 8
    rule = {"BT": CHUNK, "BK": BK, "BV": BV, "num_warps": warps, "num_stages": 2}
    half = {**rule, "BK": max(16, BK // 2), "BV": max(16, BV // 2), "num_warps": 4}
    double = [] if constants["CAUSAL"] else [{**rule, "BT": 2 * CHUNK, "num_warps": 8}]
    return [rule, {**rule, "num_warps": 12 - warps}, *double, half, {**half, "num_stages": 1}]


def shared_bytes(DOT: str, config: dict[str, int]) -> int:
    """Estimate the shared memory of a program in bytes: for each stage, the tiles that one iteration of its loop loads."""
    rows, *widths = (size for name, size in config.items() if name.startswith("B"))
    tile_elements = rows * sum(widths) + widths[0] * widths[-1]
    return config["num_stages"] * (2 if DOT == "bf16" else 4) * tile_elements


def dot_kind(*tensors: torch.Tensor) -> str:
    """Return the DOT constant (see `dot`) for products of these tensors.

    fp16 inputs take tf32, which represents them exactly and has room for intermediate results beyond the range of fp16.
    """
    dtypes = {x.dtype for x in tensors}
    if dtypes == {torch.bfloat16}:
        return "bf16"
    if torch.version.hip:
        return "ieee"
    return "tf32" if dtypes == {torch.float16} else "tf32x3"


def on_device(x: torch.Tensor) -> AbstractContextManager:
    """Return a context in which kernels are launched on the device of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def with_strides(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return a tensor [B, T, H, W] as kernels take it: pointer, and strides of row, token, and head."""
    row_stride, token_stride, head_stride = x.stride()[:3]
    return x, row_stride, token_stride, head_stride


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` itself if its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def next_lanes(width: int) -> int:
    """Return the smallest power of two that is at least `width` and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def num_tiles(count: int, tile: int) -> int:
    """Return how many tiles cover `count` elements."""
    return (count + tile - 1) // tile


# mhla_hf/ops/triton/common.py

constexpr = None if tl is None else tl.constexpr
UPCAST = INTERPRETED if tl is None else tl.constexpr(INTERPRETED)


@kernel
@no_type_check
def as_tf32(x):
    """Round fp32 numbers as a tf32 product reads them in the worst case: cut off their last 13 bits."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@kernel
@no_type_check
def cast(x, dtype: constexpr):
    """Cast to another dtype, rounding to nearest even; the interpreter by itself would truncate fp32 to bf16."""
    if UPCAST and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@kernel
@no_type_check
def operand(x, DOT: constexpr):
    """Cast an operand of a product: to bf16 if DOT is "bf16", else to fp32."""
    if DOT == "bf16":
        x = cast(x, tl.bfloat16)
    else:
        x = x.to(tl.float32)
    return x


@kernel
@no_type_check
def dot(a, b, DOT: constexpr):
    """Compute a @ b in fp32.

    DOT is "bf16", or how fp32 numbers are multiplied: "tf32", "tf32x3" (three tf32 products), or "ieee".
    """
    a, b = operand(a, DOT), operand(b, DOT)
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
        if DOT == "tf32":
            a, b = as_tf32(a), as_tf32(b)
        product = tl.dot(a, b, input_precision="ieee")
    elif DOT == "bf16":
        product = tl.dot(a, b)
    else:
        product = tl.dot(a, b, input_precision=DOT)
    return product


@kernel
@no_type_check
def program_of(num_lane_tiles, num_parts, num_blocks, num_heads):
    """Return the tile of lanes, the part of a block, the block, the head, and the batch row that this program computes."""
    program = tl.program_id(0)
    item = program // num_lane_tiles // num_parts
    head = (item // num_blocks % num_heads).to(tl.int64)
    row = (item // num_blocks // num_heads).to(tl.int64)
    return program % num_lane_tiles, program // num_lane_tiles % num_parts, item % num_blocks, head, row


@kernel
@no_type_check
def tile_pointers(x, row, token, head, lanes):
    """Return the pointers to a tile of x [B, T, H, W], for some tokens of a head and some lanes."""
    pointer, row_stride, token_stride, head_stride = x[0], x[1], x[2], x[3]
    return pointer + row * row_stride + head * head_stride + token[:, None] * token_stride + lanes[None, :]


@kernel
@no_type_check
def load_tile(x, row, token, head, valid, lanes, WIDTH: constexpr):
    """Load a tile of x [B, T, H, WIDTH] at some tokens, with zeros where not valid or beyond WIDTH."""
    pointers = tile_pointers(x, row, token, head, lanes)
    return tl.load(pointers, mask=valid[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@kernel
@no_type_check
def store_tile(x, row, token, head, valid, lanes, tile, WIDTH: constexpr):
    """Store a tile to x [B, T, H, WIDTH] at some tokens, where valid."""
    pointers = tile_pointers(x, row, token, head, lanes)
    tl.store(pointers, cast(tile, x[0].dtype.element_ty), mask=valid[:, None] & (lanes < WIDTH)[None, :])


@kernel
@no_type_check
def invert_or_zero(den):
    """Return 1 / den, and 0 where den vanishes: 0/0 is 0 in this operator."""
    nonzero = tl.abs(den) >= 1.1754943508222875e-38  # the smallest normal fp32 number
    return tl.where(nonzero, 1.0 / tl.where(nonzero, den, 1.0), 0.0)


# mhla_hf/ops/triton/mix.py

ALL_BLOCKS, EARLIER_BLOCKS, LATER_BLOCKS = 0, 1, 2  # values of TRIANGLE


# mhla_hf/ops/triton/register.py

TRITON_SPACE = f"mhla_{NAMESPACE}"


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


def registered_operator(
    name: str,
    schema: str,
    function: Callable,
    fake: Callable,
    gradients: Callable | None = None,
    setup_context: Callable | None = None,
) -> Any:
    """Return the operator `name` of this version's namespace; register it unless an equal copy of this file did.

    Args:
        name: Name in the namespace `TRITON_SPACE`.
        schema: Its schema, as `torch.library.custom_op` takes it.
        function: The implementation.
        fake: The implementation for tracing.
        gradients: The autograd formula; None if it is not differentiable.
        setup_context: Saves what `gradients` reads.
    """
    space = getattr(torch.ops, TRITON_SPACE)
    if not hasattr(space, name):
        operator = torch.library.custom_op(f"{TRITON_SPACE}::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if gradients is not None:
            operator.register_autograd(gradients, setup_context=setup_context)
    return getattr(space, name)


# mhla_hf/ops/triton/check.py

MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
FAULTS_FOUND: dict[tuple, str | None] = {}

Results = tuple[list[torch.Tensor], list[torch.Tensor]]  # of the kernels, and of PyTorch in fp64


def concrete(size: int | torch.SymInt) -> int:
    """Return a size that may be symbolic as a number; torch.compile then specializes on it."""
    return len([None] * size)


def known_fault(call: Callable[..., Results], kind: tuple) -> str | None:
    """Return why the kernels cannot be trusted for calls of a kind, or None if they can; found out once per kind.

    Args:
        call: Makes a small call of a kind; `small_call` or one like it.
        kind: Its arguments, which begin with the device and the dtypes of queries and values.
    """
    key = call.__name__, *kind
    if key not in FAULTS_FOUND:
        device = kind[0]
        if is_capturing(device):
            return "a CUDA graph is being captured, and no such call came before it to check the Triton kernels"
        FAULTS_FOUND[key] = find_fault(call, *kind)
    return FAULTS_FOUND[key]


def find_fault(
    call: Callable[..., Results], device: torch.device, dtype: torch.dtype, value_dtype: torch.dtype, *kind: Any
) -> str | None:
    """Run the kernels and compare them with fp64; see `known_fault`."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            results, exact = call(device, dtype, value_dtype, *kind)
    except torch.OutOfMemoryError:  # says nothing about the kernels
        raise
    except Exception as error:
        return f"the Triton kernels failed on {device} with {type(error).__name__}: {str(error).strip()[:200]}"
    errors = [
        float(((x.double() - y).norm() / y.norm()).nan_to_num(float("inf")))
        for x, y in zip(results, exact, strict=True)
    ]
    coarser_dtype = min((dtype, value_dtype), key=lambda x: x.itemsize)
    if max(errors) <= MAX_RELATIVE_ERROR[coarser_dtype]:
        return None
    name = ("o", "dq", "dk", "dv", "dmixing", "dq_den", "dk_den")[errors.index(max(errors))]
    kind_text = str((dtype, value_dtype, *kind))
    return f"the Triton kernels gave {name} with a relative error of {max(errors):.1e} on {device}, for {kind_text}"


# mhla_hf/ops/api.py

OPERATOR_LOG = logging.getLogger("mhla_hf")
KERNEL_DEVICES = ("cuda",)
ANNOUNCED_CHOICES: set[tuple[str, str]] = set()


def choose_implementation(
    impl: str,
    device: torch.device,
    find_refusal: Callable[[], str | None],
    find_fault: Callable[[], str | None],
) -> str:
    """Resolve "auto" to an implementation, and log each choice the first time it is made.

    Args:
        impl: What the caller asked for.
        device: The device of the inputs.
        find_refusal: Returns why the Triton kernels cannot run on these inputs; None if they can.
        find_fault: Returns why their results cannot be trusted on this device; None if they can.

    Raises:
        ValueError: If `impl` is "triton" and the kernels cannot run.
    """
    if impl not in ("auto", "triton"):
        return impl
    no_kernels = device.type not in KERNEL_DEVICES
    refusal = None if impl == "auto" and no_kernels else find_refusal()
    if impl == "triton":
        if refusal is not None:
            raise ValueError(f"impl: got 'triton', expected another one: {refusal}.")
        return impl
    choice = "torch"
    reason = refusal
    level = logging.INFO
    if no_kernels:
        reason = f"the fastest implementation for {device.type} tensors"
    elif refusal is None:
        reason = find_fault()
        level = logging.WARNING if reason is not None else level
    if reason is None:
        choice = "triton"
        reason = f"whose kernels agreed with fp64 on {device}"
    if not torch.compiler.is_compiling() and (choice, reason) not in ANNOUNCED_CHOICES:
        ANNOUNCED_CHOICES.add((choice, reason))
        OPERATOR_LOG.log(level, "mhla: impl='auto' took %r, %s.", choice, reason)
    return choice


# mhla_hf/ops/torch_local.py

class SinkTokens(NamedTuple):
    """The S sink tokens of each row, or, for packed sequences, those of the sequence that each of M blocks belongs to.

    Args:
        k: [B, S, G, D] or [B, M, S, G, D].
        v: [B, S, G, V] or [B, M, S, G, V].
        valid: bool [B, S] or [B, M, S], which of them are keys.
    """

    k: torch.Tensor
    v: torch.Tensor
    valid: torch.Tensor


def near_and_far(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    far_sums: torch.Tensor,
    valid: torch.Tensor,
    weight: torch.Tensor,
    balance: torch.Tensor | None,
    sink_tokens: SinkTokens | None,
    block_index: torch.Tensor,
    form: LocalForm,
) -> torch.Tensor:
    """Compute the outputs of M blocks of C tokens from their window, the sinks, and the running sums of far blocks.

    `triton_near_and_far` does the same in one kernel.

    Args:
        q: [B, T, H, D], T at most M * C.
        k: [B, T, G, D].
        v: [B, T, G, V].
        q_features: [B, T, H, K], features of the queries for the far part.
        far_sums: [B, G, M, R, K, V + 1], the running sums that each block reads. The last column sums the keys.
        valid: bool [B, M * C], the tokens that are keys.
        weight: [H, R], the weights of the running sums.
        balance: [H], as in `local_attention`; None without a softmax.
        sink_tokens: The sinks; None if there are none.
        block_index: int [B or 1, M], the index of each block in its sequence.
        form: The options.

    Returns:
        [B, T, H, V] in the dtype of `far_sums`.
    """
    num_tokens = q.shape[1]
    size = form.block_size
    num_kv_heads = k.shape[2]
    sum_dtype = far_sums.dtype
    q, k, v, q_features = (resize_tokens(x, valid.shape[1]) for x in (q, k, v, q_features))
    k, v = (torch.where(valid[..., None, None], x, 0) for x in (k, v))
    q, k, v, q_features = (by_block_and_group(x, num_kv_heads, size, sum_dtype) for x in (q, k, v, q_features))
    k, v, visible = near_keys(k, v, valid.unflatten(1, (-1, size)), block_index, form)
    if sink_tokens is not None:
        k, v, visible = with_sinks(k, v, visible, sink_tokens, block_index, form, sum_dtype)
    share = weight.shape[0] // num_kv_heads  # query heads per KV head

    def per_query(x: torch.Tensor) -> torch.Tensor:
        """Repeat a number per head for its queries: [H] -> [G, 1, (H / G) * C, 1]."""
        return x.view(num_kv_heads, 1, share, 1, 1).expand(-1, -1, -1, size, 1).flatten(2, 3)

    far = expand_query_features(q_features, weight) @ far_sums.flatten(3, 4)
    visible = visible[:, None, :, None].expand(-1, -1, -1, share, -1, -1).flatten(3, 4)
    has_far = (block_index >= form.lag)[:, None, :, None, None]
    total_weight = per_query(weight.sum(-1).to(sum_dtype))
    balance = None if balance is None else per_query(balance.to(sum_dtype))
    o = combine((q @ k.mT) * form.scale, visible, v, far, total_weight, balance, has_far, form)
    o = o.unflatten(3, (share, size)).permute(0, 2, 4, 1, 3, 5).flatten(3, 4).flatten(1, 2)
    return resize_tokens(o, num_tokens)


def resize_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """Cut or pad the tokens of x [B, T, ..] to `count`, with zeros, or, while compiling, with the last token.

    Under torch.compile, padding by nothing would be a special case with a graph of its own; a gather has no special case.
    """
    if torch.compiler.is_compiling():
        return x.index_select(1, torch.arange(count, device=x.device).clamp(max=x.shape[1] - 1))
    if x.shape[1] == count:
        return x
    return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, count - x.shape[1]))


def by_block_and_group(x: torch.Tensor, num_kv_heads: int, size: int, sum_dtype: torch.dtype) -> torch.Tensor:
    """Group heads by KV head and tokens by block: [B, M * C, H, K] -> [B, G, M, (H / G) * C, K] in `sum_dtype`."""
    x = x.to(sum_dtype).unflatten(2, (num_kv_heads, -1)).unflatten(1, (-1, size))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)


def with_ones(v: torch.Tensor) -> torch.Tensor:
    """Append a column of ones to the values, [.., V] -> [.., V + 1], so that weights are summed as values are."""
    return torch.nn.functional.pad(v, (0, 1), value=1.0)


def near_keys(
    k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, block_index: torch.Tensor, form: LocalForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collect the window of every block.

    Args:
        k: [B, G, M, C, D].
        v: [B, G, M, C, V].
        valid: bool [B, M, C].
        block_index: int [B or 1, M].
        form: The options.

    Returns:
        k [B, G, M, lag * C, D], v [B, G, M, lag * C, V], and which query sees which key, bool [B, M, C, lag * C].
    """
    pad = torch.nn.functional.pad
    keys = []
    values = []
    visible = []
    size, num_blocks = form.block_size, block_index.shape[1]
    all_pairs = torch.ones(size, size, dtype=torch.bool, device=k.device)
    for distance in reversed(range(form.lag)):
        kept = max(num_blocks - distance, 0)
        keys.append(pad(k[:, :, :kept], (0, 0, 0, 0, num_blocks - kept, 0)))
        values.append(pad(v[:, :, :kept], (0, 0, 0, 0, num_blocks - kept, 0)))
        # A block at the start of its sequence has fewer than `lag - 1` blocks before it.
        is_key = pad(valid[:, :kept], (0, 0, num_blocks - kept, 0)) & (block_index >= distance)[..., None]
        visible.append(is_key[:, :, None] & (all_pairs.tril() if distance == 0 else all_pairs))
    return torch.cat(keys, 3), torch.cat(values, 3), torch.cat(torch.broadcast_tensors(*visible), 3)


def with_sinks(
    near_k: torch.Tensor,
    near_v: torch.Tensor,
    visible: torch.Tensor,
    sink_tokens: SinkTokens,
    block_index: torch.Tensor,
    form: LocalForm,
    sum_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the sinks before the window of every block whose window does not reach them; as `near_keys` returns them."""
    k, v, valid = sink_tokens
    if k.dim() == 4:  # the same for all blocks
        k = k[:, None]
        v = v[:, None]
        valid = valid[:, None]
    k, v = (x.to(sum_dtype).permute(0, 3, 1, 2, 4) for x in (k, v))  # [B, G, M or 1, S, ..]
    num_blocks = near_k.shape[2]
    k, v = (x.expand(-1, -1, num_blocks, -1, -1) for x in (k, v))
    is_key = valid & (block_index >= form.lag)[..., None]
    is_key = is_key[:, :, None].expand(len(visible), num_blocks, form.block_size, -1)
    k, v = (torch.where(is_key[:, None, :, 0, :, None], x, 0) for x in (k, v))
    return torch.cat([k, near_k], 3), torch.cat([v, near_v], 3), torch.cat([is_key, visible], 3)


def combine(
    score: torch.Tensor,
    visible: torch.Tensor,
    v: torch.Tensor,
    far: torch.Tensor,
    total_weight: torch.Tensor,
    balance: torch.Tensor | None,
    has_far: torch.Tensor,
    form: LocalForm,
) -> torch.Tensor:
    """Combine the near and the far part into outputs.

    Args:
        score: [.., N, L], scaled scores of N queries and L near keys.
        visible: bool [.., N, L], which query sees which key.
        v: [.., L, V], values of the near keys.
        far: [.., N, V + 1], the far part: its sum of weight * value and, in the last column, of the weights.
        total_weight: [.., N, 1], the sum of the decays' weights, which is the weight of near keys without a softmax.
        balance: [.., N, 1], the log of the factor of the far part relative to a softmax score; None without a softmax.
        has_far: bool [.., 1, 1], whether a query has far blocks at all.
        form: The options.

    Returns:
        [.., N, V].
    """
    far_factor: torch.Tensor | float
    if balance is None:
        near = torch.where(visible, score, 0) * total_weight
        far_factor = form.scale
    else:
        near, far_factor = softmax_weights(score, visible, balance, has_far & (far[..., -1:] != 0))
    o, far = near @ v, far_factor * far
    if not form.normalize:
        return o + far[..., :-1]
    return divide_or_zero(o + far[..., :-1], near.sum(-1) + far[..., -1])


def softmax_weights(
    score: torch.Tensor, visible: torch.Tensor, balance: torch.Tensor, has_far: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e^score of the near keys and e^balance of the far part, both divided by e^c, with shapes as in `combine`.

    c is the largest exponent, which prevents overflow. It cancels in the outputs and so needs no gradient.
    """
    score = score.masked_fill(~visible, float("-inf"))
    largest = score.detach().amax(-1, keepdim=True)
    shift = torch.where(has_far, torch.maximum(largest, balance.detach()), largest)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    return torch.exp(score - shift), torch.exp(torch.where(has_far, balance - shift, 0))


# mhla_hf/ops/triton/local.py

LOCAL_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_features, Tensor far_sums, Tensor weight, Tensor? balance, Tensor? sink_k, "
    "Tensor? sink_v, Tensor? sink_valid, Tensor valid, Tensor block_index, SymInt block_size, SymInt lag, float scale, "
    "bool normalize, ScalarType dtype) -> Tensor"
)


@kernel
@no_type_check
def add_keys(
    largest, den, total, q, k, v, row, token, inside, head, key_token, real, kv_head, visible, scale, total_weight, v_lanes,
    K: constexpr, V: constexpr, SOFTMAX: constexpr, DOT: constexpr, BT: constexpr, BN: constexpr, BK: constexpr,
):  # fmt: skip
    """Add BN near keys to the sums of a tile of queries.

    Returns the largest score so far, the sum of the weights, and the sum of weight * value.

    Args:
        largest, den, total: What earlier calls returned.
        q, k, v: As in `local_kernel`.
        row, head, token, inside: The row, the head, the tokens, and the valid places of the queries.
        key_token, real, kv_head: The tokens, the valid places, and the head of the keys.
        visible: Which query sees which key.
        total_weight: The weight of a near key without SOFTMAX.
    """
    score = tl.zeros((BT, BN), tl.float32)
    for first in range(0, K, BK):
        lanes = first + tl.arange(0, BK)
        query = load_tile(q, row, token, head, inside, lanes, K)
        score += dot(query, tl.trans(load_tile(k, row, key_token, kv_head, real, lanes, K)), DOT)
    score *= scale
    if SOFTMAX:
        score = tl.where(visible, score, float("-inf"))
        before, largest = largest, tl.maximum(largest, tl.max(score, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weight = tl.exp(score - shift[:, None])
        rescale = tl.exp(before - shift)
        den, total = den * rescale, total * rescale[:, None]
    else:
        weight = tl.where(visible, score * total_weight, 0.0)
    den += tl.sum(weight, 1)
    total += dot(weight, load_tile(v, row, key_token, kv_head, real, v_lanes, V), DOT)
    return largest, den, total


def local_tiles(constants: dict[str, Any]) -> list[dict[str, int]]:
    """List the tile sizes to try: those of the other kernels on causal tokens."""
    return token_tiles({**constants, "CAUSAL": True})


@tuned(local_tiles, "K", "V", "F", "R", "DOT")
@no_type_check
def local_kernel(
    q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index, o, num_tokens,
    block_size, num_blocks, num_heads, group, lag, num_sinks, sink_stride, scale,
    K: constexpr, V: constexpr, F: constexpr, R: constexpr, NORMALIZE: constexpr, DOT: constexpr,
    BT: constexpr, BK: constexpr, BV: constexpr,
):  # fmt: skip
    """Compute o [B, T, H, V]: BV lanes of one tile of queries.

    Args:
        q, k, v, q_features, far_sums, weight, balance, valid, block_index: As in `near_and_far`, where K is called F.
        sink_k, sink_v: [B, S, G, ..], the sinks of each row, or [B, M * S, G, ..], those of each block. None for none.
        sink_valid: bool [B, S] or [B, M * S], which of them are keys.
        sink_stride: 0 if the sinks are those of the row, S if they are those of each block.
        group: Query heads per KV head.
        lag, scale: As in `LocalForm`.
    """
    num_v_tiles: tl.constexpr = (V + BV - 1) // BV
    v_tile, part, block, head, row = program_of(num_v_tiles, tl.cdiv(block_size, BT), num_blocks, num_heads)
    kv_head, v_lanes = head // group, v_tile * BV + tl.arange(0, BV)
    begin = block * block_size + part * BT
    end = tl.minimum(block * block_size + block_size, num_tokens)
    token = (begin + tl.arange(0, BT)).to(tl.int64)
    inside = token < end
    index = tl.load(block_index + row * num_blocks + block).to(tl.int32)

    # The far part: the running sums, mixed by the weights, are a state that queries read.
    state = ((row * (num_heads // group) + kv_head) * num_blocks + block) * R
    total = tl.zeros((BT, BV), tl.float32)
    den = tl.zeros((BT,), tl.float32)
    total_weight = 0.0
    for rate in range(0, R):
        total_weight += tl.load(weight + head * R + rate)
    for first in range(0, F, BK):
        lanes = first + tl.arange(0, BK)
        mixture = tl.zeros((BK, BV), tl.float32)
        z = tl.zeros((BK,), tl.float32)
        for rate in range(0, R):
            rate_weight = tl.load(weight + head * R + rate)
            sums = far_sums + ((state + rate) * F + lanes) * (V + 1)
            in_range = (lanes < F)[:, None] & (v_lanes < V)[None, :]
            mixture += rate_weight * tl.load(sums[:, None] + v_lanes[None, :], mask=in_range, other=0.0)
            z += rate_weight * tl.load(sums + V, mask=lanes < F, other=0.0)
        features = load_tile(q_features, row, token, head, inside, lanes, F)
        total += dot(features, mixture, DOT)
        den += tl.sum(features.to(tl.float32) * z[None, :], 1)

    # The near part: sinks, then the window.
    largest = tl.full((BT,), float("-inf"), tl.float32)
    if balance is not None:
        largest = tl.where(den != 0, tl.load(balance + head), largest)
    else:
        total, den = total * scale, den * scale
    if sink_k is not None:
        for first in range(0, tl.where(index >= lag, num_sinks, 0), 16):
            slot = first + tl.arange(0, 16)
            key_token = (block * sink_stride + slot).to(tl.int64)
            real = slot < num_sinks
            real = real & (tl.load(sink_valid + row * num_sinks + key_token, mask=real, other=0) != 0)
            largest, den, total = add_keys(
                largest, den, total, q, sink_k, sink_v, row, token, inside, head, key_token, real, kv_head, real[None, :],
                scale, total_weight, v_lanes, K, V, balance is not None, DOT, BT, 16, BK,
            )  # fmt: skip
    window = tl.minimum(tl.minimum(lag - 1, index), block)
    for first in range((block - window) * block_size, tl.minimum(begin + BT, end), BT):
        key_token = (first + tl.arange(0, BT)).to(tl.int64)
        real = key_token < end
        real = real & (tl.load(valid + row * num_blocks * block_size + key_token, mask=real, other=0) != 0)
        visible = real[None, :] & (key_token[None, :] <= token[:, None])
        largest, den, total = add_keys(
            largest, den, total, q, k, v, row, token, inside, head, key_token, real, kv_head, visible,
            scale, total_weight, v_lanes, K, V, balance is not None, DOT, BT, BT, BK,
        )  # fmt: skip
    if NORMALIZE:
        total *= invert_or_zero(den)[:, None]
    store_tile(o, row, token, head, inside, v_lanes, total, V)


def triton_near_and_far(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    far_sums: torch.Tensor,
    valid: torch.Tensor,
    weight: torch.Tensor,
    balance: torch.Tensor | None,
    sink_tokens: SinkTokens | None,
    block_index: torch.Tensor,
    form: LocalForm,
) -> torch.Tensor:
    """Compute `near_and_far` by the kernel, in fp32 if `form.unrounded`, else in v's dtype; arguments as there."""
    sink_k = sink_v = sink_valid = None
    if sink_tokens is not None:
        sink_k, sink_v, sink_valid = sink_tokens
    return TRITON_LOCAL(
        q,
        k,
        v,
        q_features,
        far_sums,
        weight,
        balance,
        sink_k,
        sink_v,
        sink_valid,
        valid,
        block_index,
        block_size=form.block_size,
        lag=form.lag,
        scale=form.scale,
        normalize=form.normalize,
        dtype=torch.float32 if form.unrounded else v.dtype,
    )


def local_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    far_sums: torch.Tensor,
    weight: torch.Tensor,
    balance: torch.Tensor | None,
    sink_k: torch.Tensor | None,
    sink_v: torch.Tensor | None,
    sink_valid: torch.Tensor | None,
    valid: torch.Tensor,
    block_index: torch.Tensor,
    block_size: int,
    lag: int,
    scale: float,
    normalize: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run the kernel; returns [B, T, H, V] in `dtype`. Arguments as in `near_and_far`, `SinkTokens`, and `LocalForm`."""
    batch, num_tokens, num_heads, key_width = q.shape
    num_kv_heads, value_width = v.shape[2:]
    num_blocks = block_index.shape[1]
    num_sinks = 0
    sink_stride = 0
    o = torch.empty(batch, num_tokens, num_heads, value_width, dtype=dtype, device=q.device)
    if sink_k is not None and sink_v is not None and sink_valid is not None:
        num_sinks = sink_valid.shape[-1]
        if sink_valid.dim() == 3:  # sinks of each block
            sink_stride = num_sinks
            sink_k, sink_v = sink_k.flatten(1, 2), sink_v.flatten(1, 2)

    def grid(sizes: dict[str, int]) -> tuple[int]:
        tiles_per_block = num_tiles(value_width, sizes["BV"]) * num_tiles(block_size, sizes["BT"])
        return (tiles_per_block * num_blocks * num_heads * batch,)

    arguments = {
        "q": with_strides(contiguous_rows(q)),
        "k": with_strides(contiguous_rows(k)),
        "v": with_strides(contiguous_rows(v)),
        "q_features": with_strides(contiguous_rows(q_features)),
        "far_sums": far_sums.contiguous(),
        "weight": weight.contiguous(),
        "balance": None if balance is None else balance.contiguous(),
        "sink_k": None if sink_k is None else with_strides(contiguous_rows(sink_k)),
        "sink_v": None if sink_v is None else with_strides(contiguous_rows(sink_v)),
        "sink_valid": None if sink_valid is None else sink_valid.contiguous(),
        "valid": valid.contiguous(),
        "block_index": block_index.expand(batch, -1).contiguous(),
        "o": with_strides(o),
        "num_tokens": num_tokens,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "num_heads": num_heads,
        "group": num_heads // num_kv_heads,
        "lag": lag,
        "num_sinks": num_sinks,
        "sink_stride": sink_stride,
        "scale": scale,
    }
    constants = {
        "K": key_width,
        "V": value_width,
        "F": q_features.shape[3],
        "R": weight.shape[1],
        "NORMALIZE": normalize,
        "DOT": dot_kind(q, k, v, q_features),
    }
    with on_device(q):
        local_kernel.launch(grid, arguments, constants)
    return o


def local_forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    far_sums: torch.Tensor,
    weight: torch.Tensor,
    balance: torch.Tensor | None,
    sink_k: torch.Tensor | None,
    sink_v: torch.Tensor | None,
    sink_valid: torch.Tensor | None,
    valid: torch.Tensor,
    block_index: torch.Tensor,
    block_size: int,
    lag: int,
    scale: float,
    normalize: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a tensor with the shape and dtype of `local_forward`, for tracing."""
    return v.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)


def save_for_local_backward(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    """Save the inputs for the backward pass."""
    (q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index) = inputs[:12]
    ctx.save_for_backward(
        q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v, sink_valid, valid, block_index
    )
    block_size, lag, scale, normalize, _ = inputs[12:]
    ctx.form = LocalForm(block_size, lag, scale=scale, normalize=normalize)


def local_gradients(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The autograd formula of `local_forward`: compute the PyTorch implementation again, and differentiate it."""
    *differentiable, sink_valid, valid, block_index = ctx.saved_tensors
    with torch.enable_grad(), torch.autocast(do.device.type, enabled=False):
        # Views, because sinks may be a part of k and v, whose gradients are separate here.
        differentiable = [None if x is None else x.view_as(x) for x in differentiable]
        q, k, v, q_features, far_sums, weight, balance, sink_k, sink_v = differentiable
        sink_tokens = None if sink_k is None else SinkTokens(sink_k, sink_v, sink_valid)
        o = near_and_far(q, k, v, q_features, far_sums, valid, weight, balance, sink_tokens, block_index, ctx.form)
    needed = [x for x in differentiable if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(o, needed, do.to(o.dtype), create_graph=torch.is_grad_enabled()))
    input_grads = [next(grads) if x is not None and x.requires_grad else None for x in differentiable]
    sink_valid_grad = valid_grad = block_index_grad = None
    option_grads = [None] * 5  # block_size, lag, scale, normalize, dtype
    return *input_grads, sink_valid_grad, valid_grad, block_index_grad, *option_grads


TRITON_LOCAL = registered_operator(
    "local", LOCAL_SCHEMA, local_forward, local_forward_fake, local_gradients, save_for_local_backward
)


def local_kind(
    q: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    decays: Decays,
    balance: torch.Tensor | None,
    form: LocalForm,
) -> tuple:
    """Return what tells apart the calls that are checked separately (see `check.py`), as `small_local_call` takes it.

    Blocks of more than 1.5 chunks are all of one kind.
    """
    block_size = min(form.block_size, CHUNK + CHUNK // 2)
    widths = (q.shape[3], v.shape[3], q_features.shape[3])
    numbers = [concrete(x) for x in (*widths, decays.weight.shape[1], block_size, form.lag, form.sinks)]
    grouped = not q.shape[2] <= v.shape[2]
    return q.device, q.dtype, v.dtype, *numbers, grouped, balance is not None, form.normalize, form.unrounded


@torch.compiler.assume_constant_result
def local_fault(*kind: Any) -> str | None:
    """Return `known_fault` for a `local_kind`."""
    return known_fault(small_local_call, kind)


def small_local_call(
    device: torch.device,
    dtype: torch.dtype,
    value_dtype: torch.dtype,
    width: int,
    value_width: int,
    num_features: int,
    num_rates: int,
    block_size: int,
    lag: int,
    num_sinks: int,
    grouped: bool,
    softmax: bool,
    normalize: bool,
    unrounded: bool,
) -> Results:
    """Make a small call of a `local_kind`; return its outputs by the kernel and by PyTorch in fp64.

    The inputs are always the same, and the global random state is left alone.
    """
    form = LocalForm(block_size, lag, num_sinks, width**-0.5, normalize, unrounded=unrounded)
    generator = torch.Generator().manual_seed(0)
    num_blocks = lag + 2
    num_heads = 2
    num_kv_heads = 1 if grouped else 2
    num_tokens = num_blocks * block_size

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=generator).to(device, dtype)

    q = random(1, num_tokens, num_heads, width, dtype=dtype)
    k = random(1, num_tokens, num_kv_heads, width, dtype=dtype)
    q_features = random(1, num_tokens, num_heads, num_features, dtype=dtype)
    v = random(1, num_tokens, num_kv_heads, value_width, dtype=value_dtype) - 0.5
    far_sums = random(1, num_kv_heads, num_blocks, num_rates, num_features, value_width + 1)
    weight = random(num_heads, num_rates)
    far_sums[:, :, :lag] = 0  # blocks from which nothing is far
    balance = random(num_heads) if softmax else None
    valid = torch.arange(num_tokens, device=device)[None] % 5 != 4
    sink_tokens = SinkTokens(k[:, :num_sinks], v[:, :num_sinks], valid[:, :num_sinks]) if num_sinks else None
    block_index = torch.arange(num_blocks, device=device)[None]
    o = triton_near_and_far(q, k, v, q_features, far_sums, valid, weight, balance, sink_tokens, block_index, form)
    exact = near_and_far(
        q.double(),
        k.double(),
        v,
        q_features.double(),
        far_sums.double(),
        valid,
        weight.double(),
        balance,
        sink_tokens,
        block_index,
        form,
    )
    return [o], [exact]


# mhla_hf/ops/local.py

SEGMENT_TOKENS = 2048  # without gradients, a long sequence is computed this many tokens at a time


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    k_features: torch.Tensor,
    decays: Decays,
    balance: torch.Tensor | None,
    form: LocalForm,
    *,
    key_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to near tokens by softmax and to far tokens by MHLA; the top of this file has the formula.

    Args:
        q: [B, T, H, D], queries of the near part, rotated; features if `balance` is None.
        k: [B, T, G, D], its keys.
        v: [B, T, G, V], values.
        q_features: [B, T, H, K], queries of the far part.
        k_features: [B, T, G, K], its keys.
        decays: The mixing of the far part.
        balance: [H], the log of the factor of the far part relative to e^score; None without a softmax.
        form: The options.
        key_mask: bool [B, T], as in `mhla`.
        starts: int64 [B], as in `mhla`; not along with cu_seqlens.
        cu_seqlens: int [N + 1], as in `mhla`.

    Returns:
        [B, T, H, V] in the dtype of the sums (at least fp32), or in v's if the Triton kernel rounds (`form.unrounded`).

    Raises:
        ValueError: If both `starts` and `cu_seqlens` are given, or `form.impl` is "triton" where it cannot run.
    """
    num_tokens, size = q.shape[1], form.block_size
    valid = q.new_ones(q.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    inverse = block_index = sequence_id = None
    if starts is not None:
        if cu_seqlens is not None:
            raise ValueError("starts: got a tensor along with cu_seqlens, expected None.")
        source, inverse = shift_to_start(starts.to(q.device), num_tokens)
    if cu_seqlens is not None:
        source, inverse, block_index, sequence_id = align_sequences(cu_seqlens, num_tokens, size)
    if inverse is not None:
        q, k, v, q_features, k_features = (
            MoveTokens.apply(x, source, inverse) for x in (q, k, v, q_features, k_features)
        )
        rows = torch.arange(len(valid), device=q.device)[:, None]
        valid = (source >= 0) & valid[rows, source.clamp(min=0)]
    if block_index is None:
        block_index = torch.arange((q.shape[1] + size - 1) // size, device=q.device)
    inputs = LocalInputs(
        q, k, v, q_features, k_features, valid, decays, balance, form, block_index[None], sequence_id=sequence_id
    )
    o, _ = attend_local(inputs)
    return o if inverse is None else MoveTokens.apply(o, inverse, source)


@dataclass
class PastSums:
    """The running sums of the far part as a state holds them.

    Args:
        sums: [B, G, R, K, V + 1], for each rate the sum over blocks j <= block - lag of lambda^(block - j) S_j, where S_j
            is the summary of block j (`block_summaries`).
        block: int [B], the block that the sums stand at.
    """

    sums: torch.Tensor
    block: torch.Tensor


@dataclass
class LocalInputs:
    """What near and far attention reads of a run of M blocks of C tokens, the first of which begins at a block edge.

    Args:
        q, k, v, q_features, k_features, decays, balance, form: As in `local_attention`, with T at most M * C.
        valid: bool [B, T], the tokens that are keys.
        block_index: int [B or 1, M], the index of each block in its sequence.
        sequence_id: int [M], the sequence of each block if several are packed.
        sink_tokens: Sinks from a state; None to find them among the tokens.
        past: Running sums from a state, for the sequence of the first block; None if nothing came before.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_features: torch.Tensor
    k_features: torch.Tensor
    valid: torch.Tensor
    decays: Decays
    balance: torch.Tensor | None
    form: LocalForm
    block_index: torch.Tensor
    sequence_id: torch.Tensor | None = None
    sink_tokens: SinkTokens | None = None
    past: PastSums | None = None

    def segment(self, first: int, end: int, past: PastSums | None) -> "LocalInputs":
        """Return the inputs of blocks `first` to `end`, which continue from `past`; only for one sequence per row."""
        tokens = slice(first * self.form.block_size, end * self.form.block_size)
        return LocalInputs(
            self.q[:, tokens],
            self.k[:, tokens],
            self.v[:, tokens],
            self.q_features[:, tokens],
            self.k_features[:, tokens],
            self.valid[:, tokens],
            self.decays,
            self.balance,
            self.form,
            self.block_index[:, first:end],
            sink_tokens=self.sink_tokens,
            past=past,
        )


def attend_local(
    inputs: LocalInputs, end_block: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the outputs of a run of blocks, and the running sums after it.

    Without gradients a long sequence is computed `SEGMENT_TOKENS` at a time, so that memory and cost per token do not grow.

    Args:
        inputs: The tokens and all that goes with them.
        end_block: int [B], the last block of each row, at which the returned sums stand; None to return no sums.

    Returns:
        The outputs, [B, T, H, V], and the running sums, [B, G, R, K, V + 1] (None without `end_block`).
    """
    q = inputs.q
    k = inputs.k
    v = inputs.v
    decays = inputs.decays
    form = inputs.form
    block_index = inputs.block_index
    size, num_blocks = form.block_size, block_index.shape[1]
    if form.sinks and inputs.sink_tokens is None:
        inputs = replace(inputs, sink_tokens=find_sinks(k, v, inputs.valid, form, inputs.sequence_id))
    impl = choose_implementation(
        form.impl,
        q.device,
        lambda: triton_refusal(q, k, v),
        lambda: local_fault(*local_kind(q, v, inputs.q_features, decays, inputs.balance, form)),
    )
    exists = torch.arange(num_blocks * size, device=q.device) < q.shape[1]
    inputs = replace(inputs, valid=resize_tokens(inputs.valid, num_blocks * size) & exists)
    learned = (q, k, v, inputs.q_features, inputs.k_features, decays.weight)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in learned)
    segment_blocks = max(SEGMENT_TOKENS // size, form.lag)
    short = num_blocks <= 2 * segment_blocks
    if short or needs_grad or inputs.sequence_id is not None or torch.compiler.is_compiling():
        o, summaries = attend_segment(inputs, impl)
        if end_block is None:
            return o, None
        return o, advance(inputs.past, summaries, decays, form.lag, block_index, end_block)

    outputs, past = [], inputs.past
    for first in range(0, num_blocks, segment_blocks):
        begin = max(first - form.lag, 0)
        end = min(first + segment_blocks, num_blocks)
        segment = inputs.segment(begin, end, past)
        o, summaries = attend_segment(segment, impl)
        outputs.append(o[:, (first - begin) * size :])
        last = segment.block_index[:, -1]
        last = last if end_block is None else torch.minimum(last, end_block)
        past = PastSums(advance(past, summaries, decays, form.lag, segment.block_index, last), last)
    return torch.cat(outputs, 1), None if past is None else past.sums


def advance(
    past: PastSums | None,
    summaries: torch.Tensor,
    decays: Decays,
    lag: int,
    block_index: torch.Tensor,
    end_block: torch.Tensor,
) -> torch.Tensor:
    """Advance running sums to a later block.

    Args:
        past: The sums so far, which already contain the blocks up to `past.block - lag`; None for none.
        summaries: [B, G, M, K, V + 1], the summaries of a run of blocks.
        decays: The decays.
        lag: The distance at which a block enters the sums.
        block_index: int [B or 1, M], the index of each block of the run.
        end_block: int [B], the block that the result stands at.

    Returns:
        [B, G, R, K, V + 1].
    """
    log_rate = decays.log_rate.to(summaries.dtype)
    distance = end_block[:, None] - block_index
    weight = torch.exp(log_rate[None, ..., None] * distance.clamp(min=0)[:, None, None])
    enters = distance >= lag
    if past is not None:
        enters = enters & (block_index > (past.block - lag)[:, None])
    weight = torch.where(enters[:, None, None], weight, 0)  # [B, G, R, M]
    sums = (weight @ summaries.flatten(3)).unflatten(3, summaries.shape[3:])
    if past is None:
        return sums
    return sums + torch.exp(log_rate * (end_block - past.block)[:, None, None])[..., None, None] * past.sums


def attend_segment(inputs: LocalInputs, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of all blocks at once.

    Args:
        inputs: The tokens and all that goes with them, with `valid` [B, M * C].
        impl: "torch" or "triton".

    Returns:
        The outputs, [B, T, H, V], and the summaries of the blocks, [B, G, M, K, V + 1].
    """
    form = inputs.form
    block_index = inputs.block_index
    past = inputs.past
    q_features = inputs.q_features
    summaries = block_summaries(inputs.k_features, inputs.v, inputs.valid, block_index, form)
    decays = inputs.decays.to(summaries.dtype)
    far_sums = decayed_sums(summaries.flatten(3), decays.log_rate, form.lag, inputs.sequence_id)
    far_sums = far_sums.unflatten(4, summaries.shape[3:])  # [B, G, M, R, K, V + 1]
    if past is not None:
        # Blocks before `past.block` were complete then and hold no new token, so what they read does not matter.
        elapsed = (block_index - past.block[:, None]).clamp(min=0)[:, None, :, None]
        decay = torch.exp(decays.log_rate[:, None] * elapsed)  # [B, G, M, R]
        if inputs.sequence_id is not None:
            decay = torch.where((inputs.sequence_id == inputs.sequence_id[0])[:, None], decay, 0)
        far_sums = far_sums + decay[..., None, None] * past.sums[:, :, None]
    if decays.power is not None:
        scale = decays.length_scale(block_index, form.lag).repeat_interleave(form.block_size, 1)  # [B or 1, M * C, H]
        q_features = q_features * resize_tokens(scale, q_features.shape[1])[..., None].to(q_features.dtype)
    attend = triton_near_and_far if impl == "triton" else near_and_far
    o = attend(
        inputs.q,
        inputs.k,
        inputs.v,
        q_features,
        far_sums,
        inputs.valid,
        decays.weight,
        inputs.balance,
        inputs.sink_tokens,
        block_index,
        form,
    )
    return o, summaries


def block_summaries(
    k_features: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, block_index: torch.Tensor, form: LocalForm
) -> torch.Tensor:
    """Sum k v^T over the tokens of each block that can be far (paper eq. 4); a last column sums the keys alone.

    Args:
        k_features: [B, T, G, K].
        v: [B, T, G, V].
        valid: bool [B, M * C], the tokens that are keys.
        block_index: int [B or 1, M].
        form: The options.

    Returns:
        [B, G, M, K, V + 1] in fp32, or in fp64 if an input is.
    """
    num_kv_heads = v.shape[2]
    sum_dtype = torch.float64 if torch.float64 in (k_features.dtype, v.dtype) else torch.float32
    k_features, v = (resize_tokens(x, valid.shape[1]) for x in (k_features, v))
    is_far = valid & ~is_sink(block_index, form)
    k_features = torch.where(is_far[..., None, None], k_features, 0)
    v = with_ones(torch.where(valid[..., None, None], v, 0))
    k_features, v = (by_block_and_group(x, num_kv_heads, form.block_size, sum_dtype) for x in (k_features, v))
    return k_features.mT @ v


def is_sink(block_index: torch.Tensor, form: LocalForm) -> torch.Tensor:
    """Return which tokens are sinks, and therefore never far, bool [B or 1, M * C]."""
    place_in_block = torch.arange(form.block_size, device=block_index.device)
    position = (block_index[:, :, None] * form.block_size + place_in_block).flatten(1)
    return position < form.sinks


def find_sinks(
    k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor, form: LocalForm, sequence_id: torch.Tensor | None
) -> SinkTokens:
    """Return the first `form.sinks` tokens of each row, or, for packed sequences, of the sequence of each block."""
    if sequence_id is None:
        return SinkTokens(k[:, : form.sinks], v[:, : form.sinks], valid[:, : form.sinks])
    first = torch.searchsorted(sequence_id, sequence_id) * form.block_size  # first token of the block's sequence
    token = (first[:, None] + torch.arange(form.sinks, device=k.device)).clamp(max=k.shape[1] - 1)
    return SinkTokens(k[:, token], v[:, token], valid[:, token])


# mhla_hf/ops/local_state.py

# Maps keys [B, N, G, D] and their rotation angles [B, N, 1, A] to features of the far part, [B, N, G, K].
KeyMap = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class LocalState(RowState):
    """The decoder state of near and far attention, for B rows.

    It is changed in place, and its tensors keep their addresses. Nothing has a gradient. S is the number of sinks and
    W = (lag + 1) * C the size of the ring; `ring_slot` says which token is in which slot.

    Args:
        block_size: Tokens per block, C.
        k: [B, S + W, G, D], keys: the sinks, then the ring.
        v: [B, S + W, G, V], values.
        valid: bool [B, S + W], the slots that hold a real token.
        angles: [B, S + W, 1, A], how each key was rotated. The far part reads keys before their rotation and undoes it.
            A is 0 if there is nothing to undo.
        running: [B, G, R, V + 1, K], the sums of `PastSums` at the block of the last token, transposed because V + 1 is an
            awkward width for the vector units that decode. At least fp32.
        pending: [B, G, V + 1, K], the part of the summary that enters the sums next which has been read so far. At least
            fp32.
        position: int64 [B], the tokens that each row has seen.
        furthest: int64 [B], the largest position before tokens were taken back.
        cropped: Tokens taken back by `crop` whose share of the sums `rewind` has yet to undo.
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
    @torch.inference_mode(False)  # tensors made in inference mode could not be written outside of it
    def empty(
        k: torch.Tensor,
        v: torch.Tensor,
        num_rates: int,
        num_features: int,
        form: LocalForm,
        angles: torch.Tensor | None = None,
    ) -> "LocalState":
        """Create a state that has seen no tokens.

        Args:
            k, v: Keys [B, T, G, D] and values [B, T, G, V], which give the shapes, dtypes, and device; not read.
            num_rates: Number of decay rates, R.
            num_features: Width of the features of the far part, K.
            form: The options.
            angles: [.., A], rotation angles, which give A; None is A = 0.
        """
        angles = k.new_zeros(0) if angles is None else angles
        batch, _, num_kv_heads, value_dim = v.shape
        num_slots = form.sinks + (form.lag + 1) * form.block_size
        sum_dtype = torch.promote_types(k.dtype, torch.float32)
        return LocalState(
            block_size=form.block_size,
            k=k.new_zeros(batch, num_slots, *k.shape[2:]),
            v=v.new_zeros(batch, num_slots, *v.shape[2:]),
            valid=k.new_zeros(batch, num_slots, dtype=torch.bool),
            angles=angles.new_zeros(batch, num_slots, 1, angles.shape[-1]),
            running=k.new_zeros(batch, num_kv_heads, num_rates, value_dim + 1, num_features, dtype=sum_dtype),
            pending=k.new_zeros(batch, num_kv_heads, value_dim + 1, num_features, dtype=sum_dtype),
            position=k.new_zeros(batch, dtype=torch.int64),
            furthest=k.new_zeros(batch, dtype=torch.int64),
        )

    def crop(self, count: int) -> None:
        """Remove the last `count` tokens of every row; `rewind` corrects the sums before they are next read.

        Raises:
            ValueError: If a row has fewer tokens, or if the ring has already overwritten tokens that would be needed.
        """
        torch.maximum(self.furthest, self.position, out=self.furthest)
        behind = int((self.furthest - self.position).max()) + count
        if behind > self.block_size:
            reach = count - (behind - self.block_size)
            raise ValueError(f"count: got {count}, expected at most {reach}, the tokens that the ring still holds.")
        shortest = int(self.position.min())
        if count > shortest:
            raise ValueError(f"count: got {count}, expected at most {shortest}, the length of the shortest row.")
        self.cropped += count
        self.position.sub_(count)

    @torch.no_grad()
    def rewind(self, decays: Decays, map_keys: KeyMap, form: LocalForm) -> None:
        """Undo in the sums what `crop` took from the positions; arguments as in `continue_local`."""
        decays = decays.to(self.running.dtype)
        block = (self.position - 1).clamp(min=0) // form.block_size
        old_block = (self.position + self.cropped - 1).clamp(min=0) // form.block_size
        entered = self.summary(old_block - form.lag, form.block_size, map_keys, form)  # when `old_block` was opened
        decay = torch.exp(decays.log_rate)[..., None, None]
        earlier = (self.running - decay**form.lag * entered[:, :, None]) / decay
        block, old_block = (x.view(-1, 1, 1, 1, 1) for x in (block, old_block))
        # Where nothing is far, or where a rate keeps less than a rounding error, the subtraction leaves only error.
        earlier = torch.where((block >= form.lag) & (decay > torch.finfo(decay.dtype).eps), earlier, 0)
        self.running.copy_(torch.where(block < old_block, earlier, self.running))
        self.cropped = 0
        self.refresh_pending(map_keys, form)

    def refresh_pending(self, map_keys: KeyMap, form: LocalForm) -> None:
        """Compute `pending` anew from the ring."""
        last = self.position - 1
        count = torch.where(last >= 0, last % form.block_size + 1, 0)[:, None]
        block = last.clamp(min=0) // form.block_size - form.lag + 1
        self.pending.copy_(self.summary(block, count, map_keys, form))

    def summary(
        self, block: torch.Tensor, count: torch.Tensor | int, map_keys: KeyMap, form: LocalForm
    ) -> torch.Tensor:
        """Compute the transposed summary of one block of each row from the ring.

        Args:
            block: int64 [B], the block of each row.
            count: The number of its first tokens to sum, a number or int64 [B, 1].
            map_keys: See `KeyMap`.
            form: The options.

        Returns:
            [B, G, V + 1, K].
        """
        place_in_block = torch.arange(form.block_size, device=block.device)
        position = block[:, None] * form.block_size + place_in_block
        rows = torch.arange(len(block), device=block.device)[:, None]
        slot = self.slot(position, form)
        is_far = self.valid[rows, slot] & (position >= form.sinks) & (place_in_block < count)
        k_features = map_keys(self.k[rows, slot], self.angles[rows, slot])
        k_features = torch.where(is_far[..., None, None], k_features, 0).to(self.running.dtype)
        v = with_ones(torch.where(is_far[..., None, None], self.v[rows, slot], 0)).to(self.running.dtype)
        with torch.autocast(v.device.type, enabled=False):
            return v.permute(0, 2, 3, 1) @ k_features.transpose(1, 2)

    def slot(self, position: torch.Tensor, form: LocalForm) -> torch.Tensor:
        """Return the slot of the token at `position`; an arbitrary one for negative positions."""
        return ring_slot(position, self.k.shape[1], form.sinks)


def continue_local(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    map_keys: KeyMap,
    decays: Decays,
    balance: torch.Tensor | None,
    form: LocalForm,
    state: LocalState,
    *,
    fresh: bool,
    key_mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continue `local_attention` by T new tokens of every row, and add them to the state.

    Gradients flow among the new tokens, but not through the state.

    Args:
        q, k, v, q_features, decays, balance, form, key_mask, starts: As in `local_attention`.
        map_keys: Computes the features of keys for the far part; see `KeyMap`.
        state: The state; changed in place.
        fresh: Whether the state has seen nothing yet, which saves reading it.
        angles: [B, T, 1, A], how the keys were rotated; None is A = 0.

    Returns:
        [B, T, H, V], as in `local_attention`.
    """
    if angles is None:
        angles = state.angles.new_zeros(*q.shape[:2], 1, 0)
    if state.cropped:
        state.rewind(decays, map_keys, form)
    if q.shape[1] == 1 and not fresh:
        is_key = None if key_mask is None else key_mask[:, 0]
        takes_part = None if starts is None else starts.to(q.device) == 0
        with torch.autocast(q.device.type, enabled=False):
            return local_step(q, k, v, q_features, map_keys, decays, balance, form, state, is_key, takes_part, angles)
    size = form.block_size
    num_tokens = q.shape[1]
    before = state.position.clone()
    num_new = torch.full_like(before, num_tokens) if starts is None else num_tokens - starts.to(q.device)
    num_blocks, num_slots = (num_tokens + size - 1) // size, 0
    first_block = torch.zeros_like(before)
    if not fresh:  # begin early enough to cover the window of the open block
        num_blocks, num_slots = num_blocks + form.lag, state.k.shape[1]
        first_block = ((before - 1).clamp(min=0) // size - form.lag + 1).clamp(min=0)
    layout = TokenLayout(before, num_new, num_tokens, first_block, num_blocks, size, num_slots, q.device, form.sinks)
    valid = key_mask if key_mask is not None else torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    valid = layout.place_keys(state.valid, valid) & layout.filled
    k, v = layout.place_keys(state.k, k), layout.place_keys(state.v, v)
    angles = layout.place_keys(state.angles, angles)
    q = layout.place_queries(q)
    q_features = layout.place_queries(q_features)
    k_features = map_keys(k, angles)
    past = sink_tokens = None
    if not fresh:
        past = PastSums(state.running.mT, (before - 1).clamp(min=0) // size)
    with torch.no_grad():
        for held, laid_out in ((state.k, k), (state.v, v), (state.valid, valid), (state.angles, angles)):
            layout.keep(held, laid_out)
        state.position.copy_(before + num_new)
    if not fresh and form.sinks:  # after the new tokens are written, which may be sinks
        sinks = slice(0, form.sinks)
        sink_tokens = SinkTokens(state.k[:, sinks], state.v[:, sinks], state.valid[:, sinks])
    inputs = LocalInputs(
        q, k, v, q_features, k_features, valid, decays, balance, form, layout.blocks, sink_tokens=sink_tokens, past=past
    )
    with torch.autocast(q.device.type, enabled=False):
        o, running = attend_local(inputs, (before + num_new - 1).clamp(min=0) // size)
    assert running is not None  # `attend_local` returns sums for an end block
    with torch.no_grad():
        state.running.copy_(running.mT)
        state.refresh_pending(map_keys, form)
    return layout.take_back(o)


@torch.no_grad()
def local_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_features: torch.Tensor,
    map_keys: KeyMap,
    decays: Decays,
    balance: torch.Tensor | None,
    form: LocalForm,
    state: LocalState,
    is_key: torch.Tensor | None = None,
    takes_part: torch.Tensor | None = None,
    angles: torch.Tensor | None = None,
) -> torch.Tensor:
    """Continue `local_attention` by a single token of every row, with the same graph for every position.

    Args:
        q, k, v, q_features, map_keys, decays, balance, form, state, angles: As in `continue_local`.
        is_key: bool [B], False for rows whose token is padding; None if there are none.
        takes_part: bool [B], False for rows that have not begun, which stay as they are; None if there are none.

    Returns:
        [B, 1, H, V] in the dtype of the sums.
    """
    size = form.block_size
    lag = form.lag
    sum_dtype = state.running.dtype
    position = state.position
    batch = len(position)
    num_kv_heads = k.shape[2]
    share = q.shape[2] // k.shape[2]
    decays = decays.to(sum_dtype)
    write_token(k, v, angles, is_key, state, form)

    # The first token of a block moves the sums on to it and lets the pending summary enter.
    place_in_block = position % size
    opens = place_in_block == 0 if takes_part is None else (place_in_block == 0) & takes_part
    opens = opens.view(-1, 1, 1, 1, 1)
    decay = torch.exp(decays.log_rate)[..., None, None]
    state.running.mul_(torch.where(opens, decay, 1))
    state.running.addcmul_(torch.where(opens, decay**lag, 0), state.pending[:, :, None])
    add_pending_token(state, map_keys, form, opens, takes_part)

    slots = torch.arange(state.k.shape[1], device=position.device)
    age = (position[:, None] - slots + form.sinks) % (len(slots) - form.sinks)  # of the tokens in the ring
    oldest_age = place_in_block + (lag - 1) * size
    in_window = torch.where(slots < form.sinks, slots <= position[:, None], age <= oldest_age[:, None])
    visible = (state.valid & in_window)[:, None, None]
    query = q.reshape(batch, num_kv_heads, share, -1).to(sum_dtype)
    score = (query @ state.k.permute(0, 2, 3, 1).to(sum_dtype)) * form.scale
    q_features = q_features[:, 0].to(sum_dtype)
    if decays.power is not None:
        q_features = q_features * decays.length_scale(position // size, lag)[..., None]
    # [B, G, H / G, 1, K] * [G, H / G, R, 1]
    expanded = q_features.view(batch, num_kv_heads, share, 1, -1) * decays.weight.view(num_kv_heads, share, -1, 1)
    far = expanded.flatten(3) @ state.running.mT.flatten(2, 3)
    near_v = state.v.transpose(1, 2).to(sum_dtype)
    has_far = (position >= lag * size).view(-1, 1, 1, 1)
    total_weight = decays.weight.sum(-1).to(sum_dtype).view(num_kv_heads, share, 1)
    balance = None if balance is None else balance.to(sum_dtype).view(num_kv_heads, share, 1)
    o = combine(score, visible, near_v, far, total_weight, balance, has_far, form).flatten(1, 2)[:, None]
    state.position.add_(1 if takes_part is None else takes_part)
    return o if takes_part is None else o.masked_fill(~takes_part.view(-1, 1, 1, 1), 0)


def write_token(
    k: torch.Tensor,
    v: torch.Tensor,
    angles: torch.Tensor | None,
    is_key: torch.Tensor | None,
    state: LocalState,
    form: LocalForm,
) -> None:
    """Write one new token per row into the slot of its position; arguments as in `local_step`."""
    position = state.position
    rows = torch.arange(len(position), device=position.device)
    slot = state.slot(position, form)
    for held, new in ((state.k, k[:, 0]), (state.v, v[:, 0])):
        new = new if is_key is None else new.masked_fill(~is_key[:, None, None], 0)
        held[rows, slot] = new.to(held.dtype)
    if angles is not None:
        state.angles[rows, slot] = angles[:, 0].to(state.angles.dtype)
    state.valid[rows, slot] = torch.ones_like(position, dtype=torch.bool) if is_key is None else is_key


def add_pending_token(
    state: LocalState, map_keys: KeyMap, form: LocalForm, opens: torch.Tensor, takes_part: torch.Tensor | None
) -> None:
    """Add to the pending summary of each row the old token that is `lag - 1` blocks behind its position.

    Args:
        state, map_keys, form, takes_part: As in `local_step`.
        opens: bool [B, 1, 1, 1, 1], the rows whose token opens a block, where the pending summary starts from zero.
    """
    sum_dtype = state.pending.dtype
    old_position = state.position - (form.lag - 1) * form.block_size
    rows = torch.arange(len(old_position), device=old_position.device)
    slot = state.slot(old_position, form)
    is_far = (old_position >= form.sinks) & state.valid[rows, slot]
    is_far = is_far if takes_part is None else is_far & takes_part
    k_features = map_keys(state.k[rows, slot][:, None], state.angles[rows, slot][:, None])[:, 0]
    k_features = k_features.masked_fill(~is_far[:, None, None], 0).to(sum_dtype)
    old_v = with_ones(state.v[rows, slot]).to(sum_dtype)
    state.pending.mul_(~opens[..., 0]).addcmul_(old_v[..., None], k_features[:, :, None])


# mhla_hf/nn/heads.py

class HeadSplit:
    """The KV heads of one layer, each of which is softmax or MHLA; query heads go with the KV head that they read.

    Tensors are cut into slices instead of being gathered by an index: no index has to be moved to a device, and a single run
    of heads is a view.

    Args:
        softmax_heads: The KV heads that keep softmax.
        num_kv_heads: The number of KV heads of the layer, G.

    Attributes:
        counts: The number of softmax heads (key True) and of MHLA heads (key False).
        runs: Consecutive heads of one kind, each as (first KV head, one past the last, whether they are softmax).
    """

    def __init__(self, softmax_heads: Sequence[int], num_kv_heads: int):
        self.softmax_heads = sorted(softmax_heads)
        self.num_kv_heads = num_kv_heads
        self.counts = {True: len(self.softmax_heads), False: num_kv_heads - len(self.softmax_heads)}
        self.runs: list[tuple[int, int, bool]] = []
        first = 0
        for end in range(1, num_kv_heads + 1):
            is_softmax = first in self.softmax_heads
            if end == num_kv_heads or (end in self.softmax_heads) != is_softmax:
                self.runs.append((first, end, is_softmax))
                first = end

    def part(self, x: torch.Tensor, softmax: bool, dim: int) -> torch.Tensor:
        """Return the softmax heads of `x`, or else its MHLA heads.

        Args:
            x: A tensor with the G KV heads, or their H query heads, along `dim`.
            softmax: Which of the two.
            dim: The axis of the heads.
        """
        share = x.shape[dim] // self.num_kv_heads
        parts = [
            x.narrow(dim, first * share, (end - first) * share)
            for first, end, is_softmax in self.runs
            if is_softmax == softmax
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Mapping[bool, torch.Tensor], dim: int) -> torch.Tensor:
        """Join the softmax heads (key True) and the MHLA heads (key False) in their original order along `dim`."""
        pieces, begin = [], {True: 0, False: 0}
        for first, end, is_softmax in self.runs:
            size = (end - first) * parts[is_softmax].shape[dim] // self.counts[is_softmax]
            pieces.append(parts[is_softmax].narrow(dim, begin[is_softmax], size))
            begin[is_softmax] += size
        return torch.cat(pieces, dim)

    def of_rank(self, rank: int, size: int) -> "HeadSplit":
        """Return the heads of one of `size` tensor-parallel processes, which take them in order, renumbered from 0."""
        count = self.num_kv_heads // size
        return HeadSplit([head - rank * count for head in self.softmax_heads if head // count == rank], count)


# mhla_hf/nn/features.py

RELU_EPS = {"relu": 1e-6, "plain_relu": 0.0}  # added to relu(x); keeps the denominator from vanishing
INITIAL_WEIGHT_SCALE = {"hedgehog": 1.0, "softmax": 1.0, "exp": 0.35}  # learned maps start at this times the identity
MAX_EXPONENT = 6.0  # of the "exp" map


class FeatureMap(nn.Module):
    """Maps [B, T, H, K] to features [B, T, H, F]; queries and keys use the same kind with weights of their own.

    Args:
        kind: "relu", "plain_relu", "elu", "identity", "hedgehog", "softmax" or "exp"; see `MHLASettings.feature_map`.
        num_heads: Number of heads, H; learned maps have one W per head.
        head_dim: Width of the input, K.
    """

    by_head = True  # parameters have the heads as their first axis, along which tensor parallelism splits them

    def __init__(self, kind: str, num_heads: int, head_dim: int):
        super().__init__()
        self.kind = kind
        self.head_dim = head_dim
        if kind in INITIAL_WEIGHT_SCALE:
            self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        if kind == "exp":
            self.bias = nn.Parameter(torch.empty(num_heads, head_dim))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    @property
    def num_features(self) -> int:
        """Width of the output, F."""
        return 2 * self.head_dim if self.kind == "hedgehog" else self.head_dim

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the initial value of each parameter, for models that are built on the meta device and filled later."""
        values = {}
        if self.kind in INITIAL_WEIGHT_SCALE:
            identity = torch.eye(self.head_dim).expand(self.weight.shape)
            values["weight"] = INITIAL_WEIGHT_SCALE[self.kind] * identity
        if self.kind == "exp":
            values["bias"] = torch.zeros(self.bias.shape)
        return values

    def forward(self, x: torch.Tensor, heads: HeadSplit | None = None) -> torch.Tensor:
        """Compute features.

        Args:
            x: [B, T, H, K]; with `heads`, the MHLA heads alone.
            heads: Which of the H heads are MHLA; None if all are.

        Returns:
            Features with as many heads as x, in x's dtype.
        """
        if self.kind in RELU_EPS:
            return torch.relu(x) + RELU_EPS[self.kind] if RELU_EPS[self.kind] else torch.relu(x)
        if self.kind == "elu":
            return F.elu(x) + 1.0
        if self.kind == "identity":
            return x
        weight = self.weight if heads is None else heads.part(self.weight, False, 0)
        y = torch.einsum("bthk,hkf->bthf", x, weight.to(x.dtype)).float()
        if self.kind == "softmax":
            return y.softmax(-1).to(x.dtype)
        if self.kind == "exp":
            bias = self.bias if heads is None else heads.part(self.bias, False, 0)
            return (torch.exp((y + bias).clamp(max=MAX_EXPONENT)) * self.head_dim**-0.5).to(x.dtype)
        if torch.compiler.is_compiling():  # which would not fuse a stack
            both = torch.where(torch.arange(2, device=y.device)[:, None] == 0, y[..., None, :], -y[..., None, :])
        else:
            both = torch.stack([y, -y], -2)
        return both.softmax(-1).flatten(-2).to(x.dtype)


# mhla_hf/nn/settings.py

FORMAT_VERSION = 3
# Stands in config.json as `transformers_weights`, the name of the weights file: the softmax classes of transformers fail on
# this missing file, and the error shows the sentence.
NO_SOFTMAX = "these are no weights of a softmax model, load them with trust_remote_code=True or with mhla_hf installed"
MAX_BLOCKS = 16_384  # a mixing matrix of this size takes a gigabyte
MAX_BLOCK_SIZE = 65_536  # tokens; a cache allocates keys and values of a block at its first step
MAX_DECAYS = 64
MAX_WINDOW_BLOCKS = 1_024


def is_whole(value: object, least: int, most: int = sys.maxsize) -> bool:
    """Whether `value` is an int from `least` to `most`; bools do not count."""
    return type(value) is int and least <= value <= most


def is_layout(layout: object) -> bool:
    """Whether `layout` is None or a list with the number of blocks along each of 1 to 3 axes."""
    if layout is None:
        return True
    if not isinstance(layout, list) or not 1 <= len(layout) <= 3:
        return False
    return all(is_whole(count, 1) for count in layout) and prod(layout) <= MAX_BLOCKS


def is_choice_of_layers(layers: object) -> bool:
    """Whether `layers` is "all", "2/3", or a list of different layer indices."""
    if not isinstance(layers, list):
        return layers in ("all", "2/3")
    return len(layers) > 0 and all(is_whole(index, 0) for index in layers) and len(set(layers)) == len(layers)


def is_choice_of_heads(heads: object) -> bool:
    """Whether `heads` is None, or a dictionary from layer indices (strings of digits) to lists of KV heads."""
    if not isinstance(heads, dict):
        return heads is None
    for layer, kv_heads in heads.items():
        if not (isinstance(layer, str) and layer.isdecimal() and isinstance(kv_heads, list)):
            return False
    return all(kv_heads and all(is_whole(head, 0) for head in kv_heads) for kv_heads in heads.values())


SettingCheck = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what the error says was expected


def one_of(*allowed: Any) -> SettingCheck:
    """Return the check of a setting that allows only these values; types must match, so that 1 does not pass for True."""

    def is_allowed(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in allowed)

    return is_allowed, f"one of {list(allowed)}"


def whole_number(least: int, most: int) -> SettingCheck:
    """Return the check of a setting that allows ints from `least` to `most`."""
    return (lambda value: is_whole(value, least, most)), f"a whole number from {least} to {most}"


SETTING_CHECKS: dict[str, SettingCheck] = {
    "block_size": whole_number(1, MAX_BLOCK_SIZE),
    "num_blocks": whole_number(1, MAX_BLOCKS),
    "layout": (is_layout, f"1 to 3 counts of blocks, each at least 1, and at most {MAX_BLOCKS} blocks in all"),
    "feature_map": one_of("relu", "plain_relu", "elu", "hedgehog", "softmax", "exp", "identity"),
    "normalize": one_of(True, False, "official"),
    "mixing_start": one_of("locality", "uniform"),
    "learn_mixing": one_of(True, False),
    "mixing_form": one_of("softmax", "direct", "free", "decay"),
    "free_decay": one_of(True, False),
    "length_power": one_of(True, False),
    "num_decays": whole_number(1, MAX_DECAYS),
    "local": one_of(None, "softmax"),
    "window": whole_number(1, MAX_WINDOW_BLOCKS),
    "sinks": (lambda value: is_whole(value, 0), "a whole number of at least 0"),
    "window_dropout": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
    "per_head": one_of(True, False),
    "output_norm": one_of(True, False),
    "gate": one_of(True, False),
    "cpe": (lambda value: is_whole(value, 0) and (value % 2 == 1 or value == 0), "0 or an odd kernel size"),
    "rope": one_of("before", "after", "near"),
    "layers": (is_choice_of_layers, '"all", "2/3" or a list of different layer indices, each at least 0'),
    "softmax_heads": (is_choice_of_heads, "a dictionary of layer indices and lists of KV heads, each at least 0"),
    "impl": one_of(*IMPLEMENTATIONS),
}


@dataclass
class MHLASettings:
    """How MHLA layers are built. Saved with the model, and checked when made and when loaded.

    Args:
        block_size: Tokens per block of a sequence (the paper's chunk; 64 in section 5.4).
        num_blocks: Number of rows and columns M of the learned mixing matrix. Longer sequences work: rows beyond M repeat
            the last row by distance and continue it with a geometric tail (`Mixing`). For encoders, the number of blocks of
            the longest input.
        layout: Number of blocks along each axis of a grid of tokens: [rows, columns] for images, [frames, rows, columns] for
            video; block_size and num_blocks are then ignored. None for sequences.
        feature_map: "relu" (the paper's; max(x, 0) + 1e-6), "plain_relu" (max(x, 0), Sana's), "elu" (elu(x) + 1),
            "identity", or a map that is learned per head: "softmax" (of x W), "hedgehog" (softmax(x W) and softmax(-x W),
            concatenated to twice the width), "exp" (e^(x W + b), with exponents of at most 6).
        normalize: True divides by the sum of the weights (eq. 4), False leaves this to `output_norm` (section 4.1), and
            "official" is the denominator of the released vision code (not for causal models).
        mixing_start: Initial mixing: "locality" (section 4.2: 1 - distance / number of blocks, rows summing to one) or
            "uniform" (plain linear attention).
        learn_mixing: Whether the mixing is trained.
        mixing_form: How mixing is parametrized. "softmax" learns a matrix of logits (weights are positive, rows sum to one).
            "direct" learns the weights themselves, as released checkpoints do (negative ones are refused when loaded), and
            "free" allows any sign (the released video checkpoints). "decay" is a sum of `num_decays` exponentials of the
            distance per head. It has no matrix, so cost is linear and the decoder state constant; it starts at plain linear
            attention.
        num_decays: Number of exponentials R of the "decay" form. The first has rate 1, that is, no decay.
        free_decay: Whether the rate of the first one is learned, too.
        length_power: Whether the far weights of a block are divided by n^a, where n is the number of blocks that are far
            from it, and a is learned per head (with `local`).
        local: None, or "softmax": exact softmax over the last `window` blocks and the first `sinks` tokens, and MHLA by
            decays for all tokens between, under one normalizer (language models only; needs "decay").
        window: Blocks in the window of `local`, the open block included.
        sinks: Number of tokens at the start of a sequence that stay in the softmax of `local`.
        window_dropout: Probability, in training, that a forward pass leaves all blocks before the open one to the far part.
        per_head: Whether every query head has its own mixing matrix, instead of one per layer.
        output_norm: Whether RMSNorm is applied to each head's output (section 4.1 for language and video).
        gate: Whether the output is multiplied by silu(W x + b), which starts at one.
        cpe: Kernel size of a depthwise convolution of v over the grid that is added to the output (the paper's CPE, appendix
            F.2) and starts at zero; 0 for none. Grids only.
        rope: Where the rotary embedding goes. "before" rotates q and k before the feature map (converted models). "after"
            rotates the features (the paper's order; a denominator then uses the features without rotation). "near" rotates
            q and k for the softmax of `local` alone: features of rotated keys depend on absolute positions, and fail beyond
            the lengths they were fitted on.
        layers: "all", "2/3" (layers 0, 3, 6, ... keep softmax), or a list, tuple, or range of layer indices.
        softmax_heads: KV heads that keep softmax, with the query heads that read them and their whole past in the cache:
            {layer index: [KV head, ...]}. A layer that would list all of its KV heads is left out of `layers` instead.
            Needs "decay".
        impl: Implementation of the operator: "auto", "torch" or "triton"; without decays also "reference".
    """

    block_size: int = 64
    num_blocks: int = 32
    layout: list[int] | tuple[int, ...] | None = None
    feature_map: str = "hedgehog"
    normalize: bool | str = True
    mixing_start: str = "locality"
    learn_mixing: bool = True
    mixing_form: str = "softmax"
    num_decays: int = 2
    free_decay: bool = False
    length_power: bool = False
    local: str | None = None
    window: int = 2
    sinks: int = 4
    window_dropout: float = 0.0
    per_head: bool = False
    output_norm: bool = False
    gate: bool = False
    cpe: int = 0
    rope: str = "before"
    layers: str | list[int] | tuple[int, ...] = "all"
    softmax_heads: dict[str, list[int]] | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.layout, (list, tuple, range)):
            self.layout = list(self.layout)
        if isinstance(self.layers, (list, tuple, range)):
            self.layers = list(self.layers)
        if isinstance(self.softmax_heads, dict):
            sorted_heads = {str(layer): sorted(set(heads)) for layer, heads in self.softmax_heads.items()}
            self.softmax_heads = sorted_heads or None
        for name, (is_valid, expected) in SETTING_CHECKS.items():
            if not is_valid(getattr(self, name)):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected {expected}.")
        if isinstance(self.layers, list):
            self.layers = sorted(self.layers)
        self.check_combinations()

    def check_combinations(self) -> None:
        """Raise ValueError if settings that are valid by themselves do not go together."""
        decay = self.mixing_form == "decay"
        local = self.local is not None
        if decay and self.layout is not None:
            expected = '"softmax", "direct" or "free" for grids'
            raise ValueError(f'mixing_form: got "decay" with a layout, expected {expected}.')
        if decay and self.rope == "after":
            raise ValueError('rope: got "after" with mixing_form="decay", expected "before".')
        if decay and self.impl == "reference":
            raise ValueError('impl: got "reference" with mixing_form="decay", expected "auto", "torch" or "triton".')
        if self.free_decay and not decay:
            raise ValueError(f'free_decay: got true with mixing_form={self.mixing_form!r}, expected "decay".')
        if self.length_power and not local:
            raise ValueError('length_power: got true without local="softmax", expected false.')
        if self.rope == "near" and not local:
            raise ValueError('rope: got "near" without local="softmax", expected "before" or "after".')
        if self.softmax_heads and (not decay or self.gate):
            got = "gate=true" if decay else f"mixing_form={self.mixing_form!r}"
            raise ValueError(f'softmax_heads: got some with {got}, expected mixing_form="decay" and no gate.')
        if local and not decay:
            raise ValueError(f'mixing_form: got {self.mixing_form!r} with local="softmax", expected "decay".')
        if local and not self.normalize:
            raise ValueError('normalize: got false with local="softmax", expected true.')
        if local and self.sinks > self.block_size:
            raise ValueError(f"sinks: got {self.sinks}, expected at most the block_size of {self.block_size}.")

    def resolve_layers(self, num_layers: int) -> list[int]:
        """Return the indices of the MHLA layers in a model of `num_layers` layers, in order.

        Raises:
            ValueError: If there would be none, or an index is too large.
        """
        if self.layers == "all":
            return list(range(num_layers))
        if isinstance(self.layers, str):  # "2/3"
            layers = [i for i in range(num_layers) if i % 3]
            if not layers:
                raise ValueError(f'layers: got "2/3" for {num_layers} layer, expected a model of at least 2 layers.')
            return layers
        if self.layers[-1] >= num_layers:
            raise ValueError(
                f"layers: got index {self.layers[-1]}, expected less than the model's {num_layers} layers."
            )
        return list(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values for `config.json`, with the version of this format."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MHLASettings":
        """Return the settings that `to_dict` wrote.

        Raises:
            ValueError: If the format is newer than this version reads, or a setting is unknown or invalid.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"mhla: got {type(values).__name__}, expected a dictionary of settings.")
        values = dict(values)
        version = values.pop("format_version", FORMAT_VERSION)
        if not is_whole(version, 1, FORMAT_VERSION):
            expected = f"1 to {FORMAT_VERSION}; update mhla_hf to load a newer checkpoint"
            raise ValueError(f"format_version: got {version!r}, expected {expected}.")
        unknown = sorted(set(values) - set(SETTING_CHECKS))
        if unknown:
            raise ValueError(f"mhla: got unknown setting {unknown[0]!r}, expected a field of MHLASettings.")
        return cls(**values)


# mhla_hf/nn/core.py

OPEN_GATE_BIAS = 1.2784645  # silu(OPEN_GATE_BIAS) == 1

# A rotary embedding: from q [B, T, H, K] and k [B, T, G, K] to both rotated.
Rotation = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class OutputNorm(nn.Module):
    """RMSNorm over the output of each head, with one weight [V] for all heads (paper section 4.1).

    Args:
        value_dim: Width V of a head's output.
        eps: Added to the mean square.
    """

    def __init__(self, value_dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(value_dim))

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the initial value of each parameter, for models that are built on the meta device and filled later."""
        return {"weight": torch.ones(self.weight.shape)}

    def forward(self, o: torch.Tensor) -> torch.Tensor:
        """Normalize o [.., V]; if it and the weight differ in dtype, in fp32 (fp64 if one of them is)."""
        weight: torch.Tensor = self.weight
        if o.dtype != weight.dtype:
            dtype = torch.promote_types(torch.promote_types(o.dtype, weight.dtype), torch.float32)
            o, weight = o.to(dtype), weight.to(dtype)
        return F.rms_norm(o, weight.shape, weight, self.eps)


class OutputGate(nn.Linear):
    """Computes the gate of every output channel before its silu, which is one at the start (paper section 4.1).

    The core applies the silu, so that quantization and LoRA, which replace or wrap linear layers, see a linear layer.
    """

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the initial value of each parameter, for models that are built on the meta device and filled later."""
        return {"weight": torch.zeros(self.weight.shape), "bias": torch.full(self.bias.shape, OPEN_GATE_BIAS)}

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)


def without_padding(key_mask: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Zero each tensor [B, T, H, K] where key_mask [B, T] is False: NaN in padding would pass through a weight of 0."""
    if key_mask is None:
        return tensors
    return tuple(x.masked_fill(~key_mask[:, :, None, None], 0.0) for x in tensors)


def padding_first(key_mask: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Compute how to move tokens so that the padding of each row comes before all of its real tokens.

    Padding in the middle or at the end of a row then does not count as a position.

    Args:
        key_mask: bool [B, T], False for padding.

    Returns:
        source: int64 [B, T], for `MoveTokens`; None for single tokens, which need not move.
        inverse: int64 [B, T], likewise.
        starts: int64 [B], the place at which the real tokens of each row begin.
    """
    starts = key_mask.shape[1] - key_mask.sum(1)
    if key_mask.shape[1] == 1:
        return None, None, starts
    source = key_mask.int().argsort(stable=True)
    return source, source.argsort(), starts


def move_tokens(x: torch.Tensor, source: torch.Tensor | None, inverse: torch.Tensor | None) -> torch.Tensor:
    """Move the tokens of x [B, T, H, K] as `padding_first` says."""
    return x if source is None else MoveTokens.apply(x, source, inverse)


def check_no_gradients(core: nn.Module, *tensors: torch.Tensor) -> None:
    """Raise ValueError in training, and warn otherwise, if gradients are asked for through a cache that holds tokens."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        expected = "torch.no_grad() or use_cache=False: no gradient flows through an MHLA cache"
        message = f"past_key_values: got a cache that holds tokens, expected {expected}."
        if core.training:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)


class MHLACore(nn.Module):
    """What the cores of sequences and grids share: feature maps, mixing, output norm, and gate.

    Args:
        settings: The settings.
        mixing: The module that holds the mixing.
        num_heads: Number of query heads, H.
        num_kv_heads: Number of KV heads, G; query head h uses KV head h // (H // G).
        key_dim: Width K of q and k.
        value_dim: Width V of v.
        hidden_size: Width of the layer's input, which the gate reads.
        norm_eps: eps of the output norm.
    """

    def __init__(
        self,
        settings: MHLASettings,
        mixing: nn.Module,
        *,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        hidden_size: int,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.settings = settings
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.value_dim = value_dim
        self.q_map = FeatureMap(settings.feature_map, num_heads, key_dim)
        self.k_map = FeatureMap(settings.feature_map, num_kv_heads, key_dim)
        self.mixing = mixing
        if settings.output_norm:
            self.norm = OutputNorm(value_dim, norm_eps)
        if settings.gate:
            self.gate = OutputGate(hidden_size, num_heads * value_dim)

    def operands(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_mask: torch.Tensor | None,
        rotate: Rotation | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Prepare the arguments of `mhla`.

        Args:
            q, k, v, key_mask: As in `MHLA.forward`.
            rotate: Rotary embedding, applied before or after the feature maps as `settings.rope` says; None if q and k are
                rotated already, or never.

        Returns:
            Features of q and k, v, and the options of `mhla` that follow from the settings. All features are in v's dtype:
            a rotation under autocast leaves fp32, which softmax attention would cast back, too.
        """
        if rotate is not None and self.settings.rope == "before":
            q, k = rotate(q, k)
            rotate = None
        q, k, v = without_padding(key_mask, q, k, v)
        q = self.q_map(q)
        (k,) = without_padding(key_mask, self.k_map(k))
        options: dict[str, Any] = {"normalize": self.settings.normalize, "unrounded": self.settings.output_norm}
        if rotate is not None:
            if self.settings.normalize:
                options["q_den"] = q.to(v.dtype)
                options["k_den"] = k.to(v.dtype)
            q, k = rotate(q, k)
        return q.to(v.dtype), k.to(v.dtype), v, options

    def finish_output(self, o: torch.Tensor, hidden_states: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Apply the output norm and the gate.

        Args:
            o: [B, T, H, V], the output of the attention.
            hidden_states: [B, T, hidden_size], which the gate reads.
            dtype: Dtype of the result.
        """
        if self.settings.output_norm:
            o = self.norm(o)
        o = o.to(dtype)
        if self.settings.gate:
            o = o * F.silu(self.gate(hidden_states)).view_as(o)
        return o


def check_causal(settings: MHLASettings, model: str = "a causal model") -> None:
    """Raise ValueError if the settings do not suit a model of sequences; `model` is what the error calls it."""
    if settings.normalize == "official":
        raise ValueError(f'normalize: got "official", expected true or false for {model}.')
    for name in ("layout", "cpe"):
        if getattr(settings, name):
            raise ValueError(f"{name}: got {getattr(settings, name)!r}, expected none for {model}.")


# mhla_hf/nn/decay_mixing.py

INITIAL_DECAY_WEIGHT = 0.01  # of every decay but the first, which gets the rest
INITIAL_RATES = (0.9, 0.7, 0.4)  # lambda of every decay but the first; further ones halve the last
INITIAL_FREE_RATE = 0.98  # lambda of the first decay, if it is learned
INITIAL_POWER = 0.5
FROZEN_DECAY_WEIGHT = 1e-30  # practically zero, but with a finite logarithm


class DecayMixing(nn.Module):
    """Mixing by `Decays`, and the balance of the far part relative to a local softmax; fp32 whatever the model's dtype.

    Parameters:
        weight: [H, R], logits of the weights of the decays, which sum to one.
        rate: [G, R - 1], or [G, R] with `free_decay`; lambda is sigmoid(rate). The first decay has lambda 1 otherwise.
        balance: [H], see `local_attention`; only with an initial balance.
        power: [H], see `Decays`; only with `length_power`.

    Args:
        num_heads: Number of query heads, H.
        num_kv_heads: Number of KV heads, G.
        num_decays: Number of decays, R.
        balance: Initial balance; None without a local softmax.
        learn: Whether weights and rates are trained. Otherwise they stay at plain linear attention; the balance is always
            trained.
        free_decay: Whether lambda of the first decay is learned, too.
        length_power: Whether the far part is scaled by a learned power of the number of far blocks.
    """

    by_head = True  # see `FeatureMap.by_head`

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        num_decays: int,
        *,
        balance: float | None = None,
        learn: bool = True,
        free_decay: bool = False,
        length_power: bool = False,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.num_decays = num_decays
        self.initial_balance = balance
        self.learn = learn
        self.num_fixed = 0 if free_decay else 1
        self.weight = nn.Parameter(torch.empty(num_heads, num_decays), requires_grad=learn)
        if num_decays > self.num_fixed:
            self.rate = nn.Parameter(torch.empty(num_kv_heads, num_decays - self.num_fixed), requires_grad=learn)
        if length_power:
            self.power = nn.Parameter(torch.empty(num_heads), requires_grad=learn)
        if balance is not None:
            self.balance = nn.Parameter(torch.empty(num_heads))
        for name, value in self.initial_values().items():
            self.get_parameter(name).data.copy_(value)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the initial value of each parameter, for models that are built on the meta device and filled later."""
        num_others = self.num_decays - 1
        other_weight = INITIAL_DECAY_WEIGHT if self.learn else FROZEN_DECAY_WEIGHT
        weight = torch.tensor([1.0 - other_weight * num_others, *[other_weight] * num_others])
        values = {"weight": weight.log().expand(self.weight.shape)}
        if self.num_decays > self.num_fixed:
            further = (INITIAL_RATES[-1] / 2**n for n in range(1, num_others))
            rates = [*INITIAL_RATES, *further][:num_others]
            if self.num_fixed == 0:
                rates = [INITIAL_FREE_RATE, *rates]
            values["rate"] = torch.logit(torch.tensor(rates)).expand(self.rate.shape)
        if hasattr(self, "power"):
            values["power"] = torch.full(self.power.shape, INITIAL_POWER)
        if self.initial_balance is not None:
            values["balance"] = torch.full(self.balance.shape, self.initial_balance)
        return values

    def forward(self, heads: HeadSplit | None = None) -> tuple[Decays, torch.Tensor | None]:
        """Return the decays, and the balance [H] (None without a local softmax), in fp32.

        Args:
            heads: Which heads are MHLA, to return those alone; None for all.
        """
        if self.num_decays > self.num_fixed:
            log_rate = F.pad(F.logsigmoid(self.rate.float()), (self.num_fixed, 0))
        else:  # tensor parallelism may have left fewer than `num_kv_heads`
            num_kv_heads = self.num_kv_heads * len(self.weight) // self.num_heads
            log_rate = self.weight.new_zeros(num_kv_heads, 1).float()
        weight = self.weight.float().softmax(-1)
        power = self.power.float() if hasattr(self, "power") else None
        balance = None if self.initial_balance is None else self.balance.float()
        if heads is not None:
            weight = heads.part(weight, False, 0)
            log_rate = heads.part(log_rate, False, 0)
            power = None if power is None else heads.part(power, False, 0)
            balance = None if balance is None else heads.part(balance, False, 0)
        return Decays(weight, log_rate, power), balance

    @torch.inference_mode(False)
    def pack(self, decays: Decays, balance: torch.Tensor | None) -> torch.Tensor:
        """Pack what `forward` returned into a single tensor without gradient, as a cache keeps it.

        Returns:
            fp32 [H, 2 * R + (0 to 2)]: weights, log rates repeated for query heads, then power and balance if they exist.
        """
        log_rate = decays.log_rate.repeat_interleave(self.num_heads // self.num_kv_heads, 0)
        columns = [x[:, None] for x in (decays.power, balance) if x is not None]
        return torch.cat([decays.weight, log_rate, *columns], 1).detach()

    def unpack(self, packed: torch.Tensor) -> tuple[Decays, torch.Tensor | None]:
        """Return what `pack` was given."""
        count = self.num_decays
        share = self.num_heads // self.num_kv_heads
        weight = packed[:, :count]
        log_rate = packed[::share, count : 2 * count]
        power = packed[:, 2 * count] if hasattr(self, "power") else None
        return Decays(weight, log_rate, power), None if self.initial_balance is None else packed[:, -1]


# mhla_hf/nn/local.py

# Measured on SmolLM2 at 1,024 and 4,096 tokens: with this balance the far part does no harm before it has learned.
HARMLESS_BALANCE = -4.0


def start_balance(settings: MHLASettings, key_dim: int) -> float:
    """Return the initial balance of the far part (`local_attention`).

    For random keys, <fq, fk> is about 2 / K with Hedgehog features and of the order of K with features that do not sum to
    one; the balance compensates for that. Features of real keys saturate: with `rope="near"` the far part starts so small
    that a converted model is not worse than its window alone.
    """
    if settings.rope == "near":
        sums_to_one = settings.feature_map in ("hedgehog", "softmax")
        return HARMLESS_BALANCE if sums_to_one else HARMLESS_BALANCE - log(key_dim)
    return log(key_dim / 2) if settings.feature_map == "hedgehog" else -log(key_dim)


def keep_rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return `x` unchanged; takes the place of undoing a rotary embedding where there is none."""
    return x


class DecayMHLA(MHLACore):
    """Causal attention whose far part is MHLA by decays (`ops/local.py` has the formula).

    It has the parameters of all heads even if some of them keep softmax, so these can still be chosen after training.

    Args:
        settings: The settings, from which the core makes its own `DecayMixing`.
        num_heads: Number of query heads, H.
        num_kv_heads: Number of KV heads, G.
        key_dim: Width K of q and k.
        widths: The other arguments of `MHLACore`.

    Attributes:
        heads: The `HeadSplit` of a layer in which some KV heads keep softmax; their q, k, and v do not come here. Else None.
        unrotate: A function of q or k and of their angles that undoes the rotary embedding, for `rope="near"`.
    """

    mixing: DecayMixing

    def __init__(self, settings: MHLASettings, *, num_heads: int, num_kv_heads: int, key_dim: int, **widths: Any):
        check_causal(settings)
        local = settings.local is not None
        mixing = DecayMixing(
            num_heads,
            num_kv_heads,
            settings.num_decays,
            balance=start_balance(settings, key_dim) if local else None,
            learn=settings.learn_mixing,
            free_decay=settings.free_decay,
            length_power=settings.length_power,
        )
        super().__init__(settings, mixing, num_heads=num_heads, num_kv_heads=num_kv_heads, key_dim=key_dim, **widths)
        self.heads: HeadSplit | None = None
        self.unrotate: KeyMap = keep_rotated
        self.form = LocalForm(
            settings.block_size,
            lag=settings.window if local else 1,
            sinks=settings.sinks if local else 0,
            scale=key_dim**-0.5,
            normalize=settings.normalize is not False,
            impl=settings.impl,
            unrounded=settings.output_norm,
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        hidden_states: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        cache: Any = None,
        scale: float | None = None,
        angles: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to all tokens at and before each one's position.

        Args:
            q, k, v, hidden_states, starts, key_mask, cu_seqlens, cache: As in `MHLA.forward`, of the MHLA heads alone.
            scale: Factor of q k^T in the softmax, which is that of the base model; None is K**-0.5.
            angles: [B or 1, T, 1, A], how q and k were rotated; None if they were not.

        Returns:
            [B, T, H, V] in v's dtype.
        """
        form = self.form if scale in (None, self.form.scale) else replace(self.form, scale=scale)
        # Under autocast, rotated q and k arrive in fp32.
        q, k, v = without_padding(key_mask, q.to(v.dtype), k.to(v.dtype), v)
        if angles is None:
            angles = q.new_zeros(*q.shape[:2], 1, 0)
        else:
            angles = angles.to(q.dtype).expand(len(q), -1, -1, -1)
        is_real = key_mask
        if key_mask is not None:
            source, inverse, starts = padding_first(key_mask)
            q, k, v, angles = (move_tokens(x, source, inverse) for x in (q, k, v, angles))
            is_real = key_mask if source is None else key_mask.gather(1, source)
        if q.shape[1] == 1 and torch.compiler.is_compiling():
            # Materialize q and k: fused into the loop over keys, the query would be rotated again for every key.
            both = torch.cat([q, k], 2)
            q, k = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
        decays, balance = self.read_mixing(cache)
        q_features = self.q_map(self.unrotate(q, angles), self.heads)
        map_keys: KeyMap = self.map_keys
        if balance is None:  # the near part is linear, too, and reads features
            q = q_features
            k = self.map_keys(k, angles)
            map_keys = keep_rotated
        inputs = (q, k, v, q_features, map_keys, decays, balance, form)
        padding: dict[str, Any] = {"key_mask": is_real, "starts": starts}
        drop_window = (cache is None or cache.state is None) and self.draw_window_dropout()
        if cache is not None and not drop_window:
            o = self.continue_cache(*inputs, cache, angles=angles, **padding)
        else:
            if cache is not None:  # the cache has to see the tokens as they are
                with torch.no_grad():
                    self.continue_cache(*inputs, cache, angles=angles, **padding)
            form = replace(form, lag=1) if drop_window else form
            with torch.autocast(q.device.type, enabled=False):
                o = self.attend(
                    q, k, v, q_features, map_keys(k, angles), decays, balance, form, cu_seqlens=cu_seqlens, **padding
                )
        if key_mask is not None:
            o = move_tokens(o, inverse, source)
            if cache is not None:
                cache.note_padding(key_mask)
        return self.finish_output(o, hidden_states, v.dtype)

    # Attends over whole sequences; `training/sequence_parallel.py` replaces this for sequences in shards.
    attend = staticmethod(local_attention)

    def map_keys(self, k: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Compute the features of keys for the far part; see `KeyMap`."""
        return self.k_map(self.unrotate(k, angles), self.heads)

    def read_mixing(self, cache: Any) -> tuple[Decays, torch.Tensor | None]:
        """Return the decays and the balance of the MHLA heads.

        A cache keeps those that it began with, packed into one tensor, because every tensor that a compiled step reads
        costs time.
        """
        if cache is not None and cache.state is not None:
            return self.mixing.unpack(cache.mixing)
        decays, balance = self.mixing(self.heads)
        if cache is not None:
            cache.mixing = self.mixing.pack(decays, balance)
        return decays, balance

    def draw_window_dropout(self) -> bool:
        """Draw whether this training step leaves all blocks before the open one to the far part."""
        probability = self.settings.window_dropout if self.training and self.form.lag > 1 else 0
        return probability > 0 and float(torch.rand(())) < probability

    def continue_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_features: torch.Tensor,
        map_keys: KeyMap,
        decays: Decays,
        balance: torch.Tensor | None,
        form: LocalForm,
        cache: Any,
        *,
        key_mask: torch.Tensor | None,
        starts: torch.Tensor | None,
        angles: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs of new tokens after those in `cache.state`, and add them to it; see `continue_local`."""
        fresh = cache.state is None
        if fresh:
            num_features = self.k_map.num_features
            cache.state = LocalState.empty(k, v, self.mixing.num_decays, num_features, form, angles)
        else:
            check_no_gradients(self, q, k, v)
        return continue_local(
            q,
            k,
            v,
            q_features,
            map_keys,
            decays,
            balance,
            form,
            cache.state,
            fresh=fresh,
            key_mask=key_mask,
            starts=starts,
            angles=angles,
        )


# mhla_hf/models/cache.py

class MHLACacheLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):
    """What one layer remembers (`state`, an `MHLAState` or a `LocalState`), the mixing it is read with, and its length.

    `state` is None until the first forward pass. `seen_tokens` counts columns, padding included, as transformers does.

    Args:
        static: whether it stands for a static layer, which counts in a tensor.
        max_cache_len: of that layer.
        softmax: the layer for the keys and values of the heads that keep softmax; None if there are none.
    """

    is_compileable = True  # False would make transformers drop the mask that a hybrid's static softmax layers need
    is_croppable = True
    is_sliding = False

    def __init__(self, static: bool = False, max_cache_len: int | None = None, softmax: CacheLayerMixin | None = None):
        LinearAttentionCacheLayerMixin.__init__(self)
        CacheLayerMixin.__init__(self)
        self.state = None
        self.seen_tokens = torch.tensor(0) if static else 0  # as in transformers' layers: no recompilation by a tensor
        self.mixing = None  # a matrix, or packed decays
        self.max_cache_len = max_cache_len
        self.softmax = softmax
        self.padded = None  # the last call with padding: its real tokens, and the columns there were after it

    def count(self, hidden_states: torch.Tensor) -> None:
        """Note the columns of `hidden_states` `[B, T, ..]`, in place if static."""
        if not isinstance(self.seen_tokens, torch.Tensor):
            self.seen_tokens += hidden_states.shape[1]
            return
        if self.seen_tokens.device != hidden_states.device:
            self.seen_tokens = self.seen_tokens.to(hidden_states.device)
        self.seen_tokens.add_(hidden_states.shape[1])  # `+=` would make it an output of a compiled step

    def mixing_for(self, mixing, new_tokens: int, block_size: int) -> torch.Tensor:
        """The mixing weights for the blocks reached after `new_tokens` more, computed once per doubling of the length."""
        needed = -(-(int(self.seen_tokens) + new_tokens) // block_size)
        if torch.is_grad_enabled() and mixing.weight.requires_grad:
            return mixing(needed)
        if self.mixing is None or self.mixing.shape[-1] < needed:
            capacity = max(mixing.num_blocks, 1 << (needed - 1).bit_length())
            self.mixing = mixing(capacity).detach()
        return self.mixing

    def note_padding(self, key_mask: torch.Tensor) -> None:
        """Remember the padding `[B, T]` of the call that is under way, for `crop`, which reads it."""
        if not torch.compiler.is_compiling():
            self.padded = key_mask, self.seen_tokens + key_mask.shape[1]

    def get_seq_length(self) -> int:
        return self.seen_tokens

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # As the softmax layer in whose place this one is: transformers may size the masks of the other layers by it.
        return (self.seen_tokens + query_length if self.max_cache_len is None else self.max_cache_len), 0

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the first forward pass makes the state."""

    def update(self, *args, **kwargs):
        raise ValueError("past_key_values: a layer without MHLA wrote to an MHLA cache; expected one model's layers.")

    update_conv_state = update_recurrent_state = update

    def offload(self) -> None:
        """Stays where it is: transformers offloads before the layer has read its state."""

    prefetch = offload

    def reset(self) -> None:
        self.state, self.mixing, self.padded = None, None, None
        self.seen_tokens *= 0
        if self.softmax is not None:
            self.softmax.reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        if self.state is not None:
            self.state.select(beam_idx)
        if self.softmax is not None:
            self.softmax.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state.repeat(repeats)
        if self.softmax is not None:
            self.softmax.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.state is not None:
            self.state.select(indices)
        if self.softmax is not None:
            self.softmax.batch_select_indices(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly; at most one block of them."""
        if self.state is None or tokens_to_remove == 0:
            return
        if not 0 < -tokens_to_remove <= self.state.block_size:
            what = f"{-self.state.block_size} to 0: an MHLA cache forgets one block exactly (see num_assistant_tokens)"
            raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected {what}.")
        if self.padded is not None:
            real, columns = self.padded
            back = int(columns) - int(self.seen_tokens) - tokens_to_remove
            if back > 0 and not bool(real[:, -back:].all()):
                raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, expected none that is padding.")
        self.state.crop(-tokens_to_remove)
        self.seen_tokens += tokens_to_remove
        if self.softmax is not None:
            self.softmax.crop(tokens_to_remove)


class MHLADynamicCache(DynamicCache):
    """A `DynamicCache` with MHLA layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """As the base; what the MHLA layers refuse, they refuse before a softmax layer has forgotten it."""
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, MHLACacheLayer)):
            layer.crop(tokens_to_remove)


def mhla_cache_layer(past_key_values: Cache | None, layer_idx: int, mixed: bool = False) -> MHLACacheLayer | None:
    """The MHLA layer number `layer_idx` of a cache, put there at first use; None without a cache.

    mixed: some heads of the layer keep softmax; their keys and values go into a layer such as the one that it replaces.
    """
    if past_key_values is None:
        return None
    layers = past_key_values.layers
    while len(layers) <= layer_idx:
        layers.append(past_key_values.layer_class_to_replicate())
    layer = layers[layer_idx]
    if isinstance(layer, MHLACacheLayer):
        return layer
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and layer.get_seq_length():
        raise ValueError(
            f"past_key_values: layer {layer_idx} holds {layer.get_seq_length()} tokens of softmax keys and values, "
            "expected an empty cache or one that this model filled."
        )
    static = isinstance(layer, StaticLayer)
    length = layer.max_cache_len if static else None
    if mixed and static and layer.is_initialized:  # with room for all heads
        layer = type(layer)(max_cache_len=length)
    layers[layer_idx] = MHLACacheLayer(static, max_cache_len=length, softmax=layer if mixed else None)
    if type(past_key_values) is DynamicCache and not torch.compiler.is_compiling():
        past_key_values.__class__ = MHLADynamicCache
    return layers[layer_idx]


# mhla_hf/models/families.py

HEADS = {  # how a language model's class ends, and the Auto class that finds it
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "Model": "AutoModel",
    "TextModel": "AutoModel",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}
ENCODER_HEADS = {head: auto for head, auto in HEADS.items() if not head.endswith(("LM", "HeadModel", "TextModel"))}
ENCODER_HEADS |= {"ForMaskedLM": "AutoModelForMaskedLM", "ForMultipleChoice": "AutoModelForMultipleChoice"}
IMAGE_HEADS = dict.fromkeys(("ForImageClassification", "WithTeacher"), "AutoModelForImageClassification")


@dataclass(frozen=True)
class Family:
    """One family of base models.

    base: its model type in transformers, or its first class in diffusers.
    classes: the base's classes that `convert` takes; the MHLA class of each has its name with MHLA before it.
    entry: the module that defines these classes, and that is folded into their checkpoints.
    task: what the Hub calls the thing it does.
    defaults: the settings of a conversion (`MHLASettings`).
    conditions: what it is told beside the time, in the order in which training data hold it; without any, it cannot be
        trained as a transformer of diffusers.
    linear: its attention is linear before the conversion, which then loses nothing.
    prefix: tokens before the grid of a vision tower; registers come after them.
    axes: how many axes the grid of a transformer of diffusers has.
    fixed_size: it takes square latents of its `sample_size` only.
    """

    base: str
    classes: tuple[str, ...]
    entry: str
    task: str
    defaults: dict = field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    linear: bool = False
    prefix: int = 1
    axes: int = 2
    fixed_size: bool = False


def language_family(base: str) -> Family:
    """A family of causal language models of transformers: a body and the heads on it, as far as it has them."""
    prefix = SPELLED.get(base) or "".join(map(str.capitalize, base.removesuffix("_text").split("_")))
    defaults = {"layers": "2/3", "mixing_form": "decay", "local": "softmax", "rope": "near", "window": 6}
    defaults |= {"num_decays": 1, "free_decay": True, "length_power": True, "feature_map": "softmax"}
    defaults |= {"rope": "before"} if base.startswith("hunyuan") else {}  # see models/rotation.py
    return Family(base, tuple(prefix + head for head in HEADS), "models.converted", "text-generation", defaults)


LANGUAGE_TYPES = (  # of transformers
    "afmoe apertus apertus1p5_text arcee aria_text axk1 bailing_hybrid beam biogpt bitnet cohere cohere2 "
    "cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma "
    "gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox "
    "granite granitemoe granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
    "hyperclovax jais2 jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text "
    "mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral "
    "modernbert-decoder nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open starcoder2 "
    "vaultgemma youtu"
)
SPELLED = {  # where the names of their classes do not begin as the type does
    "apertus1p5_text": "Apertus1p5Text",
    "aria_text": "AriaText", "axk1": "AXK1", "biogpt": "BioGpt", "bitnet": "BitNet", "ctrl": "CTRL",
    "ernie4_5": "Ernie4_5", "ernie4_5_moe": "Ernie4_5_Moe", "gpt2": "GPT2", "gpt_bigcode": "GPTBigCode",
    "gpt_neox": "GPTNeoX", "granitemoe": "GraniteMoe", "granitemoehybrid": "GraniteMoeHybrid",
    "granitemoeshared": "GraniteMoeShared", "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1",
    "hy_v3": "HYV3", "hyperclovax": "HyperCLOVAX", "jetmoe": "JetMoe", "mimo_v2_flash": "MiMoV2Flash",
    "minicpm3": "MiniCPM3", "minimax": "MiniMax", "minimax_m2": "MiniMaxM2", "minimax_m3_vl_text": "MiniMaxM3VL",
    "modernbert-decoder": "ModernBertDecoder", "nanochat": "NanoChat", "nemotron_h": "NemotronH",
    "qwen3_5_moe_text": "Qwen3_5Moe", "qwen3_5_text": "Qwen3_5", "smollm3": "SmolLM3", "vaultgemma": "VaultGemma",
}  # fmt: skip
LANGUAGE = tuple(language_family(base) for base in LANGUAGE_TYPES.split())


def auto_class_of(name: str) -> str:
    """The Auto class of transformers that finds a model class of this name."""
    return next(
        (auto for end, auto in {**HEADS, **ENCODER_HEADS, **IMAGE_HEADS}.items() if name.endswith(end)), "AutoModel"
    )


# mhla_hf/models/saving.py

SOURCE_FILE = "modeling_mhla.py"
_SOURCE_MAKER = []


def write_source(entry: str, folder: str | os.PathLike, name: str = SOURCE_FILE) -> None:
    """Write the one file that defines a model into `folder` (made if missing), under `name`."""
    own = Path(__file__).read_text(encoding="utf-8") if NAMESPACE != "package" else _SOURCE_MAKER[0](entry)[1]
    target = Path(folder, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_suffix(f".tmp-{os.getpid()}")
    aside.write_text(own, encoding="utf-8", newline="\n")
    os.replace(aside, target)


def check_whole_files(folder: str | os.PathLike) -> None:
    """One sentence if a safetensors file in or below `folder` is cut short or no such file."""
    for file in sorted(Path(folder).rglob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}.") from None


def check_loaded_weights(model: torch.nn.Module) -> None:
    """One sentence if a loaded model's MHLA weights cannot be right (negative or non-finite mixing, non-finite others)."""
    for name, module in model.named_modules():
        for parameter in module.initial_values() if hasattr(module, "initial_values") else ():
            value = module.get_parameter(parameter)
            plain = isinstance(value, torch.nn.Parameter) and type(value.data) is torch.Tensor  # not quantized
            if plain and value.is_floating_point() and not value.is_meta and not torch.isfinite(value).all():
                what = "expected finite ones; the checkpoint is damaged"
                raise ValueError(f"{name}.{parameter}: got NaN or infinite values, {what}.")
        if hasattr(module, "check_values"):
            module.check_values(name)


# mhla_hf/models/transformers_api.py

# The oldest and the newest release that the tests run on.
TESTED_TRANSFORMERS = ("5.19.0", "5.24.0")


def config_class_name(model_type: str) -> str | None:
    """The name of the configuration class of `model_type`, or None if this release of transformers lacks the type."""
    return CONFIG_MAPPING_NAMES.get(model_type)


def config_class_of(model_type: str) -> type | None:
    """The configuration class of `model_type`, or None if this release of transformers lacks the type."""
    try:
        return CONFIG_MAPPING[model_type]  # a lazy mapping, whose `get` finds only what was registered
    except KeyError:
        return None


def copy_weight_renames(base_type: str, model_type: str) -> None:
    """Let checkpoints of `model_type` load through the weight renames that transformers has for `base_type`."""
    renames = get_checkpoint_conversion_mapping(base_type)
    if renames is not None and get_checkpoint_conversion_mapping(model_type) is None:
        register_checkpoint_conversion_mapping(model_type, renames)


def with_layer_wildcard(name: str) -> str:
    """`model.layers.3.mlp` as tensor-parallel plans write it: `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def set_attention_function(config, name: str) -> None:
    """Select an attention function in `config` without the checks that transformers makes for its users."""
    config._attn_implementation_internal = name


def find_cache(kwargs: dict) -> str | None:
    """The argument that holds a KV cache, by its type: its name differs between models and between releases."""
    return next((name for name, value in kwargs.items() if isinstance(value, Cache)), None)


def refuse_paged_cache(kwargs: dict) -> None:
    """Refuse the caches of transformers' continuous batching, which are no `Cache` and have no place for a state."""
    pages = kwargs.get("cache")
    if pages is not None and not isinstance(pages, Cache):
        raise ValueError(
            f"cache: got {type(pages).__name__}, expected a Cache of transformers: MHLA layers have no pages."
        )


def check_cache_arrived(query_length: int, key_length: int, kwargs: dict) -> None:
    """Refuse keys or caches that reach an MHLA attention function past the layer's own cache.

    Otherwise a release of transformers that hands caches on in a new way would decode without the past, in silence.
    """
    if query_length != key_length or find_cache(kwargs) is not None:
        tested = " to ".join(TESTED_TRANSFORMERS)
        raise ValueError(
            f"cache: got {key_length} keys for {query_length} queries in an MHLA layer, expected the layer's own cache: "
            f"this code was tested with transformers {tested}, got {transformers.__version__}."
        )


# mhla_hf/models/pretrained.py

class MHLAPreTrainedMixin:
    """Before a `PreTrainedModel` class in the bases; `source_entry` names the module that defines the model."""

    source_entry = ""
    _keep_in_fp32_modules_strict = ["mixing"]
    # With a mixing matrix, a decode step reads the length of the cache on the host: it compiles, but not as one graph.
    _can_compile_fullgraph = False

    def entry_to_save(self) -> str:
        """The module whose bundle goes into the checkpoint."""
        return self.source_entry

    def class_names(self) -> list[str]:
        """The names of the classes that this checkpoint can be loaded as, by their Auto classes."""
        return []

    def initialize_weights(self):
        """As transformers, then the MHLA modules' own starts (parameters that were loaded are left alone)."""
        super().initialize_weights()
        for module in self.modules():
            if hasattr(module, "initial_values"):
                for name, value in module.initial_values().items():
                    copy_(module.get_parameter(name), value)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As transformers; damaged MHLA weights (NaN, negative mixing) are refused, and a frozen mixing is frozen again."""
        try:
            loaded = super().from_pretrained(*args, **kwargs)
        except SafetensorError:
            check_whole_files(args[0] if args else kwargs["pretrained_model_name_or_path"])  # says which file
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        check_loaded_weights(model)
        for module in model.modules():
            if not getattr(module, "learn", True):  # a frozen mixing
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(name == "balance")
        return loaded

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As transformers; where the base's plan splits heads over processes, what `mhla` has by head is split alike."""
        if distributed_config is not None and distributed_config.tp_size > 1:
            size, rank = distributed_config.tp_size, mesh_manager.get_mesh("tp").get_local_rank()
            model._tp_plan |= split_heads_plan(model, size)
            for core in (module.mhla for module in model.modules() if hasattr(module, "softmax_heads")):
                core.heads = core.heads.of_rank(rank, size)
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: its caches are paged."""
        what = "expected generate(), or mhla_hf.serving.ContinuousBatch for requests that come and go"
        raise ValueError(f"cache: got continuous batching with paged caches, {what}.")

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """As transformers, with `modeling_mhla.py` beside the weights: the folder loads with `trust_remote_code=True`."""
        if kwargs.get("is_main_process", True):
            write_source(self.entry_to_save(), save_directory)
        module = SOURCE_FILE.removesuffix(".py")
        names = [*self.class_names(), type(self).__name__]
        self.config.auto_map = {"AutoConfig": f"{module}.{type(self.config).__name__}"}
        self.config.auto_map |= {auto_class_of(name): f"{module}.{name}" for name in names}
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, *args, **kwargs)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


HUB_ARGUMENTS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "tags", "commit_description")


def split_heads_plan(model: nn.Module, size: int) -> dict[str, str]:
    """The tensor-parallel plan of the parameters of `mhla`, by name, in layers whose projections are split by head.

    Feature maps, decays and matrices by head are split on their first axis; what all heads share is replicated, its
    gradients summed. ValueError: heads that `size` does not divide.
    """
    plan = {}
    for name, module in model.named_modules():
        layer = with_layer_wildcard(name)
        split = any(style == "colwise" for rule, style in model.tp_plan.items() if rule.startswith(f"{layer}."))
        if not hasattr(module, "mhla") or not split:
            continue
        if module.mhla.num_kv_heads % size:
            what = f"expected one that divides the {module.mhla.num_kv_heads} key/value heads of {name}"
            raise ValueError(f"tp_plan: got tensor-parallel size {size}, {what}.")
        for child, part in module.mhla.named_children():
            path = f"{layer}.mhla.{child}"
            if child == "gate":
                plan[path] = "colwise"
            elif getattr(part, "by_head", False):
                first_axis = {f"{path}.{own}": "embedding_rowwise" for own, _ in part.named_parameters()}
                plan |= {path: "local_params"} | first_axis
            else:
                plan[path] = "replicated_with_grad_allreduce"
    return plan


# mhla_hf/models/overlay.py

class MHLAOverlayConfig:
    """What a converted model's configuration adds to its base's: `mhla`, checked when made and when loaded.

    In `config.json` also `transformers_weights`, which names no file: softmax classes refuse the folder by it, which they
    would load but for `mhla.*`; this class drops it.
    """

    def __post_init__(self, **kwargs):
        values = kwargs.pop("mhla", None)
        if values is not None:
            kwargs.pop("transformers_weights", None)
        super().__post_init__(**kwargs)
        if values is not None:
            settings = MHLASettings.from_dict(values.to_dict() if isinstance(values, MHLASettings) else values)
            settings.layers = settings.resolve_layers(self.num_hidden_layers)
            self.mhla = settings.to_dict()

    def to_dict(self) -> dict:
        """As the base, and what stops softmax classes."""
        values = super().to_dict()
        return {**values, "transformers_weights": NO_SOFTMAX} if values.get("mhla") is not None else values


class MHLAHeadMixin(MHLAPreTrainedMixin):
    """Mixed into the base's class: builds the base, then makes the layers that `config.mhla` lists MHLA by `install`.

    prepare: called before the body runs, as by `forward_preparing`; None: nothing is. While the base is built the
    configuration is of its base's class, by which heads find their body.
    """

    prepare = None

    def __init__(self, config, *args, **kwargs):
        if not isinstance(config, self.config_class) or getattr(config, "mhla", None) is None:
            what = "with `mhla`; use mhla_hf.convert(model) on a softmax model"
            raise ValueError(f"config: got {type(config).__name__}, expected {self.config_class.__name__} {what}.")
        own, config.__class__ = type(config), self.config_class.__bases__[1]
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.__class__ = own
        self.install(self, MHLASettings.from_dict(config.mhla))

    def class_names(self) -> list[str]:
        """Of the body and the heads that the base's family has."""
        return [f"MHLA{name}" for name in base_classes(self.family)]


MODEL_NAME = re.compile("(LMHead|Vision)?Model$")
_OVERLAYS = {}  # every class that is made here, by what it is made of: each is made once


def overlay_class(base: type, mixin: type, entry: str, **namespace) -> type:
    """`MHLALlamaAttention(mixin, LlamaAttention)` for `LlamaAttention`.

    entry: the module in which a process that unpickles it finds it by name; in a bundle that is this one.
    """
    if base not in _OVERLAYS:
        namespace["__module__"] = __name__.replace("models.overlay", entry)
        _OVERLAYS[base] = type(f"MHLA{base.__name__}", (mixin, base), namespace)
    return _OVERLAYS[base]


def base_classes(family: Family) -> dict[str, type]:
    """The classes of a family's base that there are, by name."""
    found = {name: getattr(transformers, name, None) for name in family.classes}
    config = config_class_of(family.base)
    return {
        name: cls for name, cls in found.items() if cls is not None and getattr(cls, "config_class", None) is config
    }


def overlay_config_class(family: Family) -> type:
    """The configuration class of a converted family: `MHLALlamaConfig(LlamaConfig)` for "llama"."""
    base = config_class_of(family.base)
    types = {"model_type": f"mhla_{family.base}", "base_model_type": family.base}
    doc = f"`{base.__name__}` with `mhla`, the settings of its MHLA layers."
    return overlay_class(base, MHLAOverlayConfig, family.entry, __doc__=doc, **types)


def overlay_model_class(family: Family, base: type, mixin: type) -> type:
    """A model class of a converted family: `MHLALlamaForCausalLM(mixin, LlamaForCausalLM)`."""
    config = overlay_config_class(family)
    copy_weight_renames(family.base, config.model_type)
    doc = f"`{base.__name__}` with MHLA in the layers that `config.mhla` lists."
    members = {"__doc__": doc, "config_class": config, "source_entry": family.entry, "family": family}
    # transformers looks for a decorator in the source of the class's module, which is ours here: ask the base instead.
    members["_can_set_experts_implementation"] = classmethod(lambda cls: base._can_set_experts_implementation())
    if mixin.prepare is not None:
        members["forward"] = forward_preparing(base.forward, mixin.prepare)
    return overlay_class(base, mixin, family.entry, **members)


@functools.cache
def calls_interface(attention_class: type) -> bool:
    """Whether the forward of this class asks transformers for "the attention function", in the way all its models do."""
    return "attention_interface" in inspect.unwrap(attention_class.forward).__code__.co_varnames


def attention_sizes(attention: nn.Module, config) -> dict[str, int]:
    """Heads and widths of an attention module of transformers, as the MHLA cores take them."""
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if isinstance(groups, int) and heads % groups:
        raise ValueError(f"num_key_value_heads: got {groups}, expected a divisor of the {heads} attention heads.")
    width = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = {"num_heads": heads, "num_kv_heads": heads // getattr(attention, "num_key_value_groups", 1)}
    latent = {"key_dim": getattr(attention, "qk_head_dim", width), "value_dim": getattr(attention, "v_head_dim", width)}
    return sizes | latent  # which differ in latent attention


def forward_preparing(forward, prepare):
    """The forward of a model that may be a body: then `prepare` is called before, as by `prepare_inner_body`.

    A hook would not do: callers of `model.forward`, such as sentence-transformers, run none.
    """
    names = tuple(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def own_forward(self, *args, **kwargs):
        if self.base_model is self:
            args, kwargs = prepare(self, args, kwargs, names)
        return forward(self, *args, **kwargs)

    return own_forward


def prepare_inner_body(model: nn.Module, prepare) -> None:
    """Call `prepare(body, args, kwargs, names)`, which gives both anew, before the body of a head runs.

    names: of the arguments of the body's forward.
    """
    if (body := model.base_model) is not model:
        names = tuple(inspect.signature(type(body).forward).parameters)[1:]
        body.register_forward_pre_hook(functools.partial(prepare, names=names), with_kwargs=True)


def swap_attention(attention: nn.Module, mixed: type, core: nn.Module, name: str) -> None:
    """Turn one attention module of transformers into MHLA, in place.

    mixed: its new class, see `overlay_class`. core: its new child `mhla`. name: of the attention function that it
    calls from now on, in a configuration of its own.
    """
    core.train(attention.training)
    attention.__class__ = mixed
    if "_old_forward" in attention.__dict__:  # accelerate keeps the forward that its hooks wrap
        attention._old_forward = types.MethodType(mixed.forward, attention)
    attention.config = copy.copy(attention.config)
    set_attention_function(attention.config, name)
    attention.add_module("mhla", core)


def overlay_named(name: str, families: tuple[Family, ...], model_mixin: type, attention_mixin: type):
    """What the modules of converted families have under `name`: a configuration, a model or an attention class."""
    own = name.removeprefix("MHLA")
    for family in families if name.startswith("MHLA") else ():
        if own == config_class_name(family.base):
            return overlay_config_class(family)
        if own in family.classes and own in base_classes(family):
            return overlay_model_class(family, base_classes(family)[own], model_mixin)
        if own.endswith("Attention") and own.startswith(MODEL_NAME.sub("", family.classes[0])):
            for base in base_classes(family).values():
                if hasattr(module := sys.modules[base.__module__], own):
                    return overlay_class(getattr(module, own), attention_mixin, family.entry)
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}, expected one of {[f.base for f in families]}."
    )


# mhla_hf/models/rotation.py

@dataclass(frozen=True)
class RotationLayout:
    """Which dimensions of a head the base rotates together, where they are, and how it hands cosines and sines on.

    pairs: dimensions 2i and 2i + 1 are rotated by angle i; otherwise dimensions i and i + R/2, as in Llama.
    repeated: cos and sin hold each angle twice in a row; otherwise all angles, and then all again.
    backward: dimensions are rotated by minus the angle.
    last: the rotated dimensions are the last R of a head; otherwise the first R.
    """

    pairs: bool = False
    repeated: bool = False
    backward: bool = False
    last: bool = False


HALVES, LAST_HALVES = RotationLayout(), RotationLayout(last=True)
PAIRS, REPEATED_PAIRS = RotationLayout(pairs=True), RotationLayout(pairs=True, repeated=True)
ROTATION_LAYOUTS = {  # by model type; `HALVES` or, in latent attention, `LAST_HALVES` for all others
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), REPEATED_PAIRS),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text"), PAIRS),
    "deepseek_v2": RotationLayout(pairs=True, last=True),
    "nanochat": RotationLayout(backward=True),
}
SCALED_AFTER = ("hunyuan_v1_dense", "hunyuan_v1_moe")  # by learned weights, after the rotation
NEVER_ROTATED = ("biogpt", "ctrl", "gpt2", "gpt_bigcode", "jamba", "kimi_linear", "nemotron_h")
# Types that rotate in sliding layers only, and types that do so only if they have sliding layers.
SLIDING_ROTATED, SLIDING_ROTATED_IF_ANY = ("afmoe", "cohere2", "cohere2_moe"), ("exaone4", "exaone_moe", "kolibri1")


def rotated_type(config) -> str:
    """The model type of the base, of its own configuration or of a converted model's."""
    return getattr(config, "base_model_type", None) or config.model_type


def rotation_layout(attention) -> RotationLayout:
    """How the base rotates.

    Args:
        attention: an attention module of transformers.

    Raises:
        ValueError: q and k of this type are no longer a rotation of what they were.
    """
    latent, kind = hasattr(attention, "qk_rope_head_dim"), rotated_type(attention.config)
    if kind in SCALED_AFTER:
        what = "it scales q and k by learned weights after their rotation"
        raise ValueError(f"rope: got 'near' for {kind}, expected 'before': {what}.")
    return ROTATION_LAYOUTS.get(kind, LAST_HALVES if latent else HALVES)


def is_rotated(attention: nn.Module) -> bool:
    """Whether the forward of this attention module applies the rotation that it is given."""
    kind = rotated_type(attention.config)
    if kind in NEVER_ROTATED:
        return False
    if kind in SLIDING_ROTATED:
        sliding = getattr(attention, "is_local_attention", attention.sliding_window is not None)
        return sliding or getattr(attention, "force_rope", False)
    if kind in SLIDING_ROTATED_IF_ANY:
        return attention.sliding_window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def rotation_angles(attention: nn.Module, kwargs: dict) -> torch.Tensor | None:
    """The rotation of one call of an attention module, in the form that `unrotate` takes.

    If the base scales its rotation, as YaRN does, cos and sin come divided by the square of the scale: `unrotate` then
    undoes both.

    Args:
        attention: an attention module of transformers.
        kwargs: keyword arguments of the call; "position_embeddings", (cos, sin) or one complex tensor, is None in layers
            without rotation.

    Returns:
        `[B or 1, T, 1, R]` for R rotated dimensions of a head: R/2 cosines and R/2 sines; None if this module does not
        rotate. In the dtype of the base's cos and sin, but at least fp32.

    Raises:
        ValueError: the module rotates, but not by an argument.
    """
    if not is_rotated(attention):
        return None
    if "position_embeddings" not in kwargs:
        what = "its attention is not given the cosines and sines of its rotation as `position_embeddings`"
        raise ValueError(f"rope: got 'near' for {rotated_type(attention.config)}, expected 'before': {what}.")
    if (rotation := kwargs["position_embeddings"]) is None:
        return None
    cos, sin = distinct_angles(rotation, rotation_layout(attention))
    scale = cos.square() + sin.square()
    return torch.cat((cos / scale, sin / scale), -1).unsqueeze(2)


def distinct_angles(rotation, layout: RotationLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[B or 1, T, R/2]`, at least in fp32, of (cos, sin) or of one complex tensor: each angle once."""
    if isinstance(rotation, torch.Tensor):
        return rotation.real, rotation.imag
    if layout.repeated:
        cos, sin = (x[..., ::2] for x in rotation)
    else:
        cos, sin = (x[..., : x.shape[-1] // 2] for x in rotation)
    dtype = torch.promote_types(cos.dtype, torch.float32)
    return cos.to(dtype), (-sin if layout.backward else sin).to(dtype)


def unrotate(x: torch.Tensor, angles: torch.Tensor | None, layout: RotationLayout) -> torch.Tensor:
    """Undo the rotation of queries or keys.

    Where the base permutes dimensions as it rotates them (`rope_interleave`), they stay permuted, those of q and of k alike.

    Args:
        x: `[B, T, H, K]` as rotated, floating point.
        angles: `[B or 1, T, 1, R]` of `rotation_angles`; None, or a width of 0, returns x as it is.
        layout: of `rotation_layout`.

    Returns:
        `[B, T, H, K]` in the dtype of x.
    """
    if angles is None or not angles.shape[-1]:
        return x
    width, rest = angles.shape[-1], x.shape[-1] - angles.shape[-1]
    kept, turned = x.split((rest, width), -1) if layout.last else reversed(x.split((width, rest), -1))
    a, b = turned.unflatten(-1, (-1, 2)).unbind(-1) if layout.pairs else turned.chunk(2, -1)
    cos, sin = angles.to(x).chunk(2, -1)
    back = (a * cos + b * sin, b * cos - a * sin)
    back = (torch.stack(back, -1).flatten(-2),) if layout.pairs else back
    return torch.cat((kept, *back) if layout.last else (*back, kept), -1)


# mhla_hf/models/attention.py

ATTENTION_NAME = f"mhla_{NAMESPACE}"
SOFTMAX_ONLY = ("softcap", "s_aux", "sliding_window", "position_bias")  # other attention functions obey them


def mhla_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """The attention function of MHLA layers: q, k, v as transformers gives them, `[B, H, T, K]`; o is `[B, T, H, V]`.

    `dropout` belongs to softmax and has no meaning here; `attention_mask` is not read: `mhla_padding` says the same without
    T x T numbers.
    """
    check_cache_arrived(query.shape[2], key.shape[2], kwargs)
    for name in SOFTMAX_ONLY:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: it came for an MHLA layer, which cannot do it; expected None.")
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False for an MHLA layer of a language model, expected True or None.")
    starts, key_mask = kwargs.get("mhla_padding") or (None, None)
    cache = kwargs.get("mhla_cache")
    options = {"hidden_states": kwargs.get("mhla_hidden_states"), "cache": cache, "scale": scaling}
    options |= {name: kwargs[f"mhla_{name}"] for name in ("rotate", "angles") if f"mhla_{name}" in kwargs}
    options |= {"starts": starts, "key_mask": key_mask}
    options["cu_seqlens"] = kwargs.get("cu_seq_lens_q") if cache is None else None
    heads = getattr(module.mhla, "heads", None)
    if heads is None:
        o = module.mhla(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        return o.contiguous(), None  # as some bases view it
    outputs = {}
    if heads.counts[True]:
        parts = [heads.part(x, True, 1) for x in (query, key, value)]
        others = {name: value for name, value in kwargs.items() if not name.startswith("mhla_")}
        outputs[True] = module.softmax_heads(*parts, attention_mask, cache, scaling, dropout, **others)
    if heads.counts[False]:
        parts = [heads.part(x, False, 1).transpose(1, 2) for x in (query, key, value)]
        outputs[False] = module.mhla(*parts, **options)
    elif module.training and torch.is_grad_enabled():  # optimizers of several processes wait for each other's gradients
        what = "expected fewer processes for training, so that each has an MHLA head in every layer"
        raise ValueError(f"tp_size: got a process with softmax heads alone in layer {module.layer_idx}, {what}.")
    return heads.join(outputs, 2), None


class SoftmaxHeads(nn.Module):
    """The heads of an MHLA layer that keep softmax: they go to the attention function that the model's configuration names.

    It stands where that function expects an attention module, of which it has what such functions read.

    Args:
        attention: the attention module of transformers.
        config: the model's configuration, which users change, not the module's own.
    """

    def __init__(self, attention: nn.Module, config):
        super().__init__()
        self.config = config
        self.layer_idx = attention.layer_idx
        self.is_causal = True
        self.sinks = None  # layers that have some are not converted
        self.num_key_value_groups = getattr(attention, "num_key_value_groups", 1)
        base = next(cls for cls in type(attention).__mro__ if calls_interface(cls))
        self.eager = sys.modules[base.__module__].eager_attention_forward  # every modeling file has its own

    def forward(self, query, key, value, attention_mask, cache, scaling, dropout, **kwargs) -> torch.Tensor:
        """Attend.

        Args:
            query: `[B, H, T, K]`. key, value: `[B, G, T, K]`, of the same heads.
            attention_mask: as the base's attention function takes it.
            cache: the `MHLACacheLayer` of the layer, which holds the keys and values before these; or None.
            scaling, dropout, kwargs: as the base hands them to its attention function.

        Returns:
            `[B, T, H, K]`.
        """
        if cache is not None:
            key, value = cache.softmax.update(key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, self.eager)
        return attend(self, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)[0]


def padding_mask(*args, q_length, q_offset=0, attention_mask: torch.Tensor | None = None, **kwargs):
    """The mask of a model without softmax layers: which new tokens are padding `[B, T]`, never T x T numbers.

    So long and no longer, or each compiled step of `generate` would see another shape.
    """
    return None if attention_mask is None else new_columns(attention_mask, q_length, q_offset)


AttentionInterface.register(ATTENTION_NAME, mhla_attention)
AttentionMaskInterface.register(ATTENTION_NAME, padding_mask)


class MHLAMixer:
    """Mixed into a transformers attention class; the module has a child `mhla` (`MHLA`)."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        """As the base, with the layer's own cache in place of keys and values, whatever the base calls the cache."""
        name, mixed = find_cache(kwargs), hasattr(self, "softmax_heads")
        cache = mhla_cache_layer(kwargs.pop(name), self.layer_idx, mixed) if name is not None else None
        added = {"mhla_cache": cache, "mhla_hidden_states": hidden_states}
        if self.reads_unrotated:
            added["mhla_angles"] = rotation_angles(self, kwargs)
        output = super().forward(hidden_states, *args, **added, **kwargs)
        if cache is not None:
            cache.count(hidden_states)
        return output


def softmax_attentions(model: nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a decoder, by layer index: those that call transformers' attention interface, and MHLA's."""
    found = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
    return {module.layer_idx: module for module in found if hasattr(module, "mhla") or calls_interface(type(module))}


def install_mhla(model: nn.Module, settings: MHLASettings, core_class: type[nn.Module]) -> None:
    """Turn the attention modules that `settings.layers` lists into MHLA, in place; `model` is a body, or a head on one.

    core_class: `MHLA` or `DecayMHLA`, made once for each of these modules.
    """
    config = model.config
    attentions = softmax_attentions(model)
    chosen, kept = settings.resolve_layers(config.num_hidden_layers), settings.softmax_heads or {}
    widths = {"hidden_size": config.hidden_size, "norm_eps": getattr(config, "rms_norm_eps", 1e-6)}
    for index in chosen:
        attention = attentions[index]
        core = core_class(settings, **attention_sizes(attention, config), **widths)
        mixed = overlay_class(type(attention), MHLAMixer, "models.converted")
        attention.reads_unrotated = settings.rope == "near"
        if attention.reads_unrotated:
            core.unrotate = partial(unrotate, layout=rotation_layout(attention))
        swap_attention(attention, mixed, core, ATTENTION_NAME)
        if str(index) in kept:
            keep_softmax_heads(attention, config, kept[str(index)])
    if set(chosen) == set(attentions) and not kept:  # a base may have layers without attention
        set_attention_function(config, ATTENTION_NAME)
    prepare_inner_body(model, pass_padding)


def keep_softmax_heads(attention: nn.Module, config, heads: Sequence[int]) -> None:
    """Give KV heads of an MHLA attention module their softmax back, in place.

    Args:
        attention: the module.
        config: the model's configuration.
        heads: indices of KV heads, not all of the module's.

    Raises:
        ValueError: there are no such heads, or they are all.
    """
    count = attention.mhla.num_kv_heads
    if max(heads) >= count or len(heads) >= count:
        what = f"expected some of 0 to {count - 1}, fewer than all: a layer without MHLA heads is not in `layers`"
        raise ValueError(f"softmax_heads: got {list(heads)} for layer {attention.layer_idx}, {what}.")
    attention.mhla.heads = HeadSplit(heads, count)
    attention.softmax_heads = SoftmaxHeads(attention, config)


def pass_padding(body: nn.Module, args: tuple, kwargs: dict, names: tuple):
    """Before a body runs, whose forward takes `names`: say which tokens are padding, or where packed sequences begin, to the
    layers below.

    Adds `mhla_padding`, a pair (first real token of each row `[B]`, real tokens `[B, T]`), or `cu_seq_lens_q`; and counts
    positions from the first real token where the caller gave none, so that a padded row equals the row alone.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    refuse_paged_cache(kwargs)
    inputs = kwargs.get("input_ids")
    inputs = inputs if inputs is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return (), kwargs
    batch, length = inputs.shape[:2]
    mask, past = kwargs.get("attention_mask"), kwargs.get(find_cache(kwargs))
    seen = past.get_seq_length() if past is not None else 0  # a tensor in a static cache
    borders = packed_borders(kwargs, batch, seen)
    if borders is not None:
        return (), {**kwargs, **packed_arguments(kwargs, borders, length)}
    if mask is None or "mhla_padding" in kwargs:
        return (), kwargs
    columns = real_columns(mask, batch, length, seen)
    real = None if columns is None else new_columns(columns, length, seen)
    if real is not None and (torch.compiler.is_compiling() or not bool(real.all())):
        starts = torch.where(real.any(1), real.int().argmax(1), length)
        kwargs["mhla_padding"] = (starts, real)
    two_axes = isinstance(mask, torch.Tensor) and mask.ndim == 2
    if two_axes and kwargs.get("position_ids") is None and (torch.compiler.is_compiling() or not bool(mask.all())):
        kwargs["position_ids"] = new_columns((mask.long().cumsum(-1) - 1).clamp_min(0), length, seen)
    return (), kwargs


def first_new_column(mask: torch.Tensor, length: int, seen):
    """The first of `length` new columns of `[B, S]`: number `seen`, or the last ones of a shorter mask."""
    last = mask.shape[1] - length
    return seen.clamp(max=last) if isinstance(seen, torch.Tensor) else torch.sym_min(seen, last)


def new_columns(mask: torch.Tensor, length: int, seen) -> torch.Tensor:
    """What `[B, S]` says of the new tokens `[B, T]`."""
    if mask.shape[1] == length:
        return mask
    return mask[:, first_new_column(mask, length, seen) + torch.arange(length, device=mask.device)]


def real_columns(mask, batch: int, length: int, seen: int) -> torch.Tensor | None:
    """Which tokens are real, old and new, bool `[B, S]`, from a mask `[B, S]` or a causal one `[B, 1, T, S]`."""
    if isinstance(mask, dict):
        mask = mask["full_attention"]  # MHLA layers were no sliding ones
        if mask is None:
            return None
    if mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= length:
        return mask.bool()
    if mask.ndim == 4 and (torch.compiler.is_compiling() or mask.shape[-1] >= seen + length):
        allowed = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        if length > 1:
            check_only_padding(allowed[..., : seen + length], seen)
        return allowed.any(1).expand(batch, -1)
    expected = f"[{batch}, at least {length}] or a causal [{batch}, 1, {length}, S]"
    raise ValueError(f"attention_mask: got shape {tuple(mask.shape)} for {length} new tokens, expected {expected}.")


@torch.compiler.disable(reason="attention_mask came with four axes, checked by value, expected [batch, length].")
def check_only_padding(allowed: torch.Tensor, seen: int) -> None:
    """One sentence if a mask `[B, T, S]` says more than "causal, without these padded tokens", which MHLA would not see."""
    real = allowed.any(1)
    wanted = torch.ones_like(allowed).tril(int(seen)) & real[:, None]
    if bool(((wanted != allowed) & real[:, seen:, None]).any()):
        what = "expected [batch, length], or packed sequences by position_ids or cu_seq_lens_q in a batch of 1"
        raise ValueError(f"attention_mask: got four axes that hide more than padding and the future; {what}.")


def packed_borders(kwargs: dict, batch: int, seen: int) -> torch.Tensor | None:
    """Borders of the sequences packed into one row, int `[N + 1]`, if there are several."""
    if kwargs.get("cu_seq_lens_q") is not None:
        return kwargs["cu_seq_lens_q"]
    if kwargs.get("seq_idx") is not None:
        return find_borders(kwargs["seq_idx"], 0, batch)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.ndim != 2 or position_ids.shape[1] == 1:  # one token is one sequence
        return None
    if kwargs.get("attention_mask") is not None or seen:
        return None
    return find_borders(position_ids, 1, batch)


@torch.compiler.disable(reason="position_ids or seq_idx are read by value, expected cu_seq_lens_q beside them.")
def find_borders(ids: torch.Tensor, step: int, batch: int) -> torch.Tensor | None:
    """Borders int32 `[N + 1]` where ids `[1, T]` do not go on by `step`; None if they always do."""
    new = ids.diff() != step
    if not bool(new.any()):
        return None
    if batch != 1:
        raise ValueError(f"position_ids or seq_idx: got sequences packed in a batch of {batch}, expected a batch of 1.")
    inner = new[0].nonzero()[:, 0] + 1
    return torch.cat([inner.new_tensor([0]), inner, inner.new_tensor([ids.shape[1]])]).to(torch.int32)


def packed_arguments(kwargs: dict, borders: torch.Tensor, length: int) -> dict:
    """What a body gets of packed sequences: their borders, positions that start anew in each, and no cache."""
    for name in ("attention_mask", find_cache(kwargs), "use_cache"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ValueError(f"{name}: it came with packed sequences, expected none: they have no padding, no cache.")
    token, edges = torch.arange(length, device=borders.device), borders.long()
    position_ids = kwargs.get("position_ids")
    if position_ids is None:
        position_ids = (token - edges[torch.searchsorted(edges, token, right=True) - 1])[None]
    return {"cu_seq_lens_q": borders, "position_ids": position_ids, "use_cache": False}


# mhla_hf/models/converted_local.py

class MHLALocalLanguageMixin(MHLAHeadMixin):
    """Mixed into the base's class."""

    install, prepare = staticmethod(partial(install_mhla, core_class=DecayMHLA)), staticmethod(pass_padding)
    _can_compile_fullgraph = True


def __getattr__(name: str):
    return overlay_named(name, LANGUAGE, MHLALocalLanguageMixin, MHLAMixer)
