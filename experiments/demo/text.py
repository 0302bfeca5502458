"""The demo's text: what is trained on, what is held out, and a tokenizer for a model that has none yet.

The default is the Python language reference, which is part of every Python, so that the demo needs no download.
"""

import re
from pathlib import Path
from typing import Any

from mhla_hf.data import TEXT_ENDINGS, check_data_path, load_split, read_text_file

HELD_OUT_SHARE = 0.07
MAX_HELD_OUT = 40_000  # characters
MIN_TEXT, MAX_TEXT = 60_000, 5_000_000  # characters
END_OF_TEXT = "<|endoftext|>"
PARAGRAPH = re.compile(r"\n\s*\n")


def read_text(text: str | Path | None = None) -> tuple[str, str]:
    """Read a text file, a folder of them, or the column "text" of a dataset, at most its first five million characters. None
    is the Python language reference (`pydoc_data.topics`). Returns the text, and its name."""
    if text is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values()), "pydoc_data.topics"
    path = check_data_path(text, "text")
    if path.is_file():
        content = read_text_file(path, "text")
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in TEXT_ENDINGS)
        content = "\n\n".join(read_text_file(file, "text") for file in files)
    else:
        texts, num_characters = [], 0
        for row in load_split(str(text), streaming=True):
            if not isinstance(row.get("text"), str):
                raise ValueError(
                    f"text: got {text!r} without texts in a column 'text', expected a dataset that has them."
                )
            texts.append(row["text"])
            num_characters += len(row["text"])
            if num_characters >= MAX_TEXT:
                break
        content = "\n\n".join(texts)
    if len(content) < MIN_TEXT:
        raise ValueError(
            f"text: got {str(text)!r} with {len(content):,} characters, expected at least {MIN_TEXT:,} characters."
        )
    return content[:MAX_TEXT], path.name if path.exists() else str(text)


def hold_out(text: str) -> tuple[str, str]:
    """Split a text into a part to train on, and a held-out part: the last 7 %, at most 40,000 characters. Paragraphs that
    are in the training part as well, whatever their line breaks, are removed from it. The language reference repeats some
    (12 % of its end), and a model must not be judged on what it was trained on."""
    cut = max(int(len(text) * (1 - HELD_OUT_SHARE)), len(text) - MAX_HELD_OUT)
    paragraph_end = text.find("\n\n", cut, cut + 2_000)
    cut = paragraph_end + 2 if paragraph_end >= 0 else cut
    train, rest = text[:cut], text[cut:]
    known = {tuple(paragraph.split()) for paragraph in PARAGRAPH.split(train)}
    pieces = re.split(f"({PARAGRAPH.pattern})", rest)  # paragraphs at even indices, and what separates them
    new = [index for index in range(0, len(pieces), 2) if tuple(pieces[index].split()) not in known]
    return train, "".join("".join(pieces[index : index + 2]) for index in new)


def make_tokenizer(text: str, vocab_size: int, length: int) -> Any:
    """Train a byte-level BPE tokenizer of transformers for a model that reads at most `length` tokens at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"initial_alphabet": alphabet, "special_tokens": [END_OF_TEXT], "show_progress": False}
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(vocab_size=vocab_size, **options))
    special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **special_tokens)
