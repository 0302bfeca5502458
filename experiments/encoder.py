"""What an encoder keeps of its embeddings when it becomes MHLA: python -m experiments.encoder

A small BERT learns to fill in masked tokens of the Python language reference (or of --text). Each row of the table is that model
converted and then distilled: its mean-pooled embeddings, and each token's, are drawn to the teacher's by their cosine. Judged
on held-out windows of 128 and of 512 tokens. Rows that the file has are not made again.
"""

import math
import statistics

import torch
import torch.nn.functional as F
from transformers import EuroBertConfig, EuroBertForMaskedLM, EuroBertModel

from mhla_hf.convert import convert

from .demo.text import hold_out, make_tokenizer, read_text

VOCAB, LENGTHS, TOKENS = 1024, (128, 512), 2048  # TOKENS: of a batch
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": LENGTHS[-1]}
MASKED, LR, STEPS, STUDENT_LR, STUDENT_STEPS = 0.2, 2e-3, 600, 5e-4, 100
WHEN = ("before", "after")
LINEAR = {"mixing_start": "uniform", "learn_mixing": False}
DEFAULT = "MHLA, softmax in layer 0"
FORMS = {
    "plain linear": {**LINEAR, "layers": "all"},
    "MHLA": {"layers": "all"},
    "MHLA, relu": {"feature_map": "relu", "layers": "all"},
    "MHLA, blocks of 64": {"block_size": 64, "layers": "all"},
    "plain linear, softmax in layer 0": {**LINEAR, "layers": "2/3"},
    DEFAULT: {"layers": "2/3"},
}


def windows(ids, length):
    """The tokens `[N]` as rows `[N // length, length]`."""
    return ids[: len(ids) // length * length].view(-1, length)


def batches(ids, steps, seed):
    """Random rows of 128 tokens and, every other time, of 512."""
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        length = LENGTHS[step % 2]
        begin = torch.randint(len(ids) - length, (TOKENS // length, 1), generator=random)
        yield ids[begin + torch.arange(length)]


def train(model, losses, steps, lr):
    """Take a step on each of the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    model.train()
    for step, loss in enumerate(losses, 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


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


def ranks(x):
    """The rank of each number, `[N]`."""
    return x.argsort().argsort().double()


@torch.no_grad()
def compare(student, teacher, ids):
    """Per length: mean cosine to the teacher's mean-pooled embeddings, and rank correlation of the similarities of all pairs."""
    found = {}
    for length in LENGTHS:
        rows = windows(ids, length)
        wanted, given = (
            torch.cat([model(part).last_hidden_state.mean(1) for part in rows.split(8)]) for model in (teacher, student)
        )
        pairs = torch.ones(len(rows), len(rows)).triu(1).bool()
        similar = [ranks((unit @ unit.T)[pairs]) for unit in (F.normalize(wanted, dim=-1), F.normalize(given, dim=-1))]
        cosine = F.cosine_similarity(given, wanted, dim=-1).mean().item()
        found[str(length)] = {"cosine": cosine, "rank": torch.corrcoef(torch.stack(similar))[0, 1].item()}
    return found


def make_teacher(folder, text, seed):
    """Train the encoder of one seed; it and the tokens, for training and held out, are saved in `folder`."""
    parts = hold_out(read_text(text)[0])
    tokenizer = make_tokenizer(parts[0], VOCAB, LENGTHS[-1])
    kept, unseen = (torch.tensor(tokenizer(part)["input_ids"]) for part in parts)
    torch.manual_seed(seed)
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    config = EuroBertConfig(vocab_size=VOCAB + 1, mask_token_id=VOCAB, mask_token=VOCAB, **SIZES, **tokens)
    model = EuroBertForMaskedLM(config)
    train(model, masked_losses(model, kept, STEPS, seed), STEPS, LR)
    with torch.no_grad():
        loss = statistics.fmean(one.item() for one in masked_losses(model, unseen, 16, seed))
    model.model.save_pretrained(folder)
    torch.save((kept, unseen), f"{folder}/tokens.pt")
    return loss


def make_row(job, folder):
    """Convert, judge, distill and judge again."""
    torch.set_num_threads(1)
    kept, unseen = torch.load(f"{folder}/{job['seed']}/tokens.pt")
    teacher, student = (
        EuroBertModel.from_pretrained(f"{folder}/{job['seed']}").eval() for _ in range(2)
    )
    convert(student, **FORMS[job["form"]])
    before = compare(student, teacher, unseen)
    train(student, distilled_losses(student, teacher, kept, STUDENT_STEPS, job["seed"]), STUDENT_STEPS, STUDENT_LR)
    return {**job, "before": before, "after": compare(student, teacher, unseen)}


def describe(row):
    """One line of the log."""
    said = [
        f"{length}: {row[when][length]['cosine']:.4f} {row[when][length]['rank']:.3f}"
        for when in WHEN
        for length in row[when]
    ]
    return f"seed {row['seed']}, {row['form']}: {', '.join(said)}"
