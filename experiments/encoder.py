"""What an encoder keeps of its embeddings when it becomes MHLA: python -m experiments.encoder

A small EuroBERT learns to fill in masked tokens of the Python language reference. Each row of the table is that model
converted and then distilled: its mean-pooled embeddings, and each token's, are drawn to the teacher's by their cosine.
Judged on held-out windows of 128 and of 512 tokens. Rows that the file has are not made again.
"""

import argparse
import functools
import math
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import EuroBertConfig, EuroBertForMaskedLM, EuroBertModel

from mhla_hf.cli import script
from mhla_hf.convert import convert

from .demo.text import hold_out, make_tokenizer, read_text
from .rows import add_rows, made, number, whole_seeds

VOCAB, LENGTHS, TOKENS = 1024, (128, 512), 2048  # TOKENS: of a batch
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": LENGTHS[-1]}
MASKED, LR, STEPS, STUDENT_LR, STUDENT_STEPS = 0.2, 2e-3, 450, 5e-4, 80
WHEN = ("before", "after")
LINEAR = {"mixing_start": "uniform", "learn_mixing": False}
SMALL = {"block_size": 16}
KINDS = {
    "plain linear": LINEAR,
    "MHLA": SMALL,
    "MHLA, relu": {**SMALL, "feature_map": "relu"},
    "MHLA, blocks of 64": {},
}
FORMS = {name: {**kind, "layers": "all"} for name, kind in KINDS.items()}
FORMS |= {f"{name}, softmax in layer 0": {**kind, "layers": "2/3"} for name, kind in KINDS.items()}


def batches(ids, steps, seed):
    """Random rows of 128 tokens and, every other time, of 512."""
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        length = LENGTHS[step % 2]
        begin = torch.randint(len(ids) - length, (TOKENS // length, 1), generator=random)
        yield ids[begin + torch.arange(length)]


def train(model, losses, steps, lr):
    """Take a step on each of the losses; what is new in MHLA layers learns ten times as fast."""
    groups = [{"params": [p], "top": lr * (10 if ".mhla." in name else 1)} for name, p in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    for step, loss in enumerate(losses, 1):
        for group in optimizer.param_groups:
            group["lr"] = group["top"] * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def masked_losses(model, ids, steps, seed):
    """Of filling in masked tokens."""
    random = torch.Generator().manual_seed(seed)
    for rows in batches(ids, steps, seed):
        hidden = torch.rand(rows.shape, generator=random) < MASKED
        logits = model.lm_head(model.model(rows.masked_fill(hidden, VOCAB)).last_hidden_state[hidden])
        yield F.cross_entropy(logits, rows[hidden])


def distilled_losses(student, teacher, ids, steps, seed):
    """1 - cosine to the teacher, of each token's embedding and of their mean."""
    for rows in batches(ids, steps, seed):
        with torch.no_grad():
            wanted = teacher(rows).last_hidden_state
        given = student(rows).last_hidden_state
        pooled = F.cosine_similarity(given.mean(1), wanted.mean(1), dim=-1)
        yield 2.0 - F.cosine_similarity(given, wanted, dim=-1).mean() - pooled.mean()


@torch.no_grad()
def compare(student, teacher, ids):
    """Per length: cosine to the teacher's mean-pooled embeddings, and rank correlation of the similarities of all pairs."""
    found = {}
    for length in LENGTHS:
        parts = ids[: len(ids) // length * length].view(-1, length).split(8)
        pooled = [torch.cat([model(part)[0].mean(1) for part in parts]) for model in (teacher, student)]
        units = [F.normalize(each, dim=-1) for each in pooled]
        pairs = torch.ones(len(units[0]), len(units[0])).triu(1).bool()
        ranks = [(unit @ unit.T)[pairs].argsort().argsort().double() for unit in units]
        cosine = (units[0] * units[1]).sum(-1).mean().item()
        found[str(length)] = {"cosine": cosine, "rank": torch.corrcoef(torch.stack(ranks))[0, 1].item()}
    return found


def make_teacher(folder, seed):
    """Train the encoder of one seed; it and the tokens, for training and held out, are saved in `folder`."""
    parts = hold_out(read_text()[0])
    tokenizer = make_tokenizer(parts[0], VOCAB, LENGTHS[-1])
    kept, unseen = (torch.tensor(tokenizer(part, verbose=False)["input_ids"]) for part in parts)
    torch.manual_seed(seed)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    tokens |= {"vocab_size": VOCAB + 1, "mask_token_id": VOCAB, "mask_token": VOCAB}
    model = EuroBertForMaskedLM(EuroBertConfig(**SIZES, **tokens))
    train(model, masked_losses(model, kept, STEPS, seed), STEPS, LR)
    model.model.save_pretrained(folder)
    torch.save((kept, unseen), folder / "tokens.pt")


def make_row(job, folder):
    """Convert, judge, distill and judge again; folder: holds the teachers that were trained already, by seed."""
    torch.set_num_threads(1)
    place = Path(folder, str(job["seed"]))
    if not place.exists():
        make_teacher(place, job["seed"])
    kept, unseen = torch.load(place / "tokens.pt")
    teacher, student = (EuroBertModel.from_pretrained(place).eval() for _ in range(2))
    convert(student, **FORMS[job["form"]])
    before = compare(student, teacher, unseen)
    train(student, distilled_losses(student, teacher, kept, STUDENT_STEPS, job["seed"]), STUDENT_STEPS, STUDENT_LR)
    return {**job, "before": before, "after": compare(student, teacher, unseen)}


def describe(row):
    """One line of the log."""
    said = [f"{one['cosine']:.4f} {one['rank']:.3f}" for when in WHEN for one in row[when].values()]
    return f"seed {row['seed']}, {row['form']}: {', '.join(said)}"


def render_encoder(record):
    """The table: cosine and rank correlation, per length, before and after, mean and standard error over the seeds."""
    rows, over = whole_seeds(record["rows"], len(FORMS))
    kinds = [(when, str(length), kind) for when in WHEN for length in LENGTHS for kind in ("cosine", "rank")]
    heads = [f"{kind}, {length}, {when}" for when, length, kind in kinds]
    lines = [f"| attention | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    for form in sorted({row["form"] for row in rows}, key=list(FORMS).index):
        own = [row for row in rows if row["form"] == form]
        cells = [number([row[when][length][kind] for row in own], "{:.4f}") for when, length, kind in kinds]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"{over}. {STUDENT_STEPS} steps of {TOKENS} tokens. {made(record)}"])


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.encoder", description=__doc__)
    parser.add_argument("--out", default="docs/evidence/encoder.json", help="JSON file to make or to go on in")
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0, 1, ... (default: 2)")
    given = parser.parse_args()
    jobs = [{"form": form, "seed": seed} for seed in range(given.seeds) for form in FORMS]
    with tempfile.TemporaryDirectory() as folder:
        command, row = (
            f"python -m experiments.encoder --seeds {given.seeds}",
            functools.partial(make_row, folder=folder),
        )
        print(render_encoder(add_rows(given.out, row, jobs, describe, workers=1, command=command)))


if __name__ == "__main__":
    script(main, "encoder")
