"""Runs Python code that a policy wrote and that may be malicious.

    async with Sandbox() as sandbox:
        result = await sandbox.run("print(6 * 7)")
        assert result.stdout == "42\\n"

Each snippet is forked from a process in which Python is already running (`zygote.py`). A snippet
sees its own file system, processes and network instead of those of this machine. It can make only
harmless system calls, and every resource that it uses is limited. When `run` returns, raises or is
cancelled, all processes of the snippet are dead. They also die when this process dies, even by
SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torchtitan_rl.aio import uninterrupted
from torchtitan_rl.bounds import Positive, PositiveFloat
from torchtitan_rl.errors import ConfigError, TorchtitanRLError
from torchtitan_rl.processes import hang_up

Isolation = Literal["namespaces", "landlock", "limits"]

_START_S = 300.0  # for starting Python and importing `preload`, on a busy machine
_GRACE_S = 60.0  # time for a keeper to answer after its snippet's time limit
_CHUNK_BYTES = 1 << 16
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); from torchtitan_rl.sandbox.zygote import main; "
    "del sys.path[0]; main()"  # snippets can import `preload` and installed packages only
)
_HELP = (
    "{error}. Isolation by namespaces needs Linux 5.12, libseccomp and user namespaces (in a "
    "container: --security-opt seccomp=unconfined --security-opt systempaths=unconfined; on "
    "Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0). isolation 'landlock' does "
    "without them (Linux 5.13); 'limits' only limits what code uses up, and leaves all files and "
    "processes of your user open to it"
)

_OPEN = (
    "sandbox isolation 'limits': programs can read and change all files of this user, and through "
    "/proc the memory of its processes"
)
logger = logging.getLogger(__name__)


class SandboxError(TorchtitanRLError):
    """The sandbox itself has failed, not the snippet."""


class SandboxImportError(ConfigError):
    """A module of `SandboxConfig.preload` cannot be imported."""


class SandboxStatus(StrEnum):
    """How a snippet ended."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # an exception, or another exit code
    TIMEOUT = "timeout"
    CPU = "cpu"  # more CPU seconds than allowed
    MEMORY = "memory"  # all its processes together used too much; one alone gets a MemoryError
    LIMIT = "limit"  # too many threads or files, if the kernel did not refuse them itself
    KILLED = "killed"  # by a signal, such as a crash; or the keeper died, maybe out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits for a snippet together with all processes that it starts."""

    wall_s: PositiveFloat = 10.0
    """Seconds after which the snippet is killed."""
    cpu_s: PositiveFloat = 5.0
    """Seconds of CPU time of all its processes together."""
    memory_mb: Positive = 512
    """Megabytes of memory of all its processes together, without the memory of ``preload``. Also
    the address space of each process. An open pipe or socket counts as if it were full."""
    processes: Positive = 32
    """Processes and threads at the same time. Without namespaces: threads of one process."""
    file_mb: Positive = 32
    """Megabytes of files, all together. With namespaces they are in memory."""
    files: Positive = 256
    """Files and folders."""
    open_files: Positive = 64
    """Descriptors that a process may have open."""
    output_bytes: Positive = 16384
    """Bytes of stdout and of stderr that are kept; the rest is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The output of a snippet, and how the snippet ended.

    ``exit_code`` is negative if a signal ended the snippet. ``is_truncated``: it wrote more than
    the limit. ``wall_s`` is counted from the snippet's start.
    """

    stdout: str
    stderr: str
    status: SandboxStatus
    exit_code: int
    is_truncated: bool
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """How snippets are isolated from the machine."""

    isolation: Isolation = "namespaces"
    """``namespaces``: a snippet reaches nothing of the machine. Where that is not allowed,
    ``landlock``: no files but its own, no network and no other processes, but it sees which files
    there are, and its own are on the disk. ``limits``: no network, but all files and, through
    ``/proc``, all processes of your user."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """What a snippet may use."""
    readable: tuple[str, ...] = ()
    """Files and folders that snippets may read, besides Python with its packages and the system's
    libraries."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, as this process finds them, so that no snippet waits for
    them."""
    concurrent: Positive | None = None
    """Snippets that run at the same time; others wait. None: one for each core."""

    def errors(self, name: str) -> list[str]:
        """Errors in the fields, or the reasons why this machine does not allow them."""
        missing = [path for path in self.readable if not os.path.exists(path)]
        found = [f"{name}.readable: there is no {path}" for path in missing]
        found += [
            f"{name}.readable: {path} would be hidden by the /tmp that each snippet has for itself"
            for path in self.readable
            if os.path.realpath(path) == "/tmp"
        ]
        if not found:
            found += [f"{name}{error}" for error in _start_errors(self)]
        return found


class Sandbox:
    """Runs snippets, isolated from each other. Use it from one event loop."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self._slots = asyncio.Semaphore(self.config.concurrent or os.cpu_count() or 1)
        self._starting = asyncio.Lock()
        self._zygote: _Zygote | None = None

    async def __aenter__(self) -> Sandbox:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
        print_last: bool = False,
        prepared: tuple[str, Sequence[Any] | None] | None = None,
    ) -> SandboxResult:
        """Run ``code`` as a program. With ``print_last``, also print the value of its last line if
        that is an expression.

        ``prepared`` names a function (``module:function``) in a module of ``preload``, with its
        arguments. It is called outside of the sandbox and its limits, so neither may come from a
        policy. In ``code`` the global ``prepared`` is its result; if the arguments are None, the
        function itself.

        If only the snippet's keeper process dies, the snippet may have caused this: the result is
        ``killed``, not an error.

        Raises:
            ConfigError: this machine does not allow the isolation.
            SandboxError: something outside of the sandbox killed the sandbox, or ``prepared``
                failed.
        """
        request = {
            "code": code,
            "stdin": stdin,
            "print_last": print_last,
            "limits": asdict(limits or self.config.limits),
        }
        async with self._slots:
            zygote = await self._started()
            started_s = time.monotonic()
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    zygote.send(theirs, json.dumps(prepared).encode())
                ours.setblocking(False)
                answer = await uninterrupted(
                    _exchange(ours, request), on_cancel=lambda: hang_up(ours)
                )
        if answer is None:
            if not zygote.is_alive():
                raise SandboxError("the sandbox was killed from outside, or closed")
            wall_s = time.monotonic() - started_s
            answer = {"status": "killed", "exit_code": -signal.SIGKILL, "wall_s": wall_s}
            answer |= {"stdout": "", "stderr": "", "is_truncated": False, "cpu_s": 0.0}
        return SandboxResult(**{**answer, "status": SandboxStatus(answer["status"])})

    async def close(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            await asyncio.to_thread(zygote.close)

    async def _started(self) -> _Zygote:
        async with self._starting:
            if self._zygote is None or not self._zygote.is_alive():
                await self.close()
                if self.config.isolation == "limits":
                    logger.warning(_OPEN)
                self._zygote = await asyncio.to_thread(_Zygote, self.config)
            return self._zygote


def shared_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox that all callers on this event loop share if they have this configuration."""
    sandboxes = _shared.setdefault(asyncio.get_running_loop(), {})
    return sandboxes.setdefault(config, Sandbox(config))


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[SandboxConfig, Sandbox]] = (
    WeakKeyDictionary()
)


@functools.lru_cache(maxsize=64)
def _start_errors(config: SandboxConfig) -> tuple[str, ...]:
    """Why a sandbox cannot start on this machine, each after the name of the field."""
    try:
        _Zygote(config).close()
    except SandboxImportError as error:
        return (f".preload: {error}",)
    except ConfigError as error:
        return (f": {error}",)
    return ()


class _Zygote:
    """A running zygote; the constructor blocks until it is ready."""

    def __init__(self, config: SandboxConfig) -> None:
        self._link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        settings = asdict(config) | {"path": [os.path.abspath(path) for path in sys.path]}
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-s", "-c", _MAIN, str(Path(__file__).parents[2])),
                    *(str(theirs.fileno()), json.dumps(settings)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C goes only to the controller
            )
        if not select.select([self._link], [], [], _START_S)[0]:
            self._process.kill()
        answer = json.loads(self._link.recv(_CHUNK_BYTES) or "{}")
        if "ready" not in answer:
            self.close()
            error = answer.get("error", f"it did not start within {_START_S:g} s")
            if answer.get("is_import"):
                raise SandboxImportError(error)
            raise ConfigError(_HELP.format(error=error))
        self._link.setblocking(False)

    def is_alive(self) -> bool:
        try:
            return bool(self._link.recv(1, socket.MSG_PEEK))
        except BlockingIOError:  # the process lives, and has written nothing
            return True
        except OSError:
            return False

    def send(self, link: socket.socket, prepared: bytes) -> None:
        """Have the zygote fork a keeper for ``link``, which is closed without an answer if it is
        dead."""
        with contextlib.suppress(OSError):
            socket.send_fds(self._link, [prepared], [link.fileno()])

    def close(self) -> None:
        self._link.close()
        self._process.wait()


def _environment() -> dict[str, str]:
    one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TMPDIR": tempfile.gettempdir(),
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",  # the same code gives the same result
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",  # each arena reserves 64 MB of addresses
        **dict.fromkeys(one_thread, "1"),
    }


async def _exchange(link: socket.socket, request: dict[str, Any]) -> dict[str, Any] | None:
    """Send a request to a keeper and read the answer, which arrives when all processes of the
    snippet are dead; None if the keeper has died. Raises SandboxError: the keeper cannot serve the
    snippet, or is stopped."""
    loop = asyncio.get_running_loop()
    received = b""
    try:
        async with asyncio.timeout(request["limits"]["wall_s"] + _GRACE_S):
            with contextlib.suppress(OSError):  # the keeper refused; its answer says why
                await loop.sock_sendall(link, json.dumps(request).encode() + b"\n")
            while not received.endswith(b"\n"):
                if not (chunk := await loop.sock_recv(link, _CHUNK_BYTES)):
                    break
                received += chunk
    except TimeoutError as error:
        raise SandboxError("the sandbox does not answer") from error
    except OSError:
        return None
    if not received.endswith(b"\n"):
        return None
    answer: dict[str, Any] = json.loads(received)
    if "error" in answer:
        raise SandboxError(answer["error"])
    return answer
