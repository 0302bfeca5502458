"""Spreads the tokens of a video over processes, by diffusers' context parallelism (Wan).

Tokens are split in the order of their blocks, not row by row as in diffusers, so that a process has few blocks.
"""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...ops.blocks import Blocks


class ReduceScatter(torch.autograd.Function):
    """Sums x [P * N, ...] over P processes and returns this process's part [N, ...]: `ReduceScatter.apply(x, group)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gathered = grad.new_empty(len(grad) * dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.all_gather_into_tensor(gathered, grad.contiguous(), group=ctx.group)
        return gathered, None


def shard_of_grid(config: Any, grid: Any) -> dict[str, Any]:
    """Return `rank`, `edges`, and `add_up` of `sharded_mhla`, longer shards first; ValueError if equal ones are required."""
    parallel = config.context_parallel_config
    group = parallel._flattened_mesh.get_group()
    num_processes, num_tokens = dist.get_world_size(group), Blocks.grid(grid, [1] * len(grid)).length
    if num_tokens % num_processes and not (parallel.ulysses_anything or parallel.ring_anything):
        got = f"{num_tokens} tokens for {num_processes} processes"
        raise ValueError(f"hidden_states: got {got}, expected a multiple of these, or ulysses_anything=True.")
    size, num_longer = divmod(num_tokens, num_processes)
    return {
        "rank": dist.get_rank(group),
        "edges": list(accumulate([0, *[size + 1] * num_longer, *[size] * (num_processes - num_longer)])),
        "add_up": lambda parts: ReduceScatter.apply(parts, group),
    }


class TokenShards:
    """Forward hooks that pass only this process's tokens to Wan's blocks; as methods, they are copied with a model."""

    def __init__(self, model: Any):
        self.state, self.layout, self.config = model.mhla_state, model.config.mhla["layout"], model._parallel_config

    def hook(self, model: Any) -> None:
        model.register_forward_pre_hook(self.before_model, with_kwargs=True)
        model.rope.register_forward_hook(self.after_rope)
        model.blocks[0].register_forward_pre_hook(self.before_blocks)
        model.proj_out.register_forward_hook(self.after_output)

    def order(self, grid: Any, device: torch.device) -> Tensor:
        return Blocks.grid(grid, self.layout).index(device).argsort(stable=True)

    def local_tokens(self, x: Tensor, grid: Any) -> Tensor:
        """Select this process's T' of all T tokens: x [B, T, ...] -> [B, T', ...]."""
        shard = shard_of_grid(self.config, grid)
        first, end = shard["edges"][shard["rank"] :][:2]
        return x.index_select(1, self.order(grid, x.device)[first:end])

    def before_model(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Select this process's timesteps if there is one per token, [B, T], as in some Wan models."""
        bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        if bound.arguments["timestep"].ndim == 2:
            grid = model.token_grid(bound.arguments["hidden_states"])
            bound.arguments["timestep"] = self.local_tokens(bound.arguments["timestep"], grid)
        return bound.args[1:], bound.kwargs

    def after_rope(self, _module: nn.Module, _args: Any, rotations: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self.local_tokens(x, self.state.grid) for x in rotations)

    def before_blocks(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.local_tokens(args[0], self.state.grid), *args[1:]

    def after_output(self, _module: nn.Module, _args: Any, tokens: Tensor) -> Tensor:
        """Put all tokens, which diffusers has gathered in the order of blocks, back into the order of the grid."""
        return tokens.index_select(1, self.order(self.state.grid, tokens.device).argsort())
