"""Whether something gives what its definition gives, which is asked before it is timed.

Unusual: definitions are of single queries, in fp64, so that they have room where a T x T one has none.
"""

import torch

TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}


def errors_against(definition, attention, tensors, direction):
    """{"output", "dq", "dk", "dv" and "dmixing" where that is the fourth: relative error} against what a definition gives
    for the same tensors in fp64."""
    exact = [x.detach().double().requires_grad_() for x in tensors]
    o, wanted = attention(*tensors), definition(*exact)
    got = o, *torch.autograd.grad(o, tensors, direction)
    wanted = wanted, *torch.autograd.grad(wanted, exact, direction.double())
    names = ("output", "dq", "dk", "dv", "dmixing")[: len(got)]
    return {name: relative_error(x, y) for name, x, y in zip(names, got, wanted, strict=True)}


class WrongResult(RuntimeError):
    """Something that is to be timed does not give what its definition gives."""


def refuse_wrong(checks, tolerance):
    """WrongResult, in one sentence, for the first error that is not below the tolerance."""
    for name, error in checks.items():
        if not error < tolerance:
            raise WrongResult(
                f"{name}: relative error {error:.1e}; expected below {tolerance:.0e}, so no speed is reported."
            )


def relative_error(got, expected):
    """Frobenius distance over the size of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def rows_of_definition(q, k, v, mixing, queries, *, blocks, causal, normalize):
    """The outputs of some queries by the definition, in fp64."""
    index = blocks.index(q.device)
    factor = mixing.double()[index[queries]][:, index]
    if causal:
        factor = factor * (torch.arange(k.shape[1], device=q.device) <= queries[:, None])

    def weights_of(products):
        weights = products * factor
        return weights / weights.sum(-1, keepdim=True) if normalize else weights

    return rows_with(weights_of, q, k, v, queries)


def rows_of_softmax(q, k, v, queries, causal):
    """The outputs of some queries by softmax attention, in fp64."""
    hidden = (torch.arange(k.shape[1], device=q.device) > queries[:, None]) & causal
    return rows_with(lambda products: products.masked_fill(hidden, -torch.inf).softmax(-1), q, k, v, queries)


def rows_with(weights_of, q, k, v, queries):
    """The outputs of some queries in fp64, given their weights from the scaled products [B, queries, S]; head by head, for
    one head of a million tokens has room where all of them have not."""
    rows = []
    for head in range(q.shape[2]):
        products = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        rows.append(weights_of(products) @ v[:, :, head].double())
    return torch.stack(rows, 2)
