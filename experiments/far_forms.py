"""Compare variants of the far part in single layers of a real language model.

The softmax model runs once over rows of TEXT, and q, k, v, and the attention outputs of some layers are stored. Then,
for each variant, a layer alone learns the softmax outputs, with far features of q and k before RoPE. It is evaluated
on held-out rows, by position: the sum of squared errors over the sum of squares. The sixth of the KV heads that copies
most is left out, because a conversion would leave these heads softmax. A row of the JSON file is a variant in a layer,
and existing rows are kept.
"""

import argparse
import functools
import json
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from .far_part import KV_BYTES, FarForm, FarPart, rotate
from .heads import read_text
from .rows import Row, add_rows

LAYERS = (7, 9, 14, 23)
KEPT_FRACTION = 6  # one KV head in so many keeps softmax
POSITIONS = {  # for each kind of held-out rows, first and last token (exclusive) of what is averaged
    "short": {"to 1k": (0, 1024)},
    "long": {"1k to 2k": (1024, 2048), "2k to 4k": (2048, 4096)},
    "other": {"other 1k to 2k": (1024, 2048), "other 2k to 4k": (2048, 4096), "other 4k to 8k": (4096, 8192)},
}

LayerRow = tuple[torch.Tensor, ...]  # q, k, v, q and k before RoPE, and the softmax output of a row
LayerRows = dict[str, list[LayerRow]]  # by kind


def read_ids(tokenizer: Any, path: str | Path) -> torch.Tensor:
    """Return the token ids of a text, as `read_text` reads it: int64 [N]."""
    return tokenizer(read_text(path), return_tensors="pt").input_ids[0]


def choose_rows(ids: torch.Tensor, other: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Cut texts into rows.

    Args:
        ids: Token ids of the text to learn from, [N].
        other: Token ids of another text, or None.

    Returns:
        Rows of ids, [rows, T] each: "fit" and "fit long" to learn from, and "short", "long", and "other" to evaluate
        on.
    """
    rows = {"fit": ids[: 24 * 1024].view(24, 1024), "short": ids[-3 * 1024 :].view(3, 1024)}
    rows["fit long"] = ids[24 * 1024 : 36 * 1024].view(3, 4096)
    rows["long"] = ids[-11 * 1024 : -3 * 1024].view(2, 4096)
    if other is not None:
        rows["other"] = other[60_000 : 60_000 + 8192][None]
    return rows


@torch.no_grad()
def store_layers(model_folder: str, text: str, other: str | None, layers: Sequence[int], folder: Path) -> None:
    """Run the softmax model, and write what the attention of its layers reads and returns.

    Each layer gets a file in `folder`, with rotated q and k, v, and the outputs of every row, and a mask of the KV
    heads that keep softmax. `copying.json` has the scores of all heads.

    Args:
        model_folder: Folder of the softmax model.
        text, other: Text files; see `choose_rows`.
        layers: Indices of the layers.
        folder: Where the files are written.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
    rows = choose_rows(read_ids(tokenizer, text), None if other is None else read_ids(tokenizer, other))
    attention: dict[int, LayerRow] = {}  # q, k, v, and outputs of each layer in the last forward pass

    def attend(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)
        attention[module.layer_idx] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), o
        return o, None

    AttentionInterface.register("keep", attend)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=torch.float32, attn_implementation="keep", trust_remote_code=False
    ).model.eval()
    half = rows["short"][:1, :512]
    model(torch.cat([half, half], 1), use_cache=False)
    scores = torch.stack([copy_score(q, k, 512) for _, (q, k, _, _) in sorted(attention.items())])  # [layers, G]
    kept_heads = scores >= scores.flatten().sort(descending=True).values[scores.numel() // KEPT_FRACTION - 1]
    stored: dict[int, dict[str, list[list[torch.Tensor]]]] = {index: {} for index in layers}
    model.layers = model.layers[: max(layers) + 1]
    for kind, group in rows.items():
        for ids in group:
            model(ids[None], use_cache=False)
            for index in layers:
                stored[index].setdefault(kind, []).append([x.clone() for x in attention[index]])
        print(f"stored the {kind} rows", flush=True)
    cos, sin = model.rotary_emb(half.float(), torch.arange(8192)[None])
    for index, kinds in stored.items():
        content = {"rows": kinds, "kept": kept_heads[index], "cos": cos[0], "sin": sin[0]}
        torch.save(content, folder / f"{index}.pt")
    (folder / "copying.json").write_text(json.dumps([[round(float(x), 3) for x in heads] for heads in scores]))


def copy_score(q: torch.Tensor, k: torch.Tensor, half: int) -> torch.Tensor:
    """Return how much of its attention each KV head spends on copying, [G].

    On a row whose second half repeats the first, this is the attention that a token of the second half pays to the
    token after its first occurrence, which is the token to predict.

    Args:
        q: [1, 2 * half, H, K]
        k: [1, 2 * half, G, K]
        half: Tokens in half of the row.
    """
    q, k = q[0, half:].transpose(0, 1), k[0].transpose(0, 1)  # [H, half, K] and [G, 2 * half, K]
    group_size = len(q) // len(k)
    score = q @ k.repeat_interleave(group_size, 0).mT * q.shape[-1] ** -0.5
    is_later = torch.arange(k.shape[1]) > torch.arange(half, 2 * half)[:, None]
    mass = score.masked_fill(is_later, float("-inf")).softmax(-1).diagonal(1, 1, 2)
    return mass.mean(-1).view(-1, group_size).amax(-1)


WINDOWS = {f"window alone, {lag} blocks": FarForm(features=None, lag=lag) for lag in (2, 3, 4, 5, 6, 8, 10, 13, 16, 24)}
EXP: dict[str, Any] = {"features": "exp", "scale": 0.35, "center": True}
FORMS = {
    "base": FarForm(),
    "no count power": FarForm(power=None),
    "no count power, balance -2": FarForm(power=None, balance=-2.0),
    "no count power, mixed rows": FarForm(power=None, rows="mixed", steps=37),
    "power from 0": FarForm(power=0.0),
    "power from 0, mixed rows": FarForm(power=0.0, rows="mixed", steps=37),
    "power from 1": FarForm(power=1.0),
    "faster": FarForm(lr_factor=5.0),
    "faster, 2 decays apart": FarForm(lr_factor=5.0, rates=(1.0, 0.8), weights=(0.5, 0.5)),
    "24 rows x 3 updates, faster": FarForm(steps=24, updates=3, lr_factor=5.0),
    "mixed rows": FarForm(rows="mixed", steps=37),
    "24 rows x 3 updates": FarForm(steps=24, updates=3),
    "gates of q and k": FarForm(gates="qk"),
    "plain sum": FarForm((1.0,)),
    "one softmax": FarForm(features="one"),
    "half width": FarForm(width=32),
    "half width, 5 blocks": FarForm(width=32, lag=5),
    "plain sum, half width": FarForm((1.0,), width=32),
    "plain sum, half width, 6 blocks": FarForm((1.0,), width=32, lag=6),
    "plain sum, half width, 3 blocks": FarForm((1.0,), width=32, lag=3),
    "plain sum, 4 blocks": FarForm((1.0,), lag=4),
    "plain sum, one softmax, 6 blocks": FarForm((1.0,), features="one", lag=6),
    "one softmax, 5 blocks": FarForm(features="one", lag=5),
    "plain sum, one softmax, 6 blocks, mixed rows": FarForm((1.0,), features="one", lag=6, rows="mixed", steps=37),
    "plain sum, one softmax, 6 blocks, gates": FarForm((1.0,), features="one", lag=6, gates="qk"),
    "1 free decay, exp, 6 blocks, mixed rows": FarForm((0.98,), lr_factor=5.0, rows="mixed", steps=37, lag=6, **EXP),
    "1 free decay, exp, 6 blocks": FarForm((0.98,), lr_factor=5.0, lag=6, **EXP),
    "plain sum, exp, half width, 7 blocks, mixed rows": FarForm((1.0,), rows="mixed", steps=37, lag=7, width=32, **EXP),
    "plain sum, one softmax, half width, 7 blocks": FarForm((1.0,), features="one", width=32, lag=7),
    "plain sum, quarter width, 7 blocks": FarForm((1.0,), width=16, lag=7),
    "rotated": FarForm(inputs="rotated"),
    "4 decays apart, faster": FarForm(rates=(1.0, 0.95, 0.8, 0.4), weights=(0.25,) * 4, lr_factor=5.0),
    "block 32, lag 4": FarForm(block_size=32, lag=4),
    "block 128, lag 1": FarForm(block_size=128, lag=1),
    "8 rows x 8 updates": FarForm(steps=8, updates=8),
    "centered": FarForm(center=True),
    "lr 1e-1": FarForm(lr=1e-1),
    "1 free decay": FarForm(rates=(0.98,), lr_factor=5.0),
    "W x 2": FarForm(scale=2.0),
    "lr 1e-2": FarForm(lr=1e-2),
    "loss per head": FarForm(loss="per head"),
    "no sinks": FarForm(sinks=0),
    "16 sinks": FarForm(sinks=16),
    "elu": FarForm(features="elu"),
    "exp": FarForm(**EXP),
    "W x 0.35": FarForm(scale=0.35),
    "loss cosine": FarForm(loss="cosine"),
    "rows of 4k": FarForm(rows="long", steps=15),
}


@functools.cache
def load_layer(folder: str, index: int) -> LayerRows:
    """Load the rows of one layer, without the KV heads that keep softmax."""
    stored = torch.load(Path(folder) / f"{index}.pt", mmap=True)
    kv_heads = (~stored["kept"]).nonzero()[:, 0]
    num_kv_heads = len(stored["kept"])
    cos, sin = stored["cos"], stored["sin"]
    rows: LayerRows = {kind: [] for kind in stored["rows"]}
    for kind, group in stored["rows"].items():
        for q, k, v, o in group:
            q, o = (x.unflatten(2, (num_kv_heads, -1))[:, :, kv_heads].flatten(2, 3) for x in (q, o))
            k, v = k[:, :, kv_heads], v[:, :, kv_heads]
            unrotated_q, unrotated_k = rotate(q, cos, sin, inverse=True), rotate(k, cos, sin, inverse=True)
            rows[kind].append((q, k, v, unrotated_q, unrotated_k, o))
    return rows


def training_rows(rows: LayerRows, kind: str) -> list[LayerRow]:
    """Return the rows to learn from, in order; `kind` is that of `FarForm.rows`."""
    if kind == "short":
        return rows["fit"]
    if kind == "mixed":
        return [row for i in range(3) for row in (*rows["fit"][4 * i : 4 * i + 4], rows["fit long"][i])]
    return rows["fit long"]


def output_loss(o: torch.Tensor, expected: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the loss of outputs [B, T, H, K]; `kind` is that of `FarForm.loss`."""
    if kind == "cosine":
        return 1 - F.cosine_similarity(o, expected, -1).mean()
    if kind == "per head":
        return ((o - expected).square().sum((0, 1, 3)) / expected.square().sum((0, 1, 3))).mean()
    return (o - expected).square().sum() / expected.square().sum()


def learn(part: FarPart, rows: LayerRows) -> None:
    """Train by Adam, with a learning rate that falls linearly to zero."""
    form = part.form
    projections = [x for x in part.parameters() if x.numel() and x.dim() == 3]
    others = [x for x in part.parameters() if x.numel() and x.dim() != 3]
    optimizer = torch.optim.Adam(
        [{"params": projections, "factor": 1.0}, {"params": others, "factor": form.lr_factor}], betas=form.betas
    )
    order = training_rows(rows, form.rows)
    for step in range(form.steps):
        *inputs, expected = order[step % len(order)]
        for update in range(form.updates):
            for group in optimizer.param_groups:
                group["lr"] = group["factor"] * form.lr * (1 - (step + update / form.updates) / form.steps)
            optimizer.zero_grad()
            output_loss(part(*inputs), expected, form.loss).backward()
            optimizer.step()


@torch.no_grad()
def judge(part: FarPart, rows: LayerRows) -> dict[str, float]:
    """Return the relative errors on held-out rows, by the ranges of `POSITIONS`."""
    errors = {}
    for kind, ranges in POSITIONS.items():
        outputs = [(part(*inputs), expected) for *inputs, expected in rows.get(kind, [])]
        if not outputs:
            continue
        for name, (first, last) in ranges.items():
            pairs = [(o[:, first:last], expected[:, first:last]) for o, expected in outputs]
            squared_error = sum(float((o - expected).square().sum()) for o, expected in pairs)
            errors[name] = squared_error / sum(float(expected.square().sum()) for _, expected in pairs)
    return errors


def make_row(job: Row, folder: str) -> Row:
    """Train and evaluate one variant in one layer.

    Args:
        job: "form", "layer", and "seed".
        folder: Folder of `store_layers`.

    Returns:
        The job, the bytes of its state, its errors, and the learned balance, decays, and power.
    """
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows = load_layer(folder, job["layer"])
    form = {**WINDOWS, **FORMS}[job["form"]]
    if form.inputs == "rotated":
        rows = {kind: [(q, k, v, q, k, o) for q, k, v, _, _, o in group] for kind, group in rows.items()}
    q, k, _, unrotated_q, unrotated_k, _ = rows["fit"][0]
    num_kv_heads = k.shape[2]
    part = FarPart(form, q.shape[2], num_kv_heads, q.shape[-1])
    row = {**job, "bytes": form.num_bytes, "kv_tokens": form.num_bytes / KV_BYTES, "kv_heads": num_kv_heads}
    if form.features is None:
        row["errors"] = judge(part, rows)
        return row
    if form.center:
        part.q_mean.data.copy_(unrotated_q[0].mean(0))
        part.k_mean.data.copy_(unrotated_k[0].mean(0))
    if form.balance is None:
        part.balance_masses(q, k, unrotated_q, unrotated_k)
    row["start"] = {"to 1k": judge(part, {"short": rows["short"]})["to 1k"]}
    learn(part, rows)
    row["errors"] = judge(part, rows)
    with torch.no_grad():
        decays = part.decays()
        row["balance"] = float(part.balance.mean())
        row["rates"] = decays.log_rate.exp().mean(0).tolist()
        row["weights"] = decays.weight.mean(0).tolist()
        if form.power is not None:
            row["power"] = float(part.power.mean())
    row["seconds"] = time.monotonic() - started
    return row


def table(record: Mapping[str, Any]) -> str:
    """Render bytes and errors of each variant in Markdown, as means over the layers that all variants have."""
    by_form: dict[str, dict[int, Row]] = {}
    for row in record["rows"]:
        by_form.setdefault(row["form"], {})[row["layer"]] = row
    layers = sorted(set.intersection(*(set(rows) for rows in by_form.values())))
    names = list(record["rows"][0]["errors"])
    lines = [
        f"Layers {', '.join(map(str, layers))}",
        f"| form | KiB | tokens | {' | '.join(names)} |",
        "|---" * (3 + len(names)) + "|",
    ]
    for form, rows in by_form.items():
        means = [statistics.fmean(rows[layer]["errors"][name] for layer in layers) for name in names]
        num_bytes = rows[layers[0]]["bytes"]
        cells = [f"{num_bytes / 1024:.0f}", f"{num_bytes / KV_BYTES:.0f}", *(f"{mean:.4f}" for mean in means)]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(row: Row) -> str:
    """Format a row for the log."""
    errors = " ".join(f"{error:.4f}" for error in row["errors"].values())
    return f"{row['form']}, layer {row['layer']}: {row['bytes']} bytes, {errors}, {row.get('seconds', 0):.0f} s"


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser("python -m experiments.far_forms", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a softmax language model")
    parser.add_argument("text", help="text to learn from; its last rows are held out for evaluation")
    parser.add_argument("--other", help="another text to evaluate on")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="indices of layers")
    parser.add_argument("--forms", nargs="+", default=[*WINDOWS, *FORMS], help="variants; default: all")
    parser.add_argument(
        "--keep",
        default="far_forms_layers",
        help="folder for the tensors of the layers, 350 MB each; default: %(default)s",
    )
    parser.add_argument("--out", default="docs/evidence/far_forms.json", help="JSON file; default: %(default)s")
    args = parser.parse_args()
    folder = Path(args.keep)
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / f"{layer}.pt").exists() for layer in args.layers):
        torch.set_num_threads(1)
        store_layers(args.model, args.text, args.other, args.layers, folder)
    jobs = [{"form": form, "layer": layer, "seed": 0} for form in args.forms for layer in args.layers]
    make = functools.partial(make_row, folder=str(folder))
    command = ["python", "-m", "experiments.far_forms", Path(args.model).name, Path(args.text).name]
    if args.other:
        command += ["--other", Path(args.other).name]
    record = add_rows(args.out, make, jobs, describe, workers=1, command=shlex.join(command))
    print(table(record))


if __name__ == "__main__":
    main()
