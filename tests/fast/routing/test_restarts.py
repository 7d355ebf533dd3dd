"""Replicas that take the place of dead ones."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from tests.support.replicas import GatedReplica, handle, request, settle
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.aio import loop_s
from torchtitan_rl.errors import GenerationError, LoopStalledError, ReplicaError
from torchtitan_rl.failures import Failure, Part, Sign
from torchtitan_rl.generation.commands import ReadStats
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.restarts import EXPECTED_S, ReplicaRestarts
from torchtitan_rl.routing.router import GeneratorRouter


class Machine:
    """Starts replicas while it is not broken."""

    def __init__(self, *names: str, **options) -> None:
        self.replicas = {name: GatedReplica(name) for name in names}
        self.router = GeneratorRouter(list(self.replicas.values()), **options)
        self.said: list[str] = []
        self.can_start = asyncio.Event()
        self.can_start.set()
        self.num_broken = 0
        self.tokens: list[int] = []  # what the next new replicas sample, if not the usual
        self.starts: list[tuple[str, str]] = []  # in whose place, and the name
        self.failures: list[Failure] = []

    async def start(self, lost: str, name: str) -> GatedReplica:
        self.starts.append((lost, name))
        await self.can_start.wait()
        if self.num_broken:
            self.num_broken -= 1
            raise ReplicaError(f"{name} does not start")
        self.replicas[name] = GatedReplica(name)
        if self.tokens:
            self.replicas[name].token = self.tokens.pop(0)
        return self.replicas[name]

    def kill(self, name: str) -> None:
        self.replicas[name].is_dead = True
        self.router.give_up(lambda one: one == name, ReplicaError(f"{name} was killed"))

    @asynccontextmanager
    async def restarting(self, max_restarts: int = 2, **options):
        restarts = ReplicaRestarts(
            self.router,
            self.start,
            max_restarts=max_restarts,
            say=self.said.append,
            on_failure=self.failures.append,
            **options,
        )
        async with restarts:
            yield restarts


def test_a_replica_that_was_lost_is_closed_and_another_takes_its_place():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting():
            machine.kill("replica0")
            await settle()
        assert machine.replicas["replica0"].is_closed
        assert machine.router.states() == {
            "replica0": Phase.DEAD,
            "replica1": Phase.SERVING,
            "replica0-2": Phase.SERVING,
        }
        assert machine.said[-1] == (
            "replica0-2 takes the place of replica0: answers as replica1 does at version 0"
        )

    run_virtually(play())


def test_trap_13_a_new_replica_gets_no_request_before_it_has_the_newest_weights():
    async def play():
        machine = Machine("replica0", "replica1")
        await machine.router.sync_weights(handle(7), mode="hot_swap")
        late = GatedReplica("replica2")
        late.stage_gate.clear()
        joining = asyncio.create_task(machine.router.join(late))
        await settle()
        assert machine.router.states()["replica2"] is Phase.STARTING
        for number in range(4):
            await machine.router.generate(request(f"r{number}"))
        assert late.served == []
        late.stage_gate.set()
        await joining
        late.served.clear()
        assert machine.router.versions() == {"replica0": 7, "replica1": 7, "replica2": 7}
        machine.kill("replica0")
        machine.kill("replica1")
        await machine.router.generate(request("last", min_version=7))
        assert late.served == ["last"]

    run_virtually(play())


def test_a_new_replica_that_is_lost_while_a_crowded_one_is_asked_for_its_queue_is_started_again():
    async def play():
        machine = Machine("replica0", "replica1")
        crowded, answers = machine.replicas["replica1"], asyncio.Event()
        crowded.lets_probes_pass, crowded.places = True, 1
        answer = crowded.answer

        async def answer_late(command):
            if isinstance(command, ReadStats):
                await answers.wait()
            return await answer(command)

        crowded.answer = answer_late
        async with machine.restarting():
            crowded.gate.clear()
            machine.kill("replica0")
            running = [
                asyncio.create_task(machine.router.generate(request(f"r{n}"))) for n in range(4)
            ]
            await settle()
            assert machine.said[-1].startswith("replica0-2 takes the place of replica0")
            machine.kill("replica0-2")
            await settle()
            assert machine.starts[-1] == ("replica0-2", "replica0-3")
            answers.set()
            crowded.gate.set()
            await asyncio.gather(*running)

    run_virtually(play())


def test_requests_go_on_where_a_pull_came_between_two_probes():
    async def play():
        machine = Machine("replica0")
        busy, late = machine.replicas["replica0"], GatedReplica("replica1")
        busy.gate.clear()
        busy.lets_probes_pass = True
        running = asyncio.create_task(machine.router.generate(request("r")))
        await settle()
        late.version = 1  # the router has not heard of it yet
        shown = await machine.router.join(late)
        assert shown == "not compared, because of pauses or new weights during each attempt"
        assert busy.aborted == []
        busy.gate.set()
        await running

    run_virtually(play())


def test_a_new_replica_that_is_lost_in_its_last_probe_does_not_count_as_serving():
    async def play():
        machine = Machine("replica0")
        late, generate, answers = GatedReplica("replica1"), GatedReplica.generate, []
        late.version = 1  # the router has not heard of it: no answers can be compared

        async def die_at_last(*asked, **options):
            answers.append(asked)
            if len(answers) == 5:
                raise ReplicaError("replica1 was killed")
            return await generate(late, *asked, **options)

        late.generate = die_at_last
        with pytest.raises(ReplicaError, match="was killed"):
            await machine.router.join(late)
        assert machine.router.states()["replica1"] is Phase.DEAD

    run_virtually(play())


def test_where_no_other_replica_is_left_requests_and_syncs_wait_for_the_restart():
    async def play():
        machine = Machine("replica0")
        lost = asyncio.create_task(machine.router.wait_until_lost())
        async with machine.restarting():
            machine.can_start.clear()
            machine.kill("replica0")
            await settle()
            waiting = asyncio.create_task(machine.router.generate(request("r0")))
            syncing = asyncio.create_task(
                machine.router.sync_weights(handle(3), mode="hot_swap", lag_timeout_s=60.0)
            )
            await asyncio.sleep(100.0)
            assert not waiting.done()
            assert syncing.result().pulls == ()
            machine.can_start.set()
            await settle()
            assert (await waiting).replica == "replica0-2"
            assert machine.router.versions() == {"replica0-2": 3}
            assert not lost.done()
        lost.cancel()

    run_virtually(play())


def test_a_run_without_replicas_ends_when_the_restart_takes_too_long():
    async def play():
        machine = Machine("replica0")
        async with machine.restarting():
            machine.can_start.clear()
            machine.kill("replica0")
            lost = asyncio.create_task(machine.router.wait_until_lost())
            await asyncio.sleep(EXPECTED_S - 1)
            assert not lost.done()
            await asyncio.sleep(2)
            with pytest.raises(GenerationError, match="replica0 was killed"):
                lost.result()

    run_virtually(play())


def test_a_replica_that_does_not_stay_is_given_up():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting(max_restarts=2):
            for name in ("replica0", "replica0-2", "replica0-3"):
                machine.kill(name)
                await settle()
            assert "replica0-4" not in machine.replicas
            assert "is not started again" in machine.said[-1]

    run_virtually(play())


def test_a_start_that_fails_is_tried_again_and_then_given_up():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting(max_restarts=2):
            machine.num_broken = 1
            machine.kill("replica0")
            await asyncio.sleep(60.0)
            assert "replica0-3" in machine.replicas
            assert machine.starts == [("replica0", "replica0-2"), ("replica0-2", "replica0-3")]
            machine.num_broken = 100
            machine.kill("replica1")
            await asyncio.sleep(600.0)
            assert machine.num_broken == 98
            assert machine.said[-1] == "replica1 is given up: replica1-3 does not start"

    run_virtually(play())


def test_the_report_of_a_loss_has_all_its_seconds_and_the_tokens_that_are_sampled_again():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting():
            machine.can_start.clear()
            running = asyncio.create_task(machine.router.generate(request("r0")))
            machine.replicas["replica0"].gate.clear()
            await settle()
            machine.replicas["replica0"].sampled = 3  # counted by the engine, and never sent
            await machine.router.stats()
            stalled = LoopStalledError("no progress for 7 s")
            stalled.silent_s = 7.0
            machine.router.give_up(lambda name: name == "replica0", stalled)
            await running
            await asyncio.sleep(20.0)
            machine.can_start.set()
            await settle()
        (failure,) = machine.failures
        assert (failure.part, failure.name, failure.sign) == (
            Part.REPLICA,
            "replica0",
            Sign.STALLED,
        )
        assert (failure.silent_s, failure.restart_s, failure.serve_s) == (7.0, 20.0, 20.0)
        assert failure.tokens_again == 3
        assert failure.successor == "replica0-2"
        assert not failure.given_up

    run_virtually(play())


@pytest.mark.parametrize(("max_restarts", "why"), [(0, "disabled"), (1, "does not start")])
def test_a_loss_without_a_successor_is_reported_too(max_restarts, why):
    async def play():
        machine = Machine("replica0", "replica1")
        machine.num_broken = 9
        async with machine.restarting(max_restarts=max_restarts):
            machine.kill("replica0")
            await asyncio.sleep(600.0)
        (failure,) = machine.failures
        assert why in failure.given_up
        assert (failure.serve_s, failure.successor) == (None, "")

    run_virtually(play())


@pytest.mark.parametrize("moment", ["at once", "given up", "asks the host", "starts"])
def test_a_loss_is_reported_at_whatever_moment_of_the_restart_the_run_ends(moment):
    async def never(name: str) -> bool:
        await asyncio.Event().wait()
        return False

    async def play():
        machine = Machine("replica0", "replica1")
        options = {"is_alone": never} if moment == "asks the host" else {}
        if moment == "given up":
            options = {"max_restarts": 0}
        async with machine.restarting(**options):
            machine.can_start.clear()
            machine.kill("replica0")
            if moment in ("asks the host", "starts"):
                await settle()
        (failure,) = machine.failures
        is_given_up = moment == "given up"
        assert failure.given_up == (
            "restarts are disabled" if is_given_up else "the run ended first"
        )

    run_virtually(play())


def test_a_new_replica_that_answers_otherwise_is_closed_and_counts_as_one_that_did_not_start():
    async def play():
        machine = Machine("replica0", "replica1")
        machine.tokens = [8]
        async with machine.restarting(max_restarts=2):
            machine.kill("replica0")
            await asyncio.sleep(60.0)
            assert machine.replicas["replica0-2"].is_closed
            assert "answers a greedy probe otherwise at version 0: [8, " in machine.said[1]
            assert not any("probe" not in name for name in machine.replicas["replica0-2"].served)
            assert machine.router.states()["replica0-3"] is Phase.SERVING
            machine.tokens = [8, 8, 8]
            machine.kill("replica1")
            await asyncio.sleep(60.0)
        assert "replica1-4" not in machine.replicas
        first, second = machine.failures
        assert first.detail == "answers as replica1 does at version 0"
        assert "replica1-3 answers a greedy probe otherwise" in second.given_up

    run_virtually(play())


def test_a_new_replica_is_compared_with_one_that_is_alone_if_the_batch_may_be_the_cause():
    async def play():
        machine = Machine("replica0", "replica1")
        other = machine.replicas["replica1"]
        other.token_in_batch = 9
        other.gate.clear()
        async with machine.restarting():
            machine.can_start.clear()
            machine.kill("replica0")
            running = asyncio.create_task(machine.router.generate(request("r0")))
            await settle()
            other.lets_probes_pass = True
            machine.can_start.set()
            await settle()
            assert "answers as replica1 does" in machine.said[-1]
            assert machine.failures[0].serve_s is not None
            assert len(other.aborted) == 1  # the request, which continues
            other.gate.set()
            assert len((await running).token_ids) == 4
            assert machine.router.states()["replica1"] is Phase.SERVING

    run_virtually(play())


def test_a_new_replica_gets_no_request_before_it_has_answered_like_another():
    async def play():
        machine = Machine("replica0", "replica1")
        machine.replicas["replica1"].gate.clear()  # it is busy
        async with machine.restarting():
            machine.kill("replica0")
            await settle()
            waiting = [
                asyncio.create_task(machine.router.generate(request(f"r{n}"))) for n in range(9)
            ]
            await settle()
            new = machine.replicas["replica0-2"]
            assert all("probe" in name for name in new.served)
            assert machine.router.unreserved() == {"replica1": True, "replica0-2": False}
            machine.replicas["replica1"].gate.set()
            await asyncio.gather(*waiting)
            await settle()
            assert machine.router.unreserved() == {"replica1": True, "replica0-2": True}
            accounts = await machine.router.account()
            assert [one.unaccounted for one in accounts.values()] == [None, 0, 0]

    run_virtually(play())


def test_the_only_replica_is_not_compared_and_serves():
    async def play():
        machine = Machine("replica0")
        async with machine.restarting():
            machine.kill("replica0")
            await settle()
            assert (await machine.router.generate(request("r0"))).replica == "replica0-2"
        assert "no other replica holds version 0" in machine.said[-1]

    run_virtually(play())


def test_a_probe_that_new_weights_or_a_pause_disturb_is_repeated():
    async def play():
        machine = Machine("replica0", "replica1")
        other = machine.replicas["replica1"]
        async with machine.restarting():
            other.gate.clear()
            machine.kill("replica0")
            await settle()
            await machine.router.sync_weights(handle(3), mode="hot_swap")
            await machine.router.pause("abort")
            await settle()
            await machine.router.resume()
            other.gate.set()
            await asyncio.sleep(60.0)
        assert machine.said[-1].endswith("answers as replica1 does at version 3")

    run_virtually(play())


@pytest.mark.parametrize("shares_devices", [True, False])
def test_all_replicas_that_are_lost_during_a_pause_return_after_it(shares_devices):
    """The sync before its end does not wait for them, because they wait for that end."""

    async def play():
        machine = Machine("replica0")
        router = machine.router
        async with machine.restarting(shares_devices=shares_devices):
            await (router.sleep() if shares_devices else router.pause("abort"))
            machine.kill("replica0")
            await settle()
            if shares_devices:
                await router.wake_up()
            async with asyncio.timeout(1.0):
                await router.sync_weights(handle(1), mode="hot_swap")
            await router.resume()
            await asyncio.sleep(60.0)
            assert router.versions() == {"replica0-2": 1}

    run_virtually(play())


def test_on_shared_devices_no_engine_starts_while_the_trainer_has_them():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting(shares_devices=True):
            await machine.router.sleep()
            machine.kill("replica0")
            await settle()
            assert machine.starts == []
            await machine.router.wake_up()
            await machine.router.sync_weights(handle(1), mode="hot_swap")
            machine.can_start.clear()
            await machine.router.resume()
            await settle()
            assert len(machine.starts) == 1
            asleep = asyncio.create_task(machine.router.sleep())
            await asyncio.sleep(60.0)
            assert not asleep.done()
            machine.can_start.set()
            await asleep
            assert machine.said[-1].endswith("answers as replica1 does at version 1")
            assert machine.replicas["replica0-2"].stops  # it sleeps, too

    run_virtually(play())


def test_an_unforeseen_error_counts_as_a_failed_start_and_pauses_between_these_double():
    async def play():
        machine = Machine("replica0", "replica1")
        started_s: list[float] = []

        async def fail(lost: str, name: str) -> GatedReplica:
            started_s.append(loop_s())
            raise ValueError("not foreseen")

        machine.start = fail
        async with machine.restarting(max_restarts=9):
            machine.kill("replica0")
            await asyncio.sleep(3600)
            (failure,) = machine.failures
            assert failure.given_up == "ValueError: not foreseen"
            assert machine.said[-1] == "replica0 is given up: ValueError: not foreseen"
            pauses = [round(b - a) for a, b in itertools.pairwise(started_s)]
            assert pauses == [5, 10, 20, 40, 80, 160, 320, 320]

    run_virtually(play())
