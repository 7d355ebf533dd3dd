"""Keys, bodies, places and errors, through the whole application of the endpoint."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.http_driver import Client, settle
from tests.support.served_app import Served
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving.config import Keys, is_loopback
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.middleware import is_session_id, session_id

OPEN = {"keys": Keys()}
LOCKED = {"host": "0.0.0.0", "keys": Keys(api="secret", admin="chief")}


async def tells_session(scope: Any, receive: Any, send: Any) -> None:
    raise RefusedError(418, "in", str(session_id.get()))


def let_in(options: dict[str, Any], headers: Any = (), path: str = "/x") -> tuple[Any, Any]:
    """``(200, the session it was let in with)`` or ``(status, code)``."""

    async def run() -> tuple[Any, Any]:
        client = Client(Served(tells_session, **options).asgi, path, headers=headers)
        status, body = await client.answer()
        if status == 401:
            assert client.headers["www-authenticate"] == "Bearer"
        error = body["error"]
        return (200, error["message"]) if status == 418 else (status, error["code"])

    return asyncio.run(run())


def bearer(token: str | bytes) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + (token.encode() if isinstance(token, str) else token)}


def test_a_configured_key_is_required_also_on_loopback() -> None:
    keys = {"keys": Keys(api="secret")}
    assert let_in(keys, bearer("secret")) == (200, "None")
    assert let_in(keys) == (401, "invalid_api_key")
    for wrong in ("Secret", "secre", "secrets", ""):
        assert let_in(keys, bearer(wrong)) == (401, "invalid_api_key")
    assert let_in(keys, {"Authorization": "Basic secret"}) == (401, "invalid_api_key")
    assert let_in(keys, {"Authorization": "secret"}) == (401, "invalid_api_key")
    assert let_in(keys, {"Authorization": "bearer secret"}) == (200, "None")


@pytest.mark.parametrize("token", [b"\xff\xfe", "sécret".encode(), b"\x00"])
def test_tokens_that_are_not_ascii_are_refused_and_do_not_crash(token: bytes) -> None:
    assert let_in(LOCKED, bearer(token)) == (401, "invalid_api_key")
    assert let_in(LOCKED, bearer(token), "/admin/pause") == (403, "not_admin")
    keys = {**LOCKED, "keys": Keys(api="schlüssel")}
    assert let_in(keys, bearer("schlüssel")) == (200, "None")


def test_only_a_get_of_health_is_open() -> None:
    for path in ("/health", "/metrics", "/openapi.json", "/v1/models", "/health/", "//health", "/"):
        assert let_in(LOCKED, path=path) == (401, "invalid_api_key")

    async def get_health() -> int | None:
        return (
            await Client(Served(tells_session, **LOCKED).asgi, "/health", method="GET").answer()
        )[0]

    assert asyncio.run(get_health()) == 418


def test_the_session_is_named_by_the_header_or_by_what_follows_the_key() -> None:
    assert let_in(LOCKED, {**bearer("secret"), "X-Session-ID": "12/r0"}) == (200, "12/r0")
    assert let_in(LOCKED, bearer("secret:12/r0")) == (200, "12/r0")
    assert let_in(OPEN, bearer("EMPTY:a:b")) == (200, "a:b")
    assert let_in(OPEN, {**bearer("k:a"), "X-Session-ID": "a"}) == (200, "a")
    assert let_in(OPEN, {**bearer("k:a"), "X-Session-ID": "b"}) == (400, "session_conflict")
    assert let_in(LOCKED, bearer("wrong:a b")) == (401, "invalid_api_key")


@pytest.mark.parametrize("name", ["", "a b", "ä", "-a", "a/../b", "x" * 129])
def test_a_session_id_that_could_not_be_part_of_a_path_is_refused(name: str) -> None:
    assert not is_session_id(name)
    assert let_in(OPEN, {"X-Session-ID": name}) == (400, "invalid_session_id")
    if name.strip() == name:
        assert let_in(OPEN, bearer("k:" + name)) == (400, "invalid_session_id")


@pytest.mark.parametrize("path", ["/admin/pause", "/admin"])
def test_the_admin_key_opens_the_admin_routes_and_nothing_else(path: str) -> None:
    assert let_in(LOCKED, bearer("chief")) == (401, "invalid_api_key")
    assert let_in(LOCKED, bearer("chief"), path) == (200, "None")
    assert let_in(LOCKED, bearer("secret"), path) == (403, "not_admin")
    assert let_in(LOCKED, bearer("chief:a"), path) == (403, "not_admin")
    assert let_in(LOCKED, path=path) == (401, "invalid_api_key")
    for headers in ({}, bearer("anything")):
        assert let_in(OPEN, headers, path) == (404, "no_admin")


def test_the_key_of_anthropics_clients_is_taken_where_there_is_no_bearer_token() -> None:
    assert let_in(LOCKED, {"x-api-key": "secret:s1"}) == (200, "s1")
    assert let_in(LOCKED, {"x-api-key": "wrong"}) == (401, "invalid_api_key")
    assert let_in(LOCKED, {**bearer("wrong"), "x-api-key": "secret"}) == (401, "invalid_api_key")


def test_an_address_that_others_reach_needs_a_key_and_keys_must_be_usable() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org", ""):
        assert "TORCHTITAN_RL_API_KEY" in Keys().errors(host)[0]
        assert Keys(api="secret").errors(host) == []
        with pytest.raises(ConfigError):
            Served(host=host)
    for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        assert Keys().errors(host) == []
    assert ":" in Keys(api="a:b").errors("127.0.0.1")[0]
    assert "differ" in Keys(api="same", admin="same").errors("127.0.0.1")[0]
    assert "secret" not in repr(LOCKED["keys"])
    assert "chief" not in repr(LOCKED["keys"])


LARGEST = b'"' + b"x" * 98 + b'"'


@on_virtual_clock
async def test_a_body_is_bounded_in_bytes_and_in_time_however_it_comes() -> None:
    served = Served(max_body_bytes=100)
    for body in (LARGEST, b"", [LARGEST[:50], LARGEST[50:]]):
        client = await served.ask(body=body)
        assert served.app.calls[-1].body == (body if isinstance(body, bytes) else LARGEST)
        await client.leave()
    too_large = (413, "body_too_large", None)
    assert await (await served.ask(body=LARGEST + b" ")).refusal() == too_large
    assert await (await served.ask(body=[b"x" * 60] * 2)).refusal() == too_large
    endless = await served.ask(body=[b"x" * 60] * 9, sends_all=False)  # is not read to its end
    assert await endless.refusal() == too_large
    for length in ("101", "9" * 5000):
        announced = await served.ask({"Content-Length": length}, body=[b"x" * 60] * 9)
        assert await announced.refusal() == too_large
        assert announced.headers["connection"] == "close"
    late = await served.ask(body=b'{"a":', sends_all=False)
    assert await late.refusal() == (408, "body_timeout", None)
    assert len(served.app.calls) == 3


@on_event_loop
async def test_all_bodies_together_are_bounded_and_always_released() -> None:
    served = Served(max_body_bytes=100)
    waiting = [await served.ask(body=LARGEST) for _ in range(64)]
    full = (429, "too_many_bytes", None)
    assert await (await served.ask(body=LARGEST)).refusal() == full
    await waiting[0].leave()
    served.app.calls[1].finish()
    await waiting[1].task
    invalid = await served.ask(body=b"[" * 90)
    assert await invalid.refusal() == (400, "invalid_json", None)
    half = await served.ask(body=LARGEST[:60], sends_all=False)
    await half.leave()
    assert half.sent == []
    for _ in range(2):
        assert (await served.ask(body=LARGEST)).sent == []  # it is let in
    assert await (await served.ask(body=LARGEST)).refusal() == full
    assert len(served.app.calls) == 66


class Places(Served):
    def __init__(self, max_running: int = 1, max_queued: int = 2, **options: Any) -> None:
        options |= {"max_concurrent_requests": max_running, "max_queued_requests": max_queued}
        super().__init__(**options)

    async def asked(self, name: str, path: str = "/v1/completions", **options: Any) -> Client:
        return await self.ask(path=path, body=f'"{name}"'.encode(), **options)

    @property
    def run(self) -> str:
        return "".join(call.body.decode().strip('"') for call in self.app.calls)

    @property
    def places(self) -> tuple[float, float]:
        return self.count("requests_running"), self.count("requests_queued")


@on_event_loop
async def test_requests_beyond_the_places_wait_in_a_queue_and_beyond_it_they_are_refused() -> None:
    served = Places()
    clients = [await served.asked(name) for name in "abc"]
    assert (served.run, served.places) == ("a", (1, 2))
    refused = await served.asked("d")
    assert await refused.refusal() == (429, "queue_full", None)
    assert int(refused.headers["retry-after"]) > 0
    assert served.count("requests_refused_total") == 1
    served.app.calls[0].stream(b"first")  # a stream holds its place until its end
    await settle()
    assert (served.run, served.places) == ("a", (1, 2))
    for call, client in enumerate(clients):
        served.app.calls[call].finish()
        await client.task
        await settle()
    assert (served.run, served.places) == ("abc", (0, 0))


@on_event_loop
async def test_the_agents_of_the_runs_own_rollouts_need_no_place() -> None:
    served = Places(max_queued=0)
    for name, session in [
        ("a", "torchtitan-rollout-1"),
        ("b", "torchtitan-rollout-1.x"),
        ("c", "s"),
    ]:
        await served.asked(name, headers={"X-Session-ID": session})
    assert (served.run, served.places) == ("abc", (1, 0))
    assert (await served.asked("d", headers={"X-Session-ID": "s"})).status == 429


@on_virtual_clock
async def test_no_request_waits_for_a_place_longer_than_the_timeout() -> None:
    served = Places(queue_timeout_s=30.0)
    running = await served.asked("a")
    waiting = await served.asked("b")
    await asyncio.sleep(20.0)
    later = await served.asked("c")
    await asyncio.sleep(11.0)
    assert await waiting.refusal() == (429, "queue_timeout", None)
    assert served.places == (1, 1)
    served.app.calls[0].finish()
    await running.task
    await settle()
    assert served.run == "ac"
    assert not later.task.done()


@on_event_loop
async def test_health_sessions_and_administration_answer_while_everything_is_full() -> None:
    served = Places(max_queued=0, keys=Keys(admin="chief"))
    await served.asked("full")
    assert (await served.asked("no")).status == 429
    for method, path in [
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/a/reward"),
        ("DELETE", "/v1/sessions/a"),
        ("POST", "/admin/resume"),
    ]:
        headers = {"Authorization": "Bearer chief"} if "admin" in path else {}
        client = await served.asked("yes", path, method=method, headers=headers)
        assert client.status is None
        served.app.calls[-1].finish()
        await client.task
        assert client.status == 200
    assert served.places == (1, 0)


MOVES = st.tuples(st.sampled_from(["ask", "finish", "leave", "cancel"]), st.integers(0, 9))


@settings(max_examples=30)
@given(st.lists(MOVES))
@on_event_loop
async def test_however_requests_end_all_places_are_given_back(moves: list[tuple[str, int]]) -> None:
    served = Places(max_running=2, max_queued=3)
    clients: list[Client] = []
    for move, i in moves:
        if move == "ask":
            clients.append(await served.asked("x"))
        elif move == "finish" and served.app.calls:
            served.app.calls[i % len(served.app.calls)].finish()
        elif clients and move == "leave":
            clients[i % len(clients)]._has_left.set()
        elif clients and move == "cancel":
            clients[i % len(clients)].task.cancel()
        if i % 2:
            await settle()
            running, queued = served.places
            assert running <= 2
            assert queued <= 3
            assert running == 2 or not queued
    for client in clients:
        client._has_left.set()
    await asyncio.gather(*(client.task for client in clients), return_exceptions=True)
    assert served.places == (0, 0)


def answers(status: int, *parts: bytes, fails: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"9"), (b"x", b"y")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if fails:
            raise KeyError("password in /etc/secret.py")
        await send({"type": "http.response.body", "body": b""})

    return app


def got(app: Any, path: str = "/works") -> Client:
    async def run() -> Client:
        client = Client(Served(app).asgi, path)
        await client.task
        return client

    return asyncio.run(run())


async def escapes(scope: Any, receive: Any, send: Any) -> None:
    raise KeyError("password in /etc/secret.py")


@pytest.mark.parametrize("path", ["/works", "/v1/messages"])
def test_an_exception_is_a_500_without_internals_and_is_logged_with_its_traceback(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    client = got(escapes, path)
    error = json.loads(client.body)["error"]
    assert client.status == 500
    assert error["code"] == "internal_error"
    for word in (b"password", b"KeyError", b"Traceback", b".py"):
        assert word not in client.body
    incident = error["message"].split("incident ")[1].split(")")[0]
    assert f"incident {incident}" in caplog.text
    assert "KeyError: 'password in /etc/secret.py'" in caplog.text
    assert "Traceback" in caplog.text


def test_a_500_that_the_app_answers_itself_is_logged_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = got(answers(500, b'{"error": {"message": ', b'"tensor at 0x7f"}}'))
    assert client.status == 500
    assert client.headers["content-length"] == str(len(client.body))
    assert b"tensor" not in client.body
    assert "tensor at 0x7f" in caplog.text


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "api_error"),
    ],
)
def test_an_error_of_messages_has_its_type_message_and_code(status: int, kind: str) -> None:
    body = {"error": {"message": "no", "type": "x", "code": "why", "param": "field"}}
    inside = json.dumps(body).encode()
    expected = {"type": kind, "message": "no", "code": "why", "param": "field"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        client = got(answers(status, inside), path)
        assert json.loads(client.body) == {"type": "error", "error": expected}
        assert client.headers["content-length"] == str(len(client.body))
        assert (client.status, client.headers["x"]) == (status, "y")
    assert let_in(LOCKED, path="/v1/messages") == (401, "invalid_api_key")
