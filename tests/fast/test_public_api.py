"""What `torchtitan_rl` exports, and that examples, tasks and configurations use nothing else."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import torchtitan_rl

REPOSITORY = Path(__file__).parents[2]
TASKS = ("torchtitan_rl.experiments", "torchtitan_rl.configs")  # links to the folders
TITAN = "torchtitan_rl.backends.titan.trainer"  # takes seconds to import


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Module and name of each ``from module import name``; no name for ``import module``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def declared() -> dict[str, str]:
    """Name -> module, as type checkers see them."""
    found = imports(Path(torchtitan_rl.__file__).read_text())
    return {name: module for module, name in found if module.startswith("torchtitan_rl.")}


def test_all_names_are_declared_and_each_is_what_its_module_defines() -> None:
    assert set(declared()) == set(torchtitan_rl.__all__)
    for name, module in declared().items():
        if module != TITAN:
            assert getattr(torchtitan_rl, name) is getattr(import_module(module), name)


def test_each_section_of_a_configuration_is_exported() -> None:
    def sections(config: type) -> Iterator[str]:
        for kind in get_type_hints(config).values():
            if is_dataclass(kind) and isinstance(kind, type):
                yield kind.__name__
                yield from sections(kind)

    found = set(sections(torchtitan_rl.RunConfig))
    assert len(found) > 10
    assert found - set(torchtitan_rl.__all__) == set()


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Rollouter'"):
        torchtitan_rl.Rollouter  # noqa: B018


def users() -> Iterator[tuple[str, str]]:
    """Place and source of everything that uses the package as users do."""
    for folder in ("experiments", "configs"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            yield str(path.relative_to(REPOSITORY)), path.read_text()
    readme = (REPOSITORY / "README.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        yield "README.md", block


def test_examples_tasks_and_configurations_import_only_the_root_of_the_package() -> None:
    wrong = [
        f"{place}: {module}"
        for place, source in users()
        for module, _ in imports(source)
        if module.startswith("torchtitan_rl.") and not module.startswith(TASKS)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    ["rollout.env", "rollout.message_env", "rollout.task", "rollout.rubric", "commands.console"],
)
def test_the_examples_of_docstrings_run(module: str) -> None:
    failed, attempted = doctest.testmod(import_module(f"torchtitan_rl.{module}"))
    assert (failed, attempted > 0) == (0, True)
