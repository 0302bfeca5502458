"""The plugin inside vLLM, on the CPU: log-probabilities, tokens, requests that come and go, and what is refused."""

import random

import pytest
import torch
from tools.small_models import VOCAB
from tools.vllm_engine import answer, engine, greedy, largest_error, save_converted

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
pytestmark = pytest.mark.slow

LENGTHS = (1, 63, 64, 65, 127, 128, 511, 513, 1300)
HEADS = {"softmax_heads": {0: [1], 2: [0]}}
MODELS = {
    "llama": ("llama", "all", {}),
    "llama-heads": ("llama", [0, 2, 3], HEADS),
    "llama-window": ("llama", [0, 2, 3], {**HEADS, "salient": 0}),
    "qwen3-heads": ("qwen3", "all", HEADS),
    "smollm3": ("smollm3", [0, 1, 2], HEADS),
    "gemma3-heads": ("gemma3", [0, 2, 3], HEADS),
    "mixtral-heads": ("mixtral", [0, 2], HEADS),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # For torch.compile, vLLM changes the classes of transformers, which the reference uses in this process, too.
    backend = pytest.importorskip("vllm.model_executor.models.transformers.base")
    monkeypatch.setattr(backend.Base, "_decorate_for_torch_compile", lambda self: None)


def make_prompts(lengths, seed=0):
    source = random.Random(seed)
    return [[source.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", list(MODELS))
def test_tokens_and_log_probabilities_are_those_of_transformers(name, tmp_path):
    family, layers, settings = MODELS[name]
    folder, model = save_converted(tmp_path / "model", family, layers, **settings)
    prompts = make_prompts([1, 2, 15, 16, 17, 33, 70, 130])
    with engine(folder, max_num_batched_tokens=64, max_num_seqs=4) as llm:
        outputs = answer(llm, prompts, 40)
    assert largest_error(model, outputs) < 1e-4
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40)[0]
        assert list(output.outputs[0].token_ids) == expected[len(prompt) :].tolist()


@pytest.fixture(scope="module")
def by_heads(tmp_path_factory):
    """A converted model with blocks of 64 tokens, in which some KV heads keep softmax."""
    return save_converted(tmp_path_factory.mktemp("served") / "model", block_size=64, **HEADS)


@pytest.mark.parametrize("budget", [64, 256, 2048])
@pytest.mark.parametrize("at_once", [1, 16])
def test_any_length_in_any_chunks(by_heads, budget, at_once):
    folder, model = by_heads
    with engine(folder, max_num_batched_tokens=budget, max_num_seqs=at_once) as llm:
        outputs = answer(llm, make_prompts(LENGTHS), 24)
    assert largest_error(model, outputs) < 1e-4


def come_and_go(llm, prompts, source, with_prompt):
    """Send requests at random moments and abort some of them; return the finished ones and the number of preemptions."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    waiting, running, finished, preempted = [*enumerate(prompts)], [], [], set()
    while waiting or llm.llm_engine.has_unfinished_requests():
        if waiting and source.random() < 0.5:
            index, prompt = waiting.pop()
            parameters = greedy(source.randint(1, 120), with_prompt)
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, parameters)
            running.append(str(index))
        if running and source.random() < 0.03:
            llm.llm_engine.abort_request([running.pop(source.randrange(len(running)))])
        for output in llm.llm_engine.step():
            if output.finished and output.request_id in running:
                finished.append(output)
                running.remove(output.request_id)
        preempted |= {name for name, request in scheduler.requests.items() if request.num_preemptions}
    return finished, len(preempted)


def test_two_hundred_requests_with_few_pages(tmp_path):
    folder, model = save_converted(tmp_path / "model", **HEADS)
    source = random.Random(1)  # with 0, two tokens of one request differ by one vote, within rounding
    prompts = make_prompts([source.randint(1, 200) for _ in range(200)])
    with engine(folder, max_num_batched_tokens=64, max_num_seqs=16, num_gpu_blocks_override=40) as llm:
        finished, num_preempted = come_and_go(llm, prompts, source, with_prompt=True)
    assert len(finished) > 150 and num_preempted > 5
    assert largest_error(model, finished) < 1e-4


@pytest.mark.parametrize("block_size, num_blocks", [(32, 160), (64, 110), (128, 110)])
def test_two_hundred_requests_with_common_prefixes(tmp_path, block_size, num_blocks):
    folder, model = save_converted(tmp_path / "model", **HEADS)
    source = random.Random(1)
    (text,) = make_prompts([1500])
    prompts = [text[: source.randint(64, 1500)] + end for end in make_prompts([*range(1, 201)], 1)]
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 2048}
    options = {"enable_prefix_caching": True, "block_size": block_size, "num_gpu_blocks_override": num_blocks}
    with engine(folder, **limits, **options) as llm:
        finished, num_preempted = come_and_go(llm, prompts, source, with_prompt=False)
    assert len(finished) > 150 and num_preempted > 5
    assert sum(output.num_cached_tokens > 0 for output in finished) > 60
    assert largest_error(model, finished) < 1e-4


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_the_same_prompts_twice(by_heads, caches_prefixes, monkeypatch):
    # Only the process of an engine reads the configuration anew.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    folder, model = by_heads
    with engine(folder, max_num_batched_tokens=1024, enable_prefix_caching=caches_prefixes) as llm:
        for _ in range(2):
            outputs = answer(llm, make_prompts([700, 900, 1100]), 8, with_prompt=False)
            assert largest_error(model, outputs) < 1e-4
    assert all((output.num_cached_tokens > 600) == caches_prefixes for output in outputs)


# Per number of processes: KV heads that keep softmax, so that each process has both kinds, and some layers one kind alone.
KEPT = {2: {0: [1], 1: [0, 1], 2: [2], 3: [0, 1, 3]}, 3: {0: [1], 1: [0, 1, 2], 2: [4], 3: [0, 1, 3, 5]}}
APART = {layer: [0, 1] for layer in range(4)}  # the first process has nothing but softmax heads


@pytest.mark.parametrize("caches_prefixes", [False, True])
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "smollm3", "gemma3", "mixtral", "llama-layers", "llama-apart"])
def test_tensor_parallel_processes(tmp_path, name, num_processes, caches_prefixes):
    family, _, form = name.partition("-")
    if form == "apart" and caches_prefixes:
        pytest.skip("refused: see test_register.py")
    kept = {"layers": None, "apart": APART}.get(form, KEPT[num_processes])
    layers = [0, 2] if form == "layers" else "all"
    if family == "gemma3":  # layer 1 has a sliding window of its own
        kept, layers = {layer: heads for layer, heads in kept.items() if layer != 1}, [0, 2, 3]
    sizes = {"vocab_size": 64 * num_processes, "num_key_value_heads": 2 * num_processes}
    sizes |= dict.fromkeys(["hidden_size", "intermediate_size"], 32 * num_processes)
    sizes |= {"num_attention_heads": 4 * num_processes}
    folder, model = save_converted(tmp_path / "model", family, layers, sizes, softmax_heads=kept)
    options = {"tensor_parallel_size": num_processes, "enable_prefix_caching": caches_prefixes}
    with engine(folder, max_num_batched_tokens=64, **options) as llm:
        for _ in range(2):
            outputs = answer(llm, make_prompts([1, 17, 330]), 24, with_prompt=False)
            assert largest_error(model, outputs) < 1e-4
    assert (outputs[-1].num_cached_tokens > 0) == caches_prefixes
