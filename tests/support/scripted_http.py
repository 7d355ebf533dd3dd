"""An HTTP server on a real socket that answers from a script: for clients that must bear faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reply:
    """``body`` is sent as JSON unless it is text. Status 0 closes the connection without one."""

    status: int = 200
    body: Any = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ScriptedHttp:
    """The n-th request gets the n-th reply of ``script``, later ones the last; None is never
    answered. ``answer`` chooses the reply by the body instead. ``received`` are the bodies of all
    requests, ``most_at_once`` of those that were held while ``hold`` was not set."""

    script: Sequence[Reply | None]
    received: list[Any] = field(default_factory=list)
    answer: Callable[[Any], Reply] | None = None
    hold: asyncio.Event | None = None
    most_at_once: int = 0
    port: int = 0
    _running: int = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while body := await _body(reader):
                self.received.append(json.loads(body))
                if self.answer is not None:
                    reply: Reply | None = self.answer(self.received[-1])
                else:
                    reply = self.script[min(len(self.received), len(self.script)) - 1]
                self._running += 1
                self.most_at_once = max(self.most_at_once, self._running)
                if self.hold is not None:
                    await self.hold.wait()
                self._running -= 1
                if reply is None:
                    await reader.read()
                    return
                if reply.status == 0:
                    return
                writer.write(_encoded(reply))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def scripted_http(
    *script: Reply | None, answer: Callable[[Any], Reply] | None = None
) -> AsyncIterator[ScriptedHttp]:
    scripted = ScriptedHttp(script, answer=answer)
    server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
    scripted.port = server.sockets[0].getsockname()[1]
    try:
        yield scripted
    finally:
        server.close()


async def _body(reader: asyncio.StreamReader) -> bytes:
    """Of the next request, null if it has none; empty at the end of the connection."""
    length, default = 0, b""
    while (line := await reader.readline()) not in (b"\r\n", b""):
        default = b"null"
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return await reader.readexactly(length) or default


def _encoded(reply: Reply) -> bytes:
    body = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
    lines = [
        f"HTTP/1.1 {reply.status} Scripted",
        "content-type: application/json",
        f"content-length: {len(body.encode())}",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    return "\r\n".join([*lines, "", body]).encode()
