"""Differentiable collectives for processes that share a sequence, built on torch.distributed.

Every process of the group has to call the same functions in the same order. A `group` of None is the default group.
"""

from typing import Any

import torch
import torch.distributed as dist


class ReduceScatter(torch.autograd.Function):
    """Sums a tensor over all processes and returns this process's part.

    Called as `ReduceScatter.apply(x, group)`: x [P * N, ..] -> [N, ..], where P is the number of processes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup | None") -> torch.Tensor:
        ctx.group = group
        part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return AllGather.apply(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """Concatenates the tensors of all processes along the first axis, in the order of their ranks.

    Called as `AllGather.apply(x, group)`: x [N, ..] -> [P * N, ..], where P is the number of processes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup | None") -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ReduceScatter.apply(grad, ctx.group), None


class FromLeft(torch.autograd.Function):
    """Sends x to the next rank and returns the tensor of the previous one; rank 0 gets zeros.

    Called as `FromLeft.apply(x, group)`. x has the same shape in all processes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: "dist.ProcessGroup | None") -> torch.Tensor:
        ctx.group = group
        return shift(x, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return shift(grad, -1, ctx.group), None


def shift(x: torch.Tensor, step: int, group: "dist.ProcessGroup | None") -> torch.Tensor:
    """Send x to rank `rank + step`, and return the x of rank `rank - step`, or zeros if there is no such rank.

    This is a collective: every process of `group` must call it, with an x of the same shape.
    """
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    received = torch.zeros_like(x).contiguous()
    operations = []
    if 0 <= rank + step < num_ranks:
        operations.append(dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=rank + step))
    if 0 <= rank - step < num_ranks:
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - step))
    if operations:
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return received
