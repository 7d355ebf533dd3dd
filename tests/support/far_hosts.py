"""Hosts of a run without Monarch: agents that are called as its actors are."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torchtitan_rl.backends.monarch.host_agent import HostAgent
from torchtitan_rl.backends.monarch.hosts import Host


class Endpoint:
    """As an endpoint of one actor; its future can be awaited, or waited for."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work

    def call_one(self, *arguments: Any) -> Answer:
        return Answer(self._work(*arguments))


class Answer:
    def __init__(self, work: Any) -> None:
        self._work = work

    def __await__(self) -> Any:
        return self._work.__await__()

    def get(self, timeout: float) -> Any:
        return asyncio.run(self._work)


class FarAgent:
    """The `HostAgent` of a machine that has the folder ``there`` wherever it is given ``here``."""

    def __init__(self, here: Path, there: Path) -> None:
        self._here, self._there = here, there

    def __getattr__(self, name: str) -> Endpoint:
        method = inspect.unwrap(getattr(HostAgent, name)._method)

        def work(*arguments: Any) -> Any:
            return method(self, *map(self._translate, arguments))

        return Endpoint(work)

    def _translate(self, argument: Any) -> Any:
        if isinstance(argument, Path) and argument.is_relative_to(self._here):
            return self._there / argument.relative_to(self._here)
        return argument


def far_host(index: int, agent: Any) -> Host:
    """Without an agent, it is the controller's machine."""
    name = f"tcp://10.0.0.{index}:26600"
    return Host(index=index, name=name, ip="", mesh=cast(Any, None), agent=agent)
