"""The model card: what was kept and lost against the softmax original, how it was made, how fast it is, how to load it.

Unusual: no number is typed by hand. `render_card` shows what `CardFacts` holds and nothing else, `write_card` keeps the
facts that have no other file in card.json, and `check_card` renders again and names the first number that differs.
"""

import dataclasses
import math
import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..files import write_text
from ..scores.results import Result, Results, format_score, render_table
from .card_facts import (
    OWN,
    PERSON_FILE,
    TEACHER,
    CardFacts,
    find_licence,
    person_json,
    read_facts,
    read_person,
    read_records,
)

CARD_FILE = "README.md"
PAPER = "https://arxiv.org/abs/2601.07832"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
RECALL = ("recall", "niah", "needle", "ruler", "passage_retrieval", "fda", "swde", "squad_completion")
CITATION = """\
@article{zhang2026mhla,
  title  = {MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head},
  author = {Kewei Zhang and Ye Huang and Yufan Deng and Jincheng Yu and Junsong Chen and Huan Ling and Enze Xie and
            Daquan Zhou},
  journal = {arXiv preprint arXiv:2601.07832},
  year   = {2026}
}"""


def write_card(
    folder,
    *,
    name,
    base_model=None,
    compared=None,
    license=None,
    license_name=None,
    license_link=None,
    datasets=(),
    language=(),
    about="",
    limits=(),
) -> Path:
    """Write README.md and card.json into a saved and evaluated MHLA model's folder.

    Args:
        folder: holds config.json and results.json; train.json and speed.json are used when there.
        name: Hub id the model will have ("user/model"), or a plain name.
        base_model: Hub id of the softmax original; None when it is not published or the model was trained from scratch.
        compared: label -> folder of another model with a results.json, in the order of the columns. The label "teacher"
            is the softmax original; "hybrid" and "plain linear" are the usual others.
        license, license_name, license_link: taken from the base's card (README.md in the teacher's folder, else the
            Hub's); given here only when that states none. Never guessed.
        datasets, language: Hub ids of training sets, ISO language codes.
        about: a sentence or more below the title. limits: sentences to add to the limits.

    Returns:
        Path of README.md.

    Raises:
        ValueError: one sentence that names what is missing or wrong; nothing has been written then.
    """
    folder, compared = Path(folder), dict(compared or {})
    given = {"license": license, "license_name": license_name, "license_link": license_link}
    person = {
        "name": name,
        "base_model": base_model,
        "compared": {label: read_records(place, f"compared[{label!r}]") for label, place in compared.items()},
        "datasets": list(datasets),
        "language": list(language),
        "about": about,
        "limits": list(limits),
        **given,
    }
    facts = read_facts(folder, person)
    licence = find_licence(base_model, compared.get(TEACHER), given)
    facts = dataclasses.replace(facts, **licence)
    text = render_card(facts)
    _check_front(text, facts)
    person.update(licence)
    write_text(folder / PERSON_FILE, person_json(person))
    return write_text(folder / CARD_FILE, text)


def check_card(folder, weights: bool = True) -> None:
    """Prove that README.md says what the folder's files say.

    weights: False for a folder that holds the card and its records but no model, such as those in `model_cards`.

    Raises:
        ValueError: a missing or damaged file, front matter that is no model card data, or the first line that differs,
            with the wrong number named.
    """
    folder = Path(folder)
    person = read_person(folder)
    facts = read_facts(folder, person, weights)
    wanted = render_card(facts)
    path = folder / CARD_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: write the card with write_card first")
    text = path.read_text(encoding="utf-8")
    _compare(path, text, wanted)
    _check_front(text, facts)


def render_card(facts: CardFacts) -> str:
    """README.md for `facts`: YAML front matter, then the sections in the order in which a reader asks."""
    sections = [
        f"---\n{card_data(facts).to_yaml()}\n---",
        f"# {facts.name.split('/')[-1]}",
        _summary(facts),
        _recovery(facts),
        _settings(facts),
        _recipe(facts),
        _speed(facts),
        _loading(facts),
        _limits(facts),
        _measured(facts),
        _licence(facts),
        f"## Citation\n\n```bibtex\n{CITATION}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def card_data(facts: CardFacts) -> ModelCardData:
    """The front matter; scores on whole tasks become the model-index, without those that are not finite."""
    scores = [
        EvalResult(
            task_type="text-generation",
            dataset_type=record.task,
            dataset_name=record.task,
            dataset_config=record.task,  # the Hub groups by type and configuration, not by name
            metric_type=record.metric,
            metric_value=record.value,
            metric_args={"shots": record.shots, "samples": record.samples, "stderr": record.stderr},
        )
        for record in facts.records
        if record.limit is None and record.value is not None and math.isfinite(record.value)
    ]
    return ModelCardData(
        base_model=facts.base_model,
        base_model_relation=None if facts.base_model is None else "finetune",
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts.license,
        license_name=facts.license_name,
        license_link=facts.license_link,
        datasets=facts.datasets or None,
        language=facts.language or None,
        tags=["mhla", "linear-attention", "custom_code"],
        model_name=facts.name.split("/")[-1] if scores else None,
        eval_results=scores or None,
    )


def _layers(facts: CardFacts) -> tuple[list[int], list[int]]:
    """Indices of the layers that are MHLA, and of those that kept softmax."""
    converted = facts.config["mhla"]["layers"]
    return converted, [i for i in range(facts.config["num_hidden_layers"]) if i not in converted]


def _summary(facts: CardFacts) -> str:
    converted, kept = _layers(facts)
    total = facts.config["num_hidden_layers"]
    paper = f"[MHLA, multi-head linear attention]({PAPER})"
    if TEACHER in facts.compared or facts.base_model is not None:
        base = "an unpublished softmax model"
        if facts.base_model is not None:
            base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
        what = (
            f"A language model whose attention was converted from softmax to {paper}: {len(converted)} of the {total}"
        )
        what += f" layers of {base}" + (f"; {len(kept)} kept softmax." if kept else ".")
    else:
        what = f"A language model with {paper} in {len(converted)} of its {total} layers, trained from scratch."
    what += (
        " Tokens are cut into blocks, every block keeps its own key-value summary, and each block attends to a learned"
        " mixture of the earlier summaries: the time of these layers grows linearly with the length."
    )
    return "\n\n".join(text for text in (what, facts.about.strip()) if text)


def _columns(facts: CardFacts) -> dict[str, Results]:
    """The models of the tables: the teacher, this one, then the others as they were given."""
    columns = {TEACHER: facts.compared[TEACHER]} if TEACHER in facts.compared else {}
    columns[OWN] = facts.records
    columns.update((label, records) for label, records in facts.compared.items() if label != TEACHER)
    return {label: Results(records) for label, records in columns.items()}


def _recovery(facts: CardFacts) -> str:
    columns = _columns(facts)
    text = "## What was kept, what was lost\n\n" if TEACHER in columns else "## Scores\n\n"
    text += "± is the standard error over the samples; ↑ higher is better, ↓ lower is better.\n\n"
    text += render_table(columns, style="markdown")
    if TEACHER in columns:
        others = [label for label in columns if label != TEACHER]
        rows = []
        for record in columns[TEACHER]:
            cells = [_change(record, _same(columns[label], record)) for label in others]
            if any(cells):
                rows.append([record.task, record.metric, *cells])
        if rows:
            text += "\n\nRelative change against the teacher:\n\n" + _markdown(["task", "metric", *others], rows)
    return text


def _same(records, wanted: Result) -> Result | None:
    return next((record for record in records if record.identity == wanted.identity), None)


def _change(before: Result, after: Result | None) -> str:
    """Relative change in percent; "" where one of the two has no value or the first is zero."""
    if after is None or not before.value or after.value is None:
        return ""
    return f"{100 * (after.value - before.value) / abs(before.value):+.2f} %"


def _lost(before: Result, after: Result | None) -> bool:
    """Whether the change is for the worse and larger than two standard errors (of both, independent; unknown: zero)."""
    if after is None or before.value is None or after.value is None or before.higher_is_better is None:
        return False
    worse = before.value - after.value if before.higher_is_better else after.value - before.value
    return worse > 2 * math.hypot(before.stderr or 0.0, after.stderr or 0.0)


def _settings(facts: CardFacts) -> str:
    settings, config = facts.config["mhla"], facts.config
    converted, kept = _layers(facts)
    rows = [
        ["MHLA layers", ", ".join(map(str, converted))],
        ["softmax layers", ", ".join(map(str, kept)) or "none"],
        ["model type", str(config.get("model_type"))],
        ["hidden size, heads", f"{config.get('hidden_size')}, {config.get('num_attention_heads')}"],
    ]
    rows += [
        [key.replace("_", " "), str(value)]
        for key, value in settings.items()
        if key not in ("layers", "format_version", "impl")
    ]
    return "## Settings\n\n" + _markdown(["setting", "value"], rows)


def _recipe(facts: CardFacts) -> str:
    train = facts.train
    if train is None:
        return ""
    rows = [
        [
            str(stage.get("name")),
            str(stage.get("loss")),
            str(stage.get("trainable")),
            *(f"{stage[key]}" for key in ("steps", "batch_size", "seq_len", "tokens")),
            f"{stage['lr']:g}" + (f" ({stage['lr_mhla']:g})" if stage.get("lr_mhla") else ""),
            f"{stage['seconds']:.0f}",
            f"{stage['first_loss']:.4g} → {stage['last_loss']:.4g}",
        ]
        for stage in train["stages"]
    ]
    head = [
        "stage",
        "loss",
        "trained",
        "steps",
        "batch",
        "length",
        "tokens",
        "rate (MHLA's)",
        "seconds",
        "loss from → to",
    ]
    versions = ", ".join(f"{library} {version}" for library, version in sorted(train["versions"].items()))
    text = f"## Recipe\n\n{_markdown(head, rows)}\n\n"
    text += f"In all {train['tokens']} tokens in {train['seconds']:.0f} s, seed {train['seed']}, on {train['hardware']}"
    text += f" ({train.get('processes', 1)} process, mixed precision {train.get('mixed_precision')}); {versions}."
    data = train.get("data") or {}
    if data.get("name"):
        # the last part of a path: where the text lay on the author's machine is nobody's business
        text += f" Text: {Path(data['name']).name if Path(data['name']).is_absolute() else data['name']}."
    return text + (f"\n\n`{train['command']}`" if train.get("command") else "")


def _trained_limits(facts: CardFacts) -> list[str]:
    if facts.train is None:
        return ["How the model was trained is not recorded here."]
    longest = max(stage["seq_len"] for stage in facts.train["stages"])
    return [
        f"Trained on sequences of {longest} tokens; longer ones run, their quality was measured only where a task above"
        " needs them.",
        f"One training run (seed {facts.train['seed']}): how much another seed would change is not part of the errors.",
    ]


def _speed(facts: CardFacts) -> str:
    if facts.speed is None:
        return ""
    rows, notes = [], []
    by_what: dict[str, list[dict]] = {}
    for row in facts.speed["rows"]:
        by_what.setdefault(row["what"], []).append(row)
    for what, measured in by_what.items():
        measured.sort(key=lambda row: row["length"])
        for row in measured:
            times = [f"{row[key]:.3g}" for key in ("softmax_ms", "linear_ms", "mhla_ms")]
            rows.append([what, str(row["length"]), *times, f"{row['softmax_ms'] / row['mhla_ms']:.2f}"])
        notes.append(f"- {what}: {_crossover(measured)}")
    head = ["what", "length", "softmax, ms", "plain linear, ms", "MHLA, ms", "softmax / MHLA"]
    versions = ", ".join(f"{library} {version}" for library, version in sorted(facts.speed["versions"].items()))
    return f"## Speed\n\nMeasured on {facts.speed['hardware']}; {versions}.\n\n{_markdown(head, rows)}\n\n" + "\n".join(
        notes
    )


def _crossover(measured: list[dict]) -> str:
    """From which measured length on MHLA is the faster one, in words; `measured` is sorted by length."""
    slower = [row["length"] for row in measured if row["mhla_ms"] >= row["softmax_ms"]]
    faster = [row["length"] for row in measured if row["length"] > max(slower, default=0)]
    if not faster:
        return f"softmax attention is faster at {slower[-1]}, the longest length measured."
    if not slower:
        return f"MHLA is faster at every length measured, from {faster[0]} on."
    return f"softmax attention is faster up to {slower[-1]}, MHLA from {faster[0]} on."


def _loading(facts: CardFacts) -> str:
    return f'''## How to load

Needs torch and transformers 5; mhla_hf need not be installed, the code is in `modeling_mhla.py` beside the weights.
The tokenizer asks for the configuration, so it needs `trust_remote_code=True` too.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{facts.name}"  # the Hub id, or the folder of this model
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)

inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```'''


def _limits(facts: CardFacts) -> str:
    lines = []
    if TEACHER in facts.compared:
        lost = [
            f"{record.metric} of {record.task} ({format_score(record.value)} → {format_score(after.value)})"
            for record in facts.compared[TEACHER]
            if _lost(record, after := _same(facts.records, record))
        ]
        lines.append(
            "Worse than the teacher, by more than two standard errors where these are known: " + "; ".join(lost) + "."
            if lost
            else "No score above is worse than the teacher's by more than two standard errors; smaller losses may exist."
        )
    elif facts.base_model is not None:
        lines.append("The teacher was not scored on these tasks, so what the conversion lost is not known.")
    lines += _trained_limits(facts)
    lines.append(
        "The past is kept as one summary per block, not token by token: exact recall of a far-back detail is the known"
        " weakness of this kind of attention."
    )
    if not any(word in record.task for record in facts.records for word in RECALL):
        lines.append("Recall of single facts from far back was not measured.")
    if any(record.limit is not None for record in facts.records):
        lines.append("Scores marked (limit) come from a part of their task and are not comparable with published ones.")
    if facts.speed is None:
        lines.append("Speed was not measured.")
    lines.append("Nothing was measured but what the tables show: no safety, bias or fairness evaluation.")
    lines += facts.limits
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)


def _measured(facts: CardFacts) -> str:
    """How the scores came about: one entry for all scores that share the circumstances."""
    groups: dict[tuple, list[str]] = {}
    for label, records in _columns(facts).items():
        for record in records:
            versions = ", ".join(f"{library} {version}" for library, version in sorted(record.versions.items()))
            key = (
                label,
                record.command,
                record.hardware,
                record.dtype,
                record.seed,
                versions,
                record.commit,
                record.date,
            )
            tasks = groups.setdefault(key, [])
            if record.task not in tasks:
                tasks.append(record.task)
    lines = [
        f"- {label}, {', '.join(tasks)}: {dtype} on {hardware}; seed {seed}; {versions}; mhla_hf commit {commit}; {date}; "
        f"`{command}`"
        for (label, command, hardware, dtype, seed, versions, commit, date), tasks in groups.items()
    ]
    return "## How the scores were measured\n\n" + "\n".join(lines)


def _licence(facts: CardFacts) -> str:
    shown = facts.license if facts.license != "other" else facts.license_name
    if facts.license_link:
        shown = f"[{shown}]({facts.license_link})"
    based = ", that of the base model" if facts.base_model is not None or TEACHER in facts.compared else ""
    return f"## Licence\n\nWeights: {shown}{based}. Code in `modeling_mhla.py`: Apache-2.0."


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    safe = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    return "\n".join("| " + " | ".join(row) + " |" for row in [safe[0], ["---"] * len(header), *safe[1:]])


def _check_front(text: str, facts: CardFacts) -> None:
    """The front matter must come back from the Hub client's own reader as it was meant."""
    read = ModelCard(text).data.to_dict()
    meant = card_data(facts).to_dict()
    if read != meant:
        odd = sorted(key for key in {*read, *meant} if read.get(key) != meant.get(key))
        raise ValueError(f"the front matter's {odd[0]!r} reads as {read.get(odd[0])!r}, expected {meant.get(odd[0])!r}")


def _compare(path: Path, text: str, wanted: str) -> None:
    """ValueError that names the first difference between the card and what the files say."""
    got_lines, wanted_lines = text.split("\n"), wanted.split("\n")
    for number, (got, want) in enumerate(zip(got_lines, wanted_lines, strict=False), 1):
        if got == want:
            continue
        for here, there in zip(NUMBER.findall(got), NUMBER.findall(want), strict=False):
            if here != there:
                raise ValueError(f"{path}:{number}: shows {here} where the files say {there}: {got.strip()!r}")
        raise ValueError(f"{path}:{number}: is {got.strip()!r} where the files say {want.strip()!r}")
    if len(got_lines) != len(wanted_lines):
        raise ValueError(f"{path} has {len(got_lines)} lines where the files give {len(wanted_lines)}")
