"""Fold a model and everything it imports from ops, nn and models into one self-contained source file.

A checkpoint travels with its code, and diffusers fetches exactly one source file from the Hub; so each checkpoint
carries one file, made from the very source that the installed package runs. Unusual: the file is made by slicing
source lines, not by printing a syntax tree, so comments and layout stay; names are never rewritten, so whatever would
change its meaning when many modules become one (a name with two meanings, an alias, an import hidden in a function)
is refused with file and line. The Hub loaders of transformers and diffusers read the text with regular expressions:
nothing in it, not even in a string, may look like a relative import, and every import outside `try:` is demanded of
the user.
"""

import ast
import builtins
import hashlib
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ..models.families import DIFFUSION, LANGUAGE, VISION
from .files import write_text

FILE_NAME = "modeling_mhla.py"
FORMAT = 1
PLACEHOLDER = "package"
ROOMS = ("ops", "nn", "models")  # the shipped rooms, lowest first: imports point down
ALIASES = {"torch.nn.functional": "F", "triton.language": "tl"}
COMMON = ("torch", "numpy", "safetensors", "huggingface_hub")  # what every user of either library has
ENTRIES = {"models.language": ("transformers",), "models.vision": ("transformers",)}
ENTRIES |= {family.entry: ("transformers",) for family in (*LANGUAGE, *VISION)}
ENTRIES |= {family.entry: ("diffusers",) for family in DIFFUSION}

_PACKAGE = Path(__file__).resolve().parent.parent
_LOOKS_RELATIVE = re.compile(r"^\s*import\s+\.(\S+)\s*$|^\s*from\s+\.(\S*)\s+import", re.MULTILINE)
_HEADER = re.compile(r"^format: (\d+)\nentry: (\S+)\nmade by mhla_hf: (\S+)\nsha256: ([0-9a-f]{12})$", re.MULTILINE)


def entries() -> list[str]:
    """The bundle entries whose source exists: module paths below the package, such as "models.language"."""
    return [entry for entry in ENTRIES if _file(_PACKAGE, entry).is_file()]


def build_bundle(entry: str) -> str:
    """One source text with everything that `mhla_hf.<entry>` needs.

    Args:
        entry: one of `entries()`.

    Returns:
        Python source, the same on every call: header, imports, then each module in dependency order.

    Raises:
        ValueError: the entry is unknown, or a module breaks a rule of the shipped rooms (with file and line).
    """
    if entry not in entries():
        raise ValueError(f"entry must be one of {entries()}, got {entry!r}")
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


def write_bundle(entry: str, folder: str | os.PathLike) -> Path:
    """Write the bundle of `entry` into `folder` (made when missing), replacing an old one of its name whole."""
    name, text = make_source(entry)
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a directory, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    return write_text(folder / name, text)


def check_bundle(text: str) -> dict[str, str]:
    """Read a bundle's header and prove that the text is what was made.

    Returns:
        {"format", "entry", "version", "sha256"} (sha256: the 12 hex digits that also are the bundle's namespace).

    Raises:
        ValueError: no header, a format of a newer mhla_hf, or a text changed after it was made.
    """
    found = _HEADER.search(text)
    if found is None:
        raise ValueError("text must be a bundle made by mhla_hf, got a file without its header")
    made_format, entry, version, sha = found.groups()
    if int(made_format) > FORMAT:
        raise ValueError(f"the bundle has format {made_format}, this mhla_hf reads up to {FORMAT}: update mhla_hf")
    plain = text.replace(f"\nsha256: {sha}\n", f"\nsha256: {PLACEHOLDER}\n", 1)
    plain = plain.replace(f'\nNAMESPACE = "{sha}"\n', f'\nNAMESPACE = "{PLACEHOLDER}"\n', 1)
    if _sha(plain) != sha:
        raise ValueError(f"the bundle was changed after it was made: its text hashes to {_sha(plain)}, not to {sha}")
    return {"format": made_format, "entry": entry, "version": version, "sha256": sha}


def fold(package: Path, entry: str, libraries: tuple[str, ...]) -> str:
    """The work of `build_bundle` for any package that keeps the rules.

    Args:
        package: folder of the package, with `__version__ = "..."` in its `__init__.py`.
        entry: dotted module path below it.
        libraries: libraries besides torch and its companions that this entry may import outside `try:`.
    """
    modules = _closure(package, entry)
    _check_names(modules)
    _check_futures(modules)
    _check_libraries(modules, (*COMMON, *libraries))
    head = (
        f'"""MHLA, multi-head linear attention (arXiv 2601.07832): {package.name}.{entry} in one file.\n\n'
        f"Folded from the source of {package.name} for loading with trust_remote_code=True; needs no {package.name}.\n"
        "Change the package, not this file. Licence of the code: Apache-2.0.\n\n"
        f"format: {FORMAT}\nentry: {entry}\nmade by mhla_hf: {_version(package)}\nsha256: {PLACEHOLDER}\n"
        '"""\n'
    )
    parts = [head]
    if modules[0].futures:
        parts.append(f"from __future__ import {', '.join(sorted(modules[0].futures))}\n")
    parts.append(_import_block(modules))
    seen: set[str] = set()
    for module in modules:
        body = module.body(seen)
        if body:
            parts.append(f"\n# {package.name}/{module.where}\n\n{body}\n")
    text = "\n".join(part for part in parts if part)
    sha = _sha(text)
    text = text.replace(f"\nsha256: {PLACEHOLDER}\n", f"\nsha256: {sha}\n", 1)
    text = text.replace(f'\nNAMESPACE = "{PLACEHOLDER}"\n', f'\nNAMESPACE = "{sha}"\n', 1)
    compile(text, FILE_NAME, "exec")
    return text


@dataclass
class _Import:
    """One absolute import outside `try:`; `name` is None for `import module`."""

    module: str
    name: str | None
    alias: str | None
    line: int


@dataclass
class _Module:
    """What one source file says: its kept lines, what it imports, what it binds."""

    name: str
    where: str
    lines: list[str]
    package: str
    dropped: set[int] = field(default_factory=set)
    siblings: list[tuple[str, list[str], int]] = field(default_factory=list)
    imports: list[_Import] = field(default_factory=list)
    guards: list[tuple[str, int, int, list[str]]] = field(default_factory=list)  # dump, first and last line, libraries
    futures: set[str] = field(default_factory=set)
    bound: dict[str, tuple[str, int]] = field(default_factory=dict)  # name -> (origin, line)

    def fail(self, line: int, what: str) -> ValueError:
        return ValueError(f"{self.package}/{self.where}:{line}: {what}")

    def bind(self, name: str, origin: str, line: int) -> None:
        known = self.bound.setdefault(name, (origin, line))
        if known[0] != origin:
            raise self.fail(line, f"{name!r} already means something else since line {known[1]}")

    def drop(self, first: int, last: int) -> None:
        """Leave out lines first..last and the blank lines after them."""
        while last < len(self.lines) and not self.lines[last].strip():
            last += 1
        self.dropped.update(range(first, last + 1))

    def body(self, seen: set[str]) -> str:
        """The kept lines; a guarded import block that an earlier module already brought is left out."""
        for dump, first, last, _ in self.guards:
            if dump in seen:
                self.drop(first, last)
            seen.add(dump)
        return "\n".join(line for i, line in enumerate(self.lines, 1) if i not in self.dropped).strip("\n")


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _file(package: Path, name: str) -> Path:
    return package.joinpath(*name.split(".")).with_suffix(".py")


def _version(package: Path) -> str:
    init = package / "__init__.py"
    if init.is_file():
        for node in ast.parse(init.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
                return str(ast.literal_eval(node.value))
    raise ValueError(f'{package.name}/__init__.py must say __version__ = "...", found no such line')


def _closure(package: Path, entry: str) -> list[_Module]:
    """Every module that `entry` needs, each after the modules it imports, in the order in which Python runs them."""
    done: dict[str, _Module] = {}
    open_names: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        if name in open_names:
            chain = " -> ".join([*open_names[open_names.index(name) :], name])
            raise ValueError(f"modules import each other in a circle: {chain}")
        open_names.append(name)
        module = _read(package, name)
        for target, names, line in module.siblings:
            visit(target)
            for wanted in names:
                if wanted not in done[target].bound:
                    raise module.fail(line, f"{done[target].where} defines no {wanted!r}")
                module.bind(wanted, done[target].bound[wanted][0], line)
        open_names.pop()
        done[name] = module

    visit(entry)
    return list(done.values())


def _read(package: Path, name: str) -> _Module:
    """Parse one module, check its form, and note what folding needs."""
    path = _file(package, name)
    text = path.read_text(encoding="utf-8")
    module = _Module(name, path.relative_to(package).as_posix(), text.split("\n"), package.name)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise module.fail(error.lineno or 1, f"is not valid Python ({error.msg})") from error
    _check_forms(module, tree)
    spans: dict[int, int] = {}
    for node in tree.body:
        for line in range(node.lineno, node.end_lineno + 1):
            spans[line] = spans.get(line, 0) + 1
    for position, node in enumerate(tree.body):
        docstring = position == 0 and ast.get_docstring(tree) is not None
        plain = isinstance(node, ast.Import | ast.ImportFrom)
        guard = isinstance(node, ast.Try) and any(isinstance(n, ast.Import | ast.ImportFrom) for n in ast.walk(node))
        shared = any(spans[line] > 1 for line in range(node.lineno, node.end_lineno + 1))
        if shared and (docstring or plain or guard):
            raise module.fail(node.lineno, "put each import and the docstring on lines of their own")
        if plain:
            _note_import(package, module, node)
        if plain or docstring:
            module.drop(node.lineno, node.end_lineno)
        elif guard:
            _note_guard(module, node)
        else:
            _note_names(module, node, f"defined in {module.name}")
    _check_namespace(module)
    kept = "\n".join("" if i in module.dropped else line for i, line in enumerate(module.lines, 1))
    looks = _LOOKS_RELATIVE.search(kept)
    if looks:
        line = kept.count("\n", 0, looks.end()) + 1
        raise module.fail(line, "this text looks like a relative import to the Hub loaders, which read with a regex")
    return module


def _check_forms(module: _Module, tree: ast.Module) -> None:
    """Refuse what the Hub loaders or folding cannot bear, wherever in the file it stands."""
    allowed = set(tree.body)
    for node in tree.body:
        if isinstance(node, ast.Try):
            allowed.update(node.body)
    scopes = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    inner = {id(n) for scope in ast.walk(tree) if isinstance(scope, scopes) for n in ast.walk(scope)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute | ast.alias):
            name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
            if name in ("TYPE_CHECKING", "find_spec"):
                raise module.fail(
                    node.lineno, f"{name} is refused: the Hub loader demands of every user what it guards"
                )
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in allowed:
            if id(node) in inner:
                raise module.fail(node.lineno, "import inside a function or class: move it to the top of the file")
            raise module.fail(node.lineno, "import under a condition: only `try:` may guard one, and in its first part")
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if not isinstance(first, ast.Constant) or str(first.value).split(".")[0] in ("", module.package):
                raise module.fail(node.lineno, "import by name needs a plain string that names a library")


def _check_alias(module: _Module, line: int, imported: str, alias: str | None) -> None:
    if alias is not None and ALIASES.get(imported) != alias:
        raise module.fail(line, f"alias {alias!r} for {imported}: use the name itself, folding renames nothing")


def _note_import(package: Path, module: _Module, node: ast.Import | ast.ImportFrom) -> None:
    """A top-level import: of a sibling, of a library, or from __future__."""
    if isinstance(node, ast.ImportFrom) and node.level:
        if node.module is None:
            raise module.fail(node.lineno, f"`from {'.' * node.level} import ...`: name the file that defines it")
        parts = module.name.split(".")
        if node.level >= len(parts) + 1:
            raise module.fail(node.lineno, f"the import leaves the package {module.package}")
        target = ".".join([*parts[: len(parts) - node.level], node.module])
        room, own = target.split(".")[0], parts[0]
        if room not in ROOMS:
            raise module.fail(node.lineno, f"{target} does not ship: import only from {', '.join(ROOMS)}")
        if own in ROOMS and ROOMS.index(room) > ROOMS.index(own):
            raise module.fail(node.lineno, f"{own} must not import from {room}: imports point down")
        if not _file(package, target).is_file():
            raise module.fail(node.lineno, f"there is no file {'/'.join(target.split('.'))}.py")
        for alias in node.names:
            if alias.asname is not None or alias.name == "*":
                raise module.fail(node.lineno, f"import {target} names one by one and without `as`")
        module.siblings.append((target, [alias.name for alias in node.names], node.lineno))
        return
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        module.futures.update(alias.name for alias in node.names)
        return
    for found in _imports(module, node):
        module.imports.append(found)
        name, origin = _meaning(found)
        module.bind(name, origin, found.line)


def _imports(module: _Module, node: ast.Import | ast.ImportFrom) -> list[_Import]:
    """The library imports of one statement, checked."""
    found = []
    for alias in node.names:
        line = node.lineno
        if isinstance(node, ast.ImportFrom):
            if node.level:
                raise module.fail(
                    line, "relative import inside `try:`: import siblings at the top, guard in the sibling"
                )
            if alias.name == "*":
                raise module.fail(line, f"`from {node.module} import *`: import names one by one")
            one = _Import(node.module, alias.name, alias.asname, line)
            _check_alias(module, line, f"{node.module}.{alias.name}", alias.asname)
        else:
            one = _Import(alias.name, None, alias.asname, line)
            _check_alias(module, line, alias.name, alias.asname)
        if one.module.split(".")[0] == module.package:
            raise module.fail(line, f"import of {one.module}: siblings are imported relatively")
        found.append(one)
    return found


def _meaning(one: _Import) -> tuple[str, str]:
    """The name that an import binds and what it then means."""
    if one.name is not None:
        return one.alias or one.name, f"{one.module}.{one.name}"
    return (one.alias, one.module) if one.alias else (one.module.split(".")[0],) * 2


def _note_guard(module: _Module, node: ast.Try) -> None:
    """`try: import triton ... except ImportError: ...` stays as it stands; all it binds belongs to this one block."""
    if not node.handlers:
        raise module.fail(node.lineno, "a guarded import needs `except ImportError:`")
    libraries = []
    for inner in node.body:
        if isinstance(inner, ast.Import | ast.ImportFrom):
            libraries += [one.module.split(".")[0] for one in _imports(module, inner)]
    dump = ast.dump(node)
    module.guards.append((dump, node.lineno, node.end_lineno, libraries))
    _note_names(module, node, f"guarded by {dump}")


def _note_names(module: _Module, node: ast.AST, origin: str) -> None:
    """Note every module-level name that a statement binds, also in its branches, but not in inner scopes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        module.bind(node.name, origin, node.lineno)
        for inner in ast.walk(node):
            for name in inner.names if isinstance(inner, ast.Global) else ():
                module.bind(name, origin, inner.lineno)
        return
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        module.bind(node.id, origin, node.lineno)
    if isinstance(node, ast.alias):
        module.bind(node.asname or node.name.split(".")[0], origin, node.lineno)
    for child in ast.iter_child_nodes(node):
        _note_names(module, child, origin)


def _check_namespace(module: _Module) -> None:
    if module.name == "ops.namespace" and module.lines.count(f'NAMESPACE = "{PLACEHOLDER}"') != 1:
        raise module.fail(1, f'must hold the line NAMESPACE = "{PLACEHOLDER}" once: the bundle puts its hash there')
    if "NAMESPACE" in module.bound and module.name != "ops.namespace":
        raise module.fail(module.bound["NAMESPACE"][1], "NAMESPACE is defined by ops/namespace.py alone")


def _check_names(modules: list[_Module]) -> None:
    """One module-level name means one thing in the whole file, and none hides a builtin."""
    owner: dict[str, tuple[str, _Module, int]] = {}
    for module in modules:
        for name, (origin, line) in module.bound.items():
            if hasattr(builtins, name) and not name.startswith("_"):
                raise module.fail(line, f"{name!r} hides the builtin of that name from every folded module")
            known, other, other_line = owner.setdefault(name, (origin, module, line))
            if known != origin:
                there = f"{other.package}/{other.where}:{other_line}"
                raise module.fail(line, f"{name!r} means something else in {there}: rename one of them")


def _check_futures(modules: list[_Module]) -> None:
    for module in modules[1:]:
        if module.futures != modules[0].futures:
            raise module.fail(1, f"its __future__ imports differ from those of {modules[0].where}: all files or none")


def _check_libraries(modules: list[_Module], libraries: tuple[str, ...]) -> None:
    """Outside `try:` only what the user surely has; inside, each library in one single guard."""
    guard_of: dict[str, tuple[str, _Module, int]] = {}
    for module in modules:
        for one in module.imports:
            library = one.module.split(".")[0]
            if library not in sys.stdlib_module_names and library not in libraries:
                raise module.fail(one.line, f"import of {library} outside `try:`: a user of this file may not have it")
        for dump, line, _, guarded in module.guards:
            for library in guarded:
                known, other, other_line = guard_of.setdefault(library, (dump, module, line))
                if known != dump:
                    there = f"{other.package}/{other.where}:{other_line}"
                    raise module.fail(line, f"{library} has another guard in {there}: keep its imports in one `try:`")


def _import_block(modules: list[_Module]) -> str:
    """All library imports outside `try:`, merged: standard library first, then the rest, each sorted."""
    plain: set[tuple[str, str | None]] = set()
    names: dict[str, set[str]] = {}
    for one in (found for module in modules for found in module.imports):
        if one.name is None:
            plain.add((one.module, one.alias))
        else:
            names.setdefault(one.module, set()).add(one.name + (f" as {one.alias}" if one.alias else ""))
    groups = []
    for standard in (True, False):
        lines = [
            f"import {module}" + (f" as {alias}" if alias else "")
            for module, alias in sorted(plain, key=str)
            if (module.split(".")[0] in sys.stdlib_module_names) is standard
        ]
        for module in sorted(names):
            if (module.split(".")[0] in sys.stdlib_module_names) is standard:
                line = f"from {module} import {', '.join(sorted(names[module]))}"
                if len(line) > 120:
                    line = f"from {module} import (\n    " + ",\n    ".join(sorted(names[module])) + ",\n)"
                lines.append(line)
        if lines:
            groups.append("\n".join(lines) + "\n")
    return "\n".join(groups)
