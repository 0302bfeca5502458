"""A tokenizer, held-out text, and models of 30,000 parameters, for the tests of scores and of the command line."""

import dataclasses
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf
from experiments.demo.text import make_tokenizer
from mhla_hf.evaluation.image_scores import Extractor
from mhla_hf.evaluation.records import Result

WINDOW = 192
HELD_OUT = "\n\n".join(topics[name] for name in ("assert", "calls", "class", "execmodel", "naming", "try"))
TRAINING = "\n\n".join(topics[name] for name in ("compound", "function", "if", "while"))


def small_tokenizer():
    return make_tokenizer(TRAINING, 400, WINDOW)


def small_llama(seed=0, **changes):
    """Return a softmax model with random weights, large enough that its scores differ."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "max_position_embeddings": WINDOW, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        "initializer_range": 0.15, **changes,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**values)).eval()


def save_llama(folder, seed=0, dtype=torch.float32, **changes):
    small_llama(seed, **changes).to(dtype).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def save_mhla(folder, seed=0, **changes):
    model = mhla_hf.convert(small_llama(seed, **changes), layers="2/3", block_size=32, num_blocks=4, window=2)
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def colors(images):
    """Return the mean color of each quarter of an image, as all the outputs that image scores use."""
    pooled = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
    return {"features": pooled, "logits": 9 * pooled, "spatial": pooled[:, :3]}


def color_judge():
    """Return `colors` as an extractor that takes the place of Inception."""
    return Extractor("color judge", colors, "1")


def make_result(**changes):
    values = {
        "task": "copa", "metric": "acc", "value": 0.5, "stderr": 0.05, "higher_is_better": True, "shots": 0,
        "samples": 100, "limit": None, "task_version": "1.0", "task_hash": "aa", "model": "out/mhla", "revision": None,
        "fingerprint": "files:1", "versions": {"torch": "2.13.0"}, "commit": "abc", "dtype": "float32",
        "hardware": "a CPU, 2 cores, 1 thread", "seed": 0, "command": "mhla-hf evaluate out/mhla --tasks copa",
        "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return dataclasses.replace(Result(**values), **changes)
