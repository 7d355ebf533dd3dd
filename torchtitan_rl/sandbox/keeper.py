"""The process that watches over one snippet, and tells how it ended.

It reads a request from its link (one JSON line), forks the snippet, keeps the first bytes of what
that writes, and answers with one JSON line when the snippet and all that it started are dead. Where
the other end of the link is closed, it kills them and gives no answer. As the first process of the
snippet's namespace of process ids, it cannot be killed from within, and its end is theirs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.sandbox import kernel, namespaces
from torchtitan_rl.sandbox.cpu_clock import CpuClock
from torchtitan_rl.sandbox.filters import SyscallFilter
from torchtitan_rl.sandbox.snippet import run_snippet

_CHECK_S = 0.05  # between two looks at time and memory
_CHUNK_BYTES = 1 << 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def keep(link: socket.socket, settings: dict[str, Any], system_calls: SyscallFilter) -> NoReturn:
    """Serve one snippet, and exit."""
    started_s = time.monotonic()
    folder = None
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the snippet may not look into this process
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with link.makefile("rb") as lines:
            line = lines.readline()
        if not line.endswith(b"\n"):
            os._exit(0)  # the caller has gone
        request = json.loads(line)
        limits = request["limits"]
        if settings["isolation"] == "namespaces":
            namespaces.enter_private(
                limits["file_mb"] << 20, limits["files"], settings["temporary"]
            )
        else:
            folder = tempfile.mkdtemp(prefix="snippet-")
            os.chdir(folder)
        answer = _Keeper(link, request, settings, system_calls).watch()
        if answer is not None:
            answer["wall_s"] = time.monotonic() - started_s
            link.setblocking(True)
            link.sendall(json.dumps(answer).encode() + b"\n")
    except Exception as error:
        link.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


class _Keeper:
    """Forks the snippet at once; ``system_calls`` and the limits bind it and not this process."""

    def __init__(
        self,
        link: socket.socket,
        request: dict[str, Any],
        settings: dict[str, Any],
        system_calls: SyscallFilter,
    ) -> None:
        self._link = link
        self._limits = request["limits"]
        self._has_own_ids = settings["isolation"] == "namespaces"
        self._unwritten = request["stdin"].encode(errors="replace")
        self._kept = {"stdout": b"", "stderr": b""}
        self._is_truncated = False
        self._deadline_s = time.monotonic() + self._limits["wall_s"]
        self._next_check_s = 0.0
        self._status: int | None = None  # of the snippet, once it is reaped
        memory_bytes = self._limits["memory_mb"] << 20
        address_bytes, used_bytes = (
            int(pages) * _PAGE_BYTES for pages in Path("/proc/self/statm").read_text().split()[:2]
        )
        self._memory_bytes = used_bytes + memory_bytes
        (stdin, self._stdin), (self._stdout, stdout), (self._stderr, stderr) = (
            os.pipe() for _ in range(3)
        )
        failure, failed = os.pipe()
        self._clock = CpuClock()
        self._snippet = os.fork()
        if self._snippet == 0:
            run_snippet(
                request,
                (stdin, stdout, stderr, failed),
                address_bytes=address_bytes + memory_bytes,
                settings=settings,
                system_calls=system_calls,
            )
        for descriptor in (stdin, stdout, stderr, failed):
            os.close(descriptor)
        with open(failure, "rb") as reasons:
            if reason := reasons.read():
                raise OSError(reason.decode())

    def watch(self) -> dict[str, Any] | None:
        """How the snippet ended, once all is dead; None where the caller has gone."""
        selector = selectors.DefaultSelector()
        for descriptor, events, act in (
            (self._link.fileno(), selectors.EVENT_READ, lambda: "gone"),
            (os.pidfd_open(self._snippet), selectors.EVENT_READ, lambda: "ended"),
            (self._stdin, selectors.EVENT_WRITE, partial(self._feed, selector)),
            (self._stdout, selectors.EVENT_READ, partial(self._read, selector, "stdout")),
            (self._stderr, selectors.EVENT_READ, partial(self._read, selector, "stderr")),
        ):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, events, act)
        reason = None
        while reason is None:
            for key, _ in selector.select(_CHECK_S):
                reason = key.data() or reason
            reason = reason or self._exceeded()
        self._kill_all()
        if reason == "gone":
            return None
        for descriptor, name in ((self._stdout, "stdout"), (self._stderr, "stderr")):
            while self._keep_chunk(descriptor, name):
                pass
        return self._answer(reason)

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            written = os.write(self._stdin, self._unwritten[:_CHUNK_BYTES])
        except OSError:  # the snippet has closed its input
            written = len(self._unwritten)
        self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            selector.unregister(self._stdin)
            os.close(self._stdin)

    def _read(self, selector: selectors.BaseSelector, name: str) -> None:
        descriptor = self._stdout if name == "stdout" else self._stderr
        if not self._keep_chunk(descriptor, name):
            selector.unregister(descriptor)

    def _keep_chunk(self, descriptor: int, name: str) -> bool:
        """Whether there was one."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        left = self._limits["output_bytes"] - len(self._kept[name])
        self._kept[name] += chunk[:left]
        self._is_truncated |= len(chunk) > left
        return bool(chunk)

    def _exceeded(self) -> str | None:
        """The limit that the snippet, with all it started, is over."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_S
        if now_s > self._deadline_s:
            return "timeout"
        self._reap(os.WNOHANG)
        cpu_s, memory_bytes = _children_cpu_s(), 0
        own = str(os.getpid())
        names = os.listdir("/proc") if self._has_own_ids else [str(self._snippet)]
        for name in names:
            if name.isdigit() and name != own:
                more_s, more_bytes = _usage(name)
                cpu_s += more_s
                memory_bytes += more_bytes
        if max(cpu_s, self._clock.read_s()) > self._limits["cpu_s"]:
            return "cpu"
        return "memory" if memory_bytes > self._memory_bytes else None

    def _reap(self, options: int) -> None:
        """Processes whose parents have died become children of this one."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, options))[0]:
                if ended[0] == self._snippet:
                    self._status = ended[1]

    def _kill_all(self) -> None:
        if self._has_own_ids or self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1 if self._has_own_ids else self._snippet, signal.SIGKILL)
        self._reap(0)

    def _answer(self, reason: str) -> dict[str, Any]:
        code = os.waitstatus_to_exitcode(self._status or 0)
        cpu_s = max(_children_cpu_s(), self._clock.read_s())
        if reason == "ended" and code < 0:
            reason = "cpu" if cpu_s > self._limits["cpu_s"] else "killed"
        elif reason == "ended":
            reason = "error" if code else "ok"
        return {
            "status": reason,
            "exit_code": code,
            "cpu_s": cpu_s,
            "is_truncated": self._is_truncated,
            **{name: kept.decode(errors="replace") for name, kept in self._kept.items()},
        }


def _children_cpu_s() -> float:
    """Of those that were reaped."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _usage(process: str) -> tuple[float, int]:
    """CPU seconds, with those of dead children, and bytes."""
    folder = Path("/proc", process)
    try:
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return 0.0, 0
    cpu_s = sum(map(int, fields[11:15])) / _TICKS
    if fields[0] != b"Z":
        return cpu_s, _used_bytes(folder)
    with contextlib.suppress(OSError):  # its first thread has ended; others may go on
        return cpu_s, max(map(_used_bytes, (folder / "task").iterdir()), default=0)
    return cpu_s, 0


def _used_bytes(folder: Path) -> int:
    """Shared pages count in part, or in full where the process lets no one look into it."""
    with contextlib.suppress(OSError):
        memory = (folder / "smaps_rollup").read_bytes()
        kilobytes = memory.partition(b"\nPss:")[2].split(maxsplit=1)
        return int(kilobytes[0]) << 10 if kilobytes else 0
    with contextlib.suppress(OSError):  # also of one that has ended
        return int((folder / "statm").read_bytes().split()[1]) * _PAGE_BYTES
    return 0
