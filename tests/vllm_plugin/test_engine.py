"""The plugin inside vLLM, on the CPU: log-probabilities, tokens, requests that come and go, and what is refused."""

import random

import pytest
import torch
from small_models import VOCAB, refused, softmax_model
from vllm_engine import answer, engine, largest_error, save_converted, scheduler_of

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")
pytestmark = pytest.mark.slow

LENGTHS = (1, 63, 64, 65, 127, 128, 511, 513, 1300)
HEADS = {"softmax_heads": {0: [1], 2: [0]}}
MODELS = {
    "llama": ("llama", "all", {}),
    "llama-layers": ("llama", [0, 2], {}),
    "llama-heads": ("llama", [0, 2, 3], HEADS),
    "llama-linear": ("llama", [0, 2], {"local": None, "num_decays": 3, "feature_map": "hedgehog", "rope": "before"}),
    "llama-gate": ("llama", [1, 2], {"gate": True, "output_norm": True}),
    "llama-unnormalized": ("llama", "all", {"local": None, "rope": "before", "output_norm": True, "normalize": False}),
    "qwen3": ("qwen3", [0, 2], {}),
    "qwen3-heads": ("qwen3", "all", HEADS),
    "smollm3": ("smollm3", [0, 1, 2], HEADS),
    "gemma3": ("gemma3", [0, 2], {}),
    "gemma3-heads": ("gemma3", [0, 2, 3], HEADS),
    "mixtral": ("mixtral", [0, 2], {}),
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
