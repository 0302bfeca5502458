"""The costs of recipes: memory is what torch's allocator gives out in a real step, and multiply-adds are those by hand."""

import pytest
from tools.small_towers import small_classifier
from transformers import LlamaConfig, ViTConfig

from experiments.recipe_costs import count_classifiers, count_flops, make_task, measure_stage
from mhla_hf.training.recipe import Recipe
from mhla_hf.training.trainable import set_trainable

WIDTHS = {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 24}
SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
BASES = {
    "wan": {**WIDTHS, "_class_name": "WanTransformer3DModel", "ffn_dim": 160, "text_dim": 32, "freq_dim": 32},
    "vit": ViTConfig(**SIZES, image_size=64, patch_size=8, num_labels=7, architectures=["ViTForImageClassification"]),
    "llama": LlamaConfig(**SIZES, vocab_size=1000, num_key_value_heads=1),
}
VIDEO = {"size": [17, 96, 128], "batch_size": 4}
CASES = {  # task, settings, stage, run
    "wan": ("diffusion", {}, {"loss": "transfer", "trainable": "mhla", **VIDEO}, {"gradient_checkpointing": True}),
    "vit": ("images", {}, {"loss": "logits", "ema": 0.9, "batch_size": 16}, {}),
    "llama": ("language", {}, {"loss": "logits", "seq_len": 128, "batch_size": 8}, {"mixed_precision": "bf16"}),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_a_stage_takes_in_weights_moments_and_states(name):
    kind, settings, stage, run = CASES[name]
    recipe = Recipe([{"name": "s", "steps": 1, "lr": 1e-3, **stage}], kind, settings=settings, run=run)
    (stage,), base = recipe.stages, BASES[name]
    told, task = measure_stage(base, recipe, stage), make_task(base, recipe, stage)
    num_parameters = task.student.num_parameters()
    with task.prepare(stage):
        set_trainable(task.student, stage, {})
        weights = sum(x.nbytes for x in task.student.parameters())
        trained = sum(x.nbytes for x in task.student.parameters() if x.requires_grad)
    teacher = sum(x.nbytes for x in task.teacher.parameters())
    assert told["states"] == weights + (4 if stage.ema else 3) * trained + teacher < told["peak"]
    assert told["disk"] == 2 * (4 * num_parameters + (3 if stage.ema else 2) * trained)


def test_counted_multiply_adds_are_the_formula():
    model, t, d, m = small_classifier(), 256, 24, 16
    layer = t * (4 * d * d + 8 * d * d) + t * d * 9
    attention = t * d * 8 + m * m * d * 8 + t * d * 8 + m * m * d + t * d
    total, outside = count_flops(model, 32)
    assert outside == t * 4 * d + 2 * layer + d * 5
    assert total == outside + 2 * attention
    softmax = count_flops(small_classifier(attention="softmax"), 32)
    assert softmax == (outside + 2 * 2 * t * t * d, outside)


def test_multiply_adds_of_table_2():
    (row,) = (row for row in count_classifiers(("deit-t",)) if row["attention"] == "mhla")
    assert round(row["outside"] / 1e9, 1) == 1.1 and row["padded_flops"] > 1.25 * row["flops"]
