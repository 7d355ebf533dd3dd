"""Waiting is cheap however many wait, and nobody who could go on is left waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from tests.support.async_tests import on_virtual_clock
from tests.support.replicas import GatedReplica, handle, request, settle
from torchtitan_rl.routing.clock import Condition, Wakeups
from torchtitan_rl.routing.router import GeneratorRouter


class CountedWakeups(Wakeups):
    """Counts the checks of conditions that tasks wait for, and the tasks that went on."""

    num_checks = num_wakes = 0

    async def once(self, condition: Condition, key: Hashable, future: asyncio.Future[None]) -> None:
        def counted() -> bool:
            self.num_checks += 1
            return condition()

        await super().once(counted, key, future)
        self.num_wakes += 1


@on_virtual_clock
async def test_what_a_change_costs_does_not_grow_with_the_requests_that_wait() -> None:
    """1,024 wait for a version while 1,024 others end: each change is one check, not one each."""
    replica = GatedReplica("r", is_open=False)
    router = GeneratorRouter([replica])
    wakeups = router._pool.wakeups = CountedWakeups()
    running = [asyncio.create_task(router.generate(request(f"old{n}"))) for n in range(1024)]
    await settle()
    waiting = [
        asyncio.create_task(router.generate(request(f"new{n}", min_version=1))) for n in range(1024)
    ]
    await settle()
    before = wakeups.num_checks
    for task in running:  # one after another, each a change of its own
        task.cancel()
        await settle()
    assert wakeups.num_checks - before <= 1024
    assert wakeups.num_wakes == 0
    replica.gate.set()
    await router.sync_weights(handle(1), mode="hot_swap")
    done = await asyncio.gather(*waiting)
    assert [one.request_id for one in done] == [f"new{n}" for n in range(1024)]
    assert wakeups.num_wakes <= 1024 + 2
    assert replica.served[1024:] == [f"new{n}" for n in range(1024)]  # in order


@on_virtual_clock
async def test_an_abort_wakes_the_request_that_waits_and_no_other() -> None:
    router = GeneratorRouter([GatedReplica("r")])
    wakeups = router._pool.wakeups = CountedWakeups()
    await router.pause("keep")
    tasks = {name: asyncio.create_task(router.generate(request(name))) for name in ("a", "b", "c")}
    await settle()
    await router.abort(["b"])
    assert (await tasks["b"]).token_ids == ()
    assert wakeups.num_wakes == 1
    assert not tasks["a"].done()
    await router.resume()
    await asyncio.gather(*tasks.values())
