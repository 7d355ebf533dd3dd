"""One sandbox for all tests of this folder that do not close theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from torchtitan_rl.sandbox.sandbox import Isolation, Sandbox, SandboxConfig, SandboxResult

Run = Callable[..., SandboxResult]


@pytest.fixture(scope="session")
def sandbox_and_runner() -> Iterator[tuple[Sandbox, asyncio.Runner]]:
    if errors := SandboxConfig().errors("sandbox"):
        pytest.skip(errors[0])
    sandbox = Sandbox()
    with asyncio.Runner() as runner:
        yield sandbox, runner
        runner.run(sandbox.close())


@pytest.fixture
def run(sandbox_and_runner: tuple[Sandbox, asyncio.Runner]) -> Run:
    """`Sandbox.run`, not async."""
    sandbox, runner = sandbox_and_runner
    return lambda code, **options: runner.run(sandbox.run(code, **options))


@pytest.fixture(scope="session", params=["landlock", "limits"])
def run_without_namespaces(request: pytest.FixtureRequest) -> Iterator[Run]:
    yield from _running(request.param)


@pytest.fixture(scope="session")
def run_under_landlock() -> Iterator[Run]:
    yield from _running("landlock")


def _running(isolation: Isolation) -> Iterator[Run]:
    config = SandboxConfig(isolation=isolation)
    if errors := config.errors("sandbox"):
        pytest.skip(errors[0])
    sandbox = Sandbox(config)
    with asyncio.Runner() as runner:
        yield lambda code, **options: runner.run(sandbox.run(code, **options))
        runner.run(sandbox.close())
