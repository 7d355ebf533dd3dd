"""Rollouts that wait for a place, and the number of places that follows the KV caches."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.in_flight import run as run_workload
from benchmarks.kv_replica import KvReplica, KvSpeeds
from benchmarks.workload import draw_workload
from tests.support.async_tests import cancel, on_event_loop, on_virtual_clock, ticks
from tests.support.rollouts import PROBLEM, CountingEnv, complete, config
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.run import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import EngineStats, RolloutStatus


def stats(running: int, *, waiting: int = 0, kv_use: float) -> EngineStats:
    return EngineStats(
        version=0,
        running=running,
        waiting=waiting,
        kv_use=kv_use,
        preemptions=0,
        generated_tokens=0,
        tokens_per_second=0.0,
        steps=0,
    )


def places(fixed: int | None = None, *, at_first: int = 8, num_replicas: int = 1) -> Places:
    return Places(fixed, at_first=at_first, num_replicas=num_replicas)


class Holders:
    """Rollouts 0, 1, ... that ask in this order and keep their places until they are ended."""

    def __init__(self, places: Places, number: int) -> None:
        self.running: list[int] = []
        self._ends = [asyncio.Event() for _ in range(number)]
        self._places = places
        self.tasks = [asyncio.create_task(self._hold(index)) for index in range(number)]

    async def _hold(self, index: int) -> None:
        async with self._places.take():
            self.running.append(index)
            await self._ends[index].wait()
            self.running.remove(index)

    async def end(self, *indices: int) -> None:
        for index in indices:
            self._ends[index].set()
        await ticks()


@on_event_loop
async def test_places_are_given_in_the_order_in_which_rollouts_asked():
    holders = Holders(places(2), 5)
    await ticks()
    assert holders.running == [0, 1]
    await cancel(holders.tasks[2])  # while it waits
    await holders.end(1)
    assert holders.running == [0, 3]
    holders.tasks[4].cancel()  # in the moment in which it gets a place
    await holders.end(0, 3)
    again = Holders(holders._places, 2)
    await ticks()
    assert again.running == [0, 1]


@on_event_loop
async def test_a_fuller_cache_ends_no_rollout_but_starts_no_further_one():
    shared = places(at_first=8)
    holders = Holders(shared, 20)
    await ticks()
    assert len(holders.running) == 8
    shared.observe({"r": stats(4, waiting=4, kv_use=1.0)}, {"r": True})
    assert (shared.limit, len(holders.running)) == (1, 8)  # young rollouts will use even more
    await holders.end(*range(7))
    assert holders.running == [7]
    await holders.end(7)
    assert holders.running == [8]


@on_event_loop
async def test_room_in_the_caches_starts_more_rollouts_only_as_others_end():
    shared = places(at_first=8)
    holders = Holders(shared, 100)
    await ticks()
    for _ in range(10):
        shared.observe({"r": stats(8, kv_use=0.1)}, {"r": True})
    assert len(holders.running) == 8  # nothing is known yet of their length
    for index in range(20):
        await holders.end(index)
        shared.observe({"r": stats(8, kv_use=0.1)}, {"r": True})
        await ticks()
    assert len(holders.running) > 20


@on_event_loop
async def test_the_limit_follows_replicas_that_die_pause_or_drain():
    shared = places(at_first=8, num_replicas=3)
    holders = Holders(shared, 24)
    await ticks()
    full = {name: stats(8, kv_use=0.95) for name in "abc"}
    shared.observe(full, dict.fromkeys("abc", True))
    each = shared.limit / 3
    shared.observe({"a": full["a"]}, {"a": True, "b": False, "c": False})
    assert shared.limit / 3 == pytest.approx(each, abs=1)  # b and c come back
    shared.observe({"a": stats(8, waiting=16, kv_use=0.95)}, {"a": True})
    assert shared.limit == pytest.approx(each, abs=1)
    before = shared.limit
    shared.observe({"a": stats(0, kv_use=0.0)}, {"a": True})
    shared.observe({}, {})
    assert shared.limit == before
    assert len(holders.running) == 24


@on_event_loop
async def test_one_rollout_runs_even_if_it_alone_overflows_the_cache():
    shared = places(at_first=1)
    holders = Holders(shared, 3)
    await ticks()
    for _ in range(20):
        shared.observe({"r": stats(1, waiting=1, kv_use=1.0)}, {"r": True})
    assert shared.limit == 1
    await holders.end(0)
    assert holders.running == [1]


@on_virtual_clock
async def test_a_rollout_keeps_its_place_in_tool_calls_and_its_time_begins_with_it():
    envs: list[CountingEnv] = []
    most = 0

    class Slow(CountingEnv):
        async def step(self, completion):
            await asyncio.sleep(4.0)
            return await super().step(completion)

    def make(problem):
        nonlocal most
        envs.append(Slow(turns=2))
        most = max(most, sum("close" not in env.calls for env in envs))
        return envs[-1]

    async def generate(request):
        await asyncio.sleep(1.0)
        return complete(request, (11,))

    rollouter = Rollouter(
        generate=generate,
        environment=make,
        config=config(rollout_timeout_s=12.0),
        places=places(2),
    )
    task = asyncio.create_task(rollouter.run_group("g", PROBLEM, size=6, seed=0))
    await asyncio.sleep(0.5)
    phases = [one.phase for one in rollouter.activities()]
    assert phases == [Phase.GENERATION] * 2 + [Phase.PLACE] * 4
    evaluated = await rollouter.run_group("v", PROBLEM, size=1, seed=0, generate=generate)
    assert "place" not in evaluated.rollouts[0].phase_s  # evaluation needs no place
    rollouts = (await task).rollouts
    assert {one.status for one in rollouts} == {RolloutStatus.COMPLETED}
    assert [one.phase_s.get("place", 0.0) for one in rollouts] == [0.0, 0.0, 10.0, 10.0, 20.0, 20.0]
    assert most == 3  # two, and that of the evaluation


@on_virtual_clock
async def test_the_number_of_rollouts_rises_until_the_caches_are_full():
    workload = draw_workload("lognormal", rollouts=600, turns=1)

    async def rate(fixed: int | None) -> dict[str, float]:
        speeds = KvSpeeds(cache_tokens=6144, max_running=256)
        router = GeneratorRouter([KvReplica(f"r{i}", speeds) for i in range(2)])
        return await run_workload(router, workload, places(fixed, at_first=64, num_replicas=2))

    automatic, fixed, many = await rate(None), await rate(128), await rate(512)
    best = max(fixed["whole_tokens_per_second"], many["whole_tokens_per_second"])
    assert automatic["whole_tokens_per_second"] > 0.97 * best
    assert automatic["preemptions_per_rollout"] < 0.1
    assert automatic["waiting_mean"] < many["waiting_mean"] / 10
