"""Sequences packed into one row keep to themselves, however their borders are given, eager and compiled."""

import pytest
import torch
from tools.small_models import CACHE, converted_model, refused, scratch_model, tokens
from transformers import DataCollatorWithFlattening, DynamicCache

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
MODELS = [
    lambda: converted_model(layers="2/3"),
    scratch_model,
    lambda: converted_model(
        block_size=4, mixing_form="decay", windowed=True, window=1, salient=2, softmax_heads={0: [1]}
    ),
]
ROWS = [tokens(1, n, seed=n) for n in (5, 20, 9)]
COLLATORS = {
    "position_ids": {},
    "seq_idx": {"return_seq_idx": True, "return_position_ids": False},
    "cu_seq_lens_q": {"return_flash_attn_kwargs": True, "return_position_ids": False},
}


def packed(given: str) -> dict:
    return DataCollatorWithFlattening(**COLLATORS[given])([{"input_ids": row[0].tolist()} for row in ROWS])


def separate(model) -> torch.Tensor:
    return torch.cat([model(row, use_cache=False).logits for row in ROWS], 1)


@torch.no_grad()
@pytest.mark.parametrize("make", MODELS, ids=["hybrid", "scratch", "salient"])
@pytest.mark.parametrize("given", list(COLLATORS))
def test_packed_equals_separate(make, given):
    """Also where the model would make a cache by itself, and where the body gets its arguments by place."""
    model, batch = make(), packed(given)
    expected = separate(model)
    torch.testing.assert_close(model(**batch).logits, expected, **CLOSE)
    if given == "position_ids":
        hidden = model.model(batch["input_ids"], None, batch["position_ids"]).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), expected, **CLOSE)


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_compiled_packed_equals_separate(given):
    """As one graph where the borders are given; where they are read from the numbers, the graph is cut there."""
    torch.compiler.reset()
    model, batch = converted_model(layers=[1], num_layers=2), packed(given)
    out = torch.compile(model, backend="eager", fullgraph=given == "cu_seq_lens_q")(**batch)
    torch.testing.assert_close(out.logits, separate(model), **CLOSE)
    out.loss.backward()
    compiled = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(**batch).loss.backward()
    for got, parameter in zip(compiled, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, **CLOSE)


def test_packed_rows_have_neither_padding_nor_cache():
    model, batch = converted_model(), packed("cu_seq_lens_q")
    given = {"attention_mask": torch.ones(1, 34), CACHE: DynamicCache(), "use_cache": True}
    for name, value in given.items():
        with refused(name, "packed"):
            model(**batch, **{name: value})
