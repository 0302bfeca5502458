"""One text file, written aside and renamed: a reader, or a stop in the middle, never meets half of it."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> Path:
    """Put `text` (UTF-8, line ends as they are) at `path`; an old file there is replaced whole. Returns `path`."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8", newline="\n")
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return path
