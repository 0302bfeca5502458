"""Judging video pipelines with VBench 0.1.5: its prompts, its file names, its code in its own interpreter, its totals.

Videos are named by VBench's protocol, `<prompt>-<index>.mp4`, made resumably and on several processes. vbench needs
an old stack of its own, so it runs in the interpreter that the recipe's `python` names, from which its prompts are read.
A total needs all dimensions (upstream's script takes a missing one for zero).
"""

import dataclasses
import functools
import importlib.util
import json
import logging
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from ..checkpoints.file_io import write_json
from ..checkpoints.fingerprint import hash_file, hash_json
from ..checkpoints.load import wrap_errors
from ..checkpoints.values import at_least, checked, read_settings
from .records import Results
from .subjects import PipelineJudge, Sample, find_subjects, joined_processes, seed_of_sample

logger = logging.getLogger("mhla_hf")
TASK = "vbench"
ABOUT = """
import importlib.metadata, importlib.util, json, os
found = importlib.util.find_spec("vbench")
if found is None:
    raise SystemExit("vbench is not installed for this interpreter: pip install vbench==0.1.5")
folder = next(iter(found.submodule_search_locations))
print(json.dumps([importlib.metadata.version("vbench"), os.path.join(folder, "VBench_full_info.json")]))
"""
JUDGE = """
import sys, torch
from vbench import VBench
videos, info, out, dimension, device = sys.argv[1:]
bench = VBench(torch.device(device), info, out)
bench.evaluate(videos_path=videos, name=dimension, dimension_list=[dimension], mode="vbench_standard")
"""
# dimension -> (weight, least, most): what upstream scales a dimension's average by, in upstream's order
WHOLE = (1, 0.0, 1.0)
QUALITY = {
    "subject_consistency": (1, 0.1462, 1.0),
    "background_consistency": (1, 0.2615, 1.0),
    "temporal_flickering": (1, 0.6293, 1.0),
    "motion_smoothness": (1, 0.706, 0.9975),
    "aesthetic_quality": WHOLE,
    "imaging_quality": WHOLE,
    "dynamic_degree": (0.5, 0.0, 1.0),
}
SEMANTIC = {
    **dict.fromkeys(("object_class", "multiple_objects", "human_action", "color", "spatial_relationship"), WHOLE),
    "scene": (1, 0.0, 0.8222),
    "appearance_style": (1, 0.0009, 0.2855),
    "temporal_style": (1, 0.0, 0.364),
    "overall_consistency": (1, 0.0, 0.364),
}
DIMENSIONS = (*QUALITY, *SEMANTIC)
TOTALS = ("quality", "semantic", "total")


@checked
class VideoProtocol:
    """How videos are made and judged; the settings of a recipe of kind "video".

    python: the interpreter that has vbench. videos: per prompt; VBench judges five. fps: of the files. sampling: further
    arguments of the pipeline. samples: folder to make; each model has its own in it.
    """

    python: str | Path | None = None
    videos: int = at_least(1, 5)
    fps: int = at_least(1, 16)
    sampling: dict = dataclasses.field(default_factory=dict)
    samples: str | Path = "out/samples"

    def validate_videos(self):
        """At most what VBench judges."""
        if self.videos > 5:
            raise ValueError(f"videos is {self.videos}; expected 1 to 5, of which 5 is VBench's protocol")


def vbench_totals(averages):
    """{"quality", "semantic", "total"} from the sixteen averages, 0 to 1, as upstream's cal_final_score.py computes them.

    averages: of each dimension over its videos, all of them.
    """
    parts = []
    for part in (QUALITY, SEMANTIC):
        scaled = [(averages[name] - least) / (most - least) * weight for name, (weight, least, most) in part.items()]
        parts.append(sum(scaled) / sum(weight for weight, _, _ in part.values()))
    return dict(zip(TOTALS, (*parts, (parts[0] * 4 + parts[1] * 1) / 5), strict=True))


def judge_video_pipelines(models, asked):
    """name -> `Results` of what was asked for. models: as `evaluate` takes them. asked: an `Asked`."""
    protocol = read_settings(VideoProtocol, asked.recipe.settings)
    if unknown := sorted(set(asked.recipe.tasks) - set(DIMENSIONS)):
        raise ValueError(f"task {unknown[0]!r} is no dimension of VBench; expected {', '.join(DIMENSIONS)}")
    bench = Bench(protocol.python)
    subjects = find_subjects(models, asked, pipeline=True)
    with joined_processes() as state:
        return {subject.name: _Judge(subject, asked, protocol, state, bench).run() for subject in subjects}


class Bench:
    """The vbench of another interpreter: `version`, `prompts` (its list of dicts) and how to run it."""

    def __init__(self, python):
        self.python = python and shutil.which(str(Path(python).resolve() if Path(python).is_file() else python))
        if not self.python:
            raise ValueError(f"settings: python is {python!r}; expected the interpreter that has vbench installed")
        self.version, path = json.loads(self._run(ABOUT).splitlines()[-1])
        self.prompts, self.sha256 = json.loads(Path(path).read_text(encoding="utf-8")), hash_file(path)

    def _run(self, source, *arguments):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        command = [self.python, "-c", source, *map(str, arguments)]
        with tempfile.TemporaryDirectory(prefix="mhla_hf-vbench-") as place:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=place)
        if done.returncode:
            complaint = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"python {self.python!r}: vbench failed: {complaint}")
        return done.stdout

    def judge(self, dimension, entries, videos, device):
        """(average, values of the videos) of a dimension. videos: paths of those of `entries`."""
        with tempfile.TemporaryDirectory(prefix="mhla_hf-vbench-") as place:
            folder = Path(place, "videos")  # of its own: vbench takes the ending of any file it meets for that of all
            folder.mkdir()
            for video in videos:
                (folder / video.name).symlink_to(video.resolve())
            self._run(JUDGE, folder, write_json(Path(place, "info.json"), entries), place, dimension, device)
            with wrap_errors(f"vbench gave no results for {dimension}"):
                results = Path(place, f"{dimension}_eval_results.json").read_text(encoding="utf-8")
                average, found = json.loads(results)[dimension]
                return float(average), [video["video_results"] for video in found]


class _Judge(PipelineJudge):
    """One model on VBench."""

    def __init__(self, subject, asked, protocol, state, bench):
        super().__init__(subject, asked, protocol, state)
        self.bench = bench
        self.hash = hash_json([bench.version, bench.sha256, protocol.videos, protocol.fps, protocol.sampling])

    def entries(self, dimension):
        """VBench's own list for a dimension, the first `limit` of it where there is a limit."""
        return [entry for entry in self.bench.prompts if dimension in entry["dimension"]][: self.asked.limit]

    def run(self):
        """The scores asked for, and the totals when all dimensions are there."""
        wanted = self.asked.recipe.tasks
        missing = [name for name in wanted if not self.subject.knows(TASK, name, self.hash)]
        if missing:
            self._make(missing)
        if self.state.is_main_process:
            for number, dimension in enumerate(missing, 1):
                logger.info("%s: %s (%d of %d)", self.subject.name, dimension, number, len(missing))
                self._judge(dimension)
            self._keep_totals()
        shown = {(TASK, name, self.asked.limit) for name in (*wanted, *TOTALS)}
        return Results(r for r in self.subject.kept if (r.task, r.metric, r.limit) in shown)

    def _make(self, dimensions):
        """Videos of all prompts of the dimensions that are missing."""
        needed = {entry["prompt_en"] for dimension in dimensions for entry in self.entries(dimension)}
        prompts = dict.fromkeys(entry["prompt_en"] for entry in self.bench.prompts)
        plan = [
            Sample(f"videos/{prompt}-{i}.mp4", prompt, seed_of_sample(self.seed, 1000 * number + i))
            for number, prompt in enumerate(prompts)
            if prompt in needed
            for i in range(self.protocol.videos)
        ]
        sampling, fps = {"output_type": "np", **self.protocol.sampling}, self.protocol.fps
        how = {"batch_size": 1, "what": f"{self.subject.name}: videos"}
        save = functools.partial(save_video, fps=fps)
        self.make(self.folder / TASK, plan, {"seed": self.seed, "fps": fps}, sampling, save, **how)

    def _judge(self, dimension):
        started, entries = time.perf_counter(), self.entries(dimension)
        names = [f"{entry['prompt_en']}-{i}.mp4" for entry in entries for i in range(self.protocol.videos)]
        videos = [self.folder / TASK / "videos" / name for name in set(names)]
        average, values = self.bench.judge(dimension, entries, videos, self.device)
        if len(values) < len(names):
            raise ValueError(f"vbench judged {len(values)} of {len(names)} videos for {dimension}")
        scores = {dimension: (average, _spread(average, values), True, len(values))}
        self.subject.keep(TASK, scores, self.hash, started, self.device)

    def _keep_totals(self):
        """Quality, semantic and total; none of them for a part of the prompts or with other than five videos each."""
        wanted = (TASK, self.hash, None, self.seed)
        found = {r.metric: r for r in self.subject.kept if (r.task, r.task_hash, r.limit, r.seed) == wanted}
        averages = {name: found[name].value for name in DIMENSIONS if name in found and found[name].value is not None}
        if self.asked.limit or self.protocol.videos != 5 or len(averages) < len(DIMENSIONS):
            logger.info("%s: no total for a part of VBench's videos or dimensions", self.subject.name)
        elif (totals := vbench_totals(averages)) != {name: found[name].value for name in TOTALS if name in found}:
            samples = sum(found[name].samples for name in DIMENSIONS)
            scores = {name: (value, None, True, samples) for name, value in totals.items()}
            self.subject.keep(TASK, scores, self.hash, time.perf_counter(), self.device)


def _spread(average, values):
    """Standard error of the mean of the videos' values, where vbench's average is that mean; else None."""
    numbers = [float(value) for value in values if isinstance(value, (bool, int, float))]
    if len(numbers) < 2 or len(numbers) != len(values) or abs(statistics.fmean(numbers) - average) > 1e-6:
        return None
    return statistics.stdev(numbers) / len(numbers) ** 0.5


def save_video(frames, path, fps):
    """Frames (`[F, H, W, 3]`, 0 to 1, or PIL images) as an MP4 file (H.264) at `path`, whatever its ending."""
    from diffusers.utils import export_to_video

    for library in ("imageio", "imageio_ffmpeg"):
        if importlib.util.find_spec(library) is None:
            raise ImportError(f"videos need {library}, which is missing: pip install 'mhla_hf[videos]'")
    with tempfile.TemporaryDirectory(prefix="mhla_hf-video-") as place:
        export_to_video(list(frames), os.path.join(place, "video.mp4"), fps=fps)
        shutil.copyfile(os.path.join(place, "video.mp4"), path)
