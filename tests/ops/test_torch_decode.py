"""Steps and chunks against the full forward; every row at its own position; rows moved, copied and cropped exactly."""

import copy
import functools

import pytest
import torch
from hypothesis import given
from tools.ops_cases import build, cases, distance, generated, plans

from mhla_hf.ops.api import mhla, mhla_step
from mhla_hf.ops.blocks import Blocks
from mhla_hf.ops.state import MHLAState

SIZE = 64


def make(batch=2, tokens=200, dtype=torch.float64):
    shapes = {"q": (4, 6), "k": (2, 6), "v": (2, 5)}
    x = {name: torch.rand(batch, tokens, *shape, dtype=dtype) for name, shape in shapes.items()}
    x["v"] = torch.randn_like(x["v"])
    return x, torch.rand(5, 5, dtype=dtype)


def cut(x, first, end):
    return {name: tensor[:, first:end] for name, tensor in x.items()}


def full(x, mixing, *, impl="reference", **options):
    blocks = Blocks.sequence(x["q"].shape[1], SIZE)
    return mhla(**x, mixing=mixing, blocks=blocks, causal=True, impl=impl, **options)


prefill = functools.partial(full, impl="auto", return_state=True)


def step(x, mixing, state, **options):
    o, same = mhla_step(**x, mixing=mixing, state=state, **options)
    assert same is state
    return o


def test_masked_keys_stay_positions():
    x, mixing = make()
    mask = torch.rand(2, 150) < 0.6
    whole = torch.cat([mask, torch.ones(2, 50, dtype=torch.bool)], 1)
    o, state = prefill(cut(x, 0, 150), mixing, key_mask=mask)
    later = step(cut(x, 150, 200), mixing, state)
    assert distance(torch.cat([o, later], 1), full(x, mixing, key_mask=whole)) < 1e-12


def test_rows_move_exactly():
    x, mixing = make(batch=3)
    starts = torch.tensor([0, 70, 140])
    _, state = prefill(cut(x, 0, 160), mixing, starts=starts)
    step(cut(x, 160, 170), mixing, state)
    now = cut(x, 170, 200)
    base = step(now, mixing, copy.deepcopy(state))
    moves = ("select", torch.tensor([2, 0, 0]), [2, 0, 0]), ("select", torch.tensor([1]), [1])
    for name, argument, index in (*moves, ("repeat", 2, [0, 0, 1, 1, 2, 2])):
        moved = copy.deepcopy(state)
        held = moved.summaries.data_ptr()
        assert getattr(moved, name)(argument) is None
        assert (moved.summaries.data_ptr() == held) == (len(index) == 3)  # for CUDA graphs
        o = step({n: t[index] for n, t in now.items()}, mixing, moved)
        assert distance(o, base[index]) < 1e-14, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """Summaries and mixtures stay fp32 whatever the inputs' dtype."""
    x, mixing = make(dtype=torch.float32)
    x = {name: t.to(dtype) for name, t in x.items()}
    o, state = prefill(cut(x, 0, 100), mixing.to(dtype))
    assert state.summaries.dtype == state.prefix.dtype == torch.float32 and state.window_k.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        later = [step(cut(x, t, t + 1), mixing.to(dtype), state) for t in range(100, 200)]
    expected = full({n: t.double() for n, t in x.items()}, mixing.to(dtype).double())
    o = torch.cat([o, *later], 1)
    assert o.dtype == dtype and distance(o, expected) < (2e-3 if dtype == torch.bfloat16 else 3e-4)


@generated(100)
@given(case=cases(("causal", "starts")), plan=plans())
def test_generated_steps_and_crops(case, plan):
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x, options = build(case, dtype)
        mixing, size, columns = x.pop("mixing"), case["blocks"].block_size, []
        starts = options.get("starts", torch.zeros(case["batch"], dtype=torch.int64))
        if "key_mask" in options:  # steps have none; a key of zeros weighs nothing
            for name in {"k", "k_den"} & x.keys():
                x[name] = torch.where(options["key_mask"][..., None, None], x[name], 0)
        made = {"normalize": case["normalize"], "scale": case["scale"]}
        widths = case["batch"], case["heads"][1], case["heads"][0], x["k"].shape[3], x["v"].shape[3], size
        den = x["k_den"].shape[3] if "k_den" in x else None
        state, outputs, fed = MHLAState.empty(*widths, normalize=case["normalize"], dtype=dtype, den_dim=den), [], 0
        for count, back in plan:
            new = range(fed, min(fed + count, case["blocks"].length))
            if not new:
                break
            own = (starts - len(columns)).clamp(0, len(new))
            now = {name: t[:, new.start : new.stop] for name, t in x.items()}
            outputs.append(step(now, mixing, state, starts=own, **made))
            columns, fed = [*columns, *new], new.stop
            outputs = [torch.cat(outputs, 1)]
            whole = {name: t[:, columns].double() for name, t in x.items()}
            blocks = Blocks.sequence(len(columns), size)
            kept = {"starts": starts.clamp(max=len(columns)), "blocks": blocks, "causal": True, **made}
            assert distance(outputs[0], mhla(**whole, mixing=mixing.double(), impl="reference", **kept)) < bound
            back = min(back, size, int(state.length.min()), int((state.length - state.oldest).min()))
            state.crop(back)
            columns = columns[: len(columns) - back]
            outputs = [outputs[0][:, : len(columns)]]
