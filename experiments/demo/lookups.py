"""Lookups: lines such as "- method string" between those of a text; a name comes back with the value it last had.

No statistics of language tell the value: a model says it only if it attends to where it stood. `add_lookups` puts them into
most of a training text, `make_recall` asks for them by distance, and `start_lookups` gives a new Llama the two heads a layer
that do this in trained models (induction heads, arXiv 2209.11895), which a small one does not find in the steps of a demo.
"""

import itertools
import random
import re

import torch

FREQUENT, WORDS, FEWEST = 400, 120, 8  # the last WORDS of a vocabulary's first: known, yet rare between the lookups
LIVE, NEW = 8, 0.25  # names that may come back, and how often a line states a new value
LEAST = 4_000_000  # characters of the text with lookups
PAGE, SHARE = 4000, 0.7  # characters that have lookups throughout or not at all, and how many of these pages do
LEAD = 8  # tokens at least before a question's value: the first ones of all are sinks, which are always near
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.85)  # of the window


def choose_words(tokenizer):
    """(names, values): words that are one token each with the space before them, and not the most frequent ones.

    ValueError: the tokenizer has too few of them.
    """
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [token[1:] for token, _ in tokens if re.fullmatch("[Ġ▁][a-z]{3,}", token)][:FREQUENT][-WORDS:]
    if len(words) < FEWEST:
        raise ValueError(
            f"tokenizer: has {len(words)} lower-case words of one token; expected at least {FEWEST} for lookups"
        )
    random.Random("words").shuffle(words)
    return words[len(words) // 4 :], words[: len(words) // 4]


class Lookups:
    """Lines, one after the other. besides: a name that none of them says."""

    def __init__(self, words, rng, besides=None):
        self.names, self.values = words
        self.rng, self.besides, self.live = rng, besides, {}

    def line(self):
        """The next one."""
        if not self.live or self.rng.random() < NEW:
            free = [name for name in self.names if name != self.besides and name not in self.live]
            name = self.rng.choice(free)
            self.live[name] = self.rng.choice(self.values)
            if len(self.live) > min(LIVE, len(self.names) // 2):
                del self.live[next(iter(self.live))]
        else:
            name = self.rng.choice(list(self.live))
        return f"- {name} {self.live[name]}\n"


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


def make_recall(text, count, words, *, window, items, seed):
    """Questions of the form: a line; a name with its value; text, and lookups of others; the name. Which word is next?

    text: str, which begins again where it is shorter than the window. count: from text to its number of tokens.

    Returns rows {"context", "word", "distance", "back"}; distance: tokens from the value to the end of the context; back:
    the round number that it was meant to be. Context and word fit in `window` tokens.
    """
    rng, rows = random.Random(f"recall {seed}"), []
    lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    reaches = [int(depth * window) for depth in DEPTHS]
    for turn in range(2 * items):
        reach, name, value = reaches[turn % len(reaches)], *map(rng.choice, words)
        lookups, between, size, start = Lookups(words, rng, besides=name), "\n", 0, rng.randrange(len(lines))
        others = [line for line in lines[start:] + lines[:start] if not re.search(rf"\b{name}\b", line)]
        for line in itertools.cycle(others) if others else ():
            added = line + lookups.line()
            between, size = between + added, size + count(added)
            if size >= reach and count(between) >= reach:
                break
        lead = next((line for line in others if count(line) >= LEAD), "")
        context, distance = f"{lead}- {name} {value}{between}- {name}", count(between) + 2
        if lead and distance >= reach and count(context) < window:
            rows.append({"context": context, "word": f" {value}", "distance": distance, "back": reach})
        if len(rows) == items:
            break
    return rows


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
