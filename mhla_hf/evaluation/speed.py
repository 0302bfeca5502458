"""Speed and memory of language models by length, as records beside their other scores.

A time is worth something only next to another, so the models of one call are timed by turns, and the records of all of them
carry one hash of who took part; where it differs, the card does not put them side by side.
"""

import time

from ..checkpoints.load import load_language_model
from ..checkpoints.values import at_least, checked, read_settings
from ..speed import DECODE, measure_speed
from .records import Results, hash_of
from .subjects import find_subjects

TASK = "speed"
METRICS = {("forward", "ms"): "forward_ms", (DECODE, "ms"): "decode_ms", (DECODE, "mib"): "cache_mib"}


@checked
class SpeedProtocol:
    """The settings of a recipe of kind "speed", as `measure_speed` takes them. lengths: in tokens."""

    lengths: list[int] | int
    decode_tokens: int = at_least(1, 64)
    rounds: int = at_least(1, 3)

    def validate_lengths(self):
        """At least one, each of a token or more."""
        self.lengths = [self.lengths] if isinstance(self.lengths, int) else self.lengths
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"lengths is {self.lengths!r}; expected whole numbers of tokens")


def judge_speed(models, asked):
    """name -> `Results` of the times. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_settings(SpeedProtocol, asked.recipe.settings)
    subjects = find_subjects(models, asked)
    together = sorted(subject.fingerprint for subject in subjects)
    task_hash = hash_of([together, *vars(protocol).values(), asked.device])
    metrics = [f"{metric}_{length}" for metric in METRICS.values() for length in protocol.lengths]
    if not all(subject.knows(TASK, metric, task_hash) for subject in subjects for metric in metrics):
        started = time.perf_counter()
        how, loaded = {"dtype": asked.dtype, "device": asked.device}, {}
        for subject in subjects:
            loaded[subject.name] = subject.source
            if not subject.loaded:
                loaded[subject.name] = load_language_model(subject.source, **how, **subject.where)[0]
        rows = measure_speed(loaded, **vars(protocol), progress=asked.progress)
        for subject in subjects:
            scores = {
                f"{metric}_{row['length']}": (row[f"{subject.name}_{unit}"], None, False, protocol.rounds)
                for (what, unit), metric in METRICS.items()
                for row in rows
                if row["what"] == what
            }
            subject.keep(TASK, scores, task_hash, started, loaded[subject.name].device)
    return {subject.name: Results(r for r in subject.kept if r.task_hash == task_hash) for subject in subjects}


def speed_of_records(columns):
    """speed.json's content from the records of "softmax" and "mhla" timed together; None where they were not.

    columns: these two names -> list of `Result`.
    """
    tables = {}
    for kind, record in ((kind, record) for kind, records in columns.items() for record in records):
        if record.task == TASK:
            metric, _, length = record.metric.rpartition("_")
            what, unit = next(key for key, name in METRICS.items() if name == metric)
            rows, kinds = tables.setdefault(record.task_hash, ({}, {}))
            row = rows.setdefault((what, int(length)), {"what": what, "length": int(length)})
            row[f"{kind}_{unit}"], kinds[kind] = record.value, record
    for rows, kinds in tables.values():
        if set(kinds) == {"softmax", "mhla"}:
            said = {key: getattr(kinds["mhla"], key) for key in ("hardware", "versions", "seed", "command")}
            return {"rows": [rows[key] for key in sorted(rows)], **said}
    return None
