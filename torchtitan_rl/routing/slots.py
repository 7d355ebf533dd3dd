"""The router's state of each replica, and waits for a change of it.

Invariants: a wait for a replica's answer ends at once when the replica dies; everything here runs
on one event loop and changes without awaiting, so what is read between two awaits is consistent
and needs no lock; a dead replica stays dead, with its first cause, and one that takes its place has
a slot of its own; load, state and version of a slot change through `Slots` alone, which keeps
`Slots.index` up to date.

Besides its `ReplicaState` a slot has flags:

| flag | set when | cleared when | meanwhile the replica |
|---|---|---|---|
| ``is_pinned`` | a pin takes it | the pin ends | is left out of weight syncs |
| ``is_stopped`` | a pause or sleep begins | `resume`, or `leave_to_pin` | gets no request |
| ``is_emptied`` | it executed that pause or sleep | with ``is_stopped`` | has no request |
| ``is_asleep`` | a sleep begins | it executed the wake-up | begins no swap |
| ``is_lagging`` | a sync returns without it | its next swap | still follows that sync |

Which combinations occur:

- ``is_stopped`` without ``is_emptied`` in a pause by ``keep``, and until a pause was executed. A
  swap by ``drain`` waits for either ``is_emptied`` or the end of all requests.
- ``is_asleep`` in state SYNCING only until a swap that began before the sleep has ended: the sleep
  waits for it. A DRAINING replica may sleep: it swaps after the wake-up.
- ``is_pinned`` in state SYNCING or DRAINING only while the pin gets its version, when it begins or
  after a sleep.
- ``is_pinned`` with ``is_stopped`` in every pause but one that spares pins.
- ``is_pinned`` with ``is_lagging``: it follows the sync when the pin ends.
- ``is_lagging`` in state STARTING: no sync waits for it.
- In state DEAD the flags mean nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torchtitan_rl.deadlines import deadline
from torchtitan_rl.errors import ConfigError, DeadlineError, GenerationError, ReplicaError
from torchtitan_rl.generation.futures import copy_of
from torchtitan_rl.routing.active_time import ActiveTime
from torchtitan_rl.routing.load_index import LoadIndex
from torchtitan_rl.routing.replica import Replica, ReplicaState
from torchtitan_rl.routing.wakeups import Wakeups
from torchtitan_rl.weights.handle import WeightHandle

_T = TypeVar("_T")

NO_WEIGHTS = -1  # older than every version


@dataclass(slots=True, eq=False)
class Slot:
    """One replica. ``version``: of the weights it is known to hold, NO_WEIGHTS after a sleep.

    ``pinned_weights``: the weights that a pin keeps it at, where they can be fetched again.
    ``active_time`` stands still while its engine is stopped. ``work``: tasks that wait for its
    answers.
    """

    replica: Replica
    index: int
    is_reserved: bool  # for pins alone
    state: ReplicaState = ReplicaState.SERVING
    version: int = 0
    is_pinned: bool = False
    pinned_weights: WeightHandle | None = None
    is_stopped: bool = False
    is_asleep: bool = False
    is_emptied: bool = False
    is_lagging: bool = False
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    received_tokens: int = 0  # of all its pieces; see `ReplicaAccount`
    sampled_tokens: int = 0  # by its own count, when it reported last
    failure: BaseException | None = None
    active_time: ActiveTime = field(default_factory=ActiveTime)
    work: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def is_live(self) -> bool:
        return self.state is not ReplicaState.DEAD

    @property
    def takes_requests(self) -> bool:
        return self.state in (ReplicaState.SERVING, ReplicaState.SYNCING)

    @property
    def is_swapping(self) -> bool:
        return self.state in (ReplicaState.SYNCING, ReplicaState.DRAINING)

    def note_sampled(self, num_tokens: int) -> None:
        self.sampled_tokens = max(self.sampled_tokens, num_tokens)


class Slots:
    """All replicas of a router, in order."""

    def __init__(self, replicas: Sequence[Replica], reserved: Collection[str] = ()) -> None:
        names = [replica.name for replica in replicas]
        unknown = sorted(set(reserved) - set(names))
        if reserved and (unknown or set(reserved) == set(names)):
            raise ConfigError(
                f"reserved replicas {unknown or sorted(reserved)}: name some of {names}, not all"
            )
        self.all = [
            Slot(replica, index, replica.name in reserved) for index, replica in enumerate(replicas)
        ]
        self.index = LoadIndex(len(self.all))  # of the replicas for ordinary requests
        for slot in self.all:
            self._update(slot)
        self.num_expected = 0  # replicas that will take the place of dead ones
        self.on_dead: Callable[[Slot], None] | None = None
        self.is_paused = False  # replicas get no requests but those of their pins
        self.spares_pins = False  # the pause does not stop pinned replicas
        self.active_time = ActiveTime()  # of all requests but pins'
        self.wakeups = Wakeups()

    def add(self, replica: Replica, *, is_reserved: bool, state: ReplicaState) -> Slot:
        """A slot for one more replica, whose engine has the weights of version 0."""
        slot = Slot(replica, len(self.all), is_reserved, state)
        self.all.append(slot)
        self.index = LoadIndex(len(self.all))
        for one in self.all:
            self._update(one)
        self.notify()
        return slot

    def live(self) -> list[Slot]:
        return [slot for slot in self.all if slot.is_live]

    def live_unreserved(self) -> list[Slot]:
        """Those that ordinary requests may go to, now or after a swap of weights."""
        return [slot for slot in self.all if slot.is_live and not slot.is_reserved]

    def reserved(self) -> list[Slot]:
        return [slot for slot in self.all if slot.is_live and slot.is_reserved]

    def add_request(self, slot: Slot, num_tokens: int) -> None:
        slot.outstanding_tokens += num_tokens
        slot.outstanding_requests += 1
        self._update(slot)

    def release_request(self, slot: Slot, num_tokens: int) -> None:
        slot.outstanding_tokens -= num_tokens
        slot.outstanding_requests -= 1
        self._update(slot)
        self.notify()

    def set_version(self, slot: Slot, version: int) -> None:
        slot.version = version
        self._update(slot)
        self.notify()

    def set_state(self, slot: Slot, state: ReplicaState) -> None:
        if slot.is_live:
            slot.state = state
            self._update(slot)
        self.notify()

    def mark_dead(self, slot: Slot, error: BaseException) -> None:
        """It gets no further request, and its running ones are taken from it."""
        was_live, slot.state = slot.is_live, ReplicaState.DEAD
        slot.failure = slot.failure or error
        if was_live and self.on_dead is not None:
            self.on_dead(slot)  # before anything finds that none is left
        self._update(slot)
        for future in slot.work:
            future.cancel()
        self.notify()

    async def answer(self, slot: Slot, work: Coroutine[Any, Any, _T]) -> _T:
        """The answer of the slot's replica.

        Raises:
            ReplicaError: the slot is dead, or dies while this waits.
        """
        task = asyncio.ensure_future(work)
        slot.work.add(task)
        if not slot.is_live:
            task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            slot.work.discard(task)
            if task.done() and not task.cancelled():
                task.exception()  # retrieved: a cancelled caller does not do it
        if task.cancelled() and not slot.is_live:
            raise loss_of(slot)
        return task.result()

    async def ask(
        self, slot: Slot, work: Coroutine[Any, Any, _T], *, timeout_s: float, required: str = ""
    ) -> _T | None:
        """`answer`, or None where the replica is lost, and hence dead, or exceeds ``timeout_s``.

        ``required``, such as "resume": a replica that does not do it in time is dead, too.
        """
        try:
            async with deadline(timeout_s):
                return await self.answer(slot, work)
        except ReplicaError as error:
            self.mark_dead(slot, error)
        except (TimeoutError, DeadlineError) as error:
            if required:
                lost = ReplicaError(f"{slot.name} did not {required} within {timeout_s:.0f} s")
                lost.__cause__ = error
                self.mark_dead(slot, lost)
        return None

    def require_unreserved(self) -> None:
        """Raises `GenerationError`, with every cause, where none lives or only reserved ones do,
        and none is expected."""
        if not self.live_unreserved() and not self.num_expected:
            names = ", ".join(slot.name for slot in self.reserved())
            exception = f" but the reserved {names}" if names else ""
            raise GenerationError(f"no replica is left{exception}: {self.failure_summary()}")

    def failure_summary(self) -> str:
        return "; ".join(
            f"{slot.name}: {type(slot.failure).__name__}: {slot.failure}"
            for slot in self.all
            if slot.failure is not None
        )

    def notify(self) -> None:
        """Have all waits check their conditions, because something has changed."""
        self.wakeups.notify()

    async def wait_until(
        self,
        predicate: Callable[[], bool],
        *,
        timeout_s: float | None = None,
        key: Hashable = None,
    ) -> bool:
        """True once ``predicate`` holds; False where it does not within ``timeout_s``.

        The caller continues in the same iteration of the event loop, so the predicate still holds
        then. Waits with the same ``key`` must have equal predicates.
        """
        try:
            async with deadline(timeout_s):
                await self.wakeups.until(predicate, key=key)
        except TimeoutError:
            return predicate()
        return True

    def _update(self, slot: Slot) -> None:
        self.index.update(
            slot.index,
            load=slot.outstanding_tokens,
            version=slot.version,
            is_eligible=slot.takes_requests and not slot.is_reserved,
        )


def loss_of(slot: Slot) -> ReplicaError:
    """The error of a call to a dead replica."""
    if isinstance(slot.failure, ReplicaError):
        return copy_of(slot.failure)
    lost = ReplicaError(f"{slot.name} is lost: {slot.failure}")
    lost.__cause__ = slot.failure
    return lost
