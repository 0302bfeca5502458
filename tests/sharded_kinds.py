"""Run by `accelerate launch` or alone: a short run of a kind of model that is no language model, into OUT."""

import sys

import torch
from tiny_pipelines import PIPELINES
from training.tasks.test_images import GRAY, classifier, squares

import mhla_hf
from mhla_hf.training.recipe import DiffusionStage, ImageStage

RUN = {"log_every": 1, "save_every": 4, "progress": False}
SHARED = {"batch_size": 4, "eps": 1e-4}  # with 1e-8 Adam makes a whole step of a gradient's rounding errors


def diffusion(out, family, size):
    """Attention alone, then LoRA with a moving average."""
    torch.manual_seed(1)
    student = mhla_hf.convert(PIPELINES[family](), layers=[1], layout=[1, 2, 2][-len(size) :])
    sampled = {"sampling_steps": 2, "size": size, **SHARED}
    stages = [
        DiffusionStage("transfer", "transfer", 6, 1e-2, trainable="mhla", **sampled),
        DiffusionStage("lora", "prediction", 14, 1e-3, trainable="lora", lora_rank=2, ema=0.9, **sampled),
    ]
    data = None if family == "dit" else ["a cat", "a dog walks"]
    mhla_hf.distill(student, PIPELINES[family](), out=out, data=data, stages=stages, **RUN)


def images(out):
    stages = [ImageStage("train", "labels", 20, 3e-3, ema=0.9, **SHARED)]
    given = {"data": squares(), "test": squares(seed=1), "processor": GRAY}
    mhla_hf.distill(classifier(), out=out, stages=stages, **RUN, **given)


KINDS = {
    "dit": lambda out: diffusion(out, "dit", [32, 32]),
    "wan": lambda out: diffusion(out, "wan", [9, 64, 80]),
    "images": images,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    KINDS[sys.argv[1]](sys.argv[2])
