"""The router's state of each replica, and waits for a change of this state.

Invariants
- A wait for a replica's answer ends at once when the replica dies.
- All state changes happen on one event loop without awaiting, so the state is consistent between
  two awaits.
- A dead replica stays dead, with its first cause, and one that has left never comes back. What
  replaces it has its own `ReplicaState`.
- Only `ReplicaPool` changes load, phase and version, and keeps `ReplicaPool.index` up to date.

Besides its `Phase` a replica has flags:

| flag | set when | cleared when | while set, the replica |
|---|---|---|---|
| ``is_proven`` | it was there at the start, or answered a probe | never | gets requests |
| ``is_pinned`` | a pin takes it | the pin ends | is left out of weight syncs |
| ``is_leaving`` | it shall leave | never | gets no requests, and no pin |
| ``is_asleep`` | a sleep begins | the wake-up was executed | begins no swap |

`Halt` says how far a pause or sleep has stopped the replica: STOPPED from its beginning, EMPTIED
once the engine has executed it (a pause by ``keep`` does not empty a replica), and RUNNING again
after `resume` or `leave_to_pin`. A swap by ``drain`` waits for EMPTIED or the end of all requests.

Which combinations occur:

- ``is_asleep`` is set in phase SYNCING only until a swap that began before the sleep has ended: the
  sleep waits for this swap. A DRAINING replica may sleep: it swaps after the wake-up.
- ``is_pinned`` is set in phase SYNCING or DRAINING only while the pin gets its version, when it
  begins or after a sleep, and in phase DRAINING while a probe has the replica for itself.
- ``is_pinned`` occurs with STOPPED or EMPTIED in every pause, except a pause that leaves pinned
  replicas running.
- ``is_asleep`` occurs with RUNNING only if `resume` came before the wake-up.
- In phases LEFT and DEAD, flags and `Halt` have no meaning.

`LoadIndex` finds the least loaded of many replicas. It has one binary tree for each policy version
that an eligible replica holds (few at any time), whose nodes know the least loaded replica below
them: a change costs O(log N), and a search reads only the roots of versions that are new enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from torchtitan_rl.aio import deadline, wait_within
from torchtitan_rl.errors import ConfigError, DeadlineError, GenerationError, ReplicaError
from torchtitan_rl.generation.commands import EngineCommand, copy_of
from torchtitan_rl.routing.clock import ActiveTime, Wakeups
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress
from torchtitan_rl.weights.distribution import WeightHandle

T = TypeVar("T")


class Phase(StrEnum):
    """The state of a replica. Only serving and syncing replicas get requests."""

    STARTING = "starting"  # joined during the run, and fetches the newest weights
    SERVING = "serving"
    SYNCING = "syncing"  # swapping weights between steps; requests queue in its inbox
    DRAINING = "draining"  # finishing its requests before a swap
    LEFT = "left"  # taken out of service without a loss
    DEAD = "dead"


class Halt(StrEnum):
    """How far a pause or sleep has stopped a replica."""

    RUNNING = "running"
    STOPPED = "stopped"  # gets no request
    EMPTIED = "emptied"  # gets no request, and has none


class Replica(Protocol):
    """One engine, wherever it runs."""

    @property
    def name(self) -> str: ...

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        """Complete a request. ``on_progress`` is called with the new tokens: every few milliseconds
        if ``streams`` is set, else about every second.

        Raises:
            InvalidRequestError: the request failed; other requests are not affected.
            ReplicaError: the replica is lost.
        """

    async def stage(self, handle: WeightHandle) -> None:
        """Fetch published weights on every rank, alongside decoding."""

    async def execute(
        self, command: EngineCommand[T], on_answer: Callable[[T], None] | None = None
    ) -> T:
        """Have the engine loop execute a command. Returns the command's answer.

        ``on_answer`` is called with the answer, after all calls of `generate` that ended before the
        answer have returned or raised, and before any later one does. It must not raise.
        """

    async def close(self) -> None:
        """End the replica's processes, killing them if necessary. A second call has no effect."""


NO_WEIGHTS = -1  # older than every version


@dataclass(slots=True, eq=False)
class ReplicaState:
    """The state of one replica.

    ``version`` is the version of its weights; NO_WEIGHTS after a sleep. ``pinned_weights`` is the
    handle of the pinned weights, if they can be fetched again. ``active_time`` is stopped while the
    replica's engine is stopped. ``work`` has the tasks that wait for the replica's answers.
    """

    replica: Replica
    index: int
    is_reserved: bool  # only for pins
    phase: Phase = Phase.SERVING
    version: int = 0
    is_proven: bool = True
    is_leaving: bool = False
    is_pinned: bool = False
    pinned_weights: WeightHandle | None = None
    halt: Halt = Halt.RUNNING
    is_asleep: bool = False
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    received_tokens: int = 0  # number in all its pieces; see `ReplicaAccount`
    sampled_tokens: int = 0  # the replica's own count in its last report
    failure: BaseException | None = None
    active_time: ActiveTime = field(default_factory=ActiveTime)
    work: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def is_live(self) -> bool:
        return self.phase not in (Phase.LEFT, Phase.DEAD)

    @property
    def is_serving(self) -> bool:
        return self.phase in (Phase.SERVING, Phase.SYNCING) and self.is_proven

    @property
    def takes_requests(self) -> bool:
        """Whether it may get requests without a pin, and pins."""
        return self.is_serving and not self.is_leaving

    @property
    def is_swapping(self) -> bool:
        return self.phase in (Phase.SYNCING, Phase.DRAINING)

    def note_sampled(self, num_tokens: int) -> None:
        self.sampled_tokens = max(self.sampled_tokens, num_tokens)


class ReplicaPool:
    """All replicas of a router, in order."""

    def __init__(self, replicas: Sequence[Replica], reserved: Collection[str] = ()) -> None:
        names = [replica.name for replica in replicas]
        unknown = sorted(set(reserved) - set(names))
        if reserved and (unknown or set(reserved) == set(names)):
            raise ConfigError(
                f"reserved replicas {unknown or sorted(reserved)}: name some of {names}, not all"
            )
        self.all = [
            ReplicaState(replica, index, replica.name in reserved)
            for index, replica in enumerate(replicas)
        ]
        self.index = LoadIndex(len(self.all))  # of the replicas for ordinary requests
        for state in self.all:
            self._update(state)
        self.num_unreserved = sum(not state.is_reserved for state in self.all)  # live ones
        self.num_expected = 0  # number of replicas that will replace dead ones
        self.num_keeping_awake = 0  # see `GeneratorRouter.keeping_awake`
        self.on_dead: Callable[[Replica, BaseException], None] | None = None
        self.is_paused = False  # replicas get only the requests of their pins
        self.spares_pins = False  # the pause does not stop pinned replicas
        self.active_time = ActiveTime()  # the clock of all requests without a pin
        self.wakeups = Wakeups()

    def add(self, replica: Replica, *, is_reserved: bool, phase: Phase) -> ReplicaState:
        """Add a replica, whose engine has the weights of version 0. A reserved one counts as
        proven."""
        state = ReplicaState(replica, len(self.all), is_reserved, phase, is_proven=is_reserved)
        self.all.append(state)
        self.num_unreserved += not is_reserved
        self.index = LoadIndex(len(self.all))
        for one in self.all:
            self._update(one)
        self.notify()
        return state

    def live(self) -> list[ReplicaState]:
        return [state for state in self.all if state.is_live]

    def live_unreserved(self) -> list[ReplicaState]:
        """Return the live replicas that may serve requests without a pin, now or after a weight
        swap."""
        return [state for state in self.all if state.is_live and not state.is_reserved]

    def reserved(self) -> list[ReplicaState]:
        return [state for state in self.all if state.is_live and state.is_reserved]

    def add_request(self, state: ReplicaState, num_tokens: int) -> None:
        state.outstanding_tokens += num_tokens
        state.outstanding_requests += 1
        self._update(state)

    def release_request(self, state: ReplicaState, num_tokens: int) -> None:
        state.outstanding_tokens -= num_tokens
        state.outstanding_requests -= 1
        self._update(state)
        self.notify()

    def set_version(self, state: ReplicaState, version: int) -> None:
        state.version = version
        self._update(state)
        self.notify()

    def set_phase(self, state: ReplicaState, phase: Phase) -> None:
        if state.is_live:
            state.phase = phase
            self._update(state)
        self.notify()

    def set_proven(self, state: ReplicaState) -> None:
        state.is_proven = True
        self._update(state)
        self.notify()

    def set_leaving(self, state: ReplicaState) -> None:
        state.is_leaving = True
        self._update(state)
        self.notify()

    def mark_dead(self, state: ReplicaState, error: BaseException) -> None:
        """Mark a replica dead. It gets no further request, and all waits for its answers end."""
        if state.is_live:
            state.failure = error
            self._end(state, Phase.DEAD)

    def mark_left(self, state: ReplicaState) -> None:
        """Mark a replica that has no request as no longer there. All waits for its answers end."""
        if state.is_live:
            self._end(state, Phase.LEFT)

    def _end(self, state: ReplicaState, phase: Phase) -> None:
        state.phase = phase
        self.num_unreserved -= not state.is_reserved
        if state.failure is not None and self.on_dead is not None:
            # before anything detects that no replica is left
            self.on_dead(state.replica, state.failure)
        self._update(state)
        for future in state.work:
            future.cancel()
        self.notify()

    async def answer(
        self, state: ReplicaState, work: Coroutine[Any, Any, T], *, timeout_s: float | None = None
    ) -> T:
        """Return the replica's answer, the result of ``work``.

        Raises:
            ReplicaError: the replica is dead, or dies while this call waits.
            TimeoutError: there was no answer within ``timeout_s``; ``work`` is cancelled.
        """
        task = asyncio.create_task(work)
        state.work.add(task)
        if not state.is_live:
            task.cancel()
        try:
            if not await wait_within(timeout_s, task):
                raise TimeoutError
        except (TimeoutError, asyncio.CancelledError):
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            state.work.discard(task)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: a cancelled caller does not retrieve it
        if task.cancelled() and not state.is_live:
            raise lost_error(state)
        return task.result()

    async def ask(
        self,
        state: ReplicaState,
        work: Coroutine[Any, Any, T],
        *,
        timeout_s: float,
        required: str = "",
    ) -> T | None:
        """Return the replica's answer like `answer`, but None if the replica is lost, which marks
        it dead, or exceeds ``timeout_s``, which marks it dead with ``required``, a verb for the
        message such as "resume"."""
        try:
            return await self.answer(state, work, timeout_s=timeout_s)
        except ReplicaError as error:
            self.mark_dead(state, error)
        except (TimeoutError, DeadlineError) as error:
            if required:
                lost = ReplicaError(f"{state.name} did not {required} within {timeout_s:.0f} s")
                lost.__cause__ = error
                self.mark_dead(state, lost)
        return None

    def has_unreserved(self) -> bool:
        """Whether a replica for requests without a pin is alive or expected."""
        return bool(self.num_expected or self.num_unreserved)

    def require_unreserved(self) -> None:
        """Raise GenerationError, with the cause of each loss, if there is none `has_unreserved`."""
        if not self.has_unreserved():
            names = ", ".join(state.name for state in self.reserved())
            exception = f" but the reserved {names}" if names else ""
            raise GenerationError(f"no replica is left{exception}: {self.failure_summary()}")

    def failure_summary(self) -> str:
        return "; ".join(
            f"{state.name}: "
            + (f"{type(error).__name__}: {error}" if (error := state.failure) else "has left")
            for state in self.all
            if not state.is_live
        )

    def notify(self) -> None:
        """Make all waits check their conditions, because something has changed."""
        self.wakeups.notify()

    async def wait_until(
        self,
        predicate: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        key: Hashable = None,
    ) -> bool:
        """Wait until ``predicate`` holds; False if it does not within ``timeout_s``. It still holds
        when the caller continues. Waits with the same ``key`` must have equal predicates."""
        try:
            async with deadline(timeout_s):
                await self.wakeups.until(predicate, key=key)
        except TimeoutError:
            return predicate()
        return True

    def _update(self, state: ReplicaState) -> None:
        self.index.update(
            state.index,
            load=state.outstanding_tokens,
            version=state.version,
            is_eligible=state.takes_requests and not state.is_reserved,
        )


def lost_error(state: ReplicaState) -> ReplicaError:
    """Return the error for a call to a dead replica."""
    if isinstance(state.failure, ReplicaError):
        return copy_of(state.failure)
    if state.failure is None:
        return ReplicaError(f"{state.name} has left")
    lost = ReplicaError(f"{state.name} is lost: {state.failure}")
    lost.__cause__ = state.failure
    return lost


_Least = tuple[float, int]  # (load, index)
_NO_CALLER: _Least = (float("inf"), -1)


class _Tree:
    """A binary tree that finds the least loaded replica of one version."""

    def __init__(self, size: int) -> None:
        self._size = size  # a power of two
        self._nodes = [_NO_CALLER] * (2 * size)
        self.num_members = 0

    @property
    def least(self) -> _Least:
        return self._nodes[1]

    def set(self, index: int, value: _Least) -> None:
        nodes, position = self._nodes, self._size + index
        self.num_members += (value is not _NO_CALLER) - (nodes[position] is not _NO_CALLER)
        nodes[position] = value
        while position > 1:
            best = min(nodes[position], nodes[position ^ 1])
            position //= 2
            if nodes[position] == best:
                return  # the nodes above do not change
            nodes[position] = best


class LoadIndex:
    """Loads and versions of ``count`` replicas. A replica is not eligible before its first
    `update`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._size = 1 << max(0, count - 1).bit_length()
        self._trees: dict[int, _Tree] = {}  # by version
        self._leaves: list[tuple[float, int] | None] = [None] * count  # (load, version)

    def update(self, index: int, *, load: int, version: int, is_eligible: bool) -> None:
        """Set the state of a replica."""
        before = self._leaves[index]
        if before is not None and not (is_eligible and before[1] == version):
            self._trees[before[1]].set(index, _NO_CALLER)
            if self._trees[before[1]].num_members == 0:
                del self._trees[before[1]]
        self._leaves[index] = (load, version) if is_eligible else None
        if is_eligible:
            if version not in self._trees:
                self._trees[version] = _Tree(self._size)
            self._trees[version].set(index, (load, index))

    def load(self, index: int) -> float:
        """The replica's load; infinite if it is not eligible."""
        leaf = self._leaves[index]
        return float("inf") if leaf is None else leaf[0]

    def is_eligible(self, index: int, min_version: int = 0) -> bool:
        """Whether the replica may get a request that needs ``min_version`` or newer."""
        leaf = self._leaves[index]
        return leaf is not None and leaf[1] >= min_version

    def least(self, min_version: int = 0) -> int | None:
        """Return the least loaded eligible replica of ``min_version`` or newer; of equally loaded
        ones, the one with the lowest index. None if no replica is eligible."""
        best = _NO_CALLER
        for version, tree in self._trees.items():
            if version >= min_version and tree.least < best:
                best = tree.least
        return None if best is _NO_CALLER else best[1]
