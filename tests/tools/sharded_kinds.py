"""Run alone or by `accelerate launch`: train a model that is no language model for a few steps: KIND OUT"""

import sys

import torch
from training.tasks.test_images import GRAY, classifier, squares

import mhla_hf
from mhla_hf.training.recipe import DiffusionStage, ImageStage
from tools.tiny_pipelines import PIPELINES

RUN = {"log_every": 1, "save_every": 4, "progress": False}
SHARED = {"batch_size": 4, "eps": 1e-4}  # with 1e-8, Adam would take full steps along rounding errors


def diffusion(out, family, size):
    """Distill a pipeline: its attention outputs, and then its prediction by LoRA with a moving average."""
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
    """Train a classifier of images with a moving average."""
    stages = [ImageStage("train", "labels", 20, 3e-3, ema=0.9, **SHARED)]
    data, test = squares(), squares(seed=1)
    mhla_hf.distill(classifier(), out=out, data=data, test=test, processor=GRAY, stages=stages, **RUN)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, out = sys.argv[1:]
    if kind == "images":
        images(out)
    else:
        diffusion(out, kind, [32, 32] if kind == "dit" else [9, 64, 80])
