"""The costs of recipes: memory is what torch's allocator gives out in a real step, and multiply-adds are those by hand."""

import pytest
import torch
from tools.small_towers import small_classifier
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, LlamaConfig, ViTConfig

from experiments.recipe_costs import count_classifiers, count_flops, make_inputs, make_task, measure_stage
from mhla_hf.training import output_head
from mhla_hf.training.recipe import Recipe
from mhla_hf.training.trainable import set_trainable

WIDTHS = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 24}
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
BASES = {
    "wan": {**WIDTHS, "_class_name": "WanTransformer3DModel", "ffn_dim": 160, "text_dim": 32, "freq_dim": 32},
    "dit": {**WIDTHS, "_class_name": "DiTTransformer2DModel", "out_channels": 8, "sample_size": 16},
    "vit": ViTConfig(**SIZES, image_size=64, patch_size=8, num_labels=7, architectures=["ViTForImageClassification"]),
    "bert": BertConfig(**SIZES, vocab_size=100),
    "llama": LlamaConfig(**SIZES, vocab_size=1000, num_key_value_heads=1),
}
VIDEO, TEXT, ALL = {"size": [17, 96, 128], "batch_size": 4}, {"seq_len": 128, "batch_size": 8}, {"layers": "all"}
CASES = {  # task, settings, stage, gradient checkpointing, precision
    "wan, LoRA": ("diffusion", {"layers": "2/3"}, {"loss": "prediction", "trainable": "lora", **VIDEO}, True, "bf16"),
    "wan, transfer": ("diffusion", {"layers": "2/3"}, {"loss": "transfer", "trainable": "mhla", **VIDEO}, True, "bf16"),
    "dit, transfer": ("diffusion", ALL, {"loss": "transfer", "trainable": "attention", "batch_size": 4}, False, "no"),
    "vit, logits": ("images", ALL, {"loss": "logits", "ema": 0.9, "batch_size": 16}, False, "no"),
    "vit, parts": ("images", ALL, {"loss": "features", "batch_size": 32, "grad_accum": 2}, False, "bf16"),
    "bert, embeddings": ("encoders", ALL, {"loss": "embeddings", "seq_len": 64, "batch_size": 16}, False, "no"),
    "llama, transfer": ("language", ALL, {"loss": "transfer", "trainable": "mhla", **TEXT}, False, "no"),
    "llama, logits": ("language", ALL, {"loss": "logits", **TEXT}, True, "no"),
}
WITHIN = 0.1


def allocated(task, recipe, inputs):
    """The largest sum of what a step allocates and has not freed, as torch's profiler tells."""
    (stage,) = recipe.stages
    with task.prepare(stage):
        set_trainable(task.student, stage, {})
        task.set_gradient_checkpointing(recipe.run["gradient_checkpointing"])
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
    trained = sum(x.nbytes for x in task.student.parameters() if x.requires_grad)
    return highest - trained * (stage.grad_accum == 1)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "wan, LoRA")) for name in CASES]
)
def test_a_step_takes_the_memory_that_is_told(name, monkeypatch):
    monkeypatch.setattr(output_head, "CPU_CHUNK", output_head.GPU_CHUNK)
    kind, settings, stage, checkpointed, precision = CASES[name]
    run = {"gradient_checkpointing": checkpointed, "mixed_precision": precision}
    recipe = Recipe([{"name": "s", "steps": 1, "lr": 1e-3, **stage}], kind, settings=settings, run=run)
    (stage,), base = recipe.stages, BASES[name.split(",")[0]]
    told = measure_stage(base, recipe, stage)
    task = make_task(base, recipe, stage)
    inputs = make_inputs(task, base, stage, stage.batch_size // stage.grad_accum)
    assert told["peak"] - told["states"] == pytest.approx(allocated(task, recipe, inputs), rel=WITHIN)
    task = make_task(base, recipe, stage)
    num_parameters = task.student.num_parameters()
    with task.prepare(stage):
        set_trainable(task.student, stage, {})
        weights = sum(x.nbytes for x in task.student.parameters())
        trained = sum(x.nbytes for x in task.student.parameters() if x.requires_grad)
    teacher = sum(x.nbytes for x in task.teacher.parameters())
    assert told["states"] == weights + (4 if stage.ema else 3) * trained + teacher
    assert told["disk"] == 2 * (4 * num_parameters + (3 if stage.ema else 2) * trained)


@pytest.mark.slow
def test_eight_processes_share_the_weights_and_gather_blocks():
    stage = {"name": "s", "loss": "prediction", "steps": 1, "lr": 1e-3, **VIDEO, "batch_size": 8}
    recipe = Recipe([stage], "diffusion", settings={"layers": "2/3"}, run={"mixed_precision": "bf16"})
    alone = measure_stage(BASES["wan"], recipe, recipe.stages[0])
    recipe.processes = 8
    shared = measure_stage(BASES["wan"], recipe, recipe.stages[0])
    assert alone["states"] / 8 < shared["states"] < alone["states"]
    assert shared["peak"] - shared["states"] < (alone["peak"] - alone["states"]) / 6


def test_counted_multiply_adds_are_the_formula():
    """One small model by hand: stem, projections and MLP, summaries, mixing, outputs, position convolution, classifier."""
    model, t, d, m = small_classifier(), 256, 24, 16
    layer = t * (4 * d * d + 8 * d * d) + t * d * 9
    attention = t * d * 8 + m * m * d * 8 + t * d * 8 + m * m * d + t * d
    total, outside = count_flops(model, 32)
    assert outside == t * 4 * d + 2 * layer + d * 5
    assert total == outside + 2 * attention
    softmax = count_flops(small_classifier(attention="softmax"), 32)
    assert softmax == (outside + 2 * 2 * t * t * d, outside)


@pytest.mark.parametrize(
    ("preset", "billions", "padded"), [("deit-t", 1.1, True), pytest.param("vlt-t", 2.4, False, marks=pytest.mark.slow)]
)
def test_multiply_adds_of_table_2(preset, billions, padded):
    (row,) = (row for row in count_classifiers((preset,)) if row["attention"] == "mhla")
    assert round(row["outside"] / 1e9, 1) == billions
    assert (row["padded_flops"] > 1.25 * row["flops"]) is padded
