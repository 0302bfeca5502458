"""Train an image classifier with MHLA: from scratch, or from a pretrained classifier or vision tower, its teacher.

    python conversion/image_classifier.py --data FOLDER_OR_DATASET --out out/mine --model google/vit-base-patch16-224
    python conversion/image_classifier.py --recipe image_features --data DATA --out out/tower
    torchrun --nproc_per_node 8 conversion/image_classifier.py --recipe image_deit_tiny_scratch --data imagenet/ --out out/t

A folder has one folder of images per class, directly or in `train` and `val`; recipes that read no labels take images
anywhere in it. A model from scratch has the classes of the
images, and a converted classifier has those of its base. A vision tower (DINOv3, CLIP, SigLIP) has no classes and learns the
features of its original. If a run was interrupted, the same command resumes it. Afterwards,
`mhla_hf.evaluate(out, recipe="table_2_imagenet", settings={"data": "DATA/val"})` returns the top-1 accuracy of a classifier.
"""

import argparse
import copy
import shlex
import sys
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

import mhla_hf
from mhla_hf.cli.main import script
from mhla_hf.models.families import VISION, family_of_type
from mhla_hf.training.datasets.images import open_images
from mhla_hf.training.recipe import read_recipe


def from_scratch(settings: Mapping[str, Any], pictures: Any) -> PreTrainedModel:
    """Create a classifier with random weights, of a preset and changed settings, with the classes of the images."""
    settings = dict(settings)
    config = mhla_hf.MHLAVisionConfig.preset(settings.pop("preset"), **{**pictures.classes(), **settings})
    return mhla_hf.MHLAForImageClassification(config)


def load_softmax(name: str, classes: bool) -> PreTrainedModel:
    """Load the softmax original: a classifier, or without `classes` a vision tower, also that of a CLIP or SigLIP model."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    class_name = (config.architectures or ["model of unknown class"])[0]
    if classes:
        if "ForImageClassification" not in class_name:
            raise ValueError(
                f"model: got {name!r}, a {class_name} without classes, expected an image classifier, or a recipe with the "
                "losses transfer and features, such as image_features."
            )
        return AutoModelForImageClassification.from_pretrained(name, trust_remote_code=False)
    model_type = getattr(config, "vision_config", config).model_type
    family = family_of_type(model_type)
    if family not in VISION:
        raise ValueError(
            f"model: got {name!r} of type {model_type}, expected one of {', '.join(each.base for each in VISION)}."
        )
    tower_class = class_name if class_name in family.classes else family.classes[0]
    return getattr(transformers, tower_class).from_pretrained(name)


def main(arguments: list[str] | None = None) -> PreTrainedModel:
    """Run the script, and return the trained model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default="image_distill", help="one of `mhla-hf recipes`, or a YAML file; default: %(default)s"
    )
    parser.add_argument("--model", help="folder or Hub id of the softmax original; default: the recipe's base")
    parser.add_argument("--data", help="folder or dataset to train on; default: the recipe's data")
    parser.add_argument("--test", help="folder or dataset on which every entry of the history has the accuracy")
    parser.add_argument("--out", help="folder to create")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    recipe = read_recipe(args.recipe)
    data, name = args.data or recipe.data, args.model or recipe.base
    if args.out is None or data is None:
        parser.error(f"--{'out' if args.out is None else 'data'}: got none, expected a value")
    if recipe.task != "images":
        parser.error(f"--recipe: got {args.recipe} for {recipe.task}, expected task: images")
    torch.manual_seed(args.seed)
    images = open_images(data, labeled=any(stage.reads_labels for stage in recipe.stages))
    if "preset" in recipe.settings:
        student, teacher, processor = from_scratch(recipe.settings, images), None, None
    elif name is None:
        parser.error(f"--model: got none, expected the softmax original, because {args.recipe} names no base")
    else:
        student = load_softmax(name, any(stage.loss in ("logits", "labels") for stage in recipe.stages))
        is_bf16 = recipe.run.get("mixed_precision") == "bf16"
        teacher = copy.deepcopy(student).to(torch.bfloat16 if is_bf16 else torch.float32)
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        mhla_hf.convert(student, **recipe.settings)
    return mhla_hf.distill(
        student,
        teacher,
        out=args.out,
        data=images,
        recipe=args.recipe,
        seed=args.seed,
        processor=processor,
        test=args.test,
        command=shlex.join(["python", *sys.argv]),
    )


if __name__ == "__main__":
    script(main)
