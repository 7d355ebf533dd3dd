"""The process that watches one snippet and reports how it ended.

The keeper reads a request from its link (one JSON line), forks the snippet, and keeps the first
bytes of its output. When the snippet and all processes that it started are dead, the keeper answers
with one JSON line. If the other end of the link is closed, it kills them and does not answer. With
namespaces, the keeper is the first process of the snippet's process-id namespace: the snippet
cannot kill it, and when it ends, all of the snippet's processes end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torchtitan_rl.sandbox import kernel, namespaces
from torchtitan_rl.sandbox.namespaces import SyscallFilter
from torchtitan_rl.sandbox.snippet import run_snippet

_CHECK_S = 0.05  # between two checks of time and memory
_CHUNK_BYTES = 1 << 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAPPING_BYTES = 256
_LOCK_BYTES = 192
_REMOVED_FILES = 8
_PIPE_BYTES = 16 * _PAGE_BYTES
_BLOCK_BYTES = 512  # the unit of `st_blocks`
_TICKS = os.sysconf("SC_CLK_TCK")


def keep(link: socket.socket, settings: dict[str, Any], system_calls: SyscallFilter) -> NoReturn:
    try:
        started_s = time.monotonic()
        answer = _serve(link, settings, system_calls)
        if answer is not None:
            answer["wall_s"] = time.monotonic() - started_s
            link.setblocking(True)
            link.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _serve(
    link: socket.socket, settings: dict[str, Any], system_calls: SyscallFilter
) -> dict[str, Any] | None:
    try:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # the snippet must not inspect this process
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with link.makefile("rb") as lines:
            line = lines.readline()
        if not line.endswith(b"\n"):
            return None  # the caller has gone
        request = json.loads(line)
        with _own_folder(settings, request["limits"]) as folder:
            return _Keeper(link, request, settings, folder, system_calls).watch()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def _own_folder(settings: dict[str, Any], limits: dict[str, Any]) -> Iterator[str | None]:
    """Enter the snippet's folder: with namespaces in memory (yields None), else on the disk (yields
    its path, and removes it at the end)."""
    if settings["isolation"] == "namespaces":
        namespaces.enter_private(limits["file_mb"] << 20, limits["files"], settings["temporary"])
        yield None
        return
    folder = tempfile.mkdtemp(prefix="snippet-")
    try:
        os.chdir(folder)
        yield folder
    finally:
        _remove(folder)


class _Keeper:
    """Forks the snippet and watches it. ``system_calls`` and the limits apply to the snippet
    only."""

    def __init__(
        self,
        link: socket.socket,
        request: dict[str, Any],
        settings: dict[str, Any],
        folder: str | None,
        system_calls: SyscallFilter,
    ) -> None:
        self._link = link
        self._socket_bytes = link.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._limits = request["limits"]
        self._folder = folder
        self._zygote = settings["zygote"]
        self._has_own_ids = settings["isolation"] == "namespaces"
        self._unwritten = request["stdin"].encode(errors="replace")
        self._kept = {"stdout": b"", "stderr": b""}
        self._is_truncated = False
        now_s = time.monotonic()
        self._deadline_s = now_s + self._limits["wall_s"]
        self._next_check_s = now_s + _CHECK_S
        self._status: int | None = None  # the snippet's wait status, once it is reaped
        memory_bytes = self._limits["memory_mb"] << 20
        address_bytes, used_bytes = (
            int(pages) * _PAGE_BYTES for pages in Path("/proc/self/statm").read_text().split()[:2]
        )
        self._memory_bytes = used_bytes + memory_bytes
        (stdin, self._stdin), (self._stdout, stdout), (self._stderr, stderr) = (
            os.pipe() for _ in range(3)
        )
        failure, failed = os.pipe()
        self._clock = kernel.CpuClock()
        settings = {**settings, "keeper": os.getpid()}
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
        """Return how the snippet ended, when it and all its processes are dead; None if the caller
        is gone."""
        selector = selectors.DefaultSelector()
        for descriptor, events, act in (
            (self._link.fileno(), selectors.EVENT_READ, lambda: "gone"),
            (self._zygote, selectors.EVENT_READ, lambda: "gone"),
            (os.pidfd_open(self._snippet), selectors.EVENT_READ, lambda: "ended"),
            (self._stdin, selectors.EVENT_WRITE, partial(self._feed, selector)),
            (self._stdout, selectors.EVENT_READ, partial(self._read, selector, "stdout")),
            (self._stderr, selectors.EVENT_READ, partial(self._read, selector, "stderr")),
        ):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, events, act)
        reason = None
        try:
            while reason is None:
                for key, _ in selector.select(_CHECK_S):
                    reason = key.data() or reason
                reason = reason or self._exceeded()
        finally:
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
        """Read a chunk, and keep it up to the limit; False if nothing could be read."""
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        left = self._limits["output_bytes"] - len(self._kept[name])
        self._kept[name] += chunk[:left]
        self._is_truncated |= len(chunk) > left
        return bool(chunk)

    def _exceeded(self) -> str | None:
        """The limit that the snippet and all processes that it started exceed together, if any;
        None if the last check was less than `_CHECK_S` ago."""
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return None
        self._next_check_s = now_s + _CHECK_S
        if now_s > self._deadline_s:
            return "timeout"
        self._reap(os.WNOHANG)
        own = str(os.getpid())
        names = os.listdir("/proc") if self._has_own_ids else [str(self._snippet)]
        used = _Usage(self._limits["open_files"], self._socket_bytes)
        for name in names:
            if name.isdigit() and name != own:
                used.add(Path("/proc", name))
        if max(_children_cpu_s() + used.cpu_s, self._clock.read_s()) > self._limits["cpu_s"]:
            return "cpu"
        if used.memory_bytes + sum(used.held.values()) > self._memory_bytes:
            return "memory"
        if self._folder is None:  # the kernel counts threads and files
            return None
        if used.threads > self._limits["processes"] or self._has_too_many_files(used.removed):
            return "limit"
        return None

    def _has_too_many_files(self, removed: set[bytes]) -> bool:
        """Whether the snippet's files exceed the limits, or cannot be counted. Each of the
        ``removed`` files that it has mapped may be as large as the limit for a file."""
        most_bytes = self._limits["file_mb"] << 20
        if removed:  # do not count libraries that were replaced: this process has them mapped, too
            removed -= _removed_files(Path("/proc/self/maps").read_bytes().splitlines())
        if len(removed) > _REMOVED_FILES:
            return True
        files = used_bytes = 0
        folders = [self._folder]
        for path in folders:
            try:
                for entry in os.scandir(path):
                    status = entry.stat(follow_symlinks=False)
                    files += 1
                    used_bytes += status.st_blocks * _BLOCK_BYTES
                    if files > self._limits["files"] or used_bytes > most_bytes:
                        return True
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)
            except FileNotFoundError:  # the snippet has just removed it
                continue
            except OSError:  # unreadable even for its owner, or nested too deeply
                return True
        return False

    def _reap(self, options: int) -> None:
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
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Usage:
    """The resources that processes use, added up. ``held``: for each open pipe, socket and removed
    file, the bytes that the kernel may hold for it. ``removed``: files that were removed while
    mapped."""

    def __init__(self, open_files: int, socket_bytes: int) -> None:
        self._socket_bytes, self._most_held_bytes = socket_bytes, open_files * socket_bytes
        self.cpu_s, self.threads, self.memory_bytes = 0.0, 0, 0
        self.held: dict[tuple[int, int], int] = {}
        self.removed: set[bytes] = set()

    def add(self, folder: Path) -> None:
        """Add a process, given its folder in ``/proc``. No effect if the process has ended."""
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            self.cpu_s += sum(map(int, fields[11:15])) / _TICKS  # includes its dead children
            self.threads += int(fields[17])
            if fields[0] != b"Z":
                self.memory_bytes += self._memory_bytes(folder)
            else:  # its first thread has ended; other threads may still run
                self.memory_bytes += max(
                    map(self._memory_bytes, (folder / "task").iterdir()), default=0
                )

    def _memory_bytes(self, folder: Path) -> int:
        """Bytes of memory. A page shared by n processes counts 1/n; mappings and file locks count
        with the kernel's memory for them."""
        with contextlib.suppress(OSError):
            try:
                rollup = (folder / "smaps_rollup").read_bytes()
                mappings = (folder / "maps").read_bytes().splitlines()
                num_locks = self._look_at_descriptors(folder)
            except PermissionError:  # the process forbids inspection: assume the most it may use
                pages = int((folder / "statm").read_bytes().split()[1])
                return pages * _PAGE_BYTES + self._most_held_bytes
            sizes = dict(line.split()[:2] for line in rollup.splitlines())
            kilobytes = int(sizes.get(b"Pss:", 0)) + int(sizes.get(b"SwapPss:", 0))
            self.removed |= _removed_files(mappings)
            return (kilobytes << 10) + len(mappings) * _MAPPING_BYTES + num_locks * _LOCK_BYTES
        return 0

    def _look_at_descriptors(self, folder: Path) -> int:
        """Add up what the kernel holds for the descriptors; returns the number of file locks."""
        num_locks = 0
        with os.scandir(folder / "fd") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    kind = stat.S_IFMT(status.st_mode)
                    sizes = {stat.S_IFIFO: _PIPE_BYTES, stat.S_IFSOCK: self._socket_bytes}
                    if not status.st_nlink:
                        sizes[stat.S_IFREG] = status.st_blocks * _BLOCK_BYTES
                    self.held[status.st_dev, status.st_ino] = sizes.get(kind, 0)
                    if stat.S_ISREG(kind):
                        about = (folder / "fdinfo" / entry.name).read_bytes()
                        num_locks += about.count(b"\nlock:")
        return num_locks


def _removed_files(mappings: list[bytes]) -> set[bytes]:
    """Device and inode of each removed file in the lines of ``/proc/PID/maps``."""
    return {b" ".join(line.split()[3:5]) for line in mappings if line.endswith(b"(deleted)")}


def _remove(folder: str) -> None:
    """Remove a folder with its contents, even if folders are unreadable or nested very deeply."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)  # most snippets leave it empty
        return
    flat = tempfile.mkdtemp(prefix="snippet-")
    folders = [folder]
    for path in folders:
        os.chmod(path, 0o700)
        for entry in list(os.scandir(path)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # its `..` is about to change
                folders.append(f"{flat}/{len(folders)}")
                os.rename(entry.path, folders[-1])
            else:
                os.unlink(entry.path)
    for path in (*folders, flat):
        os.rmdir(path)
