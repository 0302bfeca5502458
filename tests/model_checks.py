"""What every kind of model must do with its layers, whatever it is called with."""

import copy

import torch
from ops_cases import distance

from mhla_hf.models.transformers_api import set_gradient_checkpointing


def by_definition(model):
    """A copy whose MHLA layers compute by the definition, T x T."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if hasattr(module, "mhla"):
            module.mhla.settings.impl = "reference"
    return copied


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
