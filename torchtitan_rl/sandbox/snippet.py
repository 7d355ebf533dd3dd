"""The process of a snippet: drops its rights, then runs the code as ``__main__``."""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
import types
from math import ceil
from typing import Any, NoReturn, TextIO, cast

from torchtitan_rl.sandbox import kernel, namespaces
from torchtitan_rl.sandbox.namespaces import SyscallFilter

NAME = "snippet.py"
_FAILURE = 3  # file descriptor
_SIGNALS = 1024  # limit of pending signals and timers
_CPU_GRACE_S = 1  # the keeper, which counts all processes together, should notice first


def run_snippet(
    request: dict[str, Any],
    streams: tuple[int, int, int, int],
    *,
    address_bytes: int,
    settings: dict[str, Any],
    system_calls: SyscallFilter,
) -> NoReturn:
    """Run the request's code, and exit as Python would. ``streams`` are stdin, stdout, stderr
    and a descriptor that gets the reason if the code cannot be run, and is closed before the
    code runs."""
    try:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(_FAILURE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _enclose(request["limits"], address_bytes, settings)
        system_calls.load()
        _prepare_python(settings["prepared"])
    except BaseException as error:
        os.write(_FAILURE, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.close(_FAILURE)
    status = 1  # stays if the failure cannot even be reported
    try:
        status = _run(request["code"], print_last=request["print_last"])
    finally:
        try:
            _finish()
        finally:
            os._exit(status)


def _enclose(limits: dict[str, Any], address_bytes: int, settings: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise root owns the files in /proc/self
    with contextlib.suppress(OSError):  # the kernel may have no huge pages
        kernel.prctl(kernel.PR_SET_THP_DISABLE, 1)  # a huge page stays in use if 4 KB of it are
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # killed first if the machine runs out of memory
    if settings["isolation"] == "namespaces":
        namespaces.become_nobody()
        _limit(resource.RLIMIT_NPROC, limits["processes"])
    else:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["keeper"]:  # the keeper died before the prctl
            os._exit(1)
    if settings["isolation"] == "landlock":
        namespaces.close_files(settings["readable"])
    _limit(resource.RLIMIT_AS, address_bytes)
    _limit(resource.RLIMIT_CPU, ceil(limits["cpu_s"]) + _CPU_GRACE_S)
    _limit(resource.RLIMIT_FSIZE, limits["file_mb"] << 20)
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_SIGPENDING, _SIGNALS)
    _limit(resource.RLIMIT_CORE, 0)
    kernel.drop_capabilities()


def _limit(what: int, value: int) -> None:
    most = resource.getrlimit(what)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(what, (value, value))


def _prepare_python(prepared: object) -> None:
    """Make this process look like a fresh interpreter, whose home is the snippet's folder."""
    sys.argv = [NAME]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if prepared is not None:
        main.__dict__["prepared"] = prepared
    os.environ["HOME"] = os.environ["TMPDIR"] = os.getcwd()
    tempfile.tempdir = None
    cast(Any, sys.stdout).reconfigure(line_buffering=True)


def _run(code: str, *, print_last: bool) -> int:
    linecache.cache[NAME] = (len(code), None, f"{code}\n".splitlines(keepends=True), NAME)
    try:
        _execute(code, print_last=print_last)
    except SystemExit as error:
        return _exit_status(error.code)
    except BaseException as error:
        # The first two frames belong to this module.
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        frames = inner.tb_next if inner else None
        traceback.print_exception(type(error), error, frames, file=_stderr())
        return 1
    return 0


def _finish() -> None:
    """Finish the snippet as the interpreter does at exit, but without the finalization of our own
    modules."""
    cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
        with contextlib.suppress(Exception):  # the snippet may have closed or replaced the stream
            getattr(sys, name).flush()


def _execute(code: str, *, print_last: bool) -> None:
    namespace = sys.modules["__main__"].__dict__
    namespace["__builtins__"] = __builtins__
    tree = ast.parse(code, NAME)
    last = (
        tree.body.pop()
        if print_last and tree.body and isinstance(tree.body[-1], ast.Expr)
        else None
    )
    exec(compile(tree, NAME, "exec"), namespace)
    if last is not None:
        exec(compile(ast.Interactive([last]), NAME, "single"), namespace)


def _exit_status(code: object) -> int:
    """The exit status of Python after ``sys.exit(code)``; prints a code that is a message."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=_stderr())
    return 1


def _stderr() -> TextIO | None:
    """Standard error, even if the snippet has set `sys.stderr` to None (`print` would use
    stdout)."""
    return sys.__stderr__ if sys.stderr is None else sys.stderr
