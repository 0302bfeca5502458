"""Fold a model and what it needs of ops, nn and models into one self-contained source file.

A checkpoint travels with its code, and diffusers fetches exactly one source file from the Hub. It is sliced from the source
that the installed package runs: names are never rewritten; functions, classes and assignments that nothing refers to are
left out. What would change its meaning when many modules become one is refused. The Hub loaders read the text with regular
expressions: nothing in it may look like a relative import, and every import outside `try:` is demanded of the user.
"""

import ast
import builtins
import hashlib
import re
import symtable
import sys
from dataclasses import dataclass
from pathlib import Path

from ..models.families import DIFFUSION, ENCODERS, VISION

FILE_NAME = "modeling_mhla.py"
FORMAT = 1
PLACEHOLDER = "package"
COMMON = ("torch", "numpy", "safetensors", "huggingface_hub")  # what every user of either library has
LANGUAGE_ENTRIES = ("models.language", "models.converted_local", "models.converted_dense")
OTHER_ENTRIES = ("models.vision", *(each.entry for each in (*ENCODERS, *VISION)))
ENTRIES = dict.fromkeys((*LANGUAGE_ENTRIES, *OTHER_ENTRIES), ("transformers",))
ENTRIES |= {family.entry: ("diffusers",) for family in DIFFUSION}

_PACKAGE = Path(__file__).resolve().parent.parent
_LOOKS_RELATIVE = re.compile(r"^\s*import\s+\.\S+\s*$|^\s*from\s+\.\S*\s+import", re.MULTILINE)
_HEADER = re.compile(r"^format: (\d+)\nentry: (\S+)\nmade by mhla_hf: (\S+)\nsha256: ([0-9a-f]{12})$", re.MULTILINE)


def build_bundle(entry: str) -> str:
    """One source text with everything that `mhla_hf.<entry>` needs: header, imports, then each module in dependency order.

    entry: one of `ENTRIES`, module paths below the package. ValueError: it is none, or a module breaks a rule of the rooms.
    """
    if entry not in ENTRIES:
        raise ValueError(f"entry must be one of {list(ENTRIES)}, got {entry!r}")
    return fold(_PACKAGE, entry, ENTRIES[entry])


def make_source(entry: str) -> tuple[str, str]:
    """The name of the file that holds the bundle of `entry`, and its text.

    diffusers puts the files of all repositories into one folder, by name: there the name carries the hash of the text.
    """
    text = build_bundle(entry)
    if "diffusers" not in ENTRIES[entry]:
        return FILE_NAME, text
    family = entry.split(".")[-1].removesuffix("_transformer")
    return f"modeling_mhla_{family}_{check_bundle(text)['sha256']}.py", text


def check_bundle(text: str) -> dict[str, str]:
    """{"format", "entry", "version", "sha256"} of a bundle's header; sha256: the 12 digits that also are its namespace.

    ValueError: no header, a format of a newer mhla_hf, or a text changed after it was made.
    """
    found = _HEADER.search(text)
    if found is None:
        raise ValueError("text must be a bundle made by mhla_hf, got a file without its header")
    made_format, entry, version, sha = found.groups()
    if int(made_format) > FORMAT:
        raise ValueError(f"the bundle has format {made_format}, this mhla_hf reads up to {FORMAT}: update mhla_hf")
    if _sha(plain := _renamed(text, sha, PLACEHOLDER)) != sha:
        raise ValueError(f"the bundle was changed after it was made: its text hashes to {_sha(plain)}, not to {sha}")
    return {"format": made_format, "entry": entry, "version": version, "sha256": sha}


def fold(package: Path, entry: str, libraries: tuple[str, ...]) -> str:
    """The work of `build_bundle` for any package that keeps the rules.

    package: its folder, with `__version__ = "..."` in its `__init__.py`. entry: dotted module path below it.
    libraries: those besides torch and its companions that this entry may import outside `try:`.
    """
    version = re.search(r'^__version__ = "(.+)"$', (package / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    modules: dict[str, _Module] = {}
    _visit(package, entry, modules)
    _check_names(modules.values())
    used = _keep_reachable(modules, entry)
    imports = {one for module in modules.values() for name, one in module.imports.items() if name in used}
    for library in sorted(map(_library, imports)):
        if library not in sys.stdlib_module_names and library not in (*COMMON, *libraries):
            raise ValueError(f"{entry}: import of {library} outside `try:`: a user of this file may not have it")
    head = (
        f'"""MHLA, multi-head linear attention (arXiv 2601.07832): {package.name}.{entry} in one file.\n\n'
        f"Folded from the source of {package.name} for loading with trust_remote_code=True; needs no {package.name}.\n"
        "Change the package, not this file. License of the code: Apache-2.0.\n\n"
        f"format: {FORMAT}\nentry: {entry}\nmade by mhla_hf: {version[1]}\nsha256: {PLACEHOLDER}\n"
        '"""\n'
    )
    standard = {one for one in imports if _library(one) in sys.stdlib_module_names}
    parts = [head, *("\n".join(sorted(block)) + "\n" for block in (standard, imports - standard) if block)]
    for module in modules.values():
        body = "\n".join(part.text for part in module.parts).strip("\n")
        if body:
            parts.append(f"\n# {package.name}/{module.where}\n\n{body}\n")
    text = "\n".join(parts)
    looks = _LOOKS_RELATIVE.search(text)
    if looks:
        raise ValueError(f"{entry}: {looks[0].strip()!r} looks like a relative import to the Hub loaders' regex")
    text = _renamed(text, PLACEHOLDER, _sha(text))
    compile(text, FILE_NAME, "exec")
    return text


@dataclass(eq=False)
class _Part:
    """One top-level statement with the comments above it, the names that it binds, and those that it uses.

    optional: a function, a class or an assignment, left out where none of its names is used.
    """

    text: str
    binds: set[str]
    uses: set[str]
    optional: bool


@dataclass
class _Module:
    """One source file: its statements, the siblings it imports from, and of its names from libraries the import of each."""

    where: str
    parts: list[_Part]
    siblings: list[str]
    imports: dict[str, str]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _renamed(text: str, old: str, new: str) -> str:
    """A bundle whose header and namespace say `new` where they said `old`."""
    text = text.replace(f"\nsha256: {old}\n", f"\nsha256: {new}\n", 1)
    return text.replace(f'\nNAMESPACE = "{old}"\n', f'\nNAMESPACE = "{new}"\n', 1)


def _visit(package: Path, name: str, done: dict[str, _Module]) -> None:
    """Read `name` into `done`, after the modules it imports: in the order in which Python runs them."""
    module = _read(package, name)
    for target in module.siblings:
        if target not in done:
            _visit(package, target, done)
    done[name] = module


def _read(package: Path, name: str) -> _Module:
    path = package.joinpath(*name.split(".")).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    tree, lines, end = ast.parse(text), text.split("\n"), 0
    module = _Module(path.relative_to(package).as_posix(), [], [], {})
    for number, node in enumerate(tree.body):
        own, end = "\n".join(lines[end : node.end_lineno]), node.end_lineno
        if isinstance(node, ast.Import | ast.ImportFrom):
            _note_import(name, module, node)
        elif number or ast.get_docstring(tree) is None:
            module.parts.append(_Part(own, *_names(own), _optional(node)))
    return module


def _names(text: str) -> tuple[set[str], set[str]]:
    """The module-level names that a statement binds, and those that it uses, in its inner scopes too."""
    top = symtable.symtable(text, "", "exec")
    tables = [top]
    for table in tables:  # which grows meanwhile
        tables += table.get_children()
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used = [one for table in tables for one in table.get_symbols() if one.is_global() or table is top]
    return bound, bound | {one.get_name() for one in used if one.is_referenced()}  # x += 1 uses what it binds


def _optional(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)


def _note_import(name: str, module: _Module, node: ast.Import | ast.ImportFrom) -> None:
    """Note what one import statement needs of a sibling, or the names that it takes from a library."""
    if isinstance(node, ast.ImportFrom) and node.level:
        if not node.module or any(alias.asname for alias in node.names):
            raise ValueError(f"{module.where}:{node.lineno}: expected `from .file import name`, without `as`")
        module.siblings.append(".".join([*name.split(".")[: -node.level], node.module]))
        return
    for alias in node.names:
        one = f"from {node.module} import {alias.name}" if isinstance(node, ast.ImportFrom) else f"import {alias.name}"
        name = alias.asname or alias.name.split(".")[0]
        module.imports[name] = f"{one} as {alias.asname}" if alias.asname else one


def _check_names(modules) -> None:
    """One module-level name means one thing in the whole file, and none hides a builtin."""
    owner: dict[str, tuple[str, str]] = {}
    for module in modules:
        here = {name: module.where for part in module.parts for name in part.binds}
        for name, meaning in (*here.items(), *module.imports.items()):
            if hasattr(builtins, name) and not name.startswith("_"):
                raise ValueError(f"{module.where}: {name!r} hides the builtin of that name from every folded module")
            known, other = owner.setdefault(name, (meaning, module.where))
            if known != meaning:
                raise ValueError(f"{module.where}: {name!r} means something else in {other}: rename one of them")


def _keep_reachable(modules: dict[str, _Module], entry: str) -> set[str]:
    """Take out the optional parts that nothing refers to, from the whole of `entry` on; the names that are used then."""
    parts = [part for module in modules.values() for part in module.parts]
    kept = [part for part in parts if not part.optional or part in modules[entry].parts]
    used: set[str] = set()
    for part in kept:  # which grows meanwhile
        used |= part.uses
        kept += [other for other in parts if other.binds & part.uses and other not in kept]
    for module in modules.values():
        module.parts = [part for part in module.parts if part in kept]
    return used


def _library(one: str) -> str:
    """The library of `import x.y` or `from x.y import z`."""
    return one.split()[1].split(".")[0]
