"""`audit`: check whether a saved language model is intact and does what its card claims.

The checks are in `audit_checks.py`. Files and code of a checkpoint may come from anyone, so a check may raise anything. An
exception is a finding, and the other checks still run.
"""

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..analysis.inputs import default_text
from ..checkpoints.file_io import PathLike, resolve_model_name, summarize_error, write_json
from ..checkpoints.fingerprint import fingerprint_folder
from ..checkpoints.load import (
    choose_device,
    find_class_kind,
    is_pipeline,
    load_config,
    load_language_model,
    load_tokenizer,
)
from ..checkpoints.provenance import describe_run
from ..data import check_data_path, read_text_file
from ..evaluation.records import finite, render_rows
from ..evaluation.subjects import check_writable, shorten_path
from ..nn.settings import is_whole
from .audit_checks import CHECKS, MAX_TOKENS, AuditSubject, NotApplicable

FORMAT_VERSION = 1
MIN_TOKENS = 64  # of the text and of the longest context
OK, FINDING, MEASURED, NOT_APPLICABLE = "ok", "FINDING", "measured", "not applicable"  # verdicts


def audit(
    folder: str | Path, *, teacher: str | Path | None = None, text: str | Path | None = None, tokens: int | None = None,
    out: str | Path | None = None, device: torch.device | str | None = None, trust_remote_code: bool = False,
    progress: bool = True, command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Check a saved causal language model, with or without MHLA, from its files to the text that it generates.

    Args:
        folder: The model's folder, with its tokenizer.
        teacher: Folder or Hub id of the softmax original, or of another model with the same vocabulary.
        text: Text file to run the model on (default: the end of the Python language reference).
        tokens: Longest context, at least 64 (default: 8,192). Contexts are never longer than the trained length, or four
            times that with RoPE.
        out: JSON file to write; its folder is created.
        device: Device on which the model runs (default: CUDA if there is a GPU, else the CPU).
        trust_remote_code: Whether to run source code, of the model or the teacher, that this mhla_hf did not generate.
        progress: Whether to show progress bars.
        command: The shell command that repeats the audit, for the record.

    Returns:
        The content of `out`, a dict with
            - "checks": a list of dicts with "name", "measured" (a description), "value" (number or text), "stderr" (its
              standard error), "tolerance", "verdict" ("ok", "FINDING", "measured" for a number without a tolerance, or
              "not applicable"), "reason" and "details"; what a check does not have is None or empty;
            - "findings": the number of findings;
            - keys that describe the model, teacher, text, hardware, versions and command.

    Raises:
        ValueError, TypeError, OSError: An argument is not valid, or `folder` has no causal language model with a
            tokenizer. A damaged model is a finding instead.
    """
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"folder: got {type(folder).__name__}, expected the folder of a causal language model.")
    if tokens is not None and not is_whole(tokens, MIN_TOKENS):
        raise ValueError(f"tokens: got {tokens!r}, expected a whole number of at least {MIN_TOKENS}.")
    if out is not None:
        check_writable(Path(out), "out")
    subject = _open_subject(folder, text, tokens or MAX_TOKENS, choose_device(device), trust_remote_code)
    if teacher is not None:
        subject.teacher = _load_teacher(teacher, subject)
    subject.progress = progress
    rows = []
    bar = tqdm(CHECKS.items(), unit="check", disable=not progress)
    for name, (measured, check) in bar:
        bar.set_description(f"audit: {name}")
        rows.append(run_check(name, measured, check, subject))
    loaded = subject.loaded
    record = {
        "format_version": FORMAT_VERSION,
        "model": shorten_path(folder),
        "class": subject.config.architectures[0],
        "fingerprint": fingerprint_folder(folder),
        "mhla": getattr(subject.config, "mhla", None),
        "dtype": loaded and str(loaded.dtype).removeprefix("torch."),
        "tokens": loaded and subject.long,
        "rounding": loaded and finite(subject.rounding),
        "text": "the Python language reference" if text is None else shorten_path(text),
        "teacher": teacher and shorten_path(teacher),
        "findings": sum(row["verdict"] == FINDING for row in rows),
        "checks": rows,
        **describe_run(command, subject.device),
    }
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
    return record


def _open_subject(
    folder: PathLike, text: PathLike | None, tokens: int, device: torch.device, trust_remote_code: bool
) -> AuditSubject:
    """Return an `AuditSubject` without the model, that is, load everything but the weights.

    Raise ValueError if the folder has no language model with a tokenizer, or the text is too short.
    """
    path = Path(folder)
    expected = "expected the folder of a causal language model"
    if not path.is_dir():
        raise ValueError(f"folder: got {str(folder)!r}, which does not exist, {expected}.")
    if is_pipeline(path):
        raise ValueError(f"folder: got {str(folder)!r}, a pipeline, {expected}.")
    resolve_model_name(path)
    config = load_config(path, trust_remote_code=trust_remote_code)
    class_name = (config.architectures or ["model of unknown class"])[0]
    if find_class_kind(class_name) != "language":
        raise ValueError(f"folder: got {str(folder)!r}, a {class_name}, {expected}.")
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    content = default_text() if text is None else read_text_file(check_data_path(text, "text"), "text")
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < MIN_TOKENS:
        raise ValueError(f"text: got {str(text)!r}, which has {len(ids)} tokens, expected at least {MIN_TOKENS}.")
    return AuditSubject(path, config, tokenizer, torch.tensor(ids), tokens, device, trust_remote_code)


def _load_teacher(teacher: PathLike, subject: AuditSubject) -> Any:
    """Return the teacher, loaded on the device of the subject. Raise ValueError if it has another vocabulary."""
    trust_remote_code = subject.trust_remote_code
    vocabulary = load_tokenizer(teacher, trust_remote_code=trust_remote_code).get_vocab()
    size = load_config(teacher, trust_remote_code=trust_remote_code).get_text_config().vocab_size
    expected_size = subject.config.get_text_config().vocab_size
    if vocabulary != subject.tokenizer.get_vocab() or size != expected_size:
        start = f"teacher: got {str(teacher)!r} with a vocabulary of {size} tokens"
        raise ValueError(f"{start}, expected the model's of {expected_size}.")
    return load_language_model(teacher, device=subject.device, trust_remote_code=trust_remote_code)[0]


def run_check(
    name: str, measured: str, check: Callable[[AuditSubject], dict[str, Any]], subject: AuditSubject
) -> dict[str, Any]:
    """Run one check, and catch every exception that it raises.

    An exception becomes a finding, except `NotApplicable`, which becomes the verdict "not applicable". A number above its
    tolerance, NaN or infinity is a finding, too.

    Args:
        name: Name of the check.
        measured: Description of what it measures.
        check: Function that returns a dict with "value" and optionally "stderr", "tolerance", "details" and "measured".
        subject: The audited model.

    Returns:
        The dict of this check in "checks" of `audit`.
    """
    row: dict[str, Any] = {
        "name": name, "measured": measured, "value": None, "stderr": None, "tolerance": None, "verdict": OK, "reason": "",
        "details": {},
    }  # fmt: skip
    try:
        row.update(check(subject))
    except NotApplicable as reason:
        return {**row, "verdict": NOT_APPLICABLE, "reason": str(reason)}
    except Exception as error:
        return {**row, "verdict": FINDING, "reason": summarize_error(error)}
    try:
        json.dumps(row, allow_nan=False)
    except ValueError:
        return {**row, "value": None, "stderr": None, "verdict": FINDING, "reason": "NaN or infinity", "details": {}}
    value = row["value"]
    tolerance = row["tolerance"]
    if isinstance(value, str) or isinstance(tolerance, str):
        return row
    if tolerance is None:
        return {**row, "verdict": MEASURED}
    if value <= tolerance:
        return row
    return {**row, "verdict": FINDING, "reason": f"{value:.3g} is more than {tolerance:.3g}"}


def render_audit(record: dict[str, Any]) -> str:
    """Render the result of `audit` as text: a table of the checks, details, checks that do not apply, and findings."""
    lines = [f"{record['model']}: {record['class']}, {record['dtype'] or 'not loaded'}, {record['fingerprint']}"]
    if record["mhla"]:
        window = f", with softmax over the last {2 * record['mhla']['block_size']} tokens at most"
        lines.append(f"MHLA in layers {record['mhla']['layers']}{window * bool(record['mhla'].get('local'))}")
    lines += [f"on {record['tokens']} tokens of {record['text']}, teacher: {record['teacher'] or 'none'}", ""]
    header = ["check", "what was measured", "value", "tolerance", "verdict"]
    rows = [
        [row["name"], row["measured"], _value_with_error(row), _format(row["tolerance"]), row["verdict"]]
        for row in record["checks"]
    ]
    lines += [render_rows(header, rows), "", "logits: the largest difference, relative to the largest logit"]
    if record["rounding"]:
        lines[-1] += f"; {record['dtype']} alone, against float32: {record['rounding']:.2g}"
    details = {row["name"]: row["details"] for row in record["checks"]}
    if shares := details["far part"]:
        by_layer = ", ".join(f"{layer}: {share:.2f}" for layer, share in shares.items())
        lines += ["", textwrap.fill(f"far part by layer: {by_layer}", 120)]
    if gains := details["recall"]:
        table = [[name, *(f"{gain:.2f}" for gain in by_distance.values())] for name, by_distance in gains.items()]
        lines += ["", render_rows(["recall by distance", *gains["model"]], table, left=1)]
    if writing := details["writing"]:
        template = "writing: {texts} texts, {same} the teacher's own; {gap:+.2g} ± {gap_stderr:.2g} nats per token"
        lines += ["", template.format(**writing)]
    findings = [f"{FINDING}: {row['name']}: {row['reason']}" for row in record["checks"] if row["verdict"] == FINDING]
    names_by_reason: dict[str, list[str]] = {}
    for row in record["checks"]:
        if row["verdict"] == NOT_APPLICABLE:
            names_by_reason.setdefault(row["reason"], []).append(row["name"])
    notes = [f"not applicable, as {reason}: {', '.join(names)}" for reason, names in names_by_reason.items()]
    lines += ["", *notes, *findings, f"findings: {len(findings)}"]
    return "\n".join(lines)


def _value_with_error(row: dict[str, Any]) -> str:
    """Format the value of a check, with its standard error if there is one."""
    return _format(row["value"]) + ("" if row["stderr"] is None else f" ± {row['stderr']:.2g}")


def _format(value: float | str | None) -> str:
    """Format a float with three significant digits, and anything else as text; None becomes ""."""
    return f"{value:.3g}" if isinstance(value, float) else str(value or "")
