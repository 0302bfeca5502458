"""convert() with text: some KV heads of a language model keep softmax, and MHLA with parameters learns from the original.

The batches that an encoder reads, and the scores it gets, are in `encoder.py`.
"""

import copy
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file, check_writable, renamed_errors, wrap_errors
from ..checkpoints.fingerprint import fingerprint_model, hash_json
from ..checkpoints.provenance import public_name
from ..data import TokenRing, open_text
from ..facts import FactRows
from ..models.families import ENCODERS, LANGUAGE
from ..models.transformers_api import forward_cached, set_attention_function
from ..nn.settings import FAR_SETTINGS, SALIENT, MHLASettings, is_whole
from ..plots import render_report
from .encoder import EmbeddingScores, read_encoder_rows
from .fit import AskingRow, OutputFit, Rows, compared_positions, once_and_twice, read_twice, row_length
from .head_choice import TOLERANCE, HeadChoice, give_softmax_back, set_salient
from .steps import check_learning, check_report
from .teacher import is_encoder, mean_kl, softmax_instead
from .transformers_models import checked_settings, convert_in_place, convertible_family

logger = logging.getLogger("mhla_hf")
# Numbers of rows, of ROW_TOKENS tokens each: to fit outputs, and to measure on.
ROW_TOKENS, FIT_ROWS, HELD_OUT_ROWS = 1024, 28, 2
# Rows that score heads, and `LONG_ROWS` of those to fit, are longer: far recall needs long rows, but they take time.
LONG_TOKENS, LONG_ROWS = 4096, 5
MEASURED_POSITIONS = 256  # per held-out row, at most
SAVE_EVERY = 30.0  # seconds
WRITING_BATCH = 16  # rows that the model samples at once


def convert_with_text(
    model: Any, settings: MHLASettings | None, layers: str | Sequence[int] | None, overrides: dict[str, Any],
    tokenizer: Any, text: Any, *, keep: float | int | str | None, context: int | None, tolerance: float | None,
    effort: float, seed: int, checkpoint: str | Path | None, progress: bool
) -> Any:  # fmt: skip
    """Convert a language model or a text encoder in place, fit it to its softmax original, and measure it; see `convert`.

    The model is in eval mode. The scores go to `model.config.mhla_measured`.
    """
    family, start = convertible_family(model), f"text: got a text for {type(model).__name__}"
    if family not in (*LANGUAGE, *ENCODERS):
        raise ValueError(f"{start}, expected None, or a causal language model or a text encoder.")
    is_text_encoder = family in ENCODERS
    if not is_text_encoder and not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise ValueError(f"{start}, which predicts no tokens, expected a ...ForCausalLM.")
    layers = "all" if layers is None and settings is None else layers
    compares_slots = settings is None and not {"salient", *FAR_SETTINGS} & overrides.keys()
    if settings is None and is_text_encoder:
        overrides = {"feature_map": "exp", **overrides}
    elif settings is None:
        # Without salient tokens, heads learn from the text, by which `center_maps` starts the unbounded features of `exp`.
        overrides = {"feature_map": "exp", "salient": choose_salient_slots(overrides), **overrides}
    mhla_settings = checked_settings(model, family, settings, layers, overrides)
    if not mhla_settings.windowed or mhla_settings.softmax_heads:
        conflict = "windowed=False" if not mhla_settings.windowed else "softmax_heads"
        expected = "windowed=True and no softmax_heads, which the conversion chooses"
        raise ValueError(f"text: got a text along with {conflict}, expected {expected}.")
    check_learning(model, effort, seed)
    if context is not None and not is_whole(context, 1):
        raise ValueError(f"context: got {context!r}, expected a whole number of at least 1.")
    if checkpoint is not None:
        check_writable(checkpoint, "checkpoint")
    saved_steps = Checkpoint(checkpoint)
    if is_text_encoder and (keep or context):
        name, value = ("keep", keep) if keep else ("context", context)
        raise ValueError(f"{name}: got {value!r} with {type(model).__name__}, an encoder, expected None.")
    is_positive = isinstance(tolerance, int | float) and 0 < tolerance < math.inf
    if tolerance is not None and (is_text_encoder or keep not in (None, "auto") or not is_positive):
        got = f"{tolerance!r} with {type(model).__name__} and keep={keep!r}"
        raise ValueError(f'tolerance: got {got}, expected a number above 0 with a language model and keep="auto".')
    tolerance = TOLERANCE if tolerance is None else tolerance
    start_time = time.monotonic()
    choice = None
    if not is_text_encoder:
        context = model.config.max_position_embeddings if context is None else context
        choice = HeadChoice(model, mhla_settings, "auto" if keep is None else keep, context, tolerance, compares_slots)
    read = read_encoder_rows if is_text_encoder else read_rows
    window, block_size = mhla_settings.window, mhla_settings.block_size
    shortest = (window + 1) * block_size + 1
    with renamed_errors("data", "text"):
        rows = read(model, tokenizer, text, seed, progress, effort, shortest, learns=not mhla_settings.salient)
    if (row_tokens := (rows.fit or rows.held_out)[0].shape[1]) < shortest:
        expected = f"a window and one block of less than the {row_tokens} tokens of a row"
        raise ValueError(f"window: got {window} with block_size {block_size}, expected {expected}.")
    ids = [batch.tolist() for batch in (*rows.learned_from, *rows.held_out)]
    config = {**model.config.to_dict(), "_name_or_path": None}
    candidates = choice and choice.candidates
    saved_steps.identify(ids, effort, seed, candidates, mhla_settings.to_dict(), config, fingerprint_model(model))
    for x in (*model.parameters(), *model.buffers()):
        if x.is_inference():  # made under torch.inference_mode; gradients do not pass through such a tensor
            torch.utils.swap_tensors(x, copy.deepcopy(x))
    attention_function = model.config._attn_implementation
    convert_in_place(model, family, mhla_settings)
    if choice and choice.compares:  # softmax heads compute as the model did
        mhla_function = model.config._attn_implementation
        set_attention_function(model.config, attention_function)
    report = learn_from_rows(model, rows, choice, seed, saved_steps, progress)
    if choice and choice.compares and not report["softmax_heads"]:
        set_attention_function(model.config, mhla_function)
    model.config.mhla_measured = report | {"seconds": round(time.monotonic() - start_time)}
    if progress:
        print(render_report(model.config.mhla_measured))
    return model


def choose_salient_slots(overrides: Mapping[str, Any]) -> int:
    """Return how many salient tokens a language model keeps: none if a setting asks for the far part in their place."""
    far_settings = [name for name in FAR_SETTINGS if name in overrides]
    if far_settings and overrides.get("salient"):
        got = f"{far_settings[0]}: got {overrides[far_settings[0]]!r} with salient={overrides['salient']!r}"
        raise ValueError(f"{got}, expected salient=0, which has a far part.")
    return 0 if far_settings or overrides.get("windowed") is False else SALIENT


def read_rows(
    model: Any, tokenizer: Any, text: Any, seed: int, progress: bool, effort: float = 1.0, shortest: int = 1,
    learns: bool = True
) -> Rows:  # fmt: skip
    """Read the rows of text that a language model is converted with, int64 [1, T] each.

    `effort` scales the number of rows to fit (none unless the model `learns`) and of rows by which heads are scored. Rows
    that ask, and `LONG_ROWS` of those to fit, have `LONG_TOKENS` tokens, all others `ROW_TOKENS`. They are shorter if the
    model has fewer positions or the text fewer tokens, but not shorter than `shortest`.
    """
    positions = getattr(model.config, "max_position_embeddings", LONG_TOKENS)
    short_length, long_length = min(ROW_TOKENS, positions), min(LONG_TOKENS, positions)
    num_scored, num_fit = max(1, round(effort)), max(1, round(FIT_ROWS * effort)) if learns else 0
    num_long = num_scored + 1 + (round(LONG_ROWS * effort) if learns and long_length > short_length else 0)
    num_rows = num_scored + 1 + HELD_OUT_ROWS + num_fit
    # Passages have the long length; those that do not stay whole are cut into short rows.
    num_passages = num_long + -(-(num_rows - num_long) // (long_length // short_length))
    if isinstance(text, str) and text == "self":
        # Sample short rows, and join several to a long one: sampling at the long length would take longer.
        num_short = num_passages * (long_length // short_length)
        sampled = sample_rows(model, tokenizer, num_short, short_length, seed, progress)
        passages, name = sampled.view(num_passages, -1), "self"
    else:
        source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
        short_length = row_length(source, short_length, shortest)
        if isinstance(source, TokenRing) and len(source.tokens) < num_passages * long_length:
            if short_length < long_length:
                message = "text: got %d tokens, expected %d, to choose by what is further back than %d tokens."
                logger.warning(message, len(source.tokens), num_passages * long_length, short_length)
            long_length = short_length
            num_scored, num_long = 1, 2
            num_passages = min(num_rows, len(source.tokens) // short_length)
        passages, name = source.reader(long_length, seed, 0).take(num_passages)[0], source.name
    whole_rows = long_length // short_length * short_length
    short_rows = list(passages[num_long:, :whole_rows].reshape(-1, 1, short_length))[: num_rows - num_long]
    num_held_out = min(HELD_OUT_ROWS, max(1, len(short_rows) // 6) if learns else len(short_rows))
    fit_rows = short_rows[num_held_out:] if learns else []
    # Long rows come late, each followed by two short ones.
    first_long = max(len(fit_rows) - 2 * (num_long - num_scored - 2), 0)
    for number, row in enumerate(passages[num_scored + 1 : num_long, None]):
        fit_rows.insert(first_long + 3 * number, row)
    *scored_rows, asking_row = [ask_of_row(row, tokenizer) for row in passages[: num_scored + 1, None]]
    return Rows(fit_rows, [row.ids for row in scored_rows], short_rows[:num_held_out], name, asking_row)


def ask_of_row(row: torch.Tensor, tokenizer: Any) -> AskingRow:
    """Build an `AskingRow` from a row int64 [1, T]: repeat its first third at the end, and insert facts and questions.

    Text alone seldom makes a model look something up. No facts are inserted if the tokenizer has too few one-token words.
    """
    num_copied = row.shape[1] // 3
    row = torch.cat([row[:, :-num_copied], row[:, :num_copied]], 1)
    ids, _, weights = FactRows(tokenizer, 1.0)(row, row)
    return AskingRow(ids, weights[0] > 1)


@torch.no_grad()
def sample_rows(model: Any, tokenizer: Any, count: int, length: int, seed: int, progress: bool) -> torch.Tensor:
    """Sample int64 [count, length] from a softmax language model at temperature 1, without a prompt.

    Each row begins with the beginning-of-sequence token, or with the end-of-sequence token if there is none. Sampling does
    not stop at an end-of-sequence token.
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


class Checkpoint:
    """Saves the progress of a conversion to a file, unless it is None, and resumes from that file if it exists."""

    def __init__(self, file: str | Path | None) -> None:
        self.file = None if file is None else Path(file)
        self.saved = time.monotonic()
        self.content: dict[str, Any] = {}
        if self.file is not None and self.file.exists():
            got = f"checkpoint: got {str(file)!r}, which is not a checkpoint of a conversion"
            try:
                self.content = torch.load(self.file, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many types, with advice to run what is in the file
                raise ValueError(f"{got} ({type(error).__name__}), expected a new file.") from error
            if not isinstance(self.content, dict) or "identity" not in self.content:
                raise ValueError(f"{got}, expected a new file.")

    def identify(self, *parts: Any) -> None:
        """Raise ValueError if the file is of a conversion with other `parts`, which are all that its results depend on."""
        identity = hash_json(parts)
        if self.content.setdefault("identity", identity) != identity:
            expected = "a new file; delete it to start anew"
            raise ValueError(f"checkpoint: got {str(self.file)!r} of another conversion, expected {expected}.")

    def run(self, fit: OutputFit, inputs: Sequence[torch.Tensor], bar: tqdm) -> None:
        """Call `fit.step` with each of `inputs`, except for those that were done before the conversion was interrupted.

        The file is written every `SAVE_EVERY` seconds and after the last step. Without a bar, progress is logged then.
        """
        if "outputs" in self.content:
            fit.load_state_dict(self.content["outputs"])
        bar.update(fit.done)
        while fit.done < len(inputs):
            loss = fit.step(inputs[fit.done])
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update()
            if time.monotonic() - self.saved < SAVE_EVERY and fit.done < len(inputs):
                continue
            self.saved = time.monotonic()
            if bar.disable:
                logger.info("fit: %d of %d, loss %.4f", fit.done, len(inputs), loss)
            if self.file is not None:
                self.content["outputs"] = fit.state_dict()
                message = f"checkpoint: got {str(self.file)!r}, expected a place with room to write"
                with wrap_errors(message), atomic_file(self.file) as temporary:
                    torch.save(self.content, temporary)


def learn_from_rows(
    model: Any, rows: Rows, choice: HeadChoice | None, seed: int, saved_steps: Checkpoint, progress: bool
) -> dict[str, Any]:
    """Fit the MHLA heads of a model that was just converted, choose the heads that keep softmax, and return the report."""
    teacher = (EmbeddingScores if is_encoder(model) else TeacherScores)(model, rows.held_out)
    report: dict[str, Any] = {
        "text": public_name(rows.name),
        "tokens": sum(x.numel() for x in rows.learned_from),
        "seed": seed,
        "original": teacher.scores,
        "softmax_heads": {},
    }
    check_report(report)
    if rows.fit:
        report["converted"] = teacher.compare(model)
        fit = OutputFit(model, steps=len(rows.fit))
        with tqdm(total=len(rows.fit), desc="fit MHLA to softmax", unit="row", disable=not progress) as bar:
            saved_steps.run(fit, rows.fit, bar)
        fit.finish()
        report["fitted"] = teacher.compare(model)
    softmax_heads: dict[int, list[int]] = {}
    if choice:
        salient, softmax_heads, chosen = choice.find(model, rows, progress)
        report |= chosen
        set_salient(model, salient)
        if not rows.fit:
            report["converted"] = teacher.compare(model)
    if softmax_heads:
        give_softmax_back(model, softmax_heads)
        report["kept"] = teacher.compare(model)
    check_report(report)
    return report


class TeacherScores:
    """Measures a converted language model and its softmax original on held-out rows. The constructor runs the original.

    Scores are "perplexity", and "recall", the mean log-probability of the tokens of a row that is read a second time.
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
