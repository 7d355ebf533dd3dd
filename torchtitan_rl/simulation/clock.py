"""An event loop whose clock jumps from event to event: hours of waiting pass in no time.

`Load` measures what the loop's own work would do to a real clock. The loop is a queue with one
server: the CPU time of all callbacks of one moment is added to its backlog, and the time until the
next moment is subtracted. While there is a backlog, callbacks of a real loop would run so much
later. The delays do not feed back into the simulation.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

_T = TypeVar("_T")

LATE_S = 0.1


@dataclass(slots=True)
class Load:
    """CPU seconds of the loop's thread, and the lag that they would cause. ``late_s``: seconds in
    which the lag would be above `LATE_S`."""

    cpu_s: float = 0.0
    max_lag_s: float = 0.0
    late_s: float = 0.0
    _backlog_s: float = 0.0
    _at_s: float = field(default_factory=time.thread_time)

    def take(self) -> Load:
        """Return what was measured since the last call."""
        taken = replace(self)
        self.cpu_s = self.max_lag_s = self.late_s = 0.0
        return taken

    def jump(self, seconds: float) -> None:
        """The clock jumps to the next moment."""
        now_s = time.thread_time()
        self.cpu_s += now_s - self._at_s
        self._backlog_s += now_s - self._at_s
        self._at_s = now_s
        self.max_lag_s = max(self.max_lag_s, self._backlog_s)
        self.late_s += min(seconds, max(0.0, self._backlog_s - LATE_S))
        self._backlog_s = max(0.0, self._backlog_s - seconds)


class _JumpingSelector(selectors.DefaultSelector):
    """With nothing to do until some time, it is that time now."""

    now = 0.0
    load: Load | None = None

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        self.now += timeout
        if self.load is not None:
            self.load.jump(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Work for threads is done at once, in no time. ``load``, if it is given, is told of each
    jump."""

    def __init__(self, load: Load | None = None) -> None:
        self._clock = _JumpingSelector()
        self._clock.load = load
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        outcome = self.create_future()
        try:
            outcome.set_result(func(*args))
        except Exception as error:
            outcome.set_exception(error)
        return outcome


def run_virtually(work: Coroutine[Any, Any, _T], *, load: Load | None = None) -> _T:
    """Return the result of ``work``, run by a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(load)) as runner:
        return runner.run(work)
