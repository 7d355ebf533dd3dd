"""The imports of the package: layers as `docs/architecture.md` lists them, and no cycles."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@functools.cache
def layer_ranks() -> dict[str, int]:
    """Layer name -> row of the table; several names in a row are one layer."""
    table = PAGE.read_text().split("## Layers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    return {name: rank for rank, row in enumerate(rows) for name in re.findall(r"`(.+?)`", row)}


def modules() -> dict[str, Path]:
    """Module name without ``torchtitan_rl.`` -> file. The root is left out: it re-exports."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of this package that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in submodules if _inner(name) in known] or [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (inner for name in names if (inner := _inner(name)) in known)


def _inner(name: str) -> str:
    return name.removeprefix("torchtitan_rl.")


def layer_of(module: str) -> str:
    parts = module.split(".")
    is_own_layer = parts[0] == "backends" or module in layer_ranks()
    return ".".join(parts[: 2 if is_own_layer else 1])


def test_every_module_imports_only_its_own_layer_and_those_above_it() -> None:
    known, ranks = modules(), layer_ranks()
    names = {layer_of(module) for module in known} - {"backends"}
    assert names == set(ranks)
    wrong = [
        f"{module} imports {target}"
        for module, path in known.items()
        for target in imports(path, known)
        if module != "backends" and ranks[layer_of(target)] > ranks[layer_of(module)]
    ]
    assert wrong == []


def test_no_import_cycle_between_modules() -> None:
    known = modules()
    graph = {module: set(imports(path, known)) - {module} for module, path in known.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(known)


def test_a_module_that_is_also_a_command_defines_all_before_it_runs() -> None:
    for path in PACKAGE.rglob("*.py"):
        earlier = ast.parse(path.read_text()).body[:-1]
        tests = [ast.unparse(node.test) for node in earlier if isinstance(node, ast.If)]
        assert "__name__ == '__main__'" not in tests, path
