"""What a conversion keeps of a real model, by position.

Every form is fitted on one text, keeps some KV heads by gates of its own, and is judged on other texts by its KL to the
original and its perplexity at different places of long rows, and by recall: the mean log-probability of the second copy of
half a row. Bytes are those of one sequence's cache in bf16, state and window counted. "window" is a conversion whose far
part is off, which is what DuoAttention keeps: the same form, with heads of its own, as many or as many as its bytes allow.
"""

import argparse
import functools
import math
import shlex
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mhla_hf import save_adapter
from mhla_hf.checkpoints.file_io import atomic_file
from mhla_hf.cli import script
from mhla_hf.conversion import convert
from mhla_hf.conversion.fit import GateFit, OutputFit, largest_gates
from mhla_hf.conversion.language import GATE_STEPS, give_softmax_back, read_rows
from mhla_hf.conversion.sizes import sizes_of_layers
from mhla_hf.conversion.teacher import mhla_layers

from .rows import add_rows, describe_setup, open_text

LENGTHS = {1024: 4, 4096: 1, 8192: 1}  # tokens of a row: rows
PLACES = {"to 1k": (0, 1024), "1k to 2k": (1024, 2048), "2k to 4k": (2048, 4096), "4k to 8k": (4096, 8192)}
OFF = -100.0  # the balance of a far part that is off
BYTES_AT = (1024, 4096, 8192, 32768)  # tokens for which the size of the cache is given
PART = 512  # tokens whose logits are held at once
FORMS = {  # settings beside the defaults; whether the far part is on
    "MHLA": ({"feature_map": "exp"}, True),
    "MHLA, own text": ({"feature_map": "exp"}, True),
    "MHLA, no text": ({}, True),
    "plain sum": ({"feature_map": "exp", "free_decay": False}, True),
    "window": ({}, False),
}


def read_text(file):
    """Return the first 1.3 million characters of a text file, which may be compressed."""
    with open_text(file) as text:
        return text.read(1_300_000)


def load(folder):
    """The softmax original in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def fit(model_folder, fit_text, work, form, seed):
    """Parameters and gates of a form, made once: {"mhla": state dict, "gates": {layer: [G]}, "seconds"}."""
    file = Path(work) / f"{form.replace(' ', '-').replace(',', '')}-{seed}.pt"
    if file.exists():
        return torch.load(file)
    settings, far = FORMS[form]
    model, tokenizer = load(model_folder), AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
    began = time.monotonic()
    rows = read_rows(model, tokenizer, "self" if form == "MHLA, own text" else fit_text, seed, False)
    convert(model, layers="all", **settings)
    if not far:
        switch_off(model)
    elif form != "MHLA, no text":
        fitted = OutputFit(model, steps=len(rows.fit))
        for ids in rows.fit:
            fitted.step(ids)
    gates = GateFit(model, rows.gates)
    for _ in range(GATE_STEPS):
        gates.step()
    state = {name: x for name, x in model.state_dict().items() if ".mhla." in name}
    result = {"mhla": state, "gates": gates.by_layer(), "seconds": time.monotonic() - began}
    with atomic_file(file) as aside:
        torch.save(result, aside)
    return result


def converted(model_folder, fit_text, work, form, heads, seed):
    """A model of a form with so many softmax heads, and what `fit` gave."""
    parts = fit(model_folder, fit_text, work, form, seed)
    model = load(model_folder)
    convert(model, layers="all", **FORMS[form][0])
    model.load_state_dict(parts["mhla"], strict=False)
    if heads:
        give_softmax_back(model, largest_gates(parts["gates"], heads))
    return model, parts


def switch_off(model):
    """No far part."""
    for attention in mhla_layers(model).values():
        attention.mhla.mixing.balance.data.fill_(OFF)


def count_bytes(model_folder, settings, heads, far):
    """Bytes of one sequence's cache in bf16 at `BYTES_AT` tokens, with so many softmax heads and with softmax in all.

    Without a far part neither summaries nor rotations are counted.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_folder, trust_remote_code=False), dtype=torch.bfloat16
        ).eval()
    convert(model, layers="all", **settings, **({} if far else {"rope": "before"}))
    sizes = sizes_of_layers(model).values()
    total = sum(size.num_kv_heads for size in sizes)
    token = sum(size.token_bytes for size in sizes) / total
    state = sum(size.state_bytes for size in sizes) / total
    if not far:
        core = mhla_layers(model)[0].mhla
        state -= (core.mixing.num_decays + 1) * core.k_map.num_features * (core.value_dim + 1) * 4
    sizes = {str(n): round(heads * token * n + (total - heads) * state) for n in BYTES_AT}
    return {"bytes": sizes, "whole_bytes": {str(n): round(total * token * n) for n in BYTES_AT}}


def make_row(arguments, job):
    """One form on one text."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if job["form"] in FORMS:
        (settings, far), places = FORMS[job["form"]], (arguments[name] for name in ("model", "fit", "work"))
        model, parts = converted(*places, job["form"], job["heads"], job["seed"])
        made_as = {"seconds": parts["seconds"], "softmax_heads": largest_gates(parts["gates"], job["heads"])}
    else:
        model = load(next(x for x in arguments["folders"] if Path(x).name == job["form"]))
        far = any(attention.mhla.mixing.balance.max() > OFF / 2 for attention in mhla_layers(model).values())
        settings = {name: model.config.mhla[name] for name in ("feature_map", "window", "num_decays")}
        made_as = {"softmax_heads": model.config.mhla["softmax_heads"]}
    row = {**job, "far": far, **made_as, **count_bytes(arguments["model"], settings, job["heads"], far)}
    text = next(text for text in arguments["texts"] if Path(text).name == job["text"])
    ids = rows_of(arguments["model"], text)
    return row | judge(model, ids, teacher_states(arguments["model"], text, Path(arguments["work"]), ids))


def rows_of(model_folder, text):
    """{length: rows `[N, length]`} of a text, one behind the other."""
    tokenizer, rows, first = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False), {}, 2048
    ids = tokenizer(read_text(text), return_tensors="pt", verbose=False).input_ids[0]
    for length, count in LENGTHS.items():
        rows[length] = ids[first : first + count * length].view(count, length)
        first += count * length
    return rows


@torch.no_grad()
def teacher_states(model_folder, text, work, rows):
    """The original's last hidden states of all rows and of their repeated halves, kept in a file."""
    file = work / f"teacher-{Path(text).name}.pt"
    if file.exists():
        return torch.load(file)
    model, states = load(model_folder), {}
    for length, ids in rows.items():
        for kind, tokens in (("plain", ids), ("repeated", repeated_half(ids))):
            states[length, kind] = [hidden(model, row) for row in tokens]
    with atomic_file(file) as aside:
        torch.save(states, aside)
    return states


def repeated_half(ids):
    """The first half of each row `[N, T]`, twice: what comes a second time can be recalled."""
    return torch.cat(2 * [ids[:, : ids.shape[1] // 2]], 1)


def hidden(model, ids):
    """Last hidden states `[T, width]` of one row of token ids `[T]`."""
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


@torch.no_grad()
def judge(model, rows, teacher):
    """{"places": {place: [KL, perplexity, the original's]}, "recall": {length: [ours, the original's]}}."""
    sums, recall = {name: torch.zeros(4, dtype=torch.float64) for name in PLACES}, {}
    for length, group in rows.items():
        scores = torch.zeros(2, dtype=torch.float64)
        for ids, state in zip(group, teacher[length, "plain"], strict=True):
            scored = compare(model, ids, hidden(model, ids), state)
            for name, (first, last) in PLACES.items():
                if last <= length:
                    part = scored[first:last]
                    sums[name] += torch.cat([part.sum(0), torch.tensor([len(part)])])
        for ids, state in zip(repeated_half(group), teacher[length, "repeated"], strict=True):
            scored = compare(model, ids, hidden(model, ids), state)[length // 2 :]
            scores -= scored[:, 1:].mean(0) / len(group)
        recall[str(length)] = scores.tolist()
    places = {}
    for name, (kl, loss, teacher_loss, count) in sums.items():
        places[name] = [float(kl / count), math.exp(loss / count), math.exp(teacher_loss / count)]
    return {"places": places, "recall": recall}


def compare(model, ids, student, teacher):
    """`[T - 1, 3]`, fp64: the KL to the original, the loss, and the original's loss, of each next token."""
    head, parts = model.get_output_embeddings(), []
    for first in range(0, len(ids) - 1, PART):
        last = min(first + PART, len(ids) - 1)
        log_p, log_q = (head(x[first:last]).float().log_softmax(-1) for x in (teacher, student))
        target = ids[first + 1 : last + 1, None]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts.append(torch.stack([kl, *(-x.gather(-1, target)[:, 0] for x in (log_q, log_p))], 1).double())
    return torch.cat(parts)


def jobs_of(arguments):
    """Each row that is asked for: FORM:HEADS[:SEEDS], and each folder, on every text."""
    for folder in arguments["folders"]:
        heads = AutoConfig.from_pretrained(folder, trust_remote_code=False).mhla["softmax_heads"] or {}
        for text in arguments["texts"]:
            yield {
                "form": Path(folder).name,
                "heads": sum(map(len, heads.values())),
                "seed": 0,
                "text": Path(text).name,
            }
    for wanted in arguments["rows"]:
        form, heads, *seeds = wanted.split(":")
        for seed in range(int(seeds[0]) if seeds else 1):
            for text in arguments["texts"]:
                yield {"form": form, "heads": int(heads), "seed": seed, "text": Path(text).name}


def describe(row):
    """One line of the log."""
    places = " ".join(f"{kl:.4f} ({own / theirs - 1:+.1%})" for kl, own, theirs in row["places"].values())
    recall = " ".join(f"{own:.3f} ({theirs:.3f})" for own, theirs in row["recall"].values())
    return (
        f"{row['form']}, {row['heads']} heads, seed {row['seed']}, {Path(row['text']).name}: {places}; recall {recall}"
    )


def render_heads(record):
    """A table for each text: means over the seeds."""
    tables = []
    for text in dict.fromkeys(row["text"] for row in record["rows"]):
        groups = {}
        for row in record["rows"]:
            if row["text"] == text:
                groups.setdefault((row["form"], row["heads"]), []).append(row)
        places = [f"KL, {name}" for name in PLACES]
        names = [*(f"MiB at {n // 1024}k" for n in BYTES_AT[1:]), *places]
        names += ["perplexity 4k to 8k", *(f"recall at {n // 1024}k" for n in LENGTHS)]
        lines = [f"| {Path(text).name} | seeds | " + " | ".join(names) + " |", "|---|---:" + "|---:" * len(names) + "|"]
        first = next(iter(groups.values()))[0]
        theirs = [first["places"]["4k to 8k"][2], *(x[1] for x in first["recall"].values())]
        whole = [f"{first['whole_bytes'][str(n)] / 2**20:.1f}" for n in BYTES_AT[1:]]
        cells = [*whole, *["0"] * len(places), f"{theirs[0]:.2f}", *(f"{x:.3f}" for x in theirs[1:])]
        lines.append("| softmax | | " + " | ".join(cells) + " |")
        for (form, heads), rows in groups.items():

            def mean(get, rows=rows):
                return sum(map(get, rows)) / len(rows)

            cells = [f"{rows[0]['bytes'][str(n)] / 2**20:.1f}" for n in BYTES_AT[1:]]
            cells += [f"{mean(lambda row, name=name: row['places'][name][0]):.4f}" for name in PLACES]
            cells.append(f"{mean(lambda row: row['places']['4k to 8k'][1]):.2f}")
            cells += [f"{mean(lambda row, n=n: row['recall'][str(n)][0]):.3f}" for n in LENGTHS]
            lines.append(f"| {form}, {heads} heads | {len(rows)} | " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join([*tables, describe_setup(record)])


def main():
    """Run it."""
    parser = argparse.ArgumentParser("heads", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder of a softmax language model")
    parser.add_argument("--fit", required=True, help="text to learn from")
    parser.add_argument("--texts", nargs="+", required=True, help="texts to judge on")
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="FORM:HEADS[:SEEDS]", help=f"forms: {', '.join(FORMS)}"
    )
    parser.add_argument("--folders", nargs="*", default=[], help="converted models, such as distilled ones")
    parser.add_argument("--adapter", help="folder for the first of --rows, seed 0, as an adapter")
    parser.add_argument("--work", default="out-heads", help="folder for what is fitted")
    parser.add_argument("--out", default="docs/language/heads.json")
    arguments = vars(parser.parse_args())
    Path(arguments["work"]).mkdir(parents=True, exist_ok=True)
    command = shlex.join(
        ["python", "-m", "experiments.heads", *(Path(x).name if "/" in x else x for x in sys.argv[1:])]
    )
    make, adapter = functools.partial(make_row, arguments), arguments.pop("adapter")
    record = add_rows(arguments["out"], make, list(jobs_of(arguments)), describe, workers=1, command=command)
    print(render_heads(record))
    if adapter:
        write_adapter(arguments, next(jobs_of(arguments)), adapter)


def write_adapter(arguments, job, folder):
    """Save what one form learned and the heads that it keeps, in bf16."""
    places = (arguments[name] for name in ("model", "fit", "work"))
    model, parts = converted(*places, job["form"], job["heads"], job["seed"])
    gates = {str(layer): [round(x, 3) for x in values] for layer, values in parts["gates"].items()}
    kept_heads = {str(layer): heads for layer, heads in largest_gates(parts["gates"], job["heads"]).items()}
    measured = {"text": Path(arguments["fit"]).name, "seed": job["seed"], "gates": gates, "softmax_heads": kept_heads}
    model.config.mhla_measured = measured
    save_adapter(model.to(torch.bfloat16), folder)


if __name__ == "__main__":
    script(main, "heads")
