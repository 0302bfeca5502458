"""The memory of a training step on real tensors, for the tests of its estimates."""

import torch
from torch.profiler import ProfilerActivity, profile

from mhla_hf.training.trainable import set_trainable


def allocated(task, recipe, inputs):
    """The largest sum of what a step allocates and has not freed, as torch's profiler tells."""
    (stage,) = recipe.stages
    with task.prepare(stage):
        set_trainable(task.student, stage, {})
        task.set_gradient_checkpointing(recipe.run.get("gradient_checkpointing", False))
        objective = task.objective(stage)
        for _ in range(2):  # the first also creates what stays, as the gradients of earlier micro-batches do
            if stage.grad_accum == 1:
                task.student.zero_grad()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.run["mixed_precision"] == "bf16"):
                    loss, _ = objective(*inputs)
                loss.backward()
    current = highest = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest
