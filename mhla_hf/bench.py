"""Time the MHLA operator against the alternatives: torch's fused softmax attention, and plain linear attention.

Every implementation is compared with its definition in fp64 before it is timed. The implementations are timed in turns,
for several rounds in one process, and the fastest round of each counts. In this way, other load on the machine affects all
of them alike. If one is wrong, fails or runs out of memory, the reason is reported in place of a time, and the others are
still timed. The memory of decoding is reported, too.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .checkpoints.file_io import PathLike, write_json
from .checkpoints.load import choose_device
from .checkpoints.provenance import describe_run
from .nn.settings import MHLASettings
from .ops.api import mhla
from .ops.blocks import Blocks
from .ops.decays import LocalForm
from .ops.local_state import LocalState
from .speed import clock

TOLERANCES = {"float32": 1e-5, "bfloat16": 1.5e-2, "float16": 1.5e-2}
MIN_TURN_SECONDS = 0.02  # in which a call is repeated and timed
FORWARD = "forward"
TRAINING = "forward + backward"
NUM_SAMPLED_QUERIES = 16  # compared with the definition
LENGTHS = (512, 2048, 8192)  # of the default cases, as the sizes below
HEADS = 4
WIDTH = 64
BLOCK_SIZE = 64
WRONG = "is wrong"  # beginning of the reason if results differ from the definition

Device = torch.device | str


class Case(Protocol):
    """Interface of the cases that `run_bench` checks and times.

    Attributes:
        name: Name in the table.
        dtype: Name of a torch dtype, which selects the tolerance.
        modes: The modes that are timed, such as `FORWARD` and `TRAINING`.
    """

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def modes(self) -> tuple[str, ...]: ...

    def competitors(self, device: Device) -> list[str]:
        """Return the names of the implementations that run on the device."""
        ...

    def errors(self, name: str, device: Device, seed: int) -> dict[str, float]:
        """Return the relative errors of an implementation against its definition, by name of the compared tensor."""
        ...

    def prepare(self, device: Device, seed: int) -> Any:
        """Return the inputs that all implementations share."""
        ...

    def work(self, prepared: Any, mode: str, name: str) -> Callable[[], Any]:
        """Return the function to time, for a mode and an implementation."""
        ...


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: torch.Tensor | None, queries: torch.Tensor, blocks: Blocks,
    causal: bool, normalize: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute attention for some queries in fp64: MHLA or, if `mixing` is None, softmax attention.

    B is the batch size; T, H, M and N are the numbers of tokens, heads, blocks and queries; K and V are the widths of a key
    and of a value.

    Args:
        q, k, v: [B, T, H, K], [B, T, H, K] and [B, T, H, V].
        mixing: The mixing matrix [M, M], or None.
        queries: Indices of the queries among the tokens, [N].
        blocks, causal, normalize: See `mhla`.

    Returns:
        The outputs, fp64 [B, N, H, V].
    """
    token = torch.arange(k.shape[1], device=q.device)
    later = (token > queries[:, None]) & causal
    index = blocks.index(q.device)
    outputs = []
    for head in range(q.shape[2]):
        weights = q[:, queries, head].double() @ k[:, :, head].double().mT * q.shape[-1] ** -0.5
        if mixing is None:
            weights = weights.masked_fill(later, -torch.inf).softmax(-1)
        else:
            weights = weights * (mixing.double()[index[queries]][:, index] * ~later)
            weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
        outputs.append(weights @ v[:, :, head].double())
    return torch.stack(outputs, 2)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||actual - expected|| / ||expected|| in the Frobenius norm, computed in fp64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, normalize: bool, chunk: int = 64
) -> torch.Tensor:
    """Compute plain linear attention in PyTorch, the baseline without mixing.

    All queries read one sum of k v^T. If causal, each chunk of tokens reads the cumulative sum of the chunks before it, and
    masked linear attention within the chunk is added.

    Args:
        q, k, v: [B, T, H, K], [B, T, H, K] and [B, T, H, V]; see `exact_attention` for the letters.
        causal, normalize: See `mhla`.
        chunk: Tokens per chunk.

    Returns:
        The outputs [B, T, H, V].
    """
    length = q.shape[1]
    scale = q.shape[-1] ** -0.5
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


Prepared = tuple[list[torch.Tensor], torch.Tensor]  # (inputs of `Operator`, gradient of its output)


@dataclasses.dataclass(frozen=True)
class Operator:
    """A case that times attention of one shape: MHLA against softmax and plain linear attention.

    Attributes:
        name: Name in the table.
        blocks: Number and layout of the tokens.
        batch, heads: Sizes of the inputs.
        widths: (width of the keys, width of the values).
        causal, normalize: See `mhla`.
        dtype: Dtype of q, k and v.
        modes: The modes that are timed.
    """

    name: str
    blocks: Blocks
    batch: int
    heads: int
    widths: tuple[int, int]
    causal: bool = False
    normalize: bool = False
    dtype: str = "bfloat16"
    modes = (FORWARD, TRAINING)

    def competitors(self, device: Device) -> list[str]:
        """Return the names of the implementations that run on the device."""
        return ["sdpa", "linear", "mhla triton" if torch.device(device).type == "cuda" else "mhla torch"]

    def prepare(self, device: Device, seed: int) -> Prepared:
        """Return random inputs that require gradients, and a random gradient of the output.

        The inputs are q [B, T, H, K], k [B, T, H, K], v [B, T, H, V] and mixing, fp32 [M, M]; the gradient is [B, T, H, V].
        See `exact_attention` for the letters.
        """
        generator = torch.Generator(device).manual_seed(seed)
        randn = functools.partial(torch.randn, generator=generator, device=device)
        size = (self.batch, self.blocks.length, self.heads)
        dtype = getattr(torch, self.dtype)
        q, k, v = (randn(*size, width).to(dtype) for width in (self.widths[0], *self.widths))
        if self.normalize:
            q, k = q.abs(), k.abs()
        mixing = torch.rand(self.blocks.num_blocks, self.blocks.num_blocks, generator=generator, device=device)
        return [x.requires_grad_() for x in (q, k, v, mixing)], randn(*size, self.widths[1]).to(dtype)

    def attend(self, name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mixing: Any = None) -> Any:
        """Return the output [B, T, H, V] of the implementation `name`. See `prepare` for the inputs and the letters."""
        if name == "sdpa":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
        if name == "linear":
            return linear_attention(q, k, v, self.causal, self.normalize)
        impl = name.removeprefix("mhla ")
        return mhla(q, k, v, mixing, blocks=self.blocks, causal=self.causal, normalize=self.normalize, impl=impl)

    def errors(self, name: str, device: Device, seed: int) -> dict[str, float]:
        """Return the relative errors of the output ("output") and of the gradients ("dq", ...) for one sequence.

        Only a sample of the queries is compared, and gradients are computed from their outputs alone.
        """
        tensors, output_gradient = dataclasses.replace(self, batch=1).prepare(device, seed)
        length = self.blocks.length
        queries = torch.linspace(0, length - 1, min(NUM_SAMPLED_QUERIES, length), device=device).round().long()
        inputs = tensors if name.startswith("mhla") else tensors[:3]
        exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
        mixing = {"sdpa": None, "linear": torch.ones_like(tensors[3])}.get(name, exact_inputs[-1])
        output = self.attend(name, *inputs)[:, queries]
        q, k, v = exact_inputs[:3]
        exact_output = exact_attention(q, k, v, mixing, queries, self.blocks, self.causal, self.normalize)
        actual = output, *torch.autograd.grad(output, inputs, output_gradient[:, queries])
        expected = exact_output, *torch.autograd.grad(exact_output, exact_inputs, output_gradient[:, queries].double())
        names = ("output", "dq", "dk", "dv", "dmixing")[: len(actual)]
        return {compared: relative_error(x, y) for compared, x, y in zip(names, actual, expected, strict=True)}

    def work(self, prepared: Prepared, mode: str, name: str) -> Callable[[], Any]:
        """Return a function that runs a forward pass and, for `TRAINING`, also computes the gradients of all inputs."""
        tensors, output_gradient = prepared
        inputs = tensors if name.startswith("mhla") else tensors[:3]
        if mode == FORWARD:
            return torch.no_grad()(functools.partial(self.attend, name, *inputs))
        return lambda: torch.autograd.grad(self.attend(name, *inputs), inputs, output_gradient)


def make_quick_cases() -> list[Operator]:
    """Return the default cases: causal attention in fp32 at several lengths. They take a minute or two on a CPU."""
    return [
        Operator(
            f"{length:,} tokens", Blocks.sequence(length, BLOCK_SIZE), batch=1, heads=HEADS, widths=(WIDTH, WIDTH),
            causal=True, dtype="float32",
        )
        for length in LENGTHS
    ]  # fmt: skip


@torch.no_grad()
def count_kept_bytes(length: int) -> dict[str, int]:
    """Return the size in bytes of a causal layer's cache or state after `length` tokens in fp32, by implementation.

    "mhla" is the paper's MHLA without a denominator, and "mhla window" is the MHLA of converted language models.
    """
    k = torch.zeros(1, length, HEADS, WIDTH)
    blocks = Blocks.sequence(length, BLOCK_SIZE)
    settings = MHLASettings()
    mixing = torch.ones(blocks.num_blocks, blocks.num_blocks)
    dense: Any = mhla(k, k, k, mixing, blocks=blocks, causal=True, normalize=False, return_state=True)
    _, dense_state = dense
    form = LocalForm(settings.block_size, sinks=settings.sinks)
    window_state = LocalState.empty(k, k, settings.num_decays, 2 * WIDTH, form)  # its feature map doubles the width
    linear = k.element_size() * HEADS * WIDTH**2
    return {
        "sdpa": 2 * k.nbytes, "linear": linear, "mhla": dense_state.nbytes(), "mhla window": window_state.nbytes(),
    }  # fmt: skip


def run_bench(
    cases: Iterable[Case] | None = None, *, device: Device = "cpu", threads: int = 1, seed: int = 0, rounds: int = 5,
    out: PathLike | None = None, progress: bool = True, command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check and time the implementations of each case.

    An implementation that fails or gives wrong results does not stop the benchmark.

    Args:
        cases: The cases (default: `make_quick_cases`).
        device: Device on which to run.
        threads: Number of CPU threads during the benchmark.
        seed: Seed of the random inputs.
        rounds: Number of rounds, of which the fastest counts.
        out: JSON file, rewritten after each case, so that an interruption loses only the current one (default: none).
        progress: Whether to show a progress bar.
        command: The shell command that repeats the benchmark, for the record.

    Returns:
        A JSON-serializable dict with
            - "rows": a list of dicts with "case", "what" (the mode), "ms" (implementation -> milliseconds), "error"
              (implementation -> the largest relative error) and "failed" (implementation -> why it has no time);
            - "kept": length -> the result of `count_kept_bytes`;
            - "seed" and the results of `describe_run`.

    Raises:
        ValueError: `threads` or `device` is not valid.
        OSError: `out` cannot be written.
    """
    if threads < 1:
        raise ValueError(f"threads: got {threads!r}, expected a whole number of at least 1.")
    device = choose_device(device)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record: dict[str, Any] = {**describe_run(command, device), "seed": seed, "rows": []}
        record["kept"] = {str(length): count_kept_bytes(length) for length in LENGTHS}
        if out is not None:
            write_json(out, record)
        for case in tqdm(make_quick_cases() if cases is None else cases, desc="bench", disable=not progress):
            record["rows"] += time_case(case, device, seed, rounds)
            if out is not None:
                write_json(out, record)
    finally:
        torch.set_num_threads(threads_before)
    return record


def time_case(case: Case, device: Device, seed: int = 0, rounds: int = 5) -> list[dict[str, Any]]:
    """Check and time one case, and return one of the "rows" of `run_bench` for each mode.

    If the inputs cannot be prepared, there is a single row whose "what" is "" and whose "failed" has the key "all".
    """
    error: dict[str, float] = {}
    failed: dict[str, str] = {}
    rows = []
    with record_failure(failed, "all"):
        for name in case.competitors(device):
            with record_failure(failed, name):
                errors = case.errors(name, device, seed)
                error[name] = max(errors.values(), default=0.0)
                if wrong := [compared for compared, size in errors.items() if not size < TOLERANCES[case.dtype]]:
                    failed[name] = f"{WRONG}: {wrong[0]} with a relative error of {errors[wrong[0]]:.1e}"
        prepared = case.prepare(device, seed)
        for mode in case.modes:
            functions: dict[str, Callable[[], Any]] = {}
            ms: dict[str, float] = {}
            failed_in_mode = dict(failed)
            for name in (name for name in error if name not in failed):
                with record_failure(failed_in_mode, name):
                    function = case.work(prepared, mode, name)
                    time_call(function, device)  # warm-up
                    functions[name] = function
            for _, name in itertools.product(range(rounds), functions):
                ms[name] = min(ms.get(name, math.inf), 1e3 * time_call(functions[name], device))
            rows.append({"case": case.name, "what": mode, "ms": ms, "error": error, "failed": failed_in_mode})
    if "all" in failed:
        return [{"case": case.name, "what": "", "ms": {}, "error": error, "failed": failed}]
    return rows


@contextlib.contextmanager
def record_failure(failed: dict[str, str], name: str) -> Iterator[None]:
    """Context manager that stores the description of an exception in `failed[name]` instead of raising it."""
    try:
        yield
    except Exception as error:  # Triton's errors are not RuntimeErrors
        failed[name] = describe_failure(error)


def describe_failure(error: Exception) -> str:
    """Return a one-line description of an exception."""
    if isinstance(error, torch.OutOfMemoryError):
        return "did not fit the memory of the device"
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def time_call(function: Callable[[], Any], device: Device) -> float:
    """Return the seconds per call, averaged over repeated calls for at least `MIN_TURN_SECONDS`."""
    calls = 0
    start = clock(device)
    while calls == 0 or time.perf_counter() - start < MIN_TURN_SECONDS:
        function()
        calls += 1
    return (clock(device) - start) / calls


def render_bench(record: Mapping[str, Any]) -> str:
    """Render the result of `run_bench` as Markdown, with the fastest implementation of each kind and MHLA's speedup."""
    largest_error = max((error for row in record["rows"] for error in row["error"].values()), default=0.0)
    versions = ", ".join(f"{name} {v}" for name, v in record["versions"].items() if name in ("torch", "triton"))
    lines = [
        f"{record['hardware']}; {versions}; largest relative error found before timing: {largest_error:.0e}.",
        "",
        "| case | what | MHLA, ms | softmax, ms | plain linear, ms | times softmax | times linear |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row, kind in itertools.product(record["rows"], ("mhla", "hybrid")):
        mhla_time = find_fastest(row["ms"], kind)
        if mhla_time is None:
            continue
        baselines = [find_fastest(row["ms"], "sdpa", "softmax"), find_fastest(row["ms"], "linear")]
        ratios = [f"{baseline[0] / mhla_time[0]:.2f}" if baseline else "" for baseline in baselines]
        times = [f"{best[0]:.4g} {best[1]}".rstrip() if best else "" for best in (mhla_time, *baselines)]
        case = row["case"] if kind == "mhla" else f"{row['case']}, {kind}"
        lines.append(f"| {case} | {row['what']} | {' | '.join([*times, *ratios])} |")
    if kept := record.get("kept"):
        names = list(next(iter(kept.values())))
        lines += ["", f"| decoding keeps, KiB | {' | '.join(names)} |", "|---" + "|---:" * len(names) + "|"]
        for length, sizes in kept.items():
            cells = " | ".join(f"{sizes[name] / 1024:,.0f}" for name in names)
            lines.append(f"| after {int(length):,} tokens | {cells} |")
    failed = {f"* {row['case']}, {name}: {reason}" for row in record["rows"] for name, reason in row["failed"].items()}
    return "\n".join([*lines, *([""] if failed else []), *sorted(failed)])


def find_fastest(ms: Mapping[str, float], *kinds: str) -> tuple[float, str] | None:
    """Return the fastest implementation whose name begins with one of `kinds`.

    Args:
        ms: Implementation -> milliseconds.
        *kinds: Prefixes of names, such as "mhla".

    Returns:
        (milliseconds, the name without its first word), or None if there is no such implementation.
    """
    times = [(value, name.partition(" ")[2]) for name, value in ms.items() if name.startswith(kinds)]
    return min(times, default=None)
