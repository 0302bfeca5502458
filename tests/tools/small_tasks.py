"""Four small lm-eval tasks made from a text, one for each kind of output that the harness scores."""

import json
import random

from mhla_hf.evaluation.recall import LOADER, TASKS, filler_lines, make_text, write_task

BITS = [{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}]
ACC = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_mutual_info")]
OTHERS = {  # settings of tasks without facts
    "bits_per_byte": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text", "metric_list": BITS},
    "cloze": {
        "output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": ACC},
}  # fmt: skip


def make_tasks(folder, text, tokenizer, window, items=16):
    """Write here_bits_per_byte, here_cloze, here_recall, and here_generation, `items` documents each, to a new folder."""
    folder.mkdir(parents=True)
    (folder / "local_data.py").write_text(LOADER)
    lines = [line for line in text.splitlines() if len(line.split()) > 8]
    rng = random.Random(0)
    cloze = []
    for line in lines[:items]:
        words = line.split()
        answer = rng.randrange(4)
        choices = [" " + " ".join(other.split()[-3:]) for other in rng.sample(lines, 4)]
        choices[answer] = " " + " ".join(words[-3:])
        cloze.append({"context": " ".join(words[:-3]), "choices": choices, "answer": answer})
    rows = {"bits_per_byte": [{"text": " ".join(lines[i : i + 3])} for i in range(items)], "cloze": cloze}
    for kind, settings in OTHERS.items():
        name = f"here_{kind}"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[kind]))
        content = {"task": name, "dataset_kwargs": {"file": f"{name}.jsonl"}, "test_split": "test", "num_fewshot": 0}
        content |= {"target_delimiter": "", **settings, "metadata": {"version": 1.0}}
        body = "\n".join(f"{key}: {json.dumps(value)}" for key, value in content.items())
        (folder / f"{name}.yaml").write_text(f"custom_dataset: !function local_data.load\n{body}\n")
    for kind, task in (("recall", "lookups_recall"), ("generation", "codes_generation")):
        rows = []
        for item in range(items):
            facts = [(TASKS[task][0], depth) for depth in (20, 50, 80)]
            given, options = filler_lines(text), {"examples": {"codes": 0, "lookups": 1}, "reserve": 32}
            context, questions = make_text(tokenizer, given, window, facts, random.Random(f"{kind} {item}"), **options)
            place = item % 3
            row = {"context": context + questions[place].prompt, "target": questions[place].answer}
            rows.append({**row, "back": window * (80, 50, 20)[place] // 100})
        write_task(folder, f"here_{kind}", task, rows)
