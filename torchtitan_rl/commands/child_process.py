"""A process that a launcher starts and ends. It leads a session of its own, so that a signal to the
launcher's group reaches it once, through the launcher; it is told to end when the launcher dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any

from torchtitan_rl.processes import end_with_parent


class ChildProcess:
    """A running process; `started` makes one."""

    def __init__(self, process: Process, ready_at: str) -> None:
        self._process = process
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready_at = ready_at
        self._printing = asyncio.create_task(self._print()) if ready_at else None

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        command: Sequence[str],
        *,
        end_within_s: float,
        ready_at: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[ChildProcess]:
        """Started now, ended on leaving: by SIGTERM, and by SIGKILL ``end_within_s`` later.

        ``ready_at`` is what the line contains that it prints once it is ready: `ready` returns the
        rest of this line. ``environment`` is added to that of this process.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=PIPE if ready_at else None,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
        child = cls(process, ready_at)
        try:
            yield child
        finally:
            await child._end(end_within_s)

    async def wait(self) -> int:
        """Its exit code; 128 + n if signal n ended it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def ready(self) -> str | None:
        """None: it ended before it was ready."""
        ended = asyncio.create_task(self.wait())
        either: list[asyncio.Future[Any]] = [self._ready, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return self._ready.result() if self._ready.done() else None
        finally:
            ended.cancel()

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _print(self) -> None:
        output = self._process.stdout
        assert output is not None
        async for line in output:
            text = line.decode(errors="replace")
            _, found, rest = text.partition(self._ready_at)
            if found and not self._ready.done():
                self._ready.set_result(rest.strip())
            with suppress(OSError):  # no one reads it any more; the process goes on
                sys.stdout.write(text)
                sys.stdout.flush()

    async def _end(self, within_s: float) -> None:
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), within_s)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._printing is not None:
            self._printing.cancel()
