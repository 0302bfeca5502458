"""Checks of layers that the tests of several kinds of models share."""

import copy
from unittest import mock

import torch

from mhla_hf.models.transformers_api import set_gradient_checkpointing
from mhla_hf.nn.two_way import TwoWayMHLA
from mhla_hf.ops.windowed.definition import two_way_reference
from tools.ops_cases import distance


def by_definition(model):
    """Return a copy of a model whose MHLA layers use the T x T definition."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        if hasattr(module, "mhla") and not isinstance(module.mhla, TwoWayMHLA):
            module.mhla.settings.impl = "reference"
    forward = copied.forward

    def forward_by_definition(*args, **kwargs):
        with mock.patch("mhla_hf.nn.two_way.two_way_attention", two_way_reference):
            return forward(*args, **kwargs)

    copied.forward = forward_by_definition
    return copied


def checkpointing_changes_nothing(model, loss, close=(1e-4, 1e-6)):
    """Check that gradient checkpointing does not change gradients, and return the gradients by name."""
    checkpointed = copy.deepcopy(model)
    if hasattr(model, "enable_gradient_checkpointing"):  # of diffusers
        checkpointed.enable_gradient_checkpointing()
    else:
        set_gradient_checkpointing(checkpointed, True)
    gradients = []
    for instance in (model, checkpointed):
        instance.zero_grad()
        torch.manual_seed(0)
        loss(instance).backward()
        gradients.append({name: p.grad.clone() for name, p in instance.named_parameters() if p.grad is not None})
    torch.testing.assert_close(gradients[1], gradients[0], rtol=close[0], atol=close[1])
    return gradients[0]


def snapshot(model):
    """Return what a conversion or an adapter changes of a model, besides its outputs."""
    modules = {
        name: (type(module), module.training, sorted(vars(module)), list(module._forward_pre_hooks.values()))
        for name, module in model.named_modules()
    }
    states = {name: x.clone() for name, x in model.state_dict().items()}
    return modules, model.config, str(model.config), states


def check_unchanged(model, before):
    """Check that a model is as it was when `before` was taken by `snapshot`."""
    modules, config, values, states = snapshot(model)
    assert modules == before[0] and config is before[1] and values == before[2] and states.keys() == before[3].keys()
    assert all(torch.equal(x, before[3][name]) for name, x in states.items())


@torch.no_grad()
def one_graph(model, run, *calls, bound=1e-6):
    """Check that `run(model, call)` compiles to one graph, and gives the same output as without compilation."""
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for call in calls:
        assert distance(run(compiled, call), run(model, call)) <= bound
