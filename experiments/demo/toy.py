"""The demo with a tiny model that is trained here: teacher, students, scores, and card, without a download.

Each step is what a user would call (`convert`, `distill`, `evaluate`, `write_card`). It writes a file or folder atomically
and is skipped if that exists, so that the same command resumes a stopped run.
"""

import copy
import dataclasses
import hashlib
import importlib.util
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, write_json, write_text
from mhla_hf.checkpoints.load import no_progress_bars
from mhla_hf.conversion import convert
from mhla_hf.evaluation.recall import choose_words
from mhla_hf.evaluation.runner import evaluate
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import Recipe, read_recipe
from mhla_hf.training.run_folder import RECORD

from ..heads import load
from .journey import compare_isolated, missing, save
from .lookups import add_lookups, start_lookups
from .report import LABELS, collect, render_report
from .text import hold_out, make_tokenizer, read_text

RECIPES = Path(__file__).parent / "recipes"
STUDENTS: dict[str, dict[str, Any]] = {  # settings that differ from the recipe's
    "mhla": {},
    "linear": {"mixing_form": "softmax", "windowed": False, "mixing_start": "uniform", "learn_mixing": False},
    "hybrid": {"salient": 0},  # a quarter of the KV heads keeps softmax
}
QUICK, FULL = ("teacher", "hybrid", "linear"), ("teacher", "mhla", "linear", "hybrid")
TEACHER = Path(__file__).parents[2] / "model_cards" / "checkpoints" / "demo-teacher"
ITEMS = 30  # held-out texts with lookups
WINDOW = 512  # tokens that a model reads at once, at most its positions
DESCRIPTION = "demo.json"
PROMPT = "The following sections describe"
CONTINUATION = 60  # new tokens after `PROMPT`
CARD_TITLES = {"teacher": "teacher", "linear": "plain linear", "control": "teacher trained on"}
CARD_TITLES["hybrid"] = "hybrid, 1 in 4"
TEACHER_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: [en]
---
# The demo's softmax teacher

A small Llama, trained by `make demo ARGS="--toy --full"` on the demo's text.
It stands for a real checkpoint; how it was trained is in train.json, how good it is in results.json.
"""


def run_toy(
    out: str | Path | None = None, seeds: int = 1, *, full: bool = False, threads: int = 1, progress: bool = True,
    command: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Distill MHLA models from a small softmax language model, evaluate them, and make the card of one.

    `full` trains the teacher first, trains the students twice as long, and makes `mhla` (in all layers) as well; with
    several seeds also `control`, the teacher trained on for as many steps as a student.
    """
    if seeds < 1:
        raise ValueError(f"seeds: got {seeds}, expected a whole number of at least 1.")
    if seeds > 1 and not full:
        raise ValueError(f"seeds: got {seeds}, expected 1, or --full as well.")
    for library, extra in (("accelerate", "train"), ("lm_eval", "eval")):
        if importlib.util.find_spec(library) is None:
            raise ImportError(f"the demo needs {library}, which is missing: pip install 'mhla_hf[{extra}]'")
    started = time.monotonic()
    torch.set_num_threads(threads)
    out = Path(out or ("out-toy-full" if full else "out-toy")).expanduser()
    with no_progress_bars():
        results = Toy(out, full, seeds, progress, command).run()
    print(f"\n{render_report(results)}\n\neverything is in {out} ({time.monotonic() - started:.0f} s)")
    return results


@dataclasses.dataclass
class Toy:
    out: Path
    full: bool
    seeds: int
    progress: bool
    command: str | None

    def __post_init__(self) -> None:
        self.main = "mhla" if self.full else "hybrid"  # the student that is shared
        self.models = (*FULL, *(["control"] if self.seeds > 1 else [])) if self.full else QUICK
        self.teacher_plan = read_recipe(RECIPES / "demo_teacher.yaml")
        self.student_plan = read_recipe(RECIPES / "demo_student.yaml")
        if not self.full:
            halved = [dataclasses.replace(stage, steps=stage.steps // 2) for stage in self.student_plan.stages]
            self.student_plan = dataclasses.replace(self.student_plan, stages=tuple(halved))
        student = self.student_plan.stages[-1]
        stage = dataclasses.replace(  # the teacher's training with the students' steps, tokens, and learning rate
            self.teacher_plan.stages[0],
            name="trained on",
            steps=sum(stage.steps for stage in self.student_plan.stages),
            **{key: getattr(student, key) for key in ("lr", "warmup", "batch_size", "seq_len")},
        )
        self.control_plan = dataclasses.replace(self.student_plan, stages=(stage,))
        self.window = min(WINDOW, self.teacher_plan.settings["max_position_embeddings"])  # tokens of a held-out text

    def run(self) -> dict[str, Any]:
        self.begin()
        for seed in range(self.seeds):
            self.make_models(seed)
        settings = {"lengths": self.window, "items": ITEMS, "text": str(self.out / "data" / "heldout.txt")}
        for seed in range(self.seeds):
            print(f"\n[3/5] lookups in the held-out text, by lm-eval, seed {seed}", flush=True)
            for name in self.models:  # unless it has been scored
                folder = self.folder(name, seed)
                evaluate(folder, "lookups_recall_*", recipe="recall", settings=settings, progress=self.progress)
        print("\n[4/5] results and model card", flush=True)
        bits = {seed: {name: self.bits_per_byte(name, seed) for name in self.models} for seed in range(self.seeds)}
        folders = {seed: {name: self.folder(name, seed) for name in self.models} for seed in range(self.seeds)}
        results = collect(folders, bits, self.identity, self.command)
        write_json(self.out / "results.json", results)
        folder = self.folder(self.main, 0)
        compared = {CARD_TITLES[name]: self.folder(name, 0) for name in self.models if name != self.main}
        about = "Made by `make demo ARGS=--toy`, the whole journey on a small machine; too small to be useful."
        write_card(folder, name="mhla-demo", compared=compared, about=about)
        check_card(folder)
        print(f"{folder}/README.md: every number checked against the files beside it", flush=True)
        print("\n[5/5] the MHLA model in a process without mhla_hf", flush=True)
        ids = self.tokenizer(self.held_out, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"]
        width = min(200, self.window, ids.shape[1] // 2)
        report = compare_isolated(folder, ids[:, : 2 * width].view(2, width))
        print(f"loaded as {report['class']}: logits equal bit for bit, no weight missing or unexpected")
        return results

    def begin(self) -> None:
        """Create the folder with both parts of the text and the tokenizer, or check that it belongs to the same run."""
        text, name = read_text()
        plans = [dataclasses.asdict(self.teacher_plan), dataclasses.asdict(self.student_plan)]
        self.identity = {
            "model": None if self.full else TEACHER.name,
            "text": name,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:32],
            "recipes_sha256": hashlib.sha256(json.dumps(plans, sort_keys=True).encode()).hexdigest()[:32],
        }
        self.train_text = self.out / "data" / "train.txt"
        if can_resume(self.out, DESCRIPTION, self.identity, "--out"):
            print(f"going on in {self.out}", flush=True)
        else:
            train, held_out = hold_out(text)
            if self.full:
                settings = self.teacher_plan.settings
                tokenizer = make_tokenizer(train, settings["vocab_size"], settings["max_position_embeddings"])
            else:
                tokenizer = AutoTokenizer.from_pretrained(TEACHER, trust_remote_code=False)
            train_text = add_lookups(train, choose_words(tokenizer))
            with atomic_folder(self.out) as temporary_path:
                (temporary_path / "data").mkdir()
                write_text(temporary_path / "data" / "train.txt", train_text)
                write_text(temporary_path / "data" / "heldout.txt", held_out)
                tokenizer.save_pretrained(temporary_path / "data" / "tokenizer")
                write_json(temporary_path / DESCRIPTION, self.identity)
            print(f"{name}: {len(train):,} characters to train on, {len(held_out):,} held out;")
            print(f"with lookups between its lines, {len(train_text):,} characters", flush=True)
        self.held_out = (self.out / "data" / "heldout.txt").read_text(encoding="utf-8")
        self.tokenizer = AutoTokenizer.from_pretrained(self.out / "data" / "tokenizer", trust_remote_code=False)

    def folder(self, model: str, seed: int) -> Path:
        return (self.out if seed == 0 else self.out / f"seed-{seed}") / model

    def make_models(self, seed: int) -> None:
        """Steps 1 and 2: make the teacher, the students, and the control."""
        print(f"\n[1/5] softmax teacher, seed {seed}", flush=True)
        folder = self.folder("teacher", seed)
        if missing(folder / "config.json"):
            if self.full:  # from scratch, with heads that answer lookups
                torch.manual_seed(seed)
                special_ids = {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.eos_token_id}
                settings = {**self.teacher_plan.settings, "vocab_size": len(self.tokenizer), **special_ids}
                model = LlamaForCausalLM(LlamaConfig(**settings))
                start_lookups(model)
                print(f"training a Llama of {model.num_parameters() / 1e6:.2f} M parameters", flush=True)
                self.distill(model, None, folder, self.teacher_plan, seed)
            else:
                save(folder, load(TEACHER), self.tokenizer)
        if not (folder / "README.md").exists():
            write_text(folder / "README.md", TEACHER_CARD)
        print(f"\n[2/5] students: convert, then distill from the teacher, seed {seed}", flush=True)
        teacher = load(folder)
        for name in (name for name in self.models if name != "teacher"):
            folder = self.folder(name, seed)
            if missing(folder / RECORD):
                print(f"{LABELS[name]}:", flush=True)
                if name == "control":
                    self.distill(teacher, None, folder, self.control_plan, seed)
                else:
                    self.make_student(name, teacher, folder, seed)

    def make_student(self, name: str, teacher: Any, folder: Path, seed: int) -> None:
        """Convert the teacher to one of `STUDENTS`, and distill it. A start that is measured is kept until then."""
        start = folder.with_name(f"{folder.name}.start")
        settings = {**self.student_plan.settings, **STUDENTS[name]}
        if name == "hybrid":
            settings |= {"tokenizer": self.tokenizer, "text": self.train_text, "keep": 0.25, "seed": seed}
            settings["progress"] = self.progress
        if missing(start):
            with atomic_folder(start) as temporary_path:
                convert(copy.deepcopy(teacher), **settings).save_pretrained(temporary_path)
        student = load(start)
        ids = self.tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            output = student.generate(ids, max_new_tokens=CONTINUATION, do_sample=False)
        continuation = self.tokenizer.decode(output[0, ids.shape[1] :])
        print(f"converted, before any training: {PROMPT}{continuation}", flush=True)
        self.distill(student, teacher, folder, self.student_plan, seed)
        shutil.rmtree(start, ignore_errors=True)

    def distill(self, student: Any, teacher: Any, folder: Path, plan: Recipe, seed: int) -> None:
        """Train a model by a recipe; `teacher` is None for the loss "lm"."""
        options = {"data": self.train_text, "tokenizer": self.tokenizer, "stages": plan.stages, "seed": seed}
        distill(student, teacher, out=folder, progress=self.progress, command=self.command, **options, **plan.run)

    @torch.no_grad()
    def bits_per_byte(self, name: str, seed: int) -> float:
        """Return the bits that a model needs for a byte of the held-out text, read in parts of `window` tokens."""
        model, window = load(self.folder(name, seed)), self.window
        ids = self.tokenizer(self.held_out, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]
        rows = ids[: len(ids) // window * window].view(-1, window)
        nats = (window - 1) * sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in rows)
        return nats / math.log(2) / sum(len(self.tokenizer.decode(row[1:]).encode()) for row in rows)
