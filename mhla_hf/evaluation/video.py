"""Score video pipelines with VBench 0.1.5, following its protocol.

vbench needs old versions of its libraries, so it runs in another interpreter, the recipe's `python`. Totals need the scores
of all dimensions; VBench's own script counts a missing one as zero.
"""

import dataclasses
import json
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.file_io import read_json, write_json
from ..checkpoints.fingerprint import hash_file
from ..checkpoints.load import require_extra, wrap_errors
from ..checkpoints.values import at_least, checked, checked_field, read_settings
from .records import Results
from .subjects import PipelineJudge, Sample, Subject, find_subjects, joined_processes, seed_of_sample

logger = logging.getLogger("mhla_hf")
FIND_VBENCH = """
import importlib.metadata, importlib.util, json, os
spec = importlib.util.find_spec("vbench")
if spec is None:
    raise SystemExit("vbench is not installed for this interpreter: pip install vbench==0.1.5")
folder = next(iter(spec.submodule_search_locations))
print(json.dumps([importlib.metadata.version("vbench"), os.path.join(folder, "VBench_full_info.json")]))
"""
RUN_VBENCH = """
import sys, torch
from vbench import VBench
videos, info, out, dimension, device = sys.argv[1:]
bench = VBench(torch.device(device), info, out)
bench.evaluate(videos_path=videos, name=dimension, dimension_list=[dimension], mode="vbench_standard")
"""
# Dimension -> (weight, low, high), in VBench's order. VBench scales each average from low..high to 0..1 and weights it.
UNSCALED = (1, 0.0, 1.0)
QUALITY = {
    "subject_consistency": (1, 0.1462, 1.0),
    "background_consistency": (1, 0.2615, 1.0),
    "temporal_flickering": (1, 0.6293, 1.0),
    "motion_smoothness": (1, 0.706, 0.9975),
    "aesthetic_quality": UNSCALED,
    "imaging_quality": UNSCALED,
    "dynamic_degree": (0.5, 0.0, 1.0),
}
SEMANTIC = {
    **dict.fromkeys(("object_class", "multiple_objects", "human_action", "color", "spatial_relationship"), UNSCALED),
    "scene": (1, 0.0, 0.8222),
    "appearance_style": (1, 0.0009, 0.2855),
    "temporal_style": (1, 0.0, 0.364),
    "overall_consistency": (1, 0.0, 0.364),
}
DIMENSIONS = (*QUALITY, *SEMANTIC)
TOTALS = ("quality", "semantic", "total")


@checked
class VideoProtocol:
    """Settings of a recipe of kind "video": how videos are generated and scored."""

    python: str | Path | None = None  # path or command of a Python interpreter that has vbench; required
    videos: int = checked_field(lambda value: 1 <= value <= 5, "1 to 5 per prompt, of which 5 is VBench's protocol", 5)
    fps: int = at_least(1, 16)  # frames per second of the files
    sampling: dict = dataclasses.field(default_factory=dict)  # further arguments of the pipeline
    samples: str | Path = "out/samples"  # folder for the generated videos, with a subfolder per model


def compute_vbench_totals(averages: Mapping[str, float]) -> dict[str, float]:
    """Return quality, semantic, and total by VBench's cal_final_score.py, from the averages (0 to 1) of all dimensions."""

    def weighted_mean(dimensions: Mapping[str, tuple[float, float, float]]) -> float:
        scaled = [(averages[name] - low) / (high - low) * weight for name, (weight, low, high) in dimensions.items()]
        return sum(scaled) / sum(weight for weight, _, _ in dimensions.values())

    quality, semantic = weighted_mean(QUALITY), weighted_mean(SEMANTIC)
    return dict(zip(TOTALS, (quality, semantic, (quality * 4 + semantic * 1) / 5), strict=True))


def judge_video_pipelines(models: object, args: Any) -> dict[str, Results]:
    """Score video pipelines, reusing known scores. All processes must call it; only the main one has all new scores."""
    protocol = read_settings(VideoProtocol, args.recipe.settings)
    if unknown := sorted(set(args.recipe.tasks) - set(DIMENSIONS)):
        raise ValueError(f"tasks: got {unknown[0]!r}, expected dimensions of VBench: {', '.join(DIMENSIONS)}.")
    bench = Bench(protocol.python)
    subjects = find_subjects(models, args, pipeline=True)
    with joined_processes() as state:
        return {subject.name: _Judge(subject, protocol, state, bench).run() for subject in subjects}


class Bench:
    """vbench in another Python interpreter, given as a path or a command."""

    def __init__(self, python: str | Path | None) -> None:
        if not (executable := python and shutil.which(str(python))):
            raise ValueError(f"settings: python: got {python!r}, expected an interpreter that has vbench.")
        self.python = os.path.abspath(executable)
        self.version, path = json.loads(self.run(FIND_VBENCH).splitlines()[-1])
        self.prompts = json.loads(Path(path).read_text(encoding="utf-8"))
        self.sha256 = hash_file(path)

    def run(self, source: str, *arguments: object) -> str:
        """Run Python source without our PYTHON* variables, and return its stdout. Raise ValueError if it fails."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [self.python, "-c", source, *map(str, arguments)]
        with tempfile.TemporaryDirectory(prefix="mhla_hf-vbench-") as folder:
            process = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        if process.returncode:
            message = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"settings: python: got {self.python!r}, expected a Python that runs vbench ({message}).")
        return process.stdout


class _Judge(PipelineJudge):
    noun, output_type, totals = "videos", "np", TOTALS

    def __init__(self, subject: Subject, protocol: Any, state: Any, bench: Bench) -> None:
        content = [bench.version, bench.sha256, protocol.videos, protocol.fps, protocol.sampling]
        super().__init__(subject, protocol, state, "vbench", content)
        self.bench = bench

    def entries(self, dimension: str) -> list[dict[str, Any]]:
        """Return VBench's prompts for a dimension, only the first `limit` if the evaluation has a limit."""
        return [entry for entry in self.bench.prompts if dimension in entry["dimension"]][: self.args.limit]

    def measure(self, metrics: Sequence[str]) -> None:
        needed = {entry["prompt_en"] for dimension in metrics for entry in self.entries(dimension)}
        prompts = dict.fromkeys(entry["prompt_en"] for entry in self.bench.prompts)
        plan = [
            Sample(f"videos/{prompt}-{i}.mp4", prompt, seed_of_sample(self.seed, 1000 * number + i))
            for number, prompt in enumerate(prompts)
            if prompt in needed
            for i in range(self.protocol.videos)
        ]
        self.make(self.folder / self.task, plan, {"seed": self.seed, "fps": self.protocol.fps}, batch_size=1)
        if self.state.is_main_process:
            for number, dimension in enumerate(metrics, 1):
                logger.info("%s: %s (%d of %d)", self.subject.name, dimension, number, len(metrics))
                self._judge(dimension)
            self._store_totals()

    def _judge(self, dimension: str) -> None:
        started = time.perf_counter()
        entries = self.entries(dimension)
        names = [f"{entry['prompt_en']}-{i}.mp4" for entry in entries for i in range(self.protocol.videos)]
        with tempfile.TemporaryDirectory(prefix="mhla_hf-vbench-") as workspace:
            # A folder with links to these videos alone, because vbench assumes that all files in it have the same suffix.
            folder = Path(workspace, "videos")
            folder.mkdir()
            for name in set(names):
                (folder / name).symlink_to((self.folder / self.task / "videos" / name).resolve())
            info = write_json(Path(workspace, "info.json"), entries)
            self.bench.run(RUN_VBENCH, folder, info, workspace, dimension, self.device)
            with wrap_errors(f"vbench: got no results for {dimension}, expected a score per video"):
                average, videos = (read_json(Path(workspace, f"{dimension}_eval_results.json")) or {})[dimension]
                average, values = float(average), [video["video_results"] for video in videos]
        if len(values) < len(names):
            raise ValueError(f"vbench: got {len(values)} scores for {dimension}, expected {len(names)}, one per video.")
        # In some dimensions, results per video are not numbers, or VBench's score is not their mean: no standard error then.
        numbers = [float(value) for value in values if isinstance(value, (bool, int, float))]
        is_mean = len(numbers) == len(values) > 1 and abs(statistics.fmean(numbers) - average) <= 1e-6
        error = statistics.stdev(numbers) / len(numbers) ** 0.5 if is_mean else None
        scores = {dimension: (average, error, True, len(values))}
        self.subject.store_scores(self.task, scores, self.hash, started, self.device)

    def _store_totals(self) -> None:
        """Store quality, semantic, and total, if they can be computed as VBench does."""
        key = {"task": self.task, "task_hash": self.hash, "limit": None, "seed": self.seed}
        known: Any = [r for r in self.subject.kept.where(**key) if r.metric in DIMENSIONS and r.value is not None]
        if self.args.limit or self.protocol.videos != 5 or len(known) < len(DIMENSIONS):
            logger.info("%s: no totals without all of VBench's videos and dimensions", self.subject.name)
            return
        totals = compute_vbench_totals({record.metric: record.value for record in known})
        samples = sum(record.samples for record in known)
        scores = {name: (value, None, True, samples) for name, value in totals.items()}
        self.subject.store_scores(self.task, scores, self.hash, time.perf_counter(), self.device)

    def save(self, output: Any, path: Path) -> None:
        """Save frames ([frames, height, width, 3] from 0 to 1, or PIL images) as MP4 (H.264), whatever `path` ends in."""
        with require_extra("a video", "diffusers, imageio or imageio-ffmpeg", "videos"):
            import imageio  # noqa: F401, without it diffusers takes OpenCV
            import imageio_ffmpeg  # noqa: F401
            from diffusers.utils import export_to_video
        with tempfile.TemporaryDirectory(prefix="mhla_hf-video-") as folder:
            export_to_video(list(output), os.path.join(folder, "video.mp4"), fps=self.protocol.fps)
            shutil.copyfile(os.path.join(folder, "video.mp4"), path)
