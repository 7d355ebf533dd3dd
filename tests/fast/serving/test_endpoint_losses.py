"""The endpoint's process dies at every await: clients that repeat their requests get the answers of
the first run, no request is run twice, and no token is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fast.serving.test_faults import watched
from tests.support.await_faults import Faults
from tests.support.endpoint_processes import START_S, Processes
from tests.support.front_end import MAX_TOKENS, TokenReplica
from tests.support.http_driver import CHAT
from tests.support.virtual_clock import VirtualLoop, run_virtually
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.failures import Failure, Part
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.restarts import EndpointRestarts
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions

SIBLINGS = 6  # the seed of two equal requests


class Death(Faults):
    """The process dies at the await with this number, and again ``again_s`` after it serves."""

    def __init__(self, number: int | None = None, again_s: float | None = None) -> None:
        super().__init__(watches=watched, number=number)
        self.again_s = again_s
        self.die: Callable[[], None]

    def is_next(self, work: Any) -> bool:
        if super().is_next(work):
            self.die()
            if self.again_s is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(START_S + self.again_s, self.die)
        return False


@dataclass
class Outcome:
    processes: Processes
    replica: TokenReplica
    router: GeneratorRouter
    sessions: Sessions
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)  # by what asked
    failures: list[Failure] = field(default_factory=list)

    async def ask(
        self, name: str, seed: int = 0, path: str = CHAT, *, method: str = "POST", **body: Any
    ) -> tuple[int, Any]:
        """``name`` says how: ``named`` with an Idempotency-Key, ``once`` without a repetition, and
        ``s`` in this session."""
        words, headers = name.split(), {}
        if "s" in words:
            headers["X-Session-ID"] = "s"
        if "named" in words:
            headers["Idempotency-Key"] = name
        content = {"seed": seed, **body} if seed else body
        num_attempts = 1 if "once" in words else 3
        self.answers[name] = await self.processes.ask(
            path, method, content, headers=headers, num_attempts=num_attempts
        )
        return self.answers[name]


async def play(death: Death) -> Outcome:
    """A few seconds of an endpoint's life, and its end."""
    processes, replica = Processes(), TokenReplica("replica0")
    router = GeneratorRouter([replica], request_timeout_s=30.0)
    outcome = Outcome(processes, replica, router, Sessions(router, timeout_s=600.0))
    restarts = EndpointRestarts(
        max_restarts=2, say=lambda line: None, on_failure=outcome.failures.append
    )
    service = EndpointService(
        processes, router, outcome.sessions, interval_s=0.05, restarts=restarts
    )
    death.die, death.is_counting = processes.die, True
    async with service:
        await clients_talk(outcome)
        death.is_counting = False
        await asyncio.sleep(30.0)  # past the grace of what no one has repeated
    await processes.close()
    await outcome.sessions.aclose()
    return outcome


async def clients_talk(outcome: Outcome) -> None:
    ask = outcome.ask
    await ask("named open", path="/v1/sessions", session_id="s")
    await asyncio.gather(
        ask("s 1", 1),
        ask("s stream", 2, stream=True),
        ask("s named 3", 3),
        ask("once", 4),
        ask("5", 5),
        ask("sibling 1", SIBLINGS),
        ask("sibling 2", SIBLINGS),
    )
    path, (_, answer) = "/v1/sessions/s/reward", outcome.answers["s 1"]
    if isinstance(answer, dict):
        await ask("named branch", path=path, reward=0.5, response_id=answer["id"])
    await ask("s late", 7)
    await ask("named reward", path=path, reward=1.0)


def run(death: Death) -> Outcome:
    def loop() -> VirtualLoop:
        made = VirtualLoop()
        made.set_task_factory(death.factory)
        made.set_exception_handler(lambda *_: None)
        return made

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(play(death))


def check(outcome: Outcome, *, num_deaths: int) -> bool:
    """Returns whether the two siblings got one answer."""
    answers, replica = dict(outcome.answers), outcome.replica
    tokens: dict[int, list[tuple[int, ...]]] = {}
    for name, (status, answer) in answers.items():
        if name == "once" or (name == "s stream" and answer == b"cut off"):
            continue
        assert status == 200, f"{name}: {status} {answer}"
        if isinstance(answer, dict) and "token_ids" in answer:
            assert len(set(answer["token_ids"])) == 1, "tokens of two runs in one answer"
            assert len(answer["token_ids"]) == MAX_TOKENS
            tokens.setdefault(replica.prompts[answer["token_ids"][0] - 1][1], []).append(
                tuple(answer["token_ids"])
            )
    runs = Counter(seed for _, seed in replica.prompts)
    assert runs.pop(4, 0) <= 1, "a request that no one repeats was run twice"
    assert runs == {1: 1, 2: 1, 3: 1, 5: 1, SIBLINGS: 2, 7: 1}, "a request was run twice"
    assert replica.running == 0
    assert set(outcome.router.outstanding_tokens().values()) == {0}
    counts = outcome.sessions.counts()
    assert counts["sessions_rewarded"] == 1
    assert counts["sessions_open"] == counts["session_tokens_held"] == 0
    sampled = replica.sampled_in["s"]
    assert counts["session_tokens_generated"] == sampled
    parts = ("trained", "masked", "discarded")
    assert sum(counts[f"session_tokens_{part}"] for part in parts) == sampled
    assert len(outcome.failures) == num_deaths
    assert all(one.part is Part.ENDPOINT and one.serve_s is not None for one in outcome.failures)
    return len(set(tokens[SIBLINGS])) == 1


def test_without_a_death_every_client_is_answered_once() -> None:
    outcome = run(Death())
    assert not check(outcome, num_deaths=0)
    assert all(status == 200 for status, _ in outcome.answers.values())


@pytest.mark.parametrize(
    ("num_deaths", "again_s"),
    [
        (10, None),
        pytest.param(300, None, marks=pytest.mark.soak),
        pytest.param(100, 0.25, marks=pytest.mark.soak),
        pytest.param(100, 1.0, marks=pytest.mark.soak),
    ],
)
def test_wherever_the_process_dies_no_request_runs_twice_and_no_token_is_lost(
    num_deaths: int, again_s: float | None
) -> None:
    counted = Death()
    run(counted)
    num_awaits = len(counted.sites)
    numbers = range(num_awaits // num_deaths // 2, num_awaits, max(1, num_awaits // num_deaths))
    num_repeated = num_alike = 0
    for number in numbers:
        outcome = run(Death(number, again_s))
        try:
            num_alike += check(outcome, num_deaths=1 if again_s is None else 2)
        except AssertionError as error:
            site = counted.sites[number]
            pytest.fail(f"death at await {number}, {site}: {error} {outcome.answers}")
        num_repeated += sum(one.requests_again for one in outcome.failures)
    assert num_repeated > len(numbers) // 2
    # Two equal requests ended together and one answer was lost: they cannot be told apart.
    assert num_alike <= 1 + len(numbers) // 50


def test_a_loss_is_reported_if_the_run_ends_between_two_starts_of_the_endpoint() -> None:
    class Broken:
        name = "endpoint"

        async def restart(self) -> None:
            raise EndpointLostError("it does not start")

    async def play() -> None:
        failures: list[Failure] = []
        restarts = EndpointRestarts(
            max_restarts=2, say=lambda text: None, on_failure=failures.append
        )
        lost = EndpointLostError("killed")
        task = asyncio.create_task(restarts.restart(Broken(), lost))  # type: ignore[arg-type]
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert [one.given_up for one in failures] == ["the run ended first"]

    run_virtually(play())
