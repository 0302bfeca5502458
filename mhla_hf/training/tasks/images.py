"""The task of image models: classifiers learn from labels and a teacher's logits, vision towers from its features."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import ViTImageProcessorPil

from ...data import Reader
from ...models.vision.grid_attention import pass_grid
from ..datasets.images import ImageReader, LabeledImages, find_output_size, open_images, top1_accuracy
from ..recipe import ImageStage
from .base import LossAndLogs, Objective, Task, relative_error


def is_classifier(model: Any) -> bool:
    return "ForImageClassification" in type(model).__name__


def get_tower(model: Any) -> Any:
    """Return a classifier without its head, or a vision tower itself, whose `base_model` may lack the embeddings."""
    return model.base_model if is_classifier(model) else model


class ImageObjective(Objective):
    def forward(self, pixels: torch.Tensor, targets: torch.Tensor, image_weight: float) -> LossAndLogs:
        """Return the loss of a micro-batch [B, C, H, W] with class probabilities [B, classes], and values to log."""
        teacher_pixels = pixels if self.teacher is None else pixels.to(self.teacher.dtype)
        if self.stage.loss == "transfer":
            grid = pass_grid(self.student, (pixels,), {})[1]["mhla_grid"]

            def call_attention(attention: Any, *args: Any, **kwargs: Any) -> Any:
                if "mhla_grid" in inspect.signature(attention.forward).parameters:  # only in models from scratch
                    kwargs["mhla_grid"] = grid
                return attention(*args, **kwargs)

            run_teacher = lambda: get_tower(self.teacher)(pixel_values=teacher_pixels)  # noqa: E731
            loss = self.attention_transfer_loss(run_teacher, call_attention) * image_weight
            return loss, {"loss": loss.detach()}
        if self.stage.loss == "features":
            with torch.no_grad():
                target = get_tower(self.teacher)(pixel_values=teacher_pixels).last_hidden_state
            loss = relative_error(get_tower(self.student)(pixel_values=pixels).last_hidden_state, target) * image_weight
            return loss, {"loss": loss.detach()}
        logs: dict[str, torch.Tensor] = {}
        total: Any = 0.0
        logits = self.student(pixel_values=pixels).logits.float()
        if self.stage.reads_labels:
            ce = F.cross_entropy(logits, targets, reduction="sum") * image_weight
            accuracy = (logits.argmax(-1) == targets.argmax(-1)).sum() * image_weight
            total = ce if self.stage.loss == "labels" else self.stage.ce_weight * ce
            logs = {"ce": ce.detach(), "accuracy": accuracy.detach()}
        if self.stage.loss == "logits":
            with torch.no_grad():
                teacher_logits = self.teacher(pixel_values=teacher_pixels).logits.float()
            temperature = self.stage.temperature
            log_q, log_p = ((x / temperature).log_softmax(-1) for x in (logits, teacher_logits))
            kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True) * temperature**2 * image_weight
            total = kl + total
            logs["kl"] = kl.detach()
        return total, {"loss": total.detach(), **logs}


class ImageTask(Task[ImageStage]):
    """The task of an image classifier or vision tower; on the images `test`, the accuracy is logged as "test_accuracy"."""

    name = "images"
    objective_type = ImageObjective
    unit = "images"
    expected_model = "an image classifier or a vision tower of transformers"
    equal_sizes = (("logits", "num_labels"), ("features", "hidden_size"), ("transfer", "hidden_size"))

    def __init__(self, student: Any, teacher: Any, processor: Any = None, test: Any = None) -> None:
        super().__init__(student, teacher, processor)
        self.test = test
        self.test_images: LabeledImages | None = None

    def check(self, stages: Sequence[ImageStage]) -> None:
        super().check(stages)
        losses = {stage.loss for stage in stages}
        classifies = {"student": losses & {"logits", "labels"} or self.test is not None, "teacher": "logits" in losses}
        for argument, model in (("student", self.student), ("teacher", self.teacher)):
            if classifies[argument] and not is_classifier(model):
                raise ValueError(f"{argument}: got {type(model).__name__}, expected an image classifier.")
        config = self.student.config
        if self.preprocessor is None and not hasattr(config, "preprocessing"):
            raise ValueError(f"processor: got None for {type(self.student).__name__}, expected its image processor.")
        self.processor = self.preprocessor or ViTImageProcessorPil.from_dict(config.preprocessing())
        self.channels = getattr(config, "num_channels", 3)
        find_output_size(self.processor, self.channels)

    def open(self, data: Any, stages: Sequence[ImageStage]) -> LabeledImages:
        """Open images, labeled with the student's class numbers if a loss reads labels, else 0; open the test images."""
        config = self.student.config
        reads_labels = any(stage.reads_labels for stage in stages)
        images = open_images(data, labeled=reads_labels)
        if self.test is not None:
            order = images.class_names if reads_labels else None
            self.test_images = open_images(self.test, split="test").renumber_for(config, "test", order or ())
        self.num_classes = config.num_labels if reads_labels else 1
        if reads_labels:
            return images.renumber_for(config)
        return dataclasses.replace(images, labels=torch.zeros(len(images)))  # data in memory may have labels

    def reader(self, source: Any, stage: ImageStage, number: int, seed: int, state: dict[str, Any] | None) -> Reader:
        return ImageReader(source, stage, (seed, number), self.processor, self.channels, self.num_classes, state)

    def evaluate(self) -> dict[str, float]:
        if self.test_images is None:
            return {}
        return {"test_accuracy": top1_accuracy(self.student, self.test_images, self.processor)}
