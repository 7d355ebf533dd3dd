"""Bodies: their size, their time, and the client's disconnect."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.async_tests import on_event_loop
from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import OpenAIErrors

LIMITS = EndpointConfig(max_body_bytes=100)


def served(app: Any, *, timeout_s: float = 60.0) -> OpenAIErrors:
    return OpenAIErrors(BufferedBody(app, LIMITS, timeout_s=timeout_s))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def refusal(body: bytes | list[bytes], **options: Any) -> Any:
    return await Client(served(echo), body=body, **options).refusal()


@on_event_loop
async def test_the_app_gets_the_body_in_one_piece() -> None:
    client = Client(served(echo), body=[b'{"a"', b": 1", b"}"])
    assert await client.answer() == (200, {"a": 1})


@on_event_loop
async def test_a_body_whose_announced_length_is_over_the_limit_is_413_before_it_is_read() -> None:
    length = {"Content-Length": "100000"}
    client = Client(served(echo), body=b"{", headers=length, sends_all=False)
    assert await client.refusal() == (413, "body_too_large", None)
    assert client.headers["connection"] == "close"
    length = {"Content-Length": "9" * 5000}
    assert await refusal(b"{}", headers=length) == (413, "body_too_large", None)


@on_event_loop
async def test_a_chunked_body_is_counted_while_it_arrives() -> None:
    parts = [b'{"a": "', *[b"x" * 20] * 6, b'"}']
    assert await refusal(parts) == (413, "body_too_large", None)
    endless = Client(served(echo), body=[b"x" * 20] * 100, sends_all=False)
    assert await endless.refusal() == (413, "body_too_large", None)
    assert not endless._incoming.empty()  # it was not read to an end it does not have
    lying = {"Content-Length": "5"}
    assert await refusal(parts, headers=lying) == (413, "body_too_large", None)


@on_event_loop
async def test_the_largest_body_passes_and_so_does_an_empty_one() -> None:
    body = b'"' + b"x" * 98 + b'"'
    assert len(body) == LIMITS.max_body_bytes
    for allowed in (body, b""):
        client = Client(served(echo), body=allowed)
        await client.task
        assert (client.status, client.body) == (200, allowed)


@on_event_loop
async def test_a_body_that_never_ends_is_408() -> None:
    client = Client(served(echo, timeout_s=0.01), body=b'{"a":', sends_all=False)
    assert await client.refusal() == (408, "body_timeout", None)


@on_event_loop
async def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_no_handler() -> None:
    app = OnDemandApp()
    client = Client(served(app), body=b'{"a":', sends_all=False)
    await settle()
    await client.leave()
    assert app.calls == []
    assert client.sent == []


@on_event_loop
async def test_all_bodies_together_are_bounded_and_always_released() -> None:
    app = OnDemandApp()
    limited = served(app)
    body = b'"' + b"x" * 98 + b'"'
    waiting = [Client(limited, body=body) for _ in range(64)]
    await settle()
    assert await Client(limited, body=body).refusal() == (429, "too_many_bytes", None)
    await waiting[0].leave()
    app.calls[1].finish()
    await waiting[1].task
    assert await Client(limited, body=b"[" * 90).refusal() == (400, "invalid_json", None)
    for client in (Client(limited, body=body) for _ in range(2)):
        await settle()
        assert client.sent == []  # they are let in
    assert await Client(limited, body=body).refusal() == (429, "too_many_bytes", None)


@on_event_loop
async def test_the_app_is_told_of_a_disconnect_as_often_as_it_asks() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listener = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        listener.cancel()  # as vLLM does when its handler returns before the response starts
        seen.extend([await receive(), await receive()])

    client = Client(served(app))
    await settle()
    assert seen == []
    await client.leave()
    assert seen == [{"type": "http.disconnect"}] * 2
