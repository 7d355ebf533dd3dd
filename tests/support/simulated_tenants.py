"""A simulated ``torchtitan-rl serve --tenants``, the network to it, and the replicas of its runs.

The code of `torchtitan_rl.tenancy` runs as it is, without its tensors and routes: an adapter is a
few bytes that tell the run, the version and the weights, and so do the tokens sampled with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from tests.support.scripted_engine import scripted_token
from tests.support.simulated_faults import Fate
from tests.support.simulated_replica import VOCAB, SimCall, SimReplica
from tests.support.simulated_trainer import SimTrainer
from torchtitan_rl.channel import End
from torchtitan_rl.config.lora import LoraConfig, TenantSlots
from torchtitan_rl.config.machine import memory_bytes
from torchtitan_rl.config.model import PolicyArchitecture, read_architecture
from torchtitan_rl.errors import GenerationError, InvalidRequestError, WeightSyncError
from torchtitan_rl.generation.commands import ReadTokens
from torchtitan_rl.generation.server import ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.service import WeightLoader
from torchtitan_rl.tenancy import client, server, tenant
from torchtitan_rl.tenancy.client import ServedPeer, owner_of
from torchtitan_rl.tenancy.messages import LEASE_HEADER, decode_ends
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Progress,
    PullReport,
)
from torchtitan_rl.weights.distribution import SharedMemoryHandle, WeightDistribution

_POLICY = Path(__file__).parents[2] / "experiments" / "alphabet_sort" / "policy"
_LORA = LoraConfig(rank=1, target_modules=("q_proj",))
_CONTEXT = 512
_TRAVEL_S = 0.02
_SMALL = 4 * 2 * 40_000  # memory with which a tenant has room for two requests
_EVALUATION = "validation/"

_architecture: Callable[[], PolicyArchitecture] = cache(lambda: read_architecture(_POLICY))


def mark_of(run: str, version: int, weights: int) -> int:
    """What tells the adapter from all others. Version 0 is the served policy."""
    return zlib.crc32(f"{run} {version} {weights}".encode()) if version else 0


def token_of(request_id: str, before: tuple[int, ...], mark: int) -> tuple[int, float]:
    """The token after these, and its logprob, with this adapter. Interruptions do not change it,
    nor does the turn's number: a branch that begins again after a resume has another one."""
    seed = zlib.crc32(request_id.partition("#")[0].rpartition("/")[0].encode())
    return scripted_token(before, seed=seed, version=mark, vocab_size=VOCAB)


class SimEngine(SimReplica):
    """Each token tells the adapter of its request."""

    def __init__(self, name: str, there: SimServer, **options: Any) -> None:
        super().__init__(name, **options)
        self._there = there
        self._slots: dict[int, tuple[int, int]] = {}  # the version published, and its mark

    async def generate(self, request: GenerationRequest, *rest: Any, **options: Any) -> Completion:
        if request.adapter:
            slot, published = map(int, request.adapter.split("@"))
            if self._slots.get(slot, (0, 0))[0] != published:
                raise InvalidRequestError(f"{self.name} has no adapter {request.adapter!r}")
        return await super().generate(request, *rest, **options)

    async def _pull(self, version: int) -> PullReport:
        report = await super()._pull(version)
        slot, mark = self._there.contents[version]
        for call in self._calls.values():
            if call.request.adapter.startswith(f"{slot}@") and not call.is_abandoned:
                self._there.complain(f"{self.name}: {call.request.request_id} runs on slot {slot}")
        self._slots[slot] = version, mark
        return report

    def _draw(self, call: SimCall, before: tuple[int, ...], seed: int | None) -> tuple[int, float]:
        request, mark = call.request, 0
        run, prefix, name = request.request_id.split("/", 2)
        if not call.tokens:
            self._there.calls[f"{run}/{prefix}"].append(call)
        if request.adapter:
            slot, published = map(int, request.adapter.split("@"))
            held, mark = self._slots[slot]
            if held != published:
                self._there.complain(f"{request.request_id} has another adapter in its slot")
        return token_of(name, before, mark)


class SimTenant(tenant.Tenant):
    """Compares its count of tokens to what engines sampled for it, and knows which of its pieces
    may be interrupted."""

    there: SimServer

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._failed = set[str]()
        self._open = Counter[Any]()
        self._interrupted = set[str]()

    def deliver(self, calls: Sequence[tuple[ToReplica, int]]) -> bool:
        names = [call.call_id for call, _ in calls]
        again = [one for one in names if self._is_open(one)]
        self._open.update(names)
        if is_taken := super().deliver(calls):
            for one in again:
                self.there.complain(f"{self.name}: call {one} taken twice")
        else:
            self._open.subtract(names)
        return is_taken

    def _is_open(self, call_id: Any) -> bool:
        if isinstance(call_id, str):  # a group that begins again has the same requests
            return self._open[call_id] > 0 and call_id not in self._failed
        return call_id in self._open

    def _end(self, call_id: Any, result: Any = None, error: Any = None) -> None:
        self._open[call_id] -= 1
        if self._open[call_id] < 0:
            self.there.complain(f"{self.name}: call {call_id} ended twice")
        if error is not None and isinstance(call_id, str):
            self._failed.add(call_id)
        super()._end(call_id, result, error)

    async def _abort(self, request_ids: Collection[str]) -> None:
        found = [self._running[name] for name in request_ids if name in self._running]
        self._interrupted.update(one.piece_id for one in found)
        await super()._abort(request_ids)

    async def _interrupt(self, found: Collection[Any]) -> None:
        self._interrupted.update(one.piece_id for one in found)
        await super()._interrupt(found)

    async def _sample(self, running: Any, left: GenerationRequest) -> None:
        await super()._sample(running, left)
        is_cut = running.tokens.ended.finish_reason is FinishReason.ABORT
        if is_cut and f"{self._prefix}/{left.request_id}" not in self._interrupted:
            self.there.complain(f"{self.name}: {left.request_id} was cut without a cause")

    async def _pull(self, version: int) -> PullReport:
        before = self._version
        report = await super()._pull(version)
        if version < before:
            self.there.complain(f"{self.name}: version {version} after {before}")
        if any(one.piece_id and one.version < version for one in self._running.values()):
            self.there.complain(f"{self.name}: requests run under a version before {version}")
        return report

    async def _answer(self, call: Any) -> None:
        if isinstance(call.payload, ReadTokens):
            self._check_count()
        await super()._answer(call)

    async def close(self) -> None:
        self._check_count()
        await super().close()

    def _check_count(self) -> None:
        """Of requests that run or failed, what was reported; of all others, every token."""
        uncertain = {*self._failed, *self._running}
        least = most = 0
        for call in self.there.calls[self._prefix]:
            name = call.request.request_id.removeprefix(f"{self._prefix}/")
            names = itertools.accumulate(name.split("#"), "{}#{}".format)
            is_whole = call.has_completed and uncertain.isdisjoint(names)
            least += len(call.tokens) if is_whole else call.num_told
            most += len(call.tokens)
        if not least <= self._num_sampled() <= most:
            count = self._num_sampled()
            self.there.complain(f"{self.name} counts {count} tokens, not {least} to {most}")


class SimServer:
    """The server's machine, from outside its processes; `serve` is what runs on it.

    ``calls``: all requests that engines sampled for, by the prefix of a tenant. ``given``: by lease
    and request, how many tokens its run has been told.
    """

    def __init__(self, chance: random.Random, *, engines: int, token_s: float) -> None:
        self.chance = chance
        self._num_engines = engines
        self._token_s = token_s
        self.contents: dict[int, tuple[int, int]] = {}  # slot and mark of each version published
        self.calls: dict[str, list[SimCall]] = defaultdict(list)
        self.tenants: server.Tenants | None = None
        self.tenant_of: dict[str, SimTenant] = {}  # by lease
        self.given: dict[str, Counter[str]] = defaultdict(Counter)
        self.given_up: set[str] = set()
        self._told: dict[tuple[str, str], int] = {}  # of a request that runs
        self.trainers: dict[str, SimTrainer] = {}  # of all runs, by the path of what they publish
        self.complaints: list[str] = []
        self.context: Context | None = None  # of the server's process, while it runs
        self.outside: Context | None = None  # of the network

    def complain(self, what: str) -> None:
        self.complaints.append(f"{asyncio.get_running_loop().time():.2f} s: {what}")

    async def serve(self, fate: Fate, *, request_timeout_s: float, sync_timeout_s: float) -> None:
        """As ``torchtitan-rl serve --tenants 2``; returns when all engines are lost."""
        holder = SimTrainer(chance=self.chance)  # of what the server publishes
        engines = [
            SimEngine(
                f"r{number}",
                self,
                chance=self.chance,
                trainer=holder,
                token_s=self._token_s,
                fate=fate,
            )
            for number in range(self._num_engines)
        ]
        router = GeneratorRouter(
            engines, request_timeout_s=request_timeout_s, sync_timeout_s=sync_timeout_s
        )

        class Publisher:
            def publish(_, version: int, content: Mapping[str, Any]) -> SharedMemoryHandle:
                self.contents[version] = content["slot"], content["mark"]
                holder.readable.add(version)
                return SharedMemoryHandle(version=version, path="", num_bytes=1)

        loader = WeightLoader(router, Publisher(), _POLICY)  # type: ignore[arg-type]
        tenants = server.Tenants(
            router,
            loader.publish,
            slots=TenantSlots(number=2, rank=8),
            policy_dir=_POLICY,
            policy=_architecture(),
            max_model_len=_CONTEXT,
        )
        async with tenants:
            self.tenants = tenants
            try:
                await router.wait_until_lost()
            except GenerationError:
                return
            finally:
                self.tenants = None

    async def carry(self, delay_s: float, command: Any, arguments: Mapping[str, Any]) -> Any:
        """A request's way through the network and back, which its sender's end does not stop."""
        await asyncio.sleep(delay_s + self.chance.uniform(0.0, _TRAVEL_S))
        if self.context is None:
            raise httpx.ConnectError("refused")
        work = self._handle(command, arguments)
        handling = asyncio.create_task(work, name=command, context=self.context)
        await asyncio.wait({handling})
        if handling.cancelled():
            raise httpx.ReadError("the server is gone")
        await asyncio.sleep(self.chance.uniform(0.0, _TRAVEL_S))
        return handling.result()

    async def _handle(self, command: Any, arguments: Mapping[str, Any]) -> httpx.Response:
        """As `serving/tenant_routes.py`."""
        if self.tenants is None:
            return httpx.Response(503)
        tenants = self.tenants
        try:
            answer = await tenants.handlers()[command](arguments)
        except RefusedError as error:
            content = {"error": {"message": error.message, "code": error.code}}
            return httpx.Response(error.status, json=content)
        except Exception as error:
            self.complain(f"{command} failed: {error!r}")
            return httpx.Response(500)
        match command:
            case "tenant.open":
                opened = tenants._by_name[arguments["name"]]
                if opened.secret == answer["lease"]:
                    self.tenant_of[opened.secret] = opened.tenant  # type: ignore[assignment]
            case "tenant.receive":
                headers = {"x-batch": str(answer["number"])}
                return httpx.Response(200, headers=headers, content=answer["messages"])
        return httpx.Response(200, json=answer)

    def note_given(self, lease: str, content: bytes) -> None:
        """A run has got these messages. Those of a replica that it has given up are not read."""
        if lease in self.given_up:
            return
        given = self.given[lease]
        for message in decode_ends(content):
            match message:
                case Progress(request_id=name, start=start, token_ids=token_ids):
                    given[name] += len(token_ids)
                    self._told[lease, name] = start + len(token_ids)
                case End(call_id=str(name), result=result):
                    num_told = self._told.pop((lease, name), 0)
                    given[name] += 0 if result is None else len(result.token_ids) - num_told

    def read(self, handle: SharedMemoryHandle) -> bytes:
        version, trainer = handle.version, self.trainers[handle.path]
        if trainer.is_lost or version not in trainer.readable:
            raise WeightSyncError(f"version {version} is gone")
        mark = mark_of(handle.path.partition("#")[0], version, trainer.published[version])
        return json.dumps({"mark": mark, "padding": 200 * "-"}).encode()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """This server is the one that `ServedPeer` reaches while the block is open."""
        count = itertools.count(1)
        secrets = mock.Mock()
        secrets.token_hex = lambda num: f"{next(count):0{2 * num}x}"
        recording = type("Recording", (SimTenant,), {"there": self})
        replaced: list[tuple[Any, dict[str, Any]]] = [
            (httpx, {"AsyncClient": partial(Wire, self)}),
            (client, {"secrets": secrets, "_read": self.read, "PART_BYTES": 100}),
            (server, {"secrets": secrets, "Tenant": recording, "_read": _decode}),
            (server, {"slot_tensors": _in_slot, "policy_digest": lambda _: "policy"}),
            (server, {"memory_bytes": self.chance.choice([lambda: _SMALL, memory_bytes])}),
            (tenant, {"secrets": secrets}),
        ]
        with ExitStack() as stack:
            for module, names in replaced:
                stack.enter_context(mock.patch.multiple(module, **names))
            yield


def _decode(content: bytes, shapes: Any) -> dict[str, Any]:
    return dict(json.loads(content))


def _in_slot(slot: int, lora: LoraConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {**tensors, "slot": slot}


class Wire:
    """A run's connection to the server, as `httpx.AsyncClient`: fails as its ``fate`` says."""

    fate: Fate

    def __init__(self, there: SimServer, **options: Any) -> None:
        self._there = there
        self._down_until_s = 0.0
        self.headers: dict[str, str] = {}

    async def request(self, method: str, path: str, **content: Any) -> httpx.Response:
        loop = asyncio.get_running_loop()
        command, arguments = self._command(method, path, **content)
        strike = self.fate.at(f"http.{command}")
        action = "" if strike is None else strike.action
        seconds = 0.0 if strike is None else strike.seconds
        if action == "down":
            self._down_until_s = loop.time() + seconds
        if loop.time() < self._down_until_s:
            raise httpx.ConnectError("refused")
        if action == "unavailable":
            return httpx.Response(503)
        if action == "lose_request":
            raise httpx.ReadError("connection lost")

        def send(delay_s: float) -> asyncio.Task[httpx.Response]:
            work = self._there.carry(delay_s, command, arguments)
            return self._start(work)

        answer = send(seconds if action == "late" else 0.0)
        if action == "duplicate":
            send(seconds)
        await asyncio.wait({answer})
        response = answer.result()
        if action == "lose_answer" or loop.time() < self._down_until_s:
            raise httpx.ReadError("connection lost")
        if num_new := int(response.headers.get("x-batch", 0)) - arguments.get("after", 0):
            if num_new > 1:
                self._there.complain(f"{arguments['name']}: {num_new - 1} batches of messages lost")
            self._there.note_given(arguments["lease"], response.content)
        return response

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name="machine: network", context=self._there.outside)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _command(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: bytes = b"",
        json: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        _, name, *rest = path.split("/")
        arguments: dict[str, Any] = {"name": name, **(params or {}), **(json or {})}
        if json is None:
            arguments["lease"] = self.headers[LEASE_HEADER]
        match method, rest:
            case "POST", []:
                return "tenant.open", arguments
            case "DELETE", []:
                return "tenant.close", arguments
            case "POST", ["messages"]:
                return "tenant.send", {**arguments, "messages": content}
            case "GET", ["messages"]:
                return "tenant.receive", arguments
            case "PUT", ["versions", version]:
                return "tenant.upload", {**arguments, "version": int(version), "part": content}
            case "POST", ["versions", version]:
                return "tenant.stage", {**arguments, "version": int(version)}
        raise AssertionError((method, path))

    async def delete(self, path: str) -> httpx.Response:
        return await self.request("DELETE", path)

    async def aclose(self) -> None:
        return


class ServedReplica(ConnectedReplica[ServedPeer]):
    """A run's replica on the server, with the counts of a `SimReplica` for this lease."""

    is_sound = True

    def __init__(
        self,
        name: str,
        there: SimServer,
        *,
        run: str,
        root: Path,
        fate: Fate,
        weights: WeightDistribution,
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        peer = ServedPeer(
            name,
            "http://there/v1",
            tenant=run,
            owner=owner_of(root),
            policy="policy",
            lora=_LORA,
            max_model_len=_CONTEXT,
            weights=weights,
        )
        self._there = there
        self._wire: Any = peer._http
        self._wire.fate = fate
        self.requested: list[str] = []
        super().__init__(peer)

    async def close(self) -> None:
        self._there.given_up.add(self._lease)
        await super().close()

    @property
    def _lease(self) -> str:
        return str(self._wire.headers.get(LEASE_HEADER, ""))

    @property
    def sampled(self) -> int:
        return sum(self._sampled().values())

    @property
    def sampled_aside(self) -> int:
        return sum(_evaluations(self._sampled()))

    @property
    def lost(self) -> int:
        """Tokens that were sampled for requests of rollouts, and that the run was never told."""
        given = self._there.given[self._lease]
        num_given = given.total() - sum(_evaluations(given))
        return self.sampled - self.sampled_aside - num_given

    def _sampled(self) -> Counter[str]:
        there, sampled = self._there, Counter[str]()
        if (one := there.tenant_of.get(self._lease)) is not None:
            for call in there.calls[one._prefix]:
                name = call.request.request_id.removeprefix(f"{one._prefix}/")
                sampled[name] += len(call.tokens)
        return sampled


def _evaluations(counts: Mapping[str, int]) -> Iterator[int]:
    return (count for name, count in counts.items() if name.startswith(_EVALUATION))
