"""The number of replicas changes while requests run and weights are loaded."""

from __future__ import annotations

import asyncio

import pytest

from tests.fast.orchestration.runs import live, require_nothing_lost
from tests.fast.routing.test_restarts import Machine
from tests.support.replicas import GatedReplica, handle, request, settle
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import ConfigError, ReplicaError
from torchtitan_rl.failures import Part
from torchtitan_rl.routing.replicas import Phase


def names(*given: str):
    """What plans the replicas of these names."""
    return lambda missing: given[:missing]


def test_replicas_are_added_and_serve_once_they_hold_the_newest_weights_and_are_proven():
    async def play():
        machine = Machine("replica0")
        await machine.router.sync_weights(handle(7), mode="hot_swap")
        async with machine.restarting() as restarts:
            shown = await restarts.scale(3, names("replica1", "replica2"))
            assert shown == "3 replicas: replica0, replica1, replica2"
            assert machine.router.versions() == dict.fromkeys(machine.replicas, 7)
            assert machine.said == [
                f"replica{n} is added: answers as replica0 does at version 7" for n in (1, 2)
            ]
            done = await asyncio.gather(
                *(machine.router.generate(request(f"r{n}", min_version=7)) for n in range(9))
            )
            assert {one.replica for one in done} == set(machine.replicas)
            machine.kill("replica2")  # it is started again as those of the plan are
            await settle()
            assert machine.starts[-1] == ("replica2", "replica2-2")

    run_virtually(play())


def test_requests_that_wait_in_an_engine_continue_on_a_replica_that_is_added():
    async def play():
        machine = Machine("replica0")
        crowded = machine.replicas["replica0"]
        crowded.lets_probes_pass, crowded.places = True, 2
        async with machine.restarting() as restarts:
            crowded.gate.clear()
            running = [
                asyncio.create_task(
                    machine.router.generate(request(f"r{n}", session=f"s{n}", prompt=f"p{n // 2}"))
                )
                for n in range(8)
            ]
            await settle()
            await restarts.scale(2, names("replica1"))
            await settle()
            assert machine.replicas["replica1"].served[1:] == [f"r{n}#1" for n in range(4, 8)]
            assert crowded.aborted == [f"r{n}" for n in range(4, 8)]
            await restarts.scale(3, names("replica2"))
            await settle()
            assert crowded.running == 2  # those that its engine runs
            crowded.gate.set()
            await asyncio.gather(*running)
            crowded.places = 8  # what runs stays where it is
            crowded.gate.clear()
            more = [
                asyncio.create_task(machine.router.generate(request(f"q{n}"))) for n in range(9)
            ]
            await settle()
            num_cut = len(crowded.aborted)
            await restarts.scale(4, names("replica3"))
            await settle()
            assert len(crowded.aborted) == num_cut
            crowded.gate.set()
            await asyncio.gather(*more)

    run_virtually(play())


def test_what_runs_on_a_replica_that_leaves_continues_elsewhere_and_sessions_move():
    async def play():
        machine = Machine("replica0", "replica1", "replica2")
        async with machine.restarting() as restarts:
            for one in machine.replicas.values():
                one.gate.clear()
            running = [
                asyncio.create_task(machine.router.generate(request(f"r{n}", session=f"s{n}")))
                for n in range(6)
            ]
            await settle()
            scaling = asyncio.create_task(restarts.scale(1, names()))
            await settle()
            last = machine.replicas["replica0"]
            last.gate.set()
            done = await asyncio.gather(*running)
            assert {one.replica for one in done} == {"replica0"}
            assert {len(one.token_ids) for one in done} == {4}
            assert await scaling == "1 replica: replica0"
            assert [one.is_closed for one in machine.replicas.values()] == [False, True, True]
            last.served.clear()
            await asyncio.gather(
                *(machine.router.generate(request(f"q{n}", session=f"s{n}")) for n in range(6))
            )
            assert len(last.served) == 6
            accounts = await machine.router.account()
            assert {one.unaccounted for one in accounts.values()} == {0, None}
            left = [accounts[name] for name in ("replica1", "replica2")]
            assert [(one.sampled, one.lost) for one in left] == [(0, 0), (0, 0)]
        assert machine.router.states() == {"replica0": Phase.SERVING}
        assert machine.failures == []

    run_virtually(play())


def test_numbers_are_refused_and_nothing_changes():
    async def play():
        machine = Machine("replica0", "replica1", reserved=("replica1",))

        def no_room(missing):
            raise ConfigError("no free device")

        async with machine.restarting(reserved=("replica1",)) as restarts:
            for number, plan, why in (
                (0, names(), "give at least 2"),
                (1, names(), "give at least 2, because the last one is reserved for evaluation"),
                (3, no_room, "no free device"),
            ):
                with pytest.raises(ConfigError, match=why):
                    await restarts.scale(number, plan)
            assert await restarts.scale(2, names()) == "2 replicas: replica0, replica1"
        with pytest.raises(ConfigError, match="the run is ending"):
            await restarts.scale(2, names())
        assert not any(one.is_closed for one in machine.replicas.values())

    run_virtually(play())


def test_a_replica_that_does_not_start_is_an_error_and_the_others_serve():
    async def play():
        machine = Machine("replica0")
        machine.num_broken = 1
        async with machine.restarting() as restarts:
            with pytest.raises(ReplicaError) as raised:
                await restarts.scale(3, names("replica1", "replica2"))
            assert str(raised.value) == (
                "replica1 did not start: replica1 does not start; "
                "the run has 2 replicas: replica0, replica2"
            )
            machine.tokens = [8]  # it answers otherwise than replica0
            with pytest.raises(ReplicaError, match="answers a greedy probe otherwise"):
                await restarts.scale(3, names("replica3"))
            assert machine.replicas["replica3"].is_closed
            await settle()
        assert machine.router.versions().keys() == {"replica0", "replica2"}

    run_virtually(play())


def test_restarts_end_first_so_that_lost_replicas_count():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting() as restarts:
            machine.can_start.clear()
            machine.kill("replica1")
            await settle()
            scaling = asyncio.create_task(restarts.scale(2, names("replica2")))
            await settle()
            assert restarts.waits_for == "replicas that start"
            machine.can_start.set()
            assert await scaling == "2 replicas: replica0, replica1-2"

    run_virtually(play())


def test_a_replica_that_dies_while_it_leaves_is_reported_and_not_started_again():
    async def play():
        machine = Machine("replica0", "replica1")
        machine.replicas["replica1"].gate.clear()
        async with machine.restarting() as restarts, machine.router.pin() as pin:
            assert pin.replica == "replica0"
            async with machine.router.pin():  # it has to serve this pin first
                scaling = asyncio.create_task(restarts.scale(1, names()))
                await settle()
                assert restarts.waits_for == "replica1 to leave"
                machine.kill("replica1")
                await settle()
            assert await scaling == "1 replica: replica0"
            assert machine.replicas["replica1"].is_closed
            await settle()
        (failure,) = machine.failures
        assert (failure.part, failure.name) == (Part.REPLICA, "replica1")
        assert failure.given_up == "it was about to leave"
        assert machine.starts == []

    run_virtually(play())


def test_one_that_is_pinned_stays_until_its_pin_ends_and_gets_no_other():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting() as restarts, machine.router.pin() as pin:
            other = {"replica0": "replica1", "replica1": "replica0"}[pin.replica]
            assert await restarts.scale(1, names()) == f"1 replica: {pin.replica}"
            assert machine.replicas[other].is_closed
            await restarts.scale(2, names("replica2"))
            async with machine.router.pin() as second:
                scaling = asyncio.create_task(restarts.scale(1, names()))
                await settle()
                done = await second.generate(request("evaluation"))
                assert done.replica == second.replica == "replica2"
                assert not machine.replicas["replica2"].is_closed
            await settle()
            assert scaling.done()

    run_virtually(play())


@pytest.mark.parametrize(
    ("mode", "during_step"), [("hot_swap", "running"), ("drain", "running"), ("drain", "aborted")]
)
def test_whenever_a_run_has_1_then_3_then_1_replicas_nothing_is_lost(tmp_path, mode, during_step):
    """At moments all over its steps and weight syncs; the parts of the simulation check tokens,
    versions and ages."""
    plan = Plan(
        num_steps=5,
        staleness=1,
        replicas=1,
        restarts=1,
        restart_s=2.0,
        mode=mode,
        during_step=during_step,
        train_s=3.0,
    )
    moved = 0  # requests
    for number in range(6):
        shown: list[str] = []

        def prepare(simulation: Simulation, after_s=1.7 * number, shown=shown) -> None:
            async def change() -> None:
                async with simulation.restarting():
                    await asyncio.sleep(after_s)
                    shown.append(await simulation.scale(3))
                    await asyncio.sleep(after_s)
                    shown.append(await simulation.scale(1))
                    await asyncio.Event().wait()

            simulation.changes = asyncio.create_task(change())

        simulation, error = live(plan, tmp_path / f"{number}", prepare=prepare)
        simulation.changes.cancel()
        assert error is None
        assert shown == ["3 replicas: r0, r1, r2", "1 replica: r0"]
        require_nothing_lost(simulation)
        left = simulation.replicas[1:]
        assert all(one.is_dead and one.requested and not one.lost for one in left)
        assert simulation.recorder.accounts[-1].sampled == sum(
            one.sampled for one in simulation.replicas
        )
        moved += sum("#" in name for name in simulation.requested)
    assert moved > 2


def test_a_replica_that_is_lost_during_the_change_is_told():
    async def play():
        machine = Machine("replica0", "replica1")
        start, may_start = machine.start, asyncio.Event()

        async def start_new_ones(lost: str, name: str) -> GatedReplica:
            await (may_start if lost == name else asyncio.Event()).wait()
            return await start(lost, name)

        machine.start = start_new_ones
        async with machine.restarting() as restarts:
            scaling = asyncio.create_task(restarts.scale(3, names("replica2")))
            await settle()
            machine.kill("replica1")
            may_start.set()
            with pytest.raises(ReplicaError, match="lost meanwhile; the run has 2 replicas"):
                await scaling

    run_virtually(play())
