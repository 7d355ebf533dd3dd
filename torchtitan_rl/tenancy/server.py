"""Training runs that share the engines of one ``torchtitan-rl serve``: its tenants.

Each tenant trains an adapter of its own on the served policy. It registers, uploads each version of
its adapter, and uses the server as if it were a replica (`tenancy/client.py`). A version is never
changed. Each tenant has two slots in every engine, used in turn, so that the next version is loaded
while requests run under the last one.

Invariants
- A slot gets another version only after every request under its previous version has ended, and
  another tenant only after every request of its previous tenant has ended. Only a run that needs
  this place waits for that.
- Batches of messages are numbered in both directions, so a batch that is sent again is not taken
  twice.
- A tenant is served only with the secret of its lease. The same run (by its folder) may register
  again at any time, and then takes the place of its earlier process. A tenant that is not heard of
  for `LEASE_S`, or has open calls and does not ask for their ends, is removed; its requests end.
- What a tenant uploads is bounded before it is kept, and checked before an engine sees it. Calls of
  all tenants hold about a quarter of the memory at most, in equal parts.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.aio import STOOD_STILL_S, cancel_all, loop_s
from torchtitan_rl.bounds import field_errors
from torchtitan_rl.config.lora import (
    MOST,
    LoraConfig,
    TenantSlots,
    adapter_shapes,
    engine_rank,
    lora_errors,
    num_adapter_weights,
    slot_tensors,
)
from torchtitan_rl.config.machine import memory_bytes
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName, Handler
from torchtitan_rl.tenancy.messages import LEASE_S, WAIT_S, decode_calls, encode_ends
from torchtitan_rl.tenancy.tenant import Staged, Tenant

if TYPE_CHECKING:
    import torch

_HEADER_BYTES = 1 << 20  # of a safetensors file, at most


@dataclass(eq=False)
class Tenants:
    """All tenants of a server; see `handlers`. Use it with ``async with``. ``publish`` makes all
    engines pull tensors, and returns their version. All tenants must train on the served policy, in
    ``policy_dir``."""

    router: GeneratorRouter
    publish: Callable[[Mapping[str, torch.Tensor]], Awaitable[int]]
    _: KW_ONLY
    slots: TenantSlots
    policy_dir: Path
    policy: PolicyArchitecture
    max_model_len: int

    def __post_init__(self) -> None:
        self._by_name: dict[str, _Leased] = {}
        self._loading = asyncio.Lock()
        self._digest = ""
        self._leases: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tenants:
        # Of the files that the engines have read, which may be replaced later.
        self._digest = await asyncio.to_thread(policy_digest, self.policy_dir)
        self._leases = asyncio.create_task(self._end_silent(), name="leases of tenants")
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([] if self._leases is None else [self._leases])
        await asyncio.gather(*map(self._end, self._by_name.values()))

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
        self._check(arguments, lora)
        while True:
            earlier = self._by_name.get(name)
            if earlier is not None and not _are_equal(earlier.owner, owner):
                message = f"another run is served as {name!r}; give this run another name"
                raise RefusedError(409, "tenant_exists", message)
            used = {leased.tenant.slots for leased in self._by_name.values()}
            free = [pair for pair in self.slots.pairs() if pair not in used]
            if earlier is not None:
                ending = [self._end(earlier)]
            elif free:
                break
            else:
                ending = [one.ending for one in self._by_name.values() if one.ending is not None]
            if not ending:
                number = self.slots.number
                message = f"all {number} places are taken; start serve with more --tenants"
                raise RefusedError(503, "no_tenant_place", message)
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        most_bytes = memory_bytes() // 4 // self.slots.number
        tenant = Tenant(name, self.router, slots=free[0], lora=lora, most_bytes=most_bytes)
        leased = _Leased(tenant, owner=owner, secret=secrets.token_hex(16))
        self._by_name[name] = leased
        return {"lease": leased.secret, "lease_s": LEASE_S}

    def _check(self, arguments: Mapping[str, Any], lora: LoraConfig) -> None:
        errors = [*field_errors(lora, prefix="policy.lora.").values()] or lora_errors(lora)
        if engine_rank(lora.rank) > engine_rank(most := self.slots.rank):
            fix = f"give at most {most}, or start serve with a larger --tenant-rank"
            errors.append(f"policy.lora.rank is {lora.rank}: {fix}")
        if lora.alpha > MOST:
            errors.append(f"policy.lora.alpha is {lora.alpha:g}: give at most {MOST:g}")
        if (length := arguments["max_model_len"]) > self.max_model_len:
            why = f"give at most that of the server ({self.max_model_len})"
            errors.append(f"generator.max_model_len is {length}: {why}")
        if not _are_equal(self._digest, arguments["policy"]):
            errors.append("policy.checkpoint is another model than the served one; give that one")
        if errors:
            raise RefusedError(400, "wrong_tenant", "; ".join(errors))

    def _leased(self, arguments: Mapping[str, Any]) -> _Leased:
        """The tenant of a command, whose lease goes on; RefusedError (410) if there is none."""
        leased = self._by_name.get(arguments["name"])
        is_ours = leased is not None and _are_equal(leased.secret, arguments["lease"])
        if leased is None or leased.ending is not None or not is_ours:
            raise _no_lease()
        if not leased.tenant.has_open_calls:  # else it asks for their ends
            leased.heard_s = loop_s()
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
            leased.is_taken = leased.tenant.deliver(calls)
            leased.num_sent = number
        return {"is_taken": leased.is_taken}

    async def _receive(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The messages after batch ``after``; without any within `WAIT_S`, none."""
        leased = self._leased(arguments)
        async with leased.receiving:
            if is_new := leased.num_received <= arguments["after"]:
                leased.heard_s = loop_s()
            if is_new and (messages := await leased.tenant.take(WAIT_S)):
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
        most = 4 * num_adapter_weights(self.policy, leased.tenant.lora) + _HEADER_BYTES
        if offset + len(part) > most:
            message = f"an adapter of this rank has at most {most} bytes"
            raise RefusedError(413, "adapter_too_large", message)
        if upload.version != version or offset > len(upload.content):
            message = f"version {version} has no part before byte {offset}; begin at 0"
            raise RefusedError(409, "out_of_order", message)
        upload.content[offset:] = part
        return {"num_bytes": len(upload.content)}

    async def _stage(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Load an uploaded version into all engines, next to the one in use. If it is being loaded
        already, wait for that."""
        leased, version = self._leased(arguments), arguments["version"]
        async with leased.staging:
            if version not in leased.tenant.staged:
                await self._load(leased, version)
        return {}

    async def _load(self, leased: _Leased, version: int) -> None:
        tenant = leased.tenant
        upload, leased.upload = leased.upload, None
        if upload is None or upload.version != version:
            raise RefusedError(409, "not_uploaded", f"version {version} is not uploaded")
        shapes = adapter_shapes(self.policy, tenant.lora)
        try:
            tensors = await asyncio.to_thread(_read, bytes(upload.content), shapes)
        except ValueError as error:
            raise RefusedError(400, "wrong_adapter", f"version {version}: {error}") from error
        slot = await tenant.free_slot()
        async with self._loading:
            if leased.ending is not None:
                raise _no_lease()  # its slots may be another's
            try:
                published = await self.publish(slot_tensors(slot, tenant.lora, tensors))
            except WeightSyncError as error:
                message = f"version {version}: {error}"
                raise RefusedError(500, "not_loaded", message) from error
            tenant.staged[version] = Staged(slot, published)

    async def _close(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.wait({self._end(self._leased(arguments))})
        return {}

    def _end(self, leased: _Leased) -> asyncio.Task[None]:
        """End a lease. The returned task ends its requests, and then frees its place."""
        if leased.ending is None:
            name = f"end of tenant {leased.tenant.name}"
            leased.ending = asyncio.create_task(self._end_requests(leased), name=name)
        return leased.ending

    async def _end_requests(self, leased: _Leased) -> None:
        await leased.tenant.close()
        del self._by_name[leased.tenant.name]

    async def _end_silent(self) -> None:
        while True:
            due_s = loop_s() + LEASE_S / 8
            await asyncio.sleep(LEASE_S / 8)
            if loop_s() > due_s + STOOD_STILL_S:
                continue  # this process was stopped; what runs sent meanwhile is read first
            for leased in self._by_name.values():
                if loop_s() > leased.heard_s + LEASE_S:
                    self._end(leased)


@dataclass(slots=True)
class _Upload:
    version: int
    content: bytearray = field(default_factory=bytearray)


@dataclass(slots=True)
class _Leased:
    """A tenant and its channel. ``num_sent`` and ``num_received`` are the numbers of the last
    batches, as the run sees it; ``is_taken`` tells of the last one that it sent, and ``batch`` is
    the last one that it may have received."""

    tenant: Tenant
    owner: str
    secret: str
    heard_s: float = field(default_factory=lambda: loop_s())
    num_sent: int = 0
    is_taken: bool = True
    num_received: int = 0
    batch: bytes = b""
    receiving: asyncio.Lock = field(default_factory=asyncio.Lock)
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    upload: _Upload | None = None
    ending: asyncio.Task[None] | None = None


def _read(content: bytes, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Read an uploaded adapter. ValueError: it is not a safetensors file of tensors with these
    names and shapes, and values up to `MOST`."""
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
        is_float = tensor.dtype in (torch.float32, torch.bfloat16)
        if not is_float or not (tensor.abs() <= MOST).all():
            raise ValueError(f"{name} is not of numbers up to {MOST:g} in float32 or bfloat16")
    return tensors


def _are_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _no_lease() -> RefusedError:
    return RefusedError(410, "no_lease", "this lease has ended; register again")
