"""The console is the command's: what libraries print goes to a log file.

Native code (Monarch, gloo, nanobind) writes to the file descriptors 1 and 2, and the processes that
are started inherit them. So these two are pointed at the file, and ``sys.stdout`` and
``sys.stderr`` at what they were.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from torchtitan_rl.commands.signals import StopSignals, after_last_message, before_start
from torchtitan_rl.errors import ConfigError, TorchtitanRLError

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_command(work: Callable[[StopSignals], Coroutine[Any, Any, int]], *, log_dir: Path) -> int:
    """Run ``work``, which starts processes, with asyncio, and return its exit code. It handles
    signals, and only its own messages reach the console. Call it last."""
    divert_libraries(log_dir / "controller.log")

    async def main() -> int:
        signals = StopSignals()
        signals.install()
        return await work(signals)

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
