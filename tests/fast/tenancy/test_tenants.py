"""Two runs on the engines of one server, over its HTTP routes: scripted engines whose tokens tell
which run's adapter, and which version of it, sampled them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save

from tests.support.async_tests import on_event_loop
from tests.support.loop_replica import loop_replica
from tests.support.scripted_engine import ScriptedEngine, scripted_token
from torchtitan_rl.config.lora import LoraConfig, TenantSlots, adapter_shapes, read_slot
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.errors import InvalidRequestError, ReplicaError
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.loop import EngineLoop, LoopConfig
from torchtitan_rl.generation.decision import SoloChannel
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.tenancy import server
from torchtitan_rl.tenancy.client import ServedPeer
from torchtitan_rl.types import Completion, GenerationRequest, Progress, SamplingParams
from torchtitan_rl.weights.distribution import SharedMemoryHandle

POLICY = Path(__file__).parents[3] / "experiments" / "alphabet_sort" / "policy"
LORA = LoraConfig(rank=1, target_modules=("q_proj",))
SHAPES = adapter_shapes(read_architecture(POLICY), LORA)
VOCAB = 1000


def adapter(mark: int) -> bytes:
    """An uploaded adapter, whose scripted tokens are those of version ``mark``."""
    return save({name: torch.full(shape, float(mark)) for name, shape in SHAPES.items()})


class SharedEngine(ScriptedEngine):
    """Has what was published as ``contents[version]`` in its slots from that pull on."""

    def __init__(self, contents: dict[int, Mapping[str, torch.Tensor]]) -> None:
        super().__init__(max_running=16, step_delay_s=0.001)
        self._contents = contents
        self._slots: dict[int, tuple[int, int]] = {}  # the version published, and its mark

    def swap_weights(self, version: int) -> None:
        super().swap_weights(version)
        slot, lora, tensors = read_slot(self._contents[version])
        assert lora == LORA
        self._slots[slot] = version, int(next(iter(tensors.values())).flatten()[0])

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        if request.adapter:
            slot, _, published = request.adapter.partition("@")
            if self._slots.get(int(slot), (0, 0))[0] != int(published):
                raise InvalidRequestError(f"there is no adapter {request.adapter!r}")
        super().add_request(request, arrival_s=arrival_s)

    def _sample(self, state: Any) -> Any:
        own, slot = self.version, state.request.adapter.partition("@")[0]
        self.version = self._slots[int(slot)][1] if slot else 0
        try:
            return super()._sample(state)
        finally:
            self.version = own


class Server:
    """Serves two tenants by two engines. `fails`: the next requests that get no answer."""

    def __init__(self) -> None:
        self.contents: dict[int, Mapping[str, torch.Tensor]] = {}
        self.fails = 0
        self.is_down = False
        loops = [
            EngineLoop(
                SharedEngine(self.contents),
                SoloChannel(),
                is_leader=True,
                config=LoopConfig(
                    name=name,
                    progress_interval_s=0.01,
                    kv_policy=KvPolicy(reset_prefix_cache=False, recompute_running=False),
                ),
            )
            for name in ("r0", "r1")
        ]
        for loop in loops:
            loop.start()
        self.replicas = [loop_replica(f"r{n}", loop) for n, loop in enumerate(loops)]
        self.router = GeneratorRouter(self.replicas)
        self.tenants = server.Tenants(
            self.router,
            self._publish,
            slots=TenantSlots(number=2, rank=8),
            policy_dir=POLICY,
            policy=read_architecture(POLICY),
            max_model_len=256,
        )
        self.app = EndpointApp(FastAPI(), EndpointConfig(), keys=Keys(api="key"), commands=self)

    async def _publish(self, tensors: Mapping[str, torch.Tensor]) -> int:
        version = self.router.newest_version + 1
        self.contents[version] = tensors
        handle = SharedMemoryHandle(version=version, path="", num_bytes=1)
        await self.router.sync_weights(handle, mode="hot_swap")
        return version

    async def command(self, name: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self.tenants.handlers()[name](arguments)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As an httpx transport: loses answers after the server has taken the request."""
        if self.is_down:
            raise httpx.ConnectError("refused")
        answer = await httpx.ASGITransport(self.app).handle_async_request(request)
        if self.fails:
            self.fails -= 1
            raise httpx.ReadError("connection lost")
        return answer

    async def aclose(self) -> None: ...


class Peer(ServedPeer):
    """Reaches a `Server` in this process."""

    def __init__(self, there: Server, tenant: str, **options: Any) -> None:
        options = {"owner": tenant, "policy": policy_digest(POLICY), "lora": LORA} | options
        super().__init__(
            tenant, "http://there/v1", tenant=tenant, **{"max_model_len": 256} | options
        )
        headers = {**self._http.headers, "Authorization": "Bearer key"}
        self._http = httpx.AsyncClient(
            transport=there, base_url="http://there/v1/", headers=headers, timeout=None
        )


@asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr("torchtitan_rl.tenancy.client._PAUSE_S", 0.01)
    monkeypatch.setattr("torchtitan_rl.tenancy.client._read", published)
    there = Server()
    async with there.tenants:
        yield there
    await there.router.close()


@asynccontextmanager
async def run_of(there: Server, tenant: str, **options: Any) -> AsyncIterator[GeneratorRouter]:
    peer = Peer(there, tenant, **options)
    await peer.start()
    router = GeneratorRouter([ConnectedReplica(peer)], sync_timeout_s=20.0)
    yield router
    await router.close()


BASE = {"a": 1000, "b": 2000}  # its version v samples as a scripted engine of version BASE + v


def published(handle: SharedMemoryHandle) -> bytes:
    return adapter(BASE[handle.path] + handle.version)


def handle(tenant: str, version: int) -> SharedMemoryHandle:
    return SharedMemoryHandle(version=version, path=tenant, num_bytes=1)


def request(name: str, rng: random.Random) -> GenerationRequest:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20)))
    sampling = SamplingParams(
        max_tokens=rng.randint(1, 120), top_p=rng.choice([1.0, 0.9]), num_logprobs=rng.choice([0, 2])
    )
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def check(request: GenerationRequest, done: Completion, tenant: str) -> None:
    """Each token is what its version of its run's adapter samples."""
    tokens = request.prompt_token_ids
    assert len(done.versions) == len(done.token_ids)
    for token, logprob, version in zip(done.token_ids, done.logprobs, done.versions, strict=True):
        mark = BASE[tenant] + version if version else 0
        expected = scripted_token(tokens, seed=None, version=mark, vocab_size=VOCAB)
        assert (token, logprob) == expected, (request.request_id, version)
        tokens += (token,)


async def train(router: GeneratorRouter, tenant: str, rng: random.Random) -> set[int]:
    """Requests, syncs, pauses and aborts at random. Returns the versions of all tokens."""
    versions = set[int]()

    async def roll_out(number: int) -> None:
        asked = request(f"{number}", rng)
        progress: list[Progress] = []
        await asyncio.sleep(rng.uniform(0, 0.4))
        done = await router.generate(asked, progress.append)
        check(asked, done, tenant)
        told = tuple(token for one in progress for token in one.token_ids)
        assert told == done.token_ids[: len(told)]
        if asked.sampling.top_p < 1.0 and done.token_ids:
            assert done.kept_tokens
        versions.update(done.versions)

    async def learn() -> None:
        for version in range(1, 5):
            await asyncio.sleep(rng.uniform(0, 0.1))
            await router.sync_weights(handle(tenant, version), mode="hot_swap")
            if rng.random() < 0.5:
                await router.pause(rng.choice(["keep", "abort", "wait"]))
                await asyncio.sleep(rng.uniform(0, 0.05))
                await router.resume()
            if rng.random() < 0.5:
                await router.abort([str(rng.randrange(40))])
            assert {one.unaccounted for one in (await router.account()).values()} == {0}

    await asyncio.gather(learn(), *map(roll_out, range(40)))
    account = (await router.account())[tenant]
    assert (account.unaccounted, account.running) == (0, 0)
    assert account.sampled == account.received > 0
    return versions


@on_event_loop
async def check_two_runs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    async with serving(monkeypatch) as there:
        async with run_of(there, "a") as one, run_of(there, "b") as two:
            runs = [train(one, "a", rng), train(two, "b", rng), lose(there, rng)]
            first, second, _ = await asyncio.gather(*runs)
            assert len(first | second) > 2
            assert there.tenants.gauges()["tenants"] == 2
        assert there.tenants.gauges() == {"tenants": 0}


async def lose(there: Server, rng: random.Random) -> None:
    for _ in range(8):
        await asyncio.sleep(rng.uniform(0, 0.05))
        there.fails += 1


@pytest.mark.parametrize("seed", range(3))
def test_each_token_is_of_its_runs_adapter_in_the_noted_version(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With lost answers, too: what is sent again is not taken twice."""
    check_two_runs(monkeypatch, seed)
