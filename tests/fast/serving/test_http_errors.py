"""Errors: always the OpenAI error object, never what is inside."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

from tests.support.http_driver import Client
from torchtitan_rl.serving.http_errors import HttpError, OpenAIErrors


@functools.cache
def served() -> OpenAIErrors:
    app = FastAPI()

    @app.post("/works")
    async def works(n: int = 1) -> int:
        return n

    @app.post("/escapes")
    async def escapes() -> None:
        raise KeyError("password in /etc/secret.py")

    @app.post("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, detail="short and stout", headers={"x-kind": "pot"})

    @app.post("/breaks_off")
    async def breaks_off() -> StreamingResponse:
        async def parts() -> Any:
            yield "data: 1\n\n"
            raise KeyError("password")

        return StreamingResponse(parts(), media_type="text/event-stream")

    return OpenAIErrors(app)


def raw(status: int, body: bytes, *, parts: int = 1) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"9"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i in range(parts):
            await send({"type": "http.response.body", "body": body, "more_body": i + 1 < parts})

    return OpenAIErrors(app)


def ask(app: Any, path: str = "/works", method: str = "POST") -> Client:
    async def run() -> Client:
        client = Client(app, path, method=method)
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


def test_a_500_that_the_app_answers_itself_shows_nothing_of_its_message_but_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = {"error": {"message": "tensor at 0x7f", "type": "x", "param": None, "code": 500}}
    client = ask(raw(500, json.dumps(inside).encode()))
    assert client.status == 500
    assert "tensor" not in error_of(client)["message"]
    assert "tensor at 0x7f" in caplog.text


def test_unknown_paths_and_methods_are_404_and_405_in_that_shape() -> None:
    client = ask(served(), "/nowhere")
    assert (client.status, error_of(client)["code"]) == (404, "not_found")
    client = ask(served(), "/works", method="GET")
    assert (client.status, error_of(client)["code"]) == (405, "method_not_allowed")
    assert client.headers["allow"] == "POST"


def test_what_the_framework_refuses_keeps_status_headers_and_what_it_said() -> None:
    client = ask(served(), "/teapot")
    assert (client.status, error_of(client)["message"]) == (418, "short and stout")
    assert client.headers["x-kind"] == "pot"
    client = ask(served(), "/works?n=five")
    assert client.status == 422
    assert error_of(client)["message"].startswith("query.n: ")


def test_an_error_object_of_the_app_passes_as_it_is() -> None:
    inside = b'{"error": {"message": "m", "type": "t", "param": "p", "code": 400}, "object": 1}'
    client = ask(raw(400, inside))
    assert client.status == 400
    assert client.body == inside
    assert client.headers["x"] == "y"


@pytest.mark.parametrize(
    "body", [b"", b"plain", b"\xff", b"[]", b"null", b'{"error": "text"}', b'{"detail": [1]}']
)
@pytest.mark.parametrize("status", [400, 404, 503, 499])
def test_an_error_in_whatever_shape_becomes_an_error_object(status: int, body: bytes) -> None:
    client = ask(raw(status, body, parts=2))
    assert client.status == status
    error_of(client)


def test_a_response_that_has_begun_is_left_unfinished_when_its_app_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = ask(served(), "/breaks_off")
    assert client.status == 200
    assert client.body == b"data: 1\n\n"
    assert not client.is_whole  # the server cuts the connection then
    assert "KeyError: 'password'" in caplog.text


def test_a_layer_refuses_with_headers_of_its_own() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise HttpError(429, "full", code="queue_full", headers=((b"retry-after", b"1"),))

    client = ask(OpenAIErrors(app))
    error = error_of(client)
    assert (client.status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
    assert client.headers["retry-after"] == "1"


def test_answers_that_are_no_errors_pass_untouched() -> None:
    client = ask(served(), "/works?n=3")
    assert (client.status, client.body) == (200, b"3")
