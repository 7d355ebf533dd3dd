"""Drives an ASGI app message by message, as a server would, and an app that answers on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from torchtitan_rl.serving.middleware import session_id

CHAT = "/v1/chat/completions"


async def settle() -> None:
    """Let everything happen that waits for nothing but its turn."""
    for _ in range(50):
        await asyncio.sleep(0)


class Client:
    """One request and what has come of it so far. A body of several parts is sent chunked."""

    def __init__(
        self,
        app: Any,
        path: str = CHAT,
        *,
        method: str = "POST",
        body: bytes | Iterable[bytes] = b"{}",
        headers: Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]] = (),
        address: str = "10.0.0.1",
        sends_all: bool = True,
    ) -> None:
        parts = [body] if isinstance(body, bytes) else list(body)
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        path, _, query = path.partition("?")
        self.scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), _bytes(value)) for name, value in pairs],
            "client": (address, 1234),
        }
        self.sent: list[Message] = []
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        for i, part in enumerate(parts):
            self.say(part, more=i + 1 < len(parts) or not sends_all)
        self._news = asyncio.Event()
        self._has_left = asyncio.Event()
        self.task = asyncio.ensure_future(app(self.scope, self._receive, self._send))

    def say(self, part: bytes, *, more: bool = False) -> None:
        self._incoming.put_nowait({"type": "http.request", "body": part, "more_body": more})

    async def leave(self) -> None:
        """Disconnect, and wait until the server is done with the request."""
        self._has_left.set()
        await self.task

    async def _receive(self) -> Message:
        if not self._incoming.empty():
            return self._incoming.get_nowait()
        spoken = asyncio.ensure_future(self._incoming.get())
        left = asyncio.ensure_future(self._has_left.wait())
        try:
            await asyncio.wait({spoken, left}, return_when=asyncio.FIRST_COMPLETED)
            return spoken.result() if spoken.done() else {"type": "http.disconnect"}
        finally:
            spoken.cancel()
            left.cancel()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    async def answer(self) -> tuple[int | None, Any]:
        """Status and JSON of the whole response; None without a body."""
        await self.task
        return self.status, json.loads(self.body) if self.body else None

    async def refusal(self) -> tuple[int | None, str, str | None]:
        """Status, code and parameter of an OpenAI error object, which it must be."""
        status, body = await self.answer()
        assert set(body) == {"error"}
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return status, error["code"], error["param"]


class Call:
    """One run of `OnDemandApp`."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.session_id = session_id.get()
        self.is_aborted = asyncio.Event()
        self._parts: asyncio.Queue[tuple[int, bytes, bool]] = asyncio.Queue()

    def stream(self, part: bytes) -> None:
        self._parts.put_nowait((200, part, True))

    def finish(self, part: bytes = b"done", *, status: int = 200) -> None:
        self._parts.put_nowait((status, part, False))


class OnDemandApp:
    """Answers what a test tells its calls to; notices a disconnect as vLLM's handlers do."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call((await receive())["body"])
        self.calls.append(call)
        gone = asyncio.ensure_future(receive())
        more, begun = True, False
        while more:
            part = asyncio.ensure_future(call._parts.get())
            await asyncio.wait({part, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                part.cancel()
                assert gone.result() == {"type": "http.disconnect"}
                call.is_aborted.set()
                return
            status, data, more = part.result()
            if not begun:
                begun = True
                await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": data, "more_body": more})
        gone.cancel()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
