"""The memory of a stage of a recipe for classifiers or encoders is what torch's allocator gives out in a real step."""

import pytest
import torch
from measured_steps import allocated
from transformers import BertConfig, ViTConfig

from mhla_hf.planning import list_recipes
from mhla_hf.training import transformers_costs
from mhla_hf.training.recipe import Recipe
from mhla_hf.training.trainable import set_trainable

SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
VIT = ViTConfig(**SIZES, image_size=64, patch_size=8, num_labels=7, architectures=["ViTForImageClassification"])
BERT = BertConfig(**SIZES, vocab_size=100)
CASES = {
    "vit, transfer": ("images", VIT, {"loss": "transfer", "trainable": "mhla"}, "bf16"),
    "vit, logits": ("images", VIT, {"loss": "logits", "ema": 0.9}, "no"),
    "vit, parts": ("images", VIT, {"loss": "features", "grad_accum": 2}, "bf16"),
    "bert, transfer": ("encoders", BERT, {"loss": "transfer", "trainable": "attention"}, "no"),
    "bert, embeddings": ("encoders", BERT, {"loss": "embeddings", "seq_len": 64}, "no"),
}
WITHIN = 0.1


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_the_memory_that_is_told(name):
    """With two small numbers of samples in place of the many."""
    kind, config, changes, precision = CASES[name]
    stage = {"name": "s", "steps": 1, "lr": 1e-3, "batch_size": 48, **changes}
    recipe = Recipe([stage], kind, settings={"layers": "all"}, run={"mixed_precision": precision})
    (stage,) = recipe.stages
    (told,) = transformers_costs.estimate_transformers_costs(config, recipe)["stages"]
    gradients = told["memory"]["gradients"] if stage.grad_accum == 1 else 0
    task = transformers_costs.make_task(config, recipe, stage)
    inputs = transformers_costs.make_inputs(task, stage, stage.batch_size // stage.grad_accum)
    assert told["memory"]["activations"] + gradients == pytest.approx(allocated(task, recipe, inputs), rel=WITHIN)
    set_trainable(task.student, stage, {})
    trained = sum(x.nbytes for x in task.student.parameters() if x.requires_grad)
    sizes = {"weights": sum(x.nbytes for x in task.student.parameters()), "gradients": trained, "moments": 2 * trained}
    sizes |= {"average": trained * (stage.ema > 0), "teacher": sum(x.nbytes for x in task.teacher.parameters())}
    assert {name: told["memory"][name] for name in sizes} == sizes
    assert (task.teacher.dtype is torch.bfloat16) is (precision == "bf16")


@pytest.mark.parametrize(
    ("config", "names"),
    [pytest.param(VIT, {"image_distill", "image_features"}, marks=pytest.mark.slow), (BERT, {"encoder"})],
)
def test_recipes_of_a_model(tmp_path, config, names):
    """Only those that convert a model of its kind."""
    config.save_pretrained(tmp_path)
    rows = {row["name"]: row for row in list_recipes(tmp_path, tflops=1) if row["memory"]}
    assert set(rows) == names | {"language_340m_scratch"} and all(row["hours"] > 0 for row in rows.values())


def test_flops_are_those_of_the_matrices():
    """Per token six for each trained weight in a matrix and two for the teacher's, besides what attention multiplies."""
    recipe = Recipe([{"name": "s", "loss": "embeddings", "steps": 3, "lr": 1e-3, "batch_size": 20}], "encoders")
    costs = transformers_costs.estimate_transformers_costs(BERT, recipe)
    matrices = 3 * (4 * 48 * 48 + 2 * 48 * 96)
    assert 1 < costs["flops"] / (8 * matrices * 3 * 20 * 128) < 1.8
