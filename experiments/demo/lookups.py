"""Text with lookups (`mhla_hf/evaluation/recall.py`) to train on, and attention heads that answer them.

`add_lookups` adds lookups to most of a training text. `start_lookups` gives a new Llama two heads per layer that answer
them in trained models (induction heads, arXiv 2209.11895), because a small model does not learn such heads in the steps of
a demo.
"""

import random
from collections.abc import Sequence
from typing import Any

import torch

LEAST = 4_000_000  # characters of the text with lookups
PAGE, SHARE = 4000, 0.7  # characters of a page, which has lookups throughout or none; share of the pages that have some
MAX_LIVE_NAMES = 8  # names that may be repeated
NEW_NAME_PROBABILITY = 0.25  # probability that a line introduces a name instead of repeating one
EMBEDDING_SIZE = 0.1  # standard deviation
SHARPNESS, MATCH = 7.0, 4.0  # sizes of the constant queries and keys of layer 0, and of those of layer 1


def add_lookups(text: str, words: tuple[Sequence[str], Sequence[str]]) -> str:
    """Add a lookup, such as "- method string", after each line that is not empty, on most pages of a text. A line introduces
    a name or repeats one of the last few, which keeps its value. A text with fewer than `LEAST` characters is repeated with
    other lookups each time: a model would memorize lookups that come again."""
    names, values = words
    lines = []
    for seed in range(max(1, -(-LEAST // len(text)))):
        rng = random.Random(f"lookups {seed}")
        live: dict[str, str] = {}  # name -> value, the oldest first
        has_lookups = False
        page_size = PAGE  # characters of the current page so far
        for line in text.splitlines(keepends=True):
            if page_size >= PAGE:
                has_lookups = rng.random() < SHARE
                page_size = 0
            page_size += len(line)
            lines.append(line)
            if not (has_lookups and line.strip() and line.endswith("\n")):
                continue
            if not live or rng.random() < NEW_NAME_PROBABILITY:
                name = rng.choice([name for name in names if name not in live])
                live[name] = rng.choice(values)
                if len(live) > min(MAX_LIVE_NAMES, len(names) // 2):
                    del live[next(iter(live))]
            else:
                name = rng.choice(list(live))
            lines.append(f"- {name} {live[name]}\n")
    return "".join(lines)


@torch.no_grad()
def start_lookups(model: Any) -> None:
    """Initialize half of the heads in layers 0 and 1 of a new Llama with `attention_bias` so that they answer lookups. A
    head of layer 0 attends to the previous token, by constant queries and keys, and writes a random projection of that
    token. A head of layer 1 searches what was written for the projection of its own token, in the dimensions that RoPE
    hardly rotates over a sequence, and copies the token that it finds."""
    config = model.config
    head_dim, width = config.head_dim, config.hidden_size
    half, ratio = head_dim // 2, (width / head_dim) ** 0.5
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    is_slow = (angle * config.max_position_embeddings < 0.8).repeat(2)[:, None]  # [head_dim, 1]
    model.model.embed_tokens.weight.normal_(std=EMBEDDING_SIZE)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for head in range(config.num_attention_heads // 2):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        token_projection, previous_projection, copy_projection = (
            torch.nn.init.orthogonal_(torch.empty(head_dim, width)) for _ in range(3)
        )
        first.q_proj.weight[rows] = 0
        first.k_proj.weight[rows] = 0
        first.q_proj.bias[rows] = SHARPNESS * torch.cat([torch.ones(half), torch.zeros(half)])
        first.k_proj.bias[rows] = SHARPNESS * torch.cat([angle.cos(), angle.sin()])
        first.v_proj.weight[rows] = token_projection
        first.o_proj.weight[:, rows] = EMBEDDING_SIZE * ratio * previous_projection.T
        second.q_proj.weight[rows] = MATCH * is_slow * token_projection
        second.k_proj.weight[rows] = MATCH * is_slow * previous_projection / ratio
        second.v_proj.weight[rows] = copy_projection
        second.o_proj.weight[:, rows] = copy_projection.T
