"""What the controller does for each event does not grow with the number of replicas: these tests
count the replicas and groups that it looks at."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fast.simulation.test_profile import RUN
from tests.support.async_tests import on_virtual_clock
from torchtitan_rl.aio import background
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.observability.engine import EngineSampler
from torchtitan_rl.orchestration.config import derive_capacity
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.work_buffer import WorkBuffer
from torchtitan_rl.rollout.env import Observation, checked_answer
from torchtitan_rl.routing.clock import Wakeups
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.simulation.clock import run_virtually
from torchtitan_rl.simulation.profile import RecordedTurns, profile_run
from torchtitan_rl.simulation.replica import SimulatedReplica, Speeds
from torchtitan_rl.simulation.run import _Environment, simulate
from torchtitan_rl.types import GenerationRequest, Problem, RolloutGroup, SamplingParams
from torchtitan_rl.weights.distribution import SharedMemoryHandle


class Looked(list[Any]):
    """Counts the elements that are read."""

    number = 0

    def __iter__(self):
        for one in super().__iter__():
            self.number += 1
            yield one

    def __getitem__(self, index):
        self.number += 1
        return super().__getitem__(index)


def many(count: int) -> tuple[GeneratorRouter, Looked]:
    speeds = Speeds(step_s=0.01, stage_s=0.1, pull_s=0.05, stall_s=0.01)
    router = GeneratorRouter([SimulatedReplica(f"r{n}", speeds) for n in range(count)])
    looked = router._pool.all = Looked(router._pool.all)
    return router, looked


def request(number: int, version: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{number}",
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=3 + number % 7),
        min_version=version,
    )


@pytest.mark.parametrize("count", [4, 400])
def test_a_request_looks_at_a_few_replicas_whatever_their_number(count):
    async def requests():
        router, looked = many(count)
        async with background(router.wait_until_lost()):
            await asyncio.gather(*(router.generate(request(n)) for n in range(50)))
            return looked.number

    assert run_virtually(requests()) <= 50 * 2


@pytest.mark.parametrize("count", [20, 400])
def test_a_weight_sync_looks_at_each_replica_a_few_times(count):
    async def sync():
        router, looked = many(count)
        handle = SharedMemoryHandle(version=1, path="", num_bytes=0)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(router.sync_weights(handle, mode="hot_swap"))
            await asyncio.sleep(0.05)
            for number in range(30):  # they wait for the version
                tasks.create_task(router.generate(request(number, version=1)))
            await asyncio.sleep(0.11)  # some replicas have swapped
            for number in range(30, 60):
                tasks.create_task(router.generate(request(number)))
        return looked.number, set(router.versions().values())

    number, versions = run_virtually(sync())
    assert versions == {1}
    assert number <= 20 * count + 500


@pytest.mark.parametrize(("count", "moments"), [(60, 1), (1000, 16)])
def test_the_fetches_and_swaps_of_a_weight_sync_begin_64_at_a_time(count, moments):
    began: dict[str, Counter[float]] = {"stage": Counter(), "execute": Counter()}  # by time

    class Counted(SimulatedReplica):
        async def stage(self, handle):
            began["stage"][asyncio.get_running_loop().time()] += 1
            if self.name in ("r3", "r900"):
                raise WeightSyncError("the weights are gone")
            await super().stage(handle)

        async def execute(self, command, on_answer=None):
            began["execute"][asyncio.get_running_loop().time()] += 1
            return await super().execute(command, on_answer)

    async def sync():
        speeds = Speeds(stage_s=0.1, pull_s=0.05, stall_s=0.01)
        router = GeneratorRouter([Counted(f"r{n}", speeds) for n in range(count)])
        handle = SharedMemoryHandle(version=1, path="", num_bytes=0)
        return await router.sync_weights(handle, mode="hot_swap"), router.versions()

    report, versions = run_virtually(sync())
    assert max(began["stage"].values()) <= 64
    assert max(began["execute"].values()) <= 64
    assert len(began["stage"]) == moments
    failed = {"r3", "r900"} & {f"r{n}" for n in range(count)}
    assert set(report.lost) == failed
    assert versions == {f"r{n}": 1 for n in range(count) if f"r{n}" not in failed}
    assert len(report.pulls) == count - len(failed)


def test_no_fetch_begins_after_the_router_was_closed():
    async def close():
        router, _ = many(200)
        handle = SharedMemoryHandle(version=1, path="", num_bytes=0)
        sync = asyncio.create_task(router.sync_weights(handle, mode="hot_swap"))
        await asyncio.sleep(0.005)  # the first 64 fetch
        await router.close()
        with pytest.raises(WeightSyncError, match="closed"):
            await sync
        assert not router._weights._pullers

    run_virtually(close())


def test_rollouts_and_requests_start_128_at_a_time(monkeypatch):
    """A step has 400 rollouts. Those of later steps wait for their version."""
    began: dict[str, Counter[float]] = {"reset": Counter(), "generate": Counter()}

    def count(owner, name):
        original = getattr(owner, name)

        async def counted(*arguments, **options):
            began[name][asyncio.get_running_loop().time()] += 1
            return await original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(_Environment, "reset")
    count(SimulatedReplica, "generate")
    recorded = RecordedTurns(
        prompt_tokens=(10,), sampled_tokens=(20,), environment_s=(0.01, 0.01), reward=1.0
    )
    profile = replace(profile_run(RUN), groups=((recorded,) * 4,))
    words = ["--rollout.groups-per-step", "100", "--rollout.group-size", "4", "--num-steps", "3"]
    words += ["--schedule.staleness", "1", "--generator.replicas", "16"]
    found = simulate(load_config(Path("alphabet_sort_tiny"), words), profile)
    assert found.requests == began["generate"].total() == began["reset"].total() == 1200
    assert max(began["reset"].values()) <= 128
    assert max(began["generate"].values()) <= 128


def test_rollouts_leave_no_reference_cycles():
    """So collections of all objects, which hold up the loop, may be seldom (`collect_less`)."""

    def unreachable(groups):
        words = ["--rollout.groups-per-step", f"{groups}", "--rollout.group-size", "4"]
        run = load_config(Path("alphabet_sort_tiny"), [*words, "--num-steps", "2"])
        gc.collect()
        gc.disable()
        try:
            simulate(run, profile_run(RUN))
            return gc.collect()
        finally:
            gc.enable()

    unreachable(4)
    assert abs(unreachable(44) - unreachable(4)) < 40  # with 320 rollouts more


@on_virtual_clock
async def test_of_thousands_that_wait_each_is_woken_in_its_turn():
    wakeups, is_open, woken = Wakeups(), False, []

    async def wait(number):
        await wakeups.until(lambda: is_open, key="same")
        woken.append((asyncio.get_running_loop().time(), number))

    tasks = [asyncio.create_task(wait(number)) for number in range(1000)]
    await asyncio.sleep(0)
    is_open = True
    for _ in range(5):  # further changes do not wake more
        wakeups.notify()
        await asyncio.sleep(0.001)
    assert len(woken) == 128
    tasks[500].cancel()
    await asyncio.wait(tasks)
    assert max(Counter(time for time, _ in woken).values()) == 128
    assert [number for _, number in woken] == [n for n in range(1000) if n != 500]


def test_a_reading_of_many_replicas_is_spread_over_time():
    async def read():
        router, _ = many(200)
        reading: Counter[float] = Counter()  # by the time at which it began
        ask = router._stats

        def counted(state):
            reading[asyncio.get_running_loop().time()] += 1
            return ask(state)

        router._stats = counted
        sampler = EngineSampler(router.stats)
        async with background(sampler.run()):
            await asyncio.sleep(20.0)
        assert len(sampler.newest) == 200
        return reading

    reading = run_virtually(read())
    assert max(reading.values()) <= 64
    assert 6_000 <= reading.total() <= 10_000  # each replica every 0.4 s


@pytest.mark.parametrize("count", [10, 1000])
def test_a_buffer_that_waits_for_its_oldest_group_looks_at_no_more_than_it_may_overtake(count):
    capacity = derive_capacity(groups_per_step=count, staleness=1, max_share=0.0)
    buffer = WorkBuffer(capacity, TokenLedger())
    for number in range(2 * count):
        problem = Problem(problem_id=f"{number}", data={})
        buffer.admit(f"{number}", problem, version=0)
        buffer.start(f"{number}")
        if number:
            group = RolloutGroup(group_id=f"{number}", problem=problem, rollouts=())
            buffer.finish(group)
    looked = Looked(buffer._entries.values())

    class Entries(dict[str, Any]):
        def values(self):
            return looked

    buffer._entries = Entries(buffer._entries)
    assert not buffer.has_batch
    assert looked.number == 2


def test_the_tokens_of_a_usual_prompt_are_not_copied_one_by_one():
    prompt = tuple(range(1000, 1500))
    answer = checked_answer(Observation(prompt_token_ids=prompt), 4096)
    assert answer.prompt_token_ids is prompt
    converted = checked_answer(Observation(prompt_token_ids=(True, 2)), 4096)
    assert [type(token) for token in converted.prompt_token_ids] == [int, int]
