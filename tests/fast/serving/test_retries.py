"""Retries: a repeated request is answered from its first run."""

from __future__ import annotations

import pytest
from openai._constants import MAX_RETRY_DELAY

from tests.support.async_tests import on_event_loop
from tests.support.http_driver import Client, settle
from tests.support.served_retries import AGAIN, FIRST, ID, IDENTIFIED, KEY, Served
from torchtitan_rl.serving.retries import RetryOptions


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_event_loop
async def test_a_retry_of_a_running_request_gets_its_answer_and_starts_nothing(
    first: dict[str, str], again: dict[str, str]
) -> None:
    served = Served()
    client = await served.ask(first)
    await client.leave()
    retry = await served.ask(again)
    assert len(served.app.calls) == 1
    served.app.calls[0].finish(b"answer")
    await retry.task
    assert (retry.status, retry.body) == (200, b"answer")
    assert retry.headers["x-replayed"] == "true"
    assert not served.app.calls[0].is_aborted.is_set()


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_event_loop
async def test_a_retry_of_a_request_that_just_ended_gets_its_answer_again(
    first: dict[str, str], again: dict[str, str]
) -> None:
    served = Served()
    client = await served.answered(first, b"answer")
    assert client.body == b"answer"
    assert "x-replayed" not in client.headers
    retry = await served.ask(again)
    assert retry.body == b"answer"
    assert len(served.app.calls) == 1
    assert served.retries.num_replayed == 1


@on_event_loop
async def test_trap_10_a_repeated_request_id_is_answered_not_run_twice() -> None:
    served = Served()
    clients = [await served.ask(ID) for _ in range(4)]
    assert len(served.app.calls) == 1
    served.app.calls[0].finish(b"answer")
    for client in clients:
        await client.task
        assert (client.status, client.body) == (200, b"answer")


@on_event_loop
async def test_a_stream_is_replayed_from_its_beginning_and_followed() -> None:
    served = Served()
    client = await served.ask(KEY)
    served.app.calls[0].stream(b"one,")
    served.app.calls[0].stream(b"two,")
    await settle()
    assert client.body == b"one,two,"
    await client.leave()
    retry, second = await served.ask(KEY), await served.ask(KEY)
    assert retry.body == b"one,two,"
    assert not retry.is_whole
    served.app.calls[0].stream(b"three,")
    served.app.calls[0].finish(b"four")
    for follower in (retry, second):
        await follower.task
        assert follower.body == b"one,two,three,four"
        assert follower.is_whole
    late = await served.ask(KEY)
    assert late.body == b"one,two,three,four"
    assert len(late.sent) == 2  # a kept response is one piece
    assert len(served.app.calls) == 1


@on_event_loop
async def test_an_idempotency_key_with_another_body_is_refused() -> None:
    served = Served()
    await served.answered(KEY, b"answer", body=b'{"a": 1}')
    refused = await served.ask(KEY, body=b'{"a": 2}')
    assert await refused.refusal() == (422, "idempotency_key_reused", "Idempotency-Key")
    for key in ("", "x" * 256):
        refused = await served.ask({"Idempotency-Key": key})
        assert (await refused.refusal())[:2] == (400, "invalid_idempotency_key")


def test_an_abandoned_request_runs_on_for_longer_than_official_clients_pause() -> None:
    assert RetryOptions().grace_s > MAX_RETRY_DELAY


@on_event_loop
async def test_requests_that_share_an_id_all_run() -> None:
    served = Served()
    await served.answered(ID, b"one", body=b'{"a": 1}')
    await served.answered(ID, b"two", body=b'{"a": 2}')


@pytest.mark.parametrize("headers", [KEY, ID, AGAIN])
@on_event_loop
async def test_another_session_path_or_method_is_another_request(headers: dict[str, str]) -> None:
    served = Served()
    await served.answered(headers, b"1")
    await served.answered({**headers, "X-Session-ID": "a"}, b"2")
    assert served.app.calls[-1].session_id == "a"  # also in a task that outlives its client
    await served.answered({**headers, "X-Session-ID": "b"}, b"3")
    client = Client(served.asgi, "/v1/completions?x=1", headers=headers)
    await settle()
    served.app.calls[-1].finish()
    await client.task
    assert len(served.app.calls) == 4
    for _ in range(2):  # reading is no run that could be doubled
        Client(served.asgi, "/v1/models", headers=headers, method="GET")
        await settle()
    assert len(served.app.calls) == 6


@on_event_loop
async def test_equal_requests_are_several_samples_until_a_client_says_that_it_retries() -> None:
    served = Served()
    for answer in (b"1", b"2", b"3"):
        await served.answered(FIRST, answer)
    retry = await served.ask(AGAIN)
    assert retry.body == b"1"
    retry = await served.ask({"x-stainless-retry-count": "2"})
    assert retry.body == b"2"
    elsewhere = await served.ask(AGAIN, address="10.0.0.2")
    assert elsewhere.status is None  # another machine's request: it runs
    assert len(served.app.calls) == 4


@on_event_loop
async def test_a_retry_belongs_to_the_attempt_that_lost_its_client() -> None:
    served = Served()
    await served.answered(FIRST, b"whole")
    running = await served.ask(FIRST)
    lost = await served.ask(FIRST)
    await lost.leave()
    retry = await served.ask(AGAIN)
    served.app.calls[1].finish(b"running")
    served.app.calls[2].finish(b"lost")
    await running.task
    await retry.task
    assert (running.body, retry.body) == (b"running", b"lost")
    assert len(served.app.calls) == 3


@pytest.mark.parametrize("status", [429, 500, 503, 400])
@on_event_loop
async def test_a_failed_answer_is_not_replayed_and_its_retry_runs(
    status: int,
) -> None:
    served = Served()
    await served.answered(FIRST, b"whole")
    failed = await served.ask(FIRST)
    served.app.calls[1].finish(b"no", status=status)
    await failed.task
    assert failed.status == status
    await served.answered(AGAIN, b"new")
    keyed = await served.ask(KEY)
    served.app.calls[3].finish(b"no", status=status)
    await keyed.task
    await served.answered(KEY, b"new")


@on_event_loop
async def test_a_retry_of_a_request_that_waits_for_a_place_keeps_its_place_in_the_queue() -> None:
    served = Served(max_running=1, max_queued=2)
    first = await served.ask()
    waiting = await served.ask(KEY)
    last = await served.ask()
    await waiting.leave()
    retry = await served.ask(KEY)
    for answer, client in ((b"1", first), (b"2", retry), (b"3", last)):
        served.app.calls[-1].finish(answer)
        await client.task
        assert client.body == answer
        await settle()
    assert len(served.app.calls) == 3
