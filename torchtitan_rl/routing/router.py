"""`GeneratorRouter.generate` is the only way to a replica.

Invariants: a call's load is released on every exit path; a replica that failed is dead and gets no
further request (a fast-failing one never looks idle); a request that lost its replica runs on
another one from its prompt; every wait has a deadline and says what it waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.routing.replica import Replica, ReplicaState
from torchtitan_rl.routing.strategies import ReplicaView, RoutingStrategy, StickyLeastLoaded
from torchtitan_rl.types import Completion, EngineStats, GenerationRequest, PullReport
from torchtitan_rl.weights.handle import WeightHandle

SyncMode = Literal["hot_swap", "drain"]

_MAX_SESSIONS = 65_536  # homes remembered; the longest unused are forgotten first
_ABORT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Slot:
    """A replica with what the router keeps about it."""

    replica: Replica
    state: ReplicaState = ReplicaState.SERVING
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    failure: BaseException | None = None

    @property
    def takes_requests(self) -> bool:
        return self.state in (ReplicaState.SERVING, ReplicaState.SYNCING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What a weight sync did. ``stage_s`` and ``pull_s`` are the slowest replica's."""

    version: int
    stage_s: float
    pull_s: float
    pulls: tuple[PullReport, ...]
    lost: tuple[str, ...] = field(default=())  # replicas that could not follow


class GeneratorRouter:
    """Spreads requests over replicas and brings new weights to them."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        strategy: RoutingStrategy | None = None,
        request_timeout_s: float = 600.0,
        sync_timeout_s: float = 300.0,
    ) -> None:
        self._slots = [_Slot(replica) for replica in replicas]
        self._strategy = strategy or StickyLeastLoaded()
        self._request_timeout_s = request_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._changed = asyncio.Condition()
        self._sync_lock = asyncio.Lock()
        self._is_closed = False

    async def generate(self, request: GenerationRequest) -> Completion:
        """Complete one request on some replica.

        Raises:
            InvalidRequestError: the replica refused it; nobody else is disturbed.
            GenerationTimeoutError: it took longer than the request time-out.
            GenerationError: no replica is left.
        """
        deadline = time.monotonic() + self._request_timeout_s
        while True:
            slot = await self._slot_for(request, deadline)
            try:
                return await self._call(slot, request, deadline)
            except ReplicaError as error:
                await self._bury(slot, error)

    async def sync_weights(self, handle: WeightHandle, *, mode: SyncMode) -> SyncReport:
        """Bring every live replica to ``handle.version``; one that cannot follow is dead.

        Weights are staged while decoding goes on. `drain` then lets running requests finish
        first, new ones waiting meanwhile; `hot_swap` swaps underneath them.

        Raises:
            WeightSyncError: no replica holds the new weights.
        """
        async with self._sync_lock:
            live = [slot for slot in self._slots if slot.state is not ReplicaState.DEAD]
            started = time.monotonic()
            await asyncio.gather(*(self._stage(slot, handle) for slot in live))
            staged = time.monotonic()
            live = [slot for slot in live if slot.state is not ReplicaState.DEAD]
            pulls = await asyncio.gather(*(self._pull(slot, handle.version, mode) for slot in live))
            lost = [slot for slot in self._slots if slot.state is ReplicaState.DEAD]
            if not any(pulls):
                raise WeightSyncError(
                    f"no replica holds version {handle.version}: {self._obituary()}"
                )
            return SyncReport(
                version=handle.version,
                stage_s=staged - started,
                pull_s=time.monotonic() - staged,
                pulls=tuple(pull for pull in pulls if pull is not None),
                lost=tuple(slot.replica.name for slot in lost),
            )

    async def stats(self) -> dict[str, EngineStats]:
        """State of every live replica, by name."""
        live = [slot for slot in self._slots if slot.state is not ReplicaState.DEAD]
        stats = await asyncio.gather(*(slot.replica.stats() for slot in live))
        return {slot.replica.name: stat for slot, stat in zip(live, stats, strict=True)}

    def require_live(self) -> None:
        """Raises `GenerationError`, with every replica's cause, where all are dead."""
        if all(slot.state is ReplicaState.DEAD for slot in self._slots):
            raise GenerationError(f"no replica is left: {self._obituary()}")

    def states(self) -> dict[str, ReplicaState]:
        return {slot.replica.name: slot.state for slot in self._slots}

    def outstanding_tokens(self) -> dict[str, int]:
        return {slot.replica.name: slot.outstanding_tokens for slot in self._slots}

    async def close(self) -> None:
        """Close every replica; requests that still wait here fail."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        live = [slot for slot in self._slots if slot.state is not ReplicaState.DEAD]
        results = await asyncio.gather(
            *(slot.replica.close() for slot in live), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise ExceptionGroup(
                "replicas did not close", [e for e in errors if isinstance(e, Exception)]
            )

    async def _slot_for(self, request: GenerationRequest, deadline: float) -> _Slot:
        """The replica that is to serve the request; waits while all are draining."""
        async with self._changed:
            while True:
                if self._is_closed:
                    raise GenerationError(f"request {request.request_id}: the router is closed")
                index = self._strategy.choose(self._views(), self._home(request.session_id))
                if index is not None:
                    self._remember(request.session_id, index)
                    return self._slots[index]
                self.require_live()
                try:
                    async with asyncio.timeout_at(_loop_time(deadline)):
                        await self._changed.wait()
                except TimeoutError as error:
                    raise GenerationTimeoutError(
                        f"request {request.request_id} waited {self._request_timeout_s:.0f} s for "
                        f"a replica that takes requests; states: {self.states()}"
                    ) from error

    async def _call(self, slot: _Slot, request: GenerationRequest, deadline: float) -> Completion:
        tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        slot.outstanding_tokens += tokens
        slot.outstanding_requests += 1
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                return await slot.replica.generate(request)
        except TimeoutError as error:
            await self._abort(slot, request.request_id)
            raise GenerationTimeoutError(
                f"request {request.request_id} was not completed by replica {slot.replica.name} "
                f"within {self._request_timeout_s:.0f} s"
            ) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._abort(slot, request.request_id))
            raise
        finally:
            slot.outstanding_tokens -= tokens
            slot.outstanding_requests -= 1
            await asyncio.shield(self._notify())

    async def _abort(self, slot: _Slot, request_id: str) -> None:
        """Free the replica of a request that nobody waits for any more."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await slot.replica.abort((request_id,))
        except ReplicaError as error:
            await self._bury(slot, error)
        except TimeoutError:
            await self._bury(
                slot,
                ReplicaError(f"{slot.replica.name} did not answer within {_ABORT_TIMEOUT_S:.0f} s"),
            )

    async def _stage(self, slot: _Slot, handle: WeightHandle) -> None:
        try:
            async with asyncio.timeout(self._sync_timeout_s):
                await slot.replica.stage(handle)
        except (ReplicaError, WeightSyncError, TimeoutError) as error:
            await self._bury(slot, error)

    async def _pull(self, slot: _Slot, version: int, mode: SyncMode) -> PullReport | None:
        try:
            async with asyncio.timeout(self._sync_timeout_s):
                if mode == "drain":
                    await self._drain(slot)
                await self._set_state(slot, ReplicaState.SYNCING)
                report = await slot.replica.pull(version)
        except (ReplicaError, WeightSyncError, TimeoutError) as error:
            await self._bury(slot, error)
            return None
        await self._set_state(slot, ReplicaState.SERVING)
        return report

    async def _drain(self, slot: _Slot) -> None:
        await self._set_state(slot, ReplicaState.DRAINING)
        async with self._changed:
            await self._changed.wait_for(lambda: slot.outstanding_requests == 0)

    async def _set_state(self, slot: _Slot, state: ReplicaState) -> None:
        async with self._changed:
            if slot.state is not ReplicaState.DEAD:
                slot.state = state
            self._changed.notify_all()

    async def _bury(self, slot: _Slot, error: BaseException) -> None:
        async with self._changed:
            slot.state = ReplicaState.DEAD
            slot.failure = slot.failure or error
            self._changed.notify_all()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _views(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                index=index,
                outstanding_tokens=slot.outstanding_tokens,
                takes_requests=slot.takes_requests,
            )
            for index, slot in enumerate(self._slots)
        ]

    def _home(self, session_id: str | None) -> int | None:
        return None if session_id is None else self._homes.get(session_id)

    def _remember(self, session_id: str | None, index: int) -> None:
        if session_id is None:
            return
        self._homes[session_id] = index
        self._homes.move_to_end(session_id)
        if len(self._homes) > _MAX_SESSIONS:
            self._homes.popitem(last=False)

    def _obituary(self) -> str:
        return "; ".join(
            f"{slot.replica.name}: {type(slot.failure).__name__}: {slot.failure}"
            for slot in self._slots
            if slot.failure is not None
        )


def _loop_time(deadline: float) -> float:
    """A time.monotonic() deadline on the running loop's clock."""
    loop = asyncio.get_running_loop()
    return loop.time() + (deadline - time.monotonic())
