"""States in pages: requests that come, grow by chunks, and leave their pages get the outputs of whole sequences."""

import random

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mhla_hf.nn.salient import SalientCore
from mhla_hf.nn.settings import MHLASettings
from mhla_hf.ops.windowed.salient import salient_attention
from mhla_hf.vllm_plugin import pages
from mhla_hf.vllm_plugin.pages import PagedAttention, PageLayout, PagePool

HEADS, KV_HEADS, WIDTH, LONGEST = 4, 2, 8, 90
KINDS = {
    "salient": {"window": 2, "salient": 3},
    "smallest window": {"window": 1, "sinks": 0, "salient": 5},
    "window alone": {"window": 3, "sinks": 2, "salient": 0},
}


class Requests:
    """A pool of pages, filled with NaN, and sequences whose tokens arrive in batches, as an engine sends them."""

    def __init__(self, settings, heads_per_page, num_pages=3, num_sequences=5, dtype=torch.float64):
        settings = MHLASettings(windowed=True, block_size=4, layers=[0], **settings)
        widths = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "key_dim": WIDTH, "value_dim": WIDTH}
        count_pages = KV_HEADS // heads_per_page
        layout = PageLayout.of(settings, heads_per_page, WIDTH, dtype)
        num_bytes = sum(torch.Size(s).numel() * d.itemsize for s, d in zip(layout.shapes, layout.dtypes, strict=True))
        memory = torch.full((num_pages * count_pages, num_bytes // dtype.itemsize + 2), torch.nan, dtype=dtype)
        self.attention = PagedAttention(
            PagePool(memory.view(torch.int8), layout), SalientCore(settings, **widths).options
        )
        self.free = torch.randperm(num_pages * count_pages).view(-1, count_pages).tolist()
        self.q = torch.randn(num_sequences, LONGEST, HEADS, WIDTH).to(dtype)
        self.k, self.v = torch.randn(2, num_sequences, LONGEST, KV_HEADS, WIDTH).to(dtype)
        self.held = {}

    def inputs(self, rows, tokens):
        return self.q[rows, tokens], self.k[rows, tokens], self.v[rows, tokens]

    def expected(self, row):
        return salient_attention(*self.inputs([row], slice(None)), self.attention.options)[0]

    def prefill(self, row, count):
        held, outputs = self.held[row]
        start = len(outputs)
        tokens = self.inputs(row, slice(start, start + count))
        outputs.extend(self.attention.prefill(*tokens, torch.tensor([held]), start))

    def decode(self, rows):
        position = torch.tensor([len(self.held[row][1]) for row in rows])
        held = torch.tensor([self.held[row][0] for row in rows])
        o = self.attention.decode(*self.inputs(rows, position), held, self.attention.plan(position))
        for row, output in zip(rows, o, strict=True):
            self.held[row][1].append(output)


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
            held, outputs = requests.held.pop(row)
            requests.free.append(held)
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
def test_requests_in_reused_pages_are_as_alone(kind, heads_per_page, monkeypatch):
    monkeypatch.setattr(pages, "CHUNK_BYTES", 20_000)  # of three requests or fewer
    errors = play(Requests(KINDS[kind], heads_per_page), random.Random(1))
    assert len(errors) > 200 and errors.max() < 1e-9


@torch.inference_mode()  # as an engine runs
@pytest.mark.parametrize("heads_per_page", [1, 2])
def test_a_compiled_step_is_as_any_other_and_has_two_graphs(heads_per_page, monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(
        pages, "compiled_attend_pages", torch.compile(pages.attend_pages, dynamic=True, backend=counter)
    )
    requests = Requests(KINDS["salient"], heads_per_page)
    pool, options = requests.attention.pool, requests.attention.options
    pages.warm_up(pool.layout, options, HEADS // KV_HEADS, torch.device("cpu"))
    assert counter.frame_count == 2
    requests.attention.is_compiled = True
    assert play(requests, random.Random(1)).max() < 1e-9
    assert counter.frame_count == 2
