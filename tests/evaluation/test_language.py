"""evaluate(): the numbers of lm-eval itself, once each, with standard errors; a damaged model gets none.

Run: pytest tests/evaluation/test_language.py
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file
from small_scores import HELD_OUT, WINDOW, save_llama, save_mhla, small_llama, small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import mhla_hf
from mhla_hf.cli import main
from mhla_hf.evaluation import language
from mhla_hf.evaluation.language import ratio_stderr
from mhla_hf.evaluation.local_tasks import make_tasks
from mhla_hf.evaluation.records import Results

NAMES = ["here_bits_per_byte", "here_cloze", "here_recall", "here_generation"]
FEWSHOT = """
task: here_shots
custom_dataset: !function local_data.load
dataset_kwargs: {file: here_cloze.jsonl}
test_split: test
fewshot_split: test
fewshot_config: {sampler: default}
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 2.0}
"""
GROUP = """
group: here_all
task: [here_cloze, here_recall]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
metadata: {version: 3.0}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two models and the tasks."""
    folder = tmp_path_factory.mktemp("world")
    arguments = {"prefix": "here", "window": WINDOW, "items": 16, "block": 32}
    make_tasks(HELD_OUT[:24_000], folder / "tasks", small_tokenizer(), **arguments)
    (folder / "tasks" / "shots.yaml").write_text(FEWSHOT)
    (folder / "tasks" / "group.yaml").write_text(GROUP)
    save_llama(folder / "llama")
    save_mhla(folder / "mhla")
    return folder


@pytest.fixture
def fresh(world, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(world, tmp_path / "world", ignore=shutil.ignore_patterns("results.json"))


@pytest.fixture
def runs(monkeypatch):
    """Names of the tasks that are really run, in order."""
    seen = []
    true = language.score

    def counted(model, item, **options):
        seen.append(item.name)
        return true(model, item, **options)

    monkeypatch.setattr(language, "score", counted)
    return seen


def judge(world, models="llama", tasks=NAMES, **options):
    names = [models] if isinstance(models, str) else models
    options = {"include_path": world / "tasks", "progress": False} | options
    return mhla_hf.evaluate([world / name for name in names], tasks, **options)


def values(records):
    return {(record.task, record.metric): record.value for record in records}


def agree(theirs, ours):
    assert {record.task for record in ours} == set(NAMES) and len(ours) == 11
    for record in ours:
        assert record.value == pytest.approx(theirs[record.task][f"{record.metric},none"], rel=1e-6)
        error = theirs[record.task][f"{record.metric}_stderr,none"]
        assert error == "N/A" or record.stderr == pytest.approx(error, rel=1e-6)
        assert record.stderr > 0 or record.task == "here_generation" or "_back_" in record.metric
    depths = [record for record in ours if record.metric.startswith("acc_back_")]
    whole = next(record for record in ours if (record.task, record.metric) == ("here_recall", "acc"))
    assert len(depths) == 3 and sum(record.samples for record in depths) == whole.samples
    assert sum(record.value * record.samples for record in depths) == pytest.approx(whole.value * whole.samples)


def test_the_numbers_are_those_of_lm_eval_in_a_process_without_this_package(world, tmp_path):
    blocked = tmp_path / "sitecustomize.py"
    blocked.write_text("import sys\nsys.modules['mhla_hf'] = None\n")
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(NAMES), "--device", "cpu"]
    command += ["--model_args", f"pretrained={world / 'mhla'},trust_remote_code=True", "--batch_size", "8"]
    command += ["--include_path", str(world / "tasks"), "--output_path", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())["results"]
    agree(theirs, judge(world, "mhla")["mhla"])


def test_the_numbers_of_a_softmax_model_are_those_of_lm_eval(world):
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(world / "llama")},
        tasks=NAMES,
        batch_size=8,
        device="cpu",
        task_manager=TaskManager(include_path=str(world / "tasks"), include_defaults=False),
    )
    agree(theirs["results"], judge(world)["llama"])


def test_by_folder_by_object_and_by_the_registered_model_type(world, tmp_path):
    by_folder = values(judge(world, "mhla", output=tmp_path)["mhla"])
    model = AutoModelForCausalLM.from_pretrained(world / "mhla").train()
    tokenizer = AutoTokenizer.from_pretrained(world / "mhla")
    options = {"include_path": world / "tasks", "progress": False}
    by_object = mhla_hf.evaluate({"model": model}, NAMES, tokenizer=tokenizer, **options)["model"].records
    assert values(by_object) == by_folder and model.training
    assert by_object[0].fingerprint.startswith("tensors:") and by_object[0].model == "model"
    theirs = simple_evaluate(
        model="mhla",
        model_args={"pretrained": str(world / "mhla")},
        tasks=["here_cloze"],
        batch_size=8,
        device="cpu",
        task_manager=TaskManager(include_path=str(world / "tasks"), include_defaults=False),
    )
    assert theirs["results"]["here_cloze"]["acc,none"] == by_folder["here_cloze", "acc"]


def test_a_record_says_all_that_is_needed(world, monkeypatch):
    monkeypatch.chdir(world)
    record = judge(world, "mhla", ["here_cloze"], force=True, limit=0.5, seed=7)["mhla"].records[0]
    assert (record.task, record.metric, record.limit, record.seed) == ("here_cloze", "acc", 0.5, 7)
    assert (record.samples, record.shots, record.window, record.task_version) == (8, 0, WINDOW, "1.0")
    assert (record.model, record.revision, record.dtype) == ("mhla", None, "float32")
    assert record.higher_is_better and record.versions["lm_eval"] == "0.4.13" and record.seconds > 0
    words = "mhla-hf evaluate mhla --tasks here_cloze --include-path tasks --limit 0.5 --batch-size 8 --seed 7"
    assert record.command == words
    text = (world / "mhla" / "results.json").read_text()
    assert str(world) not in text
    stated = judge(world, "mhla", ["here_cloze"], force=True, limit=1, command="make it")["mhla"].records[0]
    assert stated.command == "make it" and stated.samples == 1 and stated.stderr is None


def test_only_what_is_missing_is_run(fresh, runs):
    first = judge(fresh, ["llama", "mhla"])
    assert runs == NAMES * 2
    again = judge(fresh, ["llama", "mhla"])
    assert runs == NAMES * 2 and {k: v.records for k, v in again.items()} == {k: v.records for k, v in first.items()}
    runs.clear()
    judge(fresh, "llama", NAMES[1:2], limit=4)
    judge(fresh, "llama", NAMES[1:2], seed=3)
    judge(fresh, "llama", NAMES[1:2], dtype="bfloat16")
    judge(fresh, "llama", NAMES[1:2], dtype="bfloat16", max_length=100)
    assert runs == NAMES[1:2] * 4
    assert Results.read(fresh / "llama").find("here_cloze", "acc").dtype == "bfloat16"
    runs.clear()
    judge(fresh, "llama", NAMES[1:2], dtype="bfloat16", max_length=100)
    judge(fresh, "llama", NAMES[1:2], limit=4)
    assert runs == []
    judge(fresh, "llama", force=True)
    assert runs == NAMES


def test_a_score_is_known_for_its_window(fresh, runs):
    task = NAMES[:1]
    short = values(judge(fresh, "llama", task, max_length=64)["llama"])
    (record,) = judge(fresh, "llama", task)["llama"]
    assert runs == task * 2 and record.window == WINDOW and values([record]) != short
    judge(fresh, "llama", task, max_length=WINDOW)
    judge(fresh, "llama", task)
    assert runs == task * 2
    loaded = {"llama": small_llama()}
    options = {"include_path": fresh / "tasks", "progress": False, "output": fresh / "llama.json"}
    for length in (64, None, None):
        mhla_hf.evaluate(loaded, task, tokenizer=small_tokenizer(), max_length=length, **options)
    assert runs == task * 4


def lie(file):
    """Every score of a results file becomes 0.12."""
    content = json.loads(file.read_text())
    for record in content["results"]:
        record["value"] = 0.12
    file.write_text(json.dumps(content))


def test_scores_that_this_machine_did_not_measure_are_read_only_when_asked(
    fresh, runs, monkeypatch, tmp_path, capsys, caplog
):
    recall, file = "here_recall", fresh / "llama" / "results.json"
    true = values(judge(fresh, "llama", [recall])["llama"])
    lie(file)
    assert values(judge(fresh, "llama", [recall])["llama"]) == true and runs == [recall] * 2
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "of another machine"))
    assert {record.task for record in judge(fresh, "llama", ["here_cloze"])["llama"]} == {"here_cloze"}
    assert {record.task for record in Results.read(file)} == {"here_cloze", recall}  # nobody's scores are thrown away
    assert values(judge(fresh, "llama", [recall])["llama"]) == true and runs == [recall] * 2 + ["here_cloze", recall]
    lie(file)
    line = ["evaluate", str(fresh / "llama"), "--tasks", recall, "--include-path", str(fresh / "tasks")]
    assert main([*line, "--trust-scores", "--quiet"]) == 0
    assert "0.1200" in capsys.readouterr().out and f"scores read from {file} were not measured here" in caplog.text
    assert runs == [recall] * 2 + ["here_cloze", recall]
    assert main(line) == 0
    assert f"scores in {file} were not measured here and do not count" in caplog.text
    assert main(line) == 0
    assert f"what {file} holds is read from it, not run again" in caplog.text


def test_models_of_one_class_and_folders_of_one_name_are_told_apart(world, tmp_path):
    options = {"include_path": world / "tasks", "progress": False, "limit": 2, "tokenizer": small_tokenizer()}
    loaded = mhla_hf.evaluate([small_llama(seed) for seed in range(3)], NAMES[:1], **options)
    assert list(loaded) == ["LlamaForCausalLM", "LlamaForCausalLM-2", "LlamaForCausalLM-3"]
    assert len({record.value for records in loaded.values() for record in records}) == 3
    for place in ("a", "b", "c/b"):
        shutil.copytree(world / "llama", tmp_path / place / "llama")
    folders = [tmp_path / place / "llama" for place in ("a", "b", "c/b")]
    compared = mhla_hf.evaluate(folders, NAMES[:1], output=tmp_path / "out", **options)
    assert list(compared) == ["llama", "b/llama", "b/llama-2"]
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_other_weights_and_other_questions_count_as_missing(fresh, runs):
    old = values(judge(fresh)["llama"])
    lines = (fresh / "tasks" / "here_cloze.jsonl").read_text().splitlines(keepends=True)
    (fresh / "tasks" / "here_cloze.jsonl").write_text("".join(lines[1:]))
    judge(fresh)
    assert runs == [*NAMES, "here_cloze"]
    weights = load_file(fresh / "llama" / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, fresh / "llama" / "model.safetensors", metadata={"format": "pt"})
    new = judge(fresh, "llama", NAMES[:1])["llama"]
    assert runs[len(NAMES) + 1 :] == NAMES[:1]
    assert values(new)[NAMES[0], "bits_per_byte"] != old[NAMES[0], "bits_per_byte"]
    assert [record.task for record in Results.read(fresh / "llama")] == NAMES[:1]


def test_a_stop_keeps_the_tasks_that_are_done(fresh, monkeypatch):
    true, seen = language.score, []

    def stopped(model, item, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(item.name)
        return true(model, item, **options)

    monkeypatch.setattr(language, "score", stopped)
    with pytest.raises(KeyboardInterrupt):
        judge(fresh)
    assert {record.task for record in Results.read(fresh / "llama")} == set(NAMES[:1])
    assert not [path for path in (fresh / "llama").iterdir() if ".tmp-" in path.name]


def test_few_shot_examples_do_not_depend_on_what_ran_before(fresh):
    both = judge(fresh, ["llama", "mhla"], ["here_shots"], num_fewshot=2, max_length=512)
    alone = judge(fresh, "mhla", ["here_shots"], num_fewshot=2, max_length=512, force=True)
    assert both["mhla"].records[0].value == alone["mhla"].records[0].value
    assert both["mhla"].records[0].shots == 2 and both["mhla"].records[0].task_version == "2.0"
    fixed = judge(fresh, "mhla", ["here_cloze"], num_fewshot=2)
    assert {record.shots for record in fixed["mhla"]} == {0}
    assert len(judge(fresh, "mhla", ["here_shots"])["mhla"]) == 1
    assert Results.read(fresh / "mhla").find("here_shots", "acc", shots=0).shots == 0


def test_groups_are_scored_as_lm_eval_aggregates_them(fresh, runs):
    found = values(judge(fresh, "llama", ["here_all"])["llama"])
    mean = (found["here_cloze", "acc"] + found["here_recall", "acc"]) / 2
    assert found["here_all", "acc"] == pytest.approx(mean)
    judge(fresh, "llama", "here_all, here_all")
    assert runs == ["here_all"]


def test_output_goes_where_it_is_told(world, tmp_path):
    options = {"limit": 2, "tasks": ["here_cloze"]}
    before = sorted(path.name for path in (world / "llama").iterdir())
    judge(world, ["llama", "mhla"], output=tmp_path / "all", **options)
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["llama.json", "mhla.json"]
    judge(world, "llama", output=tmp_path / "one.json", **options)
    assert len(Results.read(tmp_path / "one.json")) == 2
    assert sorted(path.name for path in (world / "llama").iterdir()) == before
    table = judge(world, ["llama", "mhla"], output=tmp_path / "all", **options)
    assert str(table) == table.table() and table.table("markdown").startswith("| task | metric |")
    assert "llama" in str(table).splitlines()[0] and "±" in str(table)


@pytest.mark.parametrize("metric", ["bits_per_byte", "byte_perplexity", "word_perplexity"])
def test_the_standard_error_of_a_ratio_agrees_with_the_bootstrap(metric):
    random = numpy.random.default_rng(0)
    sizes = random.integers(100, 900, 80)
    pairs = [(-float(size * rate), int(size)) for size, rate in zip(sizes, random.normal(1.3, 0.2, 80), strict=True)]

    def value(chosen):
        rate = -sum(pair[0] for pair in chosen) / sum(pair[1] for pair in chosen)
        return rate / math.log(2) if metric == "bits_per_byte" else math.exp(rate)

    drawn = [value([pairs[i] for i in random.integers(0, 80, 80)]) for _ in range(3000)]
    assert ratio_stderr(metric, pairs) == pytest.approx(float(numpy.std(drawn)), rel=0.1)
    assert ratio_stderr(metric, pairs[:1]) is None and ratio_stderr(metric, [(0.0, 0), (0.0, 0)]) is None


def spoil(folder, how):
    weights = folder / "model.safetensors"
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "no weights":
        weights.unlink()
    elif how == "one missing":
        kept = load_file(weights)
        kept.pop("model.layers.1.mlp.up_proj.weight")
        save_file(kept, weights, metadata={"format": "pt"})
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "bad config":
        (folder / "config.json").write_text("{")
    elif how == "unknown":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}))
    elif how == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif how == "old results":
        (folder / "results.json").write_text("[]")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "cannot be loaded"),
        ("no weights", "has no .safetensors file"),
        ("one missing", "lacks 1 of its weights, such as 'model.layers.1.mlp.up_proj.weight'"),
        ("no config", "has no config.json"),
        ("bad config", "config.json"),
        ("unknown", "cannot be loaded"),
        ("no tokenizer", "cannot be loaded"),
        ("old results", "is not a results file"),
    ],
)
def test_a_damaged_model_gets_one_sentence_and_no_score(fresh, how, says):
    spoil(fresh / "llama", how)
    before = sorted((path.name, path.stat().st_size) for path in (fresh / "llama").iterdir())
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        judge(fresh)
    assert "\n" not in str(caught.value) and "llama" in str(caught.value)
    assert sorted((path.name, path.stat().st_size) for path in (fresh / "llama").iterdir()) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tasks": []}, "tasks is empty"),
        ({"tasks": 3}, "tasks is 3"),
        ({"tasks": "here_close"}, "task 'here_close' does not exist; did you mean here_cloze"),
        ({"include_path": "/nowhere"}, "include_path '/nowhere' is no folder"),
        ({"limit": 0}, "limit is 0"),
        ({"limit": 2.5}, "limit is 2.5"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"batch_size": "many"}, "batch_size is 'many'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_fewshot": -1}, "num_fewshot is -1"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of ['auto'"),
        ({"device": "tpu:9"}, "device 'tpu:9' is not available"),
        ({"max_length": 1}, "max_length is 1"),
        ({"models": []}, "models is empty"),
        ({"models": ["llama", "mhla"], "output": "one.json"}, "is one file for 2 models"),
        ({"models": ["nobody/nothing"]}, "nothing"),
    ],
)
def test_bad_arguments_are_one_sentence(world, changes, says):
    changes = {"limit": 2, **changes}
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        judge(world, **changes)
    assert "\n" not in str(caught.value)


def test_models_that_are_none_are_refused(world):
    with pytest.raises(TypeError, match="model 'int' is int"):
        mhla_hf.evaluate(3, NAMES)
    with pytest.raises(ValueError, match="tokenizer is None"):
        mhla_hf.evaluate(small_llama(), NAMES)
    with pytest.raises(ValueError, match="the Hub does not give it"):
        mhla_hf.evaluate("nobody/nothing", NAMES, include_path=world / "tasks")
    with pytest.raises(ValueError, match="is a file"):
        mhla_hf.evaluate(world / "llama" / "config.json", NAMES)


def test_without_lm_eval_the_line_that_installs_it(world, monkeypatch):
    monkeypatch.delitem(sys.modules, "mhla_hf.evaluation.language")
    monkeypatch.delattr(sys.modules["mhla_hf.evaluation"], "language")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install 'mhla_hf\[eval\]'"):
        judge(world)


def test_evaluating_leaves_no_global_settings_behind(world):
    """A training in the same process may choose its own precision."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    judge(world, "llama", ["here_cloze"], force=True, limit=0.2)
    assert not AcceleratorState._shared_state
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16"
    AcceleratorState._reset_state(reset_partial_state=True)
