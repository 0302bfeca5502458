"""The demo with a tiny model that is trained here: teacher, students, scores, figures, and card, without a download.

Each step is what a user would call (`convert`, `distill`, `evaluate`, `write_card`). It writes a file or folder atomically
and is skipped if that exists, so that the same command resumes a stopped run. A folder belongs to one text, one teacher, and
one pair of recipes, and a call with others is refused.
"""

import copy
import dataclasses
import hashlib
import importlib.util
import json
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, write_json, write_text
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.checkpoints.load import load_language_model, no_progress_bars
from mhla_hf.conversion import convert
from mhla_hf.evaluation.recall import choose_words
from mhla_hf.evaluation.records import Results, collect_speed
from mhla_hf.evaluation.runner import evaluate
from mhla_hf.hub.card import check_card, write_card
from mhla_hf.hub.facts import find_license
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import Recipe, read_recipe
from mhla_hf.training.run_folder import RECORD

from .figures import LABELS, plot_loss, plot_recall, plot_speed
from .journey import compare_isolated
from .lookups import add_lookups, start_lookups
from .report import collect, learning_curve, recall_by_distance, render_report
from .text import hold_out, make_tokenizer, read_text

RECIPES = Path(__file__).parent / "recipes"
STUDENTS: dict[str, dict[str, Any]] = {  # settings that differ from the recipe's
    "mhla": {},
    "linear": {"mixing_form": "softmax", "local": None, "mixing_start": "uniform", "learn_mixing": False},
    "hybrid": {},  # a quarter of the KV heads keeps softmax, chosen by gates
}
MODELS = ("teacher", "mhla", "linear", "hybrid", "control")
QUICK = ("teacher", "hybrid", "linear")
TEACHER = Path(__file__).parents[2] / "model_cards" / "checkpoints" / "demo-teacher"
LENGTHS: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
TASK_ITEMS = 30  # held-out texts with lookups
WINDOW = 512  # tokens of a held-out text
DESCRIPTION = "demo.json"
VISIT = "visit.json"
PROMPT = "The following sections describe"
CONTINUATION = 60  # new tokens after `PROMPT`
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


def run_demo(
    out: str | Path | None = None,
    model: str | None = None,
    text: str | None = None,
    seeds: int = 1,
    *,
    full: bool = False,
    plain: bool | None = None,
    license: str | None = None,
    teacher_recipe: str | Path | None = None,
    student_recipe: str | Path | None = None,
    items: int = TASK_ITEMS,
    lengths: Sequence[int] = LENGTHS,
    threads: int = 1,
    control: bool | None = None,
    progress: bool = True,
    command: str | None = None,
) -> dict[str, Any]:
    """Distill MHLA models from a small softmax language model, evaluate them, and share one.

    Args:
        out: Folder to create, or of a run to resume; None: that of `default_folder`. It gets `teacher`, `linear` (plain
            linear attention: uniform, frozen mixing), `hybrid` (a quarter of the KV heads keeps softmax, chosen by gates),
            `results.json`, and three figures.
        model: Folder or Hub id of a softmax model to start from; None: `TEACHER`, which the full demo made.
        text: File, folder, or id of a dataset on the Hub; None: the Python language reference, which is part of every
            Python.
        seeds: Everything is repeated with seeds 0 to `seeds` - 1, the first of which is `out` itself; needs `full`.
        full: Whether to train the teacher first, to train the students twice as long, and to make `mhla` (in all layers)
            as well. Further seeds are in `seed-1`, and so on.
        plain: Whether to train on the text as it is, without lookups between its lines; None: with lookups only in the
            Python language reference.
        license: License of `model`, if its card states none. If neither does, there is no model card.
        teacher_recipe, student_recipe: YAML files; None: the demo's own.
        items: Number of texts with lookups on which models are judged.
        lengths: Numbers of tokens at which speed is measured.
        threads: CPU threads. On a machine that is busy otherwise, two are slower than one.
        control: Whether to make `control` too, the teacher trained further for as many steps as a student, with `full`;
            None: only with several seeds.
        progress: Whether to show progress bars.
        command: Shell command, for the records.

    Returns:
        The content of `results.json`.

    Raises:
        ValueError, TypeError, ImportError: An argument is invalid, or a library is missing; nothing was written.
        OSError: Writing failed.
    """
    _check_call(seeds, threads, full)
    started = time.monotonic()
    out = default_folder(model, text, full, plain) if out is None else out
    torch.set_num_threads(threads)
    models: tuple[str, ...] = QUICK
    if full:
        models = MODELS if control or (control is None and seeds > 1) else MODELS[:-1]
    elif model is None:
        model = str(TEACHER)
    demo = _Demo(
        out=Path(out).expanduser(),
        model=model,
        text=text,
        plain=text is not None if plain is None else plain,
        license=license,
        teacher_recipe=teacher_recipe,
        student_recipe=student_recipe,
        items=items,
        lengths=lengths,
        progress=progress,
        command=command,
        models=models,
    )
    results = demo.run(seeds)
    print(f"\n{render_report(results)}\n")
    demo.say(f"everything is in {demo.out} ({time.monotonic() - started:.0f} s)")
    return results


def default_folder(
    model: str | None = None, text: str | None = None, full: bool = False, plain: bool | None = None
) -> str:
    """Return the folder of a toy demo with these arguments of `run_demo`, such as "out-toy" or "out-toy-MODEL-TEXT"."""
    names = [Path(model).resolve().name] if model else []
    names += [Path(text).resolve().stem] if text else []
    names += ["full"] if full else []
    if plain not in (None, text is not None):
        names.append("plain" if plain else "lookups")
    return "-".join(["out-toy", *(re.sub(r"[^\w.]+", "-", name) for name in names)])


def _check_call(seeds: int, threads: int, full: bool) -> None:
    """Raise ValueError if an argument of `run_demo` is invalid, or ImportError if a library is missing."""
    for name, value in (("seeds", seeds), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}: got {value}, expected a whole number of at least 1.")
    if seeds > 1 and not full:
        raise ValueError(f"seeds: got {seeds}, expected 1, or --full as well.")
    for library, extra in (("accelerate", "train"), ("lm_eval", "eval"), ("matplotlib", "eval")):
        if importlib.util.find_spec(library) is None:
            raise ImportError(f"the demo needs {library}, which is missing: pip install 'mhla_hf[{extra}]'")


def _check_losses(argument: str, recipe: Recipe, expected: list[str]) -> None:
    """Raise ValueError if the stages of a recipe do not have the expected losses."""
    losses = [stage.loss for stage in recipe.stages]
    if losses != expected:
        raise ValueError(f"{argument}: got stages with the losses {losses}, expected {expected}.")


@dataclasses.dataclass
class _Demo:
    """A call of `run_demo`: its arguments, and a method for each step.

    Attributes:
        models: Names of the models to make; the other attributes are arguments of `run_demo`.
    """

    out: Path
    model: str | None
    text: str | None
    plain: bool
    license: str | None
    teacher_recipe: str | Path | None
    student_recipe: str | Path | None
    items: int
    lengths: Sequence[int]
    progress: bool
    command: str | None
    models: tuple[str, ...]

    def __post_init__(self) -> None:
        self.main = "mhla" if "mhla" in self.models else "hybrid"  # the student that is timed and shared
        self.teacher_plan = read_recipe(self.teacher_recipe or RECIPES / "demo_teacher.yaml")
        self.student_plan = read_recipe(self.student_recipe or RECIPES / "demo_student.yaml")
        if self.models == QUICK and self.student_recipe is None:
            halved = [dataclasses.replace(stage, steps=stage.steps // 2) for stage in self.student_plan.stages]
            self.student_plan = dataclasses.replace(self.student_plan, stages=tuple(halved))
        _check_losses("student_recipe", self.student_plan, ["transfer", "logits"])
        _check_losses("teacher_recipe", self.teacher_plan, ["lm"])

    def run(self, seeds: int) -> dict[str, Any]:
        """Run all steps for seeds 0 to `seeds` - 1, and return the content of results.json."""
        with no_progress_bars():
            self.begin()
            for seed in range(seeds):
                self.make_models(seed)
            for seed in range(seeds):
                self.judge(seed)
            results = self.report(seeds)
            self.share()
            self.visit()
        return results

    def say(self, sentence: str) -> None:
        """Print a line of the log."""
        print(sentence, flush=True)

    def begin(self) -> None:
        """Read the text, and create the folder with `data`, or check that it belongs to the same run."""
        text, name = read_text(self.text)
        plans = [dataclasses.asdict(self.teacher_plan), dataclasses.asdict(self.student_plan)]
        self.identity = {
            "model": self.model,
            "text": f"{name}, plain" if self.plain else name,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:32],
            "recipes_sha256": hashlib.sha256(json.dumps(plans, sort_keys=True).encode()).hexdigest()[:32],
            "items": self.items,
        }
        if can_resume(self.out, DESCRIPTION, self.identity, "--out"):
            self.say(f"going on in {self.out}")
        else:
            self._make_folder(text)
        self.train_text = self.out / "data" / "train.txt"
        self.held_out = (self.out / "data" / "heldout.txt").read_text(encoding="utf-8")
        self.tokenizer = AutoTokenizer.from_pretrained(self.out / "data" / "tokenizer", trust_remote_code=False)

    def _make_folder(self, text: str) -> None:
        """Create the folder with both parts of the text and the tokenizer, after a check that the model converts."""
        train, held_out = hold_out(text)
        tokenizer: Any
        if self.model is None:
            settings = self.teacher_plan.settings
            tokenizer = make_tokenizer(train, settings["vocab_size"], settings["max_position_embeddings"])
        else:
            model, tokenizer = load_language_model(self.model, dtype="float32", device="cpu")
            convert(model, **self.student_plan.settings)
        words = choose_words(tokenizer)
        with atomic_folder(self.out) as temporary_path:
            (temporary_path / "data").mkdir()
            train_text = train if self.plain else add_lookups(train, words)
            write_text(temporary_path / "data" / "train.txt", train_text)
            write_text(temporary_path / "data" / "heldout.txt", held_out)
            tokenizer.save_pretrained(temporary_path / "data" / "tokenizer")
            write_json(temporary_path / DESCRIPTION, self.identity)
        self.say(
            f"{self.identity['text']}: {len(train):,} characters to train on, {len(held_out):,} held out; "
            f"{len(tokenizer):,} tokens in the vocabulary"
        )
        if not self.plain:
            sizes = f"the {len(train):,} characters become {len(train_text):,}"
            self.say(f"with lookups between its lines, {sizes} (--plain leaves them out)")

    def folder(self, model: str, seed: int) -> Path:
        """Return the folder of a model of one seed. A teacher that is not trained here is the same for all seeds."""
        root = self.out if seed == 0 or (model == "teacher" and self.model is not None) else self.out / f"seed-{seed}"
        return root / model

    def make_models(self, seed: int) -> None:
        """Steps 1 and 2: make the teacher, the students, and the control."""
        self.say(f"\n[1/5] softmax teacher, seed {seed}")
        folder = self.folder("teacher", seed)
        if self._missing(folder, "config.json"):
            if self.model:
                self._copy_teacher(self.model, folder)
            else:
                self._train_teacher(folder, seed)
        if self._missing(folder, "README.md", quiet=True) and self.model is None:
            write_text(folder / "README.md", TEACHER_CARD)
        self.say(f"\n[2/5] students: convert, then distill from the teacher, seed {seed}")
        teacher = None
        for name in self.models:
            if name in STUDENTS and self._missing(self.folder(name, seed), RECORD):
                teacher = teacher or self._load(self.folder("teacher", seed))
                self._make_student(name, teacher, seed)
        folder = self.folder("control", seed)
        if "control" in self.models and self._missing(folder, RECORD):
            self.say(f"{LABELS['control']}:")
            self._distill(self._load(self.folder("teacher", seed)), None, folder, self._control_plan(), seed)

    def _make_student(self, name: str, teacher: Any, seed: int) -> None:
        """Convert the teacher to one of `STUDENTS`, and distill it."""
        self.say(f"{LABELS[name]}:")
        folder = self.folder(name, seed)
        start = folder.with_name(f"{folder.name}.start")
        settings = {**self.student_plan.settings, **STUDENTS[name]}
        if name == "hybrid":
            student = self._convert_by_gates(teacher, settings, start, seed)
            num_kept = sum(map(len, student.config.mhla_measured["softmax_heads"].values()))
            self.say(f"{num_kept} KV heads keep softmax, before any training: {PROMPT}{self._continue_prompt(student)}")
        else:
            student = convert(copy.deepcopy(teacher), **settings)
            self.say(f"converted, before any training: {PROMPT}{self._continue_prompt(student)}")
        self._distill(student, teacher, folder, self.student_plan, seed)
        shutil.rmtree(start, ignore_errors=True)

    def _convert_by_gates(self, teacher: Any, settings: Mapping[str, Any], start: Path, seed: int) -> Any:
        """Convert the teacher so that a quarter of its KV heads, chosen by gates, keeps softmax.

        Args:
            teacher: The teacher, which stays as it is.
            settings: Settings of `convert`.
            start: Folder in which the model is saved, or is found after an interruption.
            seed: Selects the passages of the text.
        """
        if self._missing(start, "config.json"):
            self.say("measuring which heads miss softmax most")
            options = {"tokenizer": self.tokenizer, "text": self.train_text, "keep": 0.25, "seed": seed}
            student = convert(copy.deepcopy(teacher), **settings, **options, progress=self.progress)
            with atomic_folder(start) as temporary_path:
                student.save_pretrained(temporary_path)
        return self._load(start)

    def _continue_prompt(self, model: Any) -> str:
        """Return the model's greedy continuation of `PROMPT`."""
        ids = self.tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            output = model.eval().generate(ids, max_new_tokens=CONTINUATION, do_sample=False)
        return self.tokenizer.decode(output[0, ids.shape[1] :])

    def _missing(self, folder: Path, file: str, quiet: bool = False) -> bool:
        """Return whether a folder lacks a file. If it has the file, print a line, unless `quiet`."""
        if not (folder / file).exists():
            return True
        if not quiet:
            self.say(f"{folder} is there already")
        return False

    def _load(self, folder: Path) -> Any:
        """Load a language model in fp32."""
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)

    def _train_teacher(self, folder: Path, seed: int) -> None:
        """Train a softmax model from scratch."""
        torch.manual_seed(seed)
        special_ids = {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.eos_token_id}
        settings = {**self.teacher_plan.settings, "vocab_size": len(self.tokenizer)}
        model = LlamaForCausalLM(LlamaConfig(**settings, **special_ids))
        if not self.plain:
            start_lookups(model)
        self.say(f"training a Llama of {model.num_parameters() / 1e6:.2f} M parameters")
        self._distill(model, None, folder, self.teacher_plan, seed)

    def _copy_teacher(self, name: str, folder: Path) -> None:
        """Save the softmax model of a folder or Hub id, in fp32, with its tokenizer and the card of a folder."""
        model, _ = load_language_model(name, dtype="float32", device="cpu")
        with atomic_folder(folder) as temporary_path:
            model.save_pretrained(temporary_path)
            self.tokenizer.save_pretrained(temporary_path)
            card = Path(name) / "README.md"
            if card.is_file():
                shutil.copyfile(card, temporary_path / "README.md")

    def _control_plan(self) -> Recipe:
        """Return the teacher's training with the steps, tokens, and learning rate of the students'."""
        student = self.student_plan.stages[-1]
        stage = dataclasses.replace(
            self.teacher_plan.stages[0],
            name="trained on",
            steps=sum(stage.steps for stage in self.student_plan.stages),
            **{key: getattr(student, key) for key in ("lr", "warmup", "batch_size", "seq_len")},
        )
        return dataclasses.replace(self.student_plan, stages=(stage,))

    def _distill(self, student: Any, teacher: Any, folder: Path, plan: Recipe, seed: int) -> None:
        """Train a model by a recipe, with sequences no longer than its positions; `teacher` is None for the loss "lm"."""
        longest = student.config.max_position_embeddings
        stages = [dataclasses.replace(stage, seq_len=min(stage.seq_len, longest)) for stage in plan.stages]
        options = {"data": self.train_text, "tokenizer": self.tokenizer, "stages": stages, "seed": seed}
        distill(student, teacher, out=folder, progress=self.progress, command=self.command, **options, **plan.run)

    def judge(self, seed: int) -> None:
        """Step 3: score every model on lookups in the held-out text, unless it has been scored."""
        self.say(f"\n[3/5] lookups in the held-out text, by lm-eval, seed {seed}")
        settings = {"lengths": self._window(), "items": self.items, "text": str(self.out / "data" / "heldout.txt")}
        for name in self.models:
            self.say(f"{LABELS[name]}:")
            evaluate(
                self.folder(name, seed), "lookups_recall_*", recipe="recall", settings=settings, progress=self.progress
            )

    def _window(self) -> int:
        """Return the number of tokens of a held-out text."""
        return min(WINDOW, self._config()["max_position_embeddings"])

    @torch.no_grad()
    def _bits_per_byte(self, name: str, seed: int) -> float:
        """Return the bits that a model needs for a byte of the held-out text, read in parts of `_window` tokens."""
        model, window = self._load(self.folder(name, seed)), self._window()
        ids = self.tokenizer(self.held_out, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]
        rows = ids[: len(ids) // window * window].view(-1, window)
        bits = (
            sum(model(input_ids=row[None], labels=row[None]).loss.item() for row in rows) * (window - 1) / math.log(2)
        )
        return bits / sum(len(self.tokenizer.decode(row[1:]).encode()) for row in rows)

    def _config(self) -> dict[str, Any]:
        """Return the configuration of the teacher."""
        return json.loads((self.folder("teacher", 0) / "config.json").read_text(encoding="utf-8"))

    def report(self, seeds: int) -> dict[str, Any]:
        """Step 4: write results.json and the figures, measure speed, and return the content of results.json."""
        self.say("\n[4/5] results, figures, model card")
        folders = {seed: {name: self.folder(name, seed) for name in self.models} for seed in range(seeds)}
        description = {key: self.identity[key] for key in ("model", "text", "text_sha256", "recipes_sha256")}
        if self.model is not None and Path(self.model).exists():
            description["model"] = Path(self.model).name
        bits = {seed: {name: self._bits_per_byte(name, seed) for name in self.models} for seed in range(seeds)}
        results = collect(folders, bits, description, self.command)
        write_json(self.out / "results.json", results)
        curves = {name: learning_curve(self.folder(name, 0)) for name in self.models if name in STUDENTS}
        scores = {name: results["models"][name]["bits_per_byte"]["values"] for name in self.models}
        plot_loss(self.out / "loss.png", curves, scores)
        plot_recall(self.out / "recall.png", {name: recall_by_distance(results, name) for name in self.models})
        speed = self._measure_speed()
        num_parameters = self._load(self.folder("teacher", 0)).num_parameters()
        note = f"models of {num_parameters / 1e6:,.1f} M parameters, batch 1, fp32, {speed['hardware']}"
        plot_speed(self.out / "speed.png", speed["rows"], LABELS[self.main], note)
        self.say(f"{self.out}/results.json, loss.png, recall.png, speed.png")
        return results

    def _measure_speed(self) -> Any:
        """Time the teacher and the main student, and return what `collect_speed` does."""
        folders = [self.folder(name, 0) for name in ("teacher", self.main)]  # "linear" runs the same code as MHLA
        evaluate(folders, recipe="speed", settings={"lengths": list(self.lengths)}, progress=self.progress)
        softmax, mhla = map(Results.read, folders)
        return collect_speed({"softmax": softmax, "mhla": mhla})

    def share(self) -> None:
        """Step 4, last part: write the model card, if a license is known."""
        folder = self.folder(self.main, 0)
        hub_id = self.model if self.model and not Path(self.model).exists() else None
        teacher = self.folder("teacher", 0)
        try:
            find_license(hub_id, teacher, self.license)
        except ValueError as error:
            self.say(f"no model card: {error}")
            return
        others = {"teacher": "teacher", "plain linear": "linear", "teacher trained on": "control"}
        if self.main == "mhla":
            others["hybrid, 1 in 4"] = "hybrid"
        write_card(
            folder,
            name="mhla-demo",
            base_model=hub_id,
            license=self.license,
            compared={label: self.folder(name, 0) for label, name in others.items() if name in self.models},
            about="Made by `make demo ARGS=--toy`, the whole journey on a small machine; too small to be useful.",
        )
        check_card(folder)
        self.say(f"{folder}/README.md: every number checked against the files beside it")

    def visit(self) -> None:
        """Step 5: check that a process that cannot import mhla_hf loads the MHLA model and computes the same logits."""
        self.say("\n[5/5] the MHLA model in a process without mhla_hf")
        folder, path = self.folder(self.main, 0), self.out / VISIT
        fingerprint = fingerprint_folder(folder)
        report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if report is not None and report["model"] == fingerprint:
            self.say(f"{path} is there already")
        else:
            text = self.held_out[:20_000]
            ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"]
            width = min(200, self._config()["max_position_embeddings"], ids.shape[1] // 2)
            ids = ids[:, : 2 * width].reshape(2, width)
            report = {"model": fingerprint, "prompt": PROMPT, **compare_isolated(folder, ids, PROMPT, CONTINUATION)}
            write_json(path, report)
        self.say(f"loaded as {report['class']}: logits equal bit for bit, no weight missing or unexpected")
        self.say(f"  {PROMPT}{report['continuation']}")
