"""Training runs that share the engines of one ``torchtitan-rl serve``: its tenants.

Each tenant trains an adapter of its own on the served policy. It registers, uploads each version of
its adapter, and uses the server as if it were a replica (`tenancy/client.py`): a `Tenant`
answers the messages that an engine loop would answer, with requests to the router.

A version of a tenant's adapter is never changed. Each tenant has two slots in every engine, used in
turn, so that the next version is loaded while requests run under the last one. A pull interrupts
the tenant's requests; they continue at once under the new version, with their tokens. Requests of
other tenants are not touched.

Invariants
- Tokens of a piece were sampled under the version that the piece began with; `Tenant` notes it.
- A slot gets another version only after every request under its previous version has ended.
- Each call has exactly one end, after all progress of it. Batches of messages are numbered in both
  directions, so a batch that is sent again is not taken twice.
- A tenant is served only with the secret of its lease. The same run (by its folder) may register
  again at any time, and then takes the place of its earlier process. A tenant that is not heard of
  for `LEASE_S` is removed, and its requests end.
- What a tenant uploads is bounded before it is kept, and checked before an engine sees it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.aio import cancel_all
from torchtitan_rl.bounds import field_errors
from torchtitan_rl.channel import Call, CallId, End, Outbox
from torchtitan_rl.config.lora import (
    LoraConfig,
    TenantSlots,
    adapter_shapes,
    engine_rank,
    lora_errors,
    num_adapter_weights,
    slot_adapter,
    slot_tensors,
)
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.generation.commands import (
    AbortRequests,
    Pause,
    Pull,
    ReadStats,
    ReadTokens,
    Resume,
)
from torchtitan_rl.generation.engine import ReadingRate
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.continuation import PartialTokens, remaining_request, used_up
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import check_options
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName, Handler
from torchtitan_rl.tenancy.messages import LEASE_S, WAIT_S, decode_calls, encode_ends
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    Progress,
    PullReport,
    VersionRun,
)

if TYPE_CHECKING:
    import torch

_HEADER_BYTES = 1 << 20  # of a safetensors file, at most
_REPORT_S = 0.05  # shortest time between two batches of progress


class Tenants:
    """All tenants of a server; see `handlers`. Use it with ``async with``.

    Args:
        publish: makes all engines pull tensors, and returns their version.
        policy_dir: the served policy, on which all tenants must train.
    """

    def __init__(
        self,
        router: GeneratorRouter,
        publish: Callable[[Mapping[str, torch.Tensor]], Awaitable[int]],
        *,
        slots: TenantSlots,
        policy_dir: Path,
        policy: PolicyArchitecture,
        max_model_len: int,
    ) -> None:
        self._router = router
        self._publish = publish
        self._slots = slots
        self._policy_dir = policy_dir
        self._policy = policy
        self._max_model_len = max_model_len
        self._by_name: dict[str, _Leased] = {}
        self._loading = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tenants:
        self._ending = asyncio.create_task(self._end_silent(), name="leases of tenants")
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([] if self._ending is None else [self._ending])
        for name in list(self._by_name):
            await self._remove(name)

    def handlers(self) -> dict[CommandName, Handler]:
        return {
            "tenant.open": self._open,
            "tenant.send": self._send,
            "tenant.receive": self._receive,
            "tenant.upload": self._upload,
            "tenant.stage": self._stage,
            "tenant.close": self._close,
        }

    def gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {"tenants": len(self._by_name)}
        for name, leased in self._by_name.items():
            for gauge, value in leased.tenant.counts().items():
                gauges[f'tenant_{gauge}{{tenant="{name}"}}'] = value
        return gauges

    async def _open(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Register a run, or its next process."""
        name, owner = arguments["name"], arguments["owner"]
        lora = LoraConfig(
            rank=arguments["rank"],
            alpha=arguments["alpha"],
            target_modules=tuple(arguments["target_modules"]),
        )
        await self._check(arguments, lora)
        earlier = self._by_name.get(name)
        if earlier is not None and not hmac.compare_digest(earlier.owner, owner):
            message = f"another run is served as {name!r}; give this run another name"
            raise RefusedError(409, "tenant_exists", message)
        if earlier is not None:
            await self._remove(name)
        used = {leased.tenant.slots for leased in self._by_name.values()}
        free = [pair for pair in self._slots.pairs() if pair not in used]
        if not free:
            number = self._slots.number
            message = f"all {number} places are taken; start serve with more --tenants"
            raise RefusedError(503, "no_tenant_place", message)
        tenant = Tenant(name, self._router, slots=free[0], lora=lora)
        leased = _Leased(tenant, owner=owner, secret=secrets.token_hex(16))
        self._by_name[name] = leased
        return {"lease": leased.secret, "lease_s": LEASE_S}

    async def _check(self, arguments: Mapping[str, Any], lora: LoraConfig) -> None:
        errors = [*field_errors(lora, prefix="policy.lora.").values()] or lora_errors(lora)
        if engine_rank(lora.rank) > engine_rank(self._slots.rank):
            errors.append(
                f"policy.lora.rank is {lora.rank}: the server has room for rank "
                f"{self._slots.rank}; give less, or start serve with a larger --tenant-rank"
            )
        if arguments["max_model_len"] > self._max_model_len:
            errors.append(
                f"generator.max_model_len is {arguments['max_model_len']}: the server's is "
                f"{self._max_model_len}; give at most that"
            )
        served = await asyncio.to_thread(policy_digest, self._policy_dir)
        if not hmac.compare_digest(served, arguments["policy"]):
            errors.append("policy.checkpoint is another model than the served one; give that one")
        if errors:
            raise RefusedError(400, "wrong_tenant", "; ".join(errors))

    def _leased(self, arguments: Mapping[str, Any]) -> _Leased:
        """The tenant of a command, whose lease goes on.

        Raises:
            RefusedError: there is none with this name and lease (410).
        """
        leased = self._by_name.get(arguments["name"])
        if leased is None or not hmac.compare_digest(leased.secret, arguments["lease"]):
            raise RefusedError(410, "no_lease", "this lease has ended; register again")
        leased.heard_s = _now()
        return leased

    async def _send(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        leased = self._leased(arguments)
        number = arguments["number"]
        if number > leased.num_sent + 1:
            raise RefusedError(409, "out_of_order", f"batch {leased.num_sent + 1} is missing")
        if number == leased.num_sent + 1:
            try:
                calls = decode_calls(arguments["messages"])
            except ValueError as error:
                raise RefusedError(400, "invalid_messages", str(error)) from error
            leased.num_sent = number
            leased.tenant.deliver(calls)
        return {}

    async def _receive(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The messages after batch ``after``; without any within `WAIT_S`, none."""
        leased = self._leased(arguments)
        async with leased.receiving:
            is_new = leased.num_received <= arguments["after"]
            if is_new and (messages := await leased.tenant.outbox.take(WAIT_S)):
                leased.num_received += 1
                leased.batch = encode_ends(messages)
            if leased.num_received > arguments["after"]:
                return {"number": leased.num_received, "messages": leased.batch}
        return {"number": arguments["after"], "messages": encode_ends(())}

    async def _upload(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Keep the next part of a version's file. A part that is there already is ignored."""
        leased = self._leased(arguments)
        version, offset, part = (arguments[one] for one in ("version", "offset", "part"))
        if offset == 0 or leased.upload is None:
            leased.upload = _Upload(version)
        upload = leased.upload
        most = 4 * num_adapter_weights(self._policy, leased.tenant.lora) + _HEADER_BYTES
        if offset + len(part) > most:
            message = f"an adapter of this rank has at most {most} bytes"
            raise RefusedError(413, "adapter_too_large", message)
        if upload.version != version or offset > len(upload.content):
            message = f"version {version} has no part before byte {offset}; begin at 0"
            raise RefusedError(409, "out_of_order", message)
        upload.content[offset:] = part
        return {"num_bytes": len(upload.content)}

    async def _stage(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load an uploaded version into all engines, next to the one in use."""
        leased, version = self._leased(arguments), arguments["version"]
        tenant = leased.tenant
        if version in tenant.staged:
            return {}
        upload, leased.upload = leased.upload, None
        if upload is None or upload.version != version:
            message = f"version {version} is not uploaded"
            raise RefusedError(409, "not_uploaded", message)
        shapes = adapter_shapes(self._policy, tenant.lora)
        try:
            tensors = await asyncio.to_thread(_read, bytes(upload.content), shapes)
        except ValueError as error:
            raise RefusedError(400, "wrong_adapter", f"version {version}: {error}") from error
        async with self._loading:
            slot = await tenant.free_slot()
            try:
                published = await self._publish(slot_tensors(slot, tenant.lora, tensors))
            except WeightSyncError as error:
                message = f"version {version}: {error}"
                raise RefusedError(503, "not_loaded", message) from error
            tenant.staged[version] = _Staged(slot, published)
        return {}

    async def _close(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._leased(arguments)
        await self._remove(arguments["name"])
        return {}

    async def _remove(self, name: str) -> None:
        leased = self._by_name.pop(name)
        await leased.tenant.close()

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 8)
            for name, leased in list(self._by_name.items()):
                if _now() > leased.heard_s + LEASE_S:
                    await self._remove(name)


@dataclass(slots=True)
class _Upload:
    version: int
    content: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Leased:
    """A tenant and its channel. ``num_sent`` and ``num_received`` are the numbers of the last
    batches, as the run sees it; ``batch`` is the last one that the run may have received."""

    tenant: Tenant
    owner: str
    secret: str
    heard_s: float = field(default_factory=lambda: _now())
    num_sent: int = 0
    num_received: int = 0
    batch: bytes = b""
    receiving: asyncio.Lock = field(default_factory=asyncio.Lock)
    upload: _Upload | None = None


@dataclass(frozen=True, slots=True)
class _Staged:
    """A version of a tenant's adapter in the engines: its slot, and the server's own version."""

    slot: int
    published: int


@dataclass(slots=True, eq=False)
class _Running:
    """A request. ``piece_id`` is that of the running piece, on the router; ``version`` and ``slot``
    are those of its adapter."""

    call: Call[Any]
    request: GenerationRequest
    tokens: PartialTokens
    num_reported: int = 0
    attempts: int = 0
    version: int = 0
    slot: int = -1
    piece_id: str = ""
    must_end: bool = False
    task: asyncio.Task[None] | None = None


class Tenant:
    """The engine loop that a run sees. ``staged`` are the versions that it may pull."""

    def __init__(
        self, name: str, router: GeneratorRouter, *, slots: tuple[int, int], lora: LoraConfig
    ) -> None:
        self.name = name
        self.slots = slots
        self.lora = lora
        self.staged: dict[int, _Staged] = {}
        self.outbox: Outbox[FromReplica] = Outbox(interval_s=_REPORT_S)
        self._router = router
        self._prefix = f"{name}/{secrets.token_hex(4)}"  # differs from that of an earlier process
        self._version = 0  # the served policy itself, as an adapter begins
        self._pause: Pause | None = None
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()
        self._switching = asyncio.Lock()  # pulls and pauses are executed in order
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_ended = 0  # tokens of ended requests
        self._rate = ReadingRate()

    def counts(self) -> dict[str, float]:
        return {
            "version": self._version,
            "running_requests": self._num_running(),
            "sampled_tokens": self._num_sampled(),
        }

    def deliver(self, calls: Collection[ToReplica]) -> None:
        """Pass calls to the tenant, in order."""
        for call in calls:
            if isinstance(call.payload, GenerationRequest):
                self._submit(call, call.payload)
            else:
                self._start(self._answer(call))

    async def free_slot(self) -> int:
        """Wait for a slot for the next version. What it holds can no longer be pulled."""
        used = self.staged.get(self._version)
        slot = self.slots[used is not None and used.slot == self.slots[0]]
        self.staged = {v: one for v, one in self.staged.items() if one.slot != slot}
        await self._wait_until(
            lambda: not any(one.piece_id and one.slot == slot for one in self._running.values())
        )
        return slot

    async def close(self) -> None:
        """End all requests without an answer."""
        self.outbox.fail(RefusedError(410, "no_lease", "this lease has ended"))
        await cancel_all(self._tasks)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=f"tenant {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Requests.

    def _submit(self, call: Call[Any], request: GenerationRequest) -> None:
        if message := self._refusal(request):
            self._end(request.request_id, error=InvalidRequestError(message))
            return
        request = replace(request, resume_from=None)
        tokens = PartialTokens(request, self._report)
        running = self._running[request.request_id] = _Running(call, request, tokens)
        running.task = self._start(self._serve(running))

    def _refusal(self, request: GenerationRequest) -> str:
        """Why a request is refused that no engine must see; empty if it is not."""
        name = f"request {request.request_id!r}"
        if request.request_id in self._running:
            return f"{name} is still outstanding"
        if request.sampling.prompt_logprobs is not None:
            return f"{name} asks for prompt_logprobs, which runs do not get"
        try:
            check_options(request.sampling.engine_options)
        except RefusedError as error:
            return f"{name}: {error}"
        return ""

    def _report(self, progress: Progress) -> None:
        if (running := self._running.get(progress.request_id)) is not None:
            running.num_reported = progress.start + len(progress.token_ids)
            self.outbox.put(progress)

    async def _serve(self, running: _Running) -> None:
        request_id = running.request.request_id
        done: Completion | None = None
        failure: GenerationError | None = None
        try:
            done = await self._complete(running)
        except (InvalidRequestError, GenerationTimeoutError) as error:
            failure = error
        except GenerationError as error:
            failure = ReplicaError(f"no engine of the server completes requests: {error}")
        finally:
            del self._running[request_id]
            self._num_ended += running.num_reported if done is None else len(done.token_ids)
            self._notify()
        self._end(request_id, done, failure)

    async def _complete(self, running: _Running) -> Completion:
        tokens = running.tokens
        while True:
            await self._wait_until(lambda: running.must_end or self._may_start(running))
            left = remaining_request(running.request, tokens.ended, attempt=running.attempts)
            if running.must_end or left is None:
                return tokens.ended if running.must_end else used_up(tokens.ended)
            await self._sample(running, left)
            if tokens.ended.finish_reason is not FinishReason.ABORT:
                return tokens.ended

    async def _sample(self, running: _Running, left: GenerationRequest) -> None:
        """Have the rest of a request sampled under the current version, until a pull or pause."""
        tokens, version = running.tokens, self._version
        staged = self.staged.get(version)
        piece = replace(
            left,
            request_id=f"{self._prefix}/{left.request_id}",
            session_id=left.session_id and f"{self.name}/{left.session_id}",
            prompt_id=left.prompt_id and f"{self.name}/{left.prompt_id}",
            adapter="" if staged is None else slot_adapter(staged.slot, staged.published),
            min_version=0 if staged is None else staged.published,
        )
        running.attempts += 1
        running.slot = -1 if staged is None else staged.slot
        running.version, running.piece_id = version, piece.request_id
        tokens.start_piece(piece.request_id)
        runs = (VersionRun(0, version),)

        def on_progress(progress: Progress) -> None:
            tokens.add_progress(replace(progress, version_runs=runs))

        try:
            done = await self._router.generate(piece, on_progress)
        finally:
            running.piece_id = ""
            self._notify()
        tokens.end_piece(replace(done, version_runs=runs if done.token_ids else ()))

    def _may_start(self, running: _Running) -> bool:
        """Whether a pause lets the request run. Of those that it found, `wait` lets all run."""
        if self._pause is None:
            return True
        return self._pause.mode == "wait" and running.attempts > 0

    def _num_running(self) -> int:
        return sum(bool(one.piece_id) for one in self._running.values())

    def _num_sampled(self) -> int:
        return self._num_ended + sum(one.num_reported for one in self._running.values())

    # Commands.

    async def _answer(self, call: Call[Any]) -> None:
        result: Any = None
        failure: ReplicaError | None = None
        try:
            match call.payload:
                case AbortRequests(request_ids):
                    await self._abort(request_ids)
                case Pull(version):
                    async with self._switching:
                        result = await self._pull(version)
                case Pause():
                    self._pause = call.payload
                    async with self._switching:
                        await self._halt(call.payload)
                case Resume():
                    self._pause = None
                    self._notify()
                case ReadTokens():
                    result = self._reading()
                case ReadStats():
                    result = await self._stats()
        except (GenerationError, WeightSyncError) as error:
            failure = ReplicaError(str(error))
        self._end(call.call_id, result, failure)

    async def _abort(self, request_ids: Collection[str]) -> None:
        found = [self._running[name] for name in request_ids if name in self._running]
        for one in found:
            one.must_end = True
        self._notify()
        await self._router.abort([one.piece_id for one in found if one.piece_id])

    async def _pull(self, version: int) -> PullReport:
        started_s = _now()
        if version not in self.staged:
            raise WeightSyncError(f"version {version} is not staged; staged are {[*self.staged]}")
        self._version = version
        old = [one for one in self._running.values() if one.piece_id and one.version != version]
        await self._interrupt(old)
        return PullReport(
            version=version,
            stall_s=_now() - started_s,
            running_requests=len(old),
            recomputed=bool(old),
        )

    async def _halt(self, pause: Pause) -> None:
        found = [one for one in self._running.values() if one.piece_id]
        if pause.mode == "abort":
            for one in found:
                one.must_end = True
        if pause.mode != "wait":
            await self._interrupt(found)
            return
        await self._wait_until(
            lambda: (
                self._pause is not pause or not any(one.attempts for one in self._running.values())
            )
        )

    async def _interrupt(self, found: Collection[_Running]) -> None:
        """End the running pieces of these requests, and wait until they have ended."""
        pieces = {one: one.piece_id for one in found}
        await self._router.abort(list(pieces.values()))
        await self._wait_until(lambda: all(one.piece_id != old for one, old in pieces.items()))

    def _reading(self) -> EngineReading:
        running = sum(one.num_reported for one in self._running.values())
        return EngineReading(sampled_tokens=self._num_sampled(), running_tokens=running)

    async def _stats(self) -> EngineStats:
        engines = list((await self._router.stats()).values())
        running, sampled = self._num_running(), self._num_sampled()
        return EngineStats(
            version=self._version,
            running=running,
            waiting=len(self._running) - running,
            kv_use=sum(one.kv_use for one in engines) / max(1, len(engines)),
            kv_tokens=sum(one.kv_tokens for one in engines),
            preemptions=sum(one.preemptions for one in engines),
            generated_tokens=sampled,
            tokens_per_second=self._rate.read(sampled),
            steps=sum(one.steps for one in engines),
        )

    # Helpers.

    def _end(
        self, call_id: CallId, result: Any = None, error: GenerationError | None = None
    ) -> None:
        self.outbox.put(End(call_id=call_id, result=result, error=error), is_urgent=True)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Any) -> None:
        while not condition():
            await self._changed.wait()


def _read(content: bytes, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Read an uploaded adapter.

    Raises:
        ValueError: it is not a safetensors file of finite tensors with these names and shapes.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, torch.Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"it is no safetensors file: {error}") from error
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict(shapes):
        wrong = sorted(found.items() ^ dict(shapes).items())[:1]
        raise ValueError(f"its tensors are not those of the registered adapter: {wrong}")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16) or not tensor.isfinite().all():
            raise ValueError(f"{name} is not of finite numbers in float32 or bfloat16")
    return tensors


def _now() -> float:
    return asyncio.get_running_loop().time()
