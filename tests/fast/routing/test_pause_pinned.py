"""A pause that leaves pinned replicas to their pins."""

from __future__ import annotations

import asyncio

from tests.support.async_tests import on_virtual_clock
from tests.support.far_replica import FarReplica, connected
from tests.support.replicas import request
from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.routing.router import GeneratorRouter


@on_virtual_clock
async def test_pinned_requests_go_on_through_a_pause_and_all_others_are_cut_and_continued() -> None:
    replicas = [FarReplica(f"r{n}", engine=ScriptedEngine()) for n in range(2)]
    router = GeneratorRouter(connected(replicas), request_timeout_s=50.0)
    async with router.pin() as pin:
        pinned = asyncio.create_task(pin.generate(request("pinned", max_tokens=60)))
        ordinary = [
            asyncio.create_task(router.generate(request(f"q{n}", max_tokens=60))) for n in range(4)
        ]
        await asyncio.sleep(1.05)
        on_their_way = [
            asyncio.create_task(router.generate(request(f"late{n}", max_tokens=200)))
            for n in range(4)
        ]
        await asyncio.sleep(0)
        await router.pause("abort", pinned=False)
        left = [set(replica.engine.generated_lengths()) for replica in replicas]
        assert left == [{"pinned"}, set()]
        new = asyncio.create_task(router.generate(request("new", max_tokens=5)))
        during = await pin.generate(request("during", max_tokens=10))
        assert len(during.token_ids) == 10
        assert len((await pinned).token_ids) == 60
        await asyncio.sleep(1000.0)
        assert pin.active_time.paused_s() == 0
        assert router.active_time.is_paused
        assert not any(task.done() for task in [*ordinary, new, *on_their_way])
        await router.resume()
        done = await asyncio.gather(*ordinary, new, *on_their_way)
        assert [len(one.token_ids) for one in done] == [60] * 4 + [5] + [200] * 4
    accounts = (await router.account()).values()
    assert [account.unaccounted for account in accounts] == [0, 0]
    for replica in replicas:
        await replica.link.close()


@on_virtual_clock
async def test_a_pin_that_begins_during_such_a_pause_has_its_replica_go_on_alone() -> None:
    replicas = [FarReplica(f"r{n}", engine=ScriptedEngine()) for n in range(2)]
    router = GeneratorRouter(connected(replicas), request_timeout_s=50.0)
    await router.pause("abort", pinned=False)
    async with router.pin() as pin:
        other = asyncio.create_task(router.generate(request("other", max_tokens=3)))
        assert len((await pin.generate(request("pinned", max_tokens=3))).token_ids) == 3
        assert not other.done()
        await router.resume()
        assert len((await other).token_ids) == 3
    for replica in replicas:
        await replica.link.close()
