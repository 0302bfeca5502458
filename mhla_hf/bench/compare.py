"""Operators and whole models side by side: what they cost on this device, next to what a user would pick instead.

An operator's competitors are torch's fused softmax attention (every backend that takes the shape, by name), plain linear
attention (fla's kernel for causal shapes where fla is installed, else MHLA with equal weights), both forms of MHLA, and a
copy of as many bytes as must move at least: the floor. A model's are the stock model, plain linear, MHLA and its hybrids.
Unusual: on a GPU every competitor is captured as a CUDA graph, so that the time of its kernels is compared, not of Python;
but for decoding by MHLA's torch form, which no graph can hold, and for whole models.
"""

import dataclasses
import functools
import math
import time

import torch
from tqdm import tqdm

from ..ops.api import ANNOUNCED_CHOICES, mhla, mhla_step
from ..ops.blocks import Blocks
from ..ops.reference import mhla_reference
from ..ops.state import MHLAState
from ..ops.triton.decode import pin_state
from ..ops.triton.register import triton_refusal
from ..plots import plot_bars
from .checks import (
    TOLERANCES,
    WrongResult,
    errors_against,
    refuse_wrong,
    relative_error,
    rows_of_definition,
    rows_of_softmax,
)
from .competitors import copy_of, fla_kernels, floor_bytes, softmax_backends
from .lengths import FORWARD, PLAIN, TRAINING

LINEAR_BLOCK = 1024
SAMPLED_QUERIES = 16
STEPS = 64
NO_ROOM = "did not fit the memory of the device"


@dataclasses.dataclass(frozen=True)
class Operator:
    """One shape of attention. widths: of keys and of values."""

    name: str
    blocks: Blocks
    batch: int
    heads: int
    widths: tuple
    causal: bool = False
    normalize: bool = False
    dtype: str = "bfloat16"
    graph = True

    @property
    def options(self):
        """What `mhla` and its definition are told of the kind."""
        return {"causal": self.causal, "normalize": self.normalize}

    def small(self):
        """The same on few tokens, for the whole definition: blocks of a ragged size, two heads."""
        if self.blocks.block_size is not None:
            size = min(self.blocks.block_size, 96)
            blocks = Blocks.sequence(2 * size + size // 2, size)
        else:
            shape = zip(self.blocks.shape, self.blocks.counts, strict=True)
            blocks = Blocks.grid([min(side, count + 1) for side, count in shape], self.blocks.counts)
        return dataclasses.replace(self, blocks=blocks, batch=1, heads=2)

    def inputs(self, device, seed, batch=None):
        """q, k, v, mixing fp32 [M, M], with gradients, and dL/do."""
        random = torch.Generator(device).manual_seed(seed)
        make = functools.partial(torch.randn, generator=random, device=device)
        size, dtype = (batch or self.batch, self.blocks.length, self.heads), getattr(torch, self.dtype)
        q, k, v = (make(*size, width).to(dtype) for width in (self.widths[0], *self.widths))
        if self.normalize:
            q, k = q.abs(), k.abs()
        mixing = torch.rand(self.blocks.num_blocks, self.blocks.num_blocks, generator=random, device=device)
        return [x.requires_grad_() for x in (q, k, v, mixing)], make(*size, self.widths[1]).to(dtype)

    def attend(self, q, k, v, mixing, impl, blocks=None):
        """MHLA of this shape."""
        return mhla(q, k, v, mixing, blocks=blocks or self.blocks, impl=impl, **self.options)

    def forms(self, device):
        """The implementations of MHLA that run here."""
        return forms_for(max(self.widths), self.dtype, device)

    def check(self, device, seed):
        """Relative errors by name; RuntimeError for one that is too large.

        Output and all gradients of all competitors on few tokens against their definitions in fp64; of MHLA at full size
        the output of some queries, and the kernels' gradients against the torch form's in fp32.
        """
        checks, small = {}, self.small()
        (q, k, v, mixing), direction = small.inputs(device, seed)
        options = {"blocks": small.blocks, **self.options}
        uniform = torch.ones_like(mixing)

        def by_mixing(q, k, v, mixing=uniform):
            return mhla_reference(q, k, v, mixing.to(q.dtype), **options)

        def by_softmax(q, k, v):
            return rows_of_softmax(q, k, v, torch.arange(q.shape[1], device=q.device), self.causal)

        def compare(name, definition, attention, *tensors):
            errors = errors_against(definition, attention, tensors, direction)
            tokens = small.blocks.length
            checks.update({f"{self.name}, {name}, {what} of {tokens} tokens": error for what, error in errors.items()})

        (fq, fk, fv, fm), full = self.inputs(device, seed, batch=1)
        for form in self.forms(device):
            compare(form, by_mixing, functools.partial(small.attend, impl=form), q, k, v, mixing)
            with torch.no_grad():
                got, queries = self.attend(fq, fk, fv, fm, form), sampled_queries(self.blocks.length, device)
                wanted_rows = rows_of_definition(fq, fk, fv, fm, queries, blocks=self.blocks, **self.options)
                checks[f"{self.name}, {form}, sampled outputs"] = relative_error(got[:, queries], wanted_rows)
        if "triton" in self.forms(device):
            got = torch.autograd.grad(self.attend(fq, fk, fv, fm, "triton"), (fq, fk, fv, fm), full)
            wide = [x.detach().float().requires_grad_() for x in (fq, fk, fv, fm)]
            wanted = torch.autograd.grad(self.attend(*wide, "torch"), wide, full.float())
            for name, x, y in zip(("dq", "dk", "dv", "dmixing"), got, wanted, strict=True):
                checks[f"{self.name}, triton, {name} at full size"] = relative_error(x, y)
        for name, attention in self.softmax(q, k, v).items():
            compare(name, by_softmax, attention, q, k, v)
        linear = self.linear(device)
        compare(linear.__name__.replace("_", " "), by_mixing, linear, q, k, v)
        refuse_wrong(checks, TOLERANCES[self.dtype])
        return checks

    def softmax(self, q, k, v):
        """name -> torch's fused attention, of the backends that take tensors like these."""
        return softmax_backends(q, k, v, self.causal)

    def linear(self, device):
        """Plain linear attention: fla's kernel for causal shapes where it is installed, else MHLA with a single block, or,
        causal and long, with blocks that weigh the same, which is the same and leaves a GPU more to do at once."""
        kernels = fla_kernels(device) if self.causal else None
        if kernels is not None:

            def linear_fla(q, k, v):
                return kernels[0](q, k, v, scale=q.shape[-1] ** -0.5, normalize=self.normalize)[0]

            return linear_fla
        form = self.forms(device)[-1]

        def linear_ours(q, k, v):
            tokens = q.shape[1]
            blocks = Blocks.sequence(tokens, min(tokens, LINEAR_BLOCK) if self.causal else tokens)
            ones = torch.ones(blocks.num_blocks, blocks.num_blocks, device=q.device)
            return self.attend(q, k, v, ones, form, blocks)

        return linear_ours

    def competitors(self, device, seed):
        """name -> (forward function, its inputs), all of the same tensors."""
        (q, k, v, mixing), _ = self.inputs(device, seed)
        found = {name: (attention, (q, k, v)) for name, attention in self.softmax(q, k, v).items()}
        linear = self.linear(device)
        found[linear.__name__.replace("_", " ")] = linear, (q, k, v)
        for form in self.forms(device):
            found[f"mhla {form}"] = functools.partial(self.attend, impl=form), (q, k, v, mixing)
        return found

    def work(self, device, seed):
        """what -> name -> function of nothing, to be timed."""
        competitors = self.competitors(device, seed)
        _, direction = self.inputs(device, seed)
        work = {FORWARD: {}, TRAINING: {}}
        for name, (function, inputs) in competitors.items():
            work[FORWARD][name] = without_gradients(function, inputs)
            work[TRAINING][name] = functools.partial(training_step, function, inputs, direction)
        for what, moved in self.floors().items():
            work[what]["copy"] = copy_of(moved, device)
        return work

    def floors(self):
        """what -> `floor_bytes`."""
        moved = floor_bytes(self.batch * self.blocks.length * self.heads, self.widths, self.dtype)
        return dict(zip((FORWARD, TRAINING), moved, strict=True))


@dataclasses.dataclass(frozen=True)
class Decoding:
    """STEPS tokens, one by one, after `length` of causal attention with one row and no denominator, where a block ends half
    way through them: what an open block costs on the average, and one closing."""

    length: int
    heads: int = 16
    width: int = 64
    dtype: str = "bfloat16"
    graph = True

    @property
    def name(self):
        """After how many tokens."""
        return f"after {self.length:,} tokens, {self.heads} heads of {self.width}"

    @property
    def blocks(self):
        """Of a power of two from 2 * width and sqrt(length) on, which keeps mixing cheaper than the tokens; `length` is cut
        down to whole ones, and half of STEPS come before that."""
        size = 1 << math.ceil(math.log2(max(2 * self.width, self.length**0.5)))
        return Blocks.sequence(max(1, self.length // size) * size + STEPS // 2, size)

    def inputs(self, device, seed):
        """q, k, v [1, T, H, K], the last STEPS of which are to be decoded, and mixing fp32 [M, M]."""
        random = torch.Generator(device).manual_seed(seed)
        size, count = (1, self.blocks.length, self.heads, self.width), self.blocks.num_blocks
        q, k, v = (torch.randn(size, generator=random, device=device).to(getattr(torch, self.dtype)) for _ in range(3))
        return q, k, v, torch.rand(count, count, generator=random, device=device)

    def decoders(self, device, seed):
        """name -> function of nothing that decodes the last STEPS tokens, again and again the same: [1, STEPS, H, V]."""
        q, k, v, mixing = self.inputs(device, seed)
        found, caches = {}, [x.transpose(1, 2).contiguous() for x in (k, v)]
        for name, attention in self.softmax(q, k, v).items():
            found[name] = functools.partial(decode_softmax, attention, q, k, v, caches)
        summary, kernels = summary_of(k[:, :-STEPS], v[:, :-STEPS]), fla_kernels(device)
        found["linear ours"] = functools.partial(decode_linear, q, k, v, summary)
        if kernels is not None:
            found["linear fla"] = functools.partial(decode_by_fla, kernels[1], q, k, v, summary)
        for form in forms_for(self.width, self.dtype, device):
            found[f"mhla {form}"] = MHLADecoder(q, k, v, mixing, self.blocks.block_size, form)
        return found

    def softmax(self, q, k, v):
        """name -> torch's fused attention, of the backends that take one query like these."""
        return softmax_backends(q[:, -1:], k, v, False, gradients=False)

    @torch.no_grad()
    def check(self, device, seed):
        """Relative errors by name, of the first and the last tokens and those around the end of a block, against the
        definition in fp64; RuntimeError for one that is too large."""
        q, k, v, mixing = self.inputs(device, seed)
        steps = torch.tensor([0, STEPS // 2 - 1, STEPS // 2, STEPS - 1], device=device)
        queries, options = q.shape[1] - STEPS + steps, {"blocks": self.blocks, **PLAIN}
        definitions = {
            "sdpa": rows_of_softmax(q, k, v, queries, True),
            "linear": rows_of_definition(q, k, v, torch.ones_like(mixing), queries, **options),
            "mhla": rows_of_definition(q, k, v, mixing, queries, **options),
        }
        checks = {}
        for name, decode in self.decoders(device, seed).items():
            decode()  # what is timed has gone back before
            checks[f"{self.name}, {name}"] = relative_error(decode()[:, steps], definitions[name.split()[0]])
        refuse_wrong(checks, TOLERANCES[self.dtype])
        return checks

    def work(self, device, seed):
        """what -> name -> function of nothing, to be timed; "copy" moves what MHLA reads: mixed prefix and open block."""
        work = self.decoders(device, seed)
        opened = sum(place % self.blocks.block_size for place in range(self.blocks.length - STEPS, self.blocks.length))
        item = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        moved = self.heads * self.width * (4 * self.width + 2 * item * opened // STEPS)
        work["copy"] = repeated(copy_of(moved, device), STEPS)
        return {f"decode, {STEPS} tokens": {name: without_gradients(function, ()) for name, function in work.items()}}


class MHLADecoder:
    """MHLA before the last STEPS tokens; a call goes back there and decodes them. A CUDA graph can hold "triton"."""

    def __init__(self, q, k, v, mixing, size, form):
        self.q, self.k, self.v, self.mixing, self.form = q, k, v, mixing, form
        self.graph = form == "triton"
        first = [x[:, :-STEPS] for x in (q, k, v)]
        blocks = Blocks.sequence(first[0].shape[1], size)
        _, self.state = mhla(*first, mixing, blocks=blocks, impl=form, return_state=True, **PLAIN)
        self.state.reserve(mixing.shape[0])
        if self.graph:
            pin_state(self.state, mixing, q.shape[1])
        self.kept = {name: getattr(self.state, name) for name in ("prefix", "position")}
        self.kept = {name: None if x is None else x.clone() for name, x in self.kept.items()}

    def __call__(self):
        state, outputs = MHLAState(**vars(self.state)), []
        for name, tensor in self.kept.items():
            if tensor is not None:
                getattr(state, name).copy_(tensor)
        for i in range(-STEPS, 0):
            token = (x[:, i : i + 1 or None] for x in (self.q, self.k, self.v))
            outputs.append(mhla_step(*token, self.mixing, state, normalize=False, impl=self.form)[0])
        return torch.cat(outputs, 1)


def decode_softmax(attention, q, k, v, caches):
    """The last STEPS tokens by softmax; each step writes its key and value to the caches, [1, H, T, K]."""
    outputs = []
    for i in range(k.shape[1] - STEPS, k.shape[1]):
        for cache, new in zip(caches, (k, v), strict=True):
            cache[:, :, i] = new[:, i]
        outputs.append(attention(q[:, i : i + 1], *(cache[:, :, : i + 1].transpose(1, 2) for cache in caches)))
    return torch.cat(outputs, 1)


def summary_of(k, v):
    """sum k v^T over all tokens, fp32 [1, H, K, V], in parts that fit the memory."""
    parts = zip(k.split(LINEAR_BLOCK, 1), v.split(LINEAR_BLOCK, 1), strict=True)
    return sum(torch.einsum("bthk,bthv->bhkv", x.float(), y.float()) for x, y in parts)


def decode_linear(q, k, v, summary):
    """The last STEPS tokens by plain linear attention, which adds each to one summary [1, H, K, V]."""
    summary, outputs = summary.clone(), []
    for i in range(-STEPS, 0):
        query, key, value = (x[:, i].float() for x in (q, k, v))
        summary.addcmul_(key[..., :, None], value[..., None, :])
        outputs.append((query[..., None, :] @ summary)[..., 0, :] * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1).to(v.dtype)


def decode_by_fla(kernel, q, k, v, summary):
    """`decode_linear` by fla's recurrent kernel."""
    outputs = []
    for i in range(k.shape[1] - STEPS, k.shape[1]):
        token = (x[:, i : i + 1] for x in (q, k, v))
        options = {"initial_state": summary, "output_final_state": True, "normalize": False}
        o, summary = kernel(*token, scale=q.shape[-1] ** -0.5, **options)
        outputs.append(o)
    return torch.cat(outputs, 1)


def forms_for(width, dtype, device):
    """The implementations of MHLA that run on a device with heads of such a width."""
    like = torch.empty(1, 1, 1, width, dtype=getattr(torch, dtype), device=device)
    return ("torch", "triton") if like.is_cuda and triton_refusal(like, like, like) is None else ("torch",)


def sampled_queries(length, device):
    """A few queries, the first and the last among them."""
    return torch.linspace(0, length - 1, min(SAMPLED_QUERIES, length), device=device).long()


def repeated(function, times):
    """A function that calls another so many times, and returns the last result."""

    def run():
        for _ in range(times - 1):
            function()
        return function()

    return run


def without_gradients(function, inputs):
    """A forward pass alone."""

    @torch.no_grad()
    def run():
        return function(*inputs)

    run.graph = getattr(function, "graph", True)
    return run


def training_step(function, inputs, direction):
    """Forward, and gradients of all inputs."""
    return torch.autograd.grad(function(*inputs), inputs, direction)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Cases (`Operator`, or a model of cases.py) to check and to time, in rounds of which the fastest counts."""

    cases: tuple
    rounds: int = 10
    seconds: float = 0.02

    def settings(self):
        """What the record says of the suite."""
        return {"cases": [case.name for case in self.cases], "rounds": self.rounds, "seconds": self.seconds}

    def measure(self, device, seed, progress, keep=lambda part: None):
        """Rows (case, what, ms by name), checks, what did not fit the memory, what was wrong, and what "auto" took.

        keep: gets all that after every case, once one was timed.
        """
        rows, checks, skipped, wrong = [], {}, {}, []
        found = {"rows": rows, "checks": checks, "skipped": skipped, "wrong": wrong, "took": []}
        for case in tqdm(self.cases, desc="bench", disable=not progress):
            what = FORWARD
            try:
                checks |= case.check(device, seed)
                for what, work in case.work(device, seed).items():
                    best, failed = fastest_of_rounds(work, device, self.rounds, self.seconds, case.graph)
                    if any(name.startswith("mhla") for name in best):
                        rows.append({"case": case.name, "what": what, "ms": {n: 1e3 * s for n, s in best.items()}})
                        skipped |= {f"{case.name}: {what}, {name}": why for name, why in failed.items()}
                    else:
                        skipped[f"{case.name}: {what}"] = next(w for n, w in failed.items() if n.startswith("mhla"))
            except torch.OutOfMemoryError:
                skipped[f"{case.name}: {what}"] = NO_ROOM
            except WrongResult as error:
                wrong.append(str(error))
            except ValueError:
                raise
            except Exception as error:  # of one case, which leaves the others their turn
                wrong.append(f"{case.name}: {what} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            found["took"] = sorted(f"{choice}, {why}" for choice, why in ANNOUNCED_CHOICES)
            if rows:
                keep(found)
        return found

    def plot(self, path, record):
        """bench.png: bars by case."""
        plot_bars(path, record["rows"], record["hardware"])


def fastest_of_rounds(work, device, rounds, seconds, graph):
    """name -> seconds of one call, and name -> why it has none.

    Every competitor takes its turn in every round, long enough to be measured; one that cannot run leaves the others alone.
    """
    graph = graph and torch.device(device).type == "cuda"
    ready, calls, best, failed = {}, {}, {}, {}
    for name, function in work.items():
        try:
            ready[name] = captured(function, device) if graph and getattr(function, "graph", True) else function
            seconds_of(ready[name], 1, device)  # warms up
            calls[name] = max(1, int(seconds / max(seconds_of(ready[name], 1, device), 1e-7)))
        except Exception as error:  # triton's are no RuntimeErrors
            ready.pop(name, None)
            full = isinstance(error, torch.OutOfMemoryError)
            failed[name] = NO_ROOM if full else "failed: " + str(error).partition("\n")[0]
    for _ in range(rounds):
        for name, function in ready.items():
            took = seconds_of(function, calls[name], device)
            best[name] = min(best.get(name, took), took)
    return best, failed


def captured(function, device):
    """The function's kernels as a CUDA graph."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()  # memory of a graph lives as long as it
    graph.kept = kept
    return graph.replay


def seconds_of(function, calls, device):
    """Seconds of one of `calls` calls, from the device's own clock on a GPU."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            function()
        return (time.perf_counter() - start) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def render_comparison(record):
    """The record as a table: each competitor's time, and how many times as fast the best MHLA is."""
    checks, versions = record["checks"], record["versions"]
    lines = [
        f"{record['hardware']}; torch {versions['torch']}, triton {versions.get('triton', 'absent')}",
        f"Right before fast: largest relative error of {len(checks)} checks {max(checks.values(), default=0):.0e}",
    ]
    for row in record["rows"]:
        ours = min((ms for name, ms in row["ms"].items() if name.startswith("mhla")), default=None)
        lines += ["", f"{row['case']}: {row['what']}"]
        for name, ms in sorted(row["ms"].items(), key=lambda entry: entry[1]):
            ratio = "" if ours is None or name.startswith("mhla") else f"{ms / ours:>9.2f}x MHLA's time"
            lines.append(f"  {name:18}{ms:>12.4f} ms{ratio}")
    lines += ["", *(f"{name}: not timed, it {why}." for name, why in record["skipped"].items()), *record["wrong"]]
    return "\n".join(lines).rstrip()
