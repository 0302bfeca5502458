"""The task of image models: classifiers learn from labels, a teacher's answers, or both; vision towers from features."""

import inspect

import torch
import torch.nn.functional as F
from transformers import ViTImageProcessorPil

from ..models.grid_attention import pass_grid
from .pictures import PictureReader, Pictures, open_pictures, share_right, sides_of
from .tasks import Objective, Task, relative_error


def is_classifier(model) -> bool:
    """Whether the model gives logits over classes of images."""
    return "ForImageClassification" in type(model).__name__


def tower_of(model):
    """A classifier without its head; a tower as it is (what some call their base model lacks the embeddings)."""
    return model.base_model if is_classifier(model) else model


class ImageStep(Objective):
    """An image model with the loss "labels", "logits", "features" or "transfer"."""

    def forward(self, pixels, targets, row_share):
        """Of pixels `[B, C, H, W]`, shares of the classes `[B, classes]` and 1 / number of images in the whole batch."""
        asked = pixels if self.teacher is None else pixels.to(self.teacher.dtype)
        if self.stage.loss == "transfer":
            loss = self.transfer(lambda: tower_of(self.teacher)(pixel_values=asked), self._attend(pixels)) * row_share
            return loss, {"loss": loss.detach()}
        if self.stage.loss == "features":
            with torch.no_grad():
                wanted = tower_of(self.teacher)(pixel_values=asked).last_hidden_state
            got = tower_of(self.student)(pixel_values=pixels).last_hidden_state
            loss = relative_error(got, wanted) * row_share
            return loss, {"loss": loss.detach()}
        loss, logs, logits = 0.0, {}, self.student(pixel_values=pixels).logits.float()
        if self.stage.reads_labels:
            ce = F.cross_entropy(logits, targets, reduction="sum") * row_share
            right = (logits.argmax(-1) == targets.argmax(-1)).sum() * row_share
            loss = ce if self.stage.loss == "labels" else self.stage.ce_weight * ce
            logs = {"ce": ce.detach(), "accuracy": right.detach()}
        if self.stage.loss == "logits":
            with torch.no_grad():
                answers = self.teacher(pixel_values=asked).logits.float()
            heat = self.stage.temperature
            said, wanted = ((x / heat).log_softmax(-1) for x in (logits, answers))
            kl = F.kl_div(said, wanted, reduction="sum", log_target=True) * heat**2 * row_share
            loss, logs["kl"] = kl + loss, kl.detach()
        return loss, {"loss": loss.detach(), **logs}

    def _attend(self, pixels):
        grid = pass_grid(self.student, (pixels,), {})[1]["mhla_grid"]

        def attend(attention, *args, **kwargs):
            if "mhla_grid" in inspect.signature(attention.forward).parameters:  # models from scratch hand it on
                kwargs["mhla_grid"] = grid
            return attention(*args, **kwargs)

        return attend


class ImageTask(Task):
    """An image classifier or a vision tower of transformers.

    processor: its image processor, saved with the model; None: the model's own, which classifiers from scratch have.
    test: labeled images, as `open_pictures` takes them; then every entry of the history has "test_accuracy".
    """

    name = "images"
    step = ImageStep
    unit = "images"
    wanted = "an image classifier or a vision tower of transformers"
    equal = (("logits", "num_labels"), ("features", "hidden_size"), ("transfer", "hidden_size"))

    def __init__(self, student, teacher, processor=None, test=None):
        super().__init__(student, teacher)
        self.tool, self.test = processor, test

    def check(self, stages):
        """As every task; and classes and widths that do not fit."""
        super().check(stages)
        losses = {stage.loss for stage in stages}
        asked = [("student", self.student)] if losses & {"logits", "labels"} or self.test is not None else []
        asked += [("teacher", self.teacher)] if "logits" in losses else []
        for name, model in asked:
            if not is_classifier(model):
                raise ValueError(f"{name}: {type(model).__name__} gives no classes; expected an image classifier")
        config = self.student.config
        if self.tool is None and not hasattr(config, "preprocessing"):
            raise ValueError(f"processor: None was given for {type(self.student).__name__}; expected its own")
        self.processor = self.tool or ViTImageProcessorPil.from_dict(config.preprocessing())
        self.channels = getattr(config, "num_channels", 3)
        sides_of(self.processor, self.channels)

    def open(self, data, stages):
        """Labeled images, see `open_pictures`, numbered as the student numbers classes; without a loss on labels, any."""
        config, labeled = self.student.config, any(stage.reads_labels for stage in stages)
        pictures, test = open_pictures(data), None
        if self.test is not None:
            test = open_pictures(self.test, split="test")
            if test.names and labeled and pictures.names:
                test = test.numbered_as(pictures.names, pictures.name)
            test = test.numbered_for(config, "test")
        self.pictures_of_test, self.classes = test, config.num_labels if labeled else 1
        if labeled:
            return pictures.numbered_for(config)
        none = torch.zeros(len(pictures))
        return Pictures(pictures.items, none, pictures.name, identity=pictures.describe()["sha256"])

    def reader(self, source, stage, number, seed, state):
        return PictureReader(source, stage, (seed, number), self.processor, self.channels, self.classes, state)

    def judge(self):
        if self.pictures_of_test is None:
            return {}
        return {"test_accuracy": share_right(self.student, self.pictures_of_test, self.processor)}
