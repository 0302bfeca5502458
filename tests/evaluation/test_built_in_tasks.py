"""The tasks of the paper's tables 6 and 8, lm-eval's own logic on small local data: by name, by object, by lm-eval itself.

Only the data are ours: each task's YAML is included, so prompts, choices, scoring and metrics are those of the installed
lm-eval. Run: pytest tests/evaluation/test_built_in_tasks.py
"""

import json

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from small_scores import HELD_OUT, WINDOW, save_mhla
from transformers import AutoModelForCausalLM, AutoTokenizer

import mhla_hf
from mhla_hf.evaluation.recipes import read_score_recipe

PAGE = " = Classes = \n\n A class is a statement , and classes have names . \n"
FOUR = {"text": ["a name", "a block", "an object", "a number"], "label": ["A", "B", "C", "D"]}
LONG = {"context": HELD_OUT[:150], "question": "What is a block?", "all_classes": [], "language": "en"}
CHOICE = [
    {"question_stem": "A class is", "question": "What is a class?", "choices": FOUR, "answerKey": key} for key in "ABCB"
]
ROWS = {
    "mmlu_anatomy": [{"question": "What is it? ", "choices": FOUR["text"], "answer": i} for i in (0, 3, 1)],
    "mmlu_virology": [{"question": "And that? ", "choices": FOUR["text"], "answer": i} for i in (2, 2)],
    "winogrande": [
        {
            "sentence": "The name met the class because _ was new.",
            "option1": "the name",
            "option2": "the class",
            "answer": a,
        }
        for a in "121"
    ],
    "piqa": [
        {"goal": "To name a thing,", "sol1": "assign it.", "sol2": "delete the name of it.", "label": i} for i in (0, 1)
    ],
    "arc_challenge": CHOICE,
    "openbookqa": CHOICE,
    "arc_easy": CHOICE[:3],
    "boolq": [{"passage": HELD_OUT[i : i + 90], "question": "is it a name", "label": i % 2} for i in range(3)],
    "wikitext": [{"page": PAGE}, {"page": PAGE * 2}],
    "lambada_openai": [{"text": "A class is a statement and a class has a name"}, {"text": "So a block has a block"}],
    "longbench_passage_retrieval_en": [{**LONG, "answers": ["Paragraph 1"]}, {**LONG, "answers": ["Paragraph 2"]}],
    "longbench_passage_retrieval_zh": [{**LONG, "answers": ["段落1"]}, {**LONG, "answers": ["段落2"]}],
}
NEEDED = [*read_score_recipe("table_6_language").tasks, *read_score_recipe("table_8_longbench").tasks]


@pytest.fixture(scope="module")
def world(tmp_path_factory, manager):
    """A model and a folder of tasks `local_<name>` that include lm-eval's own."""
    pytest.importorskip("jieba")
    folder = tmp_path_factory.mktemp("world")
    tasks = folder / "tasks"
    tasks.mkdir()
    index = manager.task_index
    names = [name for name in NEEDED if name != "mmlu"] + ["mmlu_anatomy", "mmlu_virology"]
    for name in names:
        rows = ROWS.get(name, [{**LONG, "answers": ["a name", "the block"]}, {**LONG, "answers": ["a class"]}])
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {
            "include": str(index[name].yaml_path),
            "task": f"local_{name}",
            "tag": None,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(tasks / f"{name}.jsonl")}},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
        }
        if name.startswith("longbench"):  # the small model sees 192 tokens, some tasks want to write 512
            content["generation_kwargs"] = {"until": ["\n\n"], "do_sample": False, "max_gen_toks": 12}
        (tasks / f"{name}.yaml").write_text(yaml.dump(content))
    group = {
        "group": "local_mmlu",
        "task": ["local_mmlu_anatomy", "local_mmlu_virology"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (tasks / "mmlu.yaml").write_text(yaml.dump(group))
    save_mhla(folder / "mhla")
    return folder


def test_by_name_by_object_and_by_lm_eval_itself(world):
    names = [f"local_{name}" for name in NEEDED]
    options = {"include_path": world / "tasks", "progress": False}
    by_name = mhla_hf.evaluate(world / "mhla", names, **options)["mhla"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(world / "mhla"),
        AutoTokenizer.from_pretrained(world / "mhla"),
    )
    by_object = mhla_hf.evaluate(model, names, tokenizer=tokenizer, **options)["MHLALlamaForCausalLM"]
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(world / "mhla"), "max_length": WINDOW},
        tasks=names,
        batch_size=8,
        device="cpu",
        task_manager=TaskManager(include_path=str(world / "tasks"), include_defaults=False),
    )
    found = {(record.task, record.metric): record for record in by_name}
    assert {(r.task, r.metric): r.value for r in by_object} == {key: record.value for key, record in found.items()}
    assert set(names) <= {task for task, _ in found}
    for (task, metric), record in found.items():
        expected = theirs["results"][task][f"{metric},none"]
        assert record.value == expected, (task, metric)
        error = theirs["results"][task].get(f"{metric}_stderr,none")
        if isinstance(error, float):
            assert record.stderr == error, (task, metric)
    for name in ("table_6_language", "table_8_longbench"):
        for column in read_score_recipe(name).columns.values():
            assert "mean_of" in column or (f"local_{column['task']}", column["metric"]) in found
    assert found["local_mmlu", "acc"].samples == 5
