"""convert() with text for a language model: some KV heads keep softmax, the others a window and salient tokens."""

import logging
import math
import time
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoints.file_io import renamed_errors
from ..checkpoints.provenance import public_name
from ..data import TokenRing, open_text
from ..facts import FactRows
from ..models.families import Family
from ..models.transformers_api import forward_cached, set_attention_function
from ..nn.settings import MHLASettings, is_whole
from ..plots import render_report
from .head_choice import (
    TOLERANCE,
    AskingRow,
    HeadChoice,
    LanguageRows,
    compared_positions,
    give_softmax_back,
    set_salient,
)
from .steps import Requested, check_learning, check_report, leave_inference_mode, row_length
from .teacher import log_probabilities, mean_kl, softmax_instead
from .transformers_models import convert_in_place, settings_with_text

logger = logging.getLogger("mhla_hf")
ROW_TOKENS, HELD_OUT_ROWS = 1024, 2  # tokens of a row to measure on, and number of these rows
LONG_TOKENS = 4096  # tokens of a row with questions (`ask_of_row`): recall from far back needs long rows
MEASURED_POSITIONS = 256  # per held-out row, at most
WRITING_BATCH = 16  # rows that the model samples at once


def convert_language_model(
    model: Any, family: Family, requested: Requested, tokenizer: Any, text: Any, *, keep: float | int | str | None,
    context: int | None, tolerance: float | None, effort: float, seed: int, progress: bool,
) -> Any:  # fmt: skip
    """Convert a language model in place, choose the heads that keep softmax, and measure it; see `convert`.

    The model must be in eval mode. The scores go to `model.config.mhla_measured`.
    """
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        start = f"text: got a text for {type(model).__name__}"
        raise ValueError(f"{start}, which predicts no tokens, expected a ...ForCausalLM.")
    compares_slots = requested.settings is None and "salient" not in requested.overrides
    mhla_settings = settings_with_text(model, family, requested)
    check_learning(model, effort, seed)
    if context is not None and not is_whole(context, 1):
        raise ValueError(f"context: got {context!r}, expected a whole number of at least 1.")
    is_positive = isinstance(tolerance, int | float) and 0 < tolerance < math.inf
    if tolerance is not None and (keep not in (None, "auto") or not is_positive):
        expected = 'a number above 0 with keep="auto"'
        raise ValueError(f"tolerance: got {tolerance!r} with keep={keep!r}, expected {expected}.")
    tolerance = TOLERANCE if tolerance is None else tolerance
    start_time = time.monotonic()
    context = model.config.max_position_embeddings if context is None else context
    choice = HeadChoice(model, mhla_settings, "auto" if keep is None else keep, context, tolerance, compares_slots)
    with renamed_errors("data", "text"):
        rows = read_rows(model, tokenizer, text, seed, progress, effort, mhla_settings)
    leave_inference_mode(model)
    attention_function = model.config._attn_implementation
    convert_in_place(model, family, mhla_settings)
    if choice.compares:  # heads that keep softmax use the model's own attention function
        mhla_function = model.config._attn_implementation
        set_attention_function(model.config, attention_function)
    teacher = TeacherScores(model, rows.held_out)
    check_report(teacher.scores)
    salient, softmax_heads, chosen = choice.find(model, rows, progress)
    set_salient(model, salient)
    report: dict[str, Any] = {
        "text": public_name(rows.name),
        "tokens": sum(x.numel() for x in (*rows.scored, rows.asking.ids)),
        "seed": seed,
        "original": teacher.scores,
        **chosen,
        "converted": teacher.compare(model),
    }
    if softmax_heads:
        give_softmax_back(model, softmax_heads)
        report["kept"] = teacher.compare(model)
    elif choice.compares:
        set_attention_function(model.config, mhla_function)
    check_report(report)
    model.config.mhla_measured = report | {"seconds": round(time.monotonic() - start_time)}
    if progress:
        print(render_report(model.config.mhla_measured))
    return model


def read_rows(
    model: Any, tokenizer: Any, text: Any, seed: int, progress: bool, effort: float = 1.0,
    settings: MHLASettings | None = None,
) -> LanguageRows:  # fmt: skip
    """Read the rows of text that a language model is converted with, int64 [1, T] each.

    `effort` scales the number of rows by which heads are scored. Rows with questions (`ask_of_row`) have `LONG_TOKENS`
    tokens, held-out rows `ROW_TOKENS`; all are shorter if the model has fewer positions, or the text too few tokens.
    """
    positions = getattr(model.config, "max_position_embeddings", LONG_TOKENS)
    short_length, long_length = row_length(None, min(ROW_TOKENS, positions), settings), min(LONG_TOKENS, positions)
    num_asking = max(1, round(effort)) + 1
    num_rows = num_asking + HELD_OUT_ROWS
    # Passages have the long length; those without questions are cut into short rows.
    num_passages = num_asking + -(-HELD_OUT_ROWS // (long_length // short_length))
    if isinstance(text, str) and text == "self":
        # Sample short rows, and join several to a long one: sampling at the long length would take longer.
        num_short = num_passages * (long_length // short_length)
        sampled = sample_rows(model, tokenizer, num_short, short_length, seed, progress)
        passages, name = sampled.view(num_passages, -1), "self"
    else:
        source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
        short_length = row_length(source, short_length, settings)
        if isinstance(source, TokenRing) and len(source.tokens) < num_passages * long_length:
            if short_length < long_length:
                message = "text: got %d tokens, expected at least %d; heads are chosen on rows of only %d tokens."
                logger.warning(message, len(source.tokens), num_passages * long_length, short_length)
            long_length, num_asking = short_length, 2
            num_passages = min(num_rows, len(source.tokens) // short_length)
        passages, name = source.reader(long_length, seed, 0).take(num_passages)[0], source.name
    whole_rows = long_length // short_length * short_length
    held_out = list(passages[num_asking:, :whole_rows].reshape(-1, 1, short_length))[:HELD_OUT_ROWS]
    *scored_rows, asking_row = [ask_of_row(row, tokenizer) for row in passages[:num_asking, None]]
    return LanguageRows([row.ids for row in scored_rows], asking_row, held_out, name)


def ask_of_row(row: torch.Tensor, tokenizer: Any) -> AskingRow:
    """Build an `AskingRow` from a row int64 [1, T]: copy its first third over its last, and insert facts and questions.

    Text alone seldom makes a model look something up. No facts are inserted if the tokenizer has too few one-token words.
    """
    num_copied = row.shape[1] // 3
    row = torch.cat([row[:, :-num_copied], row[:, :num_copied]], 1)
    ids, _, weights = FactRows(tokenizer, 1.0)(row, row)
    return AskingRow(ids, weights[0] > 1)


@torch.no_grad()
def sample_rows(model: Any, tokenizer: Any, count: int, length: int, seed: int, progress: bool) -> torch.Tensor:
    """Sample int64 [count, length] from a softmax language model at temperature 1, without a prompt.

    Each row begins with the beginning-of-sequence token, else the end-of-sequence token, else token 0. Sampling does not
    stop at an end-of-sequence token.
    """
    config = model.config
    candidates = (getattr(tokenizer, "bos_token_id", None), config.bos_token_id, config.eos_token_id, 0)
    first_token = next(x for x in (x[0] if isinstance(x, list) else x for x in candidates) if x is not None)
    generator = torch.Generator().manual_seed(seed)
    batches = []
    with tqdm(total=count * length, desc="write text", unit="token", disable=not progress) as bar:
        for first_row in range(0, count, WRITING_BATCH):
            rows = torch.full((min(WRITING_BATCH, count - first_row), 1), first_token)  # [B, T], T grows
            cache: Any = None
            while rows.shape[1] < length:
                output, cache = forward_cached(model, rows[:, -1:].to(model.device), cache)
                probabilities = output.logits[:, -1].float().softmax(-1).cpu()
                rows = torch.cat([rows, probabilities.multinomial(1, generator=generator)], 1)
                bar.update(len(rows))
            batches.append(rows)
    return torch.cat(batches)


def read_twice(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return each row followed by its copy, both cut to fit the model's positions; recall is measured on the copy."""
    max_tokens = getattr(model.config, "max_position_embeddings", 2 * ids.shape[1]) // 2
    return torch.cat(2 * [ids[:, :max_tokens]], 1)


def once_and_twice(model: Any, ids: torch.Tensor, once: torch.Tensor, twice: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute log-probabilities at positions `once` of a row, and `twice` of the result of `read_twice`."""
    row = read_twice(model, ids)
    if row.shape[1] < 2 * ids.shape[1]:  # else one pass is enough: the first copy is the row
        return log_probabilities(model, ids, once), log_probabilities(model, row, twice)
    return log_probabilities(model, row, torch.cat([once, twice])).split([len(once), len(twice)], 1)


class TeacherScores:
    """Measures a converted language model and its softmax original on held-out rows. The constructor runs the original.

    Scores are "perplexity", and "recall", the mean log-probability of tokens in the second copy of a row.
    """

    def __init__(self, model: Any, rows: list[torch.Tensor]) -> None:
        self.rows = rows
        # Evenly spaced positions; the last token has no next one.
        self.positions = torch.arange(rows[0].shape[1] - 1)[:: -(-(rows[0].shape[1] - 1) // MEASURED_POSITIONS)]
        with torch.no_grad(), softmax_instead(model):
            predicted, self.scores = self.predict(model)
            self.expected = [x.half() for x in predicted]

    @torch.no_grad()
    def compare(self, model: Any) -> dict[str, float]:
        """Return the scores of the model as it is now, and "kl", its KL to the original in nats per token."""
        predicted, scores = self.predict(model)
        pairs = zip(self.expected, predicted, strict=True)
        kl = sum(float(mean_kl(expected.float(), x)) for expected, x in pairs) / len(predicted)
        return {"kl": round(max(kl, 0.0), 6), **scores}

    def predict(self, model: Any) -> tuple[list[torch.Tensor], dict[str, float]]:
        """Compute the log-probabilities at `positions` of each row, and the scores of a model."""
        predicted, losses, recalls = [], [], []
        for ids in self.rows:
            row = read_twice(model, ids)
            copied = compared_positions(row.shape[1], first=row.shape[1] // 2)
            of_row, of_copy = once_and_twice(model, ids, self.positions, copied - 1)
            predicted.append(of_row)
            next_ids = ids[:, self.positions + 1, None].to(of_row.device)  # [1, N, 1]
            losses.append(-of_row.gather(-1, next_ids))
            recalls.append(of_copy.gather(-1, row[:, copied, None].to(of_copy.device)).mean())
        perplexity = torch.cat(losses, 1).mean().exp()
        recall = float(sum(recalls)) / len(recalls)
        return predicted, {"perplexity": round(float(perplexity), 3), "recall": round(recall, 4)}
