"""Sandboxes that the tests of this folder share, of this user and, where it is root, of another."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtitan_rl.sandbox.sandbox import SandboxResult, SandboxStatus

ROOT = Path(__file__).parents[3]
SECRET = "hunter2"  # in the environment of the sandbox's owner
_ANOTHER = 12345
USERS = ("this user", "another user")
# Whose rights to files and processes are those of the snippet, and who has no others.
NOT_ROOT = USERS[os.geteuid() == 0]


class Run:
    """`Sandbox.run`, not async, of a `tests.support.sandbox_server`."""

    def __init__(self, isolation: str, *, another_user: bool) -> None:
        prefix = ["tests.support.run_as_user", str(_ANOTHER), sys.executable, "-m"]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", *(prefix if another_user else [])),
                *("tests.support.sandbox_server", isolation),
            ],
            cwd=ROOT,
            env={**os.environ, "SECRET_KEY": SECRET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.isolation, self.is_another_user = isolation, another_user
        self.owner = psutil.Process(self._process.pid)
        started = self._read()
        if "unavailable" in started:
            self.close()
            pytest.skip(started["unavailable"])
        self.shown, self.hidden = Path(started["shown"]), Path(started["hidden"])
        self._temporary = Path(started["temporary"])
        self._zygote = psutil.Process(started["zygote"])

    def __call__(self, code: str, **options: Any) -> SandboxResult:
        if limits := options.get("limits"):
            options["limits"] = asdict(limits)
        self._process.stdin.write(json.dumps({"code": code, **options}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        assert "error" not in answer, answer["error"]
        return SandboxResult(**{**answer, "status": SandboxStatus(answer["status"])})

    def has_left_nothing(self) -> bool:
        """Whether snippets and their keepers are dead, and their files are removed."""
        below = self._zygote.children(recursive=True)
        below = below[1:] if self.isolation == "namespaces" else below
        return not any(map(is_alive, below)) and not any(self._temporary.iterdir())

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[Callable[[str, str], Run]]:
    with ExitStack() as stack:

        @functools.cache
        def start(isolation: str, user: str) -> Run:
            another_user = user == "another user"
            if another_user and os.geteuid() != 0:
                pytest.skip("only root can be another user")
            run = Run(isolation, another_user=another_user)
            stack.callback(run.close)
            return run

        yield start


@pytest.fixture(scope="session")
def run(sandboxes: Callable[[str, str], Run]) -> Run:
    return sandboxes("namespaces", NOT_ROOT)


@pytest.fixture(scope="session", params=["landlock", "limits"])
def run_without_namespaces(
    request: pytest.FixtureRequest, sandboxes: Callable[[str, str], Run]
) -> Run:
    return sandboxes(request.param, NOT_ROOT)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()
