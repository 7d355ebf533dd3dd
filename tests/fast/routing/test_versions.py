"""Policy versions: requests that want one, and syncs while requests run."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.async_tests import on_virtual_clock
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.errors import GenerationTimeoutError
from torchtitan_rl.routing.router import GeneratorRouter


@on_virtual_clock
async def test_a_drain_pulls_when_nothing_runs_and_holds_new_requests_meanwhile():
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


@on_virtual_clock
async def test_a_request_goes_only_to_replicas_that_hold_its_version():
    old, new = GatedReplica("old"), GatedReplica("new")
    old.stage_gate.clear()
    router = GeneratorRouter([old, new])
    await router.generate(request("a", session="s", prompt="p"))
    assert old.served == ["a"]
    report = await router.sync_weights(handle(1), mode="hot_swap", lag_timeout_s=0.01)
    assert report.lagging == ("old",)
    assert router.versions() == {"old": 0, "new": 1}
    for where in ({"prompt": "p"}, {"session": "s"}):  # as a sibling, and as a further turn
        fresh = await router.generate(request("b", min_version=1, **where))
        assert (fresh.replica, fresh.versions[0]) == ("new", 1)


@on_virtual_clock
async def test_a_request_for_a_version_that_nobody_holds_waits_for_it():
    replica = GatedReplica("r")
    router = GeneratorRouter([replica], request_timeout_s=5.0)
    waiting = asyncio.create_task(router.generate(request("a", min_version=2)))
    await router.sync_weights(handle(1), mode="hot_swap")
    await settle()
    assert replica.served == []
    await router.sync_weights(handle(2), mode="hot_swap")
    assert (await waiting).versions[0] == 2
    hasty = GeneratorRouter([replica], request_timeout_s=0.01)
    with pytest.raises(GenerationTimeoutError, match=r"at version 3 or newer.*\('serving', 0\)"):
        await hasty.generate(request("b", min_version=3))


@pytest.mark.parametrize(("other_s", "waited_s", "used"), [(1.5, 1.5, 2), (60.0, 2.0, 1)])
@on_virtual_clock
async def test_requests_give_other_replicas_as_long_as_the_first_one_took_to_pull(
    other_s, waited_s, used
):
    replicas = [GatedReplica(f"r{i}") for i in range(2)]
    router = GeneratorRouter(replicas)
    clock = asyncio.get_running_loop()
    for replica, gate_s in zip(replicas, (1.0, other_s), strict=True):
        replica.pull_gate.clear()
        clock.call_later(gate_s, replica.pull_gate.set)
    started_s = clock.time()
    sync = asyncio.create_task(router.sync_weights(handle(1), mode="hot_swap"))
    requests = [router.generate(request(str(i), min_version=1)) for i in range(8)]
    completions = await asyncio.gather(*requests)
    assert clock.time() - started_s == pytest.approx(waited_s)
    assert len({one.replica for one in completions}) == used
    await sync
