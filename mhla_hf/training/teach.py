"""A teacher's likeliest next tokens on a text, written once: `teach`, and what a stage with the loss "stored" reads.

A folder holds ids.npy int32 `[N, L]`, tokens.npy int32 `[N, L, k]`, log_p.npy fp16 `[N, L, k]` and taught.json. A student
then learns from the folder alone: no teacher in memory, no forward pass of one.
"""

import dataclasses
import math
import os
from pathlib import Path

import numpy
import torch
from tqdm import tqdm

from ..checkpoints.file_io import atomic_folder, can_resume, read_json, write_json
from ..checkpoints.fingerprint import hash_json
from ..checkpoints.load import wrap_errors
from ..checkpoints.values import at_least, checked, read_settings
from ..data import Reader, TokenRing, check_token_ids, open_text
from ..nn.settings import is_whole
from .run_folder import identify

RECORD = "taught.json"
ARRAYS = {"ids": "int32", "tokens": "int32", "log_p": "float16"}


@checked
class Record:
    """What taught.json holds: the sizes of the arrays, how many rows are done, and hashes of the teacher and the text."""

    text: dict
    teacher: str
    rows: int = at_least(1)
    seq_len: int = at_least(1)
    top_k: int = at_least(1)
    vocab_size: int = at_least(1)
    done: int = at_least(0)

    def shape(self, name) -> tuple[int, ...]:
        """That of one of ARRAYS."""
        return (self.rows, self.seq_len, self.top_k)[: 2 if name == "ids" else 3]


@torch.no_grad()
def teach(teacher, text, tokenizer, out, *, seq_len=512, top_k=256, batch_size=8, progress=True) -> dict:
    """Write what `teacher` expects next at every token of a text; stopped, the same call goes on where it was.

    Args:
        teacher: a causal language model of transformers. text: as `data` of `distill`, a file, folder or tokens `[N]`.
        out: folder to make. seq_len: tokens in a sequence; the text is cut into as many as it has, from its beginning.
        top_k: likeliest tokens that are kept of each distribution; 6 bytes each.

    Returns what taught.json holds. ValueError: the text is a stream, or too short, or `out` was begun with something else or
    holds other files. OSError: the disk has no room for all of it; nothing is written then.
    """
    for name, value in (("seq_len", seq_len), ("top_k", top_k), ("batch_size", batch_size)):
        if not is_whole(value, 1):
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1.")
    source = open_text(text, tokenizer, vocab_size=teacher.get_input_embeddings().weight.shape[0])
    if not isinstance(source, TokenRing):
        raise ValueError(f"text: {source.name!r} is a stream; expected a text file, a folder of them or tokens [N]")
    rows = len(source.tokens) // seq_len
    if not rows:
        raise ValueError(f"seq_len is {seq_len}, and the text has {len(source.tokens)} tokens; expected fewer")
    out, vocab_size = Path(out), teacher.config.vocab_size
    about = {"text": source.describe(), "teacher": identify(teacher), "vocab_size": vocab_size}
    record = Record(rows=rows, seq_len=seq_len, top_k=min(top_k, vocab_size), done=0, **about)
    if (out / RECORD).exists():
        record.done = read_record(out).done
    if not can_resume(out, RECORD, dataclasses.asdict(record), "out"):
        with atomic_folder(out) as aside:
            make_arrays(aside, record)
            write_json(aside / RECORD, dataclasses.asdict(record))
    arrays = open_arrays(out, record, "r+")
    arrays["ids"][:] = source.tokens[: rows * seq_len].view(rows, seq_len).numpy()
    teacher.eval()
    with tqdm(total=rows, initial=record.done, desc="teach", unit="rows", disable=not progress) as bar:
        for first in range(record.done, rows, batch_size):
            part = slice(first, min(first + batch_size, rows))
            given = torch.from_numpy(arrays["ids"][part].astype("int64")).to(teacher.device)
            found = likeliest_tokens(teacher(input_ids=given, use_cache=False).logits, record.top_k)
            arrays["tokens"][part], arrays["log_p"][part] = (x.cpu().numpy() for x in found)
            for array in arrays.values():
                array.flush()
            record.done = part.stop
            write_json(out / RECORD, dataclasses.asdict(record))
            bar.update(part.stop - first)
    return dataclasses.asdict(record)


def likeliest_tokens(logits, count):
    """The `count` likeliest tokens `[.., k]` of logits `[.., vocabulary]`, and their log-probabilities, fp32."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return best.indices, best.values


def read_record(folder) -> Record:
    """What taught.json of a folder holds. ValueError, one sentence: it is no such record."""
    file = Path(folder) / RECORD
    return read_settings(Record, read_json(file), f"{file}: ")


def make_arrays(folder, record):
    """Arrays of zeros, with their room on the disk taken: to write to a mapped file without it kills the process."""
    for name, dtype in ARRAYS.items():
        file = folder / f"{name}.npy"
        try:
            numpy.lib.format.open_memmap(file, "w+", dtype, record.shape(name)).flush()
            with file.open("r+b") as stream:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
        except OSError as error:
            size = numpy.dtype(dtype).itemsize * math.prod(record.shape(name))
            what = f"{file.name} of {size:,} bytes cannot be made in {str(folder.parent)!r} ({error.strerror})"
            raise OSError(f"out: {what}") from None


def open_arrays(folder, record, mode):
    """The arrays of a folder by name, on disk. ValueError, one sentence: one is missing, or is not what `record` says."""
    found = {}
    for name, dtype in ARRAYS.items():
        file, wanted = Path(folder) / f"{name}.npy", f"{dtype} {list(record.shape(name))}"
        if not file.is_file():
            raise ValueError(f"{file} is missing; expected what `mhla-hf teach` wrote: delete the folder and repeat it")
        with wrap_errors(f"{file} cannot be read"):
            found[name] = numpy.load(file, mmap_mode=mode)
        if (own := f"{found[name].dtype} {list(found[name].shape)}") != wanted:
            raise ValueError(f"{file} holds {own}; expected {wanted}, as {RECORD} says")
    return found


class TaughtText:
    """The folder that `teach` wrote, as the data of a run; its tokens must be below `vocab_size`."""

    def __init__(self, folder, vocab_size):
        self.name, self.record, self.vocab_size = str(folder), read_record(folder), vocab_size
        done, rows, its = self.record.done, self.record.rows, self.record.vocab_size
        if done < rows:
            raise ValueError(f"data: {folder} holds {done} of {rows} rows; expected all: `mhla-hf teach` again goes on")
        if its > vocab_size:
            raise ValueError(f"data: {folder} is of {its} tokens; expected at most the student's {vocab_size}")
        self.arrays = open_arrays(folder, self.record, "r")
        check_token_ids(self.arrays["ids"], vocab_size, self.name)

    def describe(self):
        return {"kind": "taught", "rows": self.record.rows, "sha256": hash_json(dataclasses.asdict(self.record), 32)}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage. ValueError where they have another length."""
        if length != self.record.seq_len:
            raise ValueError(f"seq_len: got {length}, expected that of {self.name}, {self.record.seq_len}")
        return TaughtReader(self, (seed, stage), state)


class TaughtReader(Reader):
    """Every epoch takes all sequences in a new order."""

    def __init__(self, source, key, state):
        super().__init__(key, state)
        self.source = source

    def take(self, count):
        """The next `count`: ids and labels int64 `[count, L]`, tokens int64 and log_p fp16 `[count, L, k]`."""
        arrays, samples = self.source.arrays, range(self.next, self.next + count)
        rows = [self.shuffled(sample, len(arrays["ids"])) for sample in samples]
        self.next += count
        ids, tokens, log_p = (torch.from_numpy(arrays[name][rows]) for name in ARRAYS)
        check_token_ids(tokens, self.source.vocab_size, self.source.name)
        return ids.long(), ids.long(), tokens.long(), log_p
