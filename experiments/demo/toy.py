"""The toy: a tiny softmax teacher, MHLA students, scores, figures, card, a visitor's load; nothing is downloaded.

Nothing here is special to the demo but the order. Each step is what a user would call (`convert`, `distill`,
`evaluate`, `write_card`), leaves a file or folder by one rename, and is skipped when that is there; so the same command
resumes wherever it was stopped. What is in `out` belongs to one text, one teacher and one pair of recipes, and a call
with others is refused.
"""

import copy
import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, write_json, write_text
from mhla_hf.checkpoints.fingerprint import fingerprint_folder
from mhla_hf.checkpoints.load import load_language_model, no_progress_bars
from mhla_hf.conversion import convert
from mhla_hf.evaluation.lookups import choose_words
from mhla_hf.evaluation.records import Results, collect_speed
from mhla_hf.evaluation.runner import evaluate
from mhla_hf.evaluation.text_tasks import make_tasks
from mhla_hf.share.card import check_card, write_card
from mhla_hf.share.facts import find_license
from mhla_hf.training.loop import distill
from mhla_hf.training.recipe import read_recipe
from mhla_hf.training.run_folder import RECORD

from .figures import LABELS, plot_loss, plot_recall, plot_speed
from .journey import compare_isolated
from .lookups import add_lookups, start_lookups
from .report import collect, learning_curve, recall_by_distance, render_report
from .text import hold_out, make_tokenizer, read_text

RECIPES = Path(__file__).parent / "recipes"
STUDENTS = {
    "mhla": {},
    "linear": {"mixing_form": "softmax", "local": None, "mixing_start": "uniform", "learn_mixing": False},
    "hybrid": {},  # with softmax in the KV heads, a quarter of them, where it is missed most
}
MODELS = ("teacher", "mhla", "linear", "hybrid", "control")
QUICK = ("teacher", "hybrid", "linear")
TEACHER = Path(__file__).parents[2] / "model_cards" / "checkpoints" / "demo-teacher"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
TASK_ITEMS = 150
PREFIX = "heldout"
DESCRIPTION = "demo.json"
VISIT = "visit.json"
PROMPT = "The following sections describe"
CONTINUATION = 60
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
    out=None, model=None, text=None, seeds=1, *, full=False, plain=None, license=None, teacher_recipe=None,
    student_recipe=None, items=TASK_ITEMS, lengths=LENGTHS, threads=1, control=None, progress=True, command=None,
):  # fmt: skip
    """From a softmax language model to MHLA models that anyone can load, with every number measured on the way.

    Args:
        out: folder to make or to go on in; None: `default_folder`'s. Holds `teacher`, `linear` (plain linear attention:
            uniform, frozen mixing), `hybrid` (softmax in the quarter of the KV heads that miss it most), `results.json` and
            three figures.
        full: train the teacher first, train the students twice as long, and make `mhla` (in all layers) as well;
            further seeds lie in `seed-1`, ...
        model: folder or Hub id of a softmax model to start from. None: `TEACHER`, which the full demo made.
        text: file, folder, or id of a dataset on the Hub. None: the Python language reference, part of every Python.
        plain: train on the text as it is; else a new name and its value come after most lines, to be looked up later.
            None: as it is, but for the Python language reference.
        seeds: everything is repeated with seeds 0 to `seeds` - 1 (the first of which is `out` itself); needs `full`.
        license: of `model`, when its own card states none; without either there is no model card.
        teacher_recipe, student_recipe: YAML files instead of the demo's own.
        items: questions per task. lengths: tokens at which speed is measured.
        control: make `control` too, the teacher trained on for as many steps as a student, with `full`. None: with
            several seeds only.
        threads: CPU threads of torch; on a machine that does other things as well, two are slower than one.
        progress: show bars. command: the shell line that repeats the run, for the records.

    Returns:
        What `results.json` holds, a dict.

    Raises:
        ValueError, TypeError, ImportError: one sentence, before anything is written. OSError: writing failed.
        KeyboardInterrupt: on Ctrl-C; the same call goes on from there.
    """
    for name, value in (("seeds", seeds), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name}: got {value}; expected a whole number of at least 1")
    _check_extras()
    started = time.monotonic()
    out = default_folder(model, text, full, plain) if out is None else out
    torch.set_num_threads(threads)
    if seeds > 1 and not full:
        raise ValueError(f"seeds: got {seeds}; expected 1, or --full as well")
    if full:
        models = MODELS if control or (control is None and seeds > 1) else MODELS[:-1]
    else:
        models, model = QUICK, str(TEACHER) if model is None else model
    plain = text is not None if plain is None else plain
    recipes = teacher_recipe, student_recipe
    demo = _Demo(out, model, text, plain, license, *recipes, items, lengths, progress, command, models)
    with no_progress_bars():
        demo.begin()
        for seed in range(seeds):
            demo.make_models(seed)
        for seed in range(seeds):
            demo.judge(seed)
        results = demo.report(seeds)
        demo.share()
        demo.visit()
    print(f"\n{render_report(results)}\n")
    demo.say(f"everything is in {demo.out} ({time.monotonic() - started:.0f} s)")
    return results


def default_folder(model=None, text=None, full=False, plain=None):
    """Where a toy demo of these arguments lies: "out-toy" the default one, "out-toy-<model>-<text>" one of a user's own."""
    names = [Path(model).resolve().name] if model else []
    names += [Path(text).resolve().stem] if text else []
    names += ["full"] if full else []
    if plain not in (None, text is not None):
        names.append("plain" if plain else "lookups")
    return "-".join(["out-toy", *(re.sub(r"[^\w.]+", "-", name) for name in names)])


def _check_extras():
    """All that any step needs, before the first one starts."""
    for library, extra in (("accelerate", "train"), ("lm_eval", "eval"), ("matplotlib", "eval")):
        if importlib.util.find_spec(library) is None:
            raise ImportError(f"the demo needs {library}, which is missing: pip install 'mhla_hf[{extra}]'")


@dataclasses.dataclass
class _Demo:
    """One call of `run_demo`: the arguments, and one method per step."""

    out: Path
    model: str | None
    text: str | None
    plain: bool
    license: str | None
    teacher_recipe: Path
    student_recipe: Path
    items: int
    lengths: tuple
    progress: bool
    command: str | None
    models: tuple

    def __post_init__(self):
        self.out = Path(self.out).expanduser()
        self.main = "mhla" if "mhla" in self.models else "hybrid"  # the student that is drawn, shared and visited
        self.teacher_plan = read_recipe(self.teacher_recipe or RECIPES / "demo_teacher.yaml")
        self.student_plan = read_recipe(self.student_recipe or RECIPES / "demo_student.yaml")
        if self.models == QUICK and self.student_recipe is None:
            halved = [dataclasses.replace(stage, steps=stage.steps // 2) for stage in self.student_plan.stages]
            self.student_plan = dataclasses.replace(self.student_plan, stages=tuple(halved))
        if [stage.loss for stage in self.student_plan.stages] != ["transfer", "logits"]:
            raise ValueError("student_recipe: expected a stage with loss 'transfer' and then one with loss 'logits'")
        if [stage.loss for stage in self.teacher_plan.stages] != ["lm"]:
            raise ValueError("teacher_recipe: expected one stage, with loss 'lm'")

    def say(self, sentence):
        print(sentence, flush=True)

    def begin(self):
        """Read the text, recognize or make the folder: `data/` and what this demo is about."""
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

    def _make_folder(self, text):
        train, held_out = hold_out(text)
        if self.model is None:
            settings = self.teacher_plan.settings
            tokenizer = make_tokenizer(train, settings["vocab_size"], settings["max_position_embeddings"])
        else:
            model, tokenizer = load_language_model(self.model, dtype="float32", device="cpu")
            convert(model, **self.student_plan.settings)
        words = choose_words(tokenizer)
        with atomic_folder(self.out) as aside:
            (aside / "data").mkdir()
            shown = train if self.plain else add_lookups(train, words)
            write_text(aside / "data" / "train.txt", shown)
            write_text(aside / "data" / "heldout.txt", held_out)
            tokenizer.save_pretrained(aside / "data" / "tokenizer")
            write_json(aside / DESCRIPTION, self.identity)
        self.say(
            f"{self.identity['text']}: {len(train):,} characters to train on, {len(held_out):,} held out; "
            f"{len(tokenizer):,} tokens in the vocabulary"
        )
        if not self.plain:
            sizes = f"the {len(train):,} characters become {len(shown):,}"
            self.say(f"with lookups between its lines, {sizes} (--plain leaves them out)")

    def folder(self, model, seed):
        """Where a model of one seed lies. A teacher that was given is the same for all seeds."""
        root = self.out if seed == 0 or (model == "teacher" and self.model is not None) else self.out / f"seed-{seed}"
        return root / model

    def make_models(self, seed):
        """Steps 1 and 2: the teacher, its three students, and the teacher trained on."""
        self.say(f"\n[1/5] softmax teacher, seed {seed}")
        folder = self.folder("teacher", seed)
        if self._missing(folder, "config.json"):
            self._given_teacher(folder) if self.model else self._trained_teacher(folder, seed)
        if self._missing(folder, "README.md", quiet=True) and self.model is None:
            write_text(folder / "README.md", TEACHER_CARD)
        self.say(f"\n[2/5] students: convert, then distill from the teacher, seed {seed}")
        teacher = None
        for name, changes in ((name, STUDENTS[name]) for name in self.models if name in STUDENTS):
            folder = self.folder(name, seed)
            if self._missing(folder, RECORD):
                teacher = teacher or self._load(self.folder("teacher", seed))
                self.say(f"{LABELS[name]}:")
                settings, start = {**self.student_plan.settings, **changes}, folder.with_name(f"{folder.name}.start")
                if name == "hybrid":
                    student = self._measured(teacher, settings, start, seed)
                    kept = sum(map(len, student.config.mhla_measured["softmax_heads"].values()))
                    self.say(f"{kept} KV heads keep softmax, before any training: {PROMPT}{self._continue(student)}")
                else:
                    student = convert(copy.deepcopy(teacher), **settings)
                    self.say(f"converted, before any training: {PROMPT}{self._continue(student)}")
                self._distill(student, teacher, folder, self.student_plan, seed)
                shutil.rmtree(start, ignore_errors=True)
        folder = self.folder("control", seed)
        if "control" in self.models and self._missing(folder, RECORD):
            self.say(f"{LABELS['control']}:")
            self._distill(self._load(self.folder("teacher", seed)), None, folder, self._control_plan(), seed)

    def _measured(self, teacher, settings, start, seed):
        """The student with softmax in the quarter of its KV heads that miss it most, kept in `start` until it is trained."""
        if self._missing(start, "config.json"):
            self.say("measuring which heads miss softmax most")
            options = {"tokenizer": self.tokenizer, "text": self.train_text, "keep": 0.25, "seed": seed}
            student = convert(copy.deepcopy(teacher), **settings, **options, progress=self.progress)
            with atomic_folder(start) as aside:
                student.save_pretrained(aside)
        return self._load(start)

    def _continue(self, model):
        """What a model writes after `PROMPT`."""
        ids = self.tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            written = model.eval().generate(ids, max_new_tokens=CONTINUATION, do_sample=False)[0, ids.shape[1] :]
        return self.tokenizer.decode(written)

    def _missing(self, folder, file, quiet=False):
        if not (folder / file).exists():
            return True
        if not quiet:
            self.say(f"{folder} is there already")
        return False

    def _load(self, folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)

    def _trained_teacher(self, folder, seed):
        torch.manual_seed(seed)
        ends = {"bos_token_id": self.tokenizer.bos_token_id, "eos_token_id": self.tokenizer.eos_token_id}
        settings = {**self.teacher_plan.settings, "vocab_size": len(self.tokenizer)}
        model = LlamaForCausalLM(LlamaConfig(**settings, **ends))
        if not self.plain:
            start_lookups(model)
        self.say(f"training a Llama of {model.num_parameters() / 1e6:.2f} M parameters")
        self._distill(model, None, folder, self.teacher_plan, seed)

    def _given_teacher(self, folder):
        model, _ = load_language_model(self.model, dtype="float32", device="cpu")
        with atomic_folder(folder) as aside:
            model.save_pretrained(aside)
            self.tokenizer.save_pretrained(aside)
            local = Path(self.model) / "README.md"
            if local.is_file():
                shutil.copyfile(local, aside / "README.md")

    def _control_plan(self):
        """The teacher's own training, for as many steps, tokens and at the rate of the students'."""
        student = self.student_plan.stages[-1]
        own = {key: getattr(student, key) for key in ("lr", "warmup", "batch_size", "seq_len")}
        own |= {"name": "trained on", "steps": sum(stage.steps for stage in self.student_plan.stages)}
        stage = dataclasses.replace(self.teacher_plan.stages[0], **own)
        return dataclasses.replace(self.student_plan, stages=(stage,))

    def _distill(self, student, teacher, folder, plan, seed):
        """`distill`, with sequences no longer than the model was made for."""
        longest = student.config.max_position_embeddings
        stages = [dataclasses.replace(stage, seq_len=min(stage.seq_len, longest)) for stage in plan.stages]
        options = {"data": self.train_text, "tokenizer": self.tokenizer, "stages": stages, "seed": seed}
        distill(student, teacher, out=folder, progress=self.progress, command=self.command, **options, **plan.run)

    def judge(self, seed):
        """Step 3: every model on the tasks made from the held-out text, through lm-eval, unless it is scored already."""
        self.say(f"\n[3/5] scores on the held-out text, by lm-eval, seed {seed}")
        tasks = self._tasks()
        for name in self.models:
            self.say(f"{LABELS[name]}:")
            evaluate(self.folder(name, seed), tasks, include_path=self.out / "tasks", progress=self.progress)

    def _tasks(self):
        """The names of the tasks in `tasks/`, made if need be."""
        folder = self.out / "tasks"
        if not folder.exists():
            window = min(512, self._config()["max_position_embeddings"])
            made = make_tasks(self.held_out, folder, self.tokenizer, prefix=PREFIX, window=window, items=self.items)
            self.say("tasks: " + ", ".join(f"{name} ({size})" for name, size in made.sizes.items()))
        return [f"{PREFIX}_{kind}" for kind in ("bits_per_byte", "cloze", "recall", "generation")]

    def _config(self):
        return json.loads((self.folder("teacher", 0) / "config.json").read_text(encoding="utf-8"))

    def report(self, seeds):
        """Step 4: results.json, the figures and the speed."""
        self.say("\n[4/5] results, figures, model card")
        folders = {seed: {name: self.folder(name, seed) for name in self.models} for seed in range(seeds)}
        description = {key: self.identity[key] for key in ("model", "text", "text_sha256", "recipes_sha256")}
        if self.model is not None and Path(self.model).exists():
            description["model"] = Path(self.model).name
        results = collect(folders, PREFIX, description, self.command)
        write_json(self.out / "results.json", results)
        curves = {name: learning_curve(self.folder(name, 0)) for name in self.models if name in STUDENTS}
        scores = {name: results["models"][name]["bits_per_byte"]["values"] for name in self.models}
        plot_loss(self.out / "loss.png", curves, scores)
        plot_recall(self.out / "recall.png", {name: recall_by_distance(results, name) for name in self.models})
        speed = self._measure_speed()
        size = self._load(self.folder("teacher", 0)).num_parameters()
        note = f"models of {size / 1e6:,.1f} M parameters, batch 1, fp32, {speed['hardware']}"
        plot_speed(self.out / "speed.png", speed["rows"], LABELS[self.main], note)
        self.say(f"{self.out}/results.json, loss.png, recall.png, speed.png")
        return results

    def _measure_speed(self):
        folders = [self.folder(name, 0) for name in ("teacher", self.main)]  # "linear" runs MHLA's own code
        evaluate(folders, recipe="speed", settings={"lengths": list(self.lengths)}, progress=self.progress)
        return collect_speed(dict(zip(("softmax", "mhla"), map(Results.read, folders), strict=True)))

    def share(self):
        """Step 4, its end: the model card, where a license is known."""
        folder = self.folder(self.main, 0)
        hub_id = self.model if self.model and not Path(self.model).exists() else None
        teacher = self.folder("teacher", 0)
        try:
            find_license(hub_id, teacher, self.license)
        except ValueError as error:
            self.say(f"no model card: {error}")
            return
        others = {"teacher": "teacher", "plain linear": "linear", "teacher trained on": "control"}
        others |= {"hybrid, 1 in 4": "hybrid"} if self.main == "mhla" else {}
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

    def visit(self):
        """Step 5: a process that cannot import mhla_hf loads the MHLA model and must compute the same logits."""
        self.say("\n[5/5] the MHLA model in a process without mhla_hf")
        folder, place = self.folder(self.main, 0), self.out / VISIT
        model = fingerprint_folder(folder)
        if place.exists() and json.loads(place.read_text(encoding="utf-8"))["model"] == model:
            seen = json.loads(place.read_text(encoding="utf-8"))
            self.say(f"{place} is there already")
        else:
            text = self.held_out[:20_000]
            ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"]
            width = min(200, self._config()["max_position_embeddings"], ids.shape[1] // 2)
            ids = ids[:, : 2 * width].reshape(2, width)
            seen = {"model": model, "prompt": PROMPT, **compare_isolated(folder, ids, PROMPT, CONTINUATION)}
            write_json(place, seen)
        self.say(f"loaded as {seen['class']}: logits equal bit for bit, no weight missing or unexpected")
        self.say(f"  {PROMPT}{seen['continuation']}")
