"""One run of a request whose response is recorded, so that later clients can be given it from its
beginning while it still grows."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Send

from torchtitan_rl.serving.http_identity import Identity


class Attempt:
    """Recorded by the app's ``send``, replayed to any number of followers.

    A run has failed when it ends without a whole 2xx response, or is abandoned; a failed one is
    replayed only to those who followed it already.
    """

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.task: asyncio.Task[None] | None = None
        self.is_abandoned = asyncio.Event()  # nobody waits for it any more
        self.num_followers = 0
        self.num_departures = 0  # of followers that left before its end
        self.num_retries = 0
        self.is_delivered = False  # whole, to at least one follower
        self.num_bytes = 0
        self.has_ended = False
        self.is_forgotten = False  # by who keeps the attempts
        self._messages: list[Message] = []
        self._is_whole = False
        self._news = asyncio.Event()

    @property
    def has_begun(self) -> bool:
        """Whether there is any response yet."""
        return bool(self._messages)

    @property
    def is_failed(self) -> bool:
        if self.is_abandoned.is_set():
            return True
        return self.has_ended and not (
            self._is_whole and 200 <= self._messages[0].get("status", 0) < 300
        )

    def rank(self) -> tuple[int, int]:
        """How likely it is that a retry of an equal request means this one, least first."""
        if self.is_failed:
            return (1, self.num_retries)
        if not self.num_followers and not self.is_delivered:
            return (0, self.num_retries)
        return (3 if self.has_ended else 2, self.num_retries)

    async def record(self, message: Message) -> None:
        """The app's ``send``."""
        self._messages.append(message)
        self.num_bytes += len(message.get("body", b""))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_whole = True
        self._tell()

    def end(self) -> None:
        """The app has returned."""
        self.has_ended = True
        self._tell()

    def replay(self, send: Send, *, headers: list[tuple[bytes, bytes]]) -> asyncio.Task[None]:
        """Send all there is and all that comes, until the end. ``headers`` are added."""
        # The recording as it is now, not when this is first awaited: it may be dropped before.
        return asyncio.create_task(self._replay(self._messages, send, headers))

    async def _replay(
        self, recorded: list[Message], send: Send, headers: list[tuple[bytes, bytes]]
    ) -> None:
        num_sent = 0
        while True:
            news = self._news
            messages = recorded[num_sent:]
            num_sent += len(messages)
            for message in messages:
                await send(_with_headers(message, headers))
            if not messages:
                if self.has_ended:
                    return
                await news.wait()

    def drop(self) -> None:
        """Forget the response of an ended run but for its status; who replays it just now goes
        on with what it holds."""
        self._messages = self._messages[:1]
        self.num_bytes = 0

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _with_headers(message: Message, headers: list[tuple[bytes, bytes]]) -> Message:
    if not headers or message["type"] != "http.response.start":
        return message
    copy: dict[str, Any] = dict(message)
    copy["headers"] = [*message.get("headers", ()), *headers]
    return copy
