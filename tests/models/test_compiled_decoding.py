"""Models by decays compile: one graph for every length and for every step of decoding, block edges included.

With salient tokens, every step is one graph, too, but a text of each number of blocks has its own. An exported program takes
more than two blocks: to torch, fewer are another program.
"""

import pytest
import torch
from tools.small_models import CACHE, converted_model, tokens
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

LOCAL = {"mixing_form": "decay", "windowed": True}
MIXED = {"layers": [1, 2], "softmax_heads": {2: [0]}, **LOCAL}  # a softmax layer, an MHLA layer, and one of both
HEADS = {"num_layers": 2, "layers": [1], "softmax_heads": {1: [0]}, **LOCAL}  # a softmax layer, and one of both
SALIENT = {"salient": 3, **MIXED}
ALL_SALIENT = {"salient": 3, "window": 1, "num_layers": 1, **LOCAL}


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    counters.clear()


def graphs():
    return counters["stats"]["unique_graphs"]


@torch.no_grad()
@pytest.mark.parametrize("settings", [HEADS, HEADS | {"salient": 3}])
def test_decoding_is_one_graph(settings):
    """Beside padding, with a cache that grows; `test_generate_with_a_static_cache_compiles_one_graph` has the other."""
    model, ids, mask = converted_model(**settings), tokens(2, 28), torch.ones(2, 64, dtype=torch.long)
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


@pytest.mark.parametrize(
    "settings",
    [LOCAL | {"num_layers": 1}, MIXED, ALL_SALIENT, SALIENT],
    ids=["all", "mixed", "all salient", "mixed salient"],
)
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
    assert model._can_compile_fullgraph


@torch.no_grad()
@pytest.mark.parametrize("exported", [False, True])
def test_one_graph_for_all_lengths(exported):
    model, ids = converted_model(**HEADS), tokens(2, 150)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    if exported:
        compiled = torch.export.export(
            model, (ids[:, :40].clone(),), {"use_cache": False}, prefer_deferred_runtime_asserts_over_guards=True,
            dynamic_shapes={"input_ids": {1: torch.export.Dim("length", min=17, max=512)}, "use_cache": None},
        ).module()  # fmt: skip
    for length in (17, 41, 64, 150, 99):
        here = ids[:, :length].clone()
        torch.testing.assert_close(compiled(here, use_cache=False).logits, model(here).logits, rtol=1e-5, atol=1e-5)
    assert exported or graphs() == 1


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_a_text_with_salient_tokens_is_one_graph(padded):
    model, ids, mask = converted_model(**SALIENT), tokens(2, 41), torch.ones(2, 41, dtype=torch.long)
    mask[0, :5] = 0
    given = {"attention_mask": mask if padded else None, "use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = mask.bool() if padded else slice(None)
    got, expected = compiled(ids, **given).logits, model(ids, **given).logits
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert graphs() == 1
