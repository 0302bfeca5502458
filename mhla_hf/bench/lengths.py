"""The operator against what a user would pick instead: softmax attention, and plain linear attention in chunks.

Unusual: nothing is timed before it is shown to be right (`check_before_timing`), and the competitors take turns, round
after round in one process, the fastest round of each counting, so that a busy moment of the machine spares none of them.
Everyone gets tensors as a model has them, [B, T, H, K], and pays for any rearranging inside the time.
"""

import dataclasses
import functools
import itertools
import time

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..ops.api import mhla, mhla_step
from ..ops.blocks import Blocks
from ..ops.reference import mhla_reference
from ..plots import plot_speed
from .checks import TOLERANCES, errors_against, refuse_wrong, relative_error, rows_of_definition, rows_of_softmax
from .competitors import chosen_backend, copy_of, floor_bytes, softmax_backends

NAMES, MIXED = ("softmax", "linear", "mhla"), ("linear", "mhla")
TRAINING, FORWARD, DECODING = "forward + backward", "forward", "decode, per token"
TARGETS = {  # (what, length, against) -> at least so many times as fast, on one CPU thread
    (TRAINING, 2048, "softmax"): 3.0,
    (TRAINING, 8192, "softmax"): 8.0,
    (TRAINING, 2048, "linear"): 1.0,
    (TRAINING, 8192, "linear"): 1.0,
}
MEMORY_TARGET = 1.05
PLAIN = {"causal": True, "normalize": False}
SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclasses.dataclass(frozen=True)
class Suite:
    """What is timed: causal attention over `lengths` tokens, batch 1, `rounds` rounds at least. Softmax is the backend that
    torch chooses; its others are timed, too, and a copy of as many bytes as must move at least.

    what: of TRAINING, FORWARD and DECODING. dtype: of all tensors but the mixing.
    """

    lengths: tuple
    heads: int = 4
    width: int = 64
    block_size: int = 64
    rounds: int = 5
    decode_tokens: int = 64
    what: tuple = (TRAINING, FORWARD, DECODING)
    dtype: str = "float32"

    def blocks(self, length):
        """How so many tokens are cut."""
        return Blocks.sequence(length, self.block_size)

    def settings(self):
        """What the record says of the suite."""
        return {**dataclasses.asdict(self), "batch": 1, "causal": True, "normalize": False}

    def floors(self, length):
        """what -> `floor_bytes`."""
        moved = floor_bytes(length * self.heads, (self.width, self.width), self.dtype)
        return dict(zip((FORWARD, TRAINING), moved, strict=True))

    def measure(self, device, seed, progress):
        """The parts of the record that are measured; `run_bench` says what they are."""
        measured = {"checks": check_before_timing(self, device, seed)}
        inputs, _ = make_inputs(self, max(self.lengths), device, seed)
        measured["softmax"] = chosen_backend(*inputs[:3])
        measured["rows"] = time_by_turns(self, device, seed, progress)
        kept = self.lengths if TRAINING in self.what else ()
        measured["memory"] = [saved_bytes(self, length, device, seed) for length in kept]
        measured["ratios"] = compare(measured["rows"])
        return measured

    def plot(self, path, record):
        """bench.png: times by length."""
        what = f"causal attention, {self.heads} heads of {self.width}, blocks of {self.block_size}"
        plot_speed(path, record["rows"], f"{what}, {SHORT[self.dtype]}; {record['hardware']}")


LENGTH_SUITES = {
    "quick": Suite((512, 2048, 8192)),
    "full": Suite((512, 1024, 2048, 4096, 8192, 16384), rounds=7),
    "wide": Suite((512, 2048, 8192), heads=16, width=128, rounds=3),
}


def softmax_attention(q, k, v, mixing, blocks):
    """torch's fused attention, causal, by the backend that torch chooses."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def linear_attention(q, k, v, mixing, blocks):
    """Plain causal linear attention in its usual fast form: chunks, and a running sum over their summaries."""
    length, size = q.shape[1], blocks.block_size
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, -length % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    summary = k.mT @ v
    o = q @ (summary.cumsum(2) - summary) + (q @ k.mT).tril() @ v
    return (o * q.shape[-1] ** -0.5).flatten(2, 3)[:, :, :length].transpose(1, 2)


def mhla_attention(q, k, v, mixing, blocks):
    """The operator, un-normalised as in the paper's language models."""
    return mhla(q, k, v, mixing, blocks=blocks, **PLAIN)


ATTENTION = {"softmax": softmax_attention, "linear": linear_attention, "mhla": mhla_attention}


def other_backends(q, k, v, mixing):
    """name -> softmax attention by each backend that takes tensors like these and that torch does not choose."""
    chosen = chosen_backend(q, k, v)
    return {
        name: lambda q, k, v, mixing, blocks, by=attention: by(q, k, v)
        for name, attention in softmax_backends(q, k, v, True).items()
        if name != chosen
    }


def make_inputs(shape, length, device, seed):
    """q, k, v [1, T, H, K] and mixing fp32 [M, M], with gradients, and dL/do; the same numbers on every device."""
    random = torch.Generator().manual_seed(seed)
    size, dtype = (1, length, shape.heads, shape.width), getattr(torch, shape.dtype)
    count = shape.blocks(length).num_blocks
    tensors = [torch.randn(size, generator=random).to(device, dtype) for _ in range(3)]
    tensors.append(torch.rand(count, count, generator=random).to(device))
    direction = torch.randn(size, generator=random).to(device, dtype)
    return [x.requires_grad_() for x in tensors], direction


def check_before_timing(shape, device, seed):
    """Relative errors of what will be timed; RuntimeError if one is not below the dtype's bound (fp32 1e-5).

    All against their T x T definitions in fp64, output and every gradient, on a length that ends inside a block (plain
    linear attention is MHLA with uniform mixing); at every timed length MHLA's last block against the definition, and every
    decoder's first token against its own.
    """
    checks = check_definition(shape, device, seed)
    with torch.no_grad():
        for length in shape.lengths:
            inputs, _ = make_inputs(shape, length, device, seed)
            blocks = shape.blocks(length)
            last = (length - 1) // blocks.block_size * blocks.block_size
            if FORWARD in shape.what:
                got = ATTENTION["mhla"](*inputs, blocks)[:, last:]
                expected = rows_of_definition(
                    *inputs, torch.arange(last, length, device=device), blocks=blocks, **PLAIN
                )
                checks[f"last block of {length:,} tokens"] = relative_error(got, expected)
            if DECODING in shape.what:
                for name in NAMES:
                    decoder = Decoder(name, shape, inputs)
                    first = decoder.step()
                    checks[f"{name} decoding after {length:,} tokens"] = relative_error(first, decoder.expected_first())
    refuse_wrong(checks, TOLERANCES[shape.dtype])
    return checks


def check_definition(shape, device, seed):
    """The part of `check_before_timing` that needs the whole T x T definition."""
    length = 3 * shape.block_size + 5
    inputs, direction = make_inputs(shape, length, device, seed)
    blocks, uniform = shape.blocks(length), torch.ones_like(inputs[3])

    def by_softmax(q, k, v):
        return rows_of_softmax(q, k, v, torch.arange(length, device=device), True)

    def by_mixing(q, k, v, mixing=uniform):
        return mhla_reference(q, k, v, mixing.to(q.dtype), blocks=blocks, **PLAIN)

    def attend(form, q, k, v, mixing=uniform):
        return form(q, k, v, mixing, blocks)

    checks = {}
    for name, attention in {**ATTENTION, **other_backends(*inputs)}.items():
        tensors, definition = inputs if name == "mhla" else inputs[:3], by_mixing if name in MIXED else by_softmax
        errors = errors_against(definition, functools.partial(attend, attention), tensors, direction)
        checks |= {f"{name}, {what} of {length:,} tokens": error for what, error in errors.items()}
    return checks


class Decoder:
    """One competitor in the middle of a text: what it remembers of T tokens, and the step for one more.

    softmax reads a cache of keys and values that has room to grow; plain linear attention adds to one summary; MHLA
    continues its state. Every step gets the same token.
    """

    def __init__(self, name, shape, inputs):
        q, k, v, mixing = (x.detach() for x in inputs)
        self.name, self.length, self.token = name, q.shape[1], (q[:, -1:], k[:, -1:], v[:, -1:])
        self.inputs, self.scale = (q, k, v), q.shape[-1] ** -0.5
        room, blocks = shape.decode_tokens + 1, shape.blocks(self.length)
        self.block_size = blocks.block_size
        more = Blocks.sequence(self.length + room, self.block_size).num_blocks - blocks.num_blocks
        self.mixing = F.pad(mixing, (0, more, 0, more), value=0.5)
        if name == "softmax":
            self.cache = [F.pad(x.transpose(1, 2), (0, 0, 0, room)) for x in (k, v)]
        elif name == "linear":
            self.summary = torch.einsum("bthk,bthv->bhkv", k.float(), v.float())
        else:
            _, self.state = mhla(q, k, v, self.mixing, blocks=blocks, return_state=True, **PLAIN)

    def step(self):
        """The output of the next token, [1, 1, H, V]."""
        q, k, v = self.token
        if self.name == "mhla":
            return mhla_step(q, k, v, self.mixing, self.state, normalize=False)[0]
        if self.name == "linear":
            q, k, v = (x.float() for x in (q, k, v))
            self.summary = self.summary + k.transpose(1, 2).mT @ v.transpose(1, 2)
            return (q.transpose(1, 2) @ self.summary * self.scale).transpose(1, 2).to(self.token[0].dtype)
        for cached, new in zip(self.cache, (k, v), strict=True):
            cached[:, :, self.length : self.length + 1] = new.transpose(1, 2)
        self.length += 1
        keys, values = (cached[:, :, : self.length] for cached in self.cache)
        return F.scaled_dot_product_attention(q.transpose(1, 2), keys, values).transpose(1, 2)

    def expected_first(self):
        """What the first step must give, by the definition, in fp64."""
        q, k, v = (torch.cat([x, new], 1) for x, new in zip(self.inputs, self.token, strict=True))
        last = torch.tensor([q.shape[1] - 1], device=q.device)
        if self.name == "softmax":
            return rows_of_softmax(q, k, v, last, True)
        mixing = self.mixing if self.name == "mhla" else torch.ones_like(self.mixing)
        return rows_of_definition(q, k, v, mixing, last, blocks=Blocks.sequence(q.shape[1], self.block_size), **PLAIN)


def time_by_turns(shape, device, seed, progress):
    """Rows of milliseconds: what, length, <name>_ms, and others_ms: {name: milliseconds}, none of which decodes."""
    best, rows = {}, []
    with tqdm(total=len(shape.lengths) * (shape.rounds + 1), desc="bench", disable=not progress) as bar:
        for length in shape.lengths:
            inputs, direction = make_inputs(shape, length, device, seed)
            attentions = {**ATTENTION, **other_backends(*inputs)}
            floors = {what: moved for what, moved in shape.floors(length).items() if what in shape.what}
            for turn in range(shape.rounds + 1):  # the first only warms up
                times = {"copy": {what: time_copy(moved, direction) for what, moved in floors.items()}}
                for name, attention in attentions.items():
                    times[name] = time_once(name, attention, shape, inputs, direction)
                for name, found in times.items() if turn > 0 else ():
                    for what, seconds in found.items():
                        best[what, length, name] = min(best.get((what, length, name), seconds), seconds)
                bar.update()
                bar.set_postfix(tokens=length, refresh=False)
    for what, length in itertools.product(shape.what, shape.lengths):
        found = {name: 1e3 * seconds for (*row, name), seconds in best.items() if row == [what, length]}
        own = {f"{name}_ms": found.pop(name) for name in NAMES}
        rows.append({"what": what, "length": length, **own, "others_ms": found})
    return rows


def time_copy(moved, like):
    """Seconds of copying half as many bytes, which reads one half and writes the other."""
    copy = copy_of(moved, like.device)
    copy()  # what is written is there before
    start = clock(like)
    copy()
    return clock(like) - start


def time_once(name, attention, shape, inputs, direction):
    """Seconds of one training step, one forward pass without gradients, and one of `decode_tokens` decoded tokens."""
    blocks, seconds = shape.blocks(direction.shape[1]), {}
    if TRAINING in shape.what:
        start = clock(direction)
        used = inputs if name == "mhla" else inputs[:3]
        torch.autograd.grad(attention(*inputs, blocks), used, direction)
        seconds[TRAINING] = clock(direction) - start
    with torch.no_grad():
        if FORWARD in shape.what:
            start = clock(direction)
            attention(*inputs, blocks)
            seconds[FORWARD] = clock(direction) - start
        if DECODING in shape.what and name in NAMES:
            decoder = Decoder(name, shape, inputs)
            decoder.step()  # the first makes room in the state
            start = clock(direction)
            for _ in range(shape.decode_tokens):
                decoder.step()
            seconds[DECODING] = (clock(direction) - start) / shape.decode_tokens
    return seconds


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
            attention(*inputs, shape.blocks(length))
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


def render_lengths(record):
    """The record as a table for the terminal."""
    settings = record["settings"]
    ratios = {(r["what"], r["length"], r["against"]): r for r in record["ratios"]}
    others = list(dict.fromkeys(name for row in record["rows"] for name in row["others_ms"]))
    lines = [
        f"Causal attention, {settings['heads']} heads of {settings['width']}, blocks of {settings['block_size']}, "
        f"{SHORT[settings['dtype']]}, batch 1, [B, T, H, K] inputs; {record['hardware']}; "
        f"torch {record['versions']['torch']}; softmax: {record['softmax']}",
        f"Right before fast: largest relative error of {len(record['checks'])} checks {max(record['checks'].values()):.0e}",
        "",
        f"{'':20}{'tokens':>8}{'softmax ms':>12}{'linear ms':>12}{'MHLA ms':>12}{'vs softmax':>14}{'vs linear':>14}"
        + "".join(f"{f'{name} ms':>14}" for name in others),
    ]
    for row in record["rows"]:
        cells = [f"{row['what']:20}{row['length']:>8,}"] + [f"{row[f'{name}_ms']:>12.3f}" for name in NAMES]
        for against in ("softmax", "linear"):
            cells.append(f"{times(ratios[row['what'], row['length'], against]):>14}")
        cells += [f"{row['others_ms'][name]:>14.3f}" if name in row["others_ms"] else f"{'-':>14}" for name in others]
        lines.append("".join(cells))
    for row in record["memory"]:
        share = row["mhla_bytes"] / row["softmax_bytes"]
        cells = [f"{row[f'{name}_bytes'] / 2**20:>12.2f}" for name in NAMES]
        lines.append(f"{'kept, MiB':20}{row['length']:>8,}{''.join(cells)}{f'{share:.2f} of it':>14}")
    if not record["memory"]:
        return "\n".join(lines)
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
