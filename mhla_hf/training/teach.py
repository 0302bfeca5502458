"""A teacher's likeliest next tokens on a text, written once: `teach`, and what a stage with the loss "stored" reads.

A folder holds ids.npy int32 `[N, L]`, tokens.npy int32 `[N, L, k]`, log_p.npy fp16 `[N, L, k]` and taught.json. A student
then learns from the folder alone: no teacher in memory, no forward pass of one.
"""

import json
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

from ..checkpoints.files import write_json
from ..checkpoints.fingerprint import hash_of
from .data import TokenRing, open_text
from .tasks import Reader

RECORD = "taught.json"
ARRAYS = {"ids": "int32", "tokens": "int32", "log_p": "float16"}


@torch.no_grad()
def teach(teacher, text, tokenizer, out, *, seq_len=512, top_k=256, batch_size=8, progress=True) -> dict:
    """Write what `teacher` expects next at every token of a text; stopped, the same call goes on where it was.

    Args:
        teacher: a causal language model of transformers. text: as `data` of `distill`, a file, folder or tokens `[N]`.
        out: folder to make. seq_len: tokens in a sequence; the text is cut into as many as it has, from its beginning.
        top_k: likeliest tokens that are kept of each distribution; 6 bytes each.

    Returns what taught.json holds. ValueError: the text is a stream, or too short, or `out` was begun with something else.
    """
    source = open_text(text, tokenizer, vocab_size=teacher.get_input_embeddings().weight.shape[0])
    if not isinstance(source, TokenRing):
        raise ValueError(f"text: {source.name!r} is a stream; expected a text file, a folder of them or tokens [N]")
    rows = len(source.tokens) // seq_len
    if not rows:
        raise ValueError(f"seq_len is {seq_len}, and the text has {len(source.tokens)} tokens; expected fewer")
    out, config = Path(out), teacher.config
    record = {"rows": rows, "seq_len": seq_len, "top_k": min(top_k, config.vocab_size), "text": source.describe()}
    record |= {"done": 0, "vocab_size": config.vocab_size, "teacher": getattr(config, "_name_or_path", "")}
    begun = read_record(out) if (out / RECORD).exists() else record
    if {**begun, "done": 0} != record:
        raise ValueError(f"out: {out} was begun with another text, teacher or size; expected a new folder")
    out.mkdir(parents=True, exist_ok=True)
    arrays = open_arrays(out, record)
    arrays["ids"][:] = source.tokens[: rows * seq_len].view(rows, seq_len).numpy()
    teacher.eval()
    with tqdm(total=rows, initial=begun["done"], desc="teach", unit="rows", disable=not progress) as bar:
        for first in range(begun["done"], rows, batch_size):
            part = slice(first, min(first + batch_size, rows))
            given = torch.from_numpy(arrays["ids"][part].astype("int64")).to(teacher.device)
            found = likeliest_tokens(teacher(input_ids=given, use_cache=False).logits, record["top_k"])
            arrays["tokens"][part], arrays["log_p"][part] = (x.cpu().numpy() for x in found)
            for array in arrays.values():
                array.flush()
            record["done"] = part.stop
            write_json(out / RECORD, record)
            bar.update(part.stop - first)
    return record | {"done": rows}


def likeliest_tokens(logits, count):
    """The `count` likeliest tokens `[.., k]` of logits `[.., vocabulary]`, and their log-probabilities, fp32."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return best.indices, best.values


def read_record(folder) -> dict:
    """What taught.json of a folder holds."""
    return json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))


def open_arrays(folder, record, mode="r+"):
    """The arrays of a folder by name, on disk; made where they are missing and may be written."""
    shape, found = (record["rows"], record["seq_len"], record["top_k"]), {}
    for name, dtype in ARRAYS.items():
        file = Path(folder) / f"{name}.npy"
        if not file.exists():
            numpy.lib.format.open_memmap(file, "w+", dtype, shape[:2] if name == "ids" else shape).flush()
        found[name] = numpy.load(file, mmap_mode=mode)
    return found


class TaughtText:
    """The folder that `teach` wrote, as the data of a run; its tokens must be below `vocab_size`."""

    def __init__(self, folder, vocab_size):
        self.name, self.record = str(folder), read_record(folder)
        done, rows, its = (self.record[key] for key in ("done", "rows", "vocab_size"))
        if done < rows:
            raise ValueError(f"data: {folder} holds {done} of {rows} rows; expected all: `mhla-hf teach` again goes on")
        if its > vocab_size:
            raise ValueError(f"data: {folder} is of {its} tokens; expected at most the student's {vocab_size}")
        self.arrays = open_arrays(folder, self.record, "r")

    def describe(self):
        return {"kind": "taught", "rows": self.record["rows"], "sha256": hash_of(self.record, 32)}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage. ValueError where they have another length."""
        if length != self.record["seq_len"]:
            raise ValueError(f"seq_len: got {length}, expected that of {self.name}, {self.record['seq_len']}")
        return TaughtReader(self.arrays, (seed, stage), state)


class TaughtReader(Reader):
    """Every epoch takes all sequences in a new order."""

    def __init__(self, arrays, key, state):
        super().__init__(key, state)
        self.arrays = arrays

    def take(self, count):
        """The next `count`: ids and labels int64 `[count, L]`, tokens int64 and log_p fp16 `[count, L, k]`."""
        samples = range(self.next, self.next + count)
        rows = [self.shuffled(sample, len(self.arrays["ids"])) for sample in samples]
        self.next += count
        ids, tokens, log_p = (torch.from_numpy(self.arrays[name][rows]) for name in ARRAYS)
        return ids.long(), ids.long(), tokens.long(), log_p
