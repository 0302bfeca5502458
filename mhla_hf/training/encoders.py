"""The task of encoders of text: sequences with their special tokens, and the embeddings of the softmax original."""

import torch
import torch.nn.functional as F

from ..checkpoints.save import write_files
from ..data import open_text, special_tokens, with_special_tokens
from ..models.encoder_attention import first_position
from .tasks import Objective, Task


class EncoderStep(Objective):
    """An encoder with the loss "transfer" or "embeddings"."""

    def forward(self, ids, row_share):
        """Of ids, int64 `[B, L]`; row_share: 1 / number of sequences in the whole batch."""
        if self.stage.loss == "transfer":
            loss = row_share * self.transfer(lambda: self.teacher.base_model(input_ids=ids))
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            wanted = self.teacher.base_model(input_ids=ids).last_hidden_state.float()
        given = self.student.base_model(input_ids=ids).last_hidden_state.float()
        tokens = 1 - F.cosine_similarity(given, wanted, dim=-1).mean(1)
        first = 1 - F.cosine_similarity(given[:, 0], wanted[:, 0], dim=-1)
        pooled = 1 - F.cosine_similarity(given.mean(1), wanted.mean(1), dim=-1)
        loss = row_share * (tokens + first + pooled).sum()
        return loss, {"loss": loss.detach(), "pooled": row_share * pooled.sum().detach()}


class EncoderTask(Task):
    """An encoder of text of transformers, whatever head it has: its body is trained.

    tokenizer: of transformers; saved with the model. text_field: the column of a dataset that holds the text. files: what
    else is saved with it, as `checkpoints.save.read_sentence_files` gives it.
    """

    name = "encoders"
    step = EncoderStep
    unit = "tokens"
    wanted = "an encoder of text of transformers"
    equal = (("embeddings", "hidden_size"), ("transfer", "hidden_size"))

    def __init__(self, student, teacher, tokenizer=None, text_field="text", files=()):
        super().__init__(student, teacher)
        self.tool, self.text_field, self.files = tokenizer, text_field, files

    def open(self, data, stages):
        """Text, see `open_text`, which is cut into sequences that fit between the tokenizer's special tokens."""
        self.around = special_tokens(self.tool)
        special = sum(map(len, self.around))
        vocab = self.student.get_input_embeddings().weight.shape[0]
        source = open_text(data, self.tool, text_field=self.text_field, vocab_size=vocab)
        limit = self.student.config.max_position_embeddings - first_position(self.student.base_model)
        for stage in stages:
            if not special < stage.seq_len <= limit:
                what = f"more than {special} tokens and at most the {limit} positions of the student"
                raise ValueError(f"stage {stage.name!r}: seq_len is {stage.seq_len}; expected {what}")
            self.reader(source, stage, 0, 0, None).take(1)  # a text too short is known now
        return source

    def reader(self, source, stage, number, seed, state):
        return source.reader(stage.seq_len - sum(map(len, self.around)), seed, number, state)

    def take(self, reader, stage, rows):
        ids = reader.take(stage.batch_size)[0][rows]
        return (with_special_tokens(ids, self.around),), (1 / stage.batch_size,)

    def count(self, stage):
        return stage.batch_size * stage.seq_len

    def save(self, folder):
        super().save(folder)
        write_files(folder, self.files)
