"""Which attention a converted language model should have: python -m experiments.forms, after a full demo of three seeds

The teachers, text and recipe of a demo, all layers converted (but for the hybrid), one row per form and seed: the KL to the
teacher before any training and after it, bits per byte, the lookups answered from beyond the window, and the bytes that
decoding keeps. The students that the demo has are judged, the others trained. Rows that the file has are not made again.
"""

import argparse
import copy
import functools
import itertools
import math
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mhla_hf.cli import script
from mhla_hf.convert import convert
from mhla_hf.evaluation.lookups import choose_words, make_recall
from mhla_hf.models.transformers_api import forward_cached
from mhla_hf.speed import cache_bytes
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import read_recipe
from mhla_hf.training.start import start_from_text

from .demo.report import NEAR
from .rows import add_rows, made, number, whole_seeds

RECIPE = Path(__file__).parent / "demo" / "recipes" / "demo_student.yaml"
DENSE = {"mixing_form": "softmax", "local": None}
WINDOW = {"mixing_form": "decay", "local": "softmax"}
FORMS = {
    "plain linear": {**DENSE, "mixing_start": "uniform", "learn_mixing": False},
    "MHLA, the paper's matrix": DENSE,
    "MHLA by 2 decays": {"mixing_form": "decay", "local": None},
    "window alone": WINDOW,
    "window + plain linear": {**WINDOW, "num_decays": 1},
    "window + MHLA by 2 decays": WINDOW,
    "the same, started from the teacher": WINDOW,
    "the same, softmax in layers 0 and 3": {**WINDOW, "layers": "2/3"},
    "started from the teacher, softmax in the layer missed most": WINDOW,
}
CHOICE = {  # in the words of docs/language.md
    "plain linear": "plain linear attention, no window",
    "window + MHLA by 2 decays": "MHLA in all layers",
    "the same, started from the teacher": "MHLA in all layers, started from the teacher",
    "the same, softmax in layers 0 and 3": "softmax in layers 0 and 3, by rule",
    "started from the teacher, softmax in the layer missed most": "softmax in one layer, chosen by measurement",
}
CONTROL = "teacher, trained on"
TRAINED = {  # by the demo
    "plain linear": "linear",
    "window + MHLA by 2 decays": "mhla",
    "started from the teacher, softmax in the layer missed most": "hybrid",
    CONTROL: "control",
}
WHEN = ("before", "after")
LOOKUPS = {1: 250, 4: 50, 16: 25}  # times the trained length: questions


class Text:
    """A demo's held-out text as rows `[N, L]`, and lookups in it whose value lies beyond the window.

    Lookups are asked at the trained length and at multiples of it, to which no model here was trained.
    """

    def __init__(self, data, length):
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer", trust_remote_code=False)
        held_out = (data / "heldout.txt").read_text(encoding="utf-8")
        ids, words = torch.tensor(self.encode(held_out)), choose_words(self.tokenizer)
        self.rows = ids[: len(ids) // length * length].view(-1, length)
        self.size = len(self.tokenizer.decode(self.rows.flatten()).encode())
        self.lookups = {
            times: [
                (row["back"] / times / length, self.encode(row["context"] + row["word"]))
                for row in make_recall(held_out, self.count, words, window=times * length, items=items, seed=0)
                if row["back"] > NEAR
            ]
            for times, items in LOOKUPS.items()
        }

    def encode(self, text):
        return self.tokenizer(text, verbose=False)["input_ids"]

    def count(self, text):
        return len(self.encode(text))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def make_row(demo, job):
    """Convert, measure, train or find trained, measure again."""
    name, seed = job["form"], job["seed"]
    torch.set_num_threads(1)
    models, plan = demo if seed == 0 else demo / f"seed-{seed}", read_recipe(RECIPE)
    teacher = load(models / "teacher")
    text = Text(demo / "data", teacher.config.max_position_embeddings)
    student = copy.deepcopy(teacher)
    if name != CONTROL:
        convert(student, **{**plan.settings, **FORMS[name]})
    if name == "window alone":
        for module in student.modules():
            if hasattr(module, "balance"):
                module.balance.data.fill_(-1e4)  # nothing far, and no gradient that could bring it back
    if "started from the teacher" in name:
        budget = 1 if "missed most" in name else None
        start_from_text(student.eval(), text.tokenizer, demo / "data" / "train.txt", budget, seed, progress=False)
    row = {"form": name, "seed": seed, "before": judge(student.eval(), teacher, text)}
    if name in TRAINED:
        student = load(models / TRAINED[name])
    else:
        options = {"data": demo / "data" / "train.txt", "tokenizer": text.tokenizer, "seed": seed, "progress": False}
        with tempfile.TemporaryDirectory() as place:
            distill(student, teacher, out=f"{place}/out", stages=plan.stages, **options, **plan.run)
    row["after"] = judge(student.eval(), teacher, text)
    with torch.no_grad():
        row["state_bytes"] = cache_bytes(forward_cached(student, text.rows[:1])[1])
    return row


@torch.no_grad()
def judge(model, teacher, text):
    """{"kl": nats per token to the teacher, "bits": per byte, "recall": {times the trained length: share}}, held-out.

    "depths": {times: {share of the context that lies between value and question: share right}}.
    """
    kl = nll = 0.0
    for row in text.rows.split(4):
        log_p, log_q = (one(row, use_cache=False).logits.double().log_softmax(-1) for one in (teacher, model))
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        nll -= log_q[:, :-1].gather(-1, row[:, 1:, None]).sum().item()
    recall, depths = {}, {}
    for times, asked in text.lookups.items():
        right = {}
        for depth, ids in asked:
            last = model(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=1).logits[0, -1]
            right.setdefault(f"{depth:.2f}", []).append(int(last.argmax() == ids[-1]))
        recall[str(times)] = statistics.fmean(itertools.chain(*right.values()))
        depths[str(times)] = {depth: statistics.fmean(right[depth]) for depth in sorted(right)}
    return {"kl": kl / text.rows.numel(), "bits": nll / math.log(2) / text.size, "recall": recall, "depths": depths}


def run(out, seeds, demo="out-full", workers=2, short=False, command=None):
    """Make every row that `out` lacks; short: of the forms in `CHOICE` alone."""
    names = sorted(CHOICE if short else (*FORMS, CONTROL), key=TRAINED.__contains__)
    jobs = [{"form": name, "seed": seed} for seed in range(seeds) for name in names]
    return add_rows(out, functools.partial(make_row, Path(demo)), jobs, describe, workers=workers, command=command)


def describe(row):
    """One line of the log."""
    before, after = row["before"], row["after"]
    kl = f"KL {before['kl']:.4f}, then {after['kl']:.4f}"
    recall = ", ".join(f"{times}x: {share:.2f}" for times, share in after["recall"].items())
    return f"seed {row['seed']}, {row['form']}: {kl}; recall {recall}"


def teachers_of(rows):
    """The teacher's own rows, which are what the control was before its training."""
    return [{"seed": row["seed"], "form": "teacher", "after": row["before"]} for row in rows if row["form"] == CONTROL]


def render_forms(record):
    """The tables over the seeds that have all rows: mean and standard error."""
    kept, over = whole_seeds(record["rows"], len(FORMS) + 1)
    controls = {row["seed"]: row for row in kept if row["form"] == CONTROL}
    teachers, near, far = teachers_of(kept), [], []
    for form in ("teacher", *FORMS, CONTROL):
        rows = [row for row in (*teachers, *kept) if row["form"] == form]
        cells = [number([row[when]["kl"] for row in rows], "{:.4f}") if "before" in rows[0] else "" for when in WHEN]
        for when in WHEN:  # the control before is the teacher
            bits = [100 * (row["after"]["bits"] / controls[row["seed"]][when]["bits"] - 1) for row in rows]
            cells.append(number(bits, "{:+.2f}"))
        state = [f"{statistics.fmean(row['state_bytes'] for row in rows) / 1024:,.0f}" if "before" in rows[0] else ""]
        near.append(f"| {form} | {' | '.join(cells + state)} |")
        recall = [number([row["before"]["recall"]["1"] for row in rows], "{:.2f}") if "before" in rows[0] else ""]
        recall += [number([row["after"]["recall"][str(times)] for row in rows], "{:.2f}") for times in LOOKUPS]
        far.append(f"| {form} | {' | '.join(recall)} |")
    heads = (
        ["KL before training", "after", "bits over the teacher, %", "over the one trained on, %", "state, KiB"],
        ["recall before training", *(f"after, at {times}x the trained length" for times in LOOKUPS)],
    )
    tables = [
        "\n".join([f"| attention | {' | '.join(head)} |", "|---" + "|---:" * len(head) + "|", *lines])
        for head, lines in zip(heads, (near, far), strict=True)
    ]
    return "\n\n".join([*tables, f"{over.capitalize()}. {made(record)}"])


def render_choice(record):
    """What a user chooses between: one row per form of `CHOICE`, means over the seeds."""
    kept, over = whole_seeds([row for row in record["rows"] if row["form"] in CHOICE], len(CHOICE))
    lines = ["| attention | KL before training | after | recall | state, KiB |", "|---" + "|---:" * 4 + "|"]
    for form, name in CHOICE.items():
        rows = [row for row in kept if row["form"] == form]
        kl = [f"{statistics.fmean(row[when]['kl'] for row in rows):.3f}" for when in WHEN]
        recall = f"{statistics.fmean(row['after']['recall']['1'] for row in rows):.2f}"
        state = f"{statistics.fmean(row['state_bytes'] for row in rows) / 1024:,.0f}"
        lines.append(f"| {name} | {' | '.join([*kl, recall, state])} |")
    return "\n".join([*lines, "", f"{over.capitalize()}. {made(record)}".replace(" ± standard error", "")])


def render_depths(record):
    """Recall by depth of what the demo trained, and of the teacher."""
    kept, over = whole_seeds(record["rows"], len(FORMS) + 1)
    rows = [row for row in (*teachers_of(kept), *kept) if row["form"] in ("teacher", *TRAINED)]
    depths = sorted({depth for row in rows for shares in row["after"]["depths"].values() for depth in shares})
    lines = [f"| attention, times the trained length | {' | '.join(depths)} |", "|---" + "|---:" * len(depths) + "|"]
    names = [form for form in ("teacher", *TRAINED) if any(row["form"] == form for row in rows)]
    for form, times in itertools.product(names, map(str, LOOKUPS)):
        own = [row["after"]["depths"].get(times, {}) for row in rows if row["form"] == form]
        cells = [number([one[depth] for one in own], "{:.2f}") if depth in own[0] else "" for depth in depths]
        lines.append(f"| {form}, {times}x | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{over.capitalize()}. {made(record)}"])


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.forms", description=__doc__)
    parser.add_argument("--out", default="docs/language/forms.json", help="JSON file to make or to go on in")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    parser.add_argument("--demo", default="out-full", help="folder of the demo (default: out-full)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--short", action="store_true", help="only the forms that a user chooses between")
    given = vars(parser.parse_args())
    record = run(**given, command=shlex.join(["python", "-m", "experiments.forms", *sys.argv[1:]]))
    print(*([render_choice(record)] if given["short"] else [render_forms(record), render_depths(record)]), sep="\n\n")


if __name__ == "__main__":
    script(main, "forms")
