"""The task of text encoders: sequences with special tokens, and losses against the original's embeddings."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...checkpoints.save import write_files
from ...data import Reader, open_text, special_tokens, with_special_tokens
from ...models.encoder.encoder_attention import first_position
from ..recipe import EncoderStage
from .base import LossAndLogs, Objective, Task, TensorsAndWeights


class EncoderObjective(Objective):
    def forward(self, ids: torch.Tensor, sequence_weight: float) -> LossAndLogs:
        if self.stage.loss == "transfer":
            loss = sequence_weight * self.attention_transfer_loss(lambda: self.teacher.base_model(input_ids=ids))
            return loss, {"loss": loss.detach()}
        with torch.no_grad():
            target = self.teacher.base_model(input_ids=ids).last_hidden_state.float()
        output = self.student.base_model(input_ids=ids).last_hidden_state.float()
        token_distance = 1 - F.cosine_similarity(output, target, dim=-1).mean(1)
        first_distance = 1 - F.cosine_similarity(output[:, 0], target[:, 0], dim=-1)
        pooled = 1 - F.cosine_similarity(output.mean(1), target.mean(1), dim=-1)
        loss = sequence_weight * (token_distance + first_distance + pooled).sum()
        return loss, {"loss": loss.detach(), "pooled": sequence_weight * pooled.sum().detach()}


class EncoderTask(Task[EncoderStage]):
    """The task of a text encoder, without its head. `files` (see `read_sentence_files`) are saved with it."""

    name = "encoders"
    objective_type = EncoderObjective
    unit = "tokens"
    expected_model = "a text encoder of transformers"
    equal_sizes = (("embeddings", "hidden_size"), ("transfer", "hidden_size"))

    def __init__(
        self, student: Any, teacher: Any, tokenizer: Any = None, text_field: str = "text", files: Any = ()
    ) -> None:
        super().__init__(student, teacher, tokenizer)
        self.text_field, self.files = text_field, files

    def open(self, data: Any, stages: Sequence[EncoderStage]) -> Any:
        """Open text, and check that sequences of all stages have room for special tokens and fit the model's positions."""
        self.special_tokens = special_tokens(self.preprocessor)
        self.num_special = num_special = sum(map(len, self.special_tokens))
        vocab_size = self.student.get_input_embeddings().weight.shape[0]
        source = open_text(data, self.preprocessor, text_field=self.text_field, vocab_size=vocab_size)
        limit = self.student.config.max_position_embeddings - first_position(self.student.base_model)
        for stage in stages:
            if not num_special < stage.seq_len <= limit:
                expected = f"more than {num_special} tokens and at most the {limit} positions of the student"
                raise ValueError(f"seq_len: got {stage.seq_len} in stage {stage.name!r}, expected {expected}.")
            source.reader(stage.seq_len - num_special, 0, 0).take(1)  # fails now if the text is too short
        return source

    def reader(self, source: Any, stage: EncoderStage, number: int, seed: int, state: dict[str, Any] | None) -> Reader:
        """Return a reader of sequences without special tokens, which `take` adds."""
        return source.reader(stage.seq_len - self.num_special, seed, number, state)

    def take(self, reader: Any, stage: EncoderStage, rows: slice) -> TensorsAndWeights:
        ids, _ = reader.take(stage.batch_size, rows)
        return (with_special_tokens(ids, self.special_tokens),), (1 / stage.batch_size,)

    def save(self, folder: Any) -> None:
        super().save(folder)
        write_files(folder, self.files)
