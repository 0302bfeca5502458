"""Measure what conversions keep of a real language model, by position in long texts.

The KV heads that keep softmax are chosen on one text. Others judge the conversion: KL to the original and perplexity by
position, and recall, the mean log-probability of the second copy of half a row. "salient" is the default with as many
salient tokens as it says. "window" has a window alone (DuoAttention), and "wide window" one of as many bytes as 128 salient
tokens.
"""

import functools
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mhla_hf import load_adapter, save_adapter
from mhla_hf.checkpoints.file_io import atomic_file
from mhla_hf.cli.main import script
from mhla_hf.conversion import convert
from mhla_hf.conversion.head_choice import highest_scores, score_heads
from mhla_hf.conversion.language import read_rows
from mhla_hf.conversion.sizes import sizes_of_layers
from mhla_hf.training.adapters import SETTINGS_FILE, WEIGHTS_FILE

from .rows import Row, add_rows, describe_setup, make_parser, markdown, open_text, parse_call

LENGTHS = {1024: 4, 4096: 1, 8192: 1}  # tokens of a row: number of rows
PLACES = {"to 1k": (0, 1024), "1k to 2k": (1024, 2048), "2k to 4k": (2048, 4096), "4k to 8k": (4096, 8192)}  # positions
BYTES_AT = (1024, 4096, 8192)  # tokens at which the bytes of the cache are counted, up to the positions of SmolLM2
PART = 512  # tokens whose logits are in memory at once
FORMS: dict[str, dict[str, Any]] = {  # settings that differ from the defaults
    **{f"salient {count}": {"salient": count} for count in (64, 128, 256, 512)},
    "salient 128, own text": {"salient": 128},
    "window": {"salient": 0},
    "wide window": {"window": 8, "salient": 0},
}


def read_text(path: str | Path) -> str:
    """Read the first 1.3 million characters of a text file, which may be compressed."""
    with open_text(path) as text:
        return text.read(1_300_000)


load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32, trust_remote_code=False)
load_tokenizer = functools.partial(AutoTokenizer.from_pretrained, trust_remote_code=False)


def score_form(arguments: Mapping[str, Any], form: str, seed: int) -> dict[str, Any]:
    """Score the KV heads of a form, or load the scores from the file of an earlier call; the seed selects passages.

    "scores" is what `score_heads` returns, and "seconds" is what it took with the text.
    """
    file = Path(arguments["work"]) / f"{form.replace(' ', '-').replace(',', '')}-{seed}.pt"
    if file.exists():
        return torch.load(file)
    model, tokenizer = load(arguments["model"]), load_tokenizer(arguments["model"])
    started = time.monotonic()
    text = "self" if form.endswith("own text") else arguments["fit"]
    rows = read_rows(model, tokenizer, text, seed, False)
    convert(model, layers="all", **FORMS[form])
    scores = score_heads(model, rows.scored, tqdm(disable=True))
    result = {"scores": scores, "seconds": time.monotonic() - started}
    with atomic_file(file) as temporary_path:
        torch.save(result, temporary_path)
    return result


def converted(arguments: Mapping[str, Any], job: Row) -> tuple[Any, Row]:
    """Make the model of a job, in which "heads" KV heads keep softmax; return it, its "softmax_heads", and "seconds"."""
    scored = score_form(arguments, job["form"], job["seed"])
    softmax_heads = highest_scores(scored["scores"], job["heads"])
    model = convert(load(arguments["model"]), layers="all", softmax_heads=softmax_heads, **FORMS[job["form"]])
    return model, {"seconds": scored["seconds"], "softmax_heads": softmax_heads}


def load_folder(arguments: Mapping[str, Any], job: Row) -> Any:
    """Load the converted model in fp32, or the original with the adapter, from the folder that the job names."""
    folder = next(folder for folder in arguments["folders"] if Path(folder).name == job["form"])
    if not Path(folder, SETTINGS_FILE).is_file():
        return load(folder)
    return load_adapter(load(arguments["model"]), folder).merge_and_unload()


def count_softmax_heads(folder: str) -> int:
    file = Path(folder, SETTINGS_FILE)
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8"))["mhla"]
    else:
        settings = AutoConfig.from_pretrained(folder, trust_remote_code=False).mhla
    return sum(map(len, (settings["softmax_heads"] or {}).values()))


def count_bytes(model_folder: str | Path, settings: Mapping[str, Any], heads: int) -> dict[str, dict[str, int]]:
    """Count the bytes of one sequence's cache in bf16 at `BYTES_AT` tokens, with softmax in `heads` KV heads, and in all."""
    config = AutoConfig.from_pretrained(model_folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    sizes = sizes_of_layers(convert(model, layers="all", **settings)).values()
    num_heads = sum(size.num_kv_heads for size in sizes)
    token_bytes = sum(size.token_bytes for size in sizes) / num_heads
    state_bytes = sum(size.state_bytes for size in sizes) / num_heads
    lengths = sorted({min(n, model.config.max_position_embeddings) for n in BYTES_AT})
    return {
        "bytes": {str(n): round(heads * token_bytes * n + (num_heads - heads) * state_bytes) for n in lengths},
        "whole_bytes": {str(n): round(num_heads * token_bytes * n) for n in lengths},
    }


def make_row(arguments: Mapping[str, Any], job: Row) -> Row:
    """Make or load the model of a job ("form", "heads", "seed", and "text"), and evaluate it on the job's text."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    made_as: Row
    if job["form"] in FORMS:
        settings = FORMS[job["form"]]
        model, made_as = converted(arguments, job)
    else:
        model = load_folder(arguments, job)
        settings = {name: model.config.mhla[name] for name in ("window", "salient")}
        made_as = {"softmax_heads": model.config.mhla["softmax_heads"]}
    row = {**job, **made_as, **count_bytes(arguments["model"], settings, job["heads"])}
    text = next(text for text in arguments["texts"] if Path(text).name == job["text"])
    return row | judge(model, *rows_and_states(arguments, text))


TeacherStates = dict[tuple[int, str], list[torch.Tensor]]  # by length, and "plain" or "repeated"


@torch.no_grad()
def rows_and_states(arguments: Mapping[str, Any], text: str) -> tuple[dict[int, torch.Tensor], TeacherStates]:
    """Cut a text file into rows `[N, length]` by length, and compute the original's last hidden states of each ("plain"),
    and of its first half twice ("repeated"), or load them from the file of an earlier call."""
    ids = load_tokenizer(arguments["model"])(read_text(text), return_tensors="pt", verbose=False).input_ids[0]
    rows = {}
    first = 2048
    for length, count in LENGTHS.items():
        rows[length] = ids[first : first + count * length].view(count, length)
        first += count * length
    file = Path(arguments["work"]) / f"teacher-{Path(text).name}.pt"
    if file.exists():
        return rows, torch.load(file)
    model = load(arguments["model"])
    states: TeacherStates = {}
    for length, of_length in rows.items():
        for kind, tokens in (("plain", of_length), ("repeated", repeated_half(of_length))):
            states[length, kind] = [hidden(model, row) for row in tokens]
    with atomic_file(file) as temporary_path:
        torch.save(states, temporary_path)
    return rows, states


def repeated_half(ids: torch.Tensor) -> torch.Tensor:
    """Return the first half of each row twice, so that the second copy can be recalled: `[N, T]` for `[N, T]`."""
    return torch.cat(2 * [ids[:, : ids.shape[1] // 2]], 1)


def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]


@torch.no_grad()
def judge(model: Any, rows: Mapping[int, torch.Tensor], teacher: TeacherStates) -> dict[str, Any]:
    """Compare a model with its original.

    "places" has [KL in nats, perplexity, the original's] by `PLACES`, and "recall" [recall, the original's] by length.
    """
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in PLACES}  # of KL and both losses, and their number
    recall = {}
    for length, group in rows.items():
        log_p = torch.zeros(2, dtype=torch.float64)
        for ids, states in zip(group, teacher[length, "plain"], strict=True):
            scores = compare(model, ids, hidden(model, ids), states)
            for name, (first, last) in PLACES.items():
                if last <= length:
                    part = scores[first:last]
                    sums[name] += torch.cat([part.sum(0), torch.tensor([len(part)])])
        for ids, states in zip(repeated_half(group), teacher[length, "repeated"], strict=True):
            scores = compare(model, ids, hidden(model, ids), states)[length // 2 :]
            log_p -= scores[:, 1:].mean(0) / len(group)
        recall[str(length)] = log_p.tolist()
    places = {}
    for name, (kl, loss, teacher_loss, count) in sums.items():
        places[name] = [float(kl / count), math.exp(loss / count), math.exp(teacher_loss / count)]
    return {"places": places, "recall": recall}


def compare(model: Any, ids: torch.Tensor, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Return KL to the original, loss, and the original's loss, in nats, of each next token: fp64 `[T - 1, 3]`."""
    head = model.get_output_embeddings()
    parts = []
    for first in range(0, len(ids) - 1, PART):
        last = min(first + PART, len(ids) - 1)
        log_p, log_q = (head(x[first:last]).float().log_softmax(-1) for x in (teacher, student))
        target = ids[first + 1 : last + 1, None]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        losses = [-x.gather(-1, target)[:, 0] for x in (log_q, log_p)]
        parts.append(torch.stack([kl, *losses], 1).double())
    return torch.cat(parts)


def jobs_of(arguments: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a job for each folder and each of --rows, FORM:HEADS[:SEEDS], on every text; see `make_row`."""
    for folder in arguments["folders"]:
        for text in arguments["texts"]:
            yield {"form": Path(folder).name, "heads": count_softmax_heads(folder), "seed": 0, "text": Path(text).name}
    for row in arguments["rows"]:
        form, heads, *seeds = row.split(":")
        for seed in range(int(seeds[0]) if seeds else 1):
            for text in arguments["texts"]:
                yield {"form": form, "heads": int(heads), "seed": seed, "text": Path(text).name}


def render_heads(record: Mapping[str, Any]) -> str:
    tables = []
    for text in dict.fromkeys(row["text"] for row in record["rows"]):
        groups: dict[tuple[str, int], list[Row]] = {}  # by form and heads
        for row in record["rows"]:
            if row["text"] == text:
                groups.setdefault((row["form"], row["heads"]), []).append(row)
        columns = [f"MiB at {BYTES_AT[-1] // 1024}k", *(f"KL, {name}" for name in PLACES)]
        columns += ["perplexity 4k to 8k", *(f"recall at {n // 1024}k" for n in BYTES_AT[1:])]
        row = next(iter(groups.values()))[0]
        cells = [f"{row['whole_bytes'][str(BYTES_AT[-1])] / 2**20:.1f}"] + ["0"] * len(PLACES)
        cells.append(f"{row['places']['4k to 8k'][2]:.2f}")
        lines = [["softmax", *cells, *(f"{row['recall'][str(n)][1]:.3f}" for n in BYTES_AT[1:])]]
        for (form, heads), rows in groups.items():
            cells = [f"{rows[0]['bytes'][str(BYTES_AT[-1])] / 2**20:.1f}"]
            measures = [("places", name, 0, ".4f") for name in PLACES] + [("places", "4k to 8k", 1, ".2f")]
            for measure, key, index, spec in measures + [("recall", str(n), 0, ".3f") for n in BYTES_AT[1:]]:
                cells.append(f"{sum(row[measure][key][index] for row in rows) / len(rows):{spec}}")
            lines.append([f"{form}, {heads} heads" + f", {len(rows)} seeds" * (len(rows) > 1), *cells])
        tables.append(markdown([Path(text).name, *columns], lines))
    return "\n\n".join([*tables, describe_setup(record)])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="folder of a softmax language model")
    parser.add_argument("--fit", required=True, help="text to choose heads by")
    parser.add_argument("--texts", nargs="+", required=True, help="texts to judge on")
    parser.add_argument(
        "--rows", nargs="*", default=[], metavar="FORM:HEADS[:SEEDS]", help=f"forms: {', '.join(FORMS)}"
    )
    parser.add_argument("--folders", nargs="*", default=[], help="converted or distilled models, or adapters")
    parser.add_argument("--adapter", help="folder for the first of --folders as an adapter")
    parser.add_argument("--rank", type=int, default=16, help="rank of LoRA in the adapter of a distilled model")
    parser.add_argument("--work", default="out-heads", help="folder for scores of heads")
    parser.add_argument("--out", default="docs/language/heads.json")
    args, command = parse_call(parser, "heads", None)
    arguments = vars(args)
    Path(args.work).mkdir(parents=True, exist_ok=True)
    adapter = arguments.pop("adapter")
    make = functools.partial(make_row, arguments)
    print(render_heads(add_rows(args.out, make, list(jobs_of(arguments)), command)))
    if adapter:
        write_adapter(arguments, next(jobs_of(arguments)), adapter)


def write_adapter(arguments: Mapping[str, Any], job: Row, folder: str) -> None:
    """Save the model of a folder as an adapter in bf16; what distillation changed in the original's weights becomes LoRA."""
    save_adapter(load_folder(arguments, job), folder, base=load(arguments["model"]), rank=arguments["rank"])
    file = Path(folder, WEIGHTS_FILE)
    with safe_open(file, "pt") as stream:
        metadata = stream.metadata()
    save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file, metadata)


if __name__ == "__main__":
    script(main, "heads")
