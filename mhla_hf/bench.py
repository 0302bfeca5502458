"""Speed, against what a user would pick instead: torch's fused softmax attention, and plain linear attention.

Nothing is timed before it agrees with its definition in fp64. The competitors take turns, round after round in one process,
and the fastest round of each counts, so that a busy moment of the machine hits all of them or none. What is wrong, fails or
does not fit the memory is said in place of its time, and leaves the others their turn.

A case has a `name`, a `dtype`, `whats` (what of it is timed), and

    names(device)                the competitors that run there
    errors(name, device, seed)   {what: relative error} against the definition
    prepare(device, seed)        what all competitors share while they are timed
    work(prepared, what, name)   a function of nothing to be timed; a `Decoder` is reset before, untimed
"""

import contextlib
import copy
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
from .nn.decay_mixing import DecayMixing
from .nn.local import start_balance
from .nn.settings import MHLASettings
from .ops.api import mhla, mhla_step
from .ops.blocks import Blocks
from .ops.local import LocalForm
from .ops.local_state import LocalState, continue_local
from .speed import clock

FORMAT_VERSION = 2
TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}
TURN = 0.02  # seconds that a competitor's turn takes at least
FORWARD, TRAINING = "forward", "forward + backward"
STEPS = 64
SAMPLED_QUERIES = 16
WINDOW, DEFAULT = "window", MHLASettings()


def definition(q, k, v, mixing, queries, blocks, causal, normalize=False, window=None):
    """The outputs of some queries in fp64, head by head: MHLA's, or softmax attention's where `mixing` is None.

    window: a `Window`, whose attention it is then.
    """
    token = torch.arange(k.shape[1], device=q.device)
    later = (token > queries[:, None]) & causal
    index, rows = blocks.index(q.device), []
    for head in range(q.shape[2]):
        weights = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        if window is not None:
            distance, (decays, balance) = index[queries][:, None] - index, window.mixing
            lambdas = decays.log_rate[head].double().exp() ** distance.clamp(min=0)[..., None]
            far = hedgehog(q[:, queries, head].double()) @ hedgehog(k[:, :, head].double()).mT
            far = far * (lambdas @ decays.weight[head].double()) * balance[head].double().exp()
            near = (distance < window.form.lag) | (token < window.form.sinks)
            weights = torch.where(near, weights.exp(), far) * ~later
            weights = weights / weights.sum(-1, keepdim=True)
        elif mixing is None:
            weights = weights.masked_fill(later, -torch.inf).softmax(-1)
        else:
            weights = weights * (mixing.double()[index[queries]][:, index] * ~later)
            weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        rows.append(weights @ v[:, :, head].double())
    return torch.stack(rows, 2)


def hedgehog(x):
    """The feature map of converted language models as it starts, [.., 2 K]."""
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


class Window:
    """What converted language models attend by, as it starts: softmax over a window, two decays before it."""

    def __init__(self, heads, width, device):
        self.form = LocalForm(DEFAULT.block_size, sinks=DEFAULT.sinks, scale=width**-0.5)
        mixing = DecayMixing(heads, heads, DEFAULT.num_decays, balance=start_balance("hedgehog", width))
        with torch.no_grad():
            self.mixing = mixing.to(device)()

    def read(self, q, k, v, state=None):
        """The outputs of new tokens, and the state behind them."""
        fresh = state is None
        state = LocalState.empty(k, v, DEFAULT.num_decays, 2 * k.shape[-1], self.form) if fresh else state
        o = continue_local(q, k, v, hedgehog(q), hedgehog, *self.mixing, self.form, state, fresh=fresh)
        return o.to(v.dtype), state


def relative_error(got, expected):
    """Frobenius distance over the size of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


def softmax_attention(q, k, v, causal=False):
    """torch's fused attention, by the backend that torch takes, [B, T, H, K]."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)


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


def competitors(device):
    """Softmax, plain linear attention, and MHLA as it runs there."""
    return ["sdpa", "linear", "mhla triton" if torch.device(device).type == "cuda" else "mhla torch"]


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
        return competitors(device)

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
            return softmax_attention(q, k, v, self.causal)
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


@dataclasses.dataclass(frozen=True)
class Decoding:
    """STEPS tokens, one by one, after `length` of causal attention with one sequence; a block ends half way through them.

    MHLA is the paper's, without denominator, and that of converted language models. block_size: None: a power of two from
    2 * width and sqrt(length) on, which keeps mixing cheaper than the tokens. `length` is cut down to whole blocks.
    """

    length: int
    heads: int = 16
    width: int = 64
    block_size: int | None = None
    dtype: str = "bfloat16"
    whats = (f"decode, {STEPS} tokens",)

    @property
    def name(self):
        return f"after {self.length:,} tokens, {self.heads} heads of {self.width}"

    @property
    def blocks(self):
        size = self.block_size or 1 << math.ceil(math.log2(max(2 * self.width, self.length**0.5)))
        return Blocks.sequence(max(1, self.length // size) * size + STEPS // 2, size)

    def names(self, device):
        return [*competitors(device), WINDOW]

    def prepare(self, device, seed):
        """q, k, v [1, T, H, K], the last STEPS of which are to be decoded, and mixing fp32 [M, M]."""
        random = torch.Generator(device).manual_seed(seed)
        size, count = (1, self.blocks.length, self.heads, self.width), self.blocks.num_blocks
        q, k, v = (torch.randn(size, generator=random, device=device).to(getattr(torch, self.dtype)) for _ in range(3))
        return q, k, v, torch.rand(count, count, generator=random, device=device)

    @torch.no_grad()
    def errors(self, name, device, seed):
        """Of the first and the last token and those around the end of a block, the second time they are decoded."""
        q, k, v, mixing = self.prepare(device, seed)
        steps = torch.tensor([0, STEPS // 2 - 1, STEPS // 2, STEPS - 1], device=device)
        known = {"sdpa": None, "linear": torch.ones_like(mixing)}.get(name, mixing)
        blocks, window = self.blocks, Window(self.heads, self.width, device) if name == WINDOW else None
        if window:
            blocks = Blocks.sequence(blocks.length, window.form.block_size)
        wanted = definition(q, k, v, known, q.shape[1] - STEPS + steps, blocks, True, window=window)
        decode = self.work((q, k, v, mixing), self.whats[0], name)
        for _ in range(2):
            decode.reset()
            got = decode()[:, steps]
        return {"tokens": relative_error(got, wanted)}

    def work(self, prepared, what, name):
        return Decoder(name, self.blocks.block_size, *prepared)


class Decoder:
    """One competitor before the last STEPS tokens: a call decodes them, [1, STEPS, H, V], `reset` goes back.

    Softmax has all keys and values in place, as models cache them, and reads more of them from token to token.
    """

    def __init__(self, name, block_size, q, k, v, mixing):
        self.name, self.tokens, self.mixing = name, (q, k, v), mixing
        first = [x[:, :-STEPS] for x in (q, k, v)]
        if name == "sdpa":
            self.start, self.cached = None, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
        elif name == "linear":
            parts = zip(first[1].split(1024, 1), first[2].split(1024, 1), strict=True)
            self.start = sum(torch.einsum("bthk,bthv->bhkv", x.float(), y.float()) for x, y in parts)
        elif name == WINDOW:
            self.window, self.start = Window(*q.shape[2:], q.device), None
            for part in zip(*(x.split(4096, 1) for x in first), strict=True):
                self.start = self.window.read(*part, self.start)[1]
        else:
            blocks, impl = Blocks.sequence(first[0].shape[1], block_size), name.removeprefix("mhla ")
            options = {"causal": True, "normalize": False, "return_state": True}
            self.start = mhla(*first, mixing, blocks=blocks, impl=impl, **options)[1]
        self.reset()

    def nbytes(self):
        """Bytes kept between two tokens."""
        if self.name == "sdpa":
            return sum(cached[:, :-STEPS].nbytes for cached in self.cached)
        return self.start.nbytes if self.name == "linear" else self.start.nbytes()

    def reset(self):
        """Back to where the decoding starts."""
        self.state = copy.deepcopy(self.start)

    @torch.no_grad()
    def __call__(self):
        length = self.tokens[0].shape[1]
        tokens = ((i, *(x[:, i : i + 1] for x in self.tokens)) for i in range(length - STEPS, length))
        return torch.cat([self.step(*token) for token in tokens], 1)

    def step(self, place, q, k, v):
        """The output of one token, [1, 1, H, V]."""
        if self.name == "sdpa":
            return softmax_attention(q, *(cached[:, : place + 1] for cached in self.cached))
        if self.name == "linear":
            self.state.addcmul_(k[:, 0, :, :, None].float(), v[:, 0, :, None].float())
            return (q[:, 0, :, None].float() @ self.state * q.shape[-1] ** -0.5).transpose(1, 2).to(v.dtype)
        if self.name == WINDOW:
            return self.window.read(q, k, v, self.state)[0]
        impl = self.name.removeprefix("mhla ")
        return mhla_step(q, k, v, self.mixing, self.state, normalize=False, impl=impl)[0]


def quick_cases():
    """Causal attention and decoding in fp32, by length: a minute or two on a CPU."""
    lengths, heads, width, size = (512, 2048, 8192), 4, 64, 64
    operators = [
        Operator(f"{n:,} tokens", Blocks.sequence(n, size), 1, heads, (width, width), causal=True, dtype="float32")
        for n in lengths
    ]
    return [*operators, *(Decoding(n, heads, width, size, "float32") for n in lengths)]


def decode_cases():
    """Decoding in bf16 after long texts: meant for a GPU."""
    return [Decoding(length) for length in (8192, 32768, 131072, 1048576)]


SUITES = {"quick": quick_cases, "decode": decode_cases}


def run_bench(suite="quick", *, device="cpu", threads=1, seed=0, rounds=5, out=None, progress=True, command=None):
    """Check, time and compare; ValueError and OSError, one sentence, before anything is timed.

    Args:
        suite: a name of `SUITES`, or a list of cases. rounds: how often every competitor takes its turn.
        device: where. threads: CPU threads while timing; the old number is restored. seed: of the inputs.
        out: JSON file, which grows by one case after another, so that one can stop it. progress: show a bar on stderr.

    Returns:
        A dict that goes to JSON as it is: "rows", each with "case", "what", "ms" (competitor -> milliseconds), "error" (the
        largest relative error of each that was found before), "failed" (competitor -> why it has no time) and, of decoding,
        "bytes" (competitor -> bytes kept from token to token); versions, hardware, commit, seed, command, date.
    """
    if isinstance(suite, str) and suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; expected one of {', '.join(SUITES)}.")
    if threads < 1:
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1.")
    keep = functools.partial(write_json, out) if out is not None else lambda record: None
    name, cases = (suite, SUITES[suite]()) if isinstance(suite, str) else ("own", suite)
    device, before = choose_device(device), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = {"format_version": FORMAT_VERSION, "suite": name, **describe_run(command, device)}
        record |= {"seed": seed, "rows": []}
        keep(record)
        for case in tqdm(cases, desc="bench", disable=not progress):
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
            row = {"case": case.name, "what": what, "ms": ms, "error": error, "failed": lost}
            kept = {name: decoder.nbytes() for name, decoder in ready.items() if isinstance(decoder, Decoder)}
            found.append({**row, "bytes": kept} if kept else row)
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
    """Seconds of one of the calls that begin within TURN; of a single one where it has to be reset."""
    least, calls = TURN, 0
    if isinstance(function, Decoder):
        function.reset()
        least = 0.0
    start = clock(device)
    while calls == 0 or time.perf_counter() - start < least:
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
    for row, ours in itertools.product(record["rows"], ("mhla", "hybrid", WINDOW)):
        mine, *others = (fastest(row["ms"], kind) for kind in (ours, ("sdpa", "softmax"), "linear"))
        if mine:
            times = [f"{other[0] / mine[0]:.2f}" if other else "" for other in others]
            cells = [f"{one[0]:.4g} {one[1]}".rstrip() if one else "" for one in (mine, *others)]
            case = row["case"] if ours == "mhla" else f"{row['case']}, {ours}"
            lines.append(f"| {case} | {row['what']} | {' | '.join([*cells, *times])} |")
    if rows := [row for row in record["rows"] if "bytes" in row]:
        names = list(dict.fromkeys(name for row in rows for name in row["bytes"]))
        lines += ["", f"| kept from token to token, KiB | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
        for row in rows:
            cells = [f"{row['bytes'][name] / 1024:,.0f}" if name in row["bytes"] else "" for name in names]
            lines.append(f"| {row['case']} | {' | '.join(cells)} |")
    failed = {f"* {row['case']}, {name}: {text}" for row in record["rows"] for name, text in row["failed"].items()}
    return "\n".join([*lines, *([""] if failed else []), *sorted(failed)])


def fastest(ms, kinds):
    """(milliseconds, the rest of its name) of the fastest competitor of these kinds; None without one."""
    found = [(value, name.partition(" ")[2]) for name, value in ms.items() if name.startswith(kinds)]
    return min(found, default=None)
