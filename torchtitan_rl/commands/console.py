"""Console output, signals and ``--dry-run``, the same for every command.

Only the command itself writes to the console; output of libraries goes to a log file. Native code
(Monarch, gloo, nanobind) writes to the file descriptors 1 and 2, which child processes inherit. So
these two descriptors are redirected to the log file, and ``sys.stdout`` and ``sys.stderr`` write to
copies of the original ones.

SIGINT and SIGTERM have the same effect in every command:

| when | first signal | a further one |
|---|---|---|
| before the command starts a process, and in `generate` | the command ends | nothing |
| while its processes start | its main task is cancelled, its processes end | the same |
| while it can stop cleanly | ``stop_cleanly`` is called | its main task is cancelled |
| after its last message | the process ends at once | |

Signals within a second of the first one count as the same request to stop, because ``timeout`` and
schedulers signal both a process and its group.

The exit code is 128 + n for signal n. After the command's last message, it is the command's own
exit code.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import signal
import sys
import threading
import time
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
    Call this function last.

    Returns the exit code that ``work`` returned, or the exit code for the error that it raised. If
    a signal stopped ``work`` (it was cancelled, or returned None), prints a line with
    ``when_stopped`` and returns the signal's exit code.
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
    """Run a whole command line and return its exit code. Errors are shown as lines on stderr.
    Neither a signal nor a closed pipe (``--help | head``) causes a traceback.

    Files that the command writes are never writable by all users, even if the umask would allow
    this. The reason is that checkpoints contain pickles: an unchecked load of a pickle that another
    user has changed would run that user's code.
    """
    os.umask(os.umask(0) | 0o002)
    _replace_closed_streams()
    # As the first one registered, it is the last one called. After it Python gives signals back to
    # the system, and a signal would end the process with another exit code than the command's.
    atexit.register(_ignore_signals)
    with before_start():
        try:
            try:
                return command()
            finally:
                sys.stdout.flush()
        except TorchtitanRLError as error:
            return print_error(error)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout again at exit
            return 128 + signal.SIGPIPE


def _replace_closed_streams() -> None:
    """Open the null device for each standard stream that the caller has closed (``>&-``). Otherwise
    the next file that is opened would get its number, and then what libraries print."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def print_error(error: Exception) -> int:
    """Print an error on stderr: an expected error as lines of text, a bug of this program with its
    traceback. Returns the exit code."""
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
    """Redirect the output of native code, of child processes and of other packages' loggers to
    ``log_file``, whose folder must exist. Warnings of our own loggers stay on the console.

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
    """Redirect Python's own output to the log file, too, for libraries that print at exit. Call
    this after `divert_libraries`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    sys.stdout = sys.stderr = _log_stream()


@contextmanager
def without_python_output() -> Iterator[None]:
    """While the context is open, redirect Python's output to the log file, for example an engine's
    messages."""
    with redirect_stdout(_log_stream()) as log, redirect_stderr(log):
        yield


def _log_stream() -> TextIO:
    return os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _copy_of(stream: TextIO, descriptor: int) -> TextIO:
    stream.flush()
    return os.fdopen(os.dup(descriptor), "w", buffering=1, errors="backslashreplace")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_UNWIND_S = 2.0
_SAME_STOP_S = 1.0  # signals that arrive within this time after the first one are ignored


class StopSignals:
    """The signals that a running command has received. Call `install` in the command's main
    task."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: list[int] = []
        self.stop_cleanly: Callable[[], None] | None = None
        self._clock = clock
        self._first_s = 0.0  # when the first signal arrived

    @property
    def exit_code(self) -> int:
        return 128 + self.received[0]

    @property
    def name(self) -> str:
        return signal.Signals(self.received[0]).name

    def install(self) -> None:
        main = asyncio.current_task()
        assert main is not None
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number, main)

    def stop(self) -> None:
        """Stop the command as SIGTERM does, unless it was already told to stop."""
        if not self.received:
            signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, number: int, main: asyncio.Task[Any]) -> None:
        self.received.append(number)
        if main.done():  # asyncio is only waiting for a thread to end
            os._exit(self.exit_code)
        if len(self.received) == 1:
            self._first_s = self._clock()
        elif self._clock() < self._first_s + _SAME_STOP_S:
            return
        if self.stop_cleanly is not None and len(self.received) == 1:
            self.stop_cleanly()
        else:
            main.cancel()


@contextmanager
def before_start() -> Iterator[None]:
    """While the context is open, and until a command installs `StopSignals`, a signal ends the
    process without a traceback."""
    previous = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, handler)


def after_last_message(exit_code: int) -> None:
    """Let a signal end the process at once from now on."""
    for number in _SIGNALS:
        signal.signal(number, lambda *_: os._exit(exit_code))


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_within(within_s: float, exit_code: int) -> None:
    """End this process after ``within_s``, unless it has ended by itself."""
    timer = threading.Timer(within_s, os._exit, [exit_code])
    timer.daemon = True
    timer.start()


def _end(number: int, frame: Any) -> NoReturn:
    """Raise SystemExit, so that temporary files are removed. The interrupted code has
    ``_UNWIND_S`` seconds to end, and cannot print a traceback. Further signals are ignored."""
    _ignore_signals()
    print("stopped", file=sys.stderr)
    sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    end_within(_UNWIND_S, 128 + number)
    raise SystemExit(128 + number)


_OPTIONS = ("--dry-run", "--json")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The options ``--dry-run`` and ``--json`` of a command."""

    is_wanted: bool
    as_json: bool

    @classmethod
    def of(cls, words: Sequence[str]) -> tuple[DryRun, list[str]]:
        """Parse a command's words; returns the others, too. Raises ConfigError for ``--json``
        alone."""
        is_wanted, as_json = (option in words for option in _OPTIONS)
        if as_json and not is_wanted:
            raise ConfigError("--json is of a plan: give --dry-run --json")
        rest = [word for word in words if word not in _OPTIONS]
        return cls(is_wanted=is_wanted, as_json=as_json), rest

    def planning(self) -> AbstractContextManager[Any]:
        """A context for planning: with ``--json``, everything that a configuration or its task
        prints goes to stderr, so that stdout has only the JSON."""
        return redirect_stdout(sys.stderr) if self.as_json else nullcontext()

    def show(self, lines: str, document: Mapping[str, Any]) -> int:
        """Print ``document`` as JSON with ``--json``, and otherwise ``lines``. Returns the exit
        code."""
        print(json.dumps(plain(document), indent=2) if self.as_json else lines)
        return 0


def plain(value: Any) -> Any:
    """Convert to JSON types: a dataclass to an object, and values that JSON cannot express to text.

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
