"""Windowed models compile: one graph for all steps of decoding, block edges included, and as others do, for a text.

Each number of blocks of a language model has its own graph; one of an encoder serves all.
"""

import pytest
import torch
from tools.small_encoders import converted_encoder
from tools.small_models import CACHE, converted_model, tokens
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

LOCAL = {"windowed": True, "salient": 3}
MIXED = {"layers": [1, 2], "softmax_heads": {2: [0]}, **LOCAL}  # a softmax layer, an MHLA layer, and one of both
ALL = {**LOCAL, "window": 1, "num_layers": 1}


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


@torch.no_grad()
def test_decoding_is_one_graph():
    """Beside padding, with a cache that grows; `test_generate_with_a_static_cache_compiles_one_graph` has the other."""
    model, ids, mask = converted_model(**MIXED), tokens(2, 28), torch.ones(2, 64, dtype=torch.long)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask[:, :28]).logits
    cache = DynamicCache(config=model.config)
    model(ids[:, :11], attention_mask=mask[:, :11], **{CACHE: cache})
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for t in range(11, 28):
        logits = compiled(ids[:, t : t + 1], **{CACHE: cache}, attention_mask=mask[:, : t + 1]).logits
        torch.testing.assert_close(logits[:, 0], expected[:, t], rtol=1e-5, atol=1e-5)
        if t == 16:
            warm = graphs()
    assert graphs() == warm


@pytest.mark.parametrize("settings", [ALL, {**ALL, "salient": 0}, MIXED], ids=["all", "no salient", "mixed"])
def test_generate_with_a_static_cache_compiles_one_graph(settings):
    model, ids, mask = converted_model(**settings), tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :5] = 0
    given = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **given)
    compiling = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    compiling._compile_all_devices = True
    ours = model.generate(ids, cache_implementation="static", compile_config=compiling, **given)
    assert torch.equal(ours, expected)
    assert graphs() == 1


@torch.no_grad()
def test_one_graph_for_all_lengths():
    model, ids = converted_encoder("eurobert", layers=[1]), tokens(2, 64) % 60
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (17, 41, 64, 50):
        here = ids[:, :length].clone()
        torch.testing.assert_close(compiled(here)[0], model(here)[0], rtol=1e-5, atol=1e-5)
    assert graphs() == 1


@torch.no_grad()
@pytest.mark.parametrize("settings", [MIXED, {"layers": [1]}], ids=["salient", "matrix"])
@pytest.mark.parametrize("how", ["padded", "whole", "exported"])
def test_a_text_is_one_graph(how, settings):
    model, ids, mask = converted_model(**settings), tokens(2, 41), torch.ones(2, 41, dtype=torch.long)
    mask[0, :5] = 0
    given = {"attention_mask": None if how == "whole" else mask, "use_cache": False}
    if how == "exported":
        compiled = torch.export.export(model, (ids,), given).module()
    else:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = slice(None) if how == "whole" else mask.bool()
    got, expected = compiled(ids, **given).logits, model(ids, **given).logits
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert how == "exported" or graphs() == 1
