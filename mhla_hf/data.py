"""Text to train on, cut into full sequences: from a file, a folder, tokens at hand, or a stream of `datasets`.

Text on disk is tokenized once and held as a ring of tokens; which sequences a step reads follows from (seed, stage, step)
alone. A stream is read in its own order, and goes on where `datasets` says it was (a shuffle buffer is filled anew). Every
process reads the same rows and keeps its share of them; no padding exists, so every token carries a loss unless the data's
own `labels` say -100.
"""

import functools
import hashlib
import itertools
from math import inf
from pathlib import Path

import numpy
import torch

from .checkpoints.load import one_sentence, optional

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")
TABLE_ENDINGS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
DOCUMENTS_AT_ONCE = 32


class Reader:
    """What gives the batches of one stage: samples and random choices follow from `key`, (seed, number of the stage)."""

    def __init__(self, key, state=None):
        self.key, self.next = tuple(key), state["next"] if state else 0

    def shuffled(self, number, count):
        """Which of `count` samples comes as `number`: every epoch takes all of them, in a new order."""
        epoch, place = divmod(number, count)
        return int(_order((*self.key, epoch), count)[place])

    def state(self):
        """What `state=` needs to go on here, JSON-able."""
        return {"next": self.next}

    def handover(self):
        """Where the next stage's reader starts, JSON-able; None: at its own beginning."""

    def close(self):
        """Let threads go."""


@functools.lru_cache(maxsize=4)
def _order(key, count):
    return numpy.random.default_rng(key).permutation(count)


def last_position(config) -> float:
    """Tokens that a language model can take at once: without RoPE, whose positions go on, as many as it has positions."""
    endless = getattr(config, "rope_parameters", None) is not None
    return inf if endless else getattr(config, "max_position_embeddings", inf)


def open_text(data, tokenizer=None, *, text_field="text", vocab_size=None):
    """Open what a user calls data: gives a `TokenRing` or a `TokenStream`. ValueError, TypeError, ImportError: one sentence.

    Args:
        data: a text file, or a folder of them (.txt, .md, .rst, .text, also in sub-folders); as a stream, a table on disk
            (.jsonl, .json, .parquet, .csv, .arrow, or a folder of them), the id of a dataset on the Hub ("id" or
            "id:configuration", split "train"), or a Dataset or IterableDataset of `datasets`; a list of texts; or tokens,
            integers `[N]`.
        tokenizer: needed unless the data are tokens (a tensor, or rows with `input_ids` and, if wanted, `labels`). Its
            end-of-sequence token follows every document.
        text_field: the column of a dataset that holds the text. vocab_size: token ids must be below it; None: unchecked.
    """
    if isinstance(data, torch.Tensor):
        return TokenRing(data, vocab_size, "tokens at hand")
    if isinstance(data, (list, tuple)) and data and all(isinstance(text, str) for text in data):
        return TokenRing(_encode(tokenizer, list(data), "a list of texts"), vocab_size, "a list of texts")
    if isinstance(data, (str, Path)):
        path, name = place_of(data), str(data)
        if not path.exists():
            return TokenStream(load_split(name, streaming=True), tokenizer, text_field, vocab_size, name, name)
        files = _files(path)
        builder = TABLE_ENDINGS.get(files[0].suffix.lower())
        if builder is None:
            texts = [text for file in files if (text := read_text_file(file)).strip()]
            return TokenRing(_encode(tokenizer, texts, name), vocab_size, name)
        table = load_split(name, builder, data_files=list(map(str, files)), streaming=True)
        return TokenStream(table, tokenizer, text_field, vocab_size, name, identity_of(files))
    if hasattr(data, "to_iterable_dataset"):
        data = data.to_iterable_dataset()
    if hasattr(data, "state_dict") and hasattr(data, "set_epoch"):
        name = f"a dataset with columns {data.column_names}"
        return TokenStream(data, tokenizer, text_field, vocab_size, name, name)
    raise TypeError(f"data: got {type(data).__name__}; expected a file, a folder, a dataset, texts or tokens")


class TokenRing:
    """Tokens in memory, the last followed by the first. tokens: whole numbers `[N]`."""

    def __init__(self, tokens, vocab_size, name):
        tokens = torch.as_tensor(tokens)
        if tokens.ndim != 1 or not len(tokens) or tokens.is_floating_point():
            found = f"holds a tensor {tuple(tokens.shape)} of {tokens.dtype}"
            raise ValueError(f"data: {name!r} {found}; expected whole numbers [N], at least one")
        self.tokens, self.name = tokens.to(device="cpu", dtype=torch.int32).contiguous(), name
        check_ids(self.tokens, vocab_size, name)

    def describe(self):
        digest = hashlib.sha256(self.tokens.numpy()).hexdigest()[:32]
        return {"kind": "tokens", "tokens": len(self.tokens), "sha256": digest}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage, from the start or from `state`. ValueError: the text is shorter than one."""
        _check_length(len(self.tokens), length, self.name)
        return _RingReader(self.tokens, length, (seed, stage), state)


class _RingReader(Reader):
    """Every epoch cuts the ring into sequences from a new start and takes them in a new order."""

    def __init__(self, tokens, length, key, state):
        super().__init__(key, state)
        self.tokens, self.length, self.epoch = tokens, length, None

    def take(self, count):
        """The next `count` sequences: ids and labels, int64 `[count, length]`."""
        per_epoch, starts = len(self.tokens) // self.length, []
        for sample in range(self.next, self.next + count):
            epoch, place = divmod(sample, per_epoch)
            if epoch != self.epoch:
                random, self.epoch = numpy.random.default_rng((*self.key, epoch)), epoch
                self.offset, self.order = int(random.integers(len(self.tokens))), random.permutation(per_epoch)
            starts.append(self.offset + int(self.order[place]) * self.length)
        self.next += count
        index = (torch.tensor(starts)[:, None] + torch.arange(self.length)) % len(self.tokens)
        ids = self.tokens[index].long()
        return ids, ids


class TokenStream:
    """A `datasets.IterableDataset` as packed sequences. Rows have `text_field`, or `input_ids` and perhaps `labels`."""

    def __init__(self, dataset, tokenizer, text_field, vocab_size, name, identity):
        self.dataset, self.tokenizer, self.text_field = dataset, tokenizer, text_field
        self.vocab_size, self.name, self.identity = vocab_size, name, identity

    def describe(self):
        return {"kind": "stream", "source": self.identity, "field": self.text_field}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage. The stream has an order of its own: seed and stage do not count."""
        return _StreamReader(self, length, state)

    def tokens(self, rows):
        """ids and labels, two flat lists, of a list of rows, with the end-of-sequence token after each text."""
        if "input_ids" in rows[0]:
            ids = [token for row in rows for token in row["input_ids"]]
            labels = [token for row in rows for token in row.get("labels", row["input_ids"])]
            if len(ids) != len(labels):
                raise ValueError(f"data: {self.name!r} has {len(ids)} input_ids beside {len(labels)} labels")
        else:
            texts = [row.get(self.text_field) for row in rows]
            if not all(isinstance(text, str) for text in texts):
                known = ", ".join(rows[0])
                raise ValueError(f"data: {self.name!r} has no text in a column {self.text_field!r}; it has {known}")
            ids = labels = _encode(self.tokenizer, texts, self.name)
        if ids:
            check_ids(torch.tensor(ids), self.vocab_size, self.name)
        return ids, labels


class _StreamReader(Reader):
    """The sequences of a stream, in its order. state: where `datasets` says it is, and the tokens read beyond a batch."""

    def __init__(self, stream, length, state):
        super().__init__(())
        self.stream, self.length, self.fresh = stream, length, state is None
        state = state or {"epoch": 0, "place": None, "rest": [[], []]}
        self.rest = state["rest"]
        self._go_to(state["epoch"], state["place"])

    def take(self, count):
        """The next `count` sequences: ids and labels, int64 `[count, length]`."""
        (ids, labels), wanted = self.rest, count * self.length
        while len(ids) < wanted:
            with one_sentence(f"data: {self.stream.name!r} cannot be read"):
                rows = list(itertools.islice(self.rows, DOCUMENTS_AT_ONCE))
            if rows:
                new_ids, new_labels = self.stream.tokens(rows)
                ids, labels = ids + new_ids, labels + new_labels
            if len(rows) < DOCUMENTS_AT_ONCE:
                if self.fresh:
                    _check_length(len(ids), self.length, self.stream.name)
                self._go_to(self.epoch + 1, None)
            else:
                self.place = self.stream.dataset.state_dict()
        self.rest, self.fresh = [ids[wanted:], labels[wanted:]], False
        return torch.tensor([ids[:wanted], labels[:wanted]]).view(2, count, self.length).unbind()

    def state(self):
        return {"epoch": self.epoch, "place": self.place, "rest": self.rest}

    handover = state

    def _go_to(self, epoch, place):
        self.epoch, self.place = epoch, place
        self.stream.dataset.set_epoch(epoch)
        self.stream.dataset.load_state_dict(place)
        self.rows = iter(self.stream.dataset)


def _files(path):
    """The file, or the files of a folder: its texts, or else its tables of one kind."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for endings in (TEXT_ENDINGS, *((ending,) for ending in TABLE_ENDINGS)):
        if chosen := [file for file in files if file.suffix.lower() in endings]:
            return chosen
    endings = ", ".join((*TEXT_ENDINGS, *TABLE_ENDINGS))
    raise ValueError(f"data: the folder {str(path)!r} holds no text; expected files ending in {endings}")


def place_of(data, what="data"):
    """`data` as a path. ValueError for an empty text, such as an unset variable's, which would be the working folder."""
    if not str(data).strip():
        raise ValueError(f"{what}: got {str(data)!r}; expected a file, a folder or a dataset")
    return Path(data).expanduser()


def read_text_file(file, what="data"):
    """The text of a file; ValueError in one sentence when it is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: {str(file)!r} is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise ValueError(f"{what}: {str(file)!r} is no text: character {text.index(chr(0))} is NUL")
    return text


def load_split(name, *place, split="train", **options):
    """A split by `datasets.load_dataset`: of `place`, or of the id on the Hub that `name` is ("id" or "id:configuration").

    ValueError, one sentence, for what can only be a path, or cannot be reached. ImportError: `datasets` is missing.
    """
    repository, _, configuration = name.partition(":")
    looks_local = name.startswith((".", "/", "~")) or Path(name).suffix.lower() in (*TEXT_ENDINGS, *TABLE_ENDINGS)
    if not place and (looks_local or repository.count("/") > 1):
        raise ValueError(f"data: there is no file or folder {name!r}")
    with optional(f"data: {name!r}", "datasets", "train"):
        import datasets
    with one_sentence(f"data: {name!r} is neither a file or folder here nor a dataset that can be reached"):
        return datasets.load_dataset(*(place or (repository, configuration or None)), split=split, **options)


def identity_of(files):
    """Name, size and the hash of the first megabyte of each file, which identify them."""
    known = []
    for file in files:
        with file.open("rb") as stream:
            head = hashlib.sha256(stream.read(1 << 20)).hexdigest()[:16]
        known.append([file.name, file.stat().st_size, head])
    return known


def _encode(tokenizer, texts, name):
    if tokenizer is None:
        raise ValueError(f"tokenizer: None was given, and {name!r} is text; expected a tokenizer")
    if not texts:
        raise ValueError(f"data: {name!r} holds no text")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [token for document in documents for token in (*document, *end)]


def special_tokens(tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids, int64, that a tokenizer puts before a text and behind it; none without a tokenizer."""
    special = [] if tokenizer is None else tokenizer("")["input_ids"]
    begins = special[:1] if special and special[0] in (tokenizer.cls_token_id, tokenizer.bos_token_id) else []
    return torch.tensor(begins).long(), torch.tensor(special[len(begins) :]).long()


def with_special_tokens(ids: torch.Tensor, around: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows `[B, T]` with what `special_tokens` gave before and behind each."""
    before, after = (part.expand(len(ids), -1) for part in around)
    return torch.cat([before, ids, after], 1)


def check_ids(tokens, vocab_size, name):
    """ValueError, one sentence, unless all of `tokens`, of torch or NumPy, are from 0 to below `vocab_size`."""
    if vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        found = f"tokens {tokens.min()} to {tokens.max()}"
        raise ValueError(f"data: {name!r} gives {found}; the model knows 0 to {vocab_size - 1}")


def _check_length(tokens, length, name):
    if tokens < length:
        raise ValueError(f"data: {name!r} holds {tokens} tokens, which is shorter than one sequence (seq_len {length})")
