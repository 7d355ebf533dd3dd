"""What every command does with its console, with signals and with ``--dry-run``.

The console is the command's: what libraries print goes to a log file. Native code (Monarch, gloo,
nanobind) writes to the file descriptors 1 and 2, and the processes that are started inherit them.
So these two are pointed at the file, and ``sys.stdout`` and ``sys.stderr`` at what they were.

SIGINT and SIGTERM do the same in every command:

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
import json
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torchtitan_rl.errors import ConfigError, TorchtitanRLError

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_command(
    work: Callable[[StopSignals], Coroutine[Any, Any, int | None]],
    *,
    log_dir: Path,
    when_stopped: str = "",
) -> int:
    """Run ``work``, which starts processes, with asyncio. Only its own messages reach the console.
    Call it last.

    Returns its exit code, or that of the error that it raised. Where a signal stopped it (it was
    cancelled, or returned None) that of the signal, after a line with ``when_stopped``.
    """
    divert_libraries(log_dir / "controller.log")

    async def main() -> int:
        signals = StopSignals()
        signals.install()
        exit_code: int | None = None
        try:
            exit_code = await work(signals)
        except asyncio.CancelledError:
            if not signals.received:
                raise
        except Exception as error:
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            return print_error(error)
        if exit_code is None and when_stopped:
            print(f"stopped by {signals.name}; {when_stopped}", file=sys.stderr)
        return signals.exit_code if exit_code is None else exit_code

    exit_code = asyncio.run(main())
    after_last_message(exit_code)
    divert_everything()
    return exit_code


def exit_code_of(command: Callable[[], int]) -> int:
    """Of a whole command line: errors are lines on stderr, and neither a signal nor the end of a
    pipe (``--help | head``) is a traceback. What it writes other users cannot change, whatever the
    umask is: checkpoints have pickles, which run code when they are read."""
    os.umask(os.umask(0) | 0o002)
    with before_start():
        try:
            try:
                return command()
            finally:
                sys.stdout.flush()
        except TorchtitanRLError as error:
            return print_error(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more at exit
            return 128 + signal.SIGPIPE


def print_error(error: Exception) -> int:
    """On stderr: one line for what can be expected, the traceback of an error of this program.
    Returns the exit code."""
    if isinstance(error, ConfigError):
        for message in error.errors:
            print(f"error: {message}", file=sys.stderr)
        return 2
    if isinstance(error, TorchtitanRLError):
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1


def divert_libraries(log_file: Path) -> None:
    """Send what native code, child processes and loggers of other packages print to ``log_file``,
    whose folder exists. Warnings of our own loggers stay on the console.

    Raises:
        OSError: the file cannot be written.
    """
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout, sys.stderr = _copy_of(sys.stdout, 1), _copy_of(sys.stderr, 2)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    to_file = logging.StreamHandler(_log_stream())
    to_file.setFormatter(logging.Formatter(_FORMAT))
    logging.getLogger().addHandler(to_file)
    if logging.lastResort is not None:
        logging.getLogger("torchtitan_rl").addHandler(logging.lastResort)
    logging.captureWarnings(True)


def divert_everything() -> None:
    """Send all that Python prints from now on to the log file as well: what a library reports at
    exit. Call it after `divert_libraries`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdout = sys.stderr = _log_stream()


@contextmanager
def without_python_output() -> Iterator[None]:
    """What Python prints inside goes to the log file as well: an engine's own messages."""
    with redirect_stdout(_log_stream()) as log, redirect_stderr(log):
        yield


def _log_stream() -> TextIO:
    return os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _copy_of(stream: TextIO, descriptor: int) -> TextIO:
    stream.flush()
    return os.fdopen(os.dup(descriptor), "w", buffering=1, errors="backslashreplace")


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


_OPTIONS = ("--dry-run", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a command's words ask for."""

    is_wanted: bool
    as_json: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> tuple[DryRun, list[str]]:
        """And the other words.

        Raises:
            ConfigError: ``--json`` without ``--dry-run``.
        """
        is_wanted, as_json = (option in words for option in _OPTIONS)
        if as_json and not is_wanted:
            raise ConfigError("--json is of a plan: give --dry-run --json")
        rest = [word for word in words if word not in _OPTIONS]
        return cls(is_wanted=is_wanted, as_json=as_json), rest

    def planning(self) -> AbstractContextManager[Any]:
        """What a configuration or its task prints inside must not get into the JSON."""
        return redirect_stdout(sys.stderr) if self.as_json else nullcontext()

    def show(self, lines: str, document: Mapping[str, Any]) -> int:
        """Print the one or the other; returns the exit code."""
        print(json.dumps(plain(document), indent=2) if self.as_json else lines)
        return 0


def plain(value: Any) -> Any:
    """In the types of JSON: a dataclass as an object, what JSON has no word for as text.

    >>> from pathlib import PurePath
    >>> plain({"path": PurePath("a"), "sizes": (1, math.inf), "score": len})
    {'path': 'a', 'sizes': [1, 'inf'], 'score': 'builtins:len'}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value)
