"""Retries: a repeated request is answered from its first run, which ends when it is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from openai._constants import MAX_RETRY_DELAY
from starlette.types import Message, Scope, Send

from tests.support.async_tests import on_virtual_clock
from tests.support.http_driver import settle
from tests.support.served_app import AGAIN, FIRST, IDENTIFIED, KEY, Served
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.middleware import BufferedRequest, current_run
from torchtitan_rl.serving.retries import Retries, RetryOptions, identify

GRACE_S = RetryOptions().grace_s


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_virtual_clock
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


@on_virtual_clock
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


@on_virtual_clock
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


@pytest.mark.parametrize("headers", [KEY, AGAIN])
@on_virtual_clock
async def test_another_session_path_or_method_is_another_request(headers: dict[str, str]) -> None:
    served = Served()
    await served.answered(headers, b"1")
    await served.answered({**headers, "X-Session-ID": "a"}, b"2")
    assert served.app.calls[-1].session_id == "a"  # also in a task that outlives its client
    await served.answered({**headers, "X-Session-ID": "b"}, b"3")
    client = await served.ask(headers, "/v1/completions?x=1")
    served.app.calls[-1].finish()
    await client.task
    assert len(served.app.calls) == 4
    for _ in range(2):  # reading is no run that could be doubled
        await served.ask(headers, "/v1/models", method="GET")
    assert len(served.app.calls) == 6


@on_virtual_clock
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


@pytest.mark.parametrize("status", [503, 400])
@on_virtual_clock
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


@on_virtual_clock
async def test_without_an_identity_a_disconnect_aborts_at_once_and_a_repetition_runs() -> None:
    served = Served()
    client = await served.ask()
    await client.leave()
    assert served.app.calls[0].is_aborted.is_set()
    await served.ask()
    await served.ask()
    assert len(served.app.calls) == 3
    assert served.count("answers_kept") == 0


@pytest.mark.parametrize("first", [KEY, FIRST])
@on_virtual_clock
async def test_a_run_whose_client_does_not_come_back_is_aborted_after_its_grace(
    first: dict[str, str],
) -> None:
    served = Served()
    client = await served.ask(first)
    await client.leave()
    await settle()
    assert not served.app.calls[0].is_aborted.is_set()
    await asyncio.sleep(GRACE_S + 1)
    await settle()
    assert served.app.calls[0].is_aborted.is_set()
    await served.ask(first)
    assert len(served.app.calls) == 2


@pytest.mark.parametrize(("first", "again"), IDENTIFIED)
@on_virtual_clock
async def test_a_repetition_whose_answer_was_dropped_is_refused_and_not_run_again(
    first: dict[str, str], again: dict[str, str]
) -> None:
    served = Served(retry={"max_kept_bytes": 100})
    await served.answered(first, b"answer")
    await served.answered({"Idempotency-Key": "large"}, b"x" * 99)
    retry = await served.ask(again)
    assert await retry.refusal() == (410, "answer_gone", None)
    larger = await served.answered({"Idempotency-Key": "larger"}, b"x" * 101)
    assert larger.body == b"x" * 101  # its own client gets it
    assert (await served.ask({"Idempotency-Key": "larger"})).status == 410
    assert len(served.app.calls) == 3


@on_virtual_clock
async def test_a_request_that_cannot_be_remembered_is_refused_and_no_other_is_forgotten() -> None:
    served = Served(retry={"keep_s": 10.0, "max_remembered": 3})
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
    await asyncio.sleep(11.0)
    await served.answered({"Idempotency-Key": "k3"}, b"x")


class Lost:
    """The controller knows one run of a lost process. The application refuses what ``refuses``
    says, and keeps the names of the runs."""

    def __init__(self, headers: dict[str, str]) -> None:
        scope = {
            "method": "POST",
            "path": "/",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        identity = identify(scope, b"body")
        assert identity is not None
        self.name = identity.prefix + "0123"
        self.left = [{"run": self.name, "request_id": "name"}]
        self.refuses: list[int] = []
        self.names: list[str] = []
        self.retries = Retries(self.handle, RetryOptions(), self.repeated)
        self.scope = scope

    async def repeated(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.left.pop() if self.left else {}

    async def handle(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        self.names.append(current_run.get().name)
        status = self.refuses.pop() if self.refuses else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def ask(self, body: bytes = b"body") -> int:
        statuses: list[int] = []

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        request = BufferedRequest(body, asyncio.Event().wait)
        await self.retries(dict(self.scope), request, send)
        return statuses[0]


@pytest.mark.parametrize("headers", [KEY, AGAIN])
@on_virtual_clock
async def test_a_run_of_a_lost_process_whose_repetition_was_refused_is_repeated_again(
    headers: dict[str, str],
) -> None:
    lost = Lost(headers)
    lost.refuses = [429, 503]
    assert [await lost.ask() for _ in range(3)] == [503, 429, 200]
    assert lost.names == 3 * [lost.name]


@on_virtual_clock
async def test_the_key_of_a_lost_process_with_another_body_is_refused_and_takes_no_run() -> None:
    lost = Lost(KEY)
    for _ in range(2):
        with pytest.raises(RefusedError, match="another body"):
            await lost.ask(b"other")
    assert await lost.ask() == 200
    assert lost.names == [lost.name]
