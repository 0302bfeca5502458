"""convert() with text for a text encoder: the batches it learns from, and the scores of its embeddings."""

from typing import Any

import torch
import torch.nn.functional as F

from ..data import TokenRing, open_text, special_tokens, with_special_tokens
from ..models.encoder.encoder_attention import first_position
from .fit import Rows, row_length
from .teacher import run_body, softmax_instead

ROW_TOKENS, ROWS_AT_ONCE, HELD_OUT_ROWS = 512, 3, 8
FIT_STEPS = 60
FIT_PARTS, HELD_OUT_PARTS = (1, 2, 4), (4, 1)  # number of inputs per row: encoders read short texts, too


def read_encoder_rows(
    model: Any, tokenizer: Any, text: Any, seed: int, progress: bool, effort: float = 1.0, shortest: int = 1,
    learns: bool = True
) -> Rows:  # fmt: skip
    """Read the batches that a text encoder is converted with; the arguments are those of `language.read_rows`.

    The inputs of a batch are equally long, up to `ROW_TOKENS` with the tokenizer's special tokens around them. A short
    text is read several times. No heads are scored.
    """
    if isinstance(text, str) and text == "self":
        raise ValueError(f'text: got "self" with {type(model).__name__}, which writes no text, expected a text.')
    around = special_tokens(tokenizer)
    source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
    length = min(ROW_TOKENS, model.config.max_position_embeddings - first_position(model.base_model))
    steps = max(1, round(FIT_STEPS * effort))
    count = HELD_OUT_ROWS + steps * ROWS_AT_ONCE
    length = row_length(source, length, shortest)
    if isinstance(source, TokenRing):
        count = min(count, len(source.tokens) // length)
    rows = source.reader(length, seed, 0).take(count)[0]
    num_held_out = min(HELD_OUT_ROWS, count // 6)
    held_out_rows, rows = rows.split((num_held_out, count - num_held_out))
    fit = []
    for step in range(steps):
        batch = rows[torch.arange(step * ROWS_AT_ONCE, (step + 1) * ROWS_AT_ONCE) % len(rows)]
        fit.append(cut_rows(batch, FIT_PARTS[step % len(FIT_PARTS)], around))
    held_out = [cut_rows(held_out_rows, parts, around) for parts in HELD_OUT_PARTS if num_held_out]
    return Rows(fit, [], held_out, source.name)


def cut_rows(rows: torch.Tensor, parts: int, around: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cut rows into `parts` inputs each, with special tokens around them: [N, T] -> [N * parts, T // parts]."""
    length = max(rows.shape[1] // parts - sum(map(len, around)), 1)
    return with_special_tokens(rows[:, : parts * length].reshape(-1, length), around)


class EmbeddingScores:
    """Measures the cosine similarity of a converted encoder's embeddings to those of its original, by length of `rows`."""

    def __init__(self, model: Any, rows: list[torch.Tensor]) -> None:
        self.rows = rows
        with softmax_instead(model):
            self.expected = [embed(model, ids) for ids in rows]
        self.scores = {"cosine": {str(ids.shape[1]): 1.0 for ids in rows}}

    def compare(self, model: Any) -> dict[str, dict[str, float]]:
        """Return the scores of the model as it is now: {"cosine": {number of tokens as a string: mean similarity}}."""
        cosines = {}
        for ids, expected in zip(self.rows, self.expected, strict=True):
            cosines[str(ids.shape[1])] = round(float((embed(model, ids) * expected).sum(-1).mean()), 4)
        return {"cosine": cosines}


@torch.no_grad()
def embed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Compute embeddings of ids without padding: the mean of the last hidden states, scaled to norm 1, fp32 [N, width]."""
    return F.normalize(run_body(model, ids).float().mean(1), dim=-1)
