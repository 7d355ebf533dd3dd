"""An on-demand application behind everything that a request of the endpoint passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.retries import RetryOptions

KEY = {"Idempotency-Key": "k1"}
FIRST = {"x-stainless-retry-count": "0"}
AGAIN = {"x-stainless-retry-count": "1"}
IDENTIFIED = [(KEY, KEY), (FIRST, AGAIN)]


class Served:
    """``app`` answers every path; without one an `OnDemandApp` does. ``retry`` has the fields of
    `RetryOptions`, the other options are those of `EndpointConfig`."""

    def __init__(
        self,
        app: Any = None,
        *,
        keys: Keys | None = None,
        retry: Mapping[str, Any] | None = None,
        body_timeout_s: float = 60.0,
        queue_timeout_s: float = 600.0,
        **config: Any,
    ) -> None:
        self.app = OnDemandApp()
        inner = FastAPI()
        inner.mount("/", app or self.app)
        self.asgi = EndpointApp(
            inner,
            EndpointConfig(**config),
            keys=keys or Keys(),
            commands=None,  # type: ignore[arg-type]  # its routes come after those of ``app``
            retries=RetryOptions(**(retry or {})),
            body_timeout_s=body_timeout_s,
            queue_timeout_s=queue_timeout_s,
        )

    async def ask(self, headers: Mapping[str, str] = {}, path: str = "", **options: Any) -> Client:
        options |= {"path": path} if path else {}
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

    def count(self, name: str) -> float:
        return self.asgi.counts()[f"http_{name}"]
