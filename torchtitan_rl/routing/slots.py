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

Condition variables of one event loop, cheap where many tasks wait for the same condition.

Invariants: a task is woken when its condition holds after a change, checks it again, and continues
in that iteration of the event loop where it still holds; tasks that share a key share one check per
change and are woken in the order in which they began to wait; simultaneous changes cause one check.

Which replica a request goes to: decided from loads and versions alone, no clock, no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torchtitan_rl.aio import deadline
from torchtitan_rl.errors import ConfigError, DeadlineError, GenerationError, ReplicaError
from torchtitan_rl.generation.commands import copy_of
from torchtitan_rl.routing.active_time import ActiveTime
from torchtitan_rl.routing.load_index import LoadIndex
from torchtitan_rl.routing.replica import Replica, ReplicaState
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


Condition = Callable[[], bool]


class _Wait:
    """The tasks that wait for one condition."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.futures: dict[asyncio.Future[None], None] = {}

    def holds(self) -> bool:
        try:
            return self._condition()
        except Exception:
            return True  # each task checks again and raises it

    def wake(self) -> None:
        for future in self.futures:
            if not future.done():
                future.set_result(None)


class Wakeups:
    """The conditions that tasks wait for."""

    def __init__(self) -> None:
        self._waits: dict[Hashable, _Wait] = {}
        self._is_due = False

    def notify(self) -> None:
        """Something has changed: check all conditions once, in the next iteration."""
        if self._waits and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._check)

    async def until(self, condition: Condition, *, key: Hashable = None) -> None:
        """Return once ``condition`` holds; raise what it raises.

        Waits with the same ``key`` must have equal conditions.
        """
        key = object() if key is None else key
        while not condition():
            await self.once(condition, key, asyncio.get_running_loop().create_future())

    async def once(self, condition: Condition, key: Hashable, future: asyncio.Future[None]) -> None:
        """Return after a change with which ``condition`` held, or once ``future`` is done."""
        wait = self._waits.setdefault(key, _Wait(condition))
        wait.futures[future] = None
        try:
            await future
        finally:
            del wait.futures[future]
            if not wait.futures and self._waits.get(key) is wait:
                del self._waits[key]

    def _check(self) -> None:
        self._is_due = False
        for key, wait in list(self._waits.items()):
            if wait.holds():
                del self._waits[key]
                wait.wake()


class RoutingStrategy(Protocol):
    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        """Index of a replica that is eligible for ``min_version``, or None where there is none.

        Loads are outstanding tokens: prompt and budget of the calls it has. ``last`` is the
        replica that served the session before; the session leaves it where it is too old.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded:
    """The replica with the fewest outstanding tokens; the lowest index among equals."""

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        return replicas.least(min_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyLeastLoaded:
    """A session stays on the replica with its cached prefix, unless that is overloaded or gone.

    Overloaded: more than ``max_imbalance`` times the tokens of the least loaded replica, and more
    than ``slack_tokens`` above it.
    """

    max_imbalance: float = 2.0
    slack_tokens: int = 8192

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        least = replicas.least(min_version)
        if least is None or last is None or not replicas.is_eligible(last, min_version):
            return least
        floor, load = replicas.load(least), replicas.load(last)
        is_overloaded = load > self.max_imbalance * floor and load > floor + self.slack_tokens
        return least if is_overloaded else last


@dataclass(slots=True)
class RoundRobin:
    """Each replica in turn, without regard to load: a baseline for measurements."""

    _next: int = 0

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        for offset in range(replicas.count):
            index = (self._next + offset) % replicas.count
            if replicas.is_eligible(index, min_version):
                self._next = index + 1
                return index
        return None
