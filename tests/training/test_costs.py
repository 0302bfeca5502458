"""The memory of a stage is what a real step takes."""

import ctypes
import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from mhla_hf.training.costs import count_active_parameters, estimate_costs
from mhla_hf.training.recipe import Recipe
from mhla_hf.training.tasks.language import LanguageObjective
from mhla_hf.training.trainable import set_trainable

LENGTH, BATCH = 256, 8
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITHIN = 0.25


def resident(key):
    """Bytes of this process that are in memory now (VmRSS), or were at most (VmHWM)."""
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="it reads the peak of its memory from /proc")
@pytest.mark.parametrize("loss", ["transfer", "logits"])
def test_a_step_takes_the_memory_that_is_told(lab, loss):
    """What it takes beside the weights: activations, logits and gradients; the moments are none yet."""
    teacher = lab.teacher(vocab_size=4096, **SIZES)
    student = lab.student(teacher, block_size=32, mixing_form="decay", local="softmax").train()
    part = {"name": "s", "loss": loss, "steps": 1, "lr": 1e-3, "seq_len": LENGTH, "batch_size": BATCH}
    part |= {"trainable": "mhla"} if loss == "transfer" else {}
    recipe = Recipe([part])
    (told,) = estimate_costs(student, recipe, teacher.num_parameters(), count_active_parameters(teacher), None)[
        "stages"
    ]
    set_trainable(student, recipe.stages[0], {})
    step, ids = LanguageObjective(student, teacher, recipe.stages[0]), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    taken = []
    for _ in range(4):  # the first allocates what stays, and a busy machine may swap pages out before any of them
        student.zero_grad()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        step(ids, ids, 1.0, 1.0)[0].backward()
        taken.append(resident("VmHWM") - before)
    told = sum(told["memory"][name] for name in ("activations", "logits", "gradients"))
    assert told == pytest.approx(min(taken), rel=WITHIN)


@pytest.mark.parametrize(
    ("change", "name", "factor"),
    [
        ({"grad_accum": 2}, "activations", 0.5),
        ({"grad_accum": 2}, "logits", 0.5),
        ({"top_k": 8}, "logits", 0.75),
        ({"loss": "transfer", "trainable": "mhla"}, "logits", 0),
    ],
)
def test_what_a_stage_saves(lab, change, name, factor):
    teacher = lab.teacher()
    sizes, student = (teacher.num_parameters(), count_active_parameters(teacher), None), lab.student(teacher)
    part = {"name": "s", "loss": "logits", "steps": 1, "lr": 1e-3}
    one, other = (estimate_costs(student, Recipe([part | more]), *sizes) for more in ({}, change))
    assert other["stages"][0]["memory"][name] == factor * one["stages"][0]["memory"][name]
    less = estimate_costs(student, Recipe([part], run={"gradient_checkpointing": True}), *sizes)
    assert less["stages"][0]["memory"]["activations"] < one["stages"][0]["memory"]["activations"]
