"""Every Python block of the docs runs, in its document's order; every command of docs and helps is taken by its program.

What a block expects to be there (a model of the Hub, `pipe`) is made, small, by the function of its document in
`STAND_INS`. Of a block that is `NOT_RUN`, the imports are made and the calls are held against the signatures.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import os
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tools.small_encoders import softmax_encoder
from tools.small_models import softmax_model
from tools.small_scores import TRAINING, colors, save_llama, save_mhla, small_tokenizer
from tools.small_towers import save_photos, small_classifier, softmax_tower
from tools.tiny_pipelines import PIPELINES
from transformers import ViTImageProcessorPil

import mhla_hf
from experiments.docs import PAGES
from mhla_hf.cli.main import COMMANDS, build_parser
from mhla_hf.evaluation import runner
from mhla_hf.evaluation.runner import read_score_recipe
from mhla_hf.training.recipe import read_recipe, recipe_names

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "conversion/README.md", *PAGES]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
WAN = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
SMALL = {  # what makes the real recipe short
    "recall": {"lengths": [128], "depths": [0, 100], "items": 2},
    "table_9_class_to_image": {"images": 20, "sampling.num_inference_steps": 2},
    "table_2_imagenet": {},
}
NOT_RUN = ("DistributedConfig(", "samples=[", "use_mhla_in_steps(")  # for several processes, or samples at full size
COMMAND = "mhla-hf|python|torchrun|accelerate"
SCRIPTS = [*sorted((ROOT / "conversion").glob("*.py")), *sorted((ROOT / "experiments").rglob("*.py"))]
SCRIPTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in SCRIPTS}
HELPS = {name: ast.get_docstring(ast.parse(text)) for name, text in SCRIPTS.items() if "__main__" in text}
HELPS |= {name: epilog for name, (*_, epilog) in COMMANDS.items()}
OTHERS = set("accelerate cd cp curl git hf lm_eval make pip sed sh transformers vllm".split())  # not ours  # noqa: SIM905
OTHERS |= {"vbench/bin/pip", "vllm-env/bin/vllm"}


def blocks(document, *languages):
    text = (ROOT / document).read_text(encoding="utf-8")
    return [textwrap.dedent(code) for _, language, code in FENCE.findall(text) if language in languages]


PYTHON = {document: blocks(document, "python") for document in DOCUMENTS}


def for_diffusion():
    PIPELINES["wan"]().to(torch.bfloat16).save_pretrained(WAN)
    Path("prompts.txt").write_text("a cat\na dog walks\n")
    return {"name": WAN}


def for_families():
    save_mhla(Path("llama-mhla"))


def for_encoders():
    name = "sentence-transformers/all-MiniLM-L6-v2"
    softmax_encoder("bert", vocab_size=400, max_position_embeddings=256).save_pretrained(name)
    small_tokenizer().save_pretrained(name)
    Path("notes.txt").write_text(TRAINING)


def for_images():
    softmax_tower("ViTForImageClassification").save_pretrained("facebook/deit-small-patch16-224")
    softmax_tower("SiglipVisionModel").save_pretrained("google/siglip-base-patch16-224")
    small_classifier("digits", num_channels=3, num_labels=2).save_pretrained("out/deit-t")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained("out/deit-t")
    save_photos(Path("imagenet/val"), {"cat": 4, "dog": 4})


def for_judging():
    save_llama(Path("out/teacher"))
    for name in ("mhla", "linear"):
        save_mhla(Path("out", name))
    save_photos(Path("digits"), {".": 4}, growth=0)
    classifier = argparse.Namespace(features=lambda images: colors(images)["features"])
    return {"pipe": PIPELINES["dit"](), "classifier": classifier}


def for_language():
    softmax_model().to(torch.bfloat16).save_pretrained("meta-llama/Llama-3.2-1B")


def for_sharing():
    save_mhla(Path("out/mhla"))
    return {"pipe": PIPELINES["wan"]().to(torch.bfloat16)}


STAND_INS = {name.removeprefix("for_"): make for name, make in globals().items() if name.startswith("for_")}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which evaluate, distill and push do what they do, but for the length of it and the Hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversion").symlink_to(ROOT / "conversion")
    evaluate, distill, push = mhla_hf.evaluate, mhla_hf.distill, mhla_hf.push

    def judge(models, tasks=None, *, recipe=None, settings=None):
        if recipe is None:
            return None  # lm-eval's tasks have to be fetched
        read_score_recipe(recipe)
        settings = {**(settings or {}), **SMALL[recipe]}
        return evaluate(models, tasks, recipe=recipe, settings=settings, progress=False)

    def teach(student, teacher, *, recipe, **options):
        known = read_recipe(recipe)
        short = {"steps": 1, "warmup": 0, "batch_size": 2, "grad_accum": 1, "size": [5, 32, 32], "sampling_steps": 2}
        stages = [dataclasses.replace(stage, **short) for stage in known.stages[:1]]
        return distill(student, teacher, stages=stages, mixed_precision=known.run["mixed_precision"], **options)

    def share(what, repo_id, **options):
        inspect.signature(push).bind(what, repo_id, **options)
        assert Path(what).is_dir() if isinstance(what, str) else what.save_pretrained(repo_id) is None

    for name, stand_in in (("evaluate", judge), ("distill", teach), ("push", share)):
        monkeypatch.setattr(mhla_hf, name, stand_in)
    return tmp_path


def check_calls(block):
    tree, names = ast.parse(block), {"mhla_hf": mhla_hf}
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), names)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).split(".")[0] in names:
            called = eval(ast.unparse(call.func), names)
            inspect.signature(called).bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # read by PEFT
@pytest.mark.parametrize("document", [name for name in PYTHON if PYTHON[name] and name != "README.md"])
def test_python_blocks(document, here, monkeypatch):
    names = STAND_INS.get(Path(document).stem, dict)() or {}
    monkeypatch.setattr(importlib.import_module("mhla_hf.conversion.encoder"), "FIT_STEPS", 3)
    for block in PYTHON[document]:
        try:
            if any(mark in block for mark in NOT_RUN):
                check_calls(block)
            else:
                exec(compile(block, f"a block of {document}", "exec"), names)
        except ModuleNotFoundError as error:
            if error.name != "sentence_transformers":  # of which no other dependency is needed here
                raise


class Parsed(BaseException):
    """The options were taken; what would follow is not done."""


def commands(place):
    """The commands of a document's shell blocks and indented lines, or of a help, each as a list of words."""
    if place in HELPS:
        text = re.sub(r" *\\\n +", " ", HELPS[place])
        lines = [re.split(" > |   ", line)[0] for line in re.findall(rf"^ +((?:{COMMAND}) .*)$", text, re.MULTILINE)]
        lines += re.findall(r"(?<=: )python -m experiments\.\w+", text)
    else:
        lines = re.findall(r"^    (mhla-hf .*)$", (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE)
        for block in blocks(place, "bash"):
            lines += block.replace("\\\n", " ").splitlines() if "python -c" not in block else []
    for line in lines:
        words = shlex.split(line, comments=True)
        for part in " ".join(shlex.quote(word) for word in words).split(" '&&' "):
            if words := shlex.split(part):
                yield words


def parse(words):
    """Have the program of a command parse its options. SystemExit: it does not take them."""
    program, *rest = words
    if (program in ("torchrun", "accelerate") and "-m" in rest) or (program == "python" and rest[0] == "-m"):
        module, *arguments = rest[rest.index("-m") + 1 :]
    elif script := next((word for word in words if word.endswith(".py")), None):
        module, arguments = ROOT / script, words[words.index(script) + 1 :]
    elif program == "mhla-hf":
        module, arguments = "mhla_hf.cli.main", rest
    else:
        assert program in OTHERS or "=" in program, words
        return
    sys.argv = [str(module), *arguments]
    if isinstance(module, Path):
        runpy.run_path(str(module), run_name="__main__")
    elif module == "mhla_hf.cli.main":
        build_parser().parse_args(arguments)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError(f"{shlex.join(words)}: its options were not parsed")


@pytest.fixture
def parse_only(monkeypatch):
    """A program's `parse_args` ends it when the options were taken."""
    whole = argparse.ArgumentParser.parse_args

    def stop(self, *given):
        whole(self, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "conversion")])
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")  # runpy
@pytest.mark.parametrize("place", [*DOCUMENTS, *HELPS])
def test_commands_are_taken(place, parse_only):
    """A recipe that a command names is one that there is, a file, or a word that stands for one."""
    for words in commands(place):
        for flag, name in itertools.pairwise(words):
            if flag in ("--recipe", "--judge") and name.islower() and not name.endswith(".yaml"):
                assert name in (*recipe_names(), *runner.recipe_names()), words
        try:
            parse(words)
        except Parsed:
            continue
        except SystemExit:
            pytest.fail(f"{place}: {shlex.join(words)}")
    for block in blocks(place, "bash") if place in DOCUMENTS else ():
        for code in re.findall(r'python -c "(.*?)"', block, re.DOTALL):
            compile(code, place, "exec")
