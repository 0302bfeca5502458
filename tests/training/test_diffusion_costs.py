"""The memory of a stage of a diffusion recipe is what torch's allocator gives out in a real step."""

import json

import pytest
from measured_steps import allocated

from mhla_hf.planning import list_recipes
from mhla_hf.training import diffusion_costs
from mhla_hf.training.recipe import Recipe
from mhla_hf.training.trainable import set_trainable

SIZES = {"num_layers": 7, "num_attention_heads": 2, "attention_head_dim": 24}
WAN = {**SIZES, "_class_name": "WanTransformer3DModel", "ffn_dim": 160, "text_dim": 32, "freq_dim": 32}
DIT = {**SIZES, "_class_name": "DiTTransformer2DModel", "out_channels": 8, "sample_size": 16}
VAE = {"_class_name": "AutoencoderKLWan"}
WITHIN = 0.1


def make_recipe(config, loss, trainable, checkpointed, precision, **changes):
    is_video = config is WAN
    stage = {"name": "s", "loss": loss, "trainable": trainable, "steps": 1, "lr": 1e-3, "batch_size": 4, **changes}
    stage |= {"size": [17, 96, 128]} if is_video else {}
    run = {"gradient_checkpointing": checkpointed, "mixed_precision": precision}
    return Recipe([stage], "diffusion", settings={"layers": "2/3" if is_video else "all"}, run=run)


CASES = {  # two models, with every kind of stage
    "wan, LoRA": (WAN, "prediction", "lora", True, "bf16", {"ema": 0.9}),
    "wan, parts": (WAN, "prediction", "lora", True, "bf16", {"grad_accum": 2}),
    "wan, all": (WAN, "prediction", "all", True, "bf16", {}),
    "wan, not checkpointed": (WAN, "denoising", "all", False, "no", {}),
    "wan, transfer": (WAN, "transfer", "mhla", True, "bf16", {}),
    "dit, LoRA": (DIT, "prediction", "lora", False, "bf16", {}),
    "dit, transfer": (DIT, "transfer", "attention", False, "no", {}),
}
SLOW = [name for name in CASES if name not in ("wan, transfer", "dit, transfer")]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_a_step_takes_the_memory_that_is_told(name):
    """With two shallow models in place of the deep one."""
    config, *options, changes = CASES[name]
    recipe = make_recipe(config, *options, **changes)
    (told,) = diffusion_costs.estimate_diffusion_costs(config, VAE, recipe)["stages"]
    gradients = told["memory"]["gradients"] if recipe.stages[0].grad_accum == 1 else 0
    task = diffusion_costs.make_task(config, recipe, recipe.stages[0])
    shape = diffusion_costs.latent_shape(task.student.config, VAE, recipe.stages[0])
    inputs = diffusion_costs.make_inputs(task, recipe.stages[0], shape, 4 // recipe.stages[0].grad_accum)
    assert told["memory"]["activations"] + gradients == pytest.approx(allocated(task, recipe, inputs), rel=WITHIN)
    task = diffusion_costs.make_task(config, recipe, recipe.stages[0])
    with task.prepare(recipe.stages[0]):
        set_trainable(task.student, recipe.stages[0], {})
        trained = [parameter for parameter in task.student.parameters() if parameter.requires_grad]
        weights = [*task.student.parameters()]
        teacher = [] if task.teacher is None else [*task.teacher.parameters()]
        sizes = {"weights": weights, "gradients": trained, "teacher": teacher, "average": trained}
        sizes = {name: sum(x.nbytes for x in values) for name, values in sizes.items()}
    sizes["average"] *= recipe.stages[0].ema > 0
    assert {name: told["memory"][name] for name in sizes} == sizes
    assert told["memory"]["moments"] == 2 * sizes["gradients"] and told["memory"]["gathered"] == 0


@pytest.mark.slow
def test_eight_processes_share_the_weights_and_gather_blocks():
    recipe = make_recipe(WAN, "prediction", "all", True, "bf16", batch_size=8)
    alone = diffusion_costs.estimate_diffusion_costs(WAN, VAE, recipe)["stages"][0]["memory"]
    recipe.processes = 8
    shared = diffusion_costs.estimate_diffusion_costs(WAN, VAE, recipe)["stages"][0]["memory"]
    assert shared["gathered"] > 0 and shared["activations"] < alone["activations"] / 6
    for name in ("weights", "gradients", "moments", "teacher"):
        assert shared[name] == alone[name] // 8


@pytest.mark.slow
def test_recipes_of_a_pipeline(tmp_path):
    """Only those that convert its kind of transformer; nothing but configurations is read."""
    for folder, config in (("transformer", {**WAN, "in_channels": 4}), ("vae", VAE)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text("{}")
    rows = {row["name"]: row["memory"] for row in list_recipes(tmp_path)}
    assert {name for name, memory in rows.items() if memory} == {
        *(name for name in rows if name.startswith("wan_")),
        "language_340m_scratch",
    }
