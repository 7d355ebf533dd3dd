"""SIGINT and SIGTERM, the same for every command.

| when | first signal | a further one |
|---|---|---|
| before the command starts a process, and in `generate` | the command ends | the same |
| while its processes start | its main task is cancelled, its processes end | the same |
| while it can stop cleanly | ``stop_cleanly`` is called | its main task is cancelled |
| after its last message | the process ends at once | |

The exit code is 128 + n, or the command's own after its last message.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNWIND_S = 2.0


class StopSignals:
    """The signals that a running command received; `install` it from the command's main task."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.stop_cleanly: Callable[[], None] | None = None

    @property
    def exit_code(self) -> int:
        return 128 + self.received[0]

    @property
    def name(self) -> str:
        return signal.Signals(self.received[0]).name

    def install(self) -> None:
        main = asyncio.current_task()
        if main is None:
            raise RuntimeError("signals are installed from within a task")
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, main)

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        self.received.append(number)
        if main.done():  # and asyncio waits for a thread
            os._exit(self.exit_code)
        if self.stop_cleanly is not None and len(self.received) == 1:
            self.stop_cleanly()
        else:
            main.cancel()


@contextmanager
def before_start() -> Iterator[None]:
    """Until a command installs `StopSignals`, a signal ends it without a traceback."""
    previous = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, handler)


def after_last_message(exit_code: int) -> None:
    """From now on a signal ends the process at once."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: os._exit(exit_code))


def end_within(within_s: float, exit_code: int) -> None:
    """Where this process has not ended by itself in that time, it ends at once."""
    threading.Thread(target=_exit_later, args=(within_s, exit_code), daemon=True).start()


def _end(number: int, frame: Any) -> NoReturn:
    """Leave by an exception, so that temporary files are removed; what it
    interrupts has ``_UNWIND_S`` seconds, and cannot print a traceback."""
    print("stopped", file=sys.stderr)
    sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    end_within(_UNWIND_S, 128 + number)
    raise SystemExit(128 + number)


def _exit_later(within_s: float, exit_code: int) -> None:
    threading.Event().wait(within_s)
    os._exit(exit_code)
