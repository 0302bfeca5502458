"""What a real text encoder keeps when it becomes MHLA.

Every form learns from one text, without labels, and is judged on others: on the sentence pairs of STS-B by the rank
correlation of their cosines with people's scores, and on passages of 128 and 512 tokens by the cosine of their embeddings to
the original's and by the rank correlation with the original's cosines of all pairs of passages. Embeddings are the mean over
tokens, as sentence-transformers takes it for this model. Rows that the file has are not made again.
"""

import argparse
import functools
import gzip
import json
import shlex
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from transformers import AutoTokenizer

from mhla_hf.checkpoints.load import load_encoder
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.conversion.encoder import embed, read_encoder_rows
from mhla_hf.conversion.fit import OutputFit
from mhla_hf.conversion.teacher import mhla_layers
from mhla_hf.data import special_tokens, with_special_tokens

from .rows import add_rows, made, number

LENGTHS = {128: 64, 512: 32}  # tokens of a passage: passages
SENTENCE_TOKENS, BATCH = 256, 64  # the most tokens of a sentence, as the model's own sentence_bert_config.json says
OFF = -100.0  # the balance of a far part that is off
MATRIX = {"mixing_form": "softmax"}
SMALL = {"block_size": 16, "feature_map": "exp"}
FORMS = {  # settings beside the defaults, and what is done with the far part
    "softmax": (None, None),
    "plain linear": ({**MATRIX, "mixing_start": "uniform", "learn_mixing": False}, "fitted"),
    "matrix of blocks": (MATRIX, "fitted"),
    "window": ({}, "off"),
    "MHLA, no text": ({}, "as it starts"),
    "MHLA": ({"feature_map": "exp"}, "fitted"),
    "window, blocks of 16": (SMALL, "off"),
    "MHLA, blocks of 16": (SMALL, "fitted"),
}
DISTILLED = "MHLA, distilled"
KEYS = {"sts": "STS-B", "cosine 128": "cosine, 128", "rank 128": "rank, 128", "cosine 512": "cosine, 512"}
KEYS |= {"rank 512": "rank, 512"}


def load(folder):
    """An encoder in fp32, softmax or MHLA."""
    return load_encoder(folder, dtype="float32", device="cpu")[0]


def make_model(arguments, form, seed):
    """A model of one form."""
    if not seed and form in arguments["folders"]:
        return load(arguments["folders"][form])
    model, (settings, far) = load(arguments["model"]), FORMS[form]
    if settings is None:
        return model
    convert(model, layers="all", **settings)
    if far == "off":
        for attention in mhla_layers(model).values():
            attention.mhla.mixing.balance.data.fill_(OFF)
    if far == "fitted":
        tokenizer = AutoTokenizer.from_pretrained(arguments["model"], trust_remote_code=False)
        rows = read_encoder_rows(model, tokenizer, arguments["fit"], seed, False)
        fit = OutputFit(model, steps=len(rows.fit))
        for ids in rows.fit:
            fit.step(ids)
    return model


def make_row(arguments, job):
    """One form of one seed, judged."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    began = time.monotonic()
    model = make_model(arguments, job["form"], job["seed"])
    seconds = time.monotonic() - began
    tokenizer = AutoTokenizer.from_pretrained(arguments["model"], trust_remote_code=False)
    scores = {"sts": sts_score(model, tokenizer, read_pairs(arguments["sts"]))}
    expected = original_embeddings(arguments["model"], arguments["long"])
    for length, ids in read_passages(tokenizer, arguments["long"]).items():
        embeddings = torch.cat([embed(model, part) for part in ids.split(8)])
        scores |= {f"{kind} {length}": x for kind, x in compare(embeddings, expected[length]).items()}
    return {**job, "seconds": round(seconds), "scores": scores}


def read_pairs(file):
    """The pairs of STS-B: dicts with sentence1, sentence2 and score, one a line of a JSON file, which may be compressed."""
    with (gzip.open if str(file).endswith(".gz") else open)(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def sts_score(model, tokenizer, pairs):
    """100 times the rank correlation of the cosines of pairs of sentences with their scores."""
    sentences = sorted({pair[name] for pair in pairs for name in ("sentence1", "sentence2")}, key=len)
    embedded = {}
    for first in range(0, len(sentences), BATCH):
        part = sentences[first : first + BATCH]
        embedded |= zip(part, embed_sentences(model, tokenizer, part), strict=True)
    cosines = [float(embedded[pair["sentence1"]] @ embedded[pair["sentence2"]]) for pair in pairs]
    return 100 * rank_correlation(torch.tensor(cosines), torch.tensor([float(pair["score"]) for pair in pairs]))


@torch.no_grad()
def embed_sentences(model, tokenizer, sentences):
    """The mean over the real tokens of each sentence, of norm 1: `[N, width]`."""
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=SENTENCE_TOKENS, return_tensors="pt")
    hidden, is_real = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None].float()
    return F.normalize((hidden * is_real).sum(1) / is_real.sum(1), dim=-1)


def rank_correlation(one, other):
    """Return Spearman's rank correlation of two tensors `[N]`."""
    return float(spearmanr(one, other).statistic)


def read_passages(tokenizer, text):
    """{length: passages `[N, length]`} from the whole of a text, evenly spaced, each between its special tokens."""
    ids = torch.tensor(
        tokenizer(Path(text).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
    )
    around, passages = special_tokens(tokenizer), {}
    for length, count in LENGTHS.items():
        text_tokens = length - sum(map(len, around))
        first = torch.arange(count) * (len(ids) - text_tokens) // count
        passages[length] = with_special_tokens(ids[first[:, None] + torch.arange(text_tokens)], around)
    return passages


@functools.cache
def original_embeddings(model, text):
    """The original's embeddings of the passages of a text, {length: `[N, width]`}."""
    model, tokenizer = load(model), AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    passages = read_passages(tokenizer, text)
    return {length: torch.cat([embed(model, part) for part in ids.split(8)]) for length, ids in passages.items()}


def compare(found, expected):
    """The mean cosine of embeddings `[N, width]` to the original's, and the rank correlation of all pairs' cosines."""
    pairs = torch.ones(len(found), len(found)).triu(1).bool()
    rank = rank_correlation((found @ found.T)[pairs], (expected @ expected.T)[pairs])
    return {"cosine": float((found * expected).sum(-1).mean()), "rank": rank}


def describe(row):
    """One line of the log."""
    return f"{row['form']}, seed {row['seed']}, {row['seconds']} s: " + ", ".join(
        f"{name} {score:.4f}" for name, score in row["scores"].items()
    )


def render_encoder(record):
    """The table: a form per line, mean and standard error over its seeds."""
    lines = [f"| attention | seeds | {' | '.join(KEYS.values())} |", "|---" + "|---:" * (len(KEYS) + 1) + "|"]
    for form in (*FORMS, DISTILLED):
        if own := [row for row in record["rows"] if row["form"] == form]:
            cells = [
                number([row["scores"][key] for row in own], "{:.2f}" if key == "sts" else "{:.4f}") for key in KEYS
            ]
            lines.append(f"| {form} | {len(own)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Mean ± standard error over seeds. {made(record)}"])


def main():
    """Run it."""
    parser = argparse.ArgumentParser("python -m experiments.encoder", description=__doc__)
    parser.add_argument("model", help="folder of the softmax encoder")
    parser.add_argument("--fit", required=True, help="text file to learn from")
    parser.add_argument("--sts", required=True, help="JSON lines with sentence1, sentence2 and score")
    parser.add_argument("--long", required=True, help="text file whose passages are embedded")
    parser.add_argument("--converted", help="folder of the encoder as `convert` with TEXT made it: seed 0 of MHLA")
    parser.add_argument("--distilled", help="folder that `mhla-hf distill` made of it, a further row")
    parser.add_argument("--forms", nargs="+", choices=(*FORMS, DISTILLED), help="only these")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... of what is fitted (default: 3)")
    parser.add_argument("--out", default="docs/evidence/encoder.json", help="JSON file to make or to go on in")
    arguments = vars(parser.parse_args())
    folders = {"MHLA": arguments["converted"], DISTILLED: arguments["distilled"]}
    arguments["folders"] = {form: folder for form, folder in folders.items() if folder}
    jobs = [{"form": form, "seed": 0} for form in dict.fromkeys((*FORMS, *arguments["folders"]))]
    fitted = [form for form, (_, far) in FORMS.items() if far == "fitted"]
    jobs += [{"form": form, "seed": seed} for seed in range(1, arguments["seeds"]) for form in fitted]
    jobs = [job for job in jobs if job["form"] in (arguments["forms"] or (*FORMS, DISTILLED))]
    command = ["python", "-m", "experiments.encoder", *(Path(x).name if "/" in x else x for x in sys.argv[1:])]
    row = functools.partial(make_row, arguments)
    print(render_encoder(add_rows(arguments["out"], row, jobs, describe, workers=1, command=shlex.join(command))))


if __name__ == "__main__":
    script(main, "encoder")
