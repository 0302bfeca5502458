"""A tokenizer, text, tasks, and models of 30,000 parameters, for the tests of scores and of the command line."""

import dataclasses
import json
import random
from pydoc_data.topics import topics

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf
from experiments.demo.text import make_tokenizer
from mhla_hf.evaluation.image_scores import Extractor
from mhla_hf.evaluation.recall import LOADER, TASKS, filler_lines, make_text, write_task
from mhla_hf.evaluation.records import Result

WINDOW = 192
HELD_OUT = "\n\n".join(topics[name] for name in ("assert", "calls", "class", "execmodel", "naming", "try"))
TRAINING = "\n\n".join(topics[name] for name in ("compound", "function", "if", "while"))


def small_tokenizer():
    return make_tokenizer(TRAINING, 400, WINDOW)


def small_llama(seed=0, **changes):
    """Return a softmax model with random weights, large enough that its scores differ."""
    torch.manual_seed(seed)
    values = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "max_position_embeddings": WINDOW, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        "initializer_range": 0.15, **changes,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**values)).eval()


def save_model(folder, model):
    """Save a model and a tokenizer, and return the folder."""
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder


def save_llama(folder, seed=0, dtype=torch.float32, **changes):
    return save_model(folder, small_llama(seed, **changes).to(dtype))


def save_mhla(folder, seed=0, **changes):
    settings = {"layers": "2/3", "block_size": 32, "window": 2, "salient": 8}
    return save_model(folder, mhla_hf.convert(small_llama(seed, **changes), **settings))


def colors(images):
    """Return the mean color of each quarter of an image, as all the outputs that image scores use."""
    pooled = torch.nn.functional.adaptive_avg_pool2d(images.float() / 255, 2).flatten(1)
    return {"features": pooled, "logits": 9 * pooled, "spatial": pooled[:, :3]}


def color_judge():
    """Return `colors` as an extractor that takes the place of Inception."""
    return Extractor("color judge", colors, "1")


def make_result(**changes):
    values = {
        "task": "copa", "metric": "acc", "value": 0.5, "stderr": 0.05, "higher_is_better": True, "shots": 0,
        "samples": 100, "limit": None, "task_version": "1.0", "task_hash": "aa", "model": "out/mhla", "revision": None,
        "fingerprint": "files:1", "versions": {"torch": "2.13.0"}, "commit": "abc", "dtype": "float32",
        "hardware": "a CPU, 2 cores, 1 thread", "seed": 0, "command": "mhla-hf evaluate out/mhla --tasks copa",
        "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return dataclasses.replace(Result(**values), **changes)


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
