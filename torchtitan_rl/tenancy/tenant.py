"""One training run on a server's engines: `Tenant` is the engine loop that the run sees, made of
requests to the router.

A pull interrupts the tenant's requests; they continue at once under the new version, with their
tokens. Requests of other tenants are not touched.

Invariants
- Tokens of a piece were sampled under the version that the piece began with, which is noted here:
  the router's versions count the uploads of all tenants.
- Each call has exactly one end, after all progress of it.
- What calls and their tokens take in memory is bounded, about, until the run takes their ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from torchtitan_rl.aio import cancel_all, loop_s
from torchtitan_rl.channel import Call, CallId, End, Outbox
from torchtitan_rl.config.lora import LoraConfig, slot_adapter
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
    WeightSyncError,
)
from torchtitan_rl.generation import commands
from torchtitan_rl.generation.engine import ReadingRate
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.continuation import PartialTokens, remaining_request, used_up
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import check_options
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.tenancy.messages import BATCH_CALLS
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

_REPORT_S = 0.05  # shortest time between two batches of progress
_CALL_BYTES = 8 << 10  # of a call without its payload
_REPORT_BYTES = 500  # of a report of progress, which may have one token
_VALUE_BYTES = 72  # of a value that may be one byte of a message, or of a token and its logprob


@dataclass(frozen=True, slots=True)
class Staged:
    """A version of a tenant's adapter in the engines: its slot, and the server's own version."""

    slot: int
    published: int


@dataclass(slots=True, eq=False)
class _Running:
    """A request. ``piece_id`` is that of the running piece, on the router; ``version`` and ``slot``
    are those of its adapter."""

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
    """The engine loop that a run sees. ``staged`` are the versions that it may pull. Calls whose
    ends the run has not taken hold at most about ``most_bytes``."""

    def __init__(
        self,
        name: str,
        router: GeneratorRouter,
        *,
        slots: tuple[int, int],
        lora: LoraConfig,
        most_bytes: int,
    ) -> None:
        self.name = name
        self.slots = slots
        self.lora = lora
        self.staged: dict[int, Staged] = {}
        self._outbox: Outbox[FromReplica] = Outbox(interval_s=_REPORT_S)
        self._router = router
        self._prefix = f"{name}/{secrets.token_hex(4)}"  # differs from that of an earlier process
        self._version = 0  # the served policy itself, as an adapter begins
        self._pause: commands.Pause | None = None
        self._running: dict[str, _Running] = {}
        self._changed = asyncio.Event()
        self._switching = asyncio.Lock()  # pulls and pauses are executed in order
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_ended = 0  # tokens of ended requests
        self._held: dict[CallId, int] = {}  # memory of each call whose end was not taken
        self._num_held = 0  # their sum
        self._most_bytes = most_bytes
        self._rate = ReadingRate()

    def counts(self) -> dict[str, float]:
        return {
            "version": self._version,
            "running_requests": self._num_running(),
            "sampled_tokens": self._num_sampled(),
        }

    @property
    def has_open_calls(self) -> bool:
        """Whether the run has not taken the ends of all calls."""
        return bool(self._held)

    def deliver(self, calls: Sequence[tuple[ToReplica, int]]) -> bool:
        """Pass calls to the tenant, in order, with the sizes of their payloads in bytes. Returns
        False, and takes none, if there are requests and no room for them. RefusedError: too many
        commands are open, or a call has the id of an open one; none is taken."""
        sizes = {call.call_id: _memory(call, num_bytes) for call, num_bytes in calls}
        if len(sizes) < len(calls) or sizes.keys() & self._held.keys():
            raise RefusedError(400, "invalid_messages", "a call has the id of an open one")
        if any(isinstance(call.payload, GenerationRequest) for call, _ in calls):
            if self._num_held >= self._most_bytes:  # by at most one batch it may be more
                return False
        elif calls and sum(isinstance(one, int) for one in self._held) >= BATCH_CALLS:
            message = f"{len(self._held)} calls of this run are open; take the ends of some"
            raise RefusedError(429, "too_many_calls", message)
        self._held |= sizes
        self._num_held += sum(sizes.values())
        for call, _ in calls:
            if isinstance(call.payload, GenerationRequest):
                self._submit(call.payload)
            else:
                self._start(self._answer(call))
        return True

    async def take(self, timeout_s: float) -> tuple[FromReplica, ...]:
        """The messages for the run; none within ``timeout_s``: an empty batch."""
        messages = await self._outbox.take(timeout_s)
        for one in messages:
            if isinstance(one, End):
                self._num_held -= self._held.pop(one.call_id)
        return messages

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
        self._outbox.fail(RefusedError(410, "no_lease", "this lease has ended"))
        await cancel_all(self._tasks)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=f"tenant {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Requests.

    def _submit(self, request: GenerationRequest) -> None:
        if message := self._refusal(request):
            self._end(request.request_id, error=InvalidRequestError(message))
            return
        request = replace(request, resume_from=None)
        tokens = PartialTokens(request, self._report)
        running = self._running[request.request_id] = _Running(request, tokens)
        running.task = self._start(self._serve(running))

    def _refusal(self, request: GenerationRequest) -> str:
        """Why a request is refused that no engine must see; empty if it is not."""
        name = f"request {request.request_id!r}"
        if request.sampling.prompt_logprobs is not None:
            return f"{name} asks for prompt_logprobs, which runs do not get"
        try:
            check_options(request.sampling.engine_options)
        except RefusedError as error:
            return f"{name}: {error}"
        return ""

    def _report(self, progress: Progress) -> None:
        if (running := self._running.get(progress.request_id)) is not None:
            kept = (len(run.kept) for run in progress.kept_tokens if isinstance(run.kept, bytes))
            num_bytes = _REPORT_BYTES + sum(kept)
            self._held[progress.request_id] += num_bytes
            self._num_held += num_bytes
            running.num_reported = progress.start + len(progress.token_ids)
            self._outbox.put(progress)

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
                case commands.AbortRequests(request_ids):
                    await self._abort(request_ids)
                case commands.Pull(version):
                    async with self._switching:
                        result = await self._pull(version)
                case commands.Pause():
                    self._pause = call.payload
                    async with self._switching:
                        await self._halt(call.payload)
                case commands.Resume():
                    self._pause = None
                    self._notify()
                case commands.ReadTokens():
                    sampled = self._num_sampled()
                    running = sampled - self._num_ended
                    result = EngineReading(sampled_tokens=sampled, running_tokens=running)
                case commands.ReadStats():
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
        started_s = loop_s()
        if version not in self.staged:
            raise WeightSyncError(f"version {version} is not staged; staged are {[*self.staged]}")
        self._version = version
        old = [one for one in self._running.values() if one.piece_id and one.version != version]
        await self._interrupt(old)
        return PullReport(
            version=version,
            stall_s=loop_s() - started_s,
            running_requests=len(old),
            recomputed=bool(old),
        )

    async def _halt(self, pause: commands.Pause) -> None:
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
        self._outbox.put(End(call_id=call_id, result=result, error=error), is_urgent=True)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Any) -> None:
        while not condition():
            await self._changed.wait()


def _memory(call: ToReplica, num_bytes: int) -> int:
    """About what a call takes in memory; of a request, with the tokens that it may get."""
    if not isinstance(request := call.payload, GenerationRequest):
        return _CALL_BYTES + _VALUE_BYTES * num_bytes
    sampling = request.sampling
    num_values = len(request.prompt_token_ids) + len(msgspec.msgpack.encode(sampling))
    num_values += max(0, sampling.max_tokens) * (1 + 2 * max(0, sampling.num_logprobs))
    return _CALL_BYTES + _VALUE_BYTES * num_values + num_bytes
