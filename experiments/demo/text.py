"""The demo's text: what is trained on, what is held out, and a tokenizer for a model that has none yet.

The default is the Python language reference, which every Python carries, so the demo needs no download.
"""

import re

from mhla_hf.data import TEXT_ENDINGS, check_data_path, load_split, read_text_file

HELD_OUT = 0.07
MOST_HELD_OUT = 40_000
MOST_READ = 5_000_000
LEAST_READ = 60_000
END_OF_TEXT = "<|endoftext|>"
PARAGRAPH = re.compile(r"\n\s*\n")


def read_text(text=None):
    """The demo's text as one string, and what it is called.

    text: a file, a folder of text files, or the id of a dataset on the Hub (column "text", its first five million
        characters); None: the Python language reference (`pydoc_data.topics`).

    ValueError, one sentence: it cannot be read, or is too short for training and held-out tasks.
    """
    if text is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics.values()), "pydoc_data.topics"
    path = check_data_path(text, "text")
    if path.is_file():
        whole = read_text_file(path, "text")
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in TEXT_ENDINGS)
        whole = "\n\n".join(read_text_file(file, "text") for file in files)
    else:
        whole = _stream(str(text))
    if len(whole) < LEAST_READ:
        raise ValueError(f"text: {str(text)!r} holds {len(whole):,} characters; expected at least {LEAST_READ:,}")
    return whole[:MOST_READ], path.name if path.exists() else str(text)


def _stream(name):
    taken, size = [], 0
    for row in load_split(name, streaming=True):
        if not isinstance(row.get("text"), str):
            raise ValueError(f"text: the column 'text' of {name!r} is missing or holds no text")
        taken.append(row["text"])
        size += len(row["text"])
        if size >= MOST_READ:
            break
    return "\n\n".join(taken)


def hold_out(text):
    """(training part, held-out part): the last 7 %, at most 40,000 characters, cut at the end of a paragraph.

    Paragraphs of the held-out part that the training part has as well, whatever their line breaks, are left out: the
    language reference says some things twice (12 % of its end), and a model is not to be judged on what it has read.
    """
    cut = max(int(len(text) * (1 - HELD_OUT)), len(text) - MOST_HELD_OUT)
    paragraph = text.find("\n\n", cut, cut + 2_000)
    cut = paragraph + 2 if paragraph >= 0 else cut
    train, rest = text[:cut], text[cut:]
    known = {_words(paragraph) for paragraph in PARAGRAPH.split(train)}
    pieces = re.split(f"({PARAGRAPH.pattern})", rest)
    new = [end for end in range(0, len(pieces), 2) if _words(pieces[end]) not in known]
    return train, "".join("".join(pieces[end : end + 2]) for end in new)


def _words(paragraph):
    return " ".join(paragraph.split())


def make_tokenizer(text, vocab_size, length):
    """A byte-level BPE tokenizer of transformers, trained on `text`. length: tokens a model sees at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=length,
    )
