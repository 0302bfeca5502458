"""The sections of a model card: texts and tables made from `CardFacts`, each number from there.

Unusual: where MHLA lost or is the slower one, the same section says so; nothing is left out because it looks bad.
"""

import math
from pathlib import Path

from ..evaluation.records import Result, Results, format_score, render_rows, render_table
from ..evaluation.speed import TASK as SPEED
from .card_facts import DEPTH, OWN, TEACHER, CardFacts, count_layers, generates, not_measured, recalls
from .plain_card import LOADING, STOCK_CLASS, hub_task

PAPER = "https://arxiv.org/abs/2601.07832"
ABSENT = {"recall": "Recall of single facts from far back", "generation": "Generation"}
WHAT = {
    "text-generation": "A language model",
    "image-classification": "An image classifier",
    "image-feature-extraction": "An image encoder",
    "text-to-video": "A video model",
    "text-to-image": "A text-to-image model",
    "unconditional-image-generation": "A class-to-image model",
}


def layers_of(facts: CardFacts) -> tuple[list[int], list[int]]:
    """Indices of the layers that are MHLA, and of those that kept the attention they had."""
    converted = facts.config["mhla"]["layers"]
    return converted, [i for i in range(count_layers(facts.config)) if i not in converted]


def kept_attention(facts: CardFacts) -> str:
    """What the layers that are not MHLA have: softmax, or linear attention in the Sana family."""
    return "linear attention" if "Sana" in facts.class_name else "softmax"


def summary(facts: CardFacts) -> str:
    """What it is and where it comes from."""
    converted, kept = layers_of(facts)
    total = len(converted) + len(kept)
    paper = f"[MHLA, multi-head linear attention]({PAPER})"
    what = WHAT.get(hub_task(facts.kind, facts.class_name), "A diffusion model")
    own = kept_attention(facts)
    learned_from_one = facts.train is not None and facts.train.get("teacher") is not None
    if TEACHER in facts.compared or facts.base_model is not None or learned_from_one:
        base = f"an unpublished {own} model"
        if facts.base_model is not None:
            base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
        text = f"{what} whose attention was converted from {own} to {paper}: {len(converted)} of the {total}"
        text += f" layers of {base}" + (f"; {len(kept)} kept {own}." if kept else ".")
    else:
        text = f"{what} with {paper} in {len(converted)} of its {total} layers, trained from scratch."
    which = "the earlier" if facts.kind == "language" else "all"
    text += (
        " Tokens are cut into blocks, every block keeps its own key-value summary, and each block attends to a learned"
        f" mixture of {which} summaries: the time of these layers grows linearly with the length."
    )
    return "\n\n".join(part for part in (text, facts.about.strip()) if part)


def in_short(facts: CardFacts) -> str:
    """Kept layers, what the training cost, from where on it pays."""
    converted, kept = layers_of(facts)
    own = kept_attention(facts)
    rows = [
        ["MHLA layers", ", ".join(map(str, converted))],
        [f"{own} layers", ", ".join(map(str, kept)) or "none"],
        ["training", "not recorded"],
    ]
    if facts.train is not None:
        unit = facts.train_unit
        spent = (
            f"{facts.train[unit]:,} {unit} in {facts.train['seconds'] / 3600:.2g} hours on {facts.train['hardware']}"
        )
        rows[2][1] = spent
    for what, measure, measured in measurements(facts):
        rows.append([f"{what}, {MEASURES[measure][0]}", crossover(measured, measure)])
    return "## In short\n\n" + markdown(["", ""], rows)


def columns(facts: CardFacts) -> dict[str, Results]:
    """The models of the tables: the teacher, this one, then the others as they were given."""
    found = {TEACHER: facts.compared[TEACHER]} if TEACHER in facts.compared else {}
    found[OWN] = facts.records
    found.update((label, records) for label, records in facts.compared.items() if label != TEACHER)
    return {label: Results(records) for label, records in found.items()}


def recovery(facts: CardFacts) -> str:
    """Quality, recall by depth and generation of the models side by side, and the change against the teacher."""
    models = columns(facts)
    text = "## What was kept, what was lost\n\n" if TEACHER in models else "## Scores\n\n"
    text += "± is the standard error over the samples; ↑ higher is better, ↓ lower is better."
    for title, of_this_part in PARTS.items():
        chosen = {label: Results(r for r in records if of_this_part(r)) for label, records in models.items()}
        if any(len(records) for records in chosen.values()):
            text += f"\n\n### {title}\n\n" + render_table(chosen, style="markdown")
    depth = recall_by_depth(models)
    text += f"\n\n### Recall by depth\n\n{depth}" if depth else ""
    if TEACHER in models:
        others = [label for label in models if label != TEACHER]
        rows = []
        for record in models[TEACHER]:
            cells = [_change(record, _same(models[label], record)) for label in others]
            if any(cells) and is_score(record):
                rows.append([record.task, record.metric, *cells])
        if rows:
            text += (
                "\n\n### Relative change against the teacher\n\n± takes the errors of the two scores as independent; where"
                " both come from the same samples it is too wide.\n\n"
            ) + markdown(["task", "metric", *others], rows)
    return text


def is_score(record: Result) -> bool:
    """Whether a record is a quality of its own: neither a part of one by depth, nor a time."""
    return DEPTH not in record.metric and record.task != SPEED


PARTS = {
    "Quality": lambda record: is_score(record) and not (generates(record) or recalls(record)),
    "Recall": recalls,
    "Generation": generates,
}


def recall_by_depth(models: dict[str, Results]) -> str:
    """A row per task and distance to the fact; "" where nothing was measured by depth."""
    found: dict[tuple, dict[str, Result]] = {}
    for label, records in models.items():
        for record in records:
            metric, mark, back = record.metric.partition(DEPTH)
            if mark and back.isdecimal():
                found.setdefault((record.task, metric, int(back), record.limit), {})[label] = record
    rows = []
    for (task, metric, back, _), cells in sorted(found.items(), key=lambda item: tuple(map(_sortable, item[0]))):
        samples = next(iter(cells.values())).samples
        scores = [format_score(cells[label].value, cells[label].stderr) if label in cells else "" for label in models]
        rows.append([task, metric, str(back), str(samples), *scores])
    return render_rows(["task", "metric", "tokens back", "samples", *models], rows, "markdown") if rows else ""


def _sortable(value):
    return (isinstance(value, str), value if value is not None else -1)


def _same(records, wanted: Result) -> Result | None:
    return next((record for record in records if record.identity == wanted.identity), None)


def _change(before: Result, after: Result | None) -> str:
    """Relative change in percent, with its error where both have one; "" without two values or when the first is zero."""
    if after is None or not before.value or after.value is None:
        return ""
    text = f"{100 * (after.value - before.value) / abs(before.value):+.2f} %"
    if before.stderr is None or after.stderr is None:
        return text
    error = math.hypot(after.stderr, before.stderr * after.value / before.value) / abs(before.value)
    return f"{text} ± {100 * error:.2f} %"


def _lost(before: Result, after: Result | None) -> bool:
    """Whether the change is for the worse and larger than two standard errors (of both, independent; unknown: zero)."""
    if after is None or before.value is None or after.value is None or before.higher_is_better is None:
        return False
    worse = before.value - after.value if before.higher_is_better else after.value - before.value
    return worse > 2 * math.hypot(before.stderr or 0.0, after.stderr or 0.0)


def settings(facts: CardFacts) -> str:
    """Every choice about the attention."""
    config = facts.config
    converted, kept = layers_of(facts)
    rows = [
        ["MHLA layers", ", ".join(map(str, converted))],
        [f"{kept_attention(facts)} layers", ", ".join(map(str, kept)) or "none"],
        ["model type", str(config.get("model_type") or config.get("_class_name"))],
        ["hidden size, heads", f"{_width(config)}, {config.get('num_attention_heads')}"],
    ]
    rows += [
        [key.replace("_", " "), str(value)]
        for key, value in config["mhla"].items()
        if key not in ("layers", "format_version", "impl")
    ]
    return "## Settings\n\n" + markdown(["setting", "value"], rows)


def _width(config: dict):
    head = config.get("attention_head_dim")
    return config.get("hidden_size") or (head and head * config["num_attention_heads"])


def recipe(facts: CardFacts) -> str:
    """How it was trained; "" where that is not recorded."""
    train = facts.train
    if train is None:
        return ""
    unit = facts.train_unit
    rows = [
        [
            str(stage.get("name")),
            str(stage.get("loss")),
            str(stage.get("trainable")),
            *(f"{stage[key]}" for key in ("steps", "batch_size")),
            str(stage.get("seq_len", "")),
            f"{stage[unit]}",
            f"{stage['lr']:g}" + (f" ({stage['lr_mhla']:g})" if stage.get("lr_mhla") else ""),
            f"{stage['seconds']:.0f}",
            _losses(stage),
        ]
        for stage in train["stages"]
    ]
    head = ["stage", "loss", "trained", "steps", "batch", "length", unit, "rate (MHLA's)", "seconds", "loss from → to"]
    versions = ", ".join(f"{library} {version}" for library, version in sorted(train["versions"].items()))
    text = f"## Recipe\n\n{markdown(head, rows)}\n\n"
    text += f"In all {train[unit]} {unit} in {train['seconds']:.0f} s, seed {train['seed']}, on {train['hardware']}"
    text += f" ({train.get('processes', 1)} process, mixed precision {train.get('mixed_precision')}); {versions}."
    data = train.get("data") or {}
    if data.get("name"):
        # the last part of a path: where the data lay on the author's machine is nobody's business
        text += f" Data: {Path(data['name']).name if Path(data['name']).is_absolute() else data['name']}."
    return text + (f"\n\n`{train['command']}`" if train.get("command") else "")


def _losses(stage: dict) -> str:
    """The first and the last loss of a stage; of one that was logged only once, its mean over all steps."""
    first, last = stage["first_loss"], stage["last_loss"]
    return f"{last:.4g} on average" if first == last else f"{first:.4g} → {last:.4g}"


# suffix of the keys in speed.json -> (what it measures, unit, better, worse)
MEASURES = {"ms": ("time", "ms", "faster", "slower"), "mib": ("memory", "MiB", "smaller", "larger")}
KINDS = ("softmax", "mhla")


def measurements(facts: CardFacts) -> list[tuple[str, str, list[dict]]]:
    """(what was measured, "ms" or "mib", its rows by length) of speed.json; empty without it."""
    found = []
    for measure in MEASURES:
        by_what: dict[str, list[dict]] = {}
        for row in (facts.speed or {}).get("rows", ()):
            if all(f"{kind}_{measure}" in row for kind in KINDS):
                by_what.setdefault(row["what"], []).append(row)
        found += [(what, measure, sorted(rows, key=lambda row: row["length"])) for what, rows in by_what.items()]
    return found


def speed(facts: CardFacts) -> str:
    """Time and memory by length, and from where on MHLA needs less; "" where it was not measured."""
    if facts.speed is None:
        return ""
    versions = ", ".join(f"{library} {version}" for library, version in sorted(facts.speed["versions"].items()))
    text = f"## Speed and memory\n\nMeasured on {facts.speed['hardware']}; seed {facts.speed['seed']}; {versions};"
    text += f" `{facts.speed['command']}`"
    for measure, (title, unit, *_) in MEASURES.items():
        rows, notes = [], []
        for what, _, measured in [entry for entry in measurements(facts) if entry[1] == measure]:
            for row in measured:
                values = [row[f"{kind}_{measure}"] for kind in KINDS]
                ratio = f"{values[0] / values[1]:.2f}"
                rows.append([what, str(row["length"]), *(f"{value:.3g}" for value in values), ratio])
            notes.append(f"- {what}: {crossover(measured, measure)}")
        if rows:
            head = [f"softmax, {unit}", f"MHLA, {unit}", "softmax / MHLA"]
            table = markdown(["what", "length", *head], rows)
            text += f"\n\n### {title.capitalize()}\n\n{table}\n\n" + "\n".join(notes)
    return text


def crossover(measured: list[dict], measure: str = "ms") -> str:
    """From which measured length on MHLA needs less, in words; `measured` is sorted by length."""
    better = MEASURES[measure][2]
    worse = [row["length"] for row in measured if row[f"mhla_{measure}"] >= row[f"softmax_{measure}"]]
    from_there = [row["length"] for row in measured if row["length"] > max(worse, default=0)]
    if len(worse) == len(measured):
        return f"softmax attention is {better} at every length measured, up to {worse[-1]}."
    if not worse:
        return f"MHLA is {better} at every length measured, from {from_there[0]} on."
    text = f"softmax attention is {better} at {', '.join(map(str, worse))}"
    return f"{text}; MHLA from {from_there[0]} on." if from_there else f"{text}, the longest length measured."


def loading(facts: CardFacts) -> str:
    """How to load it, by what a reader can paste."""
    imports, call = LOADING[facts.kind]
    if facts.kind != "language":
        lines = f"{imports}\n\n# the Hub id, or the folder\n{call.format(name=facts.name)}"
        needs = "torch, transformers 5 and diffusers 0.42" if "diffusers" in imports else "torch and transformers 5"
        source = "`modeling_mhla*.py` beside the weights"
        warning = f"\n\n{STOCK_CLASS}" if "diffusers" in imports else ""
        return (
            f"## How to load\n\nNeeds {needs}; mhla_hf need not be installed, the code is in {source}.\n\n"
            f"```python\n{lines}\n```{warning}"
        )
    return f'''## How to load

Needs torch and transformers 5; mhla_hf need not be installed, the code is in `modeling_mhla.py` beside the weights.
The tokenizer needs none of it: `trust_remote_code=False` tells transformers so, which else asks at a terminal.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{facts.name}"  # the Hub id, or the folder of this model
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)

inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```'''


def limits(facts: CardFacts) -> str:
    """Known failures: what was lost, what is known of this attention, what was not measured."""
    lines = []
    if TEACHER in facts.compared:
        lost = [
            f"{record.metric} of {record.task} ({format_score(record.value)} → {format_score(after.value)})"
            for record in facts.compared[TEACHER]
            if record.task != SPEED and _lost(record, after := _same(facts.records, record))
        ]
        lines.append(
            "Worse than the teacher, by more than two standard errors where these are known: " + "; ".join(lost) + "."
            if lost
            else "No score above is worse than the teacher's by more than two standard errors; smaller losses may exist."
        )
    elif facts.base_model is not None:
        lines.append("The teacher was not scored on these tasks, so what the conversion lost is not known.")
    lines += _trained_limits(facts)
    if facts.kind == "language":
        lines.append(
            "The past is kept as one summary per block, not token by token: exact recall of a far-back detail is the"
            " known weakness of this kind of attention."
        )
        lines.append(
            "Decoding keeps every block's summary: the cache grows with the text, as softmax's does, and in the MHLA layers"
            f" it holds at least {cache_ratio(facts.config):.2f} times the bytes of softmax's keys and values."
        )
        lines += [f"{ABSENT[name]} was not measured." for name in not_measured(facts.records)]
    if any(record.limit is not None for record in facts.records):
        lines.append("Scores marked (limit) come from a part of their task and are not comparable with published ones.")
    if facts.speed is None:
        lines.append("Speed was not measured.")
    lines.append("Nothing was measured but what the tables show: no safety, bias or fairness evaluation.")
    lines += facts.limits
    return "## Known failures and limits\n\n" + "\n".join(f"- {line}" for line in lines)


def cache_ratio(config: dict) -> float:
    """Bytes of a block's summary in a language model's cache (fp32), over those of its tokens' keys and values."""
    mhla = config["mhla"]
    key = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    value = config.get("value_dim") or key
    features = 2 * key if mhla["feature_map"] == "hedgehog" else key
    each = 2 if config.get("dtype") in ("bfloat16", "float16") else 4
    return 4 * features * (value + (mhla["normalize"] is True)) / (each * mhla["block_size"] * (key + value))


def _trained_limits(facts: CardFacts) -> list[str]:
    if facts.train is None:
        return ["How the model was trained is not recorded here."]
    lines = []
    lengths = [stage["seq_len"] for stage in facts.train["stages"] if stage.get("seq_len")]
    if lengths:
        lines.append(
            f"Trained on sequences of {max(lengths)} tokens; longer ones run, their quality was measured only where a task"
            " above needs them."
        )
    seed = facts.train["seed"]
    lines.append(f"One training run (seed {seed}): how much another seed would change is not part of the errors.")
    return lines


def measured(facts: CardFacts) -> str:
    """How the scores came about: one entry for all scores that share the circumstances."""
    groups: dict[tuple, list[str]] = {}
    for label, records in columns(facts).items():
        for record in records:
            versions = ", ".join(f"{library} {version}" for library, version in sorted(record.versions.items()))
            circumstances = (record.hardware, record.dtype, record.seed, versions, record.commit, record.date)
            tasks = groups.setdefault((label, record.command, *circumstances), [])
            if record.task not in tasks:
                tasks.append(record.task)
    lines = [
        f"- {label}, {', '.join(tasks)}: {dtype} on {hardware}; seed {seed}; {versions}; mhla_hf commit {commit}; {date}; "
        f"`{command}`"
        for (label, command, hardware, dtype, seed, versions, commit, date), tasks in groups.items()
    ]
    return "## How the scores were measured\n\n" + "\n".join(lines)


def licence(facts: CardFacts) -> str:
    """Of the weights and of the code beside them."""
    shown = facts.license if facts.license != "other" else facts.license_name
    if facts.license_link:
        shown = f"[{shown}]({facts.license_link})"
    based = ", that of the base model" if facts.base_model is not None or TEACHER in facts.compared else ""
    source = "modeling_mhla.py" if facts.kind == "language" else "modeling_mhla*.py"
    return f"## License\n\nWeights: {shown}{based}. Code in `{source}`: Apache-2.0."


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, all columns aligned left."""
    return render_rows(header, rows, "markdown", left=len(header))
