"""One run of a request whose response is recorded, so that later clients can be given it from its
beginning while it still grows."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Send

from torchtitan_rl.serving.http_identity import Identity


class Attempt:
    """Recorded by the app's ``send``, replayed to any number of followers.

    A run fails when it ends without a whole 2xx response, or after it was told that its client is
    gone: what it answers then is not meant for anyone. A failed one is replayed only to those who
    followed it already.
    """

    __slots__ = (
        "_messages",
        "_news",
        "_status",
        "has_ended",
        "identity",
        "is_abandoned",
        "is_delivered",
        "is_forgotten",
        "is_spent",
        "is_told",
        "is_whole",
        "num_bytes",
        "num_departures",
        "num_followers",
        "num_retries",
        "task",
    )

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.task: asyncio.Task[None] | None = None
        self.is_abandoned = False  # no client waits for it any more
        self.is_told = False  # the app has heard of that
        self.num_followers = 0
        self.num_departures = 0  # of followers that left before its end
        self.num_retries = 0
        self.is_delivered = False  # whole, to at least one follower
        self.num_bytes = 0
        self.has_ended = False
        self.is_whole = False
        self.is_spent = False  # it has ended, and its response is no longer kept
        self.is_forgotten = False  # by who keeps the attempts
        self._messages: list[Message] = []
        self._status = 0
        self._news: asyncio.Event | None = asyncio.Event()  # None once it has ended

    @property
    def has_begun(self) -> bool:
        """Whether there is any response yet."""
        return self._status != 0

    @property
    def is_failed(self) -> bool:
        return self.has_ended and (
            self.is_told or not (self.is_whole and 200 <= self._status < 300)
        )

    @property
    def is_ending(self) -> bool:
        """It is being aborted, which is not over yet."""
        return self.is_abandoned and not self.has_ended

    def rank(self) -> tuple[int, bool, int]:
        """How likely it is that a retry of an equal request means this one, least first."""
        if self.is_failed or self.is_ending:
            likelihood = 1
        elif not self.num_followers and not self.is_delivered:
            likelihood = 0
        else:
            likelihood = 3 if self.has_ended else 2
        return (likelihood, self.is_spent, self.num_retries)

    async def record(self, message: Message) -> None:
        """The app's ``send``."""
        self._messages.append(message)
        self.num_bytes += len(message.get("body", b""))
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_whole = True
        self._tell()

    def abandon(self) -> None:
        """No client waits for it any more: `gone` returns."""
        self.is_abandoned = True
        self._tell()

    async def gone(self) -> None:
        """What the app awaits to hear of a client that left."""
        while not self.is_abandoned and self._news is not None:
            await self._news.wait()
        self.is_told = self.is_told or not self.has_ended

    async def ended(self) -> None:
        """Wait for the app's return."""
        while self._news is not None:
            await self._news.wait()

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
                if news is None:
                    return
                await news.wait()

    def compact(self) -> None:
        """Keep the response of an ended run in one piece: thousands of small ones take more."""
        body = b"".join(message.get("body", b"") for message in self._messages[1:])
        # A new list: a replay that has begun reads on in the old one.
        self._messages = [
            *self._messages[:1],
            {"type": "http.response.body", "body": body, "more_body": False},
        ]

    def drop(self) -> None:
        """Forget the response of an ended run; a replay that has begun goes on with what it
        holds."""
        self.is_spent = True
        self._messages = []
        self.num_bytes = 0
        self.task = None

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
        self._news = None if self.has_ended else asyncio.Event()


def _with_headers(message: Message, headers: list[tuple[bytes, bytes]]) -> Message:
    if not headers or message["type"] != "http.response.start":
        return message
    copy: dict[str, Any] = dict(message)
    copy["headers"] = [*message.get("headers", ()), *headers]
    return copy
