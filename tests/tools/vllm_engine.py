"""Engines of vLLM in this process, for small models with random weights."""

import contextlib
import gc

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

import mhla_hf
from tools.small_models import SIZES, VOCAB, softmax_model

HEAD_DIM = 32  # the smallest that vLLM's attention has on a CPU
LOCAL = {"windowed": True, "salient": 20}


# A layer in four has a sliding window.
GEMMA3 = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
}


def save_converted(folder, family="llama", layers="all", sizes=None, **settings):
    """Convert a small model, save it, and return the folder as a string and the model as transformers loads it."""
    common = {"hidden_size": 64, "head_dim": HEAD_DIM, "max_position_embeddings": 2048, "num_hidden_layers": 4}
    sizes = {**common, **(sizes or {})}
    if family == "gemma3":
        torch.manual_seed(7)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **sizes, **GEMMA3})).eval()
    else:
        model = softmax_model(family, **sizes)
    settings = {"block_size": 16, "window": 2, **LOCAL, **settings}
    model = mhla_hf.convert(model, layers=layers, **settings)
    model.save_pretrained(folder)
    return str(folder), type(model).from_pretrained(folder, dtype=torch.float32).eval()


@contextlib.contextmanager
def engine(folder, **options):
    """An engine of vLLM in fp32, without tokenizer."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    options = {
        "dtype": "float32",
        "max_model_len": 1536,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_logprobs": VOCAB,
        **options,
    }
    llm = LLM(folder, **options)
    try:
        yield llm
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy(count, with_prompt=True):
    """Return parameters for `count` tokens by greedy decoding, with log-probabilities of them and of the prompt."""
    from vllm import SamplingParams

    options = {"prompt_logprobs": 0} if with_prompt else {}
    return SamplingParams(temperature=0, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False, **options)


def answer(llm, prompts, count, with_prompt=True):
    """Return the outputs for prompts with the parameters of `greedy`; `with_prompt` keeps vLLM from caching prefixes."""
    prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(prompts, greedy(count, with_prompt), use_tqdm=False)


@torch.no_grad()
def largest_error(model, outputs):
    """Return the largest difference of the log-probabilities in `outputs` from one forward pass of `model` per request."""
    errors = []
    for output in outputs:
        prompt, new = output.prompt_token_ids, list(output.outputs[0].token_ids)
        ids = torch.tensor([prompt + new])
        expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        parts = [*zip(output.prompt_logprobs[1:], prompt[1:], strict=True)] if output.prompt_logprobs else []
        parts += zip(output.outputs[0].logprobs, new, strict=True)
        found = torch.tensor([part[token].logprob for part, token in parts])
        errors.append((found - expected[-len(parts) :]).abs().max())
    return max(errors).item()
