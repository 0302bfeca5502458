"""Training text, cut into sequences of full length: from files, tokens in memory, or a stream of `datasets`.

Every process reads the same rows and keeps its share of them. There is no padding, so every token has a loss unless its
label in the data is -100.
"""

import abc
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

from .checkpoints.file_io import HUB_ID, PathLike
from .checkpoints.fingerprint import hash_file, hash_json
from .checkpoints.load import require_extra, wrap_errors

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")
TABLE_ENDINGS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
ROWS_AT_ONCE = 32  # rows of a stream that are tokenized together

Key = tuple[int, ...]  # (seed, stage), which seeds the random choices of a stage
Batch = tuple[torch.Tensor, ...]  # token ids and labels, int64 [count, length]


class Reader(abc.ABC):
    """Reads the batches of one training stage, from its beginning or from an earlier reader's `state()`."""

    def __init__(self, key: Iterable[int], state: dict[str, Any] | None = None) -> None:
        self.key: Key = tuple(key)
        self.next: int = state["next"] if state else 0

    @abc.abstractmethod
    def take(self, count: int, rows: slice = slice(None)) -> Any:
        """Read the next batch of `count` samples, and return this process's `rows` of it."""

    def shuffled(self, number: int, count: int) -> int:
        """Return the index of the sample to read after `number` samples; every epoch has a new order of all `count`."""
        epoch, position = divmod(number, count)
        return int(_permutation((*self.key, epoch), count)[position])

    def state(self) -> dict[str, Any]:
        """Return what a new reader of this stage resumes from, as JSON."""
        return {"next": self.next}

    def handover(self) -> dict[str, Any] | None:
        """Return the state from which the next stage's reader continues; None: it begins anew."""
        return None

    def close(self) -> None:  # noqa: B027, most readers have nothing to close
        """Stop background threads."""


@functools.lru_cache(maxsize=4)
def _permutation(key: Key, count: int) -> numpy.ndarray:
    return numpy.random.default_rng(key).permutation(count)


def max_positions(config: Any) -> float:
    """Return how many positions a language model has; with RoPE, infinitely many."""
    has_rope = getattr(config, "rope_parameters", None) is not None
    return inf if has_rope else getattr(config, "max_position_embeddings", inf)


def open_text(
    data: Any, tokenizer: Any = None, *, text_field: str = "text", vocab_size: int | None = None
) -> "TokenRing | TokenStream":
    """Open training text: tokens or texts in memory, text files, or a stream of the rows of tables.

    Args:
        data: Token ids, a tensor [N]; a list of texts; a text file, or a folder of them; or, read as a stream, a table or a
            folder of tables, a dataset on the Hub ("id" or "id:configuration"), or a dataset of `datasets`. Rows of a
            stream have a text, or `input_ids` and optionally `labels`.
        tokenizer: Required by texts, not by token ids.
        text_field: Column of a stream that holds the text.
        vocab_size: Number of tokens that the model knows; None skips the check of token ids against it.

    Returns:
        The opened data, whose `reader` method returns a `Reader` of sequences.

    Raises:
        ValueError, TypeError, ImportError: The data cannot be opened.
    """
    if isinstance(data, torch.Tensor):
        return TokenRing(data, vocab_size, "a tensor of tokens")
    if isinstance(data, (list, tuple)) and data and all(isinstance(text, str) for text in data):
        return TokenRing(_encode(tokenizer, list(data), "a list of texts"), vocab_size, "a list of texts")
    if isinstance(data, (str, Path)):
        path, name = check_data_path(data), str(data)
        if not os.path.exists(path):  # `path.exists()` raises OSError for a long name
            if not HUB_ID.fullmatch(name.partition(":")[0]):
                got = f"{name!r:.120}, which does not exist"
                raise ValueError(f"data: got {got}, expected a file, a folder, a dataset, or a list of texts.")
            return TokenStream(load_split(name, streaming=True), tokenizer, text_field, vocab_size, name, name)
        files = _list_files(path)
        builder = TABLE_ENDINGS.get(files[0].suffix.lower())
        if builder is None:
            texts = [text for file in files if (text := read_text_file(file)).strip()]
            return TokenRing(_encode(tokenizer, texts, name), vocab_size, name)
        table = load_split(name, builder, data_files=list(map(str, files)), streaming=True)
        return TokenStream(table, tokenizer, text_field, vocab_size, name, identify_files(files))
    if hasattr(data, "to_iterable_dataset"):
        data = data.to_iterable_dataset()
    if hasattr(data, "state_dict") and hasattr(data, "set_epoch"):
        name = f"a dataset with columns {data.column_names}"
        return TokenStream(data, tokenizer, text_field, vocab_size, name, name)
    raise TypeError(f"data: got {type(data).__name__}, expected a file, a folder, a dataset, texts or tokens.")


class TokenRing:
    """Tokens in memory, as a ring in which the first token follows the last. `name` is for error messages."""

    def __init__(self, tokens: Any, vocab_size: int | None, name: str) -> None:
        tokens = torch.as_tensor(tokens)
        if tokens.ndim != 1 or not len(tokens) or tokens.is_floating_point():
            got = f"{name!r} with shape {list(tokens.shape)} and {tokens.dtype}"
            raise ValueError(f"data: got {got}, expected integers with shape [N], at least one.")
        self.tokens = tokens.to(device="cpu", dtype=torch.int32).contiguous()
        self.name = name
        check_token_ids(self.tokens, vocab_size, name)

    def describe(self) -> dict[str, Any]:
        """Return a JSON value that identifies the data, so that a run resumes only with the same data."""
        digest = hashlib.sha256(self.tokens.numpy()).hexdigest()[:32]
        return {"kind": "tokens", "tokens": len(self.tokens), "sha256": digest}

    def reader(self, length: int, seed: int, stage: int, state: dict[str, Any] | None = None) -> Reader:
        _check_length(len(self.tokens), length, self.name)
        return _RingReader(self.tokens, length, (seed, stage), state)


class _RingReader(Reader):
    """Reads the sequences of a ring. Every epoch cuts the ring at a new place and shuffles the sequences anew."""

    def __init__(self, tokens: torch.Tensor, length: int, key: Key, state: dict[str, Any] | None) -> None:
        super().__init__(key, state)
        self.tokens, self.length = tokens, length
        self.epoch: int | None = None

    def take(self, count: int, rows: slice = slice(None)) -> Batch:
        per_epoch = len(self.tokens) // self.length
        starts = []
        for sample in range(self.next, self.next + count):
            epoch, position = divmod(sample, per_epoch)
            if epoch != self.epoch:
                random = numpy.random.default_rng((*self.key, epoch))
                self.epoch = epoch
                self.offset = int(random.integers(len(self.tokens)))
                self.order = random.permutation(per_epoch)
            starts.append(self.offset + int(self.order[position]) * self.length)
        self.next += count
        index = (torch.tensor(starts[rows])[:, None] + torch.arange(self.length)) % len(self.tokens)
        ids = self.tokens[index].long()
        return ids, ids


@dataclasses.dataclass(eq=False)
class TokenStream:
    """The rows of a `datasets.IterableDataset`, packed into sequences."""

    dataset: Any
    tokenizer: Any
    text_field: str
    vocab_size: int | None
    name: str  # for error messages
    identity: Any  # JSON by which the data is recognized when training resumes

    def describe(self) -> dict[str, Any]:
        return {"kind": "stream", "source": self.identity, "field": self.text_field}

    def reader(self, length: int, seed: int, stage: int, state: dict[str, Any] | None = None) -> Reader:
        """Return a reader in the stream's own order, whatever the seed and the stage."""
        return _StreamReader(self, length, state)

    def tokens(self, rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Return the ids and labels of all rows, with the end-of-sequence token after texts; ValueError for invalid rows."""
        if "input_ids" in rows[0]:
            ids = [token for row in rows for token in row["input_ids"]]
            labels = [token for row in rows for token in row.get("labels", row["input_ids"])]
            if len(ids) != len(labels):
                got = f"{self.name!r} with {len(ids)} input_ids and {len(labels)} labels"
                raise ValueError(f"data: got {got}, expected one label per token.")
        else:
            texts = [row.get(self.text_field) for row in rows]
            if not all(isinstance(text, str) for text in texts):
                got = f"{self.name!r} with columns {', '.join(rows[0])}"
                raise ValueError(f"data: got {got}, expected text in a column {self.text_field!r}.")
            ids = labels = _encode(self.tokenizer, texts, self.name)
        if ids:
            check_token_ids(torch.tensor(ids), self.vocab_size, self.name)
        return ids, labels


class _StreamReader(Reader):
    """Reads the sequences of a stream in the order of the stream, and starts again at its end."""

    def __init__(self, stream: TokenStream, length: int, state: dict[str, Any] | None) -> None:
        super().__init__(())
        self.stream, self.length = stream, length
        self.is_first_epoch = state is None
        state = state or {"epoch": 0, "place": None, "rest": [[], []]}
        self.leftover: Sequence[list[int]] = state["rest"]
        self._go_to(state["epoch"], state["place"])

    def take(self, count: int, rows: slice = slice(None)) -> Batch:
        ids, labels = self.leftover
        needed = count * self.length
        while len(ids) < needed:
            with wrap_errors(f"data: got {self.stream.name!r}, expected rows that can be read"):
                documents = list(itertools.islice(self.documents, ROWS_AT_ONCE))
            if documents:
                new_ids, new_labels = self.stream.tokens(documents)
                ids, labels = ids + new_ids, labels + new_labels
            if len(documents) < ROWS_AT_ONCE:
                if self.is_first_epoch:
                    _check_length(len(ids), self.length, self.stream.name)
                self._go_to(self.epoch + 1, None)
            else:
                self.position = self.stream.dataset.state_dict()
        self.leftover = [ids[needed:], labels[needed:]]
        self.is_first_epoch = False
        return torch.tensor([ids[:needed], labels[:needed]]).view(2, count, self.length)[:, rows].unbind()

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.position, "rest": self.leftover}

    handover = state

    def _go_to(self, epoch: int, position: Any) -> None:
        """Continue at `position`, a state dict of the dataset; None is the beginning of the epoch."""
        self.epoch, self.position = epoch, position
        self.stream.dataset.set_epoch(epoch)
        self.stream.dataset.load_state_dict(position)
        self.documents: Iterator[dict[str, Any]] = iter(self.stream.dataset)


def _list_files(path: Path) -> list[Path]:
    """Return [path] if it is a file; for a folder, list all its text files or else its tables of one format, sorted."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for endings in (TEXT_ENDINGS, *((ending,) for ending in TABLE_ENDINGS)):
        if chosen := [file for file in files if file.suffix.lower() in endings]:
            return chosen
    known = ", ".join((*TEXT_ENDINGS, *TABLE_ENDINGS))
    raise ValueError(f"data: got the folder {str(path)!r}, which holds no text, expected files ending in {known}.")


def check_data_path(data: PathLike, argument: str = "data") -> Path:
    """Return `data` as a path with ~ expanded; refuse an empty one, as from a shell variable that is not set."""
    if not str(data).strip():
        raise ValueError(f"{argument}: got {str(data)!r}, expected a file, a folder or a dataset.")
    return Path(data).expanduser()


def read_text_file(file: Path, argument: str = "data") -> str:
    """Return the content of a text file. Raise ValueError if it is not UTF-8 or contains a NUL character."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        got = f"{str(file)!r}, which is not UTF-8 at byte {error.start}"
        raise ValueError(f"{argument}: got {got}, expected a text file.") from None
    if (position := text.find("\0")) >= 0:
        raise ValueError(f"{argument}: got {str(file)!r}, whose character {position} is NUL, expected a text file.")
    return text


def load_split(name: str, *builder: Any, split: str = "train", **options: Any) -> Any:
    """Load a split of `load_dataset(*builder)` or, without `builder`, of the Hub dataset `name` ("id[:configuration]")."""
    repository, _, configuration = name.partition(":")
    looks_local = name.startswith((".", "/", "~")) or Path(name).suffix.lower() in (*TEXT_ENDINGS, *TABLE_ENDINGS)
    if not builder and (looks_local or repository.count("/") > 1):
        raise ValueError(f"data: got {name!r}, which does not exist, expected a file or a folder.")
    with require_extra(f"data: {name!r}", "datasets", "train"):
        import datasets
    with wrap_errors(f"data: got {name!r}, expected a file or folder, or a dataset that can be reached"):
        return datasets.load_dataset(*(builder or (repository, configuration or None)), split=split, **options)


def identify_files(files: Iterable[Path]) -> list[list[Any]]:
    """Return [name, size in bytes, hash of the first mebibyte] of each file."""
    identities = []
    for file in files:
        with file.open("rb") as content:
            head = hashlib.sha256(content.read(1 << 20)).hexdigest()[:16]
        identities.append([file.name, file.stat().st_size, head])
    return identities


def hash_files(files: Iterable[Path], folder: Path, progress: bool = False) -> str:
    bar = tqdm(sorted(files), desc=f"{folder}: reading", disable=not progress)
    return hash_json([[file.relative_to(folder).as_posix(), hash_file(file)] for file in bar])


def hash_source(source: Any, progress: bool = False) -> str | None:
    """Return a hash of a local file or folder, any other value as a string, and None for None."""
    if source is None or not (path := Path(source)).exists():
        return source and str(source)
    return hash_file(path) if path.is_file() else hash_files(filter(Path.is_file, path.rglob("*")), path, progress)


def _encode(tokenizer: Any, texts: list[Any], name: str) -> list[int]:
    """Tokenize documents into one list of ids, an end-of-sequence token after each; ValueError without tokenizer or text."""
    if tokenizer is None:
        raise ValueError(f"tokenizer: got None with {name!r}, which is text, expected a tokenizer.")
    if not texts:
        raise ValueError(f"data: got {name!r}, which is empty, expected text.")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for document in documents for token in (*document, *end)]


def special_tokens(tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids that a tokenizer adds before (a CLS or BOS token) and after a text, as two int64 vectors."""
    ids = [] if tokenizer is None else tokenizer("")["input_ids"]
    num_before = 1 if ids and ids[0] in (tokenizer.cls_token_id, tokenizer.bos_token_id) else 0
    return torch.tensor(ids[:num_before]).long(), torch.tensor(ids[num_before:]).long()


def with_special_tokens(ids: torch.Tensor, added_ids: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return `ids` [B, T] with `added_ids`, the result of `special_tokens`, before and after each row."""
    before, after = (added.expand(len(ids), -1) for added in added_ids)
    return torch.cat([before, ids, after], 1)


def check_token_ids(tokens: Any, vocab_size: int | None, name: str) -> None:
    if vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        got = f"{name!r} with token ids {tokens.min()} to {tokens.max()}"
        raise ValueError(f"data: got {got}, expected ids 0 to {vocab_size - 1}, the vocabulary of the model.")


def _check_length(tokens: int, length: int, name: str) -> None:
    if tokens < length:
        raise ValueError(f"data: got {name!r} with {tokens} tokens, expected at least seq_len, which is {length}.")
