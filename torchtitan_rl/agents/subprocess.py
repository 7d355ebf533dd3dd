"""Runs a program for an environment, and kills everything it started when the call ends.

`run_command` returns, raises or is cancelled only after the program and all its descendants are
dead. They are also killed, a moment later, when this process dies, even by SIGKILL: a shim process
between this one and the program (`shim.py`) sees to that. Not a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.tasks import uninterrupted

_SHIM = Path(__file__).parents[1] / "shim.py"
_CHUNK_BYTES = 1 << 16
_OUTPUT_GRACE_S = 10.0  # from the end of the program to the end of its output


class CommandError(TorchtitanRLError):
    """A program could not be started, or it is unknown how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a program ended: exactly one of ``exit_code``, ``signal`` and ``timed_out`` is set.

    ``truncated``: one of its outputs was longer than the limit.
    """

    exit_code: int | None
    signal: int | None  # that killed it
    timed_out: bool
    stdout: bytes
    stderr: bytes
    truncated: bool


async def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    max_output_bytes: int = 1 << 20,
) -> CommandResult:
    """Run a program in a process session of its own, until it ends or times out.

    ``env`` replaces the environment. ``stdin`` None is an empty input. The first
    ``max_output_bytes`` of stdout and of stderr are kept, the rest is dropped. Processes that the
    program leaves running are killed. Plain (blocking) environments, which have threads of their
    own, call this through `asyncio.run`.

        result = await run_command(["pytest", "-q"], timeout_s=60, cwd=folder)
        reward = float(result.exit_code == 0)

    Raises:
        CommandError: the program could not be started, or not be killed, or it killed its shim.
    """
    if not argv:
        raise CommandError("a command needs at least the program's name")
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        running = _run(argv, ours, theirs, timeout_s, cwd, env, stdin, max_output_bytes)
        return await uninterrupted(running, on_cancel=lambda: _hang_up(ours))


async def _run(
    argv: Sequence[str],
    ours: socket.socket,
    theirs: socket.socket,
    timeout_s: float,
    cwd: str | Path | None,
    env: Mapping[str, str] | None,
    stdin: bytes | None,
    max_output_bytes: int,
) -> CommandResult:
    try:
        with theirs:
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(theirs.fileno()), *argv),
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # no such folder, a null byte in an argument, ...
        raise CommandError(f"{argv[0]}: {error}") from error
    transfers = asyncio.gather(
        _feed(shim.stdin, stdin),
        _read(shim.stdout, max_output_bytes),
        _read(shim.stderr, max_output_bytes),
    )
    reporting = asyncio.ensure_future(_report(ours))  # ends when the shim has
    timed_out = not (await asyncio.wait([reporting], timeout=timeout_s))[0]
    _hang_up(ours)
    pid, kind, value = await reporting
    if not kind and pid:  # the shim was killed: kill at least the program's process group
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    ended, _ = await asyncio.wait([transfers], timeout=_OUTPUT_GRACE_S)
    if not ended:
        transfers.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await transfers
        raise CommandError(f"{argv[0]}: something it started cannot be killed; {kind} {value}")
    await shim.wait()  # reaped
    _, (stdout, more_stdout), (stderr, more_stderr) = transfers.result()
    if kind == "error" or (not kind and not timed_out):
        raise CommandError(f"{argv[0]}: {value or 'its shim was killed'}")
    return CommandResult(
        exit_code=int(value) if kind == "exit" else None,
        signal=int(value) if kind == "signal" else None,
        timed_out=timed_out and not kind,
        stdout=stdout,
        stderr=stderr,
        truncated=more_stdout or more_stderr,
    )


def _hang_up(link: socket.socket) -> None:
    """Tell the shim to kill everything; harmless when it has ended."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)


async def _feed(writer: asyncio.StreamWriter | None, data: bytes | None) -> None:
    if writer is None:
        return
    # The program may end, or close its input, without reading all of it.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data or b"")
        await writer.drain()
    writer.close()


async def _read(reader: asyncio.StreamReader | None, limit: int) -> tuple[bytes, bool]:
    """The first ``limit`` bytes, and whether there were more."""
    kept, more = bytearray(), False
    while reader is not None and (chunk := await reader.read(_CHUNK_BYTES)):
        left = limit - len(kept)
        kept += chunk[:left]
        more = more or len(chunk) > left
    return bytes(kept), more


async def _report(link: socket.socket) -> tuple[int, str, str]:
    """The program's pid (0: none) and how it ended (``exit 3``); "" without a report."""
    loop, report = asyncio.get_running_loop(), b""
    while chunk := await loop.sock_recv(link, _CHUNK_BYTES):
        report += chunk
    first, _, rest = report.decode(errors="replace").partition("\n")
    pid, last = (int(first[4:]), rest) if first.startswith("pid ") else (0, first)
    kind, _, value = last.partition(" ")
    return pid, kind, value
