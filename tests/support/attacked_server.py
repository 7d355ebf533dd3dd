"""The endpoint's HTTP server and layers in a process of their own, without an engine.

    python -m tests.support.attacked_server '{"max_connections": 100}'

The argument has fields of `ConnectionLimits`. It prints its port, and ends when its input does.
A chat's answer has as many bytes as its request allows tokens, and comes after ``seed`` seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from fastapi import FastAPI, Request, Response

from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys, listen
from torchtitan_rl.serving.connections import ConnectionLimits
from torchtitan_rl.serving.link import ControllerLink


def application() -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = await request.json()
        end = time.monotonic() + asked.get("seed", 0)
        while time.monotonic() < end and not await request.is_disconnected():
            await asyncio.sleep(0.05)
        return Response(bytes(asked["max_tokens"]))

    return app


def main() -> None:
    link = ControllerLink()
    config = EndpointConfig(max_body_bytes=1 << 20)

    async def build() -> EndpointApp:
        return EndpointApp(
            application(),
            config,
            keys=Keys(api="key"),
            commands=link,
            max_requests=server.max_requests,
        )

    limits = ConnectionLimits(**json.loads(sys.argv[1]))
    listening = listen("127.0.0.1", 0)
    server = HttpServer(build, at_end=lambda: None, listening=listening, limits=limits)
    server.start()
    print(server.port, flush=True)
    sys.stdin.read()
    server.close(0.0)


if __name__ == "__main__":
    main()
