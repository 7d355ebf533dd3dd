"""Two runs on the engines of one server, over its HTTP routes: scripted engines whose tokens tell
which run's adapter, and which version of it, sampled them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save

from tests.support.async_tests import on_event_loop
from tests.support.loop_replica import loop_replica
from tests.support.scripted_engine import ScriptedEngine, scripted_token
from torchtitan_rl.channel import Call, End
from torchtitan_rl.config.lora import LoraConfig, TenantSlots, adapter_shapes, read_slot
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.errors import (
    GenerationError,
    InvalidRequestError,
    OutputError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.generation import commands
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.tenancy import messages, server
from torchtitan_rl.tenancy.client import OWNER_FILE, ServedPeer, owner_of
from torchtitan_rl.tenancy.tenant import Tenant
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    FinishReason,
    GenerationRequest,
    Progress,
    PullReport,
    SamplingParams,
)
from torchtitan_rl.weights.distribution import SharedMemoryHandle, WeightDistribution

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
                None,
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
            if self.fails % 2:
                return httpx.Response(503)  # of a proxy
            raise httpx.ReadError("connection lost")
        return answer

    async def aclose(self) -> None: ...


class Peer(ServedPeer):
    """Reaches a `Server` in this process."""

    def __init__(self, there: Server, tenant: str, **options: Any) -> None:
        self.weights = WeightDistribution({}, fan_out=0)
        own = {"owner": tenant, "policy": policy_digest(POLICY), "lora": LORA}
        options = {**own, "weights": self.weights, **options}
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
        max_tokens=rng.randint(1, 120),
        top_p=rng.choice([1.0, 0.9]),
        num_logprobs=rng.choice([0, 2]),
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
        there.fails += 2


@pytest.mark.parametrize("seed", range(3))
def test_each_token_is_of_its_runs_adapter_in_the_noted_version(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With lost answers, too: what is sent again is not taken twice."""
    check_two_runs(monkeypatch, seed)


@on_event_loop
async def test_running_requests_continue_at_once_under_a_pulled_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        asked = GenerationRequest(
            request_id="long", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=200)
        )
        first = asyncio.Event()
        call = asyncio.create_task(router.generate(asked, lambda _: first.set()))
        await first.wait()
        await router.sync_weights(handle("a", 1), mode="hot_swap")
        done = await call
        check(asked, done, "a")
        assert len(done.token_ids) == 200
        assert [run.version for run in done.version_runs] == [0, 1]


@on_event_loop
async def test_a_version_is_loaded_once_no_request_runs_in_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here an engine takes no abort, so the request ends by itself."""
    used = list[set[int]]()  # slots of running requests, at each load
    publish = Server._publish

    async def note(there: Server, tensors: Mapping[str, torch.Tensor]) -> int:
        running = there.tenants._by_name["a"].tenant._running.values()
        used.append({one.slot for one in running if one.piece_id})
        return await publish(there, tensors)

    async def no_abort(request_ids: object) -> None: ...

    monkeypatch.setattr(Server, "_publish", note)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        await router.sync_weights(handle("a", 1), mode="hot_swap")
        asked = GenerationRequest(
            request_id="long", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=200)
        )
        first = asyncio.Event()
        call = asyncio.create_task(router.generate(asked, lambda _: first.set()))
        await first.wait()
        monkeypatch.setattr(there.router, "abort", no_abort)
        pull = asyncio.create_task(router.sync_weights(handle("a", 2), mode="hot_swap"))
        tenant = there.tenants._by_name["a"].tenant
        while tenant.counts()["version"] < 2:
            await asyncio.sleep(0.01)
        await router._pool.all[0].replica.stage(handle("a", 3))
        await pull
        check(asked, await call, "a")
        slots = [tenant.staged[3].slot, tenant.staged[2].slot]
        assert used == [set(), {slots[0]}, set()]
        assert len({*slots}) == 2


@on_event_loop
async def test_a_version_is_read_from_the_trainer_that_published_it_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first trainer, and what that published, are gone."""

    def read(handle: SharedMemoryHandle) -> bytes:
        if handle.path == "gone":
            raise WeightSyncError("version 1: cannot map")
        return published(handle)

    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        monkeypatch.setattr("torchtitan_rl.tenancy.client._read", read)
        weights = router._pool.all[0].replica.peer.weights
        weights.lose_source()
        sync = asyncio.create_task(router.sync_weights(handle("gone", 1), mode="hot_swap"))
        await asyncio.sleep(0.1)
        assert not sync.done()
        weights.renew_source({1: handle("a", 1)})
        await sync
        assert router.versions() == {"a": 1}


async def refusal(work: Any) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        await work
    return refused.value


def registration(tenant: str = "a", **changed: Any) -> dict[str, Any]:
    lora = {"rank": 1, "alpha": LORA.alpha, "target_modules": ["q_proj"]}
    own = {"owner": tenant, "policy": policy_digest(POLICY), "max_model_len": 256}
    return {"name": tenant, **lora, **own, **changed}


@on_event_loop
async def test_who_does_not_fit_or_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as there:
        for changed, message in (
            ({"rank": 16}, "policy.lora.rank is 16: give at most 8"),
            ({"alpha": 1e5}, "policy.lora.alpha is 100000: give at most 10000"),
            (
                {"max_model_len": 300},
                "generator.max_model_len is 300: give at most that of the server (256)",
            ),
            ({"policy": "another"}, "policy.checkpoint is another model than the served one"),
            ({"policy": "\u00e9"}, "policy.checkpoint is another model than the served one"),
            ({"target_modules": ["k_proj"]}, "k_proj and v_proj"),
            ({"target_modules": ["lm_head"]}, "lm_head"),
        ):
            refused = await refusal(there.command("tenant.open", registration(**changed)))
            assert refused.status == 400
            assert message in refused.message
        own = registration("a")
        monkeypatch.setattr(server, "policy_digest", lambda _: "of files replaced since the start")
        lease = await there.command("tenant.open", own)
        for thief in ("thief", "\u00e9"):
            refused = await refusal(there.command("tenant.open", registration("a", owner=thief)))
            assert (refused.status, refused.code) == (409, "tenant_exists")
        await there.command("tenant.open", registration("b"))
        refused = await refusal(there.command("tenant.open", registration("c")))
        assert (refused.status, refused.code) == (503, "no_tenant_place")
        for wrong in ("", "x", "\u00e9", lease["lease"] + "0"):
            guess = {"name": "a", "lease": wrong, "after": 0}
            assert (await refusal(there.command("tenant.receive", guess))).status == 410
        again = await there.command("tenant.open", registration("a"))
        old = {"name": "a", "lease": lease["lease"], "after": 0}
        assert (await refusal(there.command("tenant.receive", old))).status == 410
        await there.command("tenant.close", {"name": "a", "lease": again["lease"]})
        await there.command("tenant.open", registration("c"))


@on_event_loop
async def test_what_is_uploaded_is_bounded_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as there:
        lease = (await there.command("tenant.open", registration()))["lease"]
        own = {"name": "a", "lease": lease, "version": 1}

        async def upload(*parts: bytes) -> RefusedError:
            offset = 0
            for part in parts:
                await there.command("tenant.upload", {**own, "offset": offset, "part": part})
                offset += len(part)
            return await refusal(there.command("tenant.stage", own))

        tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        name, one = next(iter(tensors.items()))
        for wrong, message in (
            (b"no tensors", "no safetensors file"),
            (adapter(1)[:-3], "no safetensors file"),
            (save({**tensors, "more": one.clone()}), "not those of the registered adapter"),
            (save({**tensors, name: one.T.contiguous()}), "not those of the registered adapter"),
            (save({**tensors, name: torch.full_like(one, float("nan"))}), "numbers up to 10000"),
            (save({**tensors, name: torch.full_like(one, 1e5)}), "numbers up to 10000"),
            (save({**tensors, name: one.to(torch.int32)}), "numbers up to 10000"),
        ):
            assert message in (await upload(wrong)).message
        assert (await refusal(there.command("tenant.stage", own))).code == "not_uploaded"
        far = {**own, "offset": 1 << 40, "part": b"x"}
        assert (await refusal(there.command("tenant.upload", far))).status == 413
        await there.command("tenant.upload", {**own, "offset": 0, "part": b"1234"})
        gap = {**own, "offset": 5, "part": b"x"}
        assert (await refusal(there.command("tenant.upload", gap))).status == 409
        sent = {"name": "a", "lease": lease, "number": 1}
        for messages in (b"", b"\x91\xc0", b"\x91" * 100_000):
            refused = await refusal(there.command("tenant.send", {**sent, "messages": messages}))
            assert (refused.status, refused.code) == (400, "invalid_messages")
        assert there.contents == {}


@on_event_loop
async def test_a_version_is_loaded_once_and_only_for_who_has_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, publish = asyncio.Event(), Server._publish

    async def publish_later(there: Server, tensors: Mapping[str, torch.Tensor]) -> int:
        await gate.wait()
        return await publish(there, tensors)

    monkeypatch.setattr(Server, "_publish", publish_later)
    async with serving(monkeypatch) as there:
        leases, stages = {}, []
        for name in ("a", "b"):
            leases[name] = await there.command("tenant.open", registration(name))
            own = {"name": name, "lease": leases[name]["lease"], "version": 1}
            await there.command("tenant.upload", {**own, "offset": 0, "part": adapter(1)})
            for _ in range(2):  # the first answer may have been lost
                stages.append(asyncio.create_task(there.command("tenant.stage", own)))
            leased = there.tenants._by_name[name]
            while leased.upload is not None or not there.tenants._loading.locked():
                await asyncio.sleep(0.01)  # until its load has begun
        await there.command("tenant.close", {"name": "b", "lease": leases["b"]["lease"]})
        await there.command("tenant.open", registration("c"))
        gate.set()
        ends = await asyncio.gather(*stages, return_exceptions=True)
        assert ends[:2] == [{}, {}]
        assert all(isinstance(one, RefusedError) for one in ends[2:])
        assert len(there.contents) == 1


@on_event_loop
async def test_a_place_is_free_once_its_tenant_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEASE_S", 0.2)
    gate, closing, close = asyncio.Event(), list[str](), Tenant.close

    async def close_later(tenant: Tenant) -> None:
        closing.append(tenant.name)
        await gate.wait()
        await close(tenant)

    monkeypatch.setattr(Tenant, "close", close_later)
    async with serving(monkeypatch) as there:
        await there.command("tenant.open", registration("a"))
        await there.command("tenant.open", registration("b"))
        while len(closing) < 2:  # of the silent ones
            await asyncio.sleep(0.01)
        calls = [
            there.command("tenant.open", registration("c")),
            there.command("tenant.open", registration("c", owner="thief")),
        ]
        tasks = list(map(asyncio.create_task, calls))
        await asyncio.sleep(0.05)
        assert [one.done() for one in tasks] == [False] * 2
        gate.set()
        assert (await refusal(tasks[1])).code == "tenant_exists"
        while there.tenants.gauges()["tenants"]:  # the next silent ones are found, too
            await asyncio.sleep(0.01)
        assert closing == ["a", "b", "c"]


@on_event_loop
async def test_a_tenant_that_does_not_end_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here the engines stand still, but take aborts."""
    moves, step = threading.Event(), SharedEngine.step

    def step_later(engine: SharedEngine) -> list[Completion]:
        moves.wait()
        return step(engine)

    monkeypatch.setattr(SharedEngine, "step", step_later)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        try:
            call = asyncio.create_task(router.generate(request("x", random.Random(0))))
            leased = there.tenants._by_name["a"]
            while not leased.tenant.counts()["running_requests"]:
                await asyncio.sleep(0.01)
            own = {"name": "a", "lease": leased.secret}
            closing = asyncio.create_task(there.command("tenant.close", own))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10.0):
                await there.command("tenant.open", registration("b"))
            ((_, nothing),) = messages.encode_calls(())
            sent = own | {"number": leased.num_sent + 1, "messages": nothing}
            for command in ("tenant.send", "tenant.close"):  # nothing more may run in its slots
                assert (await refusal(there.command(command, sent))).code == "no_lease"
            third = asyncio.create_task(there.command("tenant.open", registration("c")))
            await asyncio.sleep(0.05)
            assert (closing.done(), third.done()) == (False, False)
        finally:
            moves.set()
        await third
        assert not leased.tenant._running
        assert there.tenants._by_name["c"].tenant.slots == leased.tenant.slots
        assert await closing == {}
        with pytest.raises(GenerationError, match="this lease has ended"):
            await call


@on_event_loop
async def test_a_load_that_waits_for_its_slot_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, free_slot, stages = asyncio.Event(), Tenant.free_slot, []

    async def free_later(tenant: Tenant) -> int:
        if tenant.name == "a":
            await gate.wait()
        return await free_slot(tenant)

    monkeypatch.setattr(Tenant, "free_slot", free_later)
    async with serving(monkeypatch) as there:
        for name in ("a", "b"):
            lease = await there.command("tenant.open", registration(name))
            own = {"name": name, "lease": lease["lease"], "version": 1}
            await there.command("tenant.upload", {**own, "offset": 0, "part": adapter(1)})
            stages.append(asyncio.create_task(there.command("tenant.stage", own)))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(10.0):
            await stages[1]
        assert not stages[0].done()
        gate.set()
        await stages[0]


def test_many_calls_leave_in_batches_that_a_server_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "BATCH_BYTES", 1000)
    rng = random.Random(0)
    asked = [request(f"{number}", rng) for number in range(40)]
    calls = tuple(Call(call_id=one.request_id, payload=one) for one in asked)
    numbers, batches = zip(*messages.encode_calls(calls), strict=True)
    assert len(batches) > 3
    assert sum(numbers) == 40
    assert max(map(len, batches)) < 1010
    decoded = [call for batch in batches for call, _ in messages.decode_calls(batch)]
    assert tuple(decoded) == calls
    ((number, nothing),) = messages.encode_calls(())
    assert (number, messages.decode_calls(nothing)) == (0, [])


def test_a_server_takes_no_more_calls_at_once_than_a_run_sends() -> None:
    calls = tuple(Call(call_id=n, payload=commands.Resume()) for n in range(20_000))
    numbers, batches = zip(*messages.encode_calls(calls), strict=True)
    assert [len(messages.decode_calls(batch)) for batch in batches] == [8192, 8192, 3616]
    assert numbers == (8192, 8192, 3616)
    both = msgspec.msgpack.encode(msgspec.msgpack.decode(batches[0]) * 2)
    with pytest.raises(ValueError, match="length <= 8192"):
        messages.decode_calls(both)


def sent(number: int, *payloads: Any, first: int = 0) -> dict[str, Any]:
    """Arguments of a command that sends a batch."""
    calls = [
        Call(call_id=getattr(one, "request_id", first + n), payload=one)
        for n, one in enumerate(payloads)
    ]
    ((_, content),) = messages.encode_calls(calls)
    return {"name": "a", "number": number, "messages": content}


def asking(name: str, *, num_prompt: int = 2, **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**{"max_tokens": 1, **sampling})
    prompt = tuple(range(num_prompt))
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


@pytest.mark.parametrize(
    "large",
    [
        {"max_tokens": 2000},
        {"num_prompt": 2000},
        {"max_tokens": 200, "num_logprobs": 5},
        {"engine_options": {"bad_words": [{}] * 2000}},
    ],
)
@on_event_loop
async def test_requests_of_a_run_are_bounded_until_it_takes_their_ends(
    monkeypatch: pytest.MonkeyPatch, large: dict[str, Any]
) -> None:
    """Otherwise a run that never asks for messages fills the server's memory."""
    monkeypatch.setattr(server, "memory_bytes", lambda: 4 * 2 * 140_000)
    async with serving(monkeypatch) as there:
        own = {"lease": (await there.command("tenant.open", registration("a")))["lease"]}

        async def send(number: int, *payloads: Any, first: int = 0) -> bool:
            arguments = sent(number, *payloads, first=first) | own
            return bool((await there.command("tenant.send", arguments))["is_taken"])

        assert await send(1, asking("refused", max_tokens=-(10**9)))
        assert await send(2, asking("large", **large))
        assert not await send(3, asking("next"))
        await asyncio.sleep(0.2)  # they have ended
        assert await send(4, commands.Resume())
        assert not await send(5, asking("next"))
        received = {"name": "a", "after": 0} | own
        while True:
            taken = await there.command("tenant.receive", received)
            received["after"] = taken["number"]
            ends = messages.decode_ends(taken["messages"])
            if "large" in (one.call_id for one in ends if isinstance(one, End)):
                break
        assert not await send(5, asking("next"))  # the same batch again
        assert await send(6, asking("next"))
        assert await send(6, asking("next"))
        with pytest.raises(RefusedError, match="has the id of an open one"):
            await send(7, asking("next"))


@on_event_loop
async def test_what_a_run_has_not_taken_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports of progress, and the sets of tokens from which theirs were sampled."""
    async with serving(monkeypatch) as there:
        own = {"lease": (await there.command("tenant.open", registration("a")))["lease"]}
        one = asking("one", max_tokens=200)
        kept = asking("kept", max_tokens=200, top_p=0.5)
        await there.command("tenant.send", sent(1, one, kept) | own)
        tenant = there.tenants._by_name["a"].tenant
        at_first = dict(tenant._held)
        while tenant.counts()["sampled_tokens"] < 400:
            await asyncio.sleep(0.01)
        grown = {name: tenant._held[name] - at_first[name] for name in at_first}
        assert tenant._num_held == sum(tenant._held.values())
        assert grown["kept"] > grown["one"] >= 500


@on_event_loop
async def test_open_commands_of_a_run_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [commands.Resume()] * 8192
    async with serving(monkeypatch) as there:
        own = {"lease": (await there.command("tenant.open", registration("a")))["lease"]}
        await there.command("tenant.send", sent(1, *many) | own)
        with pytest.raises(RefusedError, match="8192 calls of this run are open") as caught:
            await there.command("tenant.send", sent(2, *many, first=8192) | own)
        assert caught.value.status == 429  # a run sends them again


@on_event_loop
async def test_a_run_that_does_not_take_its_messages_loses_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LEASE_S", 0.4)
    async with serving(monkeypatch) as there:
        own = {"lease": (await there.command("tenant.open", registration("a")))["lease"]}
        for number in range(1, 20):  # without an open call it keeps its place
            await there.command("tenant.send", sent(number) | own)
            await asyncio.sleep(0.05)
        await there.command("tenant.send", sent(20, asking("one", max_tokens=200)) | own)

        async def go_on() -> None:
            for number in range(21, 60):
                await there.command("tenant.send", sent(number) | own)
                await there.command("tenant.receive", {"name": "a", "after": 0} | own)  # the first
                await asyncio.sleep(0.05)

        with pytest.raises(RefusedError, match="this lease has ended"):
            await go_on()


@on_event_loop
async def test_a_run_with_more_requests_than_a_server_holds_completes_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "memory_bytes", lambda: 4 * 2 * 270_000)
    rng = random.Random(0)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        asked = [request(f"{number}", rng) for number in range(100)]

        async def later(number: int) -> Completion:
            await asyncio.sleep(0.01 * (number // 20))
            return await router.generate(asked[number])

        for one, done in zip(asked, await asyncio.gather(*map(later, range(100))), strict=True):
            check(one, done, "a")


@on_event_loop
async def test_commands_do_not_wait_behind_requests_for_which_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a server with many requests of a run seems lost to it: it takes no abort, pulls no
    weights and does not resume."""
    monkeypatch.setattr(server, "memory_bytes", lambda: 4 * 2 * 60_000)
    monkeypatch.setattr(messages, "BATCH_CALLS", 1)
    submit, submitted = Tenant._submit, []
    monkeypatch.setattr(
        Tenant, "_submit", lambda self, one: submitted.append(one.request_id) or submit(self, one)
    )
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        asked = [asking(f"{number}", max_tokens=200) for number in range(12)]
        calls = {one.request_id: asyncio.create_task(router.generate(one)) for one in asked}
        await asyncio.sleep(0.02)
        async with asyncio.timeout(10.0):
            await router.pause("keep")
            (leased,) = there.tenants._by_name.values()
            on_server = [one for one in leased.tenant._held if isinstance(one, str)]
            assert 0 < len(on_server) < 4
            await router.abort([on_server[0], "11"])
            assert not (await calls.pop("11")).token_ids
            await calls.pop(on_server[0])
            await router.sync_weights(handle("a", 1), mode="hot_swap")
            assert {one.unaccounted for one in (await router.account()).values()} == {0}
            await router.resume()
            versions = set[int]()
            for name, call in calls.items():
                done = await call
                check(asked[int(name)], done, "a")
                assert len(done.token_ids) == 200
                versions.update(done.versions)
            assert versions == {0, 1}
            assert "11" not in submitted


@on_event_loop
async def test_a_command_passes_between_batches_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "BATCH_CALLS", 1)
    received: list[str] = []
    deliver = Tenant.deliver

    def note(self: Tenant, calls: Any) -> bool:
        received.extend(type(call.payload).__name__ for call, _ in calls)
        return deliver(self, calls)

    monkeypatch.setattr(Tenant, "deliver", note)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        calls = [asyncio.create_task(router.generate(asking(f"{n}"))) for n in range(100)]
        while not received:
            await asyncio.sleep(0)
        await router.abort(["99"])
        await asyncio.gather(*calls)
    assert received.index("AbortRequests") < 50


@on_event_loop
async def test_a_full_server_is_tried_with_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "memory_bytes", lambda: 4 * 2 * 60_000)
    refused: list[int] = []
    deliver = Tenant.deliver

    def note(self: Tenant, calls: Any) -> bool:
        if not (is_taken := deliver(self, calls)):
            refused.append(len(calls))
        return is_taken

    monkeypatch.setattr(Tenant, "deliver", note)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        calls = []
        for group in range(2):
            asked = (asking(f"{group}/{n}", max_tokens=200) for n in range(10))
            calls += [asyncio.create_task(router.generate(one)) for one in asked]
            await asyncio.sleep(0.05)
        await asyncio.gather(*calls)
    assert refused[:3] == [10, 1, 1]


@pytest.mark.parametrize(
    "forged", [None, "newer", EngineReading(sampled_tokens=1, running_tokens=1)]
)
@on_event_loop
async def test_a_server_whose_answer_is_not_one_of_the_command_is_lost(
    monkeypatch: pytest.MonkeyPatch, forged: Any
) -> None:
    """Rather than believed, or an error of another kind that ends the run."""
    if forged == "newer":
        forged = PullReport(version=10**9, stall_s=0.0, running_requests=0, recomputed=False)

    async def pull(self: Tenant, version: int) -> Any:
        return forged

    monkeypatch.setattr(Tenant, "_pull", pull)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        with pytest.raises(WeightSyncError, match="answer of another kind"):
            await router.sync_weights(handle("a", 1), mode="hot_swap")


def test_only_a_completion_or_an_error_ends_a_request_whatever_the_other_side_sends() -> None:
    def forged(kind: str, payload: object, call_id: str | int = "r0") -> bytes:
        message = {"kind": kind, "call_id": call_id, "payload": payload}
        return msgspec.msgpack.encode([message])

    pulled = PullReport(version=1, stall_s=0.0, running_requests=0, recomputed=False)
    for kind, payload in (("NoneType", None), ("PullReport", pulled), ("os.system", "ls")):
        with pytest.raises(ValueError, match=kind):
            messages.decode_ends(forged(kind, payload))
    with pytest.raises(ValueError, match="Pull is neither"):
        messages.decode_calls(forged("Pull", commands.Pull(1)))
    nothing: Any = {"token_ids": (), "logprobs": (), "version_runs": ()}
    done = Completion(request_id="r1", finish_reason=FinishReason.ABORT, **nothing)
    (end,) = messages.decode_ends(forged("Completion", done))
    assert (end.call_id, end.result) == ("r1", done)
    ((call, _),) = messages.decode_calls(
        forged("GenerationRequest", request("r1", random.Random(0)))
    )
    assert call.call_id == "r1"
    (end,) = messages.decode_ends(forged("PullReport", pulled, call_id=3))
    assert end.result == pulled


@on_event_loop
async def test_a_server_that_was_stopped_keeps_its_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEASE_S", 0.8)
    monkeypatch.setattr(server, "STOOD_STILL_S", 0.05)
    async with serving(monkeypatch) as there:
        lease = (await there.command("tenant.open", registration("a")))["lease"]
        await asyncio.sleep(0.01)
        time.sleep(1.0)
        await asyncio.sleep(0.01)  # it looks for silent tenants, before it reads what they sent
        sent = {"name": "a", "lease": lease, "number": 1}
        ((_, nothing),) = messages.encode_calls(())
        await there.command("tenant.send", {**sent, "messages": nothing})


@on_event_loop
async def test_a_silent_run_loses_its_place_and_a_lost_server_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LEASE_S", 0.4)
    monkeypatch.setattr("torchtitan_rl.tenancy.client._BEAT_S", 0.05)
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        await there.command("tenant.open", registration("b"))
        asked = request("long", random.Random(0))
        await router.generate(asked)
        for _ in range(100):
            await asyncio.sleep(0.05)
            if there.tenants.gauges()["tenants"] == 1:
                break
        assert 'tenant_version{tenant="a"}' in there.tenants.gauges()
        there.is_down = True
        monkeypatch.setattr("torchtitan_rl.tenancy.client.LOST_S", 0.1)
        peer = Peer(there, "c")
        with pytest.raises(ReplicaError, match="no `torchtitan-rl serve --tenants` is reached"):
            await peer.start()
        await peer.close()


@on_event_loop
async def test_routes_need_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(monkeypatch) as there:
        transport = httpx.ASGITransport(there.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://there/v1/") as http:
            body = {one: value for one, value in registration().items() if one != "name"}
            assert (await http.post("tenants/a", json=body)).status_code == 401
            http.headers["Authorization"] = "Bearer wrong"
            assert (await http.post("tenants/a", json=body)).status_code == 401
            http.headers["Authorization"] = "Bearer key:session"
            assert (await http.post("tenants/a", json=body)).status_code == 400
            http.headers["Authorization"] = "Bearer key"
            for name in ("..", "a b", "%00", "a/b/c"):
                answer = await http.post(f"tenants/{name}", json=body)
                assert answer.status_code in (404, 405, 422)
            assert (await http.post("tenants/a", json=body | {"rank": 0})).status_code == 422
            assert (await http.post("tenants/a", json=body)).status_code == 200
            assert (await http.get("tenants/a/messages?after=0")).status_code == 422  # no lease


@on_event_loop
async def test_options_that_would_harm_an_engine_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schema = {"type": "array", "minItems": 10**9}
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    async with serving(monkeypatch) as there, run_of(there, "a") as router:
        for more in (
            {"engine_options": {"structured_outputs": {"json": schema}}},
            {"engine_options": {"structured_outputs": {"json": json.dumps(schema)}}},
            {"engine_options": {"bad_words": nested}},
            {"prompt_logprobs": 0},
        ):
            sampling = SamplingParams(max_tokens=4, **more)
            asked = GenerationRequest(request_id="x", prompt_token_ids=(1,), sampling=sampling)
            with pytest.raises(InvalidRequestError):
                await router.generate(asked)
        sampling = SamplingParams(max_tokens=4, engine_options={"repetition_penalty": 1.1})
        asked = GenerationRequest(request_id="x", prompt_token_ids=(1,), sampling=sampling)
        assert len((await router.generate(asked)).token_ids) == 4


def test_the_next_process_of_a_run_has_its_secret_and_no_other_run(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    secret = owner_of(one)
    assert owner_of(one) == secret != owner_of(other)
    assert (one / OWNER_FILE).stat().st_mode & 0o077 == 0
    (one / OWNER_FILE).write_text("")  # a process was killed while it wrote the file
    assert owner_of(one)
    with pytest.raises(OutputError, match=OWNER_FILE):
        owner_of(tmp_path / "none")
