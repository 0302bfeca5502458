"""convert() with text for an encoder: what it reads, and how its embeddings compare with those of its softmax original."""

import torch
import torch.nn.functional as F

from ..data import TokenRing, open_text, special_tokens, with_special_tokens
from ..models.encoder_attention import first_position
from .fit import Rows
from .teacher import run_body, softmax_instead

ROW_TOKENS, ROWS_AT_ONCE, HELD_OUT_ROWS = 512, 3, 8
FIT_STEPS = 60
FIT_PARTS, HELD_OUT_PARTS = (1, 2, 4), (4, 1)  # in how many inputs a row is cut: encoders read short texts, too


def read_encoder_rows(model, tokenizer, text, seed: int, progress: bool, effort: float = 1.0) -> Rows:
    """The rows of a conversion: batches `[N, T]` of equal length, up to `ROW_TOKENS`, with the tokenizer's special tokens.

    A short text is read several times over.

    Args:
        model: an encoder of text.
        tokenizer: its tokenizer; None if `text` is tokens, which then get no special ones.
        text: as `data.open_text` takes it.
        seed: of the choice of passages.
        progress: not used: nothing is written.
        effort: multiplies the number of batches that outputs are learned from.

    Raises:
        ValueError: the text is too short, or "self".
    """
    if isinstance(text, str) and text == "self":
        raise ValueError(f'text: got "self" with {type(model).__name__}, which writes no text, expected some.')
    around = special_tokens(tokenizer)
    source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
    length = min(ROW_TOKENS, model.config.max_position_embeddings - first_position(model.base_model))
    steps = max(1, round(FIT_STEPS * effort))
    count = HELD_OUT_ROWS + steps * ROWS_AT_ONCE
    if isinstance(source, TokenRing):
        length = max(min(length, len(source.tokens) // 6), 1)
        count = min(count, len(source.tokens) // length)
    rows = source.reader(length, seed, 0).take(count)[0]
    held_out, rows = rows.split((size := min(HELD_OUT_ROWS, count // 6), count - size))
    fit = []
    for step in range(steps):
        chosen = rows[torch.arange(step * ROWS_AT_ONCE, (step + 1) * ROWS_AT_ONCE) % len(rows)]
        fit.append(cut_rows(chosen, FIT_PARTS[step % len(FIT_PARTS)], around))
    return Rows(fit, [], [cut_rows(held_out, parts, around) for parts in HELD_OUT_PARTS if size], source.name)


def cut_rows(rows: torch.Tensor, parts: int, around: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows `[N, T]` as `[N * parts, T // parts]` inputs of the model, the special tokens `around` each included."""
    length = max(rows.shape[1] // parts - sum(map(len, around)), 1)
    return with_special_tokens(rows[:, : parts * length].reshape(-1, length), around)


class EmbeddingScores:
    """Embeddings of the softmax original of a model on some rows, the mean over their tokens, and the model's against them.

    Args:
        model: a converted encoder.
        rows: batches of token ids `[N, T]`, of different lengths T.

    Attributes:
        scores: "cosine": {tokens of an input: 1.0}, the original's to itself.
    """

    def __init__(self, model, rows: list[torch.Tensor]):
        self.rows = rows
        with softmax_instead(model):
            self.expected = [embed(model, ids) for ids in rows]
        self.scores = {"cosine": {str(ids.shape[1]): 1.0 for ids in rows}}

    def compare(self, model) -> dict[str, dict[str, float]]:
        """{"cosine": {tokens of an input: mean cosine of the model's embeddings to the original's}}."""
        pairs = zip(self.rows, self.expected, strict=True)
        return {
            "cosine": {str(ids.shape[1]): round(float((embed(model, ids) * x).sum(-1).mean()), 4) for ids, x in pairs}
        }


@torch.no_grad()
def embed(model, ids: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of the last hidden states, of norm 1, fp32 `[N, width]`, of rows of token ids `[N, T]`."""
    return F.normalize(run_body(model, ids).float().mean(1), dim=-1)
