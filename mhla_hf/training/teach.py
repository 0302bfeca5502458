"""Store a teacher's most likely next tokens on a text, for stages with the loss "stored".

For N sequences of L tokens and k stored tokens at each position, the folder holds ids.npy, int32 [N, L]; tokens.npy, int32
[N, L, k]; log_p.npy, fp16 [N, L, k]; and taught.json. A student is trained from this folder, without loading or running the
teacher.
"""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

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
ARRAYS = {"ids": "int32", "tokens": "int32", "log_p": "float16"}  # name -> dtype


@checked
class Record:
    """The content of taught.json.

    Args:
        text: Description that identifies the text.
        teacher: Hash of the teacher.
        rows: Number of sequences, N.
        seq_len: Tokens per sequence, L.
        top_k: Tokens stored per position, k.
        vocab_size: Size of the teacher's vocabulary.
        done: Number of sequences written so far.
    """

    text: dict
    teacher: str
    rows: int = at_least(1)
    seq_len: int = at_least(1)
    top_k: int = at_least(1)
    vocab_size: int = at_least(1)
    done: int = at_least(0)

    def shape(self, array: str) -> tuple[int, ...]:
        """Return the shape of one of `ARRAYS`: [N, L] for "ids", else [N, L, k]."""
        return (self.rows, self.seq_len) if array == "ids" else (self.rows, self.seq_len, self.top_k)


@torch.no_grad()
def teach(
    teacher: Any, text: Any, tokenizer: Any, out: str | Path, *, seq_len: int = 512, top_k: int = 256,
    batch_size: int = 8, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Store a teacher's most likely next tokens at every position of a text.

    After an interruption, calling it again with the same arguments resumes it.

    Args:
        teacher: A transformers causal language model. It is put in eval mode.
        text: A file, a folder, a list of texts or token ids [number of tokens]; see `open_text`. Streams are not supported.
        tokenizer: A transformers tokenizer; None for token ids.
        out: Folder to create.
        seq_len: Tokens per sequence. The text is cut into sequences from its beginning; an incomplete last one is dropped.
        top_k: Number of tokens to store per position; they take 6 bytes each.
        batch_size: Sequences per forward pass.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The content of taught.json.

    Raises:
        ValueError: A size or the text is not valid, or `out` was begun with other arguments or holds other files.
        OSError: The disk has no room for all arrays; nothing is written then.
    """
    for name, value in (("seq_len", seq_len), ("top_k", top_k), ("batch_size", batch_size)):
        if not is_whole(value, 1):
            raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1.")
    source = open_text(text, tokenizer, vocab_size=teacher.get_input_embeddings().weight.shape[0])
    if not isinstance(source, TokenRing):
        raise ValueError(f"text: got the stream {source.name!r}, expected a text file, a folder of them or tokens [N].")
    rows = len(source.tokens) // seq_len
    if not rows:
        raise ValueError(f"seq_len: got {seq_len}, expected at most the {len(source.tokens)} tokens of the text.")
    out = Path(out)
    vocab_size = teacher.config.vocab_size
    values = {
        "text": source.describe(),
        "teacher": identify(teacher),
        "rows": rows,
        "seq_len": seq_len,
        "top_k": min(top_k, vocab_size),
        "vocab_size": vocab_size,
        "done": read_record(out).done if (out / RECORD).exists() else 0,
    }
    record: Record = read_settings(Record, values, "")
    if not can_resume(out, RECORD, dataclasses.asdict(record), "out"):
        with atomic_folder(out) as temporary:
            create_arrays(temporary, record)
            write_json(temporary / RECORD, dataclasses.asdict(record))
    arrays = open_arrays(out, record, "r+")
    arrays["ids"][:] = source.tokens[: rows * seq_len].view(rows, seq_len).numpy()
    teacher.eval()
    with tqdm(total=rows, initial=record.done, desc="teach", unit="rows", disable=not progress) as bar:
        for start in range(record.done, rows, batch_size):
            batch = slice(start, min(start + batch_size, rows))
            ids = torch.from_numpy(arrays["ids"][batch].astype("int64")).to(teacher.device)
            tokens, log_p = most_likely_tokens(teacher(input_ids=ids, use_cache=False).logits, record.top_k)
            arrays["tokens"][batch] = tokens.cpu().numpy()
            arrays["log_p"][batch] = log_p.cpu().numpy()
            for array in arrays.values():
                array.flush()
            record.done = batch.stop
            write_json(out / RECORD, dataclasses.asdict(record))
            bar.update(batch.stop - start)
    return dataclasses.asdict(record)


def most_likely_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the most likely tokens.

    Args:
        logits: Logits [..., vocab] for a vocabulary of `vocab` tokens.
        count: Number of tokens to select.

    Returns:
        The tokens, int64 [..., k], and their log-probabilities, fp32 [..., k], where k = min(count, vocab).
    """
    top = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return top.indices, top.values


def read_record(folder: str | Path) -> Record:
    """Return the `Record` in a folder that `teach` wrote. Raise ValueError if it is missing or not valid."""
    file = Path(folder) / RECORD
    return read_settings(Record, read_json(file), f"{file}: ")


def create_arrays(folder: Path, record: Record) -> None:
    """Create arrays of zeros, and reserve their space on the disk.

    Without the reservation, writing to a memory-mapped file on a full disk would kill the process.

    Args:
        folder: An existing folder.
        record: Determines the shapes.

    Raises:
        OSError: There is not enough space.
    """
    for name, dtype in ARRAYS.items():
        file = folder / f"{name}.npy"
        try:
            numpy.lib.format.open_memmap(file, "w+", dtype, record.shape(name)).flush()
            with file.open("r+b") as stream:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
        except OSError as error:
            size = numpy.dtype(dtype).itemsize * math.prod(record.shape(name))
            raise OSError(
                f"out: got {str(folder.parent)!r}, where {file.name} cannot be created ({error.strerror}), "
                f"expected room for its {size:,} bytes."
            ) from None


def open_arrays(folder: str | Path, record: Record, mode: Any) -> dict[str, Any]:
    """Open the arrays in a folder as memory maps.

    Args:
        folder: A folder that `teach` wrote.
        record: The folder's record.
        mode: "r" to read, "r+" to write.

    Returns:
        The `numpy.memmap` of each of `ARRAYS`, by name.

    Raises:
        ValueError: An array is missing, or does not have the dtype and shape that `record` states.
    """
    arrays: dict[str, Any] = {}
    for name, dtype in ARRAYS.items():
        file = Path(folder) / f"{name}.npy"
        if not file.is_file():
            raise ValueError(
                f"{file}: got no such file, expected what `mhla-hf teach` wrote: delete the folder and run it again."
            )
        with wrap_errors(f"{file}: got a file that cannot be read, expected an array of NumPy"):
            arrays[name] = numpy.load(file, mmap_mode=mode)
        actual = f"{arrays[name].dtype} {list(arrays[name].shape)}"
        expected = f"{dtype} {list(record.shape(name))}"
        if actual != expected:
            raise ValueError(f"{file}: got {actual}, expected {expected} as {RECORD} says.")
    return arrays


class TaughtText:
    """Training data from a folder that `teach` wrote.

    Args:
        folder: A folder that `teach` has completed.
        vocab_size: Size of the student's vocabulary.

    Raises:
        ValueError: The folder is incomplete or damaged, or has tokens outside of the student's vocabulary.
    """

    def __init__(self, folder: str | Path, vocab_size: int) -> None:
        self.name = str(folder)
        self.vocab_size = vocab_size
        self.record = read_record(folder)
        if self.record.done < self.record.rows:
            raise ValueError(
                f"data: got {self.name!r} with {self.record.done} of {self.record.rows} rows, "
                "expected all: run `mhla-hf teach` again to resume it."
            )
        if self.record.vocab_size > vocab_size:
            raise ValueError(
                f"data: got {self.name!r} for a vocabulary of {self.record.vocab_size} tokens, "
                f"expected at most the student's {vocab_size}."
            )
        self.arrays = open_arrays(folder, self.record, "r")
        check_token_ids(self.arrays["ids"], vocab_size, self.name)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description that identifies the data."""
        return {"kind": "taught", "rows": self.record.rows, "sha256": hash_json(dataclasses.asdict(self.record), 32)}

    def reader(self, length: int, seed: int, stage: int, state: dict[str, Any] | None = None) -> Reader:
        """Return a reader of the sequences for one stage. Raise ValueError unless `length` is the stored length."""
        if length != self.record.seq_len:
            raise ValueError(f"seq_len: got {length}, expected the {self.record.seq_len} of {self.name!r}.")
        return TaughtReader(self, (seed, stage), state)


class TaughtReader(Reader):
    """Reads the sequences of a `TaughtText`. Every epoch reads all of them in a new random order."""

    def __init__(self, source: TaughtText, key: tuple[int, int], state: dict[str, Any] | None) -> None:
        super().__init__(key, state)
        self.source = source

    def take(self, count: int) -> tuple[torch.Tensor, ...]:
        """Return the next `count` sequences, of L tokens with k most likely tokens each (see `Record`).

        Returns:
            Ids and labels, int64 [count, L]; the teacher's most likely tokens, int64 [count, L, k]; and their
            log-probabilities, fp16 [count, L, k].

        Raises:
            ValueError: A token is not in the student's vocabulary.
        """
        arrays = self.source.arrays
        rows = [self.shuffled(sample, len(arrays["ids"])) for sample in range(self.next, self.next + count)]
        self.next += count
        ids, tokens, log_p = (torch.from_numpy(arrays[name][rows]) for name in ARRAYS)
        check_token_ids(tokens, self.source.vocab_size, self.source.name)
        return ids.long(), ids.long(), tokens.long(), log_p
