"""A fault at every await of the endpoint: whatever goes wrong, every request ends, once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.await_faults import Faults, Kind
from tests.support.endpoints import LinkedEndpoint, now
from tests.support.front_end import FrontEnd, TokenReplica
from tests.support.http_driver import Client
from tests.support.virtual_clock import VirtualLoop
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.bridge import EndpointBridge
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions

CONFIG = EndpointConfig(max_concurrent_requests=3)


class Endpoint(LinkedEndpoint):
    """Drains as the real one does: at the end of the grace what runs is refused."""

    async def drain(self, grace_s: float) -> None:
        await super().drain(grace_s)
        await asyncio.sleep(grace_s)
        self.link.close()


@dataclass
class Outcome:
    clients: list[Client]
    link: ControllerLink
    router: GeneratorRouter
    replica: TokenReplica
    sessions: Sessions
    front: FrontEnd
    app: EndpointApp
    was_lost: bool = False
    ends_s: float = 0.0  # when the service began to end in order


async def play(faults: Faults) -> Outcome:
    """A few seconds of an endpoint's life, and its end."""
    link = ControllerLink(lost_after_s=60.0)
    link.attach()
    front = FrontEnd(link)
    replica = TokenReplica("replica0")
    router = GeneratorRouter([replica], request_timeout_s=30.0)
    sessions = Sessions(router, timeout_s=600.0)
    app = EndpointApp(front.app(), CONFIG, keys=Keys(), commands=link)
    outcome = Outcome([], link, router, replica, sessions, front, app)
    taking = asyncio.create_task(front.take_outputs(), name="endpoint outputs")
    taking.add_done_callback(front.outputs_ended)
    faults.is_counting = True
    try:
        async with EndpointService(Endpoint(link), router, sessions, interval_s=0.05) as service:
            lost = asyncio.ensure_future(service.run_until_lost())
            talk = asyncio.ensure_future(clients_talk(outcome))
            await asyncio.wait({lost, talk}, return_when=asyncio.FIRST_COMPLETED)
            outcome.was_lost = lost.done() and lost.exception() is not None
            outcome.ends_s = now()
            # What was begun is to be answered all the same; the rest never asks.
            for task in (lost, talk):
                task.cancel()
                with contextlib.suppress(BaseException):
                    await task
    except (Exception, asyncio.CancelledError):  # injected into its beginning or its end
        outcome.ends_s = outcome.ends_s or now()
    link.close()  # as the end of its process does
    await asyncio.sleep(20.0)
    faults.is_counting = False
    await app._retries.close()
    await sessions.aclose()
    await asyncio.sleep(20.0)
    taking.cancel()
    return outcome


async def clients_talk(outcome: Outcome) -> None:
    def ask(path: str = "/v1/chat/completions", **options: Any) -> Client:
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        client = Client(outcome.app, path, headers=headers, **options)
        outcome.clients.append(client)
        return client

    async def ended(*clients: Client) -> None:
        await asyncio.wait([client.task for client in clients])

    session = {"X-Session-ID": "s"}
    key = {"Idempotency-Key": "k", **session}
    await ended(ask("/v1/sessions", body=b'{"session_id": "s"}'))
    first = [ask(), ask(body=b'{"stream": true}', headers=session), ask(headers=key), ask()]
    await asyncio.sleep(0.25)
    leaving = [ask(headers=session), ask(body=b'{"stream": true}', headers=session)]
    await asyncio.sleep(0.6)
    again = ask(headers=key)
    for client in leaving:
        client._has_left.set()
    await ended(*first, again, *leaving)
    late = ask(headers=session)
    await asyncio.sleep(0.15)
    await ended(ask("/v1/sessions/s/reward", body=b'{"reward": 1.0}'))
    await ended(late, ask("/v1/sessions/s", method="GET"))
    ask(headers={"X-Session-ID": "open"})
    await asyncio.sleep(0.35)  # the service ends in the middle of it


def run(faults: Faults) -> Outcome:
    def loop() -> VirtualLoop:
        made = VirtualLoop()
        made.set_task_factory(faults.factory)
        made.set_exception_handler(lambda *_: None)
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(play(faults))


def watched(file: str) -> bool:
    return "/torchtitan_rl/serving/" in file or "/torchtitan_rl/channel.py" in file


_LOOPS = {
    "endpoint bridge",
    "endpoint outputs",
    EndpointBridge._send_all.__qualname__,
    EndpointBridge._receive_all.__qualname__,
    EndpointBridge._report_status.__qualname__,
    EndpointService._ask_engines.__qualname__,
}


def check(outcome: Outcome, faults: Faults) -> None:
    unanswered = 0
    for client in outcome.clients:
        assert client.task.done(), "a request without an end"
        assert sum(message["type"] == "http.response.start" for message in client.sent) <= 1
        unanswered += not (client.is_whole or client._has_left.is_set())
    # The app of one may have been ended by the fault itself: the server then answers 500.
    assert unanswered <= (faults.kind is not Kind.DELAY and faults.hit is not None), "no answer"
    if faults.hit is not None and faults.hit.get_name() in _LOOPS and faults.kind is not Kind.DELAY:
        assert outcome.was_lost or faults.hit_s >= outcome.ends_s, "a dead loop in silence"
    link, sessions = outcome.link, outcome.sessions
    assert not link._pending
    assert not link._answers
    assert not outcome.front.waiting
    assert outcome.replica.running == 0
    assert set(outcome.router.outstanding_tokens().values()) == {0}
    assert outcome.app.counts()["http_requests_running"] == 0
    assert outcome.app.counts()["http_requests_queued"] == 0
    counts = sessions.counts()
    assert counts["sessions_open"] == counts["session_tokens_held"] == 0
    sampled = sum(n for session, n in outcome.replica.sampled_in.items() if session)
    assert counts["session_tokens_generated"] == sampled
    parts = ("trained", "masked", "discarded")
    assert sum(counts[f"session_tokens_{part}"] for part in parts) == sampled


def test_without_a_fault_everyone_is_answered() -> None:
    outcome = run(Faults(watches=watched))
    check(outcome, Faults(watches=watched))
    assert not outcome.was_lost
    assert [client.status for client in outcome.clients[:5]] == [200] * 5
    assert outcome.replica.aborted  # of clients that left
    assert outcome.sessions.counts()["session_unseen_turns"] >= 2


def chosen(sites: list[Any], times: tuple[int, ...]) -> Collection[int]:
    """Of each site the first (0) and the last (-1) time."""
    numbers: dict[Any, list[int]] = {}
    for number, site in enumerate(sites):
        numbers.setdefault(site, []).append(number)
    return sorted({n[i] for n in numbers.values() for i in times})


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        (Kind.RAISE, (0,)),
        (Kind.CANCEL_WITHIN, (-1,)),
        (Kind.CANCEL_TASK, (0,)),
        (Kind.DELAY, (-1,)),
        *(pytest.param(kind, (0, -1), marks=pytest.mark.soak) for kind in Kind),
    ],
)
def test_whatever_await_fails_every_request_ends_once_and_nothing_is_left(
    kind: Kind, times: tuple[int, ...]
) -> None:
    counted = Faults(watches=watched)
    run(counted)
    numbers = chosen(counted.sites, times)
    assert len(numbers) > 25
    for number in numbers:
        faults = Faults(watches=watched, number=number, kind=kind)
        outcome = run(faults)
        try:
            check(outcome, faults)
        except AssertionError as error:
            pytest.fail(f"{kind} at await {number}, {faults.sites[number : number + 1]}: {error}")
