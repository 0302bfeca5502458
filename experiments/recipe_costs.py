"""Measure what the recipes take, without values: python -m experiments.recipe_costs

One micro-batch of every stage runs with the task's own losses on tensors without values, and the memory of its operators is
added up. Parameters and multiply-adds of the paper's image classifiers are counted, too.
"""

import contextlib
import copy
import itertools
import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, LlamaConfig, SiglipVisionConfig, ViTConfig

import mhla_hf
from mhla_hf.cli.main import script
from mhla_hf.conversion.model_family import mhla_class, transformer_family
from mhla_hf.conversion.transformers_models import family_to_convert
from mhla_hf.models.derived_classes import base_classes
from mhla_hf.training import output_head
from mhla_hf.training.recipe import Recipe, read_recipe, recipe_names
from mhla_hf.training.run_folder import NUM_KEPT_STATES
from mhla_hf.training.tasks import find_task
from mhla_hf.training.trainable import set_trainable

from .rows import make_parser, markdown, write_record

WAN = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960}
SANA = {
    "_class_name": "SanaTransformer2DModel", "num_attention_heads": 36, "attention_head_dim": 32, "sample_size": 16,
    "num_cross_attention_heads": 16, "cross_attention_head_dim": 72, "cross_attention_dim": 1152, "num_layers": 28,
}  # fmt: skip
SMOLLM = {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
DEIT = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000}
BASES: dict[str, Any] = {  # what differs from the defaults of diffusers and transformers
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {**WAN, "num_layers": 30},
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {**WAN, "num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824},
    "facebook/DiT-XL-2-256": {"_class_name": "DiTTransformer2DModel", "num_layers": 28, "out_channels": 8},
    "Efficient-Large-Model/Sana_600M_512px_diffusers": SANA,
    "HuggingFaceTB/SmolLM2-1.7B": LlamaConfig(**SMOLLM, **LARGE),
    "HuggingFaceTB/SmolLM2-135M": LlamaConfig(**SMOLLM, **SMALL, num_attention_heads=9, num_key_value_heads=3),
    "sentence-transformers/all-MiniLM-L6-v2": BertConfig(**MINILM),
    "facebook/deit-small-patch16-224": ViTConfig(**DEIT, architectures=["ViTForImageClassification"]),
    "google/siglip-base-patch16-224": SiglipVisionConfig(),
}
EXAMPLES = {"encoder": "sentence-transformers/all-MiniLM-L6-v2", "language_cpu": "HuggingFaceTB/SmolLM2-135M"}
REDUCTIONS = {"WanTransformer3DModel": 8, "DiTTransformer2DModel": 8, "SanaTransformer2DModel": 32}  # pixels per latent
PAPER_COSTS = {"deit-t": "5.7 M, 1.1", "deit-s": "22 M, 4.2", "vlt-t": "16 M, 2.4", "vlt-s": "27 M, 4.6"}  # of table 2


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operators create and that still exist, in `highest` the most of them."""

    current = highest = 0
    storages: Any = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # an input, such as a weight, or a tensor that is counted already
                self.storages.add(tensor.untyped_storage())
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.storages:
                self.storages.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return output

    def add(self, size: int) -> None:
        self.current += size
        self.highest = max(self.highest, self.current)


def make_task(base: Any, recipe: Recipe, stage: Any) -> Any:
    """Return the task of a stage, on `base`: a configuration of transformers or, as a dict, of diffusers."""
    settings = dict(recipe.settings)
    preset = settings.pop("preset", None)
    if recipe.task == "diffusion":
        base_class: Any = getattr(diffusers, base["_class_name"])
        family: Any = transformer_family(base_class)
        cls: Any = mhla_class(family, base_class)
        original = base_class.from_config(base)
        student = cls.from_preset(preset, **settings) if preset else cls.from_config({**base, "mhla": settings})
    elif preset:
        model, config = mhla_hf.MHLAForCausalLM, mhla_hf.MHLAConfig
        if recipe.task == "images":
            model, config = mhla_hf.MHLAForImageClassification, mhla_hf.MHLAVisionConfig
        original, student = None, model(config.preset(preset, **settings))
    else:
        classes = base_classes(family_to_convert(base.model_type))
        make = classes.get((base.architectures or [""])[0], next(iter(classes.values())))
        original, student = make(copy.deepcopy(base)), mhla_hf.convert(make(copy.deepcopy(base)), **settings)
    task = find_task(student.train(), original if stage.needs_teacher else None, {})
    task.has_weights = False
    if task.teacher is not None:
        task.teacher.eval().to(torch.bfloat16 if recipe.run.get("mixed_precision") == "bf16" else torch.float32)
    return task


def make_inputs(task: Any, base: Any, stage: Any, count: int) -> tuple[Any, ...]:
    """Return the arguments of the task's objective for `count` samples."""
    config, weight = task.student.config, 1 / stage.batch_size
    if task.name in ("language", "encoders"):
        ids = torch.zeros(count, stage.seq_len, dtype=torch.long)
        weights = torch.ones(count, stage.seq_len)
        return (ids, ids, weights, weight, weight) if task.name == "language" else (ids, weight)
    if task.name == "images":
        labels = torch.empty(count, config.num_labels if stage.reads_labels else 1)
        return torch.empty(count, config.num_channels, config.image_size, config.image_size), labels, weight
    reduction = REDUCTIONS[base["_class_name"]]
    sides = [side // reduction for side in stage.size[-2:]] if stage.size else [config.sample_size] * 2
    frames = [(frames - 1) // 4 + 1 for frames in (stage.size or ())[:-2]]
    latents = torch.empty(count, config.in_channels, *frames, *sides)
    batch = {"noisy": latents, "times": torch.empty(count)}
    batch |= {"target": latents} if stage.loss == "denoising" or stage.data_weight else {}
    width = config.get("text_dim") or config.get("caption_channels")
    for name in task.student.family.conditions:
        text = (count, 512, *([width] if name == "encoder_hidden_states" else []))
        batch[name] = torch.zeros(count, dtype=torch.long) if name == "class_labels" else torch.empty(text)
    return sum(task.take(SimpleNamespace(take=lambda count, rows: batch), stage, slice(None)), ())


def measure_stage(base: Any, recipe: Recipe, stage: Any) -> dict[str, int]:
    """Return the bytes of a stage as `measure_samples` does; bytes of many samples are extrapolated, linearly."""
    count = stage.batch_size // stage.grad_accum // recipe.processes
    if count <= 32:
        return measure_samples(base, recipe, stage, count)
    few, many = (measure_samples(base, recipe, stage, samples) for samples in (16, 32))
    return {**many, "peak": many["peak"] + (many["peak"] - few["peak"]) * (count - 32) // 16}


def measure_samples(base: Any, recipe: Recipe, stage: Any, count: int) -> dict[str, int]:
    """Return the bytes of a stage in one process: "states" are weights, gradients, moments, average, and teacher, with the
    blocks that FSDP2 gathers; "peak" adds what a micro-batch allocates; "disk" are the states that a run keeps."""
    with contextlib.ExitStack() as stack:
        with torch.device("meta"):
            task = make_task(base, recipe, stage)
            student = task.student
            total = sum(parameter.numel() for parameter in student.parameters())
            stack.enter_context(task.prepare(stage))
            set_trainable(student, stage, {})
        num_trained = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
        num_copies = 4 if stage.ema else 3  # gradient, two moments, average
        states = 4 * (sum(x.numel() for x in student.parameters()) + num_copies * num_trained)
        states += sum(x.nbytes for x in task.teacher.parameters()) if task.teacher is not None else 0
        states //= recipe.processes
        if recipe.processes > 1:  # the block at work, the next one, and the gradients of one
            states += 4 * 3 * max(sum(x.numel() for x in block.parameters()) for block in student.blocks)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.device("cpu"))
        for module in [*student.modules(), *(task.teacher.modules() if task.teacher is not None else ())]:
            module.to_empty(device="cpu", recurse=False)  # each only once, if blocks share one
        task.set_gradient_checkpointing(recipe.run.get("gradient_checkpointing", False))
        objective = task.objective(stage)
        if task.name == "language":  # whose heads are found by their values
            layers = [x.get_output_embeddings() for x in (student, task.teacher or student)]
            objective.heads = tuple(output_head.OutputHead(layer, 1.0, None) for layer in layers)
            stack.enter_context(mock.patch.object(output_head, "CPU_CHUNK", output_head.GPU_CHUNK))
        inputs = make_inputs(task, base, stage, count)
        for parameter in student.parameters() if stage.grad_accum > 1 else ():  # which earlier micro-batches left
            parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with MemoryCounter() as counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.run.get("mixed_precision") == "bf16"):
                loss, _ = objective(*inputs)
            loss.backward()
    peak = states + counter.highest - 4 * num_trained * (stage.grad_accum == 1)
    return {"states": states, "peak": peak, "disk": NUM_KEPT_STATES * 4 * (total + (num_copies - 1) * num_trained)}


def format_costs(row: Mapping[str, Any]) -> list[str]:
    """Return cells of the table of recipes: devices, and the peaks of memory and disk in GB."""
    peak, disk = (max(stage[key] for stage in row["stages"]) / 1e9 for key in ("peak", "disk"))
    card = next((f"{gb} GB" for gb in (8, 16, 24, 40, 80) if peak + 2 <= gb), "more than 80 GB")  # 2 for CUDA
    return [f"{row['processes']} of {card}", f"{peak:.1f}", f"{disk:.1f}"]


def count_flops(model: Any, side: int) -> tuple[int, int]:
    """Return the multiply-adds of one square image through an image model: all, and those outside the attention."""
    model.eval().requires_grad_(False)  # the counter misses parameters that require gradients
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, model.config.num_channels, side, side))
    attention = sum(count for operator, count in counter.get_flop_counts()["Global"].items() if "bmm" in str(operator))
    return counter.get_total_flops() // 2, (counter.get_total_flops() - attention) // 2


def count_classifiers(presets: Sequence[str] = tuple(PAPER_COSTS), side: int = 224) -> list[dict[str, Any]]:
    """Return a row for each preset and kind of attention: parameters and multiply-adds, also of the padded image."""
    rows = []
    for name, attention in itertools.product(presets, ("mhla", "linear", "softmax")):
        config = mhla_hf.MHLAVisionConfig.preset(name, attention=attention)
        model = mhla_hf.MHLAForImageClassification(config)
        padded, _ = count_flops(model, config.padded_sides(side, side)[0])
        config.pad_to_blocks = False
        flops, outside = count_flops(mhla_hf.MHLAForImageClassification(config), side)
        sizes = {"parameters": model.num_parameters(), "flops": flops, "outside": outside, "padded_flops": padded}
        rows.append({"preset": name, "attention": attention, **sizes})
    return rows


def render_classifiers(record: Mapping[str, Any]) -> str:
    """Render the rows of `count_classifiers` for MHLA and softmax, with what the paper says."""
    lines = []
    for row in (row for row in record["rows"] if row["attention"] != "linear"):
        flops = [f"{row[name] / 1e9:.2f}" for name in ("flops", "outside", "padded_flops")]
        paper = PAPER_COSTS[row["preset"]] if row["attention"] == "mhla" else ""
        lines.append([row["preset"], row["attention"], f"{row['parameters'] / 1e6:.2f} M", *flops, paper])
    columns = ["parameters", "G multiply-adds at 224", "outside the attention", "padded", "in table 2"]
    return markdown(["model", "attention", *columns], lines, left=2)


def main(arguments: Sequence[str] | None = None) -> None:
    make_parser(__doc__).parse_args(arguments)
    command = "python -m experiments.recipe_costs"
    print(render_classifiers(write_record("docs/images/costs.json", {"rows": count_classifiers()}, command)))
    rows: list[dict[str, Any]] = []
    for name in recipe_names():
        recipe = read_recipe(name)
        base = BASES.get(recipe.base or EXAMPLES.get(name, ""))
        stages = [measure_stage(base, recipe, stage) for stage in recipe.stages]
        rows.append({"recipe": name, "processes": recipe.processes, "stages": stages})
        write_record("docs/recipes/costs.json", {"rows": rows}, command)
        print(name, *format_costs(rows[-1]), sep=", ")


if __name__ == "__main__":
    script(main)
