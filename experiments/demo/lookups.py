"""Text with lookups (`mhla_hf/evaluation/lookups.py`) to train on, and the heads that find them.

`add_lookups` puts them into most of a training text, and `start_lookups` gives a new Llama the two heads a layer that do
this in trained models (induction heads, arXiv 2209.11895), which a small one does not find in the steps of a demo.
"""

import random

import torch

from mhla_hf.evaluation.lookups import Lookups

LEAST = 4_000_000  # characters of the text with lookups
PAGE, SHARE = 4000, 0.7  # characters that have lookups throughout or not at all, and how many of these pages do


def add_lookups(text, words):
    """`text` with a lookup after each line that says something, on most of its pages.

    A short text comes several times, each time with lookups of its own: those that come again would be learned by heart.
    """
    return "".join(_add_lookups(text, words, seed) for seed in range(max(1, -(-LEAST // len(text)))))


def _add_lookups(text, words, seed):
    rng = random.Random(f"lookups {seed}")
    lookups, added, page, size = Lookups(words, rng), [], False, PAGE
    for line in text.splitlines(keepends=True):
        if size >= PAGE:
            page, size = rng.random() < SHARE, 0
        size += len(line)
        added.append(line + lookups.line() if page and line.strip() and line.endswith("\n") else line)
    return "".join(added)


@torch.no_grad()
def start_lookups(model, size=0.1, sharpness=7.0, match=4.0, copy=1.0):
    """Let half the heads of a new Llama's layer 0 bring the token before, and as many of layer 1 look for it.

    A head of layer 0 attends one token back, by constant queries and keys alone, and writes that token's random projection;
    a head of layer 1 seeks its own token's projection there, in the dimensions that RoPE hardly turns over a sequence, and
    writes the token that it finds. model: with `attention_bias`, tied embeddings and at least two layers.
    """
    config = model.config
    head_dim, width = config.head_dim, config.hidden_size
    half, ratio = head_dim // 2, (width / head_dim) ** 0.5
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    slow = (angle * config.max_position_embeddings < 0.8).repeat(2)[:, None]
    model.model.embed_tokens.weight.normal_(std=size)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for head in range(config.num_attention_heads // 2):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        token, place, found = (torch.nn.init.orthogonal_(torch.empty(head_dim, width)) for _ in range(3))
        first.q_proj.weight[rows] = first.k_proj.weight[rows] = 0
        first.q_proj.bias[rows] = sharpness * torch.cat([torch.ones(half), torch.zeros(half)])
        first.k_proj.bias[rows] = sharpness * torch.cat([angle.cos(), angle.sin()])
        first.v_proj.weight[rows], first.o_proj.weight[:, rows] = token, size * ratio * place.T
        second.q_proj.weight[rows] = match * slow * token
        second.k_proj.weight[rows] = match * slow * place / ratio
        second.v_proj.weight[rows], second.o_proj.weight[:, rows] = found, copy * found.T
