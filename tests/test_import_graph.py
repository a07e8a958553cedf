"""The rooms of the package: who may import whom, read off the source without running it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "numpyro_tsvgp"
FILES = {".".join(f.relative_to(PACKAGE).with_suffix("").parts): f for f in PACKAGE.rglob("*.py")}
# From the ground up: a room knows itself and the floors below, and rooms on its own floor.
FLOORS = [
    {"gaussian"},
    {"kernels", "distributions", "inducing", "reparam"},
    {"model"},
    {"infer"},
    {"diagnostics"},
    {"__init__"},
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms}
# The rooms within `infer`, likewise; names with a file of their own are between rooms.
INFER = [
    {"steps"},
    {"guides"},
    {"predictions"},
    {"replay", "fitted", "fit", "state", "standing"},
    {"files"},
    {"feed"},
    {"em"},
    {"importance", "evidence", "collapse", "audit"},
    {"new_data"},
]
INFER_FLOOR = {room: i for i, rooms in enumerate(INFER) for room in rooms}


def imports(tree: ast.AST, *, in_functions: bool = True) -> Iterator[tuple[str, str, str]]:
    """Every (module, name in it, name here), those within functions too, for types alone not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef) and not in_functions:
            continue
        if isinstance(node, ast.Import):
            yield from ((a.name, "", a.asname or a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports would go unseen here"
            yield from ((node.module or "", a.name, a.asname or a.name) for a in node.names)
        else:
            yield from imports(node, in_functions=in_functions)


def room_of(module: str, name: str) -> str | None:
    """The room that an import leads to, or None if it is not of this package."""
    parts = f"{module}.{name}".strip(".").split(".")
    if parts[0] != "numpyro_tsvgp" or parts[1:] == ["__version__"]:
        return None
    return parts[1] if parts[1:] and parts[1] in FLOOR else "__init__"


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_room_knows_only_the_floors_below(file):
    room, tree = file.split(".")[0], ast.parse(FILES[file].read_text())
    ours = {here for module, name, here in imports(tree) if room_of(module, name)}
    for module, name, _ in imports(tree):
        other = room_of(module, name)
        if other is not None:
            assert FLOOR[other] <= FLOOR[room], f"{file} imports {module} {name}"
            assert not name.startswith("_") and "._" not in module, f"{name} is private to {module}"
        assert room != "gaussian" or module.split(".")[0] != "numpyro", f"{file} imports NumPyro"
    for node in ast.walk(tree):  # the same by way of a module: features._blocks
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            assert not (private and node.value.id in ours), f"{node.value.id}.{node.attr} in {file}"


@pytest.mark.parametrize("file", sorted(f for f in FILES if f.startswith("infer.")))
def test_a_room_of_infer_knows_only_the_floors_below(file):
    """Methods of a fit open the rooms above it when they are called, so they do not count here."""
    room = file.split(".")[1]
    for module, name, _ in imports(ast.parse(FILES[file].read_text()), in_functions=False):
        parts = f"{module}.{name}".split(".")
        if parts[:2] == ["numpyro_tsvgp", "infer"] and room != "__init__":
            assert INFER_FLOOR[parts[2]] <= INFER_FLOOR[room], f"{file} imports {module} {name}"


def test_there_is_something_to_see():
    """Every room is there, and imports across rooms are found."""
    assert {file.split(".")[0] for file in FILES} == set(FLOOR)
    within = {file.split(".")[1] for file in FILES if file.startswith("infer.")}
    assert within == {*INFER_FLOOR, "__init__"}
    found = {
        room_of(module, name)
        for file in FILES
        if file.startswith("infer.")
        for module, name, _ in imports(ast.parse(FILES[file].read_text()))
    }
    assert {"gaussian", "model", "infer"} <= found and "diagnostics" not in found
