"""Text to train on, cut into full sequences: from a file, a folder, tokens at hand, or a stream of `datasets`.

Two sources, one way to read them. Text on disk is tokenised once and held as a ring of tokens; which sequences a step
reads follows from (seed, stage, step) alone. A stream is read in windows of 256 sequences, each shuffled within itself,
the next one being prepared by a thread; its place is the state that `datasets` gives at the window's start. Unusual:
every process reads the same rows and keeps its share of them, so the order of the data does not depend on how many
processes there are; and no padding exists, so every token carries a loss unless the data's own `labels` say -100.
"""

import copy
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch

TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")
TABLE_ENDINGS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
WINDOW = 256
DOCUMENTS_AT_ONCE = 32


def open_text(data, tokenizer=None, *, text_field="text", vocab_size=None):
    """Open what a user calls data.

    Args:
        data: a text file; a folder of text files (.txt, .md, .rst, .text, also in sub-folders), a `datasets` table on
            disk (.jsonl, .json, .parquet, .csv, .arrow, or a folder of them), the id of a dataset on the Hub ("id" or
            "id:configuration", split "train"), read as a stream; a `datasets` Dataset or IterableDataset; or the tokens
            themselves, an integer tensor `[N]`.
        tokenizer: needed unless the data are tokens (a tensor, or rows with `input_ids` and, if wanted, `labels`). Its
            end-of-sequence token follows every document.
        text_field: the column of a dataset that holds the text.
        vocab_size: token ids must be below it; None: unchecked.

    Returns:
        `TokenRing` or `TokenStream`. Both have `reader(length, seed, stage, state)` and `describe()`.

    Raises:
        ValueError, TypeError: one sentence that says what is wrong with `data`. ImportError: `datasets` is missing.
    """
    if isinstance(data, torch.Tensor):
        if data.ndim != 1 or data.is_floating_point() or data.dtype == torch.bool:
            raise ValueError(f"data: got a tensor {tuple(data.shape)} of {data.dtype}; expected whole numbers [N]")
        return TokenRing(data, vocab_size, "tokens at hand")
    if isinstance(data, (str, Path)):
        path = place_of(data)
        if path.is_dir():
            return _open_folder(path, tokenizer, text_field, vocab_size)
        if path.is_file():
            return _open_files([path], str(path), tokenizer, text_field, vocab_size)
        return _open_hub(str(data), tokenizer, text_field, vocab_size)
    if hasattr(data, "to_iterable_dataset"):
        data = data.to_iterable_dataset()
    if hasattr(data, "state_dict") and hasattr(data, "set_epoch"):
        return TokenStream(data, tokenizer, text_field, vocab_size, f"a dataset with columns {data.column_names}")
    raise TypeError(f"data: got {type(data).__name__}; expected a file, a folder, a dataset or a tensor of tokens")


class TokenRing:
    """Tokens in memory, the last followed by the first. tokens: whole numbers `[N]`."""

    def __init__(self, tokens, vocab_size, name):
        self.tokens = torch.as_tensor(tokens).to(device="cpu", dtype=torch.int32).contiguous()
        self.name = name
        if not len(self.tokens):
            raise ValueError(f"data: {name!r} holds no text")
        _check_ids(self.tokens, vocab_size, name)

    def describe(self):
        """What identifies the data: kind, number of tokens, hash of all tokens."""
        digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:32]
        return {"kind": "tokens", "tokens": len(self.tokens), "sha256": digest}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage, from the start or from `state`. ValueError when the text is too short."""
        return _RingReader(self, length, seed, stage, state)


class _RingReader:
    """Every epoch cuts the ring into sequences from a new start and takes them in a new order."""

    def __init__(self, ring, length, seed, stage, state):
        if len(ring.tokens) < length:
            raise ValueError(
                f"data: {ring.name!r} holds {len(ring.tokens)} tokens, which is shorter than one sequence "
                f"(seq_len {length})"
            )
        self.tokens, self.length, self.key = ring.tokens, length, (seed, stage)
        self.next = state["next"] if state else 0
        self.epoch = None

    def take(self, count):
        """The next `count` sequences: ids and labels, int64 `[count, length]`."""
        per_epoch = len(self.tokens) // self.length
        starts = []
        for sample in range(self.next, self.next + count):
            epoch, place = divmod(sample, per_epoch)
            if epoch != self.epoch:
                random = numpy.random.default_rng((*self.key, epoch))
                self.offset, self.order = int(random.integers(len(self.tokens))), random.permutation(per_epoch)
                self.epoch = epoch
            starts.append(self.offset + int(self.order[place]) * self.length)
        self.next += count
        index = (torch.tensor(starts)[:, None] + torch.arange(self.length)) % len(self.tokens)
        ids = self.tokens[index].long()
        return ids, ids

    def state(self):
        """What `reader(state=...)` needs to go on here."""
        return {"next": self.next}

    def handover(self):
        """What the next stage's reader starts from: nothing, its order is its own."""

    def close(self):
        """Nothing is held."""


class TokenStream:
    """A `datasets.IterableDataset` as packed sequences. Rows have `text_field`, or `input_ids` and perhaps `labels`."""

    def __init__(self, dataset, tokenizer, text_field, vocab_size, name):
        self.dataset, self.tokenizer, self.text_field = dataset, tokenizer, text_field
        self.vocab_size, self.name = vocab_size, name
        self.identity = name

    def describe(self):
        """What identifies the data: kind and where it comes from."""
        return {"kind": "stream", "source": self.identity, "field": self.text_field}

    def reader(self, length, seed, stage, state=None):
        """The sequences of one stage. Reads the first window at once, so that a bad stream is known at the start."""
        return _StreamReader(self, length, seed, stage, state)

    def tokens(self, rows):
        """ids and labels, two flat lists, of a list of rows, with the end-of-sequence token after each text."""
        if "input_ids" in rows[0]:
            ids = [token for row in rows for token in row["input_ids"]]
            labels = [token for row in rows for token in row.get("labels", row["input_ids"])]
            if len(ids) != len(labels):
                raise ValueError(f"data: {self.name!r} has {len(ids)} input_ids beside {len(labels)} labels")
        else:
            if self.text_field not in rows[0]:
                columns = ", ".join(rows[0])
                raise ValueError(f"data: {self.name!r} has no column {self.text_field!r}; it has {columns}")
            texts = [row[self.text_field] for row in rows]
            if bad := [text for text in texts if not isinstance(text, str)]:
                raise ValueError(f"data: column {self.text_field!r} holds a {type(bad[0]).__name__}; expected text")
            ids = _encode(self.tokenizer, texts, self.name)
            labels = ids
        if ids:
            _check_ids(torch.tensor(ids), self.vocab_size, self.name)
        return ids, labels


class _StreamReader:
    def __init__(self, stream, length, seed, stage, state):
        self.stream, self.length, self.key = stream, length, (seed, stage)
        state = state or {"start": {"epoch": 0, "seen": 0, "place": None, "ids": [], "labels": []}}
        self.number, self.next = state.get("number", 0), state.get("next", 0)
        self.start = state["start"]
        self._place(self.start)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mhla_hf-data")
        self._shuffle(*self._read(self.start))

    def take(self, count):
        """The next `count` sequences: ids and labels, int64 `[count, length]`."""
        ids, labels = [], []
        while count:
            if self.next == WINDOW:
                self.start, self.number, self.next = self.end, self.number + 1, 0
                self._shuffle(*self.coming.result())
            rows = self.order[self.next : self.next + count]
            ids.append(self.ids[rows])
            labels.append(self.labels[rows])
            self.next += len(rows)
            count -= len(rows)
        return torch.cat(ids), torch.cat(labels)

    def state(self):
        """What `reader(state=...)` needs to go on here: the window's start, and the place in the window."""
        return {"start": self.start, "number": self.number, "next": self.next}

    def handover(self):
        """What the next stage's reader starts from: the window after this one."""
        return {"start": self.end}

    def close(self):
        """Stop reading ahead."""
        self.thread.shutdown(wait=True, cancel_futures=True)

    def _shuffle(self, ids, labels, end):
        self.ids, self.labels, self.end = ids, labels, end
        self.order = torch.from_numpy(numpy.random.default_rng((*self.key, self.number)).permutation(WINDOW))
        self.coming = self.thread.submit(self._read, end)

    def _place(self, start):
        dataset = self.stream.dataset
        dataset.set_epoch(start["epoch"])
        dataset.load_state_dict(start["place"])
        self.rows = iter(dataset)

    def _read(self, start):
        """One window from `start`, where `self.rows` stands: ids, labels `[WINDOW, length]`, and the state behind it."""
        epoch, seen = start["epoch"], start["seen"]
        ids, labels, wanted = list(start["ids"]), list(start["labels"]), WINDOW * self.length
        while len(ids) < wanted:
            rows = self._next_rows()
            if rows:
                new_ids, new_labels = self.stream.tokens(rows)
                ids += new_ids
                labels += new_labels
                seen += len(new_ids)
            if len(rows) < DOCUMENTS_AT_ONCE:
                if seen < self.length:
                    raise ValueError(
                        f"data: {self.stream.name!r} holds {seen} tokens, which is shorter than one sequence "
                        f"(seq_len {self.length})"
                    )
                epoch, seen = epoch + 1, 0
                self._place({"epoch": epoch, "place": None})
        place = copy.deepcopy(self.stream.dataset.state_dict())
        end = {"epoch": epoch, "seen": seen, "place": place, "ids": ids[wanted:], "labels": labels[wanted:]}
        shape = (WINDOW, self.length)
        return torch.tensor(ids[:wanted]).view(shape), torch.tensor(labels[:wanted]).view(shape), end

    def _next_rows(self):
        rows = []
        try:
            while len(rows) < DOCUMENTS_AT_ONCE and (row := next(self.rows, None)) is not None:
                rows.append(row)
        except (OSError, ValueError) as error:
            raise ValueError(f"data: {self.stream.name!r} cannot be read ({_one_line(error)})") from error
        return rows


def _open_folder(path, tokenizer, text_field, vocab_size):
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for endings in (TEXT_ENDINGS, TABLE_ENDINGS):
        if chosen := [file for file in files if file.suffix.lower() in endings]:
            return _open_files(chosen, str(path), tokenizer, text_field, vocab_size)
    endings = ", ".join((*TEXT_ENDINGS, *TABLE_ENDINGS))
    raise ValueError(f"data: the folder {str(path)!r} holds no text; expected files ending in {endings}")


def _open_files(files, name, tokenizer, text_field, vocab_size):
    builder = TABLE_ENDINGS.get(files[0].suffix.lower())
    if builder:
        files = [file for file in files if file.suffix == files[0].suffix]
        stream = _load(name, tokenizer, text_field, vocab_size, builder, data_files=[str(file) for file in files])
        stream.identity = [[file.name, file.stat().st_size, head_hash(file)] for file in files]
        return stream
    texts = []
    for file in files:
        texts.append(read_text_file(file))
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"data: {name!r} holds no text")
    return TokenRing(_encode(tokenizer, texts, name), vocab_size, name)


def place_of(data, what="data"):
    """`data` as a path. ValueError for no text at all, which would be the working folder, and for a link to nothing."""
    path = Path(data).expanduser()
    if not str(data).strip() or (path.is_symlink() and not path.exists()):
        found = "a link to nothing" if str(data).strip() else "no name"
        raise ValueError(f"{what}: {str(data)!r} is {found}; expected a file, a folder or a dataset")
    return path


def read_text_file(file, what="data"):
    """The text of a file; ValueError in one sentence when it is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: {str(file)!r} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"{what}: {str(file)!r} cannot be read ({error.strerror})") from None
    if "\0" in text:
        raise ValueError(f"{what}: {str(file)!r} is no text: character {text.index(chr(0))} is NUL")
    return text


def _open_hub(name, tokenizer, text_field, vocab_size):
    return _load(name, tokenizer, text_field, vocab_size, *hub_id(name))


def _load(label, tokenizer, text_field, vocab_size, *arguments, **options):
    dataset = load_split(label, *arguments, streaming=True, **options)
    return TokenStream(dataset, tokenizer, text_field, vocab_size, label)


def load_split(label, *arguments, split="train", **options):
    """A split by `datasets.load_dataset`; `label` names the data in the one sentence of an error."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"data: {label!r} is read with datasets, which is missing: pip install 'mhla_hf[train]'"
        ) from error
    try:
        return datasets.load_dataset(*arguments, split=split, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data: {label!r} is neither a file or folder here nor a dataset that can be reached ({_one_line(error)})"
        ) from error


def hub_id(name):
    """(repository, configuration or None) of "id" or "id:configuration"; ValueError for what can only be a path."""
    repository, _, configuration = name.partition(":")
    looks_local = name.startswith((".", "/", "~")) or Path(name).suffix.lower() in (*TEXT_ENDINGS, *TABLE_ENDINGS)
    if looks_local or not name.strip() or repository.count("/") > 1:
        raise ValueError(f"data: there is no file or folder {name!r}")
    return repository, configuration or None


def _encode(tokenizer, texts, name):
    if tokenizer is None:
        raise ValueError(f"tokenizer: None was given, and {name!r} is text; expected a tokenizer")
    ids, end = [], tokenizer.eos_token_id
    for document in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        ids += document
        if end is not None:
            ids.append(end)
    return ids


def _check_ids(tokens, vocab_size, name):
    low, high = int(tokens.min()), int(tokens.max())
    if vocab_size is not None and (low < 0 or high >= vocab_size):
        raise ValueError(
            f"data: {name!r} gives token {low if low < 0 else high}; the model knows tokens 0 to {vocab_size - 1}, "
            "so this is not its tokenizer"
        )


def head_hash(file):
    """Hash of a file's first megabyte, which with its size identifies it."""
    with file.open("rb") as stream:
        return hashlib.sha256(stream.read(1 << 20)).hexdigest()[:16]


def _one_line(error):
    return " ".join(str(error).split())[:300]
