"""Multi-query associative recall (arXiv 2312.04927), learned from scratch: python -m experiments.mqar

A sequence states pairs of a key and a value, and then asks for the value of every key once, at random positions among
filler tokens. All rows of the table are the same small model (per layer a short convolution, attention with one head
of 64, and a projection) with different attention. Only questions whose answer lies beyond the window of two blocks are
counted. A model learns one task after the other, the easy one first, because few models learn the hard one from the
start. Existing rows of the file are kept.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf.cli.main import script
from mhla_hf.nn.core import MHLA
from mhla_hf.nn.local import DecayMHLA
from mhla_hf.nn.settings import MHLASettings

from .rows import Row, add_rows, complete_seeds, describe_setup, format_mean

WIDTH, BLOCK, KERNEL = 64, 32, 4
KEYS, VALUES, FILLERS = 256, 256, 256
TASKS = {"16 pairs, 256 tokens": (16, 256), "64 pairs, 512 tokens": (64, 512)}
STEPS = (600, 200)  # at most, per task
TOKENS = 8192  # per batch
LR = 4e-3
SOLVED = 0.99  # share of right answers at which training stops
EMBEDDING_STD = 0.1  # small, so that what attention adds to an embedding matters from the first steps on
DENSE: dict[str, Any] = {"block_size": BLOCK}
DECAY: dict[str, Any] = {"block_size": BLOCK, "mixing_form": "decay"}
LOCAL = {**DECAY, "local": "softmax"}
LINEAR = {**DENSE, "mixing_start": "uniform", "learn_mixing": False}
DEFAULT = "local softmax + 2 decays"
Kind = str | dict[str, Any]  # of attention: "softmax", "delta" (the delta rule), "window", or settings of MHLA
FORMS: dict[str, list[Kind]] = {  # the attention of each layer
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


def make_batch(
    num_pairs: int, length: int, batch_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make random sequences of the task.

    Returns:
        Token ids `[batch_size, length]`, and `[batch_size, num_pairs]` each: the positions of the questions, their
        answers (the token ids of values), and how many tokens back the key was stated.
    """
    keys = torch.rand(batch_size, KEYS, generator=generator).argsort(1)[:, :num_pairs]
    values = KEYS + torch.randint(VALUES, (batch_size, num_pairs), generator=generator)
    ids = KEYS + VALUES + torch.randint(FILLERS, (batch_size, length), generator=generator)
    ids[:, : 2 * num_pairs] = torch.stack([keys, values], 2).flatten(1)
    order = torch.rand(batch_size, length - 2 * num_pairs, generator=generator).argsort(1)
    positions = 2 * num_pairs + order[:, :num_pairs]
    ids.scatter_(1, positions, keys)
    return ids, positions, values, positions - 2 * torch.arange(num_pairs)


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Compute the delta rule S += beta k (v - S^T k)^T, o = S^T q, chunk by chunk (arXiv 2406.06484).

    Args:
        q, k: `[B, T, K]`; T is a multiple of `BLOCK`.
        v: `[B, T, V]`
        beta: `[B, T, 1]`

    Returns:
        `[B, T, V]`
    """
    q, k, beta_k, beta_v = (x.unflatten(1, (-1, BLOCK)) for x in (q, k, beta * k, beta * v))  # [B, M, C, ..]
    lower = torch.eye(BLOCK, dtype=q.dtype) + (beta_k @ k.mT).tril(-1)
    w = torch.linalg.solve_triangular(lower, beta_k, upper=False)
    u = torch.linalg.solve_triangular(lower, beta_v, upper=False)
    score = (q @ k.mT).tril()
    state = q.new_zeros(len(q), q.shape[-1], v.shape[-1])
    outputs = []
    for block in range(q.shape[1]):
        update = u[:, block] - w[:, block] @ state
        outputs.append(q[:, block] @ state + score[:, block] @ update)
        state = state + k[:, block].mT @ update
    return torch.cat(outputs, 1)


class Layer(nn.Module):
    """A short causal convolution, attention, and a projection, with a residual connection around them."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL - 1, groups=WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        if kind == "delta":
            self.beta = nn.Linear(WIDTH, 1)
        elif kind != "softmax":
            settings = MHLASettings(**(kind if isinstance(kind, dict) else LOCAL))
            core_class: Any = DecayMHLA if settings.mixing_form == "decay" else MHLA
            sizes = {"num_heads": 1, "num_kv_heads": 1, "key_dim": WIDTH, "value_dim": WIDTH, "hidden_size": WIDTH}
            self.core = core_class(settings, **sizes)
            if kind == "window":
                self.core.mixing.balance.data.fill_(-1e4)  # switches the far part off

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map `[B, T, WIDTH]` to the same shape."""
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
    """A language model that computes logits only where it is asked.

    Args:
        kinds: The attention of each layer.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        super().__init__()
        self.embed = nn.Embedding(KEYS + VALUES + FILLERS, WIDTH)
        nn.init.normal_(self.embed.weight, std=EMBEDDING_STD)
        self.layers = nn.Sequential(*map(Layer, kinds))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, KEYS + VALUES + FILLERS, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, N, vocabulary]` at `positions` `[B, N]` of sequences `[B, T]`."""
        hidden = self.norm(self.layers(self.embed(ids)))
        return self.head(hidden.gather(1, positions[..., None].expand(-1, -1, WIDTH)))


def make_row(job: Row) -> Row:
    """Train one model on all tasks; "tasks" has what `learn` returns for each."""
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    model = Model(FORMS[job["form"]])
    tasks = {task: learn(model, task, steps, job["seed"]) for task, steps in zip(TASKS, STEPS, strict=True)}
    return {**job, "tasks": tasks}


def learn(model: Model, task: str, steps: int, seed: int) -> dict[str, Any]:
    """Train a model on one task until it is solved.

    Args:
        model: The model, trained in place.
        task: A key of `TASKS`.
        steps: Maximum number of steps.
        seed: Seed of the sequences.

    Returns:
        "near" and "far" (see `score`), "steps" (how many it took), and "solved".
    """
    num_pairs, length = TASKS[task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    generator, test_generator = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(10_000 + seed)
    batch_size = TOKENS // length
    tests = [make_batch(num_pairs, length, batch_size, test_generator) for _ in range(8)]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(step / 50, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        ids, positions, answers, _ = make_batch(num_pairs, length, batch_size, generator)
        loss = F.cross_entropy(model(ids, positions).flatten(0, 1), answers.flatten())
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
def score(model: Model, batches: Sequence[tuple[torch.Tensor, ...]]) -> tuple[float, float]:
    """Return the accuracy on questions whose key was stated up to two blocks back, and on those beyond."""
    is_right = torch.cat([model(ids, positions).argmax(-1) == answers for ids, positions, answers, _ in batches])
    is_far = torch.cat([distances > 2 * BLOCK for *_, distances in batches])
    return is_right[~is_far].double().mean().item(), is_right[is_far].double().mean().item()


def describe(row: Row) -> str:
    """Format a row for the log."""
    tasks = [f"{task}: {result['far']:.3f} after {result['steps']} steps" for task, result in row["tasks"].items()]
    return f"seed {row['seed']}, {row['form']}: {'; '.join(tasks)}"


def render_mqar(record: Mapping[str, Any]) -> str:
    """Render the accuracy beyond the window and the steps it took, with mean and standard error over the seeds."""
    rows, seeds = complete_seeds(record["rows"], len(FORMS))
    lines = [f"| attention | {' | '.join(TASKS)} |", "|---" + "|---:" * len(TASKS) + "|"]
    for form in FORMS:
        cells = []
        for task in TASKS:
            results = [row["tasks"][task] for row in rows if row["form"] == form]
            cell = format_mean([result["far"] for result in results], "{:.2f}")
            if all(result["solved"] for result in results):
                cell += f" ({format_mean([result['steps'] for result in results], '{:.0f}')} steps)"
            cells.append(cell)
        lines.append(f"| {form} | {' | '.join(cells)} |")
    note = (
        f"{seeds.capitalize()}. At most {' and '.join(map(str, STEPS))} steps, fewer where {SOLVED:.0%} were recalled."
    )
    return "\n".join([*lines, "", f"{note} {describe_setup(record)}"])


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser("python -m experiments.mqar", description=__doc__)
    parser.add_argument("--out", default="docs/evidence/mqar.json", help="JSON file to create or to extend")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="processes, with one thread each (default: 2)")
    args = parser.parse_args()
    jobs = [{"form": form, "seed": seed} for seed in range(args.seeds) for form in FORMS]
    command = f"python -m experiments.mqar --seeds {args.seeds}"
    print(render_mqar(add_rows(args.out, make_row, jobs, describe, workers=args.workers, command=command)))


if __name__ == "__main__":
    script(main, "mqar")
