"""Runs agents: on the event loop of a thread of their own, or on the current one.

Invariant: a `RunningAgent` ends once, and ``on_end`` is called on the event loop that started it.
Agents share the thread of `AgentThread`: one that blocks delays the other agents, but not the
controller that has to answer it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self

from torchtitan_rl.agents.agent import AgentError, AgentResult

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class AgentThread:
    """A daemon thread with an event loop for agents, for a ``with`` block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the agents that still run. One that blocks the thread keeps it."""
        self._is_ending = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # cancels, then closes
            while not self._is_ending:
                try:
                    runner.get_loop().run_forever()
                except (SystemExit, KeyboardInterrupt):
                    # Raised in a task that an agent started: the other agents go on.
                    logger.exception("a task of an agent raised SystemExit or KeyboardInterrupt")


class RunningAgent:
    """One run of an agent, ``work``, started at once.

    ``outcome`` is None until the agent has ended, then its result, or what it raised.
    """

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, AgentResult]],
        *,
        loop: asyncio.AbstractEventLoop | None,
        on_end: Callable[[], None],
    ) -> None:
        self.outcome: AgentResult | BaseException | None = None
        self._run = work
        self._on_end = on_end
        self._home = asyncio.get_running_loop()
        self._loop = loop or self._home
        self._ended = asyncio.Event()
        self._task: asyncio.Task[AgentResult | BaseException] | None = None
        if self._loop is self._home:
            self._start()
        else:
            self._loop.call_soon_threadsafe(self._start)

    async def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False where it has not ended in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def end(self, timeout_s: float) -> None:
        """Cancel it, unless it has ended, and wait for its end.

        Raises:
            AgentError: it does not end.
        """
        if self._ended.is_set():
            return
        with contextlib.suppress(RuntimeError):  # its loop is closed: it has been cancelled
            self._loop.call_soon_threadsafe(self._cancel)
        if not await self.wait(timeout_s):
            raise AgentError(f"the agent did not end within {timeout_s} s of its cancellation")

    def _start(self) -> None:
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(self._report)  # called even where it never started

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> AgentResult | BaseException:
        try:
            return await self._run()
        except BaseException as error:  # SystemExit would end the event loop
            return error

    def _report(self, task: asyncio.Task[AgentResult | BaseException]) -> None:
        outcome = asyncio.CancelledError() if task.cancelled() else task.result()
        with contextlib.suppress(RuntimeError):  # that loop is closed
            self._home.call_soon_threadsafe(self._finish, outcome)

    def _finish(self, outcome: AgentResult | BaseException) -> None:
        self.outcome = outcome
        self._ended.set()
        self._on_end()
