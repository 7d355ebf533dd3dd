"""16 greedy requests on two replicas, while weights are pulled 6 times and all replicas are
emptied 3 times; a pin; a killed replica: parts of `replicas_scenario`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil

from tests.real.runs import printing_to
from torchtitan_rl.backends.monarch.generator import MonarchReplica, spawn_replica
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Progress,
    SamplingParams,
)
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.shm import SharedMemoryPublisher

NUM_PULLS, NUM_REQUESTS = 6, 16
MAX_MODEL_LEN = 1024
WAIT_S = 300.0


async def spawn(root: Path, index: int) -> MonarchReplica:
    spec = GeneratorSpec(
        name=f"replica{index}",
        model=root / "model",
        device="cpu",
        dtype="float32",
        seed=index,
        generator=GeneratorConfig(max_model_len=MAX_MODEL_LEN, kv_cache_bytes=32 << 20),
        weight_sync=WeightSyncConfig(),
        log_dir=root,
        trace_dir=None,
    )
    group = ProcessGroup(name=spec.name, ranks=1, threads=1)
    return await spawn_replica(group, spec)


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"r{n}",
            prompt_token_ids=tuple(40 + (7 * n + i) % 97 for i in range(4 + 6 * n)),
            sampling=SamplingParams(max_tokens=100 + 2 * n, temperature=0.0, ignore_eos=True),
            session_id=f"s{n % 16}",
        )
        for n in range(NUM_REQUESTS)
    ]


def request_to_cancel(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"cancelled{number}",
        prompt_token_ids=(40, 41, number),
        sampling=SamplingParams(max_tokens=900, ignore_eos=True),
    )


class Ended:
    """How many tokens ended requests had, and how many of them were returned to no caller."""

    def __init__(self) -> None:
        self.tokens = self.not_returned = 0

    def __call__(self, request: GenerationRequest, known: Completion, is_returned: bool) -> None:
        self.tokens += len(known.token_ids)
        self.not_returned += not is_returned


class Heard:
    """What callers were told of their requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.versions: dict[str, tuple[int, ...]] = {}
        self.gaps = self.messages = 0

    def hear(self, progress: Progress) -> None:
        tokens = self.tokens.setdefault(progress.request_id, [])
        self.messages += 1
        self.gaps += progress.start != len(tokens)
        tokens += progress.token_ids
        so_far = Completion(
            request_id="",
            token_ids=tuple(tokens),
            logprobs=(),
            version_runs=progress.version_runs,
            finish_reason=FinishReason.ABORT,
        )
        self.versions[progress.request_id] = so_far.versions

    def fits(self, done: Completion) -> bool:
        count = len(self.tokens[done.request_id])
        return (
            tuple(self.tokens[done.request_id]) == done.token_ids[:count]
            and self.versions[done.request_id] == done.versions[:count]
        )


async def disturbed(
    router: GeneratorRouter, publisher: SharedMemoryPublisher, tensors: Any
) -> dict[str, Any]:
    heard = Heard()
    calls = [asyncio.create_task(router.generate(item, heard.hear)) for item in requests()]
    partials: dict[str, Completion] = {}
    lagging = 0
    unaccounted: list[int | None] = []
    for version in range(1, NUM_PULLS + 1):
        cancelled = asyncio.create_task(router.generate(request_to_cancel(version)))
        await asyncio.sleep(0.05)
        handle = await asyncio.to_thread(publisher.publish, version, tensors)
        partials |= await router.partials()
        cancelled.cancel()
        unaccounted += [account.unaccounted for account in (await router.account()).values()]
        if version % 2:
            await router.pause(mode="abort")
        report = await router.sync_weights(
            handle, mode="hot_swap", order="one_by_one", lag_timeout_s=120.0
        )
        lagging += len(report.lagging)
        await router.resume()
    done = {one.request_id: one for one in await asyncio.gather(*calls)}
    unaccounted += [account.unaccounted for account in (await router.account()).values()]
    return {
        "done": done,
        "unaccounted": unaccounted,
        "lagging": lagging,
        "num_boundaries": sum(len(one.version_runs) - 1 for one in done.values()),
        "partials_fit": all(
            part.token_ids == done[name].token_ids[: len(part.token_ids)]
            and part.versions == done[name].versions[: len(part.token_ids)]
            for name, part in partials.items()
            if name in done  # and not cancelled
        ),
        "heard_fits": all(heard.fits(one) for one in done.values()),
        "gaps": heard.gaps,
        "messages": heard.messages,
        "unheard": sum(len(one.token_ids) - len(heard.tokens[name]) for name, one in done.items()),
        "partial_tokens": sum(len(part.token_ids) for part in partials.values()),
    }


async def pinned(
    router: GeneratorRouter, publisher: SharedMemoryPublisher, tensors: Any
) -> dict[str, Any]:
    async with router.pin() as pin:
        handle = await asyncio.to_thread(publisher.publish, NUM_PULLS + 1, tensors)
        report = await router.sync_weights(handle, mode="hot_swap")
        done = await pin.generate(requests()[0])
        seen = {
            "version": pin.version,
            "sampled_under": sorted(set(done.versions)),
            "is_held": report.held == (pin.replica,),
            "others": sorted(router.versions().values()),
        }
    async with asyncio.timeout(WAIT_S):
        while set(router.versions().values()) != {NUM_PULLS + 1}:
            await asyncio.sleep(0.05)
    return seen | {"after": sorted(router.versions().values())}


async def killed(router: GeneratorRouter, alone: list[Completion]) -> dict[str, Any]:
    """Streams whose replica is killed halfway."""
    heard = Heard()
    calls = [asyncio.create_task(router.generate(item, heard.hear)) for item in requests()]
    while min(len(heard.tokens.get(one.request_id, ())) for one in alone) < 10:
        await asyncio.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        if printing_to(process) == "replica0-rank0.log":
            process.kill()
    done = {one.request_id: one for one in await asyncio.gather(*calls)}
    return {
        "num_equal": sum(done[one.request_id].token_ids == one.token_ids for one in alone),
        "heard_fits": all(heard.fits(one) for one in done.values()),
        "gaps": heard.gaps,
        "replicas": sorted({one.replica for one in done.values()}),
        "states": router.states(),
    }
