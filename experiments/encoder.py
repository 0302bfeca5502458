"""Measure how much of a real text encoder's quality its conversions keep.

Every form is fitted on one text, without labels, and evaluated on others: by the rank correlation of STS-B, and on passages
of 128 and 512 tokens by the cosine of an embedding (the mean over tokens) to the original's, and the rank of all pairs.
"""

import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from mhla_hf.checkpoints.load import load_encoder
from mhla_hf.cli.main import script
from mhla_hf.conversion import convert
from mhla_hf.conversion.encoder import embed, read_rows
from mhla_hf.conversion.fit import OutputFit
from mhla_hf.conversion.teacher import mhla_layers
from mhla_hf.data import special_tokens, with_special_tokens

from .heads import load_tokenizer
from .rows import Row, add_rows, describe_setup, format_mean, make_parser, markdown, open_text, parse_call

LENGTHS = {128: 64, 512: 32}  # tokens of a passage: number of passages
MAX_SENTENCE_TOKENS = 256  # as in the model's sentence_bert_config.json
SENTENCE_BATCH, PASSAGE_BATCH = 64, 8
OFF = -100.0  # balance that switches the far part off
MATRIX = {"windowed": False}
SMALL = {"block_size": 16, "feature_map": "exp"}
FORMS = {  # settings that differ from the defaults (None: softmax), and what happens to the far part
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
KEYS = {"sts": "STS-B"} | {f"{kind} {n}": f"{kind}, {n}" for n in LENGTHS for kind in ("cosine", "rank")}  # columns


def load(folder: str) -> Any:
    return load_encoder(folder, dtype="float32", device="cpu")[0]


def make_model(arguments: Mapping[str, Any], form: str, seed: int) -> Any:
    """Load or convert the model of a form; the seed selects the text that the far part is fitted on."""
    if not seed and form in arguments["folders"]:
        return load(arguments["folders"][form])
    settings, far_part = FORMS[form]
    model = load(arguments["model"])
    if settings is None:
        return model
    convert(model, layers="all", **settings)
    if far_part == "off":
        for attention in mhla_layers(model).values():
            attention.mhla.mixing.balance.data.fill_(OFF)
    if far_part == "fitted":
        tokenizer = load_tokenizer(arguments["model"])
        rows = read_rows(model, tokenizer, arguments["fit"], seed, 1.0, None)
        fit = OutputFit(model, steps=len(rows.fit))
        for ids in rows.fit:
            fit.step(ids)
    return model


def make_row(arguments: Mapping[str, Any], job: Row) -> Row:
    """Make and evaluate the model of one form and seed: "seconds" (to make it), and "scores" (the keys of `KEYS`)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    started = time.monotonic()
    model = make_model(arguments, job["form"], job["seed"])
    seconds = time.monotonic() - started
    tokenizer = load_tokenizer(arguments["model"])
    with open_text(arguments["sts"]) as lines:
        scores = {"sts": sts_score(model, tokenizer, [json.loads(line) for line in lines])}
    expected = original_embeddings(arguments["model"], arguments["long"])
    for length, embeddings in embed_passages(model, tokenizer, arguments["long"]).items():
        for kind, score in compare(embeddings, expected[length]).items():
            scores[f"{kind} {length}"] = score
    return {**job, "seconds": round(seconds), "scores": scores}


@torch.no_grad()
def sts_score(model: Any, tokenizer: Any, pairs: Sequence[Mapping[str, Any]]) -> float:
    """Return 100 times the rank correlation of the cosines of sentence pairs with their scores."""
    sentences = sorted({pair[name] for pair in pairs for name in ("sentence1", "sentence2")}, key=len)
    embeddings: dict[str, torch.Tensor] = {}
    options = {"padding": True, "truncation": True, "max_length": MAX_SENTENCE_TOKENS, "return_tensors": "pt"}
    for first in range(0, len(sentences), SENTENCE_BATCH):
        batch = sentences[first : first + SENTENCE_BATCH]
        inputs = tokenizer(batch, **options)
        is_real = inputs["attention_mask"][..., None].float()
        means = (model(**inputs).last_hidden_state * is_real).sum(1) / is_real.sum(1)
        embeddings.update(zip(batch, F.normalize(means, dim=-1), strict=True))
    cosines = [float(embeddings[pair["sentence1"]] @ embeddings[pair["sentence2"]]) for pair in pairs]
    return 100 * float(spearmanr(cosines, [float(pair["score"]) for pair in pairs]).statistic)


def embed_passages(model: Any, tokenizer: Any, path: str | Path) -> dict[int, torch.Tensor]:
    """Return the normalized embeddings `[N, width]` of evenly spaced passages of a text, by their length."""
    text = Path(path).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    special = special_tokens(tokenizer)
    embeddings = {}
    for length, num_passages in LENGTHS.items():
        num_tokens = length - sum(map(len, special))
        first = torch.arange(num_passages) * (len(ids) - num_tokens) // num_passages
        passages = with_special_tokens(ids[first[:, None] + torch.arange(num_tokens)], special)
        embeddings[length] = torch.cat([embed(model, batch) for batch in passages.split(PASSAGE_BATCH)])
    return embeddings


@functools.cache
def original_embeddings(folder: str, text: str) -> dict[int, torch.Tensor]:
    return embed_passages(load(folder), load_tokenizer(folder), text)


def compare(embeddings: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Return the mean "cosine" of embeddings to the original's, and the "rank" correlation of the cosines of all pairs."""
    is_pair = torch.ones(len(embeddings), len(embeddings)).triu(1).bool()
    rank = spearmanr((embeddings @ embeddings.T)[is_pair], (expected @ expected.T)[is_pair])
    return {"cosine": float((embeddings * expected).sum(-1).mean()), "rank": float(rank.statistic)}


def render_encoder(record: Mapping[str, Any]) -> str:
    lines = []
    for form in (*FORMS, DISTILLED):
        if rows := [row["scores"] for row in record["rows"] if row["form"] == form]:
            cells = [format_mean([row[key] for row in rows], "{:.2f}" if key == "sts" else "{:.4f}") for key in KEYS]
            lines.append([form, str(len(rows)), *cells])
    table = markdown(["attention", "seeds", *KEYS.values()], lines)
    return f"{table}\n\nMean ± standard error over seeds. {describe_setup(record)}"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="folder of the softmax encoder")
    parser.add_argument("--fit", required=True, help="text file to fit on")
    parser.add_argument("--sts", required=True, help="lines of JSON with sentence1, sentence2, and score")
    parser.add_argument("--long", required=True, help="text file whose passages are embedded")
    parser.add_argument("--converted", help="folder of the encoder that `convert` with TEXT returns: seed 0 of MHLA")
    parser.add_argument("--distilled", help="folder of the encoder after `mhla-hf distill`, another row")
    parser.add_argument("--forms", nargs="+", choices=(*FORMS, DISTILLED), help="default: all")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of forms that are fitted (default: 3)")
    parser.add_argument("--out", default="docs/evidence/encoder.json", help="JSON file to create or to extend")
    args, command = parse_call(parser, "encoder", None)
    folders = {"MHLA": args.converted, DISTILLED: args.distilled}
    arguments = {**vars(args), "folders": {form: folder for form, folder in folders.items() if folder}}
    jobs = [{"form": form, "seed": 0} for form in dict.fromkeys((*FORMS, *arguments["folders"]))]
    fitted = [form for form, (_, far_part) in FORMS.items() if far_part == "fitted"]
    jobs += [{"form": form, "seed": seed} for seed in range(1, args.seeds) for form in fitted]
    jobs = [job for job in jobs if job["form"] in (args.forms or (*FORMS, DISTILLED))]
    make = functools.partial(make_row, arguments)
    print(render_encoder(add_rows(args.out, make, jobs, command)))


if __name__ == "__main__":
    script(main, "encoder")
