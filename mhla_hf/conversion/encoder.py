"""convert() with text for a text encoder: MHLA learns the outputs of the softmax layers."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..checkpoints.file_io import atomic_file, check_writable, renamed_errors, wrap_errors
from ..checkpoints.fingerprint import fingerprint_model, hash_json
from ..checkpoints.provenance import public_name
from ..data import TokenRing, open_text, special_tokens, with_special_tokens
from ..models.encoder.encoder_attention import first_position
from ..models.families import Family
from ..nn.settings import MHLASettings
from ..plots import render_report
from .fit import OutputFit
from .steps import Requested, check_learning, check_report, leave_inference_mode, row_length
from .teacher import run_body, softmax_instead
from .transformers_models import convert_in_place, settings_with_text

logger = logging.getLogger("mhla_hf")
ROW_TOKENS, ROWS_AT_ONCE, HELD_OUT_ROWS = 512, 3, 8
FIT_STEPS = 60
FIT_PARTS, HELD_OUT_PARTS = (
    (1, 2, 4),
    (4, 1),
)  # inputs per row, in turn: encoders read short texts, too
SAVE_EVERY = 30.0  # seconds


class EncoderRows(NamedTuple):
    """The text of a conversion, in batches of token ids int64 [N, T] each: to fit, and to measure on."""

    fit: list[torch.Tensor]
    held_out: list[torch.Tensor]
    name: str


def convert_encoder(
    model: Any, family: Family, requested: Requested, tokenizer: Any, text: Any, *, effort: float, seed: int,
    checkpoint: str | Path | None, progress: bool,
) -> Any:  # fmt: skip
    """Convert a text encoder in place, fit it to its softmax original, and measure it; see `convert`.

    The model must be in eval mode. The scores go to `model.config.mhla_measured`.
    """
    if requested.settings is None:  # `exp` is unbounded, but `center_maps` sets its bias by the text
        requested = requested._replace(overrides={"feature_map": "exp", **requested.overrides})
    mhla_settings = settings_with_text(model, family, requested)
    check_learning(model, effort, seed)
    if checkpoint is not None:
        check_writable(checkpoint, "checkpoint")
    saved_steps = Checkpoint(checkpoint)
    start_time = time.monotonic()
    with renamed_errors("data", "text"):
        rows = read_rows(model, tokenizer, text, seed, effort, mhla_settings)
    ids = [batch.tolist() for batch in (*rows.fit, *rows.held_out)]
    config = {**model.config.to_dict(), "_name_or_path": None}
    saved_steps.identify(ids, effort, seed, mhla_settings.to_dict(), config, fingerprint_model(model))
    leave_inference_mode(model)
    convert_in_place(model, family, mhla_settings)
    teacher = EmbeddingScores(model, rows.held_out)
    check_report(teacher.scores)
    report: dict[str, Any] = {
        "text": public_name(rows.name),
        "tokens": sum(x.numel() for x in rows.fit),
        "seed": seed,
        "original": teacher.scores,
        "converted": teacher.compare(model),
    }
    fit = OutputFit(model, steps=len(rows.fit))
    with tqdm(total=len(rows.fit), desc="fit MHLA to softmax", unit="row", disable=not progress) as bar:
        saved_steps.run(fit, rows.fit, bar)
    fit.finish()
    report["fitted"] = teacher.compare(model)
    check_report(report)
    model.config.mhla_measured = report | {"seconds": round(time.monotonic() - start_time)}
    if progress:
        print(render_report(model.config.mhla_measured))
    return model


def read_rows(
    model: Any, tokenizer: Any, text: Any, seed: int, effort: float, settings: MHLASettings | None
) -> EncoderRows:
    """Read the batches that a text encoder is converted with.

    The inputs of a batch are equally long, up to `ROW_TOKENS` with the tokenizer's special tokens around them. A short text
    is read several times. `effort` multiplies the number of batches to fit.
    """
    if isinstance(text, str) and text == "self":
        raise ValueError(f'text: got "self" with {type(model).__name__}, which writes no text, expected a text.')
    around = special_tokens(tokenizer)
    source = open_text(text, tokenizer, vocab_size=model.get_input_embeddings().weight.shape[0])
    length = min(ROW_TOKENS, model.config.max_position_embeddings - first_position(model.base_model))
    steps = max(1, round(FIT_STEPS * effort))
    count = HELD_OUT_ROWS + steps * ROWS_AT_ONCE
    length = row_length(source, length, settings)
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
    return EncoderRows(fit, held_out, source.name)


def cut_rows(rows: torch.Tensor, parts: int, around: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Cut rows into `parts` inputs each, with special tokens around them: [N, T] -> [N * parts, T // parts]."""
    length = max(rows.shape[1] // parts - sum(map(len, around)), 1)
    return with_special_tokens(rows[:, : parts * length].reshape(-1, length), around)


class Checkpoint:
    """Saves a conversion's progress to `file`, and resumes from it if it exists; with None, it does neither."""

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
        """Record a hash of `parts`, all that the results depend on. Raise ValueError if the file has another hash."""
        identity = hash_json(parts)
        if self.content.setdefault("identity", identity) != identity:
            expected = "a new file, or delete this one to start anew"
            raise ValueError(f"checkpoint: got {str(self.file)!r} of another conversion, expected {expected}.")

    def run(self, fit: OutputFit, inputs: Sequence[torch.Tensor], bar: tqdm) -> None:
        """Call `fit.step` with each of `inputs`, except for those that were done before the conversion was interrupted.

        Every `SAVE_EVERY` seconds and after the last step, the file is written and, without a visible bar, the loss logged.
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


class EmbeddingScores:
    """Measures the mean cosine similarity of a converted encoder's embeddings to its original's, per batch in `rows`."""

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
