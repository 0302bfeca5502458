"""What mkdocs asks when it builds the site (`make docs`): where the repository is, and what links out of docs/ mean there.

GitHub shows docs/ as it stands, with relative links to source files; on the site they lead to the repository.
"""

import logging
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ABOVE = re.compile(r"(?<=\]\()(?:\.\./)+[^)#]+")
logger = logging.getLogger("mkdocs.hooks")


def on_config(config):
    """The address of the repository stands in pyproject.toml alone."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    config.repo_url = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)[1]
    return config


def on_page_markdown(markdown, page, config, files):
    """A link out of docs/ becomes its address in the repository; one that is not there is warned of, an error if strict."""

    def address(found):
        place = (DOCS / page.file.src_uri).parent.joinpath(found[0]).resolve()
        if place.is_relative_to(DOCS):
            return found[0]
        if not place.exists():
            logger.warning("%s: links to %s, which does not exist", page.file.src_uri, found[0])
        return f"{config.repo_url}/{'tree' if place.is_dir() else 'blob'}/main/{place.relative_to(ROOT)}"

    return ABOVE.sub(address, markdown)
