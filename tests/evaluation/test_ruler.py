"""RULER's tasks of the recipe by their names: the questions, prompts and numbers of lm-eval itself, task by task.

Run: pytest tests/evaluation/test_ruler.py
"""

from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from small_scores import TRAINING, small_llama

import mhla_hf
from experiments.demo.text import make_tokenizer
from mhla_hf.evaluation.language import load_tasks, task_hash
from mhla_hf.evaluation.recipes import read_score_recipe

RULER = (
    Path(lm_eval.tasks.__file__).parent / "ruler"
)  # only its files are read: lm-eval's whole index takes half a minute
LENGTH = 1024
KEYS = (f"{LENGTH},none", f"{LENGTH}_stderr,none")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. VAR = Find all variables "


@pytest.fixture
def tokenizer():
    """RULER's own example has to fit into 500 tokens of it: lm-eval looks for a shorter one without end."""
    pytest.importorskip("wonderwords")
    return make_tokenizer(TRAINING + NOISE * 200, 700, LENGTH)


@pytest.mark.slow
def test_the_questions_are_the_same_each_time(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    metadata = {"tokenizer": str(tmp_path), "max_seq_lengths": [512]}
    tasks = {"niah_single_1": 0, "ruler_fwe": 0}
    found = [load_tasks(tasks, RULER, metadata=metadata) for _ in range(2)]
    hashes = [[task_hash(item.tasks[item.name]) for item in items] for items in found]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 2 and set(tasks) <= set(read_score_recipe("ruler").tasks)


@pytest.mark.slow
def test_every_task_of_the_recipe_has_the_numbers_of_lm_eval(tokenizer, tmp_path, monkeypatch):
    """A small model writes little that is right, so the end of each prompt is put behind what it wrote, for both."""
    written = HFLM.generate_until

    def generate_until(self, requests, disable_tqdm=False):
        texts = written(self, requests, disable_tqdm=disable_tqdm)
        prompts = [request.args[0] for request in requests]
        return [text + prompt[len(prompt) // 2 :] for text, prompt in zip(texts, prompts, strict=True)]

    monkeypatch.setattr(HFLM, "generate_until", generate_until)
    small_llama(vocab_size=700, max_position_embeddings=LENGTH).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    options = {"recipe": "ruler", "settings": {"lengths": [LENGTH]}, "include_path": RULER}
    ours = mhla_hf.evaluate(tmp_path / "llama", limit=6, progress=False, **options)["llama"]
    metadata = {"tokenizer": str(tmp_path / "llama"), "max_seq_lengths": [LENGTH]}
    manager = TaskManager(include_path=str(RULER), include_defaults=False, metadata=metadata)
    for task in read_score_recipe("ruler").tasks:
        theirs = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tmp_path / "llama")},
            tasks=[task],
            num_fewshot=0,
            batch_size=8,
            device="cpu",
            limit=6,
            task_manager=manager,
        )
        scores, record = theirs["results"][task], ours.find(task, str(LENGTH), limit=6)
        assert (record.value, record.stderr, record.samples) == (*map(scores.get, KEYS), 6), task
    assert len({record.value for record in ours}) > 2 and len(ours) == 5
