"""An image classifier from scratch with the paper's settings, or a pretrained one (or a vision tower) distilled from itself.

    python conversion/image_classifier.py --data FOLDER_OR_DATASET --out out/mine --model google/vit-base-patch16-224
    python conversion/image_classifier.py --recipe image_features --data DATA --out out/tower
    torchrun --nproc_per_node 8 conversion/image_classifier.py --recipe image_deit_tiny_scratch --data imagenet/ --out out/t

A folder holds one folder of images per class, perhaps below `train` and `val`. Stopped at any moment, the same command goes
on. The classes of a model from scratch are those of the images; a converted one keeps its own; a vision tower has
none (DINOv3, CLIP, SigLIP) and learns its original's features. Afterwards
`mhla_hf.evaluate(out, recipe="table_2_imagenet", settings={"data": "DATA/val"})` gives a classifier's top-1.
"""

import argparse
import copy
import shlex
import sys

import torch
import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

import mhla_hf
from mhla_hf.cli import script
from mhla_hf.models.families import VISION, family_of_type
from mhla_hf.training.datasets.images import open_images
from mhla_hf.training.recipe import read_recipe


def from_scratch(settings, pictures):
    """A classifier of the recipe's preset for the classes of `pictures`."""
    settings = dict(settings)
    config = mhla_hf.MHLAVisionConfig.preset(settings.pop("preset"), **{**pictures.classes(), **settings})
    return mhla_hf.MHLAForImageClassification(config)


def load_softmax(name, classes):
    """The softmax original: a classifier; or, where no loss asks for `classes`, a vision tower (of CLIP or SigLIP too)."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    named = (config.architectures or ["model of unknown class"])[0]
    if classes:
        if "ForImageClassification" not in named:
            raise ValueError(
                f"model: {name!r} is a {named}, which has no classes; expected an image classifier, or a recipe with the "
                "losses transfer and features, such as image_features"
            )
        return AutoModelForImageClassification.from_pretrained(name, trust_remote_code=False)
    kind = getattr(config, "vision_config", config).model_type
    family = family_of_type(kind)
    if family not in VISION:
        raise ValueError(f"model: {name!r} is a {kind}, expected one of {', '.join(each.base for each in VISION)}")
    tower = named if named in family.classes else family.classes[0]
    return getattr(transformers, tower).from_pretrained(name)


def main(arguments=None):
    """Run the script; returns the trained model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipe", default="image_distill", help="one of `mhla-hf recipes`, or a YAML file; default: %(default)s"
    )
    parser.add_argument("--model", help="folder or Hub id of the softmax original; default: the recipe's base")
    parser.add_argument("--data", help="folder or dataset to train on; default: the recipe's data")
    parser.add_argument("--test", help="folder or dataset; its accuracy is in every entry of the history")
    parser.add_argument("--out", help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    recipe = read_recipe(given.recipe)
    data, name = given.data or recipe.data, given.model or recipe.base
    if given.out is None or data is None:
        parser.error(f"--{'out' if given.out is None else 'data'} is needed")
    if recipe.task != "images":
        parser.error(f"--recipe: {given.recipe} is for {recipe.task}, expected task: images")
    torch.manual_seed(given.seed)
    pictures = open_images(data)
    if "preset" in recipe.settings:
        student, teacher, processor = from_scratch(recipe.settings, pictures), None, None
    elif name is None:
        parser.error(f"--model is needed: {given.recipe} names no base")
    else:
        student = load_softmax(name, any(stage.loss in ("logits", "labels") for stage in recipe.stages))
        half = recipe.run.get("mixed_precision") == "bf16"
        teacher = copy.deepcopy(student).to(torch.bfloat16 if half else torch.float32)
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        mhla_hf.convert(student, **recipe.settings)
    return mhla_hf.distill(
        student,
        teacher,
        out=given.out,
        data=pictures,
        recipe=given.recipe,
        seed=given.seed,
        processor=processor,
        test=given.test,
        command=shlex.join(["python", *sys.argv]),
    )


if __name__ == "__main__":
    script(main)
