"""How weights reach replicas that are slow, lost, pinned or one after another."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_tests import on_event_loop
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.errors import ConfigError, GenerationError
from torchtitan_rl.routing.router import GeneratorRouter

SOON_S = 0.01


@on_event_loop
async def test_trap_4_the_newest_version_wins_and_everybody_who_waits_is_told():
    replica = GatedReplica("r")
    replica.stage_gate.clear()
    router = GeneratorRouter([replica])
    syncs = [
        asyncio.create_task(router.sync_weights(handle(version), mode="hot_swap"))
        for version in (1, 2, 3)
    ]
    await settle()
    replica.stage_gate.set()
    reports = await asyncio.gather(*syncs)
    assert replica.pulled[-1] == 3
    assert 2 not in replica.staged
    assert [report.version for report in reports] == [1, 2, 3]
    assert router.newest_version == 3
    await router.sync_weights(handle(2), mode="hot_swap")
    assert router.versions() == {"r": 3}


@on_event_loop
async def test_a_lagging_replica_whose_version_was_removed_takes_the_next_one():
    slow, fast = GatedReplica("slow"), GatedReplica("fast")
    slow.stage_gate.clear()
    router = GeneratorRouter([slow, fast])
    await router.sync_weights(handle(1), mode="hot_swap", lag_timeout_s=SOON_S)
    slow.unreadable.add(1)
    slow.stage_gate.set()  # it finds version 1 gone before version 2 is announced
    await settle()
    report = await router.sync_weights(handle(2), mode="hot_swap")
    assert report.lost == ()
    assert (slow.pulled, router.versions()["slow"]) == ([2], 2)


@pytest.mark.parametrize(("order", "at_once"), [("together", 3), ("one_by_one", 1)])
@on_event_loop
async def test_replicas_swap_in_the_order_that_was_asked_for(order, at_once):
    replicas = [GatedReplica(f"r{i}") for i in range(3)]
    for replica in replicas:
        replica.pull_gate.clear()
    router = GeneratorRouter(replicas)
    sync = asyncio.create_task(router.sync_weights(handle(1), mode="hot_swap", order=order))
    await settle()
    assert [len(replica.staged) for replica in replicas] == [1, 1, 1]
    assert sum(len(replica.pulled) for replica in replicas) == at_once
    for replica in replicas:
        replica.pull_gate.set()
    report = await sync
    assert len(report.pulls) == 3


@on_event_loop
async def test_a_pinned_replica_is_kept_out_of_pulls_and_catches_up_at_the_end():
    replicas = [GatedReplica(f"r{i}") for i in range(2)]
    router = GeneratorRouter(replicas)
    await router.sync_weights(handle(1), mode="hot_swap")
    async with router.pin() as pin:
        assert (pin.replica, pin.version) == ("r0", 1)
        report = await router.sync_weights(handle(2), mode="hot_swap")
        assert (report.held, report.lagging) == (("r0",), ())
        assert len(report.pulls) == 1
        assert router.versions() == {"r0": 1, "r1": 2}
        done = await pin.generate(request("a", min_version=1))
        assert (done.replica, set(done.versions)) == ("r0", {1})
        # Others still use it, where its version will do.
        assert (await router.generate(request("b"))).replica == "r0"
        assert (await router.generate(request("c", min_version=2))).replica == "r1"
        with pytest.raises(GenerationError, match="stays at 1"):
            await pin.generate(request("d", min_version=2))
    await settle()
    assert router.versions() == {"r0": 2, "r1": 2}
    with pytest.raises(GenerationError, match="has ended"):
        await pin.generate(request("e"))


@on_event_loop
async def test_a_pin_taken_during_a_fetch_keeps_the_version_it_found():
    replicas = [GatedReplica(f"r{i}") for i in range(2)]
    replicas[0].stage_gate.clear()
    router = GeneratorRouter(replicas)
    busy = asyncio.create_task(router.sync_weights(handle(1), mode="hot_swap"))
    replicas[1].pull_gate.clear()
    await settle()
    async with router.pin() as pin:
        assert (pin.replica, pin.version) == ("r0", 0)
        replicas[0].stage_gate.set()
        await settle()
        assert replicas[0].pulled == []
        replicas[1].pull_gate.set()
        assert (await busy).held == ("r0",)
    await settle()
    assert replicas[0].pulled == [1]


@on_event_loop
async def test_a_reserved_replica_serves_pins_alone_at_the_newest_version():
    shared, reserved = GatedReplica("shared"), GatedReplica("reserved")
    router = GeneratorRouter([shared, reserved], reserved=("reserved",))
    await asyncio.gather(*(router.generate(request(str(i))) for i in range(4)))
    await router.sync_weights(handle(3), mode="hot_swap")
    assert (reserved.served, reserved.pulled) == ([], [])
    async with router.pin() as pin:
        assert (pin.replica, pin.version) == ("reserved", 3)
    with pytest.raises(ConfigError, match="not all"):
        GeneratorRouter([shared], reserved=("shared",))


_EVENTS = ["sync", "pin", "end", "hold", "open", "kill"]


@settings(max_examples=30, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(0, 2)), max_size=25))
@on_event_loop
async def test_whatever_happens_versions_only_go_up_and_all_that_live_catch_up(events):
    replicas = [GatedReplica(f"r{i}") for i in range(4)]  # the last one never dies
    router = GeneratorRouter(replicas)
    syncs: list[asyncio.Task] = []
    pins: list = []
    for event, index in events:
        replica = replicas[index]
        before = router.versions()
        if event == "sync":
            new = handle(len(syncs) + 1)
            syncs.append(asyncio.create_task(router.sync_weights(new, mode="hot_swap")))
        elif event == "pin" and len(pins) < 3:
            context = router.pin()
            pins.append((context, asyncio.create_task(context.__aenter__())))
        elif event == "end" and pins and pins[0][1].done():
            await pins.pop(0)[0].__aexit__(None, None, None)
        elif event == "hold":
            replica.pull_gate.clear()
        elif event == "open":
            replica.pull_gate.set()
        elif event == "kill":
            replica.refuses_weights = True
        await settle()
        held = {pin.result().replica for _, pin in pins if pin.done()}
        for name, version in router.versions().items():
            assert version >= before[name]
            assert name not in held or version == before[name] or event == "pin"
    for replica in replicas:
        replica.pull_gate.set()
    for context, pin in pins:
        await pin
        await context.__aexit__(None, None, None)
    await asyncio.gather(*syncs)
    await settle()
    assert set(router.versions().values()) == {len(syncs)}
