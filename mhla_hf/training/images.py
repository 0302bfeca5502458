"""The task of image models: classifiers (ours or converted) and vision towers, with the losses of both.

A classifier may be trained from labels alone, from a teacher's answers without any label, or both; a tower has no answers,
so it learns its teacher's features. Classes that have names are numbered as the model numbers them, and only where it
knows none of them by their order.
"""

import inspect

import torch
import torch.nn.functional as F

from .pictures import PictureReader, Preparation, label_order, open_pictures, share_right
from .tasks import Objective, Task, relative_error


class ImageTask(Task):
    """An image classifier or a vision tower of transformers.

    processor: its image processor, saved with the model; None: the model's own, which classifiers from scratch have.
    test: labeled images, as `open_pictures` takes them; then every entry of the history has "test_accuracy".
    """

    name = "images"
    unit = "images"
    wanted = "an image classifier or a vision tower of transformers"

    def __init__(self, student, teacher, processor=None, test=None):
        super().__init__(student, teacher)
        self.tool, self.test = processor, test

    def check(self, stages):
        """As every task; and classes and widths that do not fit."""
        super().check(stages)
        losses = {stage.loss for stage in stages}
        for name, model, needed in (
            ("student", self.student, {"logits", "labels"}),
            ("teacher", self.teacher, {"logits"}),
        ):
            if model is not None and losses & needed and not is_classifier(model):
                raise ValueError(f"{name}: {type(model).__name__} gives no classes; expected an image classifier")
        for loss, key in (("logits", "num_labels"), ("features", "hidden_size"), ("transfer", "hidden_size")):
            if self.teacher is not None and loss in losses:
                own, its = (getattr(model.config, key, None) for model in (self.student, self.teacher))
                if own != its:
                    raise ValueError(f"teacher: its {key} is {its}, and the student's is {own}; expected one number")
        config = self.student.config
        if self.tool is None and not hasattr(config, "preprocessing"):
            raise ValueError(
                f"processor: None was given for {type(self.student).__name__}; expected its image processor"
            )
        values = config.preprocessing() if self.tool is None else self.tool.to_dict()
        self.preparation = Preparation(values, getattr(config, "num_channels", 3))

    def open(self, data, stages):
        """Labeled images, see `open_pictures`, their classes numbered as the student's; the same for `test`.

        Without a loss that reads labels, classes that the student does not have are let pass; no accuracy is logged then.
        """
        pictures = open_pictures(data)
        test = None if self.test is None else open_pictures(self.test, split="test")
        self.numbered = True
        if is_classifier(self.student):
            config = self.student.config
            labeled = any(stage.loss == "labels" or (stage.loss == "logits" and stage.ce_weight) for stage in stages)
            if test is not None and test.names:
                if labeled and pictures.names:
                    test = test.numbered_as(pictures.names, pictures.name)
                    test = test.renumbered(label_order(config, pictures.names))
                else:
                    test = test.renumbered(label_order(config, test.names, "test"))
            if pictures.names:
                pictures = pictures.renumbered(self._order(pictures.names, labeled))
            pictures.check_labels(config.num_labels)
            if test is not None:
                test.check_labels(config.num_labels, "test")
        self.pictures_of_test = test
        return pictures

    def _order(self, names, labeled):
        try:
            return label_order(self.student.config, names)
        except ValueError:
            if labeled:
                raise
            self.numbered = False
            return [0] * len(names)

    def reader(self, source, stage, number, seed, state):
        classes = self.student.config.num_labels if is_classifier(self.student) else int(source.labels.max()) + 1
        return PictureReader(source, stage, (seed, number), self.preparation, classes, state)

    def take(self, reader, stage, rows):
        return reader.take(stage.batch_size, rows), (1 / stage.batch_size,)

    def objective(self, stage):
        """The losses "transfer", "features", "logits" and "labels"."""
        return ImageStep(self.student, self.teacher, stage, self.numbered)

    def judge(self):
        if self.pictures_of_test is None:
            return {}
        return {"test_accuracy": share_right(self.student, self.pictures_of_test, self.preparation)}


def is_classifier(model) -> bool:
    """Whether the model gives logits over classes of images."""
    return "ForImageClassification" in type(model).__name__


def tower_of(model):
    """A classifier without its head; a tower as it is (what some call their base model lacks the embeddings)."""
    return model.base_model if is_classifier(model) else model


class ImageStep(Objective):
    """An image model with the loss "labels", "logits", "features" or "transfer".

    numbered: whether the classes of the images are the student's, so that its accuracy on them means something.
    """

    def __init__(self, student, teacher, stage, numbered=True):
        super().__init__(student, teacher, stage)
        self.numbered = numbered

    def forward(self, pixels, targets, row_share):
        """One part of a batch.

        Args:
            pixels: fp32 `[B, C, H, W]`. targets: shares of the classes, fp32 `[B, classes]`.
            row_share: 1 / number of images in the whole batch, times the number of processes.
        """
        if self.stage.loss == "transfer":
            loss = self._transfer(pixels) * row_share
            return loss, {"loss": loss.detach()}
        if self.stage.loss == "features":
            with torch.no_grad():
                wanted = tower_of(self.teacher)(pixel_values=pixels.to(self.teacher.dtype)).last_hidden_state
            got = tower_of(self.student)(pixel_values=pixels).last_hidden_state
            loss = relative_error(got, wanted) * row_share
            return loss, {"loss": loss.detach()}
        logits = self.student(pixel_values=pixels).logits.float()
        ce = F.cross_entropy(logits, targets, reduction="sum") * row_share
        right = (logits.argmax(-1) == targets.argmax(-1)).sum() * row_share
        logs = {"ce": ce.detach(), "accuracy": right.detach()} if self.numbered else {}
        if self.stage.loss == "labels":
            return ce, {"loss": ce.detach(), **logs}
        with torch.no_grad():
            answers = self.teacher(pixel_values=pixels.to(self.teacher.dtype)).logits.float()
        heat = self.stage.temperature
        kl = F.kl_div(
            (logits / heat).log_softmax(-1), (answers / heat).log_softmax(-1), reduction="sum", log_target=True
        )
        kl = kl * heat**2 * row_share
        loss = kl + self.stage.ce_weight * ce
        return loss, {"loss": loss.detach(), "kl": kl.detach(), **logs}

    def _transfer(self, pixels):
        patch = self.student.config.patch_size
        patch = patch if isinstance(patch, (list, tuple)) else (patch, patch)
        grid = tuple(side // part for side, part in zip(pixels.shape[2:], patch, strict=True))

        def attend(attention, *args, **kwargs):
            if "mhla_grid" in inspect.signature(attention.forward).parameters:  # models from scratch hand it on
                kwargs["mhla_grid"] = grid
            return attention(*args, **kwargs)

        return self.transfer(
            lambda: tower_of(self.teacher)(pixel_values=pixels.to(self.teacher.dtype)), attend, torch.square
        )
