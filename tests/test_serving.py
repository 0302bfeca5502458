"""Continuous batching: every request as `generate` alone, whoever shares the batch with it."""

import random

import pytest
import torch
from small_models import VOCAB, converted_model, refused, softmax_model
from torch._dynamo.utils import counters
from transformers import GenerationConfig

import mhla_hf
from mhla_hf.serving import ContinuousBatch, generate_batch

LOCAL = {"mixing_form": "decay", "local": "softmax"}


def alone(model, prompt, count, **options):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, **options}
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": count}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


def prompts(count, longest, seed=0):
    source = random.Random(seed)
    return [[source.randrange(2, VOCAB) for _ in range(source.randint(1, longest))] for _ in range(count)]


def come_and_go(model, todo, longest_answer, compiled, **sizes):
    """Requests that are admitted and canceled at random moments, each against `generate` alone; one graph for all."""
    torch.compiler.reset()
    counters.clear()
    source, requests, canceled = random.Random(1), [], []
    batch = ContinuousBatch(model, compile=compiled, **sizes)
    while todo or batch.pending:
        if todo and source.random() < 0.4:
            requests.append(batch.add(todo.pop(), source.randint(1, longest_answer)))
        if requests and source.random() < 0.03:
            canceled.append(source.choice(requests[-2 * sizes["slots"] :]))
            batch.cancel(canceled[-1])
        batch.step()
    for request in requests:
        expected = alone(model, request.prompt, request.max_new_tokens)
        assert request.tokens == (expected[: len(request.tokens)] if request in canceled else expected)
        assert request.finished and request.slot is None
    assert counters["stats"]["unique_graphs"] == bool(compiled)


@torch.no_grad()
def test_weights_that_change_between_requests_are_read_anew():
    model = converted_model(**LOCAL)
    batch, (prompt,) = ContinuousBatch(model, slots=1), prompts(1, 40)
    for _ in range(2):
        request = batch.add(prompt, 20)
        while batch.pending:
            batch.step()
        assert request.tokens == alone(model, prompt, 20)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)


KINDS = {"all": {"num_layers": 1}, "mixed": {"layers": [1, 2], "softmax_heads": {2: [0]}}}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("compiled", [False, "eager"])
def test_requests_that_come_and_go(kind, compiled):
    model = converted_model(**KINDS[kind], **LOCAL)
    come_and_go(model, prompts(12, 40), 30, compiled, slots=3, max_length=80, chunk_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("family, layers", [("llama", "all"), ("qwen3", [1]), ("mixtral", [0, 2])])
def test_two_hundred_requests(family, layers):
    model = converted_model(family, layers, **LOCAL)
    come_and_go(model, prompts(200, 90), 32, "eager", slots=16, max_length=128, chunk_size=32)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.5},
        {"eos_token_id": list(range(20))},
        {"eos_token_id": list(range(40)), "min_new_tokens": 5},
        {"forced_eos_token_id": 3},
        {"encoder_repetition_penalty": 1.5},
    ],
)
def test_options_of_generate(options):
    model, todo = converted_model(layers=[1], **LOCAL), prompts(4, 20)
    config = GenerationConfig(**options)
    got = generate_batch(model, todo, max_new_tokens=12, slots=2, max_length=64, generation_config=config)
    assert got == [alone(model, prompt, 12, **options) for prompt in todo]
    assert "eos_token_id" not in options or min(map(len, got)) < 12


def test_sampling():
    model, todo = converted_model(**LOCAL), prompts(3, 20)
    sampled, greedy = GenerationConfig(do_sample=True, top_k=1), [alone(model, prompt, 9) for prompt in todo]
    assert generate_batch(model, todo, max_new_tokens=9, generation_config=sampled) == greedy
    sampled, seeds = GenerationConfig(do_sample=True, temperature=3.0), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seeds.append(generate_batch(model, todo, max_new_tokens=9, generation_config=sampled))
    assert seeds[0] == seeds[1] != seeds[2]


def test_the_length_of_the_generation_config():
    model, todo = converted_model(**LOCAL), prompts(3, 20)
    given = GenerationConfig(max_length=26)
    expected = [alone(model, prompt, None, generation_config=given) for prompt in todo]
    assert generate_batch(model, todo, generation_config=given) == expected
    model.generation_config.max_length = 30
    expected = [alone(model, prompt, None) for prompt in todo]
    assert generate_batch(model, todo) == expected and len(expected[0]) == 30 - len(todo[0])


@pytest.mark.parametrize("call", [0, 1, 5, 9])
def test_an_error_in_a_step_changes_no_token(call):
    """Whatever the layer before it has put in its cache."""
    model, todo, calls = converted_model(layers=[1], **LOCAL), prompts(4, 20), []
    expected = [alone(model, prompt, 6) for prompt in todo]

    def fails(*args):
        calls.append(args)
        if len(calls) == call + 1:
            raise MemoryError("here")

    hook = model.model.layers[2].register_forward_pre_hook(fails)
    batch, errors = ContinuousBatch(model, slots=2, max_length=64, chunk_size=8), 0
    requests = [batch.add(prompt, 6) for prompt in todo]
    while batch.pending:
        try:
            batch.step()
        except MemoryError:
            errors += 1
    hook.remove()
    assert errors == 1 and [request.tokens for request in requests] == expected


def test_a_slot_keeps_nothing_of_the_request_before():
    """Not even NaN, which gets through a weight of zero."""
    model, (first, second) = converted_model(layers=[1], **LOCAL), prompts(2, 20)
    batch = ContinuousBatch(model, slots=1, max_length=64)
    batch.cancel(batch.add(first, 30))
    ruined, request = batch.add(first, 30), batch.add(second, 10)
    batch.step()
    for name in ("keys", "values"):
        getattr(batch.cache.layers[0], name)[:] = torch.nan
    batch.cancel(ruined)
    while batch.pending:
        batch.step()
    assert request.tokens == alone(model, second, 10)


def test_a_model_in_training_stays_in_training():
    model = converted_model(**LOCAL).train()
    generate_batch(model, [[3, 4]], max_new_tokens=2)
    assert model.training


def sliding_hybrid():
    base = softmax_model("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return mhla_hf.convert(base, layers=[0])


def test_a_sliding_window_in_softmax_layers():
    model, todo = sliding_hybrid(), prompts(3, 20)
    assert set(model.config.layer_types) == {"full_attention", "sliding_attention"}
    got = generate_batch(model, todo, max_new_tokens=20, slots=2, max_length=64, chunk_size=6)
    assert got == [alone(model, prompt, 20) for prompt in todo]


def flash_hybrid():
    model = converted_model(layers=[1], **LOCAL)
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def batch_of(layers="all", **options):
    return ContinuousBatch(converted_model(layers=layers, **LOCAL), **options)


def add_twice(batch):
    for _ in range(2):
        batch.add([2], 2, "a")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: ContinuousBatch(converted_model()), ("layer 0", "matrix", "decay")),
        (lambda: ContinuousBatch(flash_hybrid()), ("layer 0", "'flash_attention_2'", "sdpa")),
        (lambda: batch_of(slots=0), ("slots", "0", "at least 1")),
        (lambda: batch_of(generation_config=GenerationConfig(num_beams=2)), ("beams",)),
        (lambda: batch_of(generation_config=GenerationConfig(stop_strings=["a"])), ("stop_strings", "'a'")),
        (lambda: batch_of().add([]), ("prompt", "0 tokens")),
        (lambda: batch_of([1], max_length=9).add([2] * 5, 5), ("max_length, 9",)),
        (lambda: add_twice(batch_of()), ("request_id", "'a'")),
    ],
)
def test_bad_input(wrong, words):
    with refused(*words):
        wrong()
