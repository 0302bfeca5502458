"""The task of causal language models: text cut into full sequences, and the losses of `objectives.py`."""

import math
from pathlib import Path

from .data import open_text
from .objectives import NO_LABEL, DistillStep
from .tasks import Task
from .teach import RECORD, TaughtText


class LanguageTask(Task):
    """A causal language model of transformers.

    tokenizer: of transformers; saved with the model. text_field: the column of a dataset that holds the text.
    """

    name = "language"
    unit = "tokens"
    wanted = "a causal language model of transformers"
    equal = (("logits", "vocab_size"), ("transfer", "hidden_size"))

    def __init__(self, student, teacher, tokenizer=None, text_field="text"):
        super().__init__(student, teacher)
        self.tool, self.text_field = tokenizer, text_field

    def check(self, stages):
        """As every task; and sequences that are longer than what a model knows."""
        super().check(stages)
        for name, model in (("student", self.student), ("teacher", self.teacher)):
            limit = getattr(getattr(model, "config", None), "max_position_embeddings", None) or math.inf
            long = [stage for stage in stages if stage.seq_len > limit and (name == "student" or stage.needs_teacher)]
            if long:
                known = f"has {long[0].seq_len}, and the {name} knows {limit} positions"
                raise ValueError(f"seq_len: stage {long[0].name!r} {known}")

    def open(self, data, stages):
        """Text, see `open_text`; or what `teach` wrote, for the loss "stored"."""
        stored = [stage.loss == "stored" for stage in stages]
        taught = isinstance(data, (str, Path)) and (Path(data) / RECORD).is_file()
        if any(stored) and not (all(stored) and taught):
            raise ValueError(f"data: got {str(data)!r}; expected a folder that `mhla-hf teach` wrote, for all stages")
        vocab = self.student.get_input_embeddings().weight.shape[0]
        source = (
            TaughtText(data) if taught else open_text(data, self.tool, text_field=self.text_field, vocab_size=vocab)
        )
        if taught and source.record["vocab_size"] > vocab:
            its = source.record["vocab_size"]
            raise ValueError(f"data: {source.name!r} is of {its} tokens; expected at most the student's {vocab}")
        source.reader(max(stage.seq_len for stage in stages), 0, 0).take(1)  # a text too short is known now
        return source

    def reader(self, source, stage, number, seed, state):
        return source.reader(stage.seq_len, seed, number, state)

    def take(self, reader, stage, rows):
        ids, labels, *likeliest = reader.take(stage.batch_size)
        predicted = int((labels.numpy()[:, 1:] != NO_LABEL).sum())
        likeliest = likeliest if stage.loss == "stored" else ()
        return tuple(x[rows] for x in (ids, labels, *likeliest)), (1 / max(1, predicted), 1 / stage.batch_size)

    def objective(self, stage):
        """The losses "transfer", "logits", "stored" and "lm"."""
        return DistillStep(self.student, self.teacher, stage)

    def count(self, stage):
        return stage.batch_size * stage.seq_len
