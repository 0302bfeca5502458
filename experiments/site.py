"""Hooks that mkdocs calls when it builds the site (`make docs`): the repository's address, and links that lead out of docs/.

On GitHub, pages of docs/ link to source files by relative paths. On the site, these links lead to the repository.
"""

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PARENT_LINK = re.compile(r"(?<=\]\()(?:\.\./)+[^)#]+")
logger = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> Any:
    """Set the repository's address to the one in pyproject.toml, the only place that has it."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (config.repo_url,) = re.findall(r'^Repository = "(.+)"$', project, re.MULTILINE)
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace relative links out of docs/ by addresses in the repository. A link to a missing file is logged as a warning,
    which `mkdocs build --strict` turns into an error."""

    def replace_link(match: re.Match[str]) -> str:
        target = (DOCS / page.file.src_uri).parent.joinpath(match[0]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            logger.warning("%s: got a link to %s, expected a file that exists.", page.file.src_uri, match[0])
        return f"{config.repo_url}/{'tree' if target.is_dir() else 'blob'}/main/{target.relative_to(ROOT)}"

    return PARENT_LINK.sub(replace_link, markdown)
