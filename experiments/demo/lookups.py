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


class Lookups:
    """Generates lookup lines such as "- method string"; a name that comes again keeps its value.

    Args:
        words: Names and values, as `choose_words` returns them.
        rng: Random number generator.
    """

    def __init__(self, words: tuple[Sequence[str], Sequence[str]], rng: random.Random) -> None:
        self.names, self.values = words
        self.rng = rng
        self.live: dict[str, str] = {}  # name -> value, the oldest first

    def line(self) -> str:
        """Return the next line, with its newline. It introduces a new name or repeats one of the last few."""
        if not self.live or self.rng.random() < NEW_NAME_PROBABILITY:
            name = self.rng.choice([name for name in self.names if name not in self.live])
            self.live[name] = self.rng.choice(self.values)
            if len(self.live) > min(MAX_LIVE_NAMES, len(self.names) // 2):
                del self.live[next(iter(self.live))]
        else:
            name = self.rng.choice(list(self.live))
        return f"- {name} {self.live[name]}\n"


def add_lookups(text: str, words: tuple[Sequence[str], Sequence[str]]) -> str:
    """Add a lookup after each line that is not empty, on most pages of a text.

    A text with fewer than `LEAST` characters is repeated, with different lookups each time: a model would memorize
    lookups that come again.

    Args:
        text: Training text.
        words: Names and values, as `choose_words` returns them.
    """
    num_copies = max(1, -(-LEAST // len(text)))
    return "".join(_add_lookups(text, words, seed) for seed in range(num_copies))


def _add_lookups(text: str, words: tuple[Sequence[str], Sequence[str]], seed: int) -> str:
    """Add lookups to a text once."""
    rng = random.Random(f"lookups {seed}")
    lookups = Lookups(words, rng)
    lines = []
    has_lookups = False
    page_size = PAGE  # characters of the current page so far
    for line in text.splitlines(keepends=True):
        if page_size >= PAGE:
            has_lookups = rng.random() < SHARE
            page_size = 0
        page_size += len(line)
        lines.append(line + lookups.line() if has_lookups and line.strip() and line.endswith("\n") else line)
    return "".join(lines)


@torch.no_grad()
def start_lookups(model: Any, size: float = 0.1, sharpness: float = 7.0, match: float = 4.0, copy: float = 1.0) -> None:
    """Initialize half of the heads in layers 0 and 1 of a new Llama so that they answer lookups.

    A head of layer 0 attends to the previous token, by constant queries and keys, and writes a random projection of that
    token. A head of layer 1 searches what was written for the projection of its own token, in the dimensions that RoPE
    hardly rotates over a sequence, and copies the token that it finds.

    Args:
        model: A Llama with `attention_bias`, tied embeddings, and at least two layers, changed in place.
        size: Standard deviation of the embeddings.
        sharpness: Size of the constant queries and keys of layer 0.
        match: Size of the queries and keys of layer 1.
        copy: Size of what layer 1 writes.
    """
    config = model.config
    head_dim, width = config.head_dim, config.hidden_size
    half, ratio = head_dim // 2, (width / head_dim) ** 0.5
    angle = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    is_slow = (angle * config.max_position_embeddings < 0.8).repeat(2)[:, None]  # [head_dim, 1]
    model.model.embed_tokens.weight.normal_(std=size)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for head in range(config.num_attention_heads // 2):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        token_projection, previous_projection, copy_projection = (
            torch.nn.init.orthogonal_(torch.empty(head_dim, width)) for _ in range(3)
        )
        first.q_proj.weight[rows] = 0
        first.k_proj.weight[rows] = 0
        first.q_proj.bias[rows] = sharpness * torch.cat([torch.ones(half), torch.zeros(half)])
        first.k_proj.bias[rows] = sharpness * torch.cat([angle.cos(), angle.sin()])
        first.v_proj.weight[rows] = token_projection
        first.o_proj.weight[:, rows] = size * ratio * previous_projection.T
        second.q_proj.weight[rows] = match * is_slow * token_projection
        second.k_proj.weight[rows] = match * is_slow * previous_projection / ratio
        second.v_proj.weight[rows] = copy_projection
        second.o_proj.weight[:, rows] = copy * copy_projection.T
