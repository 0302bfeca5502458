"""Which far part a layer of a real model should have.

The softmax model runs once over rows of TEXT; q, k, v and the outputs of some layers are kept. Then each layer alone, for
each form of the far part, learns the softmax's outputs, with far features of q and k before RoPE, and is judged on rows that
it did not see, by position: sum of squared errors over sum of squares. The KV heads that copy most are left out, a sixth of
all: a conversion would leave them softmax. A row of the JSON is one form in one layer; those that it has are not made again.
"""

import argparse
import functools
import gzip
import json
import shlex
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from .far_part import KV_BYTES, FarForm, FarPart, rotate
from .rows import add_rows

LAYERS = (7, 9, 14, 23)
SHARE_KEPT = 6  # one KV head of so many stays softmax
PLACES = {  # of each kind of held-out rows: from and to which token
    "short": {"to 1k": (0, 1024)},
    "long": {"1k to 2k": (1024, 2048), "2k to 4k": (2048, 4096)},
    "other": {"other 1k to 2k": (1024, 2048), "other 2k to 4k": (2048, 4096), "other 4k to 8k": (4096, 8192)},
}


def read_ids(tokenizer, file):
    """All tokens of a text, which may be compressed."""
    opened = gzip.open if str(file).endswith(".gz") else open
    with opened(file, "rt", encoding="utf-8") as text:
        return tokenizer(text.read()[:1_300_000], return_tensors="pt").input_ids[0]


def choose_rows(ids, other):
    """Rows of ids: to learn from, short and long; held out, short, long and of the other text."""
    rows = {"fit": ids[: 24 * 1024].view(24, 1024), "short": ids[-3 * 1024 :].view(3, 1024)}
    rows["fit long"] = ids[24 * 1024 : 36 * 1024].view(3, 4096)
    rows["long"] = ids[-11 * 1024 : -3 * 1024].view(2, 4096)
    if other is not None:
        rows["other"] = other[60_000 : 60_000 + 8192][None]
    return rows


@torch.no_grad()
def keep_layers(model_folder, text, other, layers, folder):
    """Files in `folder`, one a layer: rotated q and k, v and outputs of every row; and which KV heads copy most."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
    rows = choose_rows(*(None if x is None else read_ids(tokenizer, x) for x in (text, other)))
    seen = {}

    def attend(module, q, k, v, mask, scaling=None, **unused):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)
        seen[module.layer_idx] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), o
        return o, None

    AttentionInterface.register("keep", attend)
    options = {"dtype": torch.float32, "attn_implementation": "keep", "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(model_folder, **options).model.eval()
    half = rows["short"][:1, :512]
    model(torch.cat([half, half], 1), use_cache=False)
    copying = torch.stack([copy_score(q, k, 512) for _, (q, k, _, _) in sorted(seen.items())])
    kept = copying >= copying.flatten().sort(descending=True).values[copying.numel() // SHARE_KEPT - 1]
    found = {index: {} for index in layers}
    model.layers = model.layers[: max(layers) + 1]
    for kind, group in rows.items():
        for ids in group:
            model(ids[None], use_cache=False)
            for index in layers:
                found[index].setdefault(kind, []).append([x.clone() for x in seen[index]])
        print(kind, flush=True)
    cos, sin = model.rotary_emb(half.float(), torch.arange(8192)[None])
    for index, kinds in found.items():
        torch.save({"rows": kinds, "kept": kept[index], "cos": cos[0], "sin": sin[0]}, folder / f"{index}.pt")
    (folder / "copying.json").write_text(json.dumps([[round(float(x), 3) for x in heads] for heads in copying]))


def copy_score(q, k, half):
    """[G]: how much of its attention a KV head gives, in the second copy of half a row, to the token to be copied."""
    q, k = q[0, half:].transpose(0, 1), k[0].transpose(0, 1)
    share = len(q) // len(k)
    score = q @ k.repeat_interleave(share, 0).mT * q.shape[-1] ** -0.5
    later = torch.arange(k.shape[1]) > torch.arange(half, 2 * half)[:, None]
    mass = score.masked_fill(later, float("-inf")).softmax(-1).diagonal(1, 1, 2)
    return mass.mean(-1).view(-1, share).amax(-1)


WINDOWS = {f"window alone, {lag} blocks": FarForm(features=None, lag=lag) for lag in (2, 3, 4, 5, 6, 8, 10, 13, 16, 24)}
EXP, HALF = {"features": "exp", "start": 0.35, "center": True}, {"width": 32}
FORMS = {
    "base": FarForm(),
    "no count power": FarForm(power=None),
    "no count power, balance -2": FarForm(power=None, balance=-2.0),
    "no count power, mixed rows": FarForm(power=None, rows="mixed", steps=37),
    "power from 0": FarForm(power=0.0),
    "power from 0, mixed rows": FarForm(power=0.0, rows="mixed", steps=37),
    "power from 1": FarForm(power=1.0),
    "faster": FarForm(faster=5.0),
    "faster, 2 decays apart": FarForm(faster=5.0, rates=(1.0, 0.8), shares=(0.5, 0.5)),
    "24 rows x 3 updates, faster": FarForm(steps=24, repeats=3, faster=5.0),
    "mixed rows": FarForm(rows="mixed", steps=37),
    "24 rows x 3 updates": FarForm(steps=24, repeats=3),
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
    "1 free decay, exp, 6 blocks, mixed rows": FarForm((0.98,), faster=5.0, rows="mixed", steps=37, lag=6, **EXP),
    "1 free decay, exp, 6 blocks": FarForm((0.98,), faster=5.0, lag=6, **EXP),
    "plain sum, exp, half width, 7 blocks, mixed rows": FarForm((1.0,), rows="mixed", steps=37, lag=7, **EXP | HALF),
    "plain sum, one softmax, half width, 7 blocks": FarForm((1.0,), features="one", width=32, lag=7),
    "plain sum, quarter width, 7 blocks": FarForm((1.0,), width=16, lag=7),
    "rotated": FarForm(read="rotated"),
    "4 decays apart, faster": FarForm(rates=(1.0, 0.95, 0.8, 0.4), shares=(0.25,) * 4, faster=5.0),
    "block 32, lag 4": FarForm(block=32, lag=4),
    "block 128, lag 1": FarForm(block=128, lag=1),
    "8 rows x 8 updates": FarForm(steps=8, repeats=8),
    "centered": FarForm(center=True),
    "lr 1e-1": FarForm(lr=1e-1),
    "1 free decay": FarForm(rates=(0.98,), faster=5.0),
    "W x 2": FarForm(start=2.0),
    "lr 1e-2": FarForm(lr=1e-2),
    "loss per head": FarForm(loss="per head"),
    "no sinks": FarForm(sinks=0),
    "16 sinks": FarForm(sinks=16),
    "elu": FarForm(features="elu"),
    "exp": FarForm(**EXP),
    "W x 0.35": FarForm(start=0.35),
    "loss cosine": FarForm(loss="cosine"),
    "rows of 4k": FarForm(rows="long", steps=15),
}


@functools.cache
def load_layer(folder, index):
    """Rows of one layer by kind, of the KV heads that are not kept: q, k, v, un-rotated q and k, outputs."""
    saved = torch.load(Path(folder) / f"{index}.pt", mmap=True)
    groups = (~saved["kept"]).nonzero()[:, 0]
    tables = saved["cos"], saved["sin"]
    rows = {kind: [] for kind in saved["rows"]}
    for kind, group in saved["rows"].items():
        for q, k, v, o in group:
            q, o = (x.unflatten(2, (len(saved["kept"]), -1))[:, :, groups].flatten(2, 3) for x in (q, o))
            k, v = k[:, :, groups], v[:, :, groups]
            rows[kind].append((q, k, v, rotate(q, *tables, back=True), rotate(k, *tables, back=True), o))
    return rows


def rows_to_learn(rows, kind):
    """In the order in which they are read, again and again."""
    if kind == "short":
        return rows["fit"]
    if kind == "mixed":
        return [row for i in range(3) for row in (*rows["fit"][4 * i : 4 * i + 4], rows["fit long"][i])]
    return rows["fit long"]


def distance(o, wanted, loss):
    """What is made small."""
    if loss == "cosine":
        return 1 - F.cosine_similarity(o, wanted, -1).mean()
    if loss == "per head":
        return ((o - wanted).square().sum((0, 1, 3)) / wanted.square().sum((0, 1, 3))).mean()
    return (o - wanted).square().sum() / wanted.square().sum()


def learn(part, rows):
    """Adam, its lr falling to zero."""
    form = part.form
    wide, few = ([x for x in part.parameters() if x.numel() and (x.dim() == 3) == wanted] for wanted in (True, False))
    optimizer = torch.optim.Adam(
        [{"params": wide, "times": 1.0}, {"params": few, "times": form.faster}], betas=form.betas
    )
    order = rows_to_learn(rows, form.rows)
    for step in range(form.steps):
        *given, wanted = order[step % len(order)]
        for again in range(form.repeats):
            for group in optimizer.param_groups:
                group["lr"] = group["times"] * form.lr * (1 - (step + again / form.repeats) / form.steps)
            optimizer.zero_grad()
            distance(part(*given), wanted, form.loss).backward()
            optimizer.step()


@torch.no_grad()
def judge(part, rows):
    """Relative error by place."""
    errors = {}
    for kind, places in PLACES.items():
        outputs = [(part(*given), wanted) for *given, wanted in rows.get(kind, [])]
        for name, (first, last) in places.items() if outputs else ():
            cut = [(o[:, first:last], wanted[:, first:last]) for o, wanted in outputs]
            lost = sum(float((o - wanted).square().sum()) for o, wanted in cut)
            errors[name] = lost / sum(float(wanted.square().sum()) for _, wanted in cut)
    return errors


def make_row(job, folder):
    """A form in a layer: errors, bytes, and what became of its balance and decays."""
    began = time.monotonic()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    rows = load_layer(folder, job["layer"])
    form = (WINDOWS | FORMS)[job["form"]]
    if form.read == "rotated":
        rows = {kind: [(q, k, v, q, k, o) for q, k, v, _, _, o in group] for kind, group in rows.items()}
    q, k = rows["fit"][0][:2]
    part = FarPart(form, q.shape[2], k.shape[2], q.shape[-1])
    row = {**job, "bytes": form.size, "kv_tokens": form.size / KV_BYTES, "kv_heads": k.shape[2]}
    if form.features is None:
        return {**row, "errors": judge(part, rows)}
    if form.center:
        for mean, at in ((part.q_mean, 3), (part.k_mean, 4)):
            mean.data.copy_(rows["fit"][0][at][0].mean(0))
    if form.balance is None:
        part.balance_masses(*(rows["fit"][0][i] for i in (0, 1, 3, 4)))
    row["start"] = {"to 1k": judge(part, {"short": rows["short"]})["to 1k"]}
    learn(part, rows)
    row["errors"] = judge(part, rows)
    with torch.no_grad():
        decays = part.decays()
        row["balance"] = float(part.balance.mean())
        row["rates"], row["weights"] = decays.log_rate.exp().mean(0).tolist(), decays.weight.mean(0).tolist()
        if form.power is not None:
            row["power"] = float(part.power.mean())
    return {**row, "seconds": time.monotonic() - began}


def table(record):
    """Markdown: each form's bytes and errors, means over the layers that every form has."""
    by_form = {}
    for row in record["rows"]:
        by_form.setdefault(row["form"], {})[row["layer"]] = row
    shared = sorted(set.intersection(*(set(rows) for rows in by_form.values())))
    names = list(record["rows"][0]["errors"])
    lines = ["Layers " + ", ".join(map(str, shared)), "| form | KiB | tokens | " + " | ".join(names) + " |"]
    lines.append("|---" * (3 + len(names)) + "|")
    for form, rows in by_form.items():
        means = [statistics.fmean(rows[layer]["errors"][name] for layer in shared) for name in names]
        size = rows[shared[0]]["bytes"]
        lines.append(
            f"| {form} | {size / 1024:.0f} | {size / KV_BYTES:.0f} | " + " | ".join(f"{x:.4f}" for x in means) + " |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a softmax language model")
    parser.add_argument("text", help="text to learn from and, other rows of it, to judge on")
    parser.add_argument("--other", help="another text to judge on")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--forms", nargs="+", default=[*WINDOWS, *FORMS], help="all of them unless named")
    parser.add_argument("--keep", default="far_forms_layers", help="folder for what the layers saw, 350 MB each")
    parser.add_argument("--out", default="docs/evidence/far_forms.json")
    arguments = parser.parse_args()
    folder = Path(arguments.keep)
    folder.mkdir(parents=True, exist_ok=True)
    if not all((folder / f"{layer}.pt").exists() for layer in arguments.layers):
        torch.set_num_threads(1)
        keep_layers(arguments.model, arguments.text, arguments.other, arguments.layers, folder)
    jobs = [{"form": form, "layer": layer, "seed": 0} for form in arguments.forms for layer in arguments.layers]
    make = functools.partial(make_row, folder=str(folder))

    def describe(row):
        errors = " ".join(f"{x:.4f}" for x in row["errors"].values())
        return f"{row['form']}, layer {row['layer']}: {row['bytes']} bytes, {errors}, {row.get('seconds', 0):.0f} s"

    parts = "model", "text", "other"
    names = [Path(value).name for name in parts if (value := getattr(arguments, name))]
    other = ("--other", names[2]) if names[2:] else ()
    command = shlex.join(["python", "-m", "experiments.far_forms", *names[:2], *other])
    record = add_rows(arguments.out, make, jobs, describe, workers=1, command=command)
    print(table(record))


if __name__ == "__main__":
    main()
