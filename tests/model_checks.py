"""What every kind of model must do with its layers, whatever it is called with."""

import copy

import torch
from ops_cases import distance

from mhla_hf.models.transformers_api import set_gradient_checkpointing
from mhla_hf.nn.local import TwoWayMHLA
from mhla_hf.ops.reference import local_reference


def by_definition(model):
    """A copy whose MHLA layers compute by the definition, T x T."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(getattr(module, "mhla", None), TwoWayMHLA):
            module.mhla.attend = two_way_definition
        elif hasattr(module, "mhla"):
            module.mhla.settings.impl = "reference"
    return copied


def two_way_definition(q, k, v, fq, fk, decays, balance, form, *, key_mask=None):
    """`two_way_attention` by its definition."""
    blocks = -(-q.shape[1] // form.block_size)
    matrix = decays.matrix(blocks, form.lag, form.both_ways)
    return local_reference(q, k, v, fq, fk, matrix, balance, form, key_mask=key_mask)


def checkpointing_changes_nothing(model, loss, close=(1e-4, 1e-6)):
    """`loss(model)` gives the same gradients with its layers checkpointed. Returns them by name."""
    kept, copied = [], copy.deepcopy(model)
    set_gradient_checkpointing(copied, True)
    for own in (model, copied):
        own.zero_grad()
        torch.manual_seed(0)
        loss(own).backward()
        kept.append({name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None})
    torch.testing.assert_close(kept[1], kept[0], rtol=close[0], atol=close[1])
    return kept[0]


@torch.no_grad()
def one_graph(model, run, *calls, bound=1e-6):
    """`run(model, call)` of every call compiles to one graph, with the same numbers."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in calls:
        assert distance(run(compiled, call), run(model, call)) <= bound
