"""What processes that share a sequence send each other, with exact gradients: collectives of torch.distributed.

Every process of the group calls the same function in the same order; `group` None is the default one.
"""

import torch
import torch.distributed as dist


class ReduceScatter(torch.autograd.Function):
    """x `[P * N, ..]` of every process -> the sum over processes of their part number `rank`, `[N, ..]`."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        part = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx, grad):
        return AllGather.apply(grad, ctx.group), None


class AllGather(torch.autograd.Function):
    """x `[N, ..]` of every process -> all of them in the order of ranks, `[P * N, ..]`."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        everything = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(everything, x.contiguous(), group=group)
        return everything

    @staticmethod
    def backward(ctx, grad):
        return ReduceScatter.apply(grad, ctx.group), None


class FromLeft(torch.autograd.Function):
    """The tensor of the process before; zeros in the first one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shift(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, -1, ctx.group), None


def shift(x: torch.Tensor, step: int, group) -> torch.Tensor:
    """Send x to the process `step` behind this one; what came from the one before it, zeros where there is none."""
    rank, count, came = dist.get_rank(group), dist.get_world_size(group), torch.zeros_like(x).contiguous()
    calls = []
    if 0 <= rank + step < count:
        calls.append(dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=rank + step))
    if 0 <= rank - step < count:
        calls.append(dist.P2POp(dist.irecv, came, group=group, group_peer=rank - step))
    for work in dist.batch_isend_irecv(calls) if calls else ():
        work.wait()
    return came
