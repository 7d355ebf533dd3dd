"""Retries: what is remembered, for how long, and what lack of memory refuses."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.async_tests import on_event_loop
from tests.support.http_driver import Client, settle
from tests.support.served_retries import FIRST, IDENTIFIED, KEY, Served


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_event_loop
async def test_a_repetition_is_not_run_again_however_many_others_have_ended(
    first: dict[str, str], again: dict[str, str]
) -> None:
    served = Served()
    await served.answered(first, b"answer")
    for i in range(1100):
        other = Client(served.asgi, headers={"Idempotency-Key": f"other {i}"})
        while len(served.app.calls) < i + 2:
            await asyncio.sleep(0)
        served.app.calls[-1].finish(b"x")
        await other.task
    retry = await served.ask(again)
    assert retry.body == b"answer"
    assert len(served.app.calls) == 1101


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_event_loop
async def test_a_repetition_whose_answer_was_dropped_is_refused_and_not_run_again(
    first: dict[str, str], again: dict[str, str]
) -> None:
    served = Served(max_kept_bytes=100)
    await served.answered(first, b"answer")
    await served.answered({"Idempotency-Key": "large"}, b"x" * 99)
    retry = await served.ask(again)
    assert await retry.refusal() == (410, "answer_gone", None)
    larger = await served.answered({"Idempotency-Key": "larger"}, b"x" * 101)
    assert larger.body == b"x" * 101  # its own client gets it
    assert (await served.ask({"Idempotency-Key": "larger"})).status == 410
    assert len(served.app.calls) == 3


@on_event_loop
async def test_delivered_answers_are_dropped_first() -> None:
    served = Served(max_kept_bytes=100)
    lost = await served.ask({"Idempotency-Key": "lost"})
    await lost.leave()
    served.app.calls[0].finish(b"x" * 40)
    await settle()
    await served.answered({"Idempotency-Key": "had"}, b"x" * 40)
    await served.answered({"Idempotency-Key": "too"}, b"x" * 40)
    assert (await served.ask({"Idempotency-Key": "had"})).status == 410
    assert (await served.ask({"Idempotency-Key": "lost"})).status == 200


@on_event_loop
async def test_a_repetition_is_recognized_until_keep_s_after_the_last_one() -> None:
    served = Served(keep_s=10.0)
    await served.answered(KEY, b"x")
    for _ in range(3):
        served.now_s += 9.0
        assert (await served.ask(KEY)).body == b"x"
    served.now_s += 11.0
    await served.answered(KEY, b"y")
    assert served.retries.num_kept == served.retries.num_remembered == 1
    assert len(served.retries._by_key) == 1
    assert served.retries._kept_bytes == 1


@on_event_loop
async def test_a_request_that_cannot_be_remembered_is_refused_and_no_other_is_forgotten() -> None:
    served = Served(keep_s=10.0, max_remembered=3)
    for i in range(2):
        await served.answered({"Idempotency-Key": f"k{i}"}, b"x")
    running = await served.ask({"Idempotency-Key": "k2"})
    refused = await served.ask({"Idempotency-Key": "k3"})
    assert await refused.refusal() == (429, "too_many_remembered", None)
    assert refused.headers["retry-after"] == "10"
    await served.answered({}, b"x")  # without an identity there is nothing to be remembered
    assert (await served.ask({"Idempotency-Key": "k0"})).body == b"x"
    served.app.calls[2].finish()
    await running.task
    served.now_s = 11.0
    await served.answered({"Idempotency-Key": "k3"}, b"x")


@on_event_loop
async def test_failures_have_a_bound_of_their_own() -> None:
    served = Served(max_remembered=2, max_failed=3)
    for i in range(9):
        failed = await served.ask(FIRST, body=b"%d" % i)
        served.app.calls[-1].finish(b"no", status=503)
        await failed.task
    assert served.retries.num_remembered == 0
    assert len(served.retries._by_key) == 3


@on_event_loop
async def test_the_body_of_a_run_counts_until_the_run_ends() -> None:
    served = Served()
    clients = [await served.ask(KEY, body=b'{"a": 1}') for _ in range(2)]
    assert served.body._held_bytes == 16
    for client in clients:
        await client.leave()
    assert served.body._held_bytes == 8
    served.app.calls[0].finish()
    await settle()
    assert served.body._held_bytes == 0
