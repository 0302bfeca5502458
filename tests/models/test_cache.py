"""Cached decoding equals the full forward pass, whatever the way transformers takes through it."""

import copy

import accelerate
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.ops_cases import distance, generated
from tools.small_models import CACHE, MODELS, converted_model, scratch_model, softmax_model, tokens
from transformers import DynamicCache

from mhla_hf import convert

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SALIENT = {"windowed": True, "salient": 3}
MODELS = {
    **MODELS,
    "llama-salient": lambda: converted_model(**SALIENT),
    "smollm3-salient": lambda: converted_model(
        "smollm3", [1, 2], heads=(4, 4), window=1, softmax_heads={1: [0, 2]}, **SALIENT
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


@torch.no_grad()
def full_logits(model, ids, mask=None):
    return model(ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def test_every_split_equals_the_full_pass(model):
    ids = tokens(2, 60)
    expected = full_logits(model, ids)
    for split in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 35, 48, 59):  # 4 blocks of 8 are learned
        cache = DynamicCache(config=model.config)
        first = model(ids[:, :split], **{CACHE: cache}, use_cache=True).logits
        second = model(ids[:, split:], **{CACHE: cache}, use_cache=True).logits
        assert cache.get_seq_length() == 60
        assert distance(torch.cat([first, second], 1), expected) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("how", ["sample", "beam", "static"])
def test_cached_generation_equals_cacheless(model, how):
    ids, mask = tokens(2, 19), torch.ones(2, 19, dtype=torch.long)
    mask[0, :15] = int(how != "static")
    options = {"sample": {"do_sample": True, "top_k": 0}, "beam": {"num_beams": 3}, "static": {"do_sample": False}}[how]
    runs = []
    for cache in ({"cache_implementation": "static"} if how == "static" else {}, {"use_cache": False}):
        torch.manual_seed(11)
        runs.append(model.generate(ids, attention_mask=mask, max_new_tokens=20, **options, **cache))
    assert torch.equal(*runs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-all", "llama-hybrid", "llama-heads", "llama-salient", "scratch"])
def test_assisted_decoding_rolls_back(name):
    """Exactly, but for drafts that were taken back: these leave their votes for salient tokens."""
    model, ids = MODELS[name](), tokens(1, 14)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = model.generate(ids, **options)
    draft = copy.deepcopy(model)
    for p in draft.parameters():
        p += 0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5))
    for how in ({"assistant_model": draft}, {"assistant_model": softmax_model()}, {"prompt_lookup_num_tokens": 3}):
        assisted = model.generate(ids, **how, **options)
        assert torch.equal(assisted, plain) or (name == "llama-salient" and assisted.shape == plain.shape)


@torch.no_grad()
def test_cache_of_another_model_is_refused():
    base, model = softmax_model(), converted_model()
    cache = DynamicCache(config=base.config)
    base(tokens(1, 5), **{CACHE: cache})
    with pytest.raises(ValueError, match="past_key_values: got a cache with 5 tokens of softmax in layer 0"):
        model(tokens(1, 1), **{CACHE: cache})
    ours = DynamicCache(config=model.config)
    model(tokens(1, 5), **{CACHE: ours})
    with pytest.raises(ValueError, match="past_key_values: got keys from a layer without MHLA"):
        base(tokens(1, 1), **{CACHE: ours})


@torch.no_grad()
def test_padding_within_a_row_has_no_place_however_it_is_cut(model):
    """A row that was padded on the right and goes on, beside one that begins late; the pieces begin within the padding."""
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, 11:25], mask[1, :3] = 0, 0
    real = mask.bool()
    expected = torch.cat([full_logits(model, row[None, own])[0] for row, own in zip(ids, real, strict=True)])
    torch.testing.assert_close(full_logits(model, ids, mask)[real], expected, **CLOSE)
    for sizes in ([14, 26], [11, 9, 20], [10, *[1] * 30], [2, 10, 3, 25]):
        cache, parts = DynamicCache(config=model.config), []
        for piece in ids.split(sizes, 1):
            seen = cache.get_seq_length() + piece.shape[1]
            parts.append(model(piece, attention_mask=mask[:, :seen], **{CACHE: cache}).logits)
        torch.testing.assert_close(torch.cat(parts, 1)[real], expected, **CLOSE)


def test_a_cache_of_inference_mode_goes_on_and_is_refused_in_training(model):
    ids = tokens(1, 12)
    with torch.inference_mode():
        cache = model(ids[:, :10], use_cache=True)[CACHE]
    with torch.no_grad():
        got = model(ids[:, 10:], **{CACHE: cache}).logits
        torch.testing.assert_close(got, full_logits(model, ids)[:, 10:], **CLOSE)
    model.train()
    with pytest.raises(ValueError, match="no gradient flows through an MHLA cache"):
        model(ids[:, 10:], **{CACHE: cache})
    model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["scratch", "qwen2-gated", "smollm3-salient"])
def test_offloaded_weights_are_read_where_they_were_moved(name):
    model, ids = MODELS[name](), tokens(1, 20)
    expected = full_logits(model, ids)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    cache = model(ids[:, :19], use_cache=True)[CACHE]
    last = model(ids[:, 19:], **{CACHE: cache}).logits
    assert distance(full_logits(model, ids), expected) == 0 and distance(last, expected[:, 19:]) <= 1e-5


def test_no_square_mask_is_made():
    """Neither in the first turn nor in a later one: long contexts would pay for it."""
    for model in (scratch_model(), converted_model()):
        seen, ids = [], tokens(1, 40)
        keep = lambda module, args, kwargs, seen=seen: seen.append(kwargs.get("attention_mask"))  # noqa: E731
        model.base_model.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
        cache = DynamicCache(config=model.config)
        for length in (10, 40):
            model.generate(ids[:, :length], **{CACHE: cache}, max_new_tokens=4)
        assert len(seen) == 8 and all(mask is None or mask.ndim == 2 for mask in seen)


@torch.no_grad()
def test_masks_that_hide_more_than_padding_are_refused(model):
    ids = tokens(2, 9)
    blocks = torch.ones(9, 9, dtype=torch.bool).tril()
    causal = blocks.clone()
    blocks[5:, :5] = False
    torch.testing.assert_close(full_logits(model, ids, causal.expand(2, 1, 9, 9)), full_logits(model, ids), **CLOSE)
    with pytest.raises(ValueError, match="hides more than padding"):
        full_logits(model, ids, blocks.expand(2, 1, 9, 9))


def head_outputs(model, ids, mask):
    """What each query head of the only layer gives: `[B, T, H, K]`."""
    attention, seen = model.model.layers[0].self_attn, []
    with attention.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        model(ids, attention_mask=mask, use_cache=False)
    return seen[0].unflatten(-1, (-1, attention.head_dim))


@generated(25)
@given(data=st.data())
@torch.no_grad()
def test_generated_mixtures_of_heads(data):
    """Each head is as in a model of its kind alone, beside padding, too."""
    groups, share, length = (data.draw(st.integers(*limits)) for limits in ((2, 4), (1, 3), (2, 70)))
    kept = data.draw(st.sets(st.integers(0, groups - 1), min_size=1, max_size=groups - 1))
    salient = data.draw(st.sampled_from([0, 3]))
    window, block_size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 16]))
    heads = groups * share
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": groups}
    base = softmax_model(attn_implementation="eager", num_hidden_layers=1, **sizes)  # softmax over all T x T scores
    settings = {"layers": "all", "window": window, "block_size": block_size, "salient": salient}
    every = convert(copy.deepcopy(base), **settings)
    mixed = convert(copy.deepcopy(base), softmax_heads={0: sorted(kept)}, **settings)
    mixed.set_attn_implementation(data.draw(st.sampled_from(["eager", "sdpa"])))

    ids, mask = tokens(2, length, seed=groups), torch.ones(2, length, dtype=torch.long)
    hidden = data.draw(st.integers(0, length - 1))
    mask[1, :hidden] = 0
    whole = {model: head_outputs(model, ids, mask) for model in (base, every, mixed)}
    for head in range(heads):
        alone = whole[base if head // share in kept else every]
        for row, first in enumerate((0, hidden)):
            assert distance(whole[mixed][row, first:, head], alone[row, first:, head]) <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads", [{"salient": 0}, {"salient": 5}, {"salient": 5, "softmax_heads": {"0": [1], "2": [0]}}]
)
@torch.no_grad()
def test_a_prompt_that_drops_no_token_is_the_base_bit_for_bit(heads, dtype, attention):
    """And decoding goes on from it as from a prompt that was read block by block."""
    base, model = softmax_model().to(dtype), converted_model(windowed=True, sinks=2, window=3, **heads).to(dtype)
    block_size = model.config.mhla["block_size"]
    longest = block_size * (3 + (2 + heads["salient"]) // block_size)
    for one in (base, model):
        one.set_attn_implementation(attention)
    ids = tokens(2, 60)
    for length in (1, 7, 8, 24, longest):
        prompt = model(ids[:, :length], use_cache=True)
        if attention == "sdpa" or "softmax_heads" in heads:
            assert torch.equal(prompt.logits, base(ids[:, :length]).logits)
    if heads["salient"] and dtype == torch.bfloat16:
        return  # rounding decides between tokens with almost the same votes
    rest = model(ids[:, longest:], **{CACHE: prompt[CACHE]}).logits
    bound = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(rest.float(), model(ids).logits[:, longest:].float(), rtol=bound, atol=bound)
    assert not torch.equal(model(ids[:, : longest + 9]).logits, base(ids[:, : longest + 9]).logits)
