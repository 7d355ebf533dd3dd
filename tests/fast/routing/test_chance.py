"""The router by chance: requests, cancels, aborts, pulls, pauses, sleeps, pins, and replicas that
die, hang or freeze, at any moment. Whatever happens, nothing is lost and each request ends once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.far_replica import FarReplica, connected
from tests.support.replicas import handle, request, settle
from tests.support.scripted_engine import ScriptedEngine, scripted_token
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import DeadlineError, GenerationError, LoopStalledError, WeightSyncError
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest

VOCAB = 40
NUM_REPLICAS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    chance: int
    num_requests: int
    faults: tuple[str, ...]  # one for each of the first replicas; the last one has none
    request_timeout_s: float


CASES = st.builds(
    Case,
    chance=st.integers(0, 10**9),
    num_requests=st.integers(1, 25),
    faults=st.lists(st.sampled_from(["kill", "hang", "freeze"]), max_size=NUM_REPLICAS - 1).map(
        tuple
    ),
    request_timeout_s=st.sampled_from([3.0, 400.0]),
)


class Trial:
    """One case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chance = random.Random(case.chance)
        self.replicas = [
            FarReplica(
                f"r{n}",
                engine=ScriptedEngine(eos_token_id=7, vocab_size=VOCAB),
                latency_s=self.chance.choice([0.0, 0.01, 0.07]),
                step_s=self.chance.choice([0.03, 0.1]),
            )
            for n in range(NUM_REPLICAS)
        ]
        self.ends: Counter[str] = Counter()
        self.new_tokens = 0
        self.version = 0
        self.complaints: list[object] = []
        self.router = GeneratorRouter(
            connected(self.replicas),
            request_timeout_s=case.request_timeout_s,
            sync_timeout_s=30.0,
            on_ended=self.on_ended,
        )

    def on_ended(self, asked: GenerationRequest, known: Completion, is_returned: bool) -> None:
        self.ends[asked.request_id] += 1
        tokens = [*asked.prompt_token_ids, *known.token_ids]
        self.new_tokens += len(known.token_ids)
        first = len(asked.prompt_token_ids)
        for index, version in enumerate(known.versions, start=first):
            token, _ = scripted_token(tokens[:index], seed=None, version=version, vocab_size=VOCAB)
            if token != tokens[index]:
                self.complaints.append((asked.request_id, index, version))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, said: self.complaints.append(said))
        # So that a pinned replica that slept can get its weights back.
        await self.router.sync_weights(handle(0), mode="hot_swap")
        names = [f"q{n}" for n in range(self.case.num_requests)]
        callers = [asyncio.create_task(self.call(name)) for name in names]
        pinned = asyncio.create_task(self.validate())
        disturbing = asyncio.create_task(self.disturb())
        faults = [
            asyncio.create_task(self.fail(replica, fault))
            for replica, fault in zip(self.replicas, self.case.faults, strict=False)
        ]
        counting = asyncio.create_task(self.count())
        await asyncio.gather(*callers, pinned, disturbing, *faults)
        counting.cancel()
        await asyncio.wait({counting})
        await self.check_accounts()
        accounts = await self.router.account()
        assert set(self.ends.values()) <= {1}
        assert self.new_tokens == sum(account.received for account in accounts.values())
        assert set(self.router.outstanding_tokens().values()) == {0}
        assert self.complaints == []
        await self.router.close()
        for replica in self.replicas:
            await replica.link.close()
        await settle()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert {task.get_name() for task in left if task is not None} == set()

    async def call(self, name: str) -> None:
        await self.nap(4.0)
        asked = request(
            name,
            session=self.chance.choice([None, "s"]),
            max_tokens=self.chance.randint(1, 40),
            min_version=self.chance.choice([0, 0, self.version]),
        )
        task = asyncio.create_task(self.router.generate(asked))
        ending = self.chance.random()
        if ending < 0.5:
            await self.nap(3.0)
            for _ in range(self.chance.randint(0, 12)):
                await asyncio.sleep(0)
            if ending < 0.3:
                task.cancel()
                for _ in range(self.chance.randint(0, 9)):
                    await asyncio.sleep(0)
                if ending < 0.1:
                    task.cancel()
            else:
                await self.router.abort([name])
        await asyncio.wait({task})
        error = None if task.cancelled() else task.exception()
        assert error is None or isinstance(error, GenerationError), error

    async def validate(self) -> None:
        for turn in range(2):
            await self.nap(2.0)
            try:
                async with self.router.pin() as pin:
                    call = asyncio.create_task(pin.generate(request(f"l{turn}", max_tokens=15)))
                    await self.nap(2.0)
                    if self.chance.random() < 0.3:
                        call.cancel()
                    await asyncio.wait({call})
                    if not call.cancelled() and call.exception() is None:
                        assert set(call.result().versions) <= {pin.version}
            except (GenerationError, WeightSyncError, DeadlineError):
                continue

    async def disturb(self) -> None:
        for _ in range(6):
            await self.nap(1.5)
            what = self.chance.choice(["pull", "pull", "pause", "spare", "sleep"])
            if what == "pause":
                await self.router.pause(self.chance.choice(["keep", "abort", "wait"]))
            elif what == "spare":
                await self.router.pause("abort", pinned=False)
            elif what == "sleep":
                await self.router.sleep()
                await self.nap(1.0)
                await self.router.wake_up()
            if what != "pause" or self.chance.random() < 0.5:
                self.version += 1
                mode = "hot_swap" if what != "pull" else self.chance.choice(["hot_swap", "drain"])
                try:
                    await self.router.sync_weights(
                        handle(self.version), mode=mode, lag_timeout_s=2.0
                    )
                except WeightSyncError:  # the last one slept while pinned to older weights
                    assert self.router.versions() == {}
            await self.nap(0.5)
            await self.router.resume()

    async def fail(self, replica: FarReplica, fault: str) -> None:
        await self.nap(6.0)
        if fault == "kill":
            replica.kill()
            return
        (replica.hang if fault == "hang" else replica.freeze)()
        await asyncio.sleep(20.0)
        replica.kill(LoopStalledError("it got nowhere"))  # as its server, or its silence, says

    async def count(self) -> None:
        while True:
            await self.nap(0.3)
            await self.check_accounts()

    async def check_accounts(self) -> None:
        for name, account in (await self.router.account()).items():
            if account.unaccounted:
                self.complaints.append((name, account))

    async def nap(self, at_most_s: float) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, at_most_s))


def check(case: Case) -> None:
    trial = Trial(case)
    run_virtually(_in_time(trial))


async def _in_time(trial: Trial) -> None:
    async with asyncio.timeout(20_000.0):
        await trial.run()


@settings(max_examples=30, deadline=None)
@given(case=CASES)
def test_whatever_happens_each_request_ends_once_and_no_token_is_lost(case: Case) -> None:
    check(case)


@pytest.mark.soak
@settings(max_examples=2000, deadline=None)
@given(case=CASES)
def test_the_same_two_thousand_times(case: Case) -> None:
    check(case)
