"""States in pages: requests that come, grow by chunks, and leave their pages get the outputs of whole sequences."""

import random
from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mhla_hf.models.language.rotation import HALVES, unrotate
from mhla_hf.nn.salient import SalientCore
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.nn.windowed import DecayMHLA
from mhla_hf.ops.triton.tuning import INTERPRETED
from mhla_hf.ops.windowed.attention import windowed_attention
from mhla_hf.ops.windowed.inputs import WindowedInputs
from mhla_hf.ops.windowed.salient import salient_attention
from mhla_hf.vllm_plugin.pages import (
    NewTokens,
    PagedAttention,
    PagedSalientAttention,
    PageLayout,
    PagePool,
    RotationTable,
)

HEADS, KV_HEADS, WIDTH, LONGEST = 4, 2, 8, 90
KINDS = {
    "defaults": {"feature_map": "exp", "rope": "near", "window": 3, "free_decay": True, "length_power": True},
    "several decays": {"feature_map": "hedgehog", "window": 2, "num_decays": 3, "sinks": 2},
    "salient": {"rope": "near", "window": 2, "salient": 3},
    "salient, smallest window": {"window": 1, "sinks": 0, "salient": 5},
    "smallest window": {"feature_map": "relu", "window": 1, "sinks": 0},
    "no softmax": {"windowed": False, "feature_map": "hedgehog", "num_decays": 2, "sinks": 0},
    "no normalizer": {"windowed": False, "normalize": False, "feature_map": "elu", "sinks": 0},
}


def make_core(**settings):
    values = {"mixing_form": "decay", "windowed": True, "block_size": 4, "layers": [0], "gate": False, **settings}
    values = {"output_norm": values.get("normalize") is False, "rope": "before", **values}
    widths = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "key_dim": WIDTH, "value_dim": WIDTH}
    if "salient" in settings:
        return SalientCore(MHLASettings(**values), **widths)
    core = DecayMHLA(MHLASettings(**values), **widths, hidden_size=16, norm_eps=1e-6).double().eval()
    with torch.no_grad():
        for parameter in core.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    if core.settings.rope == "near":
        core.unrotate = lambda x, cos_sin: unrotate(x, cos_sin, HALVES)
    return core


class Requests:
    """A pool of pages, filled with NaN, and sequences whose tokens arrive in batches, as an engine sends them."""

    def __init__(self, core, heads_per_page, num_pages=3, num_sequences=5, dtype=torch.float64):
        self.core, self.is_windowed = core, core.settings.windowed
        count_pages = KV_HEADS // heads_per_page
        layout = PageLayout.of(core.settings, heads_per_page, WIDTH, dtype)
        num_bytes = sum(torch.Size(s).numel() * d.itemsize for s, d in zip(layout.shapes, layout.dtypes, strict=True))
        memory = torch.full((num_pages * count_pages, num_bytes // dtype.itemsize + 2), torch.nan, dtype=dtype)
        self.is_salient = core.settings.core == "salient"
        has_table = core.settings.rope == "near" and not self.is_salient
        self.table = RotationTable(LONGEST)
        pool = PagePool(memory.view(torch.int8), layout)
        if self.is_salient:
            self.attention = PagedSalientAttention(pool, core.options)
        else:
            decays, balance = core.mixing()
            map_keys = core.map_keys if self.is_windowed else lambda k, cos_sin: k
            self.attention = PagedAttention(pool, self.table, map_keys, decays.to(dtype), balance, core.options)
        self.free = torch.randperm(num_pages * count_pages).view(-1, count_pages).tolist()
        angle = torch.arange(LONGEST).to(dtype)[:, None] / torch.tensor([1.0, 3.0, 9.0, 27.0])
        width = 2 * WIDTH // 2 if has_table else 0
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1)[:, None, :width]
        self.q = torch.randn(num_sequences, LONGEST, HEADS, WIDTH).to(dtype)
        self.k, self.v = torch.randn(2, num_sequences, LONGEST, KV_HEADS, WIDTH).to(dtype)
        self.held = {}

    def inputs(self, row, tokens):
        q, k, v, cos_sin = self.q[row, tokens], self.k[row, tokens], self.v[row, tokens], self.cos_sin[tokens]
        if self.is_salient:
            return NewTokens(q, k, v, q[..., :0], cos_sin)
        features = self.core.q_map(self.core.unrotate(q[None], cos_sin[None]))[0]
        if not self.is_windowed:
            q, k = features, self.core.map_keys(k[None], cos_sin[None])[0]
        return NewTokens(q, k, v, features, cos_sin)

    def expected(self, row):
        q, k, v, features, cos_sin = (x[None] for x in self.inputs(row, slice(None)))
        attention = self.attention
        if self.is_salient:
            return salient_attention(q, k, v, attention.options)[0]
        k_features = self.core.map_keys(k, cos_sin) if self.is_windowed else k
        inputs = WindowedInputs(q, k, v, features, attention.decays, attention.balance, attention.options)
        return windowed_attention(inputs, k_features)[0]

    def prefill(self, row, count):
        start = len(self.held[row][1])
        tokens = self.inputs(row, slice(start, start + count))
        self.table.allocate(tokens.cos_sin)
        self.table.write(torch.arange(start, start + count), tokens.cos_sin)
        pages = torch.tensor([self.held[row][0]])
        self.held[row][1].extend(self.attention.prefill(tokens, pages, start))

    def decode(self, rows):
        position = torch.tensor([len(self.held[row][1]) for row in rows])
        parts = zip(
            *(self.inputs(row, slice(p, p + 1)) for row, p in zip(rows, position.tolist(), strict=True)), strict=True
        )
        tokens = NewTokens(*(torch.cat(part) for part in parts))
        self.table.allocate(tokens.cos_sin)
        self.table.write(position, tokens.cos_sin)
        pages = torch.tensor([self.held[row][0] for row in rows])
        batch = self.attention.plan(position, tokens)
        for row, o in zip(rows, self.attention.decode(tokens, pages, batch), strict=True):
            self.held[row][1].append(o)


def play(requests, source):
    """Play 150 random events, and return the largest error of each sequence's outputs."""
    errors = []
    for _ in range(150):
        row = source.randrange(len(requests.q))
        if row not in requests.held:
            if requests.free:
                requests.held[row] = (requests.free.pop(), [])
                if source.random() < 0.7:
                    requests.prefill(row, source.choice([1, 2, 3, 4, 5, 8, 13, 30]))
        elif source.random() < 0.2:
            pages, outputs = requests.held.pop(row)
            requests.free.append(pages)
            errors.extend((o - e).abs().max() for o, e in zip(outputs, requests.expected(row), strict=False))
        elif source.random() < 0.2 and len(requests.held[row][1]) < LONGEST - 20:
            requests.prefill(row, source.choice([1, 2, 4, 7, 19]))
        rows = [row for row, (_, outputs) in requests.held.items() if len(outputs) < LONGEST]
        if rows:
            requests.decode(source.sample(rows, source.randint(1, len(rows))))
    return torch.stack(errors)


@torch.no_grad()
@pytest.mark.parametrize("heads_per_page", [1, 2])
@pytest.mark.parametrize("kind", list(KINDS))
def test_requests_in_reused_pages_are_as_alone(kind, heads_per_page):
    errors = play(Requests(make_core(**KINDS[kind]), heads_per_page), random.Random(1))
    assert len(errors) > 200 and errors.max() < 1e-9


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or the interpreter")
@torch.no_grad()
@pytest.mark.parametrize("kind, heads_per_page", [("defaults", 1), ("several decays", 2), ("no normalizer", 1)])
def test_kernels_change_pages_as_pytorch_does(kind, heads_per_page):
    core = make_core(**KINDS[kind]).float()
    results = []
    for impl in ("torch", "triton"):
        torch.manual_seed(0)
        requests = Requests(core, heads_per_page, dtype=torch.float32)
        requests.attention = replace(requests.attention, options=replace(core.options, impl=impl))
        requests.held = {row: (requests.free.pop(), []) for row in range(3)}
        requests.prefill(1, 14)
        requests.prefill(2, 3)
        for _ in range(5):
            requests.decode([0, 1, 2])
        pages = torch.tensor([pages for pages, _ in requests.held.values()])
        outputs = [o for _, outputs in requests.held.values() for o in outputs]
        results.append([*outputs, *requests.attention.pool.take(pages, "running")])
    for expected, result in zip(*results, strict=True):
        assert (result - expected).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["defaults", "salient"])
def test_planned_step_reads_nothing_on_the_host(kind):
    requests = Requests(make_core(**KINDS[kind]), 1)
    requests.held = {0: (requests.free.pop(), []), 1: (requests.free.pop(), [])}
    requests.decode([0, 1])
    attention, tokens = requests.attention, requests.inputs(0, slice(0, 2))
    batch = attention.plan(torch.tensor([1, 1]), tokens)

    with FakeTensorMode(allow_non_fake_inputs=True):  # raises where a value of a tensor is read
        attention.decode(tokens, torch.zeros(2, KV_HEADS, dtype=torch.long), batch)
