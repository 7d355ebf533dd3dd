"""The endpoint's process, which can die, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from tests.support.endpoints import LinkedEndpoint
from tests.support.front_end import FrontEnd
from tests.support.http_driver import Client
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.link import ControllerLink

START_S = 3.0


class Processes(LinkedEndpoint):
    """An endpoint whose process can die. Clients that connect while none serves wait."""

    def __init__(self, *, start_s: float = START_S, max_running: int = 4) -> None:
        self.number = 0
        self._start_s = start_s
        self._config = EndpointConfig(max_concurrent_requests=max_running)
        self.serves = asyncio.Event()
        self.clients: list[Client] = []
        self._build()

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"endpoint-{self.number}"

    def _build(self) -> None:
        super().__init__(ControllerLink())
        self.number += 1
        self.link.attach()
        self.front = FrontEnd(self.link)
        self.app = EndpointApp(
            self.front.app(),
            self._config,
            keys=Keys(),
            commands=self.link,
            follows=self.number > 1,
        )
        self.taking = asyncio.create_task(self.front.take_outputs())
        self.serves.set()

    async def restart(self) -> None:
        await asyncio.sleep(self._start_s)

    async def start(self) -> None:
        self._build()

    def die(self) -> None:
        """Nothing that the process does from now on reaches a client or the controller."""
        if not self.serves.is_set():
            return
        self.serves.clear()
        self.lose()
        self.taking.cancel()
        for client in self.clients:
            client.task.cancel()
        self.clients.clear()

    async def drain(self, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        self.link.close()

    async def close(self) -> None:
        self.serves.clear()
        self.taking.cancel()
        await self.app._retries.close()

    async def ask(
        self,
        path: str,
        method: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str],
        num_attempts: int = 3,
    ) -> tuple[int, Any]:
        """Ask as the official clients do: again after a connection error, unless the response has
        begun. Returns status and body; the status is 0 after the last connection error."""
        headers = {"Content-Type": "application/json", **headers}
        for attempt in range(num_attempts):
            if "Idempotency-Key" not in headers and num_attempts > 1:
                headers["x-stainless-retry-count"] = str(attempt)
            await self.serves.wait()
            content = json.dumps(body).encode()
            client = Client(self.app, path, method=method, body=content, headers=headers)
            self.clients.append(client)
            try:
                await asyncio.wait([client.task])
            except asyncio.CancelledError:
                client._has_left.set()
                raise
            if client.is_whole:
                text = client.body
                return client.status or 0, json.loads(text) if text[:1] == b"{" else text
            if body.get("stream") and len(client.sent) > 1:
                return 0, b"cut off"
            await asyncio.sleep(0.5 * 2**attempt)
        return 0, b"no answer"
