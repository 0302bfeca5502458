"""The tokens of one video spread over processes, by diffusers' context parallelism (Wan).

diffusers cuts the tokens as they come, row by row, so that nearly every process would have some of nearly every block of a
grid. Here they are brought to the order of their blocks first: what an MHLA layer exchanges then shrinks with the share.
"""

import inspect
from itertools import accumulate

import torch

from ..ops.blocks import Blocks
from ..ops.exchange import ReduceScatter


def share_of_grid(config, grid) -> dict:
    """What `sharded_mhla` takes of this process: shards of equal length, or the first ones longer by one, if diffusers was
    told to take `ulysses_anything` or `ring_anything`. ValueError, one sentence: they are not equal and it was not."""
    parallel = config.context_parallel_config
    group = parallel._flattened_mesh.get_group()
    count, tokens = torch.distributed.get_world_size(group), Blocks.grid(grid, [1] * len(grid)).length
    if tokens % count and not (parallel.ulysses_anything or parallel.ring_anything):
        what = f"which {count} processes cannot share equally; expected ContextParallelConfig(ulysses_anything=True)"
        raise ValueError(f"hidden_states: got {tokens} tokens, {what}.")
    size, longer = divmod(tokens, count)
    return {
        "rank": torch.distributed.get_rank(group),
        "edges": list(accumulate([0, *[size + 1] * longer, *[size] * (count - longer)])),
        "add_up": lambda parts: ReduceScatter.apply(parts, group),
    }


class TokenShares:
    """Hooks that give a Wan's blocks this process's tokens, in the order of their blocks, and put all of them back behind.

    An object rather than closures, so that a copy of the model gets hooks with the copy's state.
    """

    def __init__(self, model):
        self.state, self.layout, self.config = model.mhla_state, model.config.mhla["layout"], model._parallel_config

    def hook(self, model) -> None:
        model.register_forward_pre_hook(self.before_model, with_kwargs=True)
        model.rope.register_forward_hook(self.behind_rope)
        model.blocks[0].register_forward_pre_hook(self.before_blocks)
        model.proj_out.register_forward_hook(self.behind_output)

    def order(self, grid, device) -> torch.Tensor:
        return Blocks.grid(grid, self.layout).index(device).argsort(stable=True)

    def own(self, x: torch.Tensor, grid) -> torch.Tensor:
        """Of x `[B, T, ..]` this process's tokens."""
        share = share_of_grid(self.config, grid)
        first, end = share["edges"][share["rank"] :][:2]
        return x.index_select(1, self.order(grid, x.device)[first:end])

    def before_model(self, model, args, kwargs):
        """Time steps `[B, T]`, which some Wans have for each token."""
        given = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
        if given.arguments["timestep"].ndim == 2:
            grid = model.token_grid(given.arguments["hidden_states"])
            given.arguments["timestep"] = self.own(given.arguments["timestep"], grid)
        return given.args[1:], given.kwargs

    def behind_rope(self, _module, _args, rotations):
        return tuple(self.own(x, self.state.grid) for x in rotations)

    def before_blocks(self, _module, args):
        return self.own(args[0], self.state.grid), *args[1:]

    def behind_output(self, _module, _args, tokens):
        return tokens.index_select(1, self.order(self.state.grid, tokens.device).argsort())
