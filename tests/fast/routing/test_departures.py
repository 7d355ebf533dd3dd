"""Replicas leave a host that is about to end, and are started again when it is back."""

from __future__ import annotations

import asyncio

import pytest

from tests.fast.orchestration.runs import live, require_nothing_lost
from tests.fast.routing.test_restarts import Machine
from tests.support.replicas import handle, request, settle
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import ConfigError, GenerationError
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.restarts import EXPECTED_S


def no_more(missing: int) -> list[str]:
    raise ConfigError("no free device")


def test_what_runs_there_continues_elsewhere_and_the_replica_returns_with_its_host():
    async def play():
        machine = Machine("replica0", "replica1")
        await machine.router.sync_weights(handle(3), mode="hot_swap")
        async with machine.restarting() as restarts:
            machine.can_start.clear()  # the host is away
            for one in machine.replicas.values():
                one.gate.clear()
            running = [
                asyncio.create_task(machine.router.generate(request(f"r{n}", session=f"s{n}")))
                for n in range(6)
            ]
            await settle()
            assert machine.replicas["replica1"].running == 3
            await restarts.vacate(lambda name: name == "replica1")
            assert machine.replicas["replica1"].is_closed
            assert len(machine.replicas["replica1"].aborted) == 3
            assert machine.router.states() == {"replica0": Phase.SERVING}
            machine.replicas["replica0"].gate.set()
            done = await asyncio.gather(*running)
            assert {(one.replica, len(one.token_ids)) for one in done} == {("replica0", 4)}
            account = (await machine.router.account())["replica1"]
            assert (account.sampled, account.lost) == (0, 0)
            assert machine.said == ["replica1 has left"]
            await asyncio.sleep(1000.0)
            machine.can_start.set()
            await settle()
            assert machine.router.versions() == {"replica0": 3, "replica1-2": 3}
            assert machine.starts == [("replica1", "replica1-2")]
            assert machine.said[-1] == (
                "replica1-2 takes the place of replica1: answers as replica0 does at version 3"
            )
        assert machine.failures == []

    run_virtually(play())


def test_requests_and_syncs_wait_if_all_replicas_were_there_as_long_as_after_a_loss():
    async def play(away_s: float):
        machine = Machine("replica0", "replica1", keeps_requests=True, request_timeout_s=1e4)
        async with machine.restarting() as restarts:
            machine.can_start.clear()
            lost = asyncio.create_task(machine.router.wait_until_lost())
            running = asyncio.create_task(machine.router.generate(request("r0")))
            machine.replicas["replica0"].gate.clear()
            await settle()
            async with machine.router.pin() as pin:  # a long evaluation is finished there
                leaving = asyncio.create_task(restarts.vacate(lambda name: True))
                await asyncio.sleep(2 * EXPECTED_S)
                assert machine.router.versions().keys() == {pin.replica}
            await leaving
            await asyncio.sleep(away_s)
            if away_s > EXPECTED_S:
                with pytest.raises(GenerationError, match="replica0: has left; replica1: has left"):
                    lost.result()
                running.cancel()
                return
            assert not lost.done()
            machine.can_start.set()
            assert (await running).replica in ("replica0-2", "replica1-2")
            await settle()
            assert machine.router.versions().keys() == {"replica0-2", "replica1-2"}
            lost.cancel()

    run_virtually(play(EXPECTED_S - 1.0))
    run_virtually(play(EXPECTED_S + 1.0))


def test_a_replica_that_is_lost_before_it_has_left_is_reported_and_started_once():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting() as restarts, machine.router.pin() as pin:
            leaving = asyncio.create_task(restarts.vacate(lambda name: name == pin.replica))
            await settle()
            machine.kill(pin.replica)
            await leaving
            await settle()
            assert machine.starts == [(pin.replica, f"{pin.replica}-2")]
        (failure,) = machine.failures
        assert failure.name == pin.replica
        assert not failure.given_up

    run_virtually(play())


def test_a_replica_whose_host_is_lost_while_it_is_closed_returns_too():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting() as restarts:
            machine.replicas["replica1"].close = lambda: asyncio.sleep(30.0)
            leaving = asyncio.create_task(restarts.vacate(lambda name: name == "replica1"))
            await settle()
            leaving.cancel()
            machine.kill("replica1")
            await asyncio.sleep(100.0)
            assert machine.router.versions().keys() == {"replica0", "replica1-2"}
            assert machine.starts == [("replica1", "replica1-2")]

    run_virtually(play())


def test_one_that_scaling_removes_does_not_return_and_one_that_joins_does():
    async def play():
        machine = Machine("replica0", "replica1", "replica2")
        await machine.router.sync_weights(handle(3), mode="hot_swap")
        async with machine.restarting() as restarts, machine.router.pin(), machine.router.pin():
            async with machine.router.pin() as pin:
                assert pin.replica == "replica2"
                scaling = asyncio.create_task(restarts.scale(2, no_more))
                await settle()
                leaving = asyncio.create_task(restarts.vacate(lambda name: name == "replica2"))
                await settle()
                assert not leaving.done()
            await asyncio.gather(leaving, scaling)
            machine.can_start.clear()
            machine.kill("replica1")
            await settle()
            machine.can_start.set()
            machine.replicas["replica0"].gate.clear()  # the new one waits for an answer of it
            await settle()
            assert machine.router.states()["replica1-2"] is not Phase.DEAD
            machine.can_start.clear()
            await restarts.vacate(lambda name: name.startswith("replica1"))
            assert machine.router.versions().keys() == {"replica0"}
            await asyncio.sleep(60.0)
            machine.can_start.set()
            machine.replicas["replica0"].gate.set()
            await settle()
            assert machine.router.versions().keys() == {"replica0", "replica1-3"}
            assert not any(lost.startswith("replica2") for lost, _ in machine.starts)

    run_virtually(play())


def test_a_replica_that_a_pause_has_emptied_leaves_before_the_pause_ends():
    async def play():
        machine = Machine("replica0", "replica1")
        async with machine.restarting(max_restarts=0) as restarts:
            machine.replicas["replica1"].gate.clear()
            running = [
                asyncio.create_task(machine.router.generate(request(f"r{n}"))) for n in range(2)
            ]
            await settle()
            await machine.router.pause("abort")
            await restarts.vacate(lambda name: name == "replica1")
            assert machine.replicas["replica1"].is_closed
            await machine.router.resume()
            assert {one.replica for one in await asyncio.gather(*running)} == {"replica0"}
            await machine.router.pause("keep")
            leaving = asyncio.create_task(restarts.vacate(lambda name: True))
            await settle()
            assert not machine.replicas["replica0"].is_closed
            await machine.router.resume()
            await leaving
            assert machine.replicas["replica0"].is_closed
        assert machine.starts == []  # restarts are disabled

    run_virtually(play())


@pytest.mark.parametrize(
    ("mode", "during_step", "replicas"),
    [
        ("hot_swap", "running", 2),
        ("drain", "aborted", 2),
        ("drain", "running", 1),
    ],
)
def test_whenever_the_notice_comes_no_token_is_lost(tmp_path, mode, during_step, replicas):
    """At moments all over the steps and weight syncs of a run, whose host is back soon; the parts
    of the simulation check tokens, versions and ages."""
    plan = Plan(
        num_steps=5,
        staleness=1,
        replicas=replicas,
        restarts=1,
        restart_s=2.0,
        mode=mode,
        during_step=during_step,
        train_s=3.0,
    )
    moved = 0  # requests
    for number in range(5):
        left: list[float] = []  # moments

        def prepare(simulation: Simulation, number=number, left=left) -> None:
            async def notify() -> None:
                async with simulation.restarting() as restarts:
                    for of_run in range(2):
                        await asyncio.sleep(0.6 * number + 2.0 * of_run)
                        for _ in range(number):  # between two events of the same moment, too
                            await asyncio.sleep(0)
                        await restarts.vacate(lambda replica: replica.startswith("r0"))
                        left.append(asyncio.get_running_loop().time())
                    await asyncio.Event().wait()

            simulation.changes = asyncio.create_task(notify())

        simulation, error = live(plan, tmp_path / f"{number}", prepare=prepare)
        simulation.changes.cancel()
        assert error is None
        require_nothing_lost(simulation)
        assert not any(one.lost for one in simulation.replicas)
        assert left
        moved += sum("#" in name for name in simulation.requested)
    assert moved > 2
