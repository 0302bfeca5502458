"""audit(): is a saved language model what it should be, and what its card says? One page for somebody who never saw it.

`audit_checks.py` has the checks. One that fails is a finding and does not stop the others, whatever it raises: the files and
the code of a checkpoint are somebody's.
"""

import json
import textwrap
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..analysis.inputs import default_text
from ..checkpoints.files import write_json
from ..checkpoints.fingerprint import fingerprint_folder
from ..checkpoints.load import (
    check_model_name,
    choose_device,
    first_line,
    is_pipeline,
    kind_of_class,
    load_config,
    load_language_model,
    load_tokenizer,
)
from ..checkpoints.machine import describe_run
from ..data import place_of, read_text_file
from ..evaluation.records import finite, render_rows
from ..evaluation.subjects import check_writable, shown_path
from ..nn.settings import is_whole
from .audit_checks import CHECKS, MOST, Audited, NotApplicable

FORMAT_VERSION = 1
LEAST = 64  # tokens of a text
OK, FINDING, MEASURED, NOT_APPLICABLE = "ok", "FINDING", "measured", "not applicable"


def audit(
    folder: str | Path, *, teacher: str | Path | None = None, text: str | Path | None = None, tokens: int | None = None,
    out: str | Path | None = None, device: torch.device | str | None = None, trust_remote_code: bool = False,
    progress: bool = True, command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Look at a saved causal language model, MHLA or any other, from its files to what it writes.

    Args:
        folder: of the model with its tokenizer. teacher: folder or Hub id of the model that it was made from, or of another
            with the same vocabulary. text: a text file (default: the end of the Python language reference).
        tokens: at once at most, at least 64; None: four times the trained length, and 8,192 at most.
        out: a JSON file to write; its folder is made. device: as torch names it; None: CUDA when there is one.
        trust_remote_code: run source from the folder or the teacher's that is not what this mhla_hf makes.

    Returns:
        dict, what the JSON file holds: "checks", a list of {"name", "measured" (what), "value" (number or text), "stderr",
        "tolerance", "verdict" ("ok", "FINDING", "measured": a number without a bound, "not applicable"), "reason",
        "details"}; "findings", how many; what was audited, beside what, and on what; hardware, versions, command.

    Raises:
        ValueError, OSError: one sentence: a wrong argument, or a folder that is no causal language model with a tokenizer. A
        damaged one is a finding.
    """
    if not isinstance(folder, (str, Path)):
        raise TypeError(f"folder: got {type(folder).__name__}, expected the folder of a causal language model")
    if tokens is not None and not is_whole(tokens, LEAST):
        raise ValueError(f"tokens: got {tokens!r}, expected a whole number of at least {LEAST}")
    if out is not None:
        check_writable(Path(out))
    subject = _open(folder, text, tokens or MOST, choose_device(device), trust_remote_code)
    if teacher is not None:
        subject.teacher = _load_teacher(teacher, subject)
    subject.progress = progress
    rows, bar = [], tqdm(CHECKS.items(), unit="check", disable=not progress)
    for name, (what, measure) in bar:
        bar.set_description(f"audit: {name}")
        rows.append(run_check(name, what, measure, subject))
    loaded, count = subject.loaded, sum(row["verdict"] == FINDING for row in rows)
    record = {"format_version": FORMAT_VERSION, "model": shown_path(folder), "class": subject.config.architectures[0]}
    record |= {"fingerprint": fingerprint_folder(folder), "mhla": getattr(subject.config, "mhla", None)}
    record |= {"dtype": loaded and str(loaded.dtype).removeprefix("torch."), "tokens": loaded and subject.long}
    record |= {"rounding": loaded and finite(subject.rounding)}
    record |= {"text": "the Python language reference" if text is None else shown_path(text)}
    record |= {"teacher": teacher and shown_path(teacher), "findings": count, "checks": rows}
    record |= describe_run(command, subject.device)
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
    return record


def _open(folder, text, tokens, device, trust_remote_code) -> Audited:
    """Everything but the weights. ValueError, OSError: it is no language model with a tokenizer, or there is no text."""
    place, wanted = Path(folder), "expected the folder of a causal language model"
    if not place.is_dir():
        raise ValueError(f"folder {str(folder)!r} is not here; {wanted}")
    if is_pipeline(place):
        raise ValueError(f"folder {str(folder)!r} is a pipeline; {wanted}")
    check_model_name(place)
    config = load_config(place, trust_remote_code=trust_remote_code)
    named = (config.architectures or ["model of unknown class"])[0]
    if kind_of_class(named) != "language":
        raise ValueError(f"folder {str(folder)!r} is a {named}; {wanted}")
    tokenizer = load_tokenizer(place, trust_remote_code=trust_remote_code)
    written = default_text() if text is None else read_text_file(place_of(text, "text"), "text")
    ids = tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < LEAST:
        raise ValueError(f"text: {str(text)!r} has {len(ids)} tokens, expected at least {LEAST}")
    return Audited(place, config, tokenizer, torch.tensor(ids), tokens, device, trust_remote_code)


def _load_teacher(teacher, subject):
    """The teacher, on the same device. ValueError: it cannot be loaded, or has another vocabulary."""
    how = {"trust_remote_code": subject.trust_remote_code}
    both = load_tokenizer(teacher, **how), subject.tokenizer
    sizes = [config.get_text_config().vocab_size for config in (load_config(teacher, **how), subject.config)]
    if both[0].get_vocab() != both[1].get_vocab() or sizes[0] != sizes[1]:
        found = f"has a vocabulary of {sizes[0]} tokens, which is not the model's of {sizes[1]}"
        raise ValueError(f"teacher {str(teacher)!r} {found}; expected the same")
    return load_language_model(teacher, device=subject.device, **how)[0]


def run_check(name, what, measure, subject) -> dict:
    """The row of one check; see `audit`."""
    row = {"name": name, "measured": what, "value": None, "stderr": None, "tolerance": None}
    row |= {"verdict": OK, "reason": "", "details": {}}
    try:
        row |= measure(subject)
    except NotApplicable as reason:
        return row | {"verdict": NOT_APPLICABLE, "reason": str(reason)}
    except Exception as error:  # see the top of this file
        return row | {"verdict": FINDING, "reason": first_line(error)}
    try:
        json.dumps(row, allow_nan=False)
    except ValueError:
        return row | {"value": None, "stderr": None, "verdict": FINDING, "reason": "NaN or infinity", "details": {}}
    value, tolerance = row["value"], row["tolerance"]
    if isinstance(value, str) or isinstance(tolerance, str):
        return row
    if tolerance is None:
        return row | {"verdict": MEASURED}
    return (
        row if value <= tolerance else row | {"verdict": FINDING, "reason": f"{value:.3g} is more than {tolerance:.3g}"}
    )


def render_audit(record) -> str:
    """The page: the table of the checks, recall by distance, why each finding is one, and what was not applicable."""
    lines = [f"{record['model']}: {record['class']}, {record['dtype'] or 'not loaded'}, {record['fingerprint']}"]
    if record["mhla"]:
        window = f", with softmax over the last {2 * record['mhla']['block_size']} tokens at most"
        lines.append(f"MHLA in layers {record['mhla']['layers']}{window * bool(record['mhla'].get('local'))}")
    lines += [f"on {record['tokens']} tokens of {record['text']}, teacher: {record['teacher'] or 'none'}", ""]
    header = ["check", "what was measured", "value", "tolerance", "verdict"]
    rows = [
        [row["name"], row["measured"], _value(row), _short(row["tolerance"]), row["verdict"]]
        for row in record["checks"]
    ]
    lines += [render_rows(header, rows), "", "logits differ by: the most, as a share of the largest logit"]
    if record["rounding"]:
        lines[-1] += f"; {record['dtype']} alone, against float32: {record['rounding']:.2g}"
    details = {row["name"]: row["details"] for row in record["checks"]}
    if shares := details["far part"]:
        said = ", ".join(f"{layer}: {share:.2f}" for layer, share in shares.items())
        lines += ["", textwrap.fill(f"far part by layer: {said}", 120)]
    if gains := details["recall"]:
        table = [[name, *(f"{gain:.2f}" for gain in own.values())] for name, own in gains.items()]
        lines += ["", render_rows(["recall by distance", *gains["model"]], table, left=1)]
    if written := details["writing"]:
        said = "writing: {texts} texts, {same} the teacher's own; {gap:+.2g} ± {gap_stderr:.2g} nats per token"
        lines += ["", said.format(**written)]
    found = [f"{FINDING}: {row['name']}: {row['reason']}" for row in record["checks"] if row["verdict"] == FINDING]
    reasons = {}
    for row in record["checks"]:
        if row["verdict"] == NOT_APPLICABLE:
            reasons.setdefault(row["reason"], []).append(row["name"])
    notes = [f"not applicable, as {reason}: {', '.join(names)}" for reason, names in reasons.items()]
    lines += ["", *notes, *found, f"findings: {len(found)}"]
    return "\n".join(lines)


def _value(row) -> str:
    """The cell of a value, with its standard error."""
    return _short(row["value"]) + ("" if row["stderr"] is None else f" ± {row['stderr']:.2g}")


def _short(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value or ""
