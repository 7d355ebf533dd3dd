"""Tests that need an interpreter with verifiers, which `make setup` makes."""

from __future__ import annotations

import subprocess

import pytest

from torchtitan_rl.agents.verifiers.task import EnvironmentSpec

INTERPRETER = EnvironmentSpec(env="").interpreter


def _has_verifiers() -> bool:
    find = "from importlib.util import find_spec; exit(find_spec('verifiers') is None)"
    return subprocess.run([INTERPRETER, "-c", find], check=False).returncode == 0


needs_verifiers = pytest.mark.skipif(
    not _has_verifiers(), reason=f"{INTERPRETER} has no verifiers; run `make setup`"
)
