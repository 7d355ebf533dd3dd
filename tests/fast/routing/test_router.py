from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.far_replica import FarReplica, connected
from tests.support.replicas import GatedReplica, handle, request, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import (
    DeadlineError,
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.generation.commands import EngineCommand, Pause, Resume
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import (
    EngineReading,
    Progress,
    VersionRun,
)


def test_turns_of_a_session_go_to_one_replica():
    async def scenario():
        replicas = [GatedReplica(f"r{i}") for i in range(3)]
        router = GeneratorRouter(replicas)
        for turn in range(4):
            for session in "abc":
                await router.generate(request(f"{session}{turn}", session=session))
        homes = {
            session: [r.name for r in replicas if f"{session}0" in r.served] for session in "abc"
        }
        for session, (home,) in homes.items():
            served = next(r.served for r in replicas if r.name == home)
            assert all(f"{session}{turn}" in served for turn in range(4))

    asyncio.run(scenario())


def test_new_sessions_spread_by_outstanding_tokens():
    async def scenario():
        replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(2)]
        router = GeneratorRouter(replicas)
        big = asyncio.create_task(router.generate(request("big", max_tokens=100)))
        await settle()
        small = [asyncio.create_task(router.generate(request(f"s{i}"))) for i in range(5)]
        await settle()
        assert replicas[0].served == ["big"]
        assert len(replicas[1].served) == 5
        for replica in replicas:
            replica.gate.set()
        await asyncio.gather(big, *small)
        assert router.outstanding_tokens() == {"r0": 0, "r1": 0}

    asyncio.run(scenario())


def test_a_request_that_loses_its_replica_runs_on_another():
    async def scenario():
        dead, alive = GatedReplica("dead"), GatedReplica("alive")
        dead.is_dead = True
        router = GeneratorRouter([dead, alive])
        completion = await router.generate(request("a"))
        assert completion.replica == "alive"
        assert router.states() == {"dead": ReplicaState.DEAD, "alive": ReplicaState.SERVING}

    asyncio.run(scenario())


def test_with_no_replica_left_requests_fail_and_say_why():
    async def scenario():
        replica = GatedReplica("only")
        replica.is_dead = True
        router = GeneratorRouter([replica])
        for _ in range(2):
            with pytest.raises(GenerationError, match="only: ReplicaError: only is dead"):
                await router.generate(request("a"))

    asyncio.run(scenario())


def test_a_request_past_its_deadline_is_aborted_on_its_replica():
    async def scenario():
        replica = GatedReplica("slow", is_open=False)
        router = GeneratorRouter([replica], request_timeout_s=0.01)
        with pytest.raises(GenerationTimeoutError, match="a was not completed by replica slow"):
            await router.generate(request("a"))
        assert replica.aborted == ["a"]
        assert router.outstanding_tokens() == {"slow": 0}

    asyncio.run(scenario())


def test_trap_12_load_is_released_when_the_caller_is_cancelled():
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica])
        task = asyncio.create_task(router.generate(request("a")))
        await settle()
        assert router.outstanding_tokens()["r"] == 8
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.outstanding_tokens()["r"] == 0
        assert replica.aborted == ["a"]

    asyncio.run(scenario())


def test_a_hot_swap_pulls_while_requests_run():
    async def scenario():
        replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(2)]
        router = GeneratorRouter(replicas)
        running = [asyncio.create_task(router.generate(request(str(i)))) for i in range(4)]
        await settle()
        report = await router.sync_weights(handle(1), mode="hot_swap")
        assert [r.running_at_pull for r in replicas] == [[2], [2]]
        assert report.version == 1
        assert report.lost == ()
        for replica in replicas:
            replica.gate.set()
        await asyncio.gather(*running)

    asyncio.run(scenario())


def test_a_drain_pulls_when_nothing_runs_and_holds_new_requests_meanwhile():
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica])
        old = asyncio.create_task(router.generate(request("old")))
        await settle()
        sync = asyncio.create_task(router.sync_weights(handle(1), mode="drain"))
        await settle()
        new = asyncio.create_task(router.generate(request("new")))
        await settle()
        assert replica.served == ["old"]
        assert replica.running_at_pull == []
        replica.gate.set()
        await asyncio.gather(old, sync, new)
        assert replica.running_at_pull == [0]
        assert (await old).versions == (0,) * 4
        assert (await new).versions == (1,) * 4

    asyncio.run(scenario())


def test_a_replica_that_cannot_follow_a_sync_serves_no_more():
    async def scenario():
        stuck, good = GatedReplica("stuck"), GatedReplica("good")
        stuck.refuses_weights = True
        router = GeneratorRouter([stuck, good])
        report = await router.sync_weights(handle(1), mode="hot_swap")
        assert report.lost == ("stuck",)
        completions = [await router.generate(request(str(i))) for i in range(4)]
        assert {c.replica for c in completions} == {"good"}
        good.refuses_weights = True
        with pytest.raises(WeightSyncError, match="no replica holds version 2"):
            await router.sync_weights(handle(2), mode="hot_swap")

    asyncio.run(scenario())


def test_close_fails_requests_and_syncs_that_wait_for_a_replica():
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica])
        running = asyncio.create_task(router.generate(request("old")))
        await settle()
        sync = asyncio.create_task(router.sync_weights(handle(1), mode="drain"))
        await settle()
        waiting = asyncio.create_task(router.generate(request("new")))
        await settle()
        await router.close()
        with pytest.raises(GenerationError, match="router is closed"):
            await waiting
        with pytest.raises(WeightSyncError, match="router is closed"):
            await sync
        replica.gate.set()
        await running
        assert replica.is_closed
        assert replica.running_at_pull == []

    asyncio.run(scenario())


def test_a_request_goes_only_to_replicas_that_hold_its_version():
    async def scenario():
        old, new = GatedReplica("old"), GatedReplica("new")
        old.stage_gate.clear()
        router = GeneratorRouter([old, new])
        await router.generate(request("a", session="s"))
        assert old.served == ["a"]
        report = await router.sync_weights(handle(1), mode="hot_swap", lag_timeout_s=0.01)
        assert report.lagging == ("old",)
        assert router.versions() == {"old": 0, "new": 1}
        fresh = await router.generate(request("b", session="s", min_version=1))
        assert (fresh.replica, fresh.versions[0]) == ("new", 1)

    asyncio.run(scenario())


def test_a_request_for_a_version_that_nobody_holds_waits_for_it():
    async def scenario():
        replica = GatedReplica("r")
        router = GeneratorRouter([replica], request_timeout_s=5.0)
        waiting = asyncio.create_task(router.generate(request("a", min_version=2)))
        await router.sync_weights(handle(1), mode="hot_swap")
        await settle()
        assert replica.served == []
        await router.sync_weights(handle(2), mode="hot_swap")
        assert (await waiting).versions[0] == 2
        hasty = GeneratorRouter([replica], request_timeout_s=0.01)
        with pytest.raises(
            GenerationTimeoutError, match=r"at version 3 or newer.*\('serving', 0\)"
        ):
            await hasty.generate(request("b", min_version=3))

    asyncio.run(scenario())


def test_trap_10_an_id_that_is_still_running_is_refused_and_not_run_twice():
    async def scenario():
        replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(2)]
        router = GeneratorRouter(replicas)
        first = asyncio.create_task(router.generate(request("a")))
        await settle()
        with pytest.raises(InvalidRequestError, match="still outstanding"):
            await router.generate(request("a"))
        for replica in replicas:
            replica.gate.set()
        await first
        assert (await router.generate(request("a"))).request_id == "a"

    asyncio.run(scenario())


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["call", "cancel", "kill", "open"]), st.integers(0, 3)),
        max_size=30,
    )
)
def test_load_is_zero_once_every_call_has_ended(events):
    async def scenario():
        replicas = [GatedReplica(f"r{i}", is_open=False) for i in range(4)]
        router = GeneratorRouter(replicas)
        calls: list[asyncio.Task] = []
        for number, (event, index) in enumerate(events):
            if event == "call":
                calls.append(asyncio.create_task(router.generate(request(str(number)))))
            elif event == "cancel" and calls:
                calls[index % len(calls)].cancel()
            elif event == "kill":
                replicas[index].is_dead = True
                replicas[index].gate.set()
            elif event == "open":
                replicas[index].gate.set()
            await settle()
        for replica in replicas:
            replica.gate.set()
        for call in calls:
            try:
                await call
            except (GenerationError, asyncio.CancelledError):
                continue
        assert set(router.outstanding_tokens().values()) == {0}

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_drain_does_not_wait_for_what_queues_at_a_replica_that_a_pause_emptied(mode):
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica])
        queued = asyncio.create_task(router.generate(request("a")))
        await settle()
        await router.pause(mode=mode)
        await router.sync_weights(handle(1), mode="drain")
        await router.resume()
        assert replica.stops == [Pause(mode), Resume()]
        replica.gate.set()
        await queued

    asyncio.run(scenario())


def test_a_drain_waits_while_requests_are_frozen():
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica], sync_timeout_s=0.01)
        running = asyncio.create_task(router.generate(request("a")))
        await settle()
        await router.pause(mode="keep")
        report = await router.sync_weights(handle(1), mode="drain", lag_timeout_s=0.05)
        assert (report.lagging, report.lost, replica.pulled) == (("r",), (), [])
        await router.resume()
        replica.gate.set()
        await running
        await router.wait_for_version(1)

    asyncio.run(scenario())


def test_a_pause_that_waits_waits_for_deadlines_and_loses_no_replica():
    async def scenario():
        router = GeneratorRouter(connected([FarReplica("r", step_s=1.0)]), request_timeout_s=10.0)
        call = asyncio.create_task(router.generate(request("a", max_tokens=400)))
        await asyncio.sleep(0.5)
        await router.pause(mode="wait")
        with pytest.raises(GenerationTimeoutError, match="within its 10 s"):
            await call
        assert router.states() == {"r": ReplicaState.SERVING}
        await router.resume()
        await router.generate(request("b"))
        await router.close()

    run_virtually(scenario())


@pytest.mark.parametrize("stop", ["keep", "abort", "sleep"])
@pytest.mark.parametrize("is_running", [True, False])
def test_a_deadline_counts_only_time_in_which_the_request_could_run(stop, is_running):
    async def scenario():
        replica = GatedReplica("r", is_open=False)
        router = GeneratorRouter([replica], request_timeout_s=10.0)
        if is_running:
            call = asyncio.create_task(router.generate(request("a")))
            await asyncio.sleep(4.0)
        await (router.sleep() if stop == "sleep" else router.pause(mode=stop))
        if not is_running:
            call = asyncio.create_task(router.generate(request("a")))
            await settle()
        await asyncio.sleep(5000.0)
        assert not call.done()
        if stop == "sleep":
            await router.wake_up()
            await router.sync_weights(handle(1), mode="hot_swap")
        await router.resume()
        resumed_s = asyncio.get_running_loop().time()
        with pytest.raises(
            GenerationTimeoutError, match=r"within its 10 s \(and 5000 s of pauses\)"
        ):
            await call
        took_s = asyncio.get_running_loop().time() - resumed_s
        assert took_s == pytest.approx(6.0 if is_running else 10.0)

    run_virtually(scenario())


def test_a_replica_that_cannot_pause_is_dead_and_the_others_go_on():
    async def scenario():
        stuck, good = GatedReplica("stuck"), GatedReplica("good")

        async def lost(command: EngineCommand[Any]) -> None:
            raise ReplicaError(f"stuck cannot {command}")

        stuck.answer = lost  # type: ignore[method-assign]
        router = GeneratorRouter([stuck, good])
        await router.pause(mode="keep")
        await router.resume()
        assert router.states()["stuck"] is ReplicaState.DEAD
        assert (await router.generate(request("a"))).replica == "good"

    asyncio.run(scenario())


def test_a_lost_replica_costs_only_the_tokens_since_they_were_last_read():
    class Reporting(GatedReplica):
        """Reports two tokens when it is read."""

        async def generate(self, request, on_progress=None, *, streams=False):
            self.on_progress = on_progress
            return await super().generate(request, on_progress, streams=streams)

        async def answer(self, command: EngineCommand[Any]) -> EngineReading:
            self.on_progress(
                Progress(
                    request_id="a",
                    start=0,
                    token_ids=(5, 6),
                    logprobs=(-1.0, -2.0),
                    version_runs=(VersionRun(0, 0),),
                )
            )
            return EngineReading(sampled_tokens=2, running_tokens=2)

    async def scenario():
        dying, other = Reporting("dying", is_open=False), GatedReplica("other")
        router = GeneratorRouter([dying, other])
        call = asyncio.create_task(router.generate(request("a", max_tokens=4)))
        await settle()
        assert (await router.partials())["a"].token_ids == (5, 6)
        dying.is_dead = True
        dying.gate.set()
        done = await call
        assert (done.request_id, done.token_ids) == ("a", (5, 6, 7, 7))
        assert other.served == ["a#1"]

    asyncio.run(scenario())


def test_trap_11_a_replica_whose_reading_fails_is_dead_and_the_others_are_read():
    class Unreadable(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            raise ReplicaError("it died while idle")

    class Slow(GatedReplica):
        async def answer(self, command: EngineCommand[Any]) -> Any:
            raise DeadlineError("busy")

    async def scenario():
        router = GeneratorRouter([Unreadable("dead"), Slow("slow"), GatedReplica("well")])
        assert set(await router.stats()) == {"well"}
        assert router.states() == {
            "dead": ReplicaState.DEAD,
            "slow": ReplicaState.SERVING,
            "well": ReplicaState.SERVING,
        }

    asyncio.run(scenario())


def test_a_wait_for_a_version_that_does_not_come_ends_and_says_what_there_is():
    async def scenario():
        router = GeneratorRouter([GatedReplica("r")])
        with pytest.raises(DeadlineError, match=r"no replica held version 3.*'r': 0"):
            await router.wait_for_version(3, timeout_s=0.01)

    asyncio.run(scenario())
