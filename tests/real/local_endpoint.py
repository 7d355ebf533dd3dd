"""An endpoint's HTTP server in a thread of this process, connected to a router's completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.support.endpoints import LinkedEndpoint
from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.serving.bridge import EndpointBridge
from torchtitan_rl.serving.config import listen
from torchtitan_rl.serving.link import ControllerLink, SystemStatus


@asynccontextmanager
async def local_endpoint(
    application: Callable[[ControllerLink], Any],
    complete: Any,
    *,
    handlers: Mapping[str, Any],
    status: Callable[[EndpointBridge], SystemStatus] = lambda bridge: SystemStatus(is_healthy=True),
) -> AsyncIterator[str]:
    """Its URL, without /v1. ``application`` is made on the server's event loop."""
    link = ControllerLink()

    async def build() -> Any:
        link.attach()
        return application(link)

    server = HttpServer(build, at_end=link.close, listening=listen("127.0.0.1", 0))
    await asyncio.to_thread(server.start)
    bridge = EndpointBridge(
        LinkedEndpoint(link),
        complete=complete,
        handlers=handlers,
        status=lambda: status(bridge),
        interval_s=0.02,
        status_interval_s=0.05,
    )
    serving = asyncio.create_task(bridge.run())
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await asyncio.to_thread(server.close, 1.0)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
