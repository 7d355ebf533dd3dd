"""Pauses of a vLLM engine, part of `vllm_scenarios`: what requests looked like, and became."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

from tests.support.loop_replica import loop_replica
from torchtitan_rl.generation.commands import Pause, ReadTokens, Resume
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.continuation import PartialTokens
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, GenerationRequest, Progress
from torchtitan_rl.weights.distribution import SharedMemoryHandle

WAIT_S = 120.0
FREEZE_STEP = 12
ROUNDS = 10


def frozen(loop: EngineLoop, engine: Any, requests: list[GenerationRequest]) -> dict[str, Any]:
    """On rank 0: freeze with KV in mid-flight, read, empty by abort, go on with the last one."""
    is_paused = threading.Event()
    seen: dict[str, Any] = {}

    def pause() -> None:
        seen["acknowledged"] = loop.execute(Pause("keep"))
        is_paused.set()

    engine.triggers = {FREEZE_STEP: pause}
    partials = {item.request_id: PartialTokens(item) for item in requests}

    def hear(batch: tuple[Progress, ...]) -> None:
        for progress in batch:
            partials[progress.request_id].add_progress(progress)

    futures = {}
    for item in requests:
        partials[item.request_id].start_piece(item.request_id)
        futures[item.request_id] = loop.submit(item, hear)
    loop.start()
    assert is_paused.wait(WAIT_S)
    seen.pop("acknowledged").result(WAIT_S)
    loop.execute(ReadTokens()).result(WAIT_S)
    seen["partials"] = {name: partial.partial for name, partial in partials.items()}
    seen["steps-while-paused"] = engine.steps
    loop.execute(Resume())
    seen["done"] = {name: future.result(WAIT_S) for name, future in futures.items()}

    engine.steps = 0
    engine.triggers = {FREEZE_STEP: lambda: seen.update(ack=loop.execute(Pause("abort")))}
    cut = loop.submit(replace(requests[0], request_id="cut"))
    seen["cut"] = cut.result(WAIT_S)
    seen.pop("ack").result(WAIT_S)
    seen["unfinished"] = engine.num_unfinished()
    loop.execute(Resume())
    return seen


def paused_by_abort(loop: EngineLoop, requests: list[GenerationRequest]) -> dict[str, Any]:
    """Requests through the router, whose engine is emptied, and pulls, ten times."""

    async def scenario() -> dict[str, Any]:
        loop.start()
        router = GeneratorRouter([loop_replica("r", loop)])
        calls = [asyncio.create_task(router.generate(item)) for item in requests]
        partials: list[dict[str, Completion]] = []
        versions = [0]
        for number in range(ROUNDS):
            await asyncio.sleep(0.03)
            running = asyncio.create_task(router.partials())
            await router.pause(mode="abort")
            partials += [await running, await router.partials()]
            version = 2 * number + 2  # even versions are the same weights
            handle = SharedMemoryHandle(version=version, path="", num_bytes=0)
            mode = "drain" if number % 2 else "hot_swap"
            await router.sync_weights(handle, mode=mode)  # type: ignore[arg-type]
            versions.append(version)
            await router.resume()
        done = await asyncio.gather(*calls)
        longest = max(requests, key=lambda item: item.sampling.max_tokens)
        known = partials[1][longest.request_id]  # at the first pause
        resumed = await router.generate(replace(longest, resume_from=known))
        await router.close()
        return {"done": done, "partials": partials, "versions": versions, "resumed": resumed}

    return asyncio.run(scenario())
