"""Bundle a model, with the code of ops, nn and models that it uses, into one self-contained source file.

A checkpoint carries its own code, and diffusers fetches exactly one source file from the Hub. No name is rewritten,
definitions that nothing refers to are left out, and docstrings are cut to their first paragraph.

The Hub's loaders scan the file with regular expressions: no text may look like a relative import, and every import outside
`try:` is a requirement.
"""

import ast
import functools
import hashlib
import re
import symtable
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..models.families import CAUSAL, DIFFUSION, ENCODER, TOWER
from ..models.transformers_api import TESTED_TRANSFORMERS

FILE_NAME = "modeling_mhla.py"
FORMAT = 1
PLACEHOLDER = "package"
# Entry (what to bundle: a module, or "module:function") -> the library that loads the bundle
ENTRIES = {
    **dict.fromkeys(("models.language.language_model", "models.vision.vision_model"), "transformers"),
    **dict.fromkeys((entry for kind in (CAUSAL, ENCODER, TOWER) for entry in kind.sources.values()), "transformers"),
    **dict.fromkeys((family.kind.entry for family in DIFFUSION), "diffusers"),
}
OLDEST = TESTED_TRANSFORMERS[0]
# Comes before the other imports of a bundle for transformers: older releases lack some of them.
CHECK_VERSION = f"""\
import transformers

if tuple(map(int, transformers.__version__.split(".")[:2])) < {tuple(map(int, OLDEST.split(".")[:2]))}:
    raise ImportError(
        f"transformers: got {{transformers.__version__}}, expected {OLDEST} or newer; run pip install -U transformers."
    )"""

_PACKAGE = Path(__file__).resolve().parent.parent
_HEADER = re.compile(r"^format: (\d+)\nentry: (\S+)\nmade by mhla_hf: (\S+)\nsha256: ([0-9a-f]{12})$", re.MULTILINE)


@functools.cache
def build_bundle(entry: str) -> str:
    """Return the source text of the bundle for one of `ENTRIES`; raise ValueError for any other entry."""
    if entry not in ENTRIES:
        raise ValueError(f"entry: got {entry!r}, expected one of {list(ENTRIES)}.")
    return fold(_PACKAGE, entry, ENTRIES[entry])


def make_source(entry: str) -> tuple[str, str]:
    """Return the file name and the source text of the bundle for an entry."""
    text = build_bundle(entry)
    if ENTRIES[entry] != "diffusers":
        return FILE_NAME, text
    # The name has a hash, because diffusers caches the source files of all repositories in one folder.
    family = entry.split(".")[-1].removesuffix("_transformer")
    return f"modeling_mhla_{family}_{check_bundle(text)['sha256']}.py", text


def check_bundle(text: str) -> dict[str, str]:
    """Return a bundle's header: "format", "entry", "version", and "sha256" (12 hex digits, also in its `NAMESPACE`).

    Raise ValueError if there is no header, the format is newer than this package supports, or the text was changed.
    """
    header = _HEADER.search(text)
    if header is None:
        raise ValueError("text: got a file without a bundle's header, expected a bundle made by mhla_hf.")
    bundle_format, entry, version, sha = header.groups()
    if int(bundle_format) > FORMAT:
        raise ValueError(f"text: got a bundle of format {bundle_format}, expected at most {FORMAT}; update mhla_hf.")
    actual = _hash_text(_replace_hash(text, sha, PLACEHOLDER))
    if actual != sha:
        raise ValueError(f"text: got a bundle that was edited and hashes to {actual}, expected {sha} as in its header.")
    return {"format": bundle_format, "entry": entry, "version": version, "sha256": sha}


def fold(package: Path, entry: str, library: str) -> str:
    """Return the bundle of an entry, a module or "module:function" of any package, for "transformers" or "diffusers"."""
    init = (package / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    assert version is not None
    modules: dict[str, _Module] = {}
    _collect_modules(package, entry, modules)
    roots = [item for module in modules.values() for item in module.statements if not item.droppable]
    used = _drop_unreachable(modules.values(), roots + modules[entry].statements)
    imports = {line for module in modules.values() for name, line in module.imports.items() if name in used}
    header = (
        f'"""MHLA, multi-head linear attention (arXiv 2601.07832): {package.name}.{entry} in one file.\n\n'
        f"Folded from the source of {package.name} for loading with trust_remote_code=True; needs no {package.name}.\n"
        "Docstrings are cut to one paragraph. Change the package, not this file. License of the code: Apache-2.0.\n\n"
        f"format: {FORMAT}\nentry: {entry}\nmade by mhla_hf: {version[1]}\nsha256: {PLACEHOLDER}\n"
        '"""\n'
    )
    standard = {line for line in imports if line.split()[1].split(".")[0] in sys.stdlib_module_names}
    check = CHECK_VERSION if library == "transformers" else ""
    groups = (_join_imports(standard), check, _join_imports(imports - standard - {*check.splitlines()}))
    sections = [header, *(f"{group}\n" for group in groups if group)]
    for module in modules.values():
        body = "\n".join(statement.text for statement in module.statements).strip("\n")
        if body:
            sections.append(f"\n# {package.name}/{module.path}\n{body}\n")
    text = "\n".join(sections)
    return _replace_hash(text, PLACEHOLDER, _hash_text(text))


def _join_imports(lines: Collection[str]) -> str:
    """Return sorted import statements, with one line for all names of a module."""
    names: dict[str, list[str]] = {}
    for line in sorted(lines):
        start, _, name = line.rpartition("import ")
        names.setdefault(f"{start}import ", []).append(name)
    plain = [f"import {name}" for name in names.pop("import ", [])]
    return "\n".join([*plain, *(start + ", ".join(names[start]) for start in names)])


@dataclass(eq=False)
class _Statement:
    """A top-level statement with the comments above it, and the module-level names that it binds and uses."""

    text: str
    binds: set[str]
    uses: set[str]
    droppable: bool  # whether it is left out if nothing uses its names: definitions, assignments to names, and `try`


@dataclass
class _Module:
    path: str
    statements: list[_Statement]
    siblings: dict[str, set[str]]  # module of the package -> names imported from it
    imports: dict[str, str]  # name from a library -> its import line


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _replace_hash(text: str, old: str, new: str) -> str:
    """Return the text of a bundle with another hash in its header and in its `NAMESPACE`."""
    text = text.replace(f"\nsha256: {old}\n", f"\nsha256: {new}\n", 1)
    return text.replace(f'\nNAMESPACE = "{old}"\n', f'\nNAMESPACE = "{new}"\n', 1)


def _collect_modules(package: Path, name: str, modules: dict[str, _Module]) -> None:
    """Add the module `name` to `modules` in place, after those that it imports: the order in which Python runs them."""
    module = _read_module(package, name)
    for sibling in module.siblings:
        if sibling not in modules:
            _collect_modules(package, sibling, modules)
    modules[name] = module


def _read_module(package: Path, name: str) -> _Module:
    """Parse a module into statements. For "module:function", keep only what the function uses; alias it `__getattr__`."""
    name, _, function = name.partition(":")
    path = package.joinpath(*name.split(".")).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.split("\n")
    end = 0
    module = _Module(path.relative_to(package).as_posix(), [], {}, {})
    for number, node in enumerate(tree.body):
        assert node.end_lineno is not None
        source = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            _add_import(name, module, node)
        elif number or ast.get_docstring(tree) is None:
            droppable = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign | ast.Try)
            if isinstance(node, ast.Assign):
                droppable = all(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
            module.statements.append(_Statement(_shorten_docstrings(source), *_find_names(source), droppable))
    if function:
        used = _drop_unreachable([module], [item for item in module.statements if function in item.binds])
        module.siblings = {sibling: names for sibling, names in module.siblings.items() if names & used}
        module.statements.append(_Statement(f"\n\n__getattr__ = {function}", {"__getattr__"}, {function}, True))
    return module


def _shorten_docstrings(source: str) -> str:
    """Cut the docstrings in the source of a statement to their first paragraphs."""
    lines = source.split("\n")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    docs = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False) is not None]
    for doc in sorted(docs, key=lambda doc: doc.lineno, reverse=True):
        text = lines[doc.lineno - 1 : doc.end_lineno]
        if "" in text:
            blank, quotes = text.index(""), text[-1][-3:]
            lines[doc.lineno - 1 : doc.end_lineno] = [*text[: blank - 1], text[blank - 1] + quotes]
    return "\n".join(lines)


def _find_names(source: str) -> tuple[set[str], set[str]]:
    """Return two sets: the module-level names that a statement binds, and the names that it uses in any of its scopes."""
    top = symtable.symtable(source, "", "exec")
    tables = [top]
    for table in tables:  # the list grows until it has all nested scopes
        tables += table.get_children()
    bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    symbols = [symbol for table in tables for symbol in table.get_symbols() if symbol.is_global() or table is top]
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return bound, bound | used  # a statement such as x += 1 uses the names that it binds


def _add_import(name: str, module: _Module, node: ast.Import | ast.ImportFrom) -> None:
    """Add an import statement of the module `name` to `module.siblings` or `module.imports`, in place."""
    if isinstance(node, ast.ImportFrom) and node.level:
        sibling = ".".join([*name.split(".")[: -node.level], node.module or ""])
        module.siblings.setdefault(sibling, set()).update(alias.name for alias in node.names)
        return
    for alias in node.names:
        line = f"from {node.module} import {alias.name}" if isinstance(node, ast.ImportFrom) else f"import {alias.name}"
        bound = alias.asname or alias.name.split(".")[0]
        module.imports[bound] = f"{line} as {alias.asname}" if alias.asname else line


def _drop_unreachable(modules: Collection[_Module], roots: list[_Statement]) -> set[str]:
    """Drop, in place, the statements that are not reachable from the roots; return the names that the kept ones use."""
    statements = [statement for module in modules for statement in module.statements]
    kept = list(roots)
    used: set[str] = set()
    for statement in kept:  # the list grows until it has all that is used
        used.update(statement.uses)
        kept += [item for item in statements if item.binds & statement.uses and item not in kept]
    for module in modules:
        module.statements = [statement for statement in module.statements if statement in kept]
    return used
