"""The operator against what a user would pick instead: softmax attention, and plain linear attention in chunks.

Unusual: nothing is timed before it is shown to be right (`check_before_timing`), and the competitors take turns, round
after round in one process, the fastest round of each counting, so that a busy moment of the machine spares none of them.
Everyone gets tensors as a model has them, [B, T, H, K], and pays for any rearranging inside the time.
"""

import dataclasses
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from .files import write_json
from .ops.blocks import Blocks
from .ops.operator import mhla, mhla_step
from .ops.reference import mhla_reference
from .plots import plot_speed
from .scores.machine import describe_hardware, describe_versions, now, source_commit

FORMAT_VERSION = 1
NAMES = ("softmax", "linear", "mhla")
TRAINING, FORWARD, DECODING = "forward + backward", "forward", "decode, per token"
TARGETS = {  # (what, length, against) -> at least so many times as fast, on one CPU thread
    (TRAINING, 2048, "softmax"): 3.0,
    (TRAINING, 8192, "softmax"): 8.0,
    (TRAINING, 2048, "linear"): 1.0,
    (TRAINING, 8192, "linear"): 1.0,
}
MEMORY_TARGET = 1.05
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is timed: causal attention over `lengths` tokens, batch 1, fp32, `rounds` rounds at least."""

    lengths: tuple
    heads: int = 4
    width: int = 64
    block_size: int = 64
    rounds: int = 5
    decode_tokens: int = 64


SUITES = {
    "quick": Suite((512, 2048, 8192)),
    "full": Suite((512, 1024, 2048, 4096, 8192, 16384), rounds=7),
    "wide": Suite((512, 2048, 8192), heads=16, width=128, rounds=3),
}


def run_bench(suite="quick", *, device="cpu", threads=1, seed=0, out=None, progress=True, show=True, command=None):
    """Check, time and compare; prints the table (`render_bench`) unless `show` is False.

    Args:
        suite: "quick" (three lengths, a minute or two), "full" (six, to 16,384 tokens), "wide" (16 heads of 128), or a
            `Suite`.
        device: where. threads: CPU threads while timing; the old number is restored.
        seed: of the inputs.
        out: folder for bench.json and bench.png, made if missing; None writes nothing. The figure needs matplotlib.
        progress: show a bar on stderr.

    Returns:
        A dict that goes to JSON as it is: "rows" (what, length, <name>_ms), "ratios" (how many times as fast MHLA is),
        "memory" (bytes kept for the backward pass), "checks" (errors found before timing), and versions, hardware,
        commit, seed, command, date.

    Raises:
        ValueError: unknown suite, threads below 1, a device that torch cannot use, out is no folder one can write to.
        RuntimeError: a result was wrong; then no speed is reported.
    """
    shape = check_arguments(suite, device, threads, out)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        record = {
            "format_version": FORMAT_VERSION,
            "suite": suite if isinstance(suite, str) else "own",
            "settings": {
                **dataclasses.asdict(shape),
                "batch": 1,
                "dtype": "float32",
                "causal": True,
                "normalize": False,
            },
            "date": now(),
            "versions": describe_versions(),
            "hardware": describe_hardware(device),
            "commit": source_commit(),
            "seed": seed,
            "command": command,
        }
        record["checks"] = check_before_timing(shape, device, seed)
        record["rows"] = time_by_turns(shape, device, seed, progress)
        record["memory"] = [saved_bytes(shape, length, device, seed) for length in shape.lengths]
    finally:
        torch.set_num_threads(before)
    record["ratios"] = compare(record["rows"])
    if show:
        print(render_bench(record))
    if out is not None:
        write_json(Path(out) / "bench.json", record)
        what = f"causal attention, {shape.heads} heads of {shape.width}, blocks of {shape.block_size}, fp32"
        plot_speed(Path(out) / "bench.png", record["rows"], f"{what}; {record['hardware']}")
    return record


def check_arguments(suite, device, threads, out):
    """The Suite meant; ValueError in one sentence before anything is timed. Makes the folder `out`."""
    if not isinstance(suite, Suite) and suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; expected one of {', '.join(SUITES)}.")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ValueError(f"threads is {threads!r}; expected an integer of at least 1.")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}; expected one that torch can use here.") from error
    if out is not None:
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out is {str(out)!r}; expected a folder that can be made ({error.strerror}).") from error
        if not os.access(out, os.W_OK | os.X_OK):
            raise ValueError(f"out is {str(out)!r}; expected a folder that can be written to.")
    return suite if isinstance(suite, Suite) else SUITES[suite]


def softmax_attention(q, k, v, mixing, size):
    """torch's fused attention, causal."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def linear_attention(q, k, v, mixing, size):
    """Plain causal linear attention in its usual fast form: chunks, and a running sum over their summaries."""
    length = q.shape[1]
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    summary = k.mT @ v
    o = q @ (summary.cumsum(2) - summary) + (q @ k.mT).tril() @ v
    return (o * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :length].transpose(1, 2)


def mhla_attention(q, k, v, mixing, size):
    """The operator, un-normalised as in the paper's language models."""
    return mhla(q, k, v, mixing, blocks=Blocks.sequence(q.shape[1], size), causal=True, normalize=False)


ATTENTION = {"softmax": softmax_attention, "linear": linear_attention, "mhla": mhla_attention}


def make_inputs(shape, length, device, seed, dtype=torch.float32):
    """q, k, v [1, T, H, K] and mixing [M, M], with gradients, and dL/do; the same numbers on every device."""
    random = torch.Generator().manual_seed(seed)
    size = (1, length, shape.heads, shape.width)
    count = Blocks.sequence(length, shape.block_size).num_blocks
    tensors = [torch.randn(size, generator=random) for _ in range(3)] + [torch.rand(count, count, generator=random)]
    direction = torch.randn(size, generator=random).to(device, dtype)
    return [x.to(device, dtype).requires_grad_() for x in tensors], direction


def check_before_timing(shape, device, seed):
    """Relative errors of what will be timed; RuntimeError if one is not below 1e-5.

    MHLA against its T x T definition in fp64, output and every gradient, on a length that ends inside a block; at every
    timed length its last block against the definition; decoding against the forward pass; plain linear attention against
    MHLA with uniform mixing, which it is.
    """
    checks = {}
    length = 3 * shape.block_size + 5
    inputs, direction = make_inputs(shape, length, device, seed)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    blocks = Blocks.sequence(length, shape.block_size)
    expected = mhla_reference(*exact, blocks=blocks, causal=True, normalize=False)
    got = ATTENTION["mhla"](*inputs, shape.block_size)
    checks[f"output, {length:,} tokens"] = relative_error(got, expected)
    for name, mine, true in zip(
        ("q", "k", "v", "mixing"),
        torch.autograd.grad(got, inputs, direction),
        torch.autograd.grad(expected, exact, direction.double()),
        strict=True,
    ):
        checks[f"gradient of {name}, {length:,} tokens"] = relative_error(mine, true)
    uniform = ATTENTION["mhla"](*inputs[:3], torch.ones_like(inputs[3]), shape.block_size)
    checks["plain linear against uniform mixing"] = relative_error(
        ATTENTION["linear"](*inputs, shape.block_size), uniform
    )
    with torch.no_grad():
        for length in shape.lengths:
            inputs, _ = make_inputs(shape, length, device, seed)
            last = (length - 1) // shape.block_size * shape.block_size
            got = ATTENTION["mhla"](*inputs, shape.block_size)[:, last:]
            checks[f"last block of {length:,} tokens"] = relative_error(
                got, last_block(*inputs, last, shape.block_size)
            )
            decoder = Decoder("mhla", shape, inputs)
            first = decoder.step()
            checks[f"decoding after {length:,} tokens"] = relative_error(first, decoder.expected_first())
    for name, error in checks.items():
        if not error < TOLERANCE:
            raise RuntimeError(
                f"{name}: relative error {error:.1e}; expected below {TOLERANCE:.0e}, so no speed is reported."
            )
    return checks


def last_block(q, k, v, mixing, first, size):
    """The outputs of the tokens from `first` on, the last block's, by the definition, in fp64."""
    block = torch.arange(k.shape[1], device=k.device) // size
    earlier = torch.arange(k.shape[1], device=k.device) <= torch.arange(first, k.shape[1], device=k.device)[:, None]
    weight = torch.einsum("bthk,bshk->bhts", q[:, first:].double(), k.double()) * q.shape[-1] ** -0.5
    weight = weight * mixing.double()[block[-1], block] * earlier
    return torch.einsum("bhts,bshv->bthv", weight, v.double())


def relative_error(got, expected):
    """Frobenius distance over the size of what is expected."""
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).norm() / expected.norm())


class Decoder:
    """One competitor in the middle of a text: what it remembers of T tokens, and the step for one more.

    softmax reads a cache of keys and values that has room to grow; plain linear attention adds to one summary; MHLA
    continues its state. Every step gets the same token.
    """

    def __init__(self, name, shape, inputs):
        q, k, v, mixing = (x.detach() for x in inputs)
        self.name, self.length, self.token = name, q.shape[1], (q[:, -1:], k[:, -1:], v[:, -1:])
        self.inputs, self.block_size, self.scale = (q, k, v), shape.block_size, q.shape[-1] ** -0.5
        room = shape.decode_tokens + 1
        if name == "softmax":
            self.cache = [F.pad(x.transpose(1, 2), (0, 0, 0, room)) for x in (k, v)]
        elif name == "linear":
            self.summary = torch.einsum("bthk,bthv->bhkv", k, v)
        else:
            blocks = Blocks.sequence(self.length, shape.block_size)
            more = Blocks.sequence(self.length + room, shape.block_size).num_blocks - blocks.num_blocks
            self.mixing = F.pad(mixing, (0, more, 0, more), value=0.5)
            _, self.state = mhla(q, k, v, self.mixing, blocks=blocks, causal=True, normalize=False, return_state=True)

    def step(self):
        """The output of the next token, [1, 1, H, V]."""
        q, k, v = self.token
        if self.name == "mhla":
            return mhla_step(q, k, v, self.mixing, self.state, normalize=False)[0]
        if self.name == "linear":
            self.summary = self.summary + k.transpose(1, 2).mT @ v.transpose(1, 2)
            return (q.transpose(1, 2) @ self.summary * self.scale).transpose(1, 2)
        for cached, new in zip(self.cache, (k, v), strict=True):
            cached[:, :, self.length : self.length + 1] = new.transpose(1, 2)
        self.length += 1
        keys, values = (cached[:, :, : self.length] for cached in self.cache)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2)

    def expected_first(self):
        """What MHLA's first step must give, by the definition."""
        q, k, v = (torch.cat([x, new], 1) for x, new in zip(self.inputs, self.token, strict=True))
        return last_block(q, k, v, self.mixing, self.length, self.block_size)


def time_by_turns(shape, device, seed, progress):
    """Rows of milliseconds: what, length, <name>_ms."""
    best = {}
    bar = tqdm(total=len(shape.lengths) * (shape.rounds + 1) * len(NAMES), desc="bench", disable=not progress)
    with bar:
        for length in shape.lengths:
            inputs, direction = make_inputs(shape, length, device, seed)
            for turn in range(shape.rounds + 1):  # the first only warms up
                for name in NAMES:
                    for what, seconds in time_once(name, shape, inputs, direction).items():
                        if turn > 0:
                            best[what, length, name] = min(best.get((what, length, name), seconds), seconds)
                    bar.update()
                    bar.set_postfix(tokens=length, refresh=False)
    return [
        {"what": what, "length": length, **{f"{name}_ms": 1e3 * best[what, length, name] for name in NAMES}}
        for what in (TRAINING, FORWARD, DECODING)
        for length in shape.lengths
    ]


def time_once(name, shape, inputs, direction):
    """Seconds of one training step, one forward pass without gradients, and one of `decode_tokens` decoded tokens."""
    attention = ATTENTION[name]
    start = clock(direction)
    used = inputs if name == "mhla" else inputs[:3]
    torch.autograd.grad(attention(*inputs, shape.block_size), used, direction)
    trained = clock(direction)
    with torch.no_grad():
        middle = clock(direction)
        attention(*inputs, shape.block_size)
        done = clock(direction)
        decoder = Decoder(name, shape, inputs)
        decoding = clock(direction)
        for _ in range(shape.decode_tokens):
            decoder.step()
        decoded = clock(direction)
    return {
        TRAINING: trained - start,
        FORWARD: done - middle,
        DECODING: (decoded - decoding) / shape.decode_tokens,
    }


def clock(tensor):
    """Seconds, once the tensor's device has finished what it was given."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()


def saved_bytes(shape, length, device, seed):
    """Bytes that each competitor's forward pass keeps for its backward pass, counting every storage once."""
    inputs, _ = make_inputs(shape, length, device, seed)
    row = {"length": length}
    for name, attention in ATTENTION.items():
        kept = {}

        def pack(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attention(*inputs, shape.block_size)
        row[f"{name}_bytes"] = sum(kept.values())
    return row


def compare(rows):
    """How many times as fast as softmax and plain linear attention MHLA is; with the target where there is one."""
    ratios = []
    for row in rows:
        for against in ("softmax", "linear"):
            target = TARGETS.get((row["what"], row["length"], against))
            ratio = row[f"{against}_ms"] / row["mhla_ms"]
            ratios.append(
                {"what": row["what"], "length": row["length"], "against": against, "ratio": ratio, "target": target}
            )
    return ratios


def render_bench(record):
    """The record as a table for the terminal."""
    settings = record["settings"]
    ratios = {(r["what"], r["length"], r["against"]): r for r in record["ratios"]}
    lines = [
        f"Causal attention, {settings['heads']} heads of {settings['width']}, blocks of {settings['block_size']}, "
        f"fp32, batch 1, [B, T, H, K] inputs; {record['hardware']}; torch {record['versions']['torch']}",
        f"Right before fast: largest relative error of {len(record['checks'])} checks {max(record['checks'].values()):.0e}",
        "",
        f"{'':20}{'tokens':>8}{'softmax ms':>12}{'linear ms':>12}{'MHLA ms':>12}{'vs softmax':>14}{'vs linear':>14}",
    ]
    for row in record["rows"]:
        cells = [f"{row['what']:20}{row['length']:>8,}"] + [f"{row[f'{name}_ms']:>12.3f}" for name in NAMES]
        for against in ("softmax", "linear"):
            cells.append(f"{times(ratios[row['what'], row['length'], against]):>14}")
        lines.append("".join(cells))
    for row in record["memory"]:
        share = row["mhla_bytes"] / row["softmax_bytes"]
        cells = [f"{row[f'{name}_bytes'] / 2**20:>12.2f}" for name in NAMES]
        lines.append(f"{'kept, MiB':20}{row['length']:>8,}{''.join(cells)}{f'{share:.2f} of it':>14}")
    lines.append("")
    lines.append(
        f"In brackets the target (!: missed). Kept: for the backward pass, target at most {MEMORY_TARGET} of softmax's."
    )
    return "\n".join(lines)


def times(ratio):
    """A ratio as text, with its target and a mark where it is missed: 6.1x, 6.1x (>=3), 0.4x (>=1)!"""
    text = f"{ratio['ratio']:.1f}x" if ratio["ratio"] < 100 else f"{ratio['ratio']:.0f}x"
    if ratio["target"] is None:
        return text
    return f"{text} (>={ratio['target']:g})" + ("" if ratio["ratio"] >= ratio["target"] else "!")
