"""The operator's speed, against what a user would pick instead: torch's fused softmax attention, and plain linear attention.

Nothing is timed before it agrees with its definition in fp64. The competitors take turns, round after round in one process,
and the fastest round of each counts, so that a busy moment of the machine hits all of them or none. What is wrong, fails or
does not fit the memory is said in place of its time, and leaves the others their turn. What decoding keeps is counted.

A case has a `name`, a `dtype`, `whats` (what of it is timed), and

    names(device)                the competitors that run there
    errors(name, device, seed)   {what: relative error} against the definition
    prepare(device, seed)        what all competitors share while they are timed
    work(prepared, what, name)   a function of nothing to be timed
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .checkpoints.files import write_json
from .checkpoints.load import choose_device
from .checkpoints.machine import describe_run
from .nn.settings import MHLASettings
from .ops.api import mhla
from .ops.blocks import Blocks
from .ops.decays import LocalForm
from .ops.local_state import LocalState
from .speed import clock

TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}
TURN = 0.02  # seconds that a competitor's turn takes at least
FORWARD, TRAINING = "forward", "forward + backward"
SAMPLED_QUERIES = 16
LENGTHS, HEADS, WIDTH, BLOCK_SIZE = (512, 2048, 8192), 4, 64, 64  # of what is timed by default


def definition(q, k, v, mixing, queries, blocks, causal, normalize):
    """The outputs of some queries in fp64, head by head: MHLA's, or softmax attention's where `mixing` is None."""
    token = torch.arange(k.shape[1], device=q.device)
    later = (token > queries[:, None]) & causal
    index, rows = blocks.index(q.device), []
    for head in range(q.shape[2]):
        weights = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        if mixing is None:
            weights = weights.masked_fill(later, -torch.inf).softmax(-1)
        else:
            weights = weights * (mixing.double()[index[queries]][:, index] * ~later)
            weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        rows.append(weights @ v[:, :, head].double())
    return torch.stack(rows, 2)


def relative_error(got, expected):
    """Frobenius distance over the size of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def linear_attention(q, k, v, causal, normalize, chunk=64):
    """Plain linear attention in torch: one summary, or, causal, chunks with a running sum over theirs."""
    length, scale = q.shape[1], q.shape[-1] ** -0.5
    v = F.pad(v, (0, 1), value=1.0) if normalize else v  # its last column sums the weights
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if causal:
        q, k, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v))
        summary = (k.mT @ v).float()
        before = (summary.cumsum(2) - summary).to(v.dtype)
        o = (q @ before + (q @ k.mT).tril() @ v).flatten(2, 3)[:, :, :length]
    else:
        o = q @ (k.mT @ v)
    o = o[..., :-1] / o[..., -1:] if normalize else o * scale
    return o.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Operator:
    """One shape of attention, against softmax and plain linear attention. widths: of keys and of values."""

    name: str
    blocks: Blocks
    batch: int
    heads: int
    widths: tuple
    causal: bool = False
    normalize: bool = False
    dtype: str = "bfloat16"
    whats = (FORWARD, TRAINING)

    def names(self, device):
        return ["sdpa", "linear", "mhla triton" if torch.device(device).type == "cuda" else "mhla torch"]

    def prepare(self, device, seed):
        """q, k, v, mixing fp32 [M, M], with gradients, and dL/do."""
        random = torch.Generator(device).manual_seed(seed)
        make = functools.partial(torch.randn, generator=random, device=device)
        size, dtype = (self.batch, self.blocks.length, self.heads), getattr(torch, self.dtype)
        q, k, v = (make(*size, width).to(dtype) for width in (self.widths[0], *self.widths))
        if self.normalize:
            q, k = q.abs(), k.abs()
        mixing = torch.rand(self.blocks.num_blocks, self.blocks.num_blocks, generator=random, device=device)
        return [x.requires_grad_() for x in (q, k, v, mixing)], make(*size, self.widths[1]).to(dtype)

    def attend(self, name, q, k, v, mixing=None):
        """The output of one competitor."""
        if name == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        if name == "linear":
            return linear_attention(q, k, v, self.causal, self.normalize)
        impl = name.removeprefix("mhla ")
        return mhla(q, k, v, mixing, blocks=self.blocks, causal=self.causal, normalize=self.normalize, impl=impl)

    def errors(self, name, device, seed):
        """{"output", "dq", ...: relative error} of some queries of one sequence, and of the gradients of those alone."""
        tensors, direction = dataclasses.replace(self, batch=1).prepare(device, seed)
        length = self.blocks.length
        queries = torch.linspace(0, length - 1, min(SAMPLED_QUERIES, length), device=device).round().long()
        used = tensors if name.startswith("mhla") else tensors[:3]
        exact = [x.detach().double().requires_grad_() for x in used]
        mixing = {"sdpa": None, "linear": torch.ones_like(tensors[3])}.get(name, exact[-1])
        got = self.attend(name, *used)[:, queries]
        wanted = definition(*exact[:3], mixing, queries, self.blocks, self.causal, self.normalize)
        got = got, *torch.autograd.grad(got, used, direction[:, queries])
        wanted = wanted, *torch.autograd.grad(wanted, exact, direction[:, queries].double())
        names = ("output", "dq", "dk", "dv", "dmixing")[: len(got)]
        return {what: relative_error(x, y) for what, x, y in zip(names, got, wanted, strict=True)}

    def work(self, prepared, what, name):
        """One forward pass without gradients, or one with the gradients of all inputs."""
        tensors, direction = prepared
        used = tensors if name.startswith("mhla") else tensors[:3]
        if what == FORWARD:
            return torch.no_grad()(functools.partial(self.attend, name, *used))
        return lambda: torch.autograd.grad(self.attend(name, *used), used, direction)


def quick_cases():
    """Causal attention in fp32, by length: a minute or two on a CPU."""
    sizes = {"batch": 1, "heads": HEADS, "widths": (WIDTH, WIDTH), "causal": True, "dtype": "float32"}
    return [Operator(f"{length:,} tokens", Blocks.sequence(length, BLOCK_SIZE), **sizes) for length in LENGTHS]


@torch.no_grad()
def kept_bytes(length):
    """What a causal layer keeps from token to token after `length` tokens in fp32: competitor -> bytes.

    "mhla" is the paper's, without denominator; "mhla window" that of converted language models.
    """
    k, blocks, settings = torch.zeros(1, length, HEADS, WIDTH), Blocks.sequence(length, BLOCK_SIZE), MHLASettings()
    mixing = torch.ones(blocks.num_blocks, blocks.num_blocks)
    dense = mhla(k, k, k, mixing, blocks=blocks, causal=True, normalize=False, return_state=True)[1]
    form = LocalForm(settings.block_size, sinks=settings.sinks)
    window = LocalState.empty(k, k, settings.num_decays, 2 * WIDTH, form)  # the map doubles the width
    linear = k.element_size() * HEADS * WIDTH**2
    return {"sdpa": 2 * k.nbytes, "linear": linear, "mhla": dense.nbytes(), "mhla window": window.nbytes()}


def run_bench(cases=None, *, device="cpu", threads=1, seed=0, rounds=5, out=None, progress=True, command=None):
    """Check, time and compare; ValueError and OSError, one sentence, before anything is timed.

    Args:
        cases: what is timed; None: `quick_cases`. rounds: how often every competitor takes its turn.
        device: where. threads: CPU threads while timing; the old number is restored. seed: of the inputs.
        out: JSON file, which grows by one case after another, so that one can stop it. progress: show a bar on stderr.

    Returns:
        A dict that goes to JSON as it is: "rows", each with "case", "what", "ms" (competitor -> milliseconds), "error" (the
        largest relative error of each that was found before) and "failed" (competitor -> why it has no time); "kept": length
        -> what `kept_bytes` counts; versions, hardware, commit, seed, command, date.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1.")
    keep = functools.partial(write_json, out) if out is not None else lambda record: None
    device, before = choose_device(device), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = {**describe_run(command, device), "seed": seed, "rows": []}
        record["kept"] = {str(length): kept_bytes(length) for length in LENGTHS}
        keep(record)
        for case in tqdm(quick_cases() if cases is None else cases, desc="bench", disable=not progress):
            record["rows"] += time_case(case, device, seed, rounds)
            keep(record)
    finally:
        torch.set_num_threads(before)
    return record


def time_case(case, device, seed=0, rounds=5):
    """The rows of one case, one for each of its `whats`."""
    error, failed, found = {}, {}, []
    with noted(failed, "all"):
        for name in case.names(device):
            with noted(failed, name):
                errors = case.errors(name, device, seed)
                error[name] = max(errors.values(), default=0.0)
                if wrong := [what for what, size in errors.items() if not size < TOLERANCES[case.dtype]]:
                    failed[name] = f"is wrong: {wrong[0]} with a relative error of {errors[wrong[0]]:.1e}"
        prepared = case.prepare(device, seed)
        for what in case.whats:
            ready, ms, lost = {}, {}, dict(failed)
            for name in (name for name in error if name not in failed):
                with noted(lost, name):
                    function = case.work(prepared, what, name)
                    seconds_of(function, device)  # warms up
                    ready[name] = function
            for _, name in itertools.product(range(rounds), ready):
                ms[name] = min(ms.get(name, math.inf), 1e3 * seconds_of(ready[name], device))
            found.append({"case": case.name, "what": what, "ms": ms, "error": error, "failed": lost})
    return [{"case": case.name, "what": "", "ms": {}, "error": error, "failed": failed}] if "all" in failed else found


@contextlib.contextmanager
def noted(failed, name):
    """An error meanwhile becomes `failed[name]` and leaves the others their turn; triton's are no RuntimeErrors."""
    try:
        yield
    except Exception as error:
        failed[name] = why(error)


def why(error):
    """An exception in a few words."""
    if isinstance(error, torch.OutOfMemoryError):
        return "did not fit the memory of the device"
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def seconds_of(function, device):
    """Seconds of one of the calls that begin within TURN."""
    calls, start = 0, clock(device)
    while calls == 0 or time.perf_counter() - start < TURN:
        function()
        calls += 1
    return (clock(device) - start) / calls


def render_bench(record):
    """The record in Markdown: the fastest of each kind with its name, and how many times as fast MHLA is."""
    worst = max((error for row in record["rows"] for error in row["error"].values()), default=0.0)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if name in ("torch", "triton"))
    lines = [
        f"{record['hardware']}; {versions}; largest relative error found before timing: {worst:.0e}.",
        "",
        "| case | what | MHLA, ms | softmax, ms | plain linear, ms | times softmax | times linear |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row, ours in itertools.product(record["rows"], ("mhla", "hybrid")):
        mine, *others = (fastest(row["ms"], kind) for kind in (ours, ("sdpa", "softmax"), "linear"))
        if mine:
            times = [f"{other[0] / mine[0]:.2f}" if other else "" for other in others]
            cells = [f"{one[0]:.4g} {one[1]}".rstrip() if one else "" for one in (mine, *others)]
            case = row["case"] if ours == "mhla" else f"{row['case']}, {ours}"
            lines.append(f"| {case} | {row['what']} | {' | '.join([*cells, *times])} |")
    if kept := record.get("kept"):
        names = list(next(iter(kept.values())))
        lines += ["", f"| decoding keeps, KiB | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
        for length, sizes in kept.items():
            lines.append(f"| after {int(length):,} tokens | {' | '.join(f'{sizes[x] / 1024:,.0f}' for x in names)} |")
    failed = {f"* {row['case']}, {name}: {text}" for row in record["rows"] for name, text in row["failed"].items()}
    return "\n".join([*lines, *([""] if failed else []), *sorted(failed)])


def fastest(ms, kinds):
    """(milliseconds, the rest of its name) of the fastest competitor of these kinds; None without one."""
    found = [(value, name.partition(" ")[2]) for name, value in ms.items() if name.startswith(kinds)]
    return min(found, default=None)
