"""Bodies: how large, how slow, how deep, and how much they ask for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.http_body import BufferedBody
from torchtitan_rl.serving.http_errors import HttpError, OpenAIErrors
from torchtitan_rl.serving.http_limits import RequestLimits, check_request, parse_json

LIMITS = RequestLimits(max_body_bytes=100, max_n=4, max_tokens=50, max_depth=5)


def shell(app: Any, *, timeout_s: float = 60.0) -> OpenAIErrors:
    return OpenAIErrors(BufferedBody(app, limits=LIMITS, timeout_s=timeout_s))


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def refusal(**request: Any) -> tuple[int | None, str, str | None]:
    return asyncio.run(send_and_be_refused(json.dumps(request).encode()))


async def send_and_be_refused(body: bytes | list[bytes], **options: Any) -> Any:
    return await Client(shell(echo), body=body, **options).refusal()


def accepted(body: bytes) -> bool:
    async def run() -> bool:
        client = Client(shell(echo), body=body)
        await client.task
        return client.status == 200 and client.body == body

    return asyncio.run(run())


def test_the_app_gets_the_body_whole_in_how_many_parts_it_may_come() -> None:
    async def run() -> None:
        client = Client(shell(echo), body=[b'{"a"', b": 1", b"}"])
        assert await client.answer() == (200, {"a": 1})

    asyncio.run(run())


def test_a_body_over_the_limit_is_413_by_its_announced_length_before_it_is_read() -> None:
    async def run() -> None:
        length = {"Content-Length": "100000"}
        client = Client(shell(echo), body=b"{", headers=length, sends_all=False)
        assert await client.refusal() == (413, "body_too_large", None)
        assert client.headers["connection"] == "close"
        length = {"Content-Length": "9" * 5000}
        assert await send_and_be_refused(b"{}", headers=length) == (413, "body_too_large", None)

    asyncio.run(run())


def test_a_chunked_body_is_counted_while_it_comes() -> None:
    async def run() -> None:
        parts = [b'{"a": "', *[b"x" * 20] * 6, b'"}']
        assert await send_and_be_refused(parts) == (413, "body_too_large", None)
        endless = Client(shell(echo), body=[b"x" * 20] * 100, sends_all=False)
        assert await endless.refusal() == (413, "body_too_large", None)
        assert not endless._incoming.empty()  # it was not read to an end it does not have
        lying = {"Content-Length": "5"}
        assert await send_and_be_refused(parts, headers=lying) == (413, "body_too_large", None)

    asyncio.run(run())


def test_the_largest_body_that_is_allowed_passes() -> None:
    body = b'"' + b"x" * 98 + b'"'
    assert len(body) == LIMITS.max_body_bytes
    assert accepted(body)


def test_a_body_that_never_ends_is_408() -> None:
    async def run() -> None:
        client = Client(shell(echo, timeout_s=0.01), body=b'{"a":', sends_all=False)
        assert await client.refusal() == (408, "body_timeout", None)

    asyncio.run(run())


def test_a_client_that_leaves_in_the_middle_of_its_body_reaches_no_handler() -> None:
    async def run() -> None:
        app = OnDemandApp()
        client = Client(shell(app), body=b'{"a":', sends_all=False)
        await settle()
        await client.leave()
        assert app.calls == []
        assert client.sent == []

    asyncio.run(run())


def test_all_bodies_together_are_bounded_and_released_on_every_way_out() -> None:
    async def run() -> None:
        app = OnDemandApp()
        served = shell(app)
        body = b'"' + b"x" * 98 + b'"'
        waiting = [Client(served, body=body) for _ in range(64)]
        await settle()
        assert await Client(served, body=body).refusal() == (429, "too_many_bytes", None)
        await waiting[0].leave()
        app.calls[1].finish()
        await waiting[1].task
        deep = b"[" * 50 + b"]" * 50
        assert await Client(served, body=deep).refusal() == (400, "nested_too_deeply", None)
        for client in (Client(served, body=body) for _ in range(2)):
            await settle()
            assert client.sent == []  # they are let in
        assert await Client(served, body=body).refusal() == (429, "too_many_bytes", None)

    asyncio.run(run())


def test_the_app_is_told_of_a_disconnect_as_often_as_it_asks() -> None:
    async def run() -> None:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            listener = asyncio.ensure_future(receive())
            await asyncio.sleep(0)
            listener.cancel()  # as vLLM does when its handler returns before the response starts
            seen.extend([await receive(), await receive()])

        client = Client(shell(app))
        await settle()
        assert seen == []
        await client.leave()
        assert seen == [{"type": "http.disconnect"}] * 2

    asyncio.run(run())


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"seed": 18446744073709551616}',
        b'{"seed": ' + b"9" * 90 + b"}",
        '{"a": "ü"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"{}{}",
    ],
)
def test_what_is_not_plain_json_in_utf_8_is_400(body: bytes) -> None:
    assert asyncio.run(send_and_be_refused(body)) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"null", b'"\\ud83d\\ude00"', '"ü😀"'.encode(), b'{"a": [1, 1.5, -1]}']
)
def test_plain_json_passes_and_so_does_no_body(body: bytes) -> None:
    assert accepted(body)


def test_nesting_is_bounded() -> None:
    assert accepted(b"[" * 5 + b"]" * 5)
    assert accepted(b'{"a":' * 5 + b"1" + b"}" * 5)
    for body in (b"[" * 6 + b"]" * 6, b'{"a":' * 6 + b"1" + b"}" * 6):
        assert asyncio.run(send_and_be_refused(body)) == (400, "nested_too_deeply", None)
    deep = b"[" * 1_000_000
    with pytest.raises(HttpError, match="nested"):
        parse_json(deep, max_depth=64)


def test_n_is_limited_and_prompts_multiply_it() -> None:
    exceeded = (400, "limit_exceeded", "n")
    assert accepted(b'{"n": 4}')
    assert accepted(b'{"n": 2, "prompt": ["a", "b"]}')
    assert accepted(b'{"prompt": [1, 2, 3, 4, 5, 6]}')  # one prompt of token ids
    assert accepted(b'{"n": 2, "prompt": [[1, 2, 3], [4]]}')
    assert refusal(n=5) == exceeded
    assert refusal(prompt=["a"] * 5) == exceeded
    assert refusal(n=3, prompt=["a", "b"]) == exceeded
    assert refusal(n=2, prompt=[[1], [2], [3]]) == exceeded
    assert refusal(messages=[[{}]] * 5) == exceeded
    assert accepted(b'{"messages": [{}, {}, {}, {}, {}, {}]}')


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"]
)
def test_the_tokens_of_a_completion_are_limited(name: str) -> None:
    assert accepted(json.dumps({name: 50}).encode())
    assert accepted(json.dumps({name: None}).encode())
    assert refusal(**{name: 51}) == (400, "limit_exceeded", name)


@pytest.mark.parametrize("value", ["5000", 5000.0, True, [5000], {}])
def test_a_limited_field_that_is_no_integer_cannot_pass_by_its_limit(value: Any) -> None:
    for name in ("n", "max_tokens"):
        assert refusal(**{name: value}) == (400, "invalid_type", name)


@pytest.mark.parametrize("name", ["minItems", "maxItems", "maxLength", "minProperties"])
def test_a_schema_may_not_have_anything_repeated_a_billion_times(name: str) -> None:
    # llguidance unrolls them: it took the whole memory, and the endpoint's process with it.
    limits = RequestLimits()
    for amount in (10**9, 1e9):
        schema = {"type": "array", "items": [{name: amount}]}
        for request in (
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema)}},
            {"structured_outputs": {"structural_tag": json.dumps({"format": schema})}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            {"tools": [{"function": {"parameters": schema}}]},
        ):
            with pytest.raises(HttpError, match=name):
                check_request(json.dumps(request).encode(), limits)
    check_request(json.dumps({"json": {name: 100_000}}).encode(), limits)
    check_request(json.dumps({"properties": {name: {"type": "string"}}}).encode(), limits)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(json_values)
def test_whatever_json_comes_the_checks_pass_it_or_refuse_it_with_400(value: Any) -> None:
    request = {"n": value, "prompt": value, "messages": value, "max_tokens": value}
    status = 200
    try:
        check_request(json.dumps(request).encode(), RequestLimits(max_tokens=10))
    except HttpError as error:
        status = error.status
    assert status in (200, 400)
