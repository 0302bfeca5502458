"""evaluate(): the numbers of lm-eval itself, once each, with standard errors."""

import gzip
import json
import math
import re
import shutil
from pathlib import Path

import lm_eval.tasks
import numpy
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file
from tools.launched import launch
from tools.small_scores import HELD_OUT, WINDOW, make_tasks, save_mhla, small_llama, small_tokenizer
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.evaluation import language
from mhla_hf.evaluation.language import load_tasks, ratio_stderr
from mhla_hf.evaluation.records import Results

NAMES = ["here_bits_per_byte", "here_cloze", "here_recall", "here_generation"]


@pytest.fixture
def runs(monkeypatch):
    """Names of the tasks that are really run, in order."""
    seen, true = [], language.score
    monkeypatch.setattr(language, "score", lambda m, item, **how: seen.append(item.name) or true(m, item, **how))
    return seen


def judge(world, models="llama", tasks=tuple(NAMES), **options):
    names = [models] if isinstance(models, str) else models
    options = {"include_path": world / "tasks", "progress": False} | options
    return mhla_hf.evaluate([world / name for name in names], tasks, **options)


def values(records):
    return {(record.task, record.metric): record.value for record in records}


def test_the_numbers_are_those_of_lm_eval(world):
    manager = TaskManager(include_path=str(world / "tasks"), include_defaults=False)
    options = {"batch_size": 8, "device": "cpu", "task_manager": manager}
    theirs = simple_evaluate("hf", {"pretrained": str(world / "mhla")}, NAMES, **options)["results"]
    ours = judge(world, "mhla")["mhla"]
    assert {record.task for record in ours} == set(NAMES)
    for record in ours:
        assert record.value == pytest.approx(theirs[record.task][f"{record.metric},none"], rel=1e-6)
        error = theirs[record.task][f"{record.metric}_stderr,none"]
        assert error == "N/A" or record.stderr == pytest.approx(error, rel=1e-6)
        assert record.task in ("here_generation", "here_recall") or record.stderr > 0  # random weights look nothing up
    depths = [record for record in ours if record.metric.startswith("acc_back_")]
    whole = ours.find("here_recall", "acc")
    assert len(depths) >= 3 and sum(record.samples for record in depths) == whole.samples
    assert sum(record.value * record.samples for record in depths) == pytest.approx(whole.value * whole.samples)


def test_by_folder_and_by_object(world, tmp_path):
    by_folder = values(judge(world, "mhla", output=tmp_path, limit=4)["mhla"])
    model = AutoModelForCausalLM.from_pretrained(world / "mhla").train()
    options = {"tokenizer": small_tokenizer(), "include_path": world / "tasks", "progress": False, "limit": 4}
    by_object = mhla_hf.evaluate({"model": model}, NAMES, **options)["model"]
    assert values(by_object) == by_folder and model.training
    assert by_object[0].fingerprint.startswith("tensors:") and by_object[0].model == "model"


def test_a_model_on_the_hub_is_known_by_its_commit(world, hub, runs, tmp_path):
    hub.put("me/llama", {file.name: file.read_bytes() for file in (world / "llama").iterdir()})
    options = {"include_path": world / "tasks", "output": tmp_path / "out.json", "progress": False}
    for _ in range(2):
        (record,) = mhla_hf.evaluate("me/llama", "here_bits_per_byte", **options)["me/llama"]
    assert runs == NAMES[:1] and record.revision == hub.repos["me/llama"].refs["refs/heads/main"]


def test_a_record_says_all_that_is_needed(world, monkeypatch):
    monkeypatch.chdir(world)
    record = judge(world, "mhla", ["here_cloze"], force=True, limit=0.5, seed=7)["mhla"][0]
    assert (record.task, record.metric, record.limit, record.seed) == ("here_cloze", "acc", 0.5, 7)
    assert (record.samples, record.shots, record.window, record.task_version) == (8, 0, WINDOW, "1.0")
    assert (record.model, record.revision, record.dtype) == ("mhla", None, "float32")
    assert record.higher_is_better and record.versions["lm_eval"] == "0.4.13" and record.seconds > 0
    words = "mhla-hf evaluate mhla --tasks here_cloze --include-path tasks --limit 0.5 --batch-size 8 --seed 7"
    assert record.command == words
    text = (world / "mhla" / "results.json").read_text()
    assert str(world) not in text
    stated = judge(world, "mhla", ["here_cloze"], force=True, limit=1, command="make it")["mhla"][0]
    assert stated.command == "make it" and stated.samples == 1 and stated.stderr is None


def test_only_what_is_missing_is_run(fresh, runs, caplog):
    caplog.set_level("INFO", "mhla_hf")
    two = NAMES[1:3]
    first = judge(fresh, ["llama", "mhla"], two)
    assert runs == two * 2
    assert judge(fresh, ["llama", "mhla"], two) == first and runs == two * 2
    assert f"the scores in {fresh / 'llama' / 'results.json'} are read, not run again" in caplog.text
    runs.clear()
    changes = ({"limit": 4}, {"seed": 3}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "max_length": 100})
    for options in (*changes, changes[0], changes[-1], {"limit": 4, "force": True}):
        judge(fresh, "llama", NAMES[1:2], **options)
    assert runs == NAMES[1:2] * 5
    assert Results.read(fresh / "llama").find("here_cloze", "acc").dtype == "bfloat16"
    runs.clear()
    loaded = {"tokenizer": small_tokenizer(), "include_path": fresh / "tasks", "output": fresh / "llama.json"}
    found = [
        mhla_hf.evaluate({"llama": small_llama()}, NAMES[:1], max_length=length, progress=False, **loaded)["llama"][0]
        for length in (64, None, WINDOW, None)
    ]
    assert runs == NAMES[:1] * 2 and [record.window for record in found] == [64, *[WINDOW] * 3]
    assert found[0].value != found[1].value == found[3].value


def test_other_weights_and_other_questions_count_as_missing(fresh, runs):
    two = NAMES[:2]
    old = values(judge(fresh, "llama", two)["llama"])
    lines = (fresh / "tasks" / "here_cloze.jsonl").read_text().splitlines(keepends=True)
    (fresh / "tasks" / "here_cloze.jsonl").write_text("".join(lines[1:]))
    judge(fresh, "llama", two)
    assert runs == [*two, "here_cloze"]
    weights = load_file(fresh / "llama" / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, fresh / "llama" / "model.safetensors", metadata={"format": "pt"})
    new = judge(fresh, "llama", NAMES[:1])["llama"]
    assert runs[3:] == NAMES[:1]
    assert values(new)[NAMES[0], "bits_per_byte"] != old[NAMES[0], "bits_per_byte"]
    assert [record.task for record in Results.read(fresh / "llama")] == NAMES[:1]


def test_a_stop_keeps_the_tasks_that_are_done_and_groups_are_aggregated_as_by_lm_eval(fresh, runs, monkeypatch, caplog):
    counted = language.score

    def stopped(*given, **how):
        if runs:
            raise KeyboardInterrupt
        return counted(*given, **how)

    monkeypatch.setattr(language, "score", stopped)
    with pytest.raises(KeyboardInterrupt), caplog.at_level("INFO", "mhla_hf"):
        judge(fresh, tasks="here_all, here_cloze, here_all")
    assert f"are stored in {fresh / 'llama' / 'results.json'}" in caplog.text
    found = Results.read(fresh / "llama")
    assert runs == ["here_all"] and {record.task for record in found} == {"here_all", "here_cloze", "here_recall"}
    assert not [path for path in (fresh / "llama").iterdir() if ".tmp-" in path.name]
    found = values(found)
    mean = (found["here_cloze", "acc"] + found["here_recall", "acc"]) / 2
    assert found["here_all", "acc"] == pytest.approx(mean)


def test_few_shot_examples_do_not_depend_on_what_ran_before(fresh):
    shots = {"num_fewshot": 2, "max_length": 512, "limit": 6}
    both = judge(fresh, ["llama", "mhla"], ["here_shots"], **shots)
    alone = judge(fresh, "mhla", ["here_shots"], force=True, **shots)
    assert both["mhla"][0].value == alone["mhla"][0].value
    assert both["mhla"][0].shots == 2 and both["mhla"][0].task_version == "2.0"
    fixed = judge(fresh, "mhla", ["here_cloze"], num_fewshot=2, limit=6)
    assert {record.shots for record in fixed["mhla"]} == {0}
    assert len(judge(fresh, "mhla", ["here_shots"], limit=6)["mhla"]) == 1
    assert Results.read(fresh / "mhla").find("here_shots", "acc", limit=6).shots == 0


def test_tasks_of_lm_eval_read_files_instead_of_the_hub(world, tmp_path):
    """By the names and with the functions that they have, the examples from the other documents or from a file."""
    parts = [f"The {name} met the clerk because _ was new." for name in ("cook", "nurse", "vet", "king")]
    choices = {"option1": "she", "option2": "he"}
    docs = [{"sentence": part, **choices, "answer": str(1 + i % 2)} for i, part in enumerate(parts)]
    lines = [json.dumps(doc) + "\n" for doc in docs]
    with gzip.open(tmp_path / "winogrande.jsonl.gz", "wt") as file:
        file.writelines(lines[:3])
    options = {"include_path": [Path(lm_eval.tasks.__file__).parent / "winogrande"], "num_fewshot": 2}
    options["data_files"] = tmp_path
    task = load_tasks(["winogrande"], **options)[0].loaded["tasks"]["winogrande"]
    assert task.eval_docs.to_list() == docs[:3]
    shown = [parts[1].replace("_", "he"), parts[2].replace("_", "she")]
    assert sorted(task.fewshot_context(docs[0], 2)[0].split("\n\n")[:2]) == sorted(shown)
    (tmp_path / "winogrande.train.jsonl").write_text(lines[3] * 2)
    task = load_tasks(["winogrande"], **options)[0].loaded["tasks"]["winogrande"]
    assert task.fewshot_context(docs[0], 2)[0].startswith(2 * (parts[3].replace("_", "he") + "\n\n"))
    found = judge(world, "llama", ["winogrande"], force=True, **options)["llama"].find("winogrande", "acc")
    assert (found.samples, found.shots) == (3, 2)
    assert f" --data-files {tmp_path.name} --num-fewshot 2" in found.command
    missing = r"tasks: got 'here_cloze', .* \(data_files has neither here_cloze.jsonl nor here_cloze.jsonl.gz\)\."
    nowhere = r"data_files: got '/nowhere', expected a folder with files such as piqa.jsonl\."
    for folder, says in ((tmp_path, missing), ("/nowhere", nowhere)):
        with pytest.raises(ValueError, match=says):
            judge(world, "llama", ["here_cloze"], data_files=folder)


def test_a_task_with_functions_has_one_hash_wherever_they_are_loaded(world, tmp_path):
    """lm-eval's settings hold functions in mappings, whose addresses differ from process to process."""
    hashes = []
    for place in ("a", "b"):
        folder = shutil.copytree(world / "tasks", tmp_path / place)
        with (folder / "local_data.py").open("a") as file:
            file.write("def ask(doc):\n    return doc['context']\n")
        text = "include: here_cloze.yaml\ntask: here_function\ndoc_to_text: !function local_data.ask\n"
        (folder / "function.yaml").write_text(text)
        hashes.append(load_tasks(["here_function"], [folder])[0].scored)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("metric", ["bits_per_byte", "word_perplexity"])
def test_the_standard_error_of_a_ratio_agrees_with_the_bootstrap(metric):
    random = numpy.random.default_rng(0)
    sizes = random.integers(100, 900, 80)
    pairs = [(-float(size * rate), int(size)) for size, rate in zip(sizes, random.normal(1.3, 0.2, 80), strict=True)]

    def value(chosen):
        rate = -sum(pair[0] for pair in chosen) / sum(pair[1] for pair in chosen)
        return rate / math.log(2) if metric == "bits_per_byte" else math.exp(rate)

    drawn = [value([pairs[i] for i in random.integers(0, 80, 80)]) for _ in range(3000)]
    assert ratio_stderr(metric, pairs) == pytest.approx(float(numpy.std(drawn)), rel=0.1)
    assert ratio_stderr(metric, pairs[:1]) is None


TOKENIZER = small_tokenizer()


def test_the_recipe_makes_questions_and_scores_them_once(tmp_path, runs):
    model = small_llama(max_position_embeddings=320)
    (tmp_path / "notes.txt").write_text(HELD_OUT)
    options = {"tokenizer": TOKENIZER, "progress": False, "recipe": "recall", "output": tmp_path / "llama.json"}
    options |= {"settings": {"lengths": [240, 320], "items": 2}}
    found = mhla_hf.evaluate(model, **options)["LlamaForCausalLM"]
    assert mhla_hf.evaluate(model, **options)["LlamaForCausalLM"] == found and len(runs) == 6
    kinds = ("codes_recall", "codes_generation", "lookups_recall")
    names = {f"{kind}_{length}" for kind in kinds for length in (240, 320)}
    assert {record.task for record in found} == names
    record = found.find("codes_recall_240", "acc")
    assert record.samples == 10 and found.find("codes_recall_240", "acc_back_120").samples == 2
    assert "--recipe recall --set lengths=240,320 --set items=2" in record.command
    assert found.find("codes_generation_320", "exact_match").value == 0.0
    options["settings"] |= {"lengths": 320, "text": str(tmp_path / "notes.txt")}
    mine = mhla_hf.evaluate(model, "lookups_recall_*", **options)["LlamaForCausalLM"]
    assert len(runs) == 7 and mine[0].task_hash != found.find("lookups_recall_320", "acc").task_hash
    assert "--set text=notes.txt" in mine[0].command and str(tmp_path) not in mine[0].command


BAD = [
    ({"lengths": [64]}, "settings: lengths: got [64], expected whole numbers of at least 128"),
    ({"lengths": 128, "depths": list(range(0, 100, 10))}, "lengths: got 128, expected more tokens for 10 facts"),
    ({"text": "no.txt"}, "No such file or directory: 'no.txt'"),
    ({"items": 1}, f"settings: lengths: got 4096, expected at most the {WINDOW} tokens that the model sees"),
]


@pytest.mark.parametrize("settings, says", BAD)
def test_bad_settings_are_one_sentence(settings, says):
    with pytest.raises((ValueError, OSError), match=re.escape(says)):
        mhla_hf.evaluate(small_llama(), recipe="recall", tokenizer=TOKENIZER, progress=False, settings=settings)


SAME = ("task", "metric", "stderr", "samples", "shots", "task_hash", "fingerprint", "seed", "window", "dtype")


@pytest.mark.slow
def test_two_processes_of_accelerate_write_the_records_of_one(tmp_path):
    make_tasks(tmp_path / "tasks", HELD_OUT, small_tokenizer(), WINDOW, items=17)
    save_mhla(tmp_path / "mhla")
    found = []
    for setup, processes in ((None, 1), ("ddp", 2)):
        arguments = ("--tasks", ",".join(NAMES), "--include-path", "tasks", "--out", f"{processes}.json", "--quiet")
        code, text = launch(tmp_path, setup, processes, "evaluate", "mhla", *arguments)
        assert code == 0, text
        assert text.count("task   ") == 1  # the table, once
        found.append(json.loads((tmp_path / f"{processes}.json").read_text())["results"])
    one, two = (sorted(records, key=lambda record: (record["task"], record["metric"])) for records in found)
    assert len(one) == len(two) > 3
    for a, b in zip(one, two, strict=True):
        assert a["value"] == pytest.approx(b["value"], rel=1e-6)
        for key in SAME:
            assert a[key] == (pytest.approx(b[key], rel=1e-5) if key == "stderr" else b[key]), (a["task"], key)
