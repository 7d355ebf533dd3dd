"""An on-demand application inside the layers that a retry passes, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.admission import Admission
from torchtitan_rl.serving.auth import Authentication
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import OpenAIErrors
from torchtitan_rl.serving.retries import Retries, RetryOptions

KEY = {"Idempotency-Key": "k1"}
ID = {"X-Request-Id": "r1"}
FIRST = {"x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-retry-count": "1"}
IDENTIFIED = [(KEY, KEY), (ID, ID), (FIRST, AGAIN)]


class Served:
    """An on-demand app inside the layers that a retry passes."""

    def __init__(self, *, max_running: int = 100, max_queued: int = 100, **options: Any) -> None:
        self.app = OnDemandApp()
        self.now_s = 0.0
        self.ends_of_grace: list[Callable[[], None]] = []
        self.retries = Retries(
            OpenAIErrors(Admission(self.app, max_running=max_running, max_queued=max_queued)),
            RetryOptions(**options),
            clock=lambda: self.now_s,
            call_later=lambda _, end: self.ends_of_grace.append(end),
        )
        self.body = BufferedBody(self.retries, EndpointConfig(), timeout_s=60.0)
        self.asgi = OpenAIErrors(Authentication(self.body, host="127.0.0.1", keys=Keys()))

    async def ask(self, headers: Mapping[str, str] = {}, **options: Any) -> Client:
        client = Client(self.asgi, headers=headers, **options)
        await settle()
        return client

    async def answered(self, headers: Mapping[str, str], answer: bytes, **options: Any) -> Client:
        """A client whose request runs, and is answered whole."""
        num_calls = len(self.app.calls)
        client = await self.ask(headers, **options)
        assert len(self.app.calls) == num_calls + 1
        self.app.calls[-1].finish(answer)
        await client.task
        return client
