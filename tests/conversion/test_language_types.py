"""Every model type of causal language models that converts does what a language model does, and every other is refused.

So are those of masked language models that are not in tests/tools/small_encoders.py.
"""

import itertools

import pytest
import torch
import transformers
from tools.elsewhere import check_elsewhere
from tools.small_models import CACHE, refused, softmax_model
from tools.small_types import TYPES, small_model_of
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

import mhla_hf
from mhla_hf.conversion.teacher import mhla_layers
from mhla_hf.conversion.transformers_models import REFUSED
from mhla_hf.models.families import ENCODERS, LANGUAGE
from mhla_hf.models.transformers_api import TESTED_TRANSFORMERS

IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(1))
CUTS = (0, 21, 22, 23, 33, 40)
STEPS = {"jamba": (0, 37, 38, 39, 40)}  # whose original goes on rightly by single tokens alone
BORDER = 15
# packed sequences are not kept apart by the softmax original either, for lack of a kernel or by its own design
UNPACKED = ("afmoe", "bailing_hybrid", "granitemoehybrid", "kimi_linear", "lfm2_moe", "lfm3", "minimax", "olmo_hybrid")
UNPACKED += ("jamba", "lara_mini", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def decoded(model, model_type):
    """The logits of IDS, read in pieces through a cache."""
    cache, parts = None, []
    for begin, end in itertools.pairwise(STEPS.get(model_type, CUTS)):
        output = model(IDS[:, begin:end], **{CACHE: cache}, use_cache=True)
        cache = output[CACHE]
        parts.append(output.logits)
    return torch.cat(parts, 1)


SAMPLED = ("cohere", "deepseek_v3", "gpt2", "llama", "mimo_v2_flash", "phi3", "qwen3_next", "smollm3")
WITH_HEADS = [  # all but the one that has one KV head
    pytest.param(one, True, marks=[] if one in SAMPLED else pytest.mark.slow) for one in TYPES if one != "gpt_bigcode"
]


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "with_head"), [*((one, False) for one in TYPES), *WITH_HEADS])
def test_a_converted_model_of_this_type(model_type, with_head, tmp_path):
    """Cached equals whole, no token sees a later one, padding changes nothing, packed equals alone, saved equals itself; the
    first and the third also with a softmax head in every layer."""
    settings = {"layers": "all", "block_size": 8, "window": 2, "salient": 3}
    softmax = small_model_of(model_type)(IDS).logits
    model = mhla_hf.convert(small_model_of(model_type), **settings)
    if with_head:
        heads = {index: [attention.mhla.num_kv_heads - 1] for index, attention in mhla_layers(model).items()}
        model = mhla_hf.convert(small_model_of(model_type), softmax_heads=heads, **settings)
    whole = model(IDS).logits
    close = 1e-4 * max(1.0, float(whole.abs().max()))
    assert (whole - softmax).abs().max() > 1e-3, "the MHLA layers change nothing"
    assert (decoded(model, model_type) - whole).abs().max() <= close
    padded, mask = (torch.nn.functional.pad(x, (5, 0)) for x in (IDS, torch.ones_like(IDS)))
    assert (model(padded, attention_mask=mask).logits[:, 5:] - whole).abs().max() <= close
    if with_head:
        return
    later = torch.cat([IDS[:, :-1], IDS[:, -1:] % 50 + 4], 1)
    assert (model(later).logits - whole)[:, :-1].abs().max() <= close
    if model_type not in UNPACKED:
        places = torch.cat([torch.arange(BORDER), torch.arange(40 - BORDER)])[None]
        packed = model(IDS[:1], position_ids=places, use_cache=False).logits
        alone = [model(part, use_cache=False).logits for part in (IDS[:1, :BORDER], IDS[:1, BORDER:])]
        assert (packed - torch.cat(alone, 1)).abs().max() <= close
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is type(model) and torch.equal(loaded(IDS).logits, whole)


@pytest.mark.slow  # a minute
@torch.no_grad()
def test_every_type_loads_where_the_package_is_not(tmp_path):
    wanted = {}
    for model_type in TYPES:
        model = mhla_hf.convert(small_model_of(model_type), layers="all", block_size=8, window=2, salient=3)
        model.save_pretrained(tmp_path / model_type)
        wanted[f"{model_type}-AutoModelForCausalLM"] = model(IDS).logits
    check_elsewhere(tmp_path, {"input_ids": IDS}, wanted, tolerance=1e-4)


def test_every_other_type_is_refused_for_a_reason():
    refused_types = [model_type for types in REFUSED.values() for model_type in types.split()]
    known = [*refused_types, *(family.base for family in (*LANGUAGE, *ENCODERS))]
    there_are = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    assert len(known) == len({*known}), "each is in one place"
    assert there_are <= {*known} and ({*known} == there_are or transformers.__version__ != TESTED_TRANSFORMERS[1])
    model = softmax_model()
    for reason, types in REFUSED.items():
        model.config.__class__ = type("Config", (LlamaConfig,), {"model_type": types.split()[0]})
        with refused(types.split()[0], reason):
            mhla_hf.convert(model)


def test_dropout_that_a_conversion_loses_is_said(caplog):
    mhla_hf.convert(small_model_of("biogpt"))
    assert "attention_probs_dropout_prob=0.1" in caplog.text
