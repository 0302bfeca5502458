"""Checks of layers that the tests of several kinds of models share."""

import copy

import torch

from mhla_hf.models.transformers_api import set_gradient_checkpointing
from mhla_hf.nn.local import TwoWayMHLA
from mhla_hf.ops.reference import local_reference
from tools.ops_cases import distance


def by_definition(model):
    """Return a copy of a model whose MHLA layers use the T x T definition."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(getattr(module, "mhla", None), TwoWayMHLA):
            module.mhla.attend = two_way_definition
        elif hasattr(module, "mhla"):
            module.mhla.settings.impl = "reference"
    return copied


def two_way_definition(q, k, v, fq, fk, decays, balance, form, *, key_mask=None):
    """Compute `two_way_attention` by its definition."""
    blocks = -(-q.shape[1] // form.block_size)
    matrix = decays.matrix(blocks, form.lag, form.both_ways)
    return local_reference(q, k, v, fq, fk, matrix, balance, form, key_mask=key_mask)


def checkpointing_changes_nothing(model, loss, close=(1e-4, 1e-6)):
    """Check that gradient checkpointing does not change gradients, and return the gradients by name.

    Args:
        model: The model.
        loss: Function that returns the loss of a model.
        close: Relative and absolute tolerance.
    """
    checkpointed = copy.deepcopy(model)
    set_gradient_checkpointing(checkpointed, True)
    gradients = []
    for instance in (model, checkpointed):
        instance.zero_grad()
        torch.manual_seed(0)
        loss(instance).backward()
        gradients.append({name: p.grad.clone() for name, p in instance.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=close[0], atol=close[1])
    return gradients[0]


@torch.no_grad()
def one_graph(model, run, *calls, bound=1e-6):
    """Check that `run(model, call)` compiles to one graph, and gives the same output as without compilation.

    Args:
        model: The model.
        run: Function of a model and a call that returns a tensor.
        *calls: What `run` is called with.
        bound: Largest allowed relative error.
    """
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in calls:
        assert distance(run(compiled, call), run(model, call)) <= bound
