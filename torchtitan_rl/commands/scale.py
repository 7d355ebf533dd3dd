"""``torchtitan-rl scale RUN_DIR --replicas N``: changes the number of replicas of a running run.

The command connects to a Unix socket of the run's controller. The socket is in the controller's
private folder (mode 0700), and ``launch.json`` has its path. Each side refuses a peer of another
user, which the kernel names (SO_PEERCRED). On a connection the command sends one line of JSON, and
the run answers with several:

| line | from | meaning |
|---|---|---|
| ``{"replicas": 3}`` | command | the number of replicas that the run shall have |
| ``{"waits": "..."}`` | run | each second: what it still waits for |
| ``{"done": "..."}`` | run | the last line: the replicas that the run has now |
| ``{"refused": "..."}`` | run | the last line: nothing has changed, and why |
| ``{"failed": "..."}`` | run | the last line: what went wrong |

Exit codes: 0 done; 1 failed, or not done in time; 2 refused, or the run does not run.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import tyro

from torchtitan_rl.aio import cancel_all, retrieve
from torchtitan_rl.bounds import Ranks, check_fields
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError, DeadlineError, ReplicaError
from torchtitan_rl.launch.own_user import use_private_folder
from torchtitan_rl.observability.page_files import LAUNCH_FILE, add_to_launch

_TIMEOUT_S = 900.0  # of the command
_SILENCE_S = 60.0  # the run says something each second
_SAY_S = 1.0
_READ_S = 5.0
_MAX_LINE = 1024
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user and group


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """Change the number of replicas of a run that runs on this machine. Returns once the replicas
    serve, or have left and their requests continue on others."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of the run."""
    replicas: Ranks
    """Number of replicas that the run shall have, with the one that is reserved for evaluation."""


def main(words: Sequence[str]) -> int:
    """Also raises ReplicaError if the run could not reach the number, or ended meanwhile, and
    DeadlineError if it has not reached the number in time, and goes on with it."""
    options = parse_options(ScaleOptions, words, prog="torchtitan-rl scale")
    check_fields(options, "--")
    with _connect(options.run) as connection:
        connection.sendall(json.dumps({"replicas": options.replicas}).encode() + b"\n")
        print(_follow(connection))
    return 0


def _connect(run: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SILENCE_S)
    try:
        connection.connect(json.loads((run / LAUNCH_FILE).read_bytes())["scaling"])
    except PermissionError as error:
        raise ConfigError(f"RUN_DIR is {run}: the run is another user's") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"RUN_DIR is {run}: no run of this folder runs on this machine, or it is still starting"
        ) from error
    if _user_of(connection) != os.geteuid():
        raise ConfigError(f"RUN_DIR is {run}: the run is another user's")
    return connection


def _follow(connection: socket.socket) -> str:
    begun_s, waits = time.monotonic(), ""
    try:
        for line in connection.makefile("rb"):
            ((kind, text),) = json.loads(line).items()
            match kind:
                case "done":
                    return str(text)
                case "refused":
                    raise ConfigError(text)
                case "failed":
                    raise ReplicaError(text)
            if text != waits:
                print(f"waiting for {text}", flush=True)
            waits = text
            if time.monotonic() - begun_s > _TIMEOUT_S:
                raise DeadlineError(
                    f"not done within {_TIMEOUT_S:.0f} s; the run goes on, and waits for {waits}"
                )
    except TimeoutError as error:
        raise DeadlineError(f"the run did not answer for {_SILENCE_S:.0f} s") from error
    except OSError as error:
        raise ReplicaError(f"the run has ended: {error}") from error
    raise ReplicaError("the run has ended")


class Scalable(Protocol):
    """What changes the number of replicas: `FailureHandling`."""

    async def scale(self, number: int) -> str: ...

    @property
    def scaling_waits_for(self) -> str: ...


@asynccontextmanager
async def scaling_socket(run_dir: Path, run: Scalable) -> AsyncIterator[None]:
    """Serve the socket of a run while the block runs. A change goes on if its command ends."""
    path = use_private_folder() / f"scale-{os.getpid()}"
    works: set[asyncio.Task[str]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            if _user_of(writer.get_extra_info("socket")) == os.geteuid():
                await answer(reader, writer)
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_S):
                number = json.loads(await reader.readline())["replicas"]
            if not isinstance(number, int):
                raise TypeError(number)
        except (ValueError, KeyError, TypeError, RecursionError):  # of a line that is too long, too
            await _send(writer, refused="the request is not one line of JSON with replicas")
            return
        work = asyncio.create_task(run.scale(number), name="the command scale")
        works.add(work)
        work.add_done_callback(works.discard)
        work.add_done_callback(retrieve)
        while not (await asyncio.wait({work}, timeout=_SAY_S))[0]:
            await _send(writer, waits=run.scaling_waits_for)
        await _send(writer, **_last_line(work))

    server = await asyncio.start_unix_server(serve, path, limit=_MAX_LINE)
    path.chmod(0o600)
    add_to_launch(run_dir, scaling=str(path))
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        await cancel_all(works)


def _last_line(work: asyncio.Task[str]) -> dict[str, str]:
    if work.cancelled():
        return {"failed": "the run ended first"}
    match work.exception():
        case None:
            return {"done": work.result()}
        case ConfigError() as error:
            return {"refused": str(error)}
        case error:
            return {"failed": str(error)}


async def _send(writer: asyncio.StreamWriter, **line: Any) -> None:
    writer.write(json.dumps(line).encode() + b"\n")
    await writer.drain()


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
