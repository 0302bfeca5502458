"""The order of the rooms: imports point down, and none go in a circle."""

import ast
import graphlib
from pathlib import Path

import mhla_hf

PACKAGE = Path(mhla_hf.__file__).parent
FLOORS = ["ops", "nn", "models", "checkpoints", "data facts plots", "conversion", "training", "sampling", "evaluation"]
FLOORS += ["vllm_plugin", "hub", "info compare", "cli"]
FLOORS = [{*names.split()} for names in FLOORS] + [{"_register", ""}]


def floor_of(name):
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), None)


def imported_modules(path):
    place = path.relative_to(PACKAGE).with_suffix("").parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = [*place[: len(place) - node.level], *([node.module] if node.module else [])]
            yield from [".".join(above)] if node.module else [".".join([*above, alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "mhla_hf":
            yield node.module.partition(".")[2]
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.split(".")[0] == "mhla_hf")


def test_imports_point_down():
    climbing = set()
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "")
        for room in {target.split(".")[0] for target in imported_modules(path)} - {"", own, "__version__"}:
            if own != "" and floor_of(room) >= floor_of(own):
                climbing.add((path.name, room))
    assert climbing == set()


def test_no_module_imports_itself_in_a_circle():
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imported_modules(path)) - {name}
    graphlib.TopologicalSorter(graph).prepare()  # its error names the circle
