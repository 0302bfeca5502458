"""Multi-query associative recall (arXiv 2312.04927), learned from scratch: python -m experiments.mqar

A sequence states `pairs` pairs of a key and a value, then asks for every key once, at random places among filler. Every row
of the table is the same small model (a short convolution, attention and a projection per layer, one head of 64) but for its
attention. Counted are the questions whose answer lies beyond the window of two blocks. A model learns one task after the
other, the easy one first, since few learn the hard one at once. Rows that the file has are not made again.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf.cli import script
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.local import DecayMHLA
from mhla_hf.nn.settings import MHLASettings

from .rows import add_rows, made, number, whole_seeds

WIDTH, BLOCK, KERNEL = 64, 32, 4
KEYS, VALUES, FILLERS = 256, 256, 256
TASKS = {"16 pairs, 256 tokens": (16, 256), "64 pairs, 512 tokens": (64, 512)}
STEPS, TOKENS, LR, SOLVED = (600, 200), 8192, 4e-3, 0.99  # STEPS: of each task; TOKENS: of a batch
SMALL = 0.1  # deviation of the embedding: what attention adds to it is then seen from the first steps on
DENSE = {"block_size": BLOCK}
DECAY = {"block_size": BLOCK, "mixing_form": "decay"}
LOCAL = {**DECAY, "local": "softmax"}
LINEAR = {**DENSE, "mixing_start": "uniform", "learn_mixing": False}
DEFAULT = "local softmax + 2 decays"
FORMS = {  # the attention of each layer: "softmax", "delta", or settings
    "softmax": ["softmax"] * 2,
    "plain linear": [LINEAR] * 2,
    "delta rule": ["delta"] * 2,
    "MHLA, the paper's matrix": [DENSE] * 2,
    "MHLA by 2 decays": [DECAY] * 2,
    "window alone": ["window"] * 2,
    "local softmax + plain linear": [{**LOCAL, "num_decays": 1}] * 2,
    DEFAULT: [LOCAL] * 2,
    "the same, softmax in one layer of two": ["softmax", LOCAL],
    "the same, softmax in one layer of four": ["softmax", LOCAL, LOCAL, LOCAL],
}


def make_batch(pairs, length, count, random):
    """ids `[count, length]`, places `[count, pairs]` of the questions, and their answers and distances, shaped as these."""
    keys = torch.rand(count, KEYS, generator=random).argsort(1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (count, pairs), generator=random)
    ids = KEYS + VALUES + torch.randint(FILLERS, (count, length), generator=random)
    ids[:, : 2 * pairs] = torch.stack([keys, values], 2).flatten(1)
    places = 2 * pairs + torch.rand(count, length - 2 * pairs, generator=random).argsort(1)[:, :pairs]
    ids.scatter_(1, places, keys)
    return ids, places, values, places - 2 * torch.arange(pairs)


def delta_rule(q, k, v, beta):
    """o `[B, T, V]` of the delta rule S += beta k (v - S^T k)^T, block by block (arXiv 2406.06484); beta `[B, T, 1]`."""
    q, k, kb, vb = (x.unflatten(1, (-1, BLOCK)) for x in (q, k, beta * k, beta * v))
    eye = torch.eye(BLOCK, dtype=q.dtype)
    solve = torch.linalg.solve_triangular
    lower = eye + (kb @ k.mT).tril(-1)
    w, u = solve(lower, kb, upper=False), solve(lower, vb, upper=False)
    state, outputs = q.new_zeros(len(q), q.shape[-1], v.shape[-1]), []
    own = (q @ k.mT).tril()
    for block in range(q.shape[1]):
        new = u[:, block] - w[:, block] @ state
        outputs.append(q[:, block] @ state + own[:, block] @ new)
        state = state + k[:, block].mT @ new
    return torch.cat(outputs, 1)


class Layer(nn.Module):
    """A short causal convolution, attention of the named kind, a projection; around it a residual."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL - 1, groups=WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        if kind == "delta":
            self.beta = nn.Linear(WIDTH, 1)
        elif kind != "softmax":
            settings = MHLASettings(**(LOCAL if kind == "window" else kind))
            core = DecayMHLA if settings.mixing_form == "decay" else MHLA
            self.core = core(settings, num_heads=1, num_kv_heads=1, key_dim=WIDTH, value_dim=WIDTH, hidden_size=WIDTH)
            if kind == "window":
                self.core.mixing.balance.data.fill_(-1e4)  # nothing far

    def forward(self, hidden):
        mixed = self.norm(hidden)
        mixed = mixed + F.silu(self.conv(mixed.mT)[..., : hidden.shape[1]].mT)
        q, k, v = self.project(mixed).chunk(3, -1)
        if self.kind == "softmax":
            o = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        elif self.kind == "delta":
            q, k = (F.normalize(F.silu(x), dim=-1) for x in (q, k))
            o = delta_rule(q, k, v, self.beta(mixed).sigmoid())
        else:
            o = self.core(*(x[:, :, None] for x in (q, k, v)))[:, :, 0]
        return hidden + self.out(o)


class Model(nn.Module):
    """Embedding, layers, and logits at the given places."""

    def __init__(self, kinds):
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES + FILLERS, WIDTH)
        nn.init.normal_(self.embed.weight, std=SMALL)
        self.layers = nn.Sequential(*map(Layer, kinds))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, KEYS + VALUES + FILLERS, bias=False)

    def forward(self, ids, places):
        hidden = self.norm(self.layers(self.embed(ids)))
        return self.head(hidden.gather(1, places[..., None].expand(-1, -1, WIDTH)))


def make_row(job):
    """Train one model through the tasks and count what it recalls after each."""
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    model = Model(FORMS[job["form"]])
    return {
        **job,
        "tasks": {task: learn(model, task, steps, job["seed"]) for task, steps in zip(TASKS, STEPS, strict=True)},
    }


def learn(model, task, steps, seed):
    """Train the model on one task, until it is solved; returns what it recalls and the steps it took."""
    pairs, length = TASKS[task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    random, unseen = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10_000 + seed)
    batch = TOKENS // length
    tests = [make_batch(pairs, length, batch, unseen) for _ in range(8)]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(step / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        ids, places, answers, _ = make_batch(pairs, length, batch, random)
        loss = F.cross_entropy(model(ids, places).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps:
            near, far = score(model, tests)
            if far >= SOLVED:
                break
    return {"near": near, "far": far, "steps": step, "solved": far >= SOLVED}


@torch.no_grad()
def score(model, tests):
    """The shares of questions answered right whose answer lies within two blocks, and beyond."""
    right = [(model(ids, places).argmax(-1) == answers, gap > 2 * BLOCK) for ids, places, answers, gap in tests]
    right, far = (torch.cat(parts) for parts in zip(*right, strict=True))
    return right[~far].double().mean().item(), right[far].double().mean().item()


def describe(row):
    """One line of the log."""
    found = [f"{task}: {one['far']:.3f} after {one['steps']} steps" for task, one in row["tasks"].items()]
    return f"seed {row['seed']}, {row['form']}: {'; '.join(found)}"


def render_mqar(record):
    """The table: the share recalled beyond the window, mean and standard error over the seeds, and the steps it took."""
    kept, over = whole_seeds(record["rows"], len(FORMS))
    lines = [f"| attention | {' | '.join(TASKS)} |", "|---" + "|---:" * len(TASKS) + "|"]
    for form in FORMS:
        cells = []
        for task in TASKS:
            found = [row["tasks"][task] for row in kept if row["form"] == form]
            steps = f" ({number([one['steps'] for one in found], '{:.0f}')} steps)"
            cells.append(number([one["far"] for one in found], "{:.2f}") + steps * all(one["solved"] for one in found))
        lines.append(f"| {form} | {' | '.join(cells)} |")
    note = (
        f"{over.capitalize()}. At most {' and '.join(map(str, STEPS))} steps, fewer where {SOLVED:.0%} were recalled."
    )
    return "\n".join([*lines, "", f"{note} {made(record)}"])


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.mqar", description=__doc__)
    parser.add_argument("--out", default="docs/evidence/mqar.json", help="JSON file to make or to go on in")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    given = parser.parse_args()
    jobs = [{"form": form, "seed": seed} for seed in range(given.seeds) for form in FORMS]
    command = f"python -m experiments.mqar --seeds {given.seeds}"
    print(render_mqar(add_rows(given.out, make_row, jobs, describe, workers=given.workers, command=command)))


if __name__ == "__main__":
    script(main, "mqar")
