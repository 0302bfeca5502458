"""Which attention a converted language model should have: python -m experiments.forms --out docs/language/forms.json

The demo's teacher, text and recipes, all layers converted (but for the hybrid), one row per form and seed: the KL to the
teacher before any training and after it, bits per byte, the lookups answered from beyond the window, and the bytes that
decoding keeps. Rows that the file has are not made again.
"""

import argparse
import copy
import functools
import math
import statistics
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mhla_hf.convert import convert
from mhla_hf.speed import cache_bytes
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import read_recipe

from .demo.lookups import add_lookups, choose_words, make_recall, start_lookups
from .demo.report import NEAR
from .demo.text import hold_out, make_tokenizer, read_text
from .rows import add_rows, made, number, whole_seeds

RECIPES = Path(__file__).parent / "demo" / "recipes"
DENSE = {"mixing_form": "softmax", "local": None}
WINDOW = {"mixing_form": "decay", "local": "softmax"}
FORMS = {
    "plain linear": {**DENSE, "mixing_start": "uniform", "learn_mixing": False},
    "MHLA, the paper's matrix": DENSE,
    "MHLA by 2 decays": {"mixing_form": "decay", "local": None},
    "window alone": WINDOW,
    "window + plain linear": {**WINDOW, "num_decays": 1},
    "window + MHLA by 2 decays": WINDOW,
    "the same, softmax in layers 0 and 3": {**WINDOW, "layers": "2/3"},
}
CONTROL = "teacher, trained on"
WHEN = ("before", "after")
LOOKUPS = {1: 250, 4: 50, 16: 25}  # times the trained length: questions


class Text:
    """Tokens to train on, held-out rows `[N, L]`, and lookups in the held-out text whose value lies beyond the window.

    Lookups are asked at the trained length and at multiples of it, to which no model here was trained.
    """

    def __init__(self, text, settings):
        train, held_out = hold_out(read_text(text)[0])
        length = settings["max_position_embeddings"]
        self.tokenizer = make_tokenizer(train, settings["vocab_size"], length)
        words = choose_words(self.tokenizer)
        self.train = torch.tensor(self.encode(add_lookups(train, words)))
        ids = torch.tensor(self.encode(held_out))
        self.rows = ids[: len(ids) // length * length].view(-1, length)
        self.size = len(self.tokenizer.decode(self.rows.flatten()).encode())
        self.lookups = {
            times: [
                self.encode(row["context"] + row["word"])
                for row in make_recall(held_out, self.count, words, window=times * length, items=items, seed=0)
                if row["back"] > NEAR
            ]
            for times, items in LOOKUPS.items()
        }

    def encode(self, text):
        return self.tokenizer(text, verbose=False)["input_ids"]

    def count(self, text):
        return len(self.encode(text))


def find_teacher(seed, text):
    """The folder of the softmax teacher of one seed; whoever comes first trains it, the others wait."""
    folder = Path(f"out/forms/teacher-{seed}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "config.json").exists():
            train_teacher(folder, seed, text)
    return folder


def train_teacher(folder, seed, text):
    """Train it; stopped, it goes on."""
    plan = read_recipe(RECIPES / "demo_teacher.yaml")
    text = Text(text, plan.settings)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**plan.settings, "vocab_size": len(text.tokenizer)}))
    start_lookups(model)
    distill(model, out=folder, data=text.train, stages=plan.stages, seed=seed, progress=False, **plan.run)


def make_row(text, job):
    """Convert, measure, train, measure again."""
    name, seed = job["form"], job["seed"]
    torch.set_num_threads(1)
    folder = find_teacher(seed, text)
    teacher_plan, plan = (read_recipe(RECIPES / f"demo_{which}.yaml") for which in ("teacher", "student"))
    text = Text(text, teacher_plan.settings)
    teacher = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    row, student, stages, asked = {"form": name, "seed": seed}, copy.deepcopy(teacher), plan.stages, teacher
    if name == CONTROL:
        last, steps = plan.stages[-1], sum(stage.steps for stage in plan.stages)
        changes = {"name": "trained on", "steps": steps, "lr": last.lr, "warmup": last.warmup}
        stages, asked = [type(last)(**{**vars(teacher_plan.stages[0]), **changes})], None
    else:
        convert(student, **{**plan.settings, **FORMS[name]})
        if name == "window alone":
            for module in student.modules():
                if hasattr(module, "balance"):
                    module.balance.data.fill_(-1e4)  # nothing far, and no gradient that could bring it back
    row["before"] = judge(student.eval(), teacher, text)
    with tempfile.TemporaryDirectory() as place:
        out = f"{place}/out"
        distill(student, asked, out=out, data=text.train, stages=stages, seed=seed, progress=False, **plan.run)
    row["after"] = judge(student.eval(), teacher, text)
    with torch.no_grad():
        row["state_bytes"] = cache_bytes(student(text.rows[:1], use_cache=True).past_key_values)
    return row


@torch.no_grad()
def judge(model, teacher, text):
    """{"kl": nats per token to the teacher, "bits": per byte, "recall": {times the trained length: share}}, held-out."""
    kl = nll = 0.0
    for row in text.rows.split(4):
        log_p, log_q = (one(row, use_cache=False).logits.double().log_softmax(-1) for one in (teacher, model))
        kl += (log_p.exp() * (log_p - log_q)).sum().item()
        nll -= log_q[:, :-1].gather(-1, row[:, 1:, None]).sum().item()
    recall = {}
    for times, asked in text.lookups.items():
        last = (model(torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=1).logits[0, -1] for ids in asked)
        recall[str(times)] = statistics.fmean(one.argmax() == ids[-1] for one, ids in zip(last, asked, strict=True))
    return {"kl": kl / text.rows.numel(), "bits": nll / math.log(2) / text.size, "recall": recall}


def run(out, seeds, text=None, workers=2, command=None):
    """Make every row that `out` lacks."""
    jobs = [{"form": name, "seed": seed} for seed in range(seeds) for name in (*FORMS, CONTROL)]
    return add_rows(out, functools.partial(make_row, text), jobs, describe, workers=workers, command=command)


def describe(row):
    """One line of the log."""
    before, after = row["before"], row["after"]
    kl = f"KL {before['kl']:.4f}, then {after['kl']:.4f}"
    recall = ", ".join(f"{times}x: {share:.2f}" for times, share in after["recall"].items())
    return f"seed {row['seed']}, {row['form']}: {kl}; recall {recall}"


def render_forms(record):
    """The tables over the seeds that have all rows: mean and standard error."""
    kept, over = whole_seeds(record["rows"], len(FORMS) + 1)
    controls = {row["seed"]: row for row in kept if row["form"] == CONTROL}
    teachers = [{"seed": seed, "form": "teacher", "after": row["before"]} for seed, row in controls.items()]
    near, far = [], []
    for form in ("teacher", *FORMS, CONTROL):
        rows = [row for row in (*teachers, *kept) if row["form"] == form]
        cells = [number([row[when]["kl"] for row in rows], "{:.4f}") if "before" in rows[0] else "" for when in WHEN]
        for when in WHEN:  # the control before is the teacher
            bits = [100 * (row["after"]["bits"] / controls[row["seed"]][when]["bits"] - 1) for row in rows]
            cells.append(number(bits, "{:+.2f}"))
        state = [f"{statistics.fmean(row['state_bytes'] for row in rows) / 1024:,.0f}" if "before" in rows[0] else ""]
        near.append(f"| {form} | {' | '.join(cells + state)} |")
        recall = [number([row["after"]["recall"][str(times)] for row in rows], "{:.2f}") for times in LOOKUPS]
        far.append(f"| {form} | {' | '.join(recall)} |")
    heads = (
        ["KL before training", "after", "bits over the teacher, %", "over the one trained on, %", "state, KiB"],
        [f"recall at {times}x the trained length" for times in LOOKUPS],
    )
    tables = [
        "\n".join([f"| attention | {' | '.join(head)} |", "|---" + "|---:" * len(head) + "|", *lines])
        for head, lines in zip(heads, (near, far), strict=True)
    ]
    return "\n\n".join([*tables, f"{over}. {made(record)}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m experiments.forms", description=__doc__)
    parser.add_argument("--out", default="docs/language/forms.json", help="JSON file to make or to go on in")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    parser.add_argument("--text", help="file or folder (default: the Python language reference)")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each (default: 2)")
    given = vars(parser.parse_args())
    print(render_forms(run(**given, command=f"python -m experiments.forms --seeds {given['seeds']}")))
