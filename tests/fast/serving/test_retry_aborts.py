"""Retries: when the run of a client that left is aborted, and what a repetition then gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from tests.support.http_driver import settle
from tests.support.served_retries import FIRST, ID, KEY, Served


@on_event_loop
async def test_without_an_identity_a_disconnect_aborts_at_once_and_a_repetition_runs() -> None:
    served = Served()
    client = await served.ask()
    await client.leave()
    assert served.app.calls[0].is_aborted.is_set()
    await served.ask()
    await served.ask()
    assert len(served.app.calls) == 3
    assert served.retries.num_kept == 0


@pytest.mark.parametrize("first", [KEY, ID, FIRST])
@on_event_loop
async def test_a_run_whose_client_does_not_come_back_is_aborted_after_its_grace(
    first: dict[str, str],
) -> None:
    served = Served()
    client = await served.ask(first)
    await client.leave()
    await settle()
    assert not served.app.calls[0].is_aborted.is_set()
    served.ends_of_grace[0]()
    await settle()
    assert served.app.calls[0].is_aborted.is_set()
    await served.ask(first)
    assert len(served.app.calls) == 2


@on_event_loop
async def test_each_departure_has_a_grace_of_its_own() -> None:
    served = Served()
    for _ in range(2):
        client = await served.ask(KEY)
        await client.leave()
    follower = await served.ask(KEY)
    for end in served.ends_of_grace:
        end()  # while it is followed again
    await follower.leave()
    for end in served.ends_of_grace[:2]:
        end()
    await settle()
    assert not served.app.calls[0].is_aborted.is_set()
    served.ends_of_grace[2]()
    await settle()
    assert served.app.calls[0].is_aborted.is_set()


@on_event_loop
async def test_an_official_client_that_leaves_its_stream_aborts_it_at_once() -> None:
    served = Served()
    client = await served.ask(FIRST)
    served.app.calls[0].stream(b"one")
    await settle()
    await client.leave()
    await settle()
    assert served.app.calls[0].is_aborted.is_set()
    keyed = await served.ask(KEY)
    served.app.calls[1].stream(b"one")
    await settle()
    await keyed.leave()
    await settle()
    assert not served.app.calls[1].is_aborted.is_set()


@on_event_loop
async def test_a_queued_run_whose_client_does_not_come_back_leaves_the_queue() -> None:
    served = Served(max_running=1, max_queued=1)
    await served.ask()
    waiting = await served.ask(KEY)
    await waiting.leave()
    assert (await served.ask()).status == 429
    served.ends_of_grace[0]()
    await settle()
    assert (await served.ask()).status is None  # it took the place in the queue
    assert len(served.app.calls) == 1


@on_event_loop
async def test_a_repetition_during_an_abort_waits_for_its_end_before_it_runs() -> None:
    aborts, goes_on = asyncio.Event(), asyncio.Event()
    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append("begins")
        await receive()
        if len(runs) == 1:
            await receive()
            aborts.set()
            await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%d" % len(runs)})
        runs.append("ends")

    served = Served()
    served.retries._handler = app
    client = await served.ask(KEY)
    await client.leave()
    served.ends_of_grace[0]()
    await aborts.wait()
    again, left = await served.ask(KEY), await served.ask(KEY)
    await left.leave()
    assert runs == ["begins"]
    goes_on.set()
    await again.task
    assert runs == ["begins", "ends", "begins", "ends"]
    assert again.body == b"3"  # what the aborted run answered is for no client


@on_event_loop
async def test_a_run_that_ignores_its_abort_answers_the_repetition() -> None:
    goes_on = asyncio.Event()
    runs: list[int] = []

    async def close_session(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await goes_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"closed"})

    served = Served()
    served.retries._handler = close_session
    client = await served.ask(KEY)
    await client.leave()
    served.ends_of_grace[0]()
    again = await served.ask(KEY)
    goes_on.set()
    await again.task
    assert (again.body, len(runs)) == (b"closed", 1)
    assert (await served.ask(KEY)).body == b"closed"


@on_event_loop
async def test_runs_without_followers_end_with_the_server() -> None:
    served = Served()
    client = await served.ask(KEY)
    await client.leave()
    await served.retries.close()
    assert not served.retries._running
