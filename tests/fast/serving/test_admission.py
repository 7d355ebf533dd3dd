"""Admission: how many requests run, how many wait in a queue, and which are refused."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.async_tests import on_event_loop, on_virtual_clock
from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.admission import Admission
from torchtitan_rl.serving.body import BufferedBody
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import OpenAIErrors


class Served:
    """An on-demand app with a number of places."""

    def __init__(self, *, timeout_s: float = 600.0, **limits: int) -> None:
        self.app = OnDemandApp()
        limits = {"max_running": 1, "max_queued": 2} | limits
        self.admission = Admission(self.app, timeout_s=timeout_s, **limits)
        self.asgi = OpenAIErrors(BufferedBody(self.admission, EndpointConfig(), timeout_s=60.0))

    async def ask(self, name: str = "x", path: str = "/v1/completions", **options: Any) -> Client:
        client = Client(self.asgi, path, body=b'"' + name.encode() + b'"', **options)
        await settle()
        return client

    @property
    def bodies(self) -> list[str]:
        return [call.body.decode().strip('"') for call in self.app.calls]

    @property
    def places(self) -> tuple[int, int]:
        return self.admission.num_running, self.admission.num_queued


@on_event_loop
async def test_requests_beyond_the_places_wait_in_a_queue() -> None:
    served = Served()
    clients = [await served.ask(name) for name in "abc"]
    assert served.bodies == ["a"]
    assert served.places == (1, 2)
    for i, client in enumerate(clients):
        served.app.calls[i].finish()
        await client.task
        await settle()
    assert served.bodies == ["a", "b", "c"]
    assert served.places == (0, 0)


@on_event_loop
async def test_a_request_beyond_the_queue_is_429_with_retry_after() -> None:
    served = Served()
    for name in "abc":
        await served.ask(name)
    refused = await served.ask("d")
    assert await refused.refusal() == (429, "queue_full", None)
    assert int(refused.headers["retry-after"]) > 0
    assert served.admission.num_refused == 1
    assert served.places == (1, 2)


@on_virtual_clock
async def test_no_request_waits_for_a_place_longer_than_the_timeout() -> None:
    served = Served(timeout_s=30.0)
    running = await served.ask("a")
    waiting = await served.ask("b")
    await asyncio.sleep(20.0)
    later = await served.ask("c")
    await asyncio.sleep(11.0)
    assert await waiting.refusal() == (429, "queue_timeout", None)
    assert served.places == (1, 1)
    served.app.calls[0].finish()
    await running.task
    await settle()
    assert served.bodies == ["a", "c"]
    assert not later.task.done()


@on_event_loop
async def test_a_stream_holds_its_place_until_its_end() -> None:
    served = Served()
    streaming, waiting = await served.ask("a"), await served.ask("b")
    served.app.calls[0].stream(b"first")
    await settle()
    assert streaming.body == b"first"
    assert waiting.status is None
    assert served.places == (1, 1)
    served.app.calls[0].finish(b"last")
    await streaming.task
    await settle()
    assert served.bodies == ["a", "b"]


@on_event_loop
async def test_a_client_that_leaves_the_queue_is_never_run() -> None:
    served = Served()
    first, leaving, last = [await served.ask(name) for name in "abc"]
    await leaving.leave()
    assert leaving.sent == []
    assert served.places == (1, 1)
    served.app.calls[0].finish()
    await first.task
    await settle()
    assert served.bodies == ["a", "c"]
    served.app.calls[1].finish()
    await last.task
    assert served.places == (0, 0)


@on_event_loop
async def test_an_app_that_fails_gives_its_place_back() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    admission = Admission(broken, max_running=1, max_queued=0)
    served = OpenAIErrors(BufferedBody(admission, EndpointConfig(), timeout_s=60.0))
    for _ in range(3):
        assert await Client(served).refusal() == (500, "internal_error", None)
    assert admission.num_running == 0


@on_event_loop
async def test_health_sessions_and_administration_answer_while_everything_is_full() -> None:
    served = Served(max_queued=0)
    await served.ask("full")
    assert (await served.ask("no")).status == 429
    for method, path in [
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/a/reward"),
        ("DELETE", "/v1/sessions/a"),
        ("POST", "/admin/resume"),
    ]:
        client = await served.ask("yes", path, method=method)
        assert client.status is None
        served.app.calls[-1].finish()
        await client.task
        assert client.status == 200
    assert served.places == (1, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "finish", "leave", "cancel"]), st.integers(0, 9)))
)
@on_event_loop
async def test_however_requests_end_all_places_are_given_back(
    moves: list[tuple[str, int]],
) -> None:
    served = Served(max_running=2, max_queued=3)
    clients: list[Client] = []
    for move, i in moves:
        if move == "ask":
            clients.append(await served.ask())
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
