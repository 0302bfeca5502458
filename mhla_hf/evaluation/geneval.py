"""GenEval (arXiv 2310.11513): images laid out as its own script wants them, judged by that script in its own interpreter.

Nothing of it is in this package: it needs an object detector and an old stack of its own. Unusual: the score is computed
from the script's JSON lines as its summary does (mean over the kinds of prompt of the share of right images), and refused
while images are missing.
"""

import json
import subprocess
import time
from pathlib import Path

from ..checkpoints.files import write_text
from .image_metrics import share_error
from .samples import Sample, claim_folder, hash_of, plan_hash, read_json_lines, seed_of_sample

TASK = "geneval"


def geneval_plan(rows, images, seed):
    """`Sample`s in GenEval's layout, `00012/samples/0003.png`, for the rows of its evaluation_metadata.jsonl."""
    return [
        Sample(f"{row:05d}/samples/{index:04d}.png", rows[row]["prompt"], seed_of_sample(seed, row * images + index))
        for row in range(len(rows))
        for index in range(images)
    ]


def geneval_scores(found, expected):
    """metric -> (value, standard error, higher is better, images) of the script's results, a list of dicts.

    expected: number of images; ValueError when the results are of another. "overall" is the mean over tags.
    """
    if len(found) != expected:
        raise ValueError(f"GenEval judged {len(found)} images of {expected}: run it again when all are there")
    tags = {}
    for row in found:
        if not isinstance(row.get("correct"), bool) or not isinstance(row.get("tag"), str):
            raise ValueError(f"GenEval: a result is {row!r:.80}; expected 'tag' and 'correct'")
        tags.setdefault(row["tag"], []).append(row["correct"])
    scores = {tag: (sum(right) / len(right), len(right)) for tag, right in tags.items()}
    errors = [share_error(share, count) for share, count in scores.values()]
    overall = sum(share for share, _ in scores.values()) / len(scores)
    error = sum(error**2 for error in errors) ** 0.5 / len(errors)
    kept = {tag: (share, share_error(share, count), True, count) for tag, (share, count) in scores.items()}
    return {"overall": (overall, error, True, expected), **kept}


def judge_geneval(judge):
    """Sample, run the script, keep the records. judge: an image `PipelineJudge`."""
    protocol, asked = judge.protocol, judge.asked
    rows = read_json_lines(protocol.geneval_prompts)
    if not all(isinstance(row, dict) and isinstance(row.get("prompt"), str) for row in rows):
        raise ValueError(f"geneval_prompts: {protocol.geneval_prompts!r} has a line without 'prompt'")
    rows = rows[: asked.limit] if asked.limit else rows
    task_hash = hash_of(["geneval", rows, protocol.geneval_images, protocol.sampling])
    if judge.known(TASK, "overall", task_hash):
        return
    started = time.perf_counter()
    plan = geneval_plan(rows, protocol.geneval_images, judge.seed)
    folder = judge.folder / f"geneval-{len(rows)}"
    if judge.processes.first:
        identity = {**judge.identity(), "sampling": {"output_type": "pil", **protocol.sampling}}
        claim_folder(folder, {**identity, "plan": plan_hash(plan)})
        for number, row in enumerate(rows):
            (folder / f"{number:05d}" / "samples").mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{number:05d}" / "metadata.jsonl", json.dumps(row))
    judge.processes.wait()
    judge.make(folder, plan, f"{judge.subject.name}: GenEval")
    if judge.processes.first:
        judge.keep(TASK, geneval_scores(_run(protocol, folder), len(plan)), task_hash, started)


def _run(protocol, folder):
    """The script's results for the images in `folder`."""
    out = Path(folder).with_name(f"{Path(folder).name}-results.jsonl")
    command = [protocol.geneval_python, protocol.geneval_script, str(folder), "--outfile", str(out)]
    command += ["--model-path", str(protocol.geneval_detector)] if protocol.geneval_detector else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not out.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"GenEval's script failed ({last}): {' '.join(command)}")
    return read_json_lines(out)
