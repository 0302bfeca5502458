"""The checks of an audit, each of which measures one property of a saved language model.

A check returns a dict with "value", a number or a text, and optionally "stderr", "tolerance", "details" and "measured".
If it finds a problem, it raises an exception or returns a value above its tolerance.
`CHECKS` lists all checks in the order of the report, with descriptions.
"""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from ..analysis.behavior import (
    PASSAGE_TOKENS,
    batch_difference,
    cached_logits,
    causality_difference,
    continue_greedily,
    difference,
    has_argument,
    largest,
    layer_bytes,
    next_token_log_probs,
    packed_difference,
    recall_gain,
    whole_logits,
)
from ..analysis.measures import record_model
from ..checkpoints.bundle import FILE_NAME, build_bundle, check_bundle
from ..checkpoints.isolated_load import check_isolated_load
from ..checkpoints.load import load_language_model
from ..checkpoints.save import CARD_FILE
from ..conversion.model_family import softmax_config
from ..conversion.teacher import mean_kl
from ..evaluation.records import Results
from .card import compare_card, render_folder_card
from .facts import PERSON_FILE, read_records
from .folder_checks import check_weights

MAX_TOKENS = 8192  # of a long text
FLOAT32_TOLERANCE = 1e-4  # of differences of logits, as the next one; see `AuditSubject.tolerance`
HALF_TOLERANCE = 2e-2
MAX_RECALL_LOSS = 0.5  # nats per recalled token below the teacher
RECALL_TOKENS = 4096  # total length of the texts for one recall distance; at most 8 texts
TEACHER_ROWS = 4  # texts on which model and teacher are compared
PROMPTS = 16
NEW_TOKENS = 32  # generated after each prompt

Check = Callable[["AuditSubject"], dict[str, Any]]


class NotApplicable(Exception):
    """Raised by a check that does not apply to the model; the message gives the reason."""


@dataclasses.dataclass
class AuditSubject:
    """The model that an audit checks, and the text on which it runs.

    Attributes:
        folder: The model's folder.
        config, tokenizer: The model's configuration and tokenizer.
        ids: Token ids of the text, [number of tokens].
        tokens: Longest context that the user allows, in tokens.
        device: Device on which the model runs.
        trust_remote_code: Whether to run source code that this mhla_hf did not generate.
        teacher: The teacher model, or None.
        loaded: The model; None until the check "loads" has loaded it.
        progress: Whether to show progress bars.
    """

    folder: Path
    config: Any
    tokenizer: Any
    ids: torch.Tensor
    tokens: int
    device: torch.device
    trust_remote_code: bool
    teacher: Any = None
    loaded: Any = None
    progress: bool = False

    @property
    def model(self) -> Any:
        """The model. Raises `NotApplicable` if it could not be loaded."""
        if self.loaded is None:
            raise NotApplicable("the model does not load")
        return self.loaded

    @property
    def mhla(self) -> dict[str, Any]:
        """The settings of the MHLA layers. Raises `NotApplicable` if the model has none."""
        settings = getattr(self.config, "mhla", None)
        if not isinstance(settings, dict):
            raise NotApplicable("the model has no MHLA")
        return settings

    @property
    def source(self) -> str:
        """The source code in the folder of an MHLA model.

        Raises `NotApplicable` if the model has no MHLA, and ValueError if the folder has no source code.
        """
        file = self.folder / FILE_NAME
        if self.mhla and not file.is_file():
            raise ValueError(f"there is no {FILE_NAME}, so the model cannot be loaded without mhla_hf")
        return file.read_text(encoding="utf-8")

    @functools.cached_property
    def exact(self) -> Any:
        """The model itself if it is in float32, else a copy in float32. Raises `NotApplicable` if it is not loaded."""
        return self.model if self.model.dtype == torch.float32 else copy.deepcopy(self.model).float()

    @functools.cached_property
    def rounding(self) -> float:
        """The `difference` between the model's logits and the float32 model's logits on a short text."""
        ids = self.text(self.short)[None]
        return difference(whole_logits(self.model, ids), whole_logits(self.exact, ids))

    @property
    def tolerance(self) -> float:
        """Largest `difference` of logits that a check allows.

        In half precision it is at least twice `rounding`, because rounding affects both logits.
        """
        return FLOAT32_TOLERANCE if self.model.dtype == torch.float32 else max(HALF_TOLERANCE, 2 * self.rounding)

    @property
    def trained(self) -> int:
        """Context length in tokens for which the model was trained; `MAX_TOKENS` if the configuration has none."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None) or MAX_TOKENS

    @property
    def long(self) -> int:
        """Number of tokens of a long text: the trained length, or four times as many with RoPE, but at most `tokens`."""
        rotary = getattr(self.config.get_text_config(), "rope_parameters", None)
        return min(self.tokens, self.trained * (4 if rotary else 1))

    @property
    def short(self) -> int:
        """Number of tokens of a short text: four blocks but at least 192 tokens, and at most `long`."""
        return min(self.long, max(192, 4 * (getattr(self.config, "mhla", None) or {}).get("block_size", 0)))

    def text(self, length: int, number: int = 0) -> torch.Tensor:
        """Return token ids [length] of the text. After its end it starts again; `number` selects where to begin."""
        return self.ids[(number * 9973 + torch.arange(length)) % len(self.ids)]

    def watch(self, steps: Sequence[Any]) -> Iterable[Any]:
        """Return an iterable over the steps of a check that shows a progress bar after three seconds."""
        return tqdm(steps, desc="  this check", unit="step", leave=False, delay=3, disable=not self.progress)

    @functools.cached_property
    def teacher_comparison(self) -> tuple[torch.Tensor, torch.Tensor]:
        """KL from the teacher (nats per token) and share of equal next-token predictions for each text, [TEACHER_ROWS] each.

        Raises `NotApplicable` if there is no teacher.
        """
        if self.teacher is None:
            raise NotApplicable("no teacher was given")
        measured = []
        for number in self.watch(range(TEACHER_ROWS)):
            row = self.text(self.short, number)[None]
            teacher, student = (whole_logits(model, row).log_softmax(-1) for model in (self.teacher, self.model))
            agreement = (teacher.argmax(-1) == student.argmax(-1)).float().mean()
            measured.append((float(mean_kl(teacher, student)), float(agreement)))
        kl, agreement = torch.tensor(measured).unbind(1)
        return kl, agreement


def mean_and_error(values: torch.Tensor) -> dict[str, float]:
    """Return the mean and the standard error of a vector as the "value" and "stderr" of a check."""
    return {"value": float(values.mean()), "stderr": float(values.std() / len(values) ** 0.5)}


def check_all_weights(subject: AuditSubject) -> dict[str, Any]:
    return {"value": f"finite, {check_weights(subject.folder)}"}


def find_foreign_version(subject: AuditSubject) -> str | None:
    """Return the version of mhla_hf that generated the source in the folder; None if this installation generates the same.

    Raises:
        ValueError: The source is missing or was edited.
        NotApplicable: The model has no MHLA.
    """
    header = check_bundle(subject.source)
    return None if build_bundle(header["entry"]) == subject.source else header["version"]


def check_source(subject: AuditSubject) -> dict[str, Any]:
    version = find_foreign_version(subject)
    return {"value": "what this mhla_hf makes" if version is None else f"intact, of another mhla_hf ({version})"}


def check_loads_elsewhere(subject: AuditSubject) -> dict[str, Any]:
    if find_foreign_version(subject) is not None and not subject.trust_remote_code:
        raise NotApplicable("its source is not what this mhla_hf makes, and is not run without --trust-remote-code")
    return {"value": check_isolated_load(subject.folder, "language").rpartition(".")[2]}


def check_loads(subject: AuditSubject) -> dict[str, Any]:
    options: dict[str, Any] = {"device": subject.device, "trust_remote_code": subject.trust_remote_code}
    loaded = load_language_model(subject.folder, **options)[0]
    largest_id = int(subject.ids.max())
    vocab_size = loaded.get_input_embeddings().weight.shape[0]
    if largest_id >= vocab_size:
        raise ValueError(f"the tokenizer gives token {largest_id}, and the model knows 0 to {vocab_size - 1}")
    subject.loaded = loaded
    return {"value": type(loaded).__name__}


def check_cache(subject: AuditSubject) -> dict[str, Any]:
    ids = subject.text(subject.short)[None]
    tail = subject.short // 4
    expected = whole_logits(subject.model, ids)
    splits = {
        "chunks": [1, tail - 1, tail + 1, subject.short - 2 * tail - 1],
        "token by token": [subject.short - 2 * tail, *[1] * (2 * tail)],
    }
    differences = {
        name: difference(cached_logits(subject.model, ids, sizes, watch=subject.watch), expected)
        for name, sizes in splits.items()
    }
    return {"value": largest(differences.values()), "tolerance": subject.tolerance, "details": differences}


def check_causality(subject: AuditSubject) -> dict[str, Any]:
    lengths = (subject.short, subject.short - 5)  # the last token ends a block, or is in the middle of one
    differences = [causality_difference(subject.model, subject.text(length)[None]) for length in lengths]
    return {"value": largest(differences), "tolerance": subject.tolerance}


def check_batches(subject: AuditSubject) -> dict[str, Any]:
    rows = [subject.text(subject.short, number) for number in range(3)]
    return {"value": batch_difference(subject.model, rows), "tolerance": subject.tolerance}


def check_padding(subject: AuditSubject) -> dict[str, Any]:
    rows = [subject.text(length, length) for length in (subject.short, subject.short // 2, 17)]
    return {"value": batch_difference(subject.model, rows), "tolerance": subject.tolerance}


def check_packing(subject: AuditSubject) -> dict[str, Any]:
    if not has_argument(subject.model, "position_ids"):
        raise NotApplicable("the model takes no position_ids")
    rows = [subject.text(length, length) for length in (subject.short // 2, subject.short // 2 - 7, 20)]
    stock = None if keeps_rows_apart(subject, subject.model, rows) else find_stock_model(subject)
    if stock is not None and not keeps_rows_apart(subject, stock, rows):
        raise NotApplicable(f"{type(stock).__name__} of transformers does not keep packed sequences apart either")
    return {"value": packed_difference(subject.model, rows), "tolerance": subject.tolerance}


def keeps_rows_apart(subject: AuditSubject, model: Any, rows: Sequence[torch.Tensor]) -> bool:
    """Return whether a model gives packed rows the same logits as each row alone; False if it raises an error."""
    try:
        return packed_difference(model, rows) <= subject.tolerance
    except Exception:  # some models lack a kernel for it; for the audited model, `check_packing` reports the error
        return False


def find_stock_model(subject: AuditSubject) -> Any:
    """Return a softmax model of transformers with the architecture of the audited model.

    This is the audited model or the teacher if its class is one of transformers, else a new model with random weights. The
    result is None for an MHLA model from scratch, which has no such architecture.
    """
    for model in (subject.model, subject.teacher):
        if type(model).__module__.startswith("transformers."):
            return model
    if not hasattr(subject.config, "base_model_type"):
        return None
    return AutoModelForCausalLM.from_config(softmax_config(subject.config)).eval().to(subject.device)


def check_far_part(subject: AuditSubject) -> dict[str, Any]:
    window = subject.mhla.get("window", 2) * subject.mhla["block_size"] + subject.mhla["sinks"]
    length = subject.short
    if length <= window:
        raise NotApplicable(f"a text of {length} tokens ends within the window of {window}")
    batch = {"input_ids": subject.text(length)[None].to(subject.device), "use_cache": False}
    calls = [call for layer in record_model(subject.model, batch).values() for call in layer if "form" in call.options]
    if not calls:
        raise NotApplicable("its MHLA has no window")
    by_head = [[call.far_share(0, head) for head in range(call.q.shape[2])] for call in calls]
    shares = {str(layer): sum(heads) / len(heads) for layer, heads in zip(subject.mhla["layers"], by_head, strict=True)}
    if dead := [layer for layer, share in shares.items() if not 0 < share < math.inf]:
        raise ValueError(f"beyond the window layer {dead[0]} has {shares[dead[0]]} of its weights ({len(dead)} layers)")
    return {"value": min(shares.values()), "tolerance": "above 0", "details": shares}


def compute_long_logits(
    subject: AuditSubject, cached_model: Any, one_pass_model: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of two models at some positions of a long text.

    Args:
        subject: The subject, which provides the text.
        cached_model: The model that reads the text with a cache, in chunks and at the end token by token.
        one_pass_model: The model that reads the text in one pass.

    Returns:
        (logits of `cached_model`, logits of `one_pass_model`), each fp32 [1, number of positions, vocabulary size].
    """
    length = subject.long
    ids = subject.text(length)[None]
    single = min(32, length // 2)
    full_chunks, rest = divmod(length - single, 512)
    sizes = [*[512] * full_chunks, *([rest] if rest else []), *[1] * single]
    at = torch.cat([torch.arange(0, length - single, max(1, length // 128)), torch.arange(length - single, length)])
    return cached_logits(cached_model, ids, sizes, at, watch=subject.watch), whole_logits(one_pass_model, ids, at)


def check_long_text(subject: AuditSubject) -> dict[str, Any]:
    value = difference(*compute_long_logits(subject, subject.model, subject.model))
    return {"value": value, "tolerance": subject.tolerance, "details": {"tokens": subject.long}}


def check_drift(subject: AuditSubject) -> dict[str, Any]:
    half = copy.deepcopy(subject.model).bfloat16() if subject.model.dtype == torch.float32 else subject.model
    half_quarters, exact_quarters = (
        logits.tensor_split(4, 1) for logits in compute_long_logits(subject, half, subject.exact)
    )
    errors = [
        float((actual - expected).norm() / expected.norm())
        for actual, expected in zip(half_quarters, exact_quarters, strict=True)
    ]
    return {"value": errors[-1] / errors[0], "details": {"quarters": errors}}


def check_state(subject: AuditSubject) -> dict[str, Any]:
    if subject.mhla["mixing_form"] != "decay":
        raise NotApplicable("a dense mixing keeps the summary of every block")
    half = subject.long // 2
    before, after = layer_bytes(subject.model, subject.text(2 * half)[None], half, subject.mhla["layers"])
    if before != after:
        raise ValueError(f"{before:,} bytes after {half} tokens have become {after:,} after {2 * half}")
    return {"value": f"{after:,} bytes"}


def check_recall(subject: AuditSubject) -> dict[str, Any]:
    longest = min(subject.long, subject.trained) - PASSAGE_TOKENS
    distances = [*(d for d in (PASSAGE_TOKENS << power for power in range(20)) if d < longest), longest]
    models = {"model": subject.model, "teacher": subject.teacher}
    models = {name: model for name, model in models.items() if model is not None}
    gains: dict[str, dict[str, float]] = {name: {} for name in models}
    for distance, name in subject.watch([*itertools.product(distances, models)]):
        rows = max(1, min(8, RECALL_TOKENS // distance))
        gains[name][str(distance)] = recall_gain(models[name], subject.ids, distance, rows)
    if subject.teacher is None:
        return {"value": gains["model"][str(longest)], "details": gains}
    loss = largest(gains["teacher"][distance] - gain for distance, gain in gains["model"].items())
    measured = "recall lost against the teacher, nats per token"
    return {"value": loss, "tolerance": MAX_RECALL_LOSS, "measured": measured, "details": gains}


def check_kl(subject: AuditSubject) -> dict[str, Any]:
    return mean_and_error(subject.teacher_comparison[0])


def check_agreement(subject: AuditSubject) -> dict[str, Any]:
    return mean_and_error(subject.teacher_comparison[1])


def check_writing(subject: AuditSubject) -> dict[str, Any]:
    if subject.teacher is None:
        raise NotApplicable("no teacher was given")
    length = subject.short - NEW_TOKENS
    prompts = torch.stack([subject.text(length, number) for number in range(PROMPTS)])
    by_model, by_teacher = (
        continue_greedily(model, prompts, NEW_TOKENS, subject.watch) for model in (subject.model, subject.teacher)
    )
    at = torch.arange(length, length + NEW_TOKENS)
    model_score, teacher_score = (
        next_token_log_probs(subject.teacher, ids, at).mean(-1).cpu() for ids in (by_model, by_teacher)
    )
    ties = (by_model == by_teacher).all(-1)
    gap = mean_and_error(model_score - teacher_score)
    details = {"texts": PROMPTS, "same": int(ties.sum()), "gap": gap["value"], "gap_stderr": gap["stderr"]}
    return {**mean_and_error((ties | (model_score > teacher_score)).float()), "details": details}


def check_card_text(subject: AuditSubject) -> dict[str, Any]:
    readme = subject.folder / CARD_FILE
    if not readme.is_file():
        raise NotApplicable("there is no card")
    if not (subject.folder / PERSON_FILE).is_file():
        raise NotApplicable("mhla_hf did not write the card, so its claims cannot be checked")
    compare_card(readme, render_folder_card(subject.folder, weights=False))
    return {"value": "rendered again, the same"}


def check_scores(subject: AuditSubject) -> dict[str, Any]:
    local = [record for record in Results.read(subject.folder) if record.fingerprint.startswith("files:")]
    if not local:
        raise NotApplicable("there are no scores of a folder's weights")
    read_records(subject.folder)
    return {"value": f"{len(local)} of these weights"}


def check_claims(subject: AuditSubject) -> dict[str, Any]:
    readme = subject.folder / CARD_FILE
    records = Results.read(subject.folder)
    claims = (ModelCard.load(readme).data.eval_results or []) if readme.is_file() else []
    if not claims or not records:
        raise NotApplicable("no results.json says where the numbers are from" if claims else "no number is claimed")
    scores = {(record.task, record.metric, record.value) for record in records}
    for claim in claims:
        if (claim.dataset_type, claim.metric_type, claim.metric_value) not in scores:
            score = f"{claim.metric_type} {claim.metric_value} on {claim.dataset_type}"
            raise ValueError(f"{CARD_FILE} claims {score}, which results.json does not hold")
    return {"value": f"{len(claims)} of results.json"}


# Name -> (description of what it measures, check). "logits ..." is the largest difference relative to the largest logit.
CHECKS: dict[str, tuple[str, Check]] = {
    "weights": ("all files complete, all weights finite", check_all_weights),
    "source": ("the source code in the folder", check_source),
    "loads elsewhere": ("the class in a process without mhla_hf", check_loads_elsewhere),
    "loads": ("the class here, with all weights", check_loads),
    "cache": ("logits in chunks and token by token, against one pass", check_cache),
    "causality": ("logits before the last token, with another last token", check_causality),
    "batches": ("logits of a row in a batch, against the row alone", check_batches),
    "left padding": ("logits of a padded row, against the row alone", check_padding),
    "packing": ("logits of rows packed by position_ids, against each alone", check_packing),
    "long text": ("logits with a cache, against one pass", check_long_text),
    "drift": ("error of half precision, last quarter of a long text over the first", check_drift),
    "state": ("cache of the MHLA layers, the same when the text doubles", check_state),
    "far part": ("smallest share of a layer's weights beyond the window", check_far_part),
    "recall": ("gain of a passage when it is repeated, nats per token", check_recall),
    "KL": ("KL from the teacher, nats per token", check_kl),
    "agreement": ("share of next tokens that are the teacher's", check_agreement),
    "writing": ("share of texts that the teacher finds as likely as its own", check_writing),
    "card": ("README.md, against the files beside it", check_card_text),
    "scores": ("results.json, against the weights", check_scores),
    "claims": ("the numbers in the card's metadata, against results.json", check_claims),
}
