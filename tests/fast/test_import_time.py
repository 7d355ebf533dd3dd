"""Which modules importing this package loads: what keeps its commands and its fast tests quick."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent
PURE = ("generation", "routing", "rollout", "training", "orchestration")
ENGINES = {"vllm", "monarch", "torchtitan"}  # what only adapters may import
SLOW = ENGINES | {"torch", "transformers", "renderers"}


def loaded_by(*modules: str) -> set[str]:
    """Top-level names that a fresh process has loaded after importing ``modules``."""
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def pure_modules() -> list[str]:
    return [
        module.name
        for package in PURE
        for module in pkgutil.walk_packages([str(PACKAGE / package)], f"torchtitan_rl.{package}.")
    ]


def test_importing_the_package_its_types_and_its_configuration_loads_nothing_slow() -> None:
    modules = (
        "torchtitan_rl",
        "torchtitan_rl.types",
        "torchtitan_rl.config.run",
        "torchtitan_rl.commands.cli",
    )
    assert loaded_by(*modules) & SLOW == set()


@pytest.mark.slow
def test_pure_packages_import_without_vllm_monarch_and_torchtitan() -> None:
    modules = pure_modules()
    assert {name.split(".")[1] for name in modules} == set(PURE)
    assert loaded_by(*modules) & ENGINES == set()


def test_pure_logic_loads_torch_only_where_tensors_are_computed() -> None:
    with_tensors = ("training.losses", "training.logprobs")
    prefixes = tuple(f"torchtitan_rl.{name}" for name in with_tensors)
    assert loaded_by(*(n for n in pure_modules() if not n.startswith(prefixes))) & SLOW == set()


@pytest.mark.parametrize("module", ["hf", "model", "optim", "trainer", "publishing"])
def test_a_module_of_the_trainer_may_be_imported_first(module: str) -> None:
    """torchtitan's modules read the device when they are imported, so `setup` comes before."""
    loaded_by(f"torchtitan_rl.backends.titan.{module}")
