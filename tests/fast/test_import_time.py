"""Which modules importing this package loads: what keeps its commands and its fast tests quick."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import torchtitan_rl

PACKAGE = Path(torchtitan_rl.__file__).parent
PURE = ("generation", "routing", "rollout", "training", "orchestration")
WITH_TENSORS = ("torchtitan_rl.training.losses", "torchtitan_rl.training.logprobs")
ENGINES = {"vllm", "monarch", "torchtitan"}  # what only adapters may import
SLOW = ENGINES | {"torch", "transformers", "renderers"}


def outcome(code: str, *words: str) -> Any:
    """What a fresh process prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def loaded_by(*stages: Iterable[str]) -> list[set[str]]:
    """Top-level names that a fresh process has loaded after it imported the modules of each stage,
    one stage after the other."""
    code = (
        "import importlib, json, sys\n"
        "loaded = []\n"
        "for stage in json.loads(sys.argv[1]):\n"
        "    for name in stage: importlib.import_module(name)\n"
        "    loaded.append([name.partition('.')[0] for name in sys.modules])\n"
        "print(json.dumps(loaded))"
    )
    return [set(names) for names in outcome(code, json.dumps([*map(list, stages)]))]


def test_what_needs_no_engine_and_no_tensor_loads_none() -> None:
    pure = [
        module.name
        for package in PURE
        for module in pkgutil.walk_packages([str(PACKAGE / package)], f"torchtitan_rl.{package}.")
    ]
    assert {name.split(".")[1] for name in pure} == set(PURE)
    client, commands, audit, without_tensors, all_pure = loaded_by(
        ["torchtitan_rl.client"],
        ["torchtitan_rl", "torchtitan_rl.config.run", "torchtitan_rl.commands.cli"],
        ["torchtitan_rl.audit.run"],
        [name for name in pure if not name.startswith(WITH_TENSORS)],
        pure,
    )
    assert not client & (SLOW | {"pydantic", "openai", "fastapi", "starlette"})
    assert (commands | audit | without_tensors) & SLOW == set()
    assert all_pure & ENGINES == set()


@pytest.mark.slow
def test_each_module_of_the_trainer_may_be_imported_first() -> None:
    """torchtitan's modules read the device when they are imported, so `setup` comes before."""
    code = (
        "import importlib, json, os, sys, torch, transformers\n"
        "failed = []\n"
        "for name in sys.argv[1:]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        os.dup2(2, 1)\n"
        "        importlib.import_module(f'torchtitan_rl.backends.titan.{name}')\n"
        "        os._exit(0)\n"
        "    failed += [name] * bool(os.waitpid(child, 0)[1])\n"
        "print(json.dumps(failed))"
    )
    modules = ("hf", "model", "optim")  # runs import the trainer first
    assert outcome(code, *modules) == []
