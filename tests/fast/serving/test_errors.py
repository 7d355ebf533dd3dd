"""Errors: the OpenAI error object, without the server's internals."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from tests.support.http_driver import Client
from torchtitan_rl.serving.errors import HttpError, OpenAIErrors


@functools.cache
def served() -> OpenAIErrors:
    app = FastAPI()

    @app.post("/works")
    async def works(n: int = 1) -> int:
        return n

    @app.post("/escapes")
    async def escapes() -> None:
        raise KeyError("password in /etc/secret.py")

    @app.post("/breaks_off")
    async def breaks_off() -> StreamingResponse:
        async def parts() -> Any:
            yield "data: 1\n\n"
            raise KeyError("password")

        return StreamingResponse(parts(), media_type="text/event-stream")

    return OpenAIErrors(app)


def raw(status: int, *parts: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"9"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, part in enumerate(parts, 1):
            more = i < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return OpenAIErrors(app)


def ask(app: Any, path: str = "/works") -> Client:
    async def run() -> Client:
        client = Client(app, path)
        await client.task
        return client

    return asyncio.run(run())


def error_of(client: Client) -> dict[str, Any]:
    body = json.loads(client.body)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert client.headers["content-length"] == str(len(client.body))
    return dict(body["error"])


def test_an_exception_becomes_a_500_without_internals_and_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    client = ask(served(), "/escapes")
    error = error_of(client)
    assert client.status == 500
    assert error["type"] == "server_error"
    for word in (b"password", b"KeyError", b"Traceback", b".py"):
        assert word not in client.body
    incident = error["message"].split("incident ")[1].split(")")[0]
    assert incident in caplog.text
    assert "KeyError: 'password in /etc/secret.py'" in caplog.text
    assert "Traceback" in caplog.text


def test_a_500_that_the_app_answers_itself_is_logged_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = {"error": {"message": "tensor at 0x7f", "type": "x", "param": None, "code": 500}}
    client = ask(raw(500, json.dumps(inside).encode(), b" "))
    assert client.status == 500
    assert "tensor" not in error_of(client)["message"]
    assert "tensor at 0x7f" in caplog.text


def test_an_error_that_the_app_answers_passes_unchanged() -> None:
    inside = b'{"error": {"message": "m", "type": "t", "param": "p", "code": 400}, "object": 1}'
    client = ask(raw(400, inside))
    assert client.status == 400
    assert client.body == inside
    assert client.headers["x"] == "y"


def test_a_response_that_has_begun_is_left_unfinished_when_its_app_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ask(served(), "/breaks_off")
    assert client.status == 200
    assert client.body == b"data: 1\n\n"
    assert not client.is_whole  # the server cuts the connection then
    assert "KeyError: 'password'" in caplog.text


def test_an_error_of_a_layer_has_its_own_headers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise HttpError(429, "full", code="queue_full", headers={"retry-after": "1"})

    client = ask(OpenAIErrors(app))
    error = error_of(client)
    assert (client.status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert client.headers["retry-after"] == "1"


def test_other_responses_pass_unchanged() -> None:
    client = ask(served(), "/works?n=3")
    assert (client.status, client.body) == (200, b"3")
