"""Two replicas and an endpoint in processes of their own, under a router and all that disturbs it.

``python -m tests.real.replicas_scenario DIR`` prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.real.endpoint_pulls_scenario import pulled_endpoint, spawn_endpoint
from tests.real.models import hf_tensors, tiny_model
from tests.real.router_scenario import (
    NUM_PULLS,
    Ended,
    disturbed,
    killed,
    pinned,
    requests,
    spawn,
)
from torchtitan_rl.backends.monarch.runtime import supervise
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.weights.shm import SharedMemoryPublisher


async def scenario(root: Path) -> dict[str, Any]:
    supervise()
    tiny_model(root / "model", tied=True, seed=0)
    tensors = dict(hf_tensors(root / "model"))
    publisher = SharedMemoryPublisher("replicas-scenario", root)
    endpoint = await spawn_endpoint(root)
    replicas = [await spawn(root, index) for index in range(2)]
    ended = Ended()
    router = GeneratorRouter(replicas, request_timeout_s=300.0, on_ended=ended)
    try:
        await asyncio.gather(endpoint.start(), *(replica.peer.start() for replica in replicas))
        alone = await asyncio.gather(*(router.generate(item) for item in requests()))
        seen = await disturbed(router, publisher, tensors)
        done = seen.pop("done")
        seen |= {
            "num_done": len(done),
            "num_equal": sum(done[one.request_id].token_ids == one.token_ids for one in alone),
            "replicas": sorted({one.replica for one in done.values()}),
        }
        pin = await pinned(router, publisher, tensors)
        accounts = (await router.account()).values()
        seen |= {
            "states": sorted(router.states().values()),
            "outstanding": sum(router.outstanding_tokens().values()),
            "sampled": sum(account.sampled for account in accounts),
            "known": ended.tokens,
            "not_returned": ended.not_returned,
        }
        return {
            "disturbed": seen,
            "pin": pin,
            "endpoint": await pulled_endpoint(
                endpoint, router, publisher, tensors, first=NUM_PULLS + 2
            ),
            "killed": await killed(router, list(alone)),
        }
    finally:
        await asyncio.gather(endpoint.close(), router.close())
        publisher.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(scenario(Path(sys.argv[1])))))
