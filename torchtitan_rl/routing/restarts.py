"""Starts lost replicas again, and changes the number of replicas of a run.

A dead replica is closed first, because its processes may still use its devices. The new replica has
its own name (``replica0-2`` for the second start of ``replica0``) and joins the router, as one that
is added does. A replica that shall leave gives its requests to others before its processes end; so
does one whose host is about to end, and is then started again like a lost one.

Invariants: a replica that is repeatedly lost soon after its start is given up after
``max_restarts`` consecutive restarts. A replica that shall leave is not started again. Nothing here
ends the run. In the first ``EXPECTED_S`` seconds of a restart, the router's requests wait for the
new replica if no other is left.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from torchtitan_rl.aio import cancel_all, loop_s
from torchtitan_rl.errors import (
    ConfigError,
    HostLeftError,
    ReplicaError,
    TorchtitanRLError,
    one_line,
)
from torchtitan_rl.failures import Failure, Part, restart_delay_s
from torchtitan_rl.routing.replicas import Replica
from torchtitan_rl.routing.router import GeneratorRouter

EXPECTED_S = 300.0
SETTLED_S = 600.0
"""A replica that served for at least this time was not lost soon after its start."""
_CLOSE_S = 60.0

_RESTARTED = re.compile(r"(?P<first>.+)-\d+")


def first_name(name: str) -> str:
    """Return ``replica0`` for ``replica0-2``: the replica's name in the plan."""
    found = _RESTARTED.fullmatch(name)
    return found["first"] if found else name


@dataclass(eq=False)
class ReplicaRestarts:
    """Restarts replicas that are lost while its ``async with`` block runs.

    Args:
        start: starts a replica with the second name in place of the first, which was lost or did
            not start; the names are equal if a replica is added. Waits if the host is gone.
        max_restarts: maximum number of consecutive restarts of one replica.
        is_alone: whether only the replica with this name was lost, and not its host, whose loss is
            reported elsewhere.
        shares_devices: the trainer has the same devices while the replicas sleep. So replicas are
            started while the others are awake, and these fall asleep once that is done.
        on_failure: called with the ended report of each loss.
    """

    router: GeneratorRouter
    start: Callable[[str, str], Awaitable[Replica]]
    _: KW_ONLY
    max_restarts: int
    say: Callable[[str], None]
    is_alone: Callable[[str], Awaitable[bool]] | None = None
    reserved: Collection[str] = ()
    shares_devices: bool = False
    on_failure: Callable[[Failure], None] = lambda failure: None

    def __post_init__(self) -> None:
        self._begun_s: dict[str, float] = {}  # by name: time of joining
        self._num_quick: dict[str, int] = {}  # by first name: consecutive restarts
        self._num_starts: dict[str, int] = {}  # by first name
        self._tasks: set[asyncio.Task[None]] = set()
        self._joining: set[str] = set()  # names of replicas that do not serve yet
        self._leaving: set[str] = set()
        self._scaling = asyncio.Lock()
        self._scalings: set[asyncio.Task[str]] = set()
        self._unreported: dict[str, Failure] = {}  # by name
        self._is_closed = False

    async def __aenter__(self) -> ReplicaRestarts:
        self.router.on_dead(self._on_dead)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._is_closed = True
        await cancel_all(self._tasks | self._scalings)
        for failure in self._unreported.values():
            has_ended = failure.given_up or failure.serve_s is not None
            self.on_failure(failure if has_ended else failure.ended("the run ended first"))

    async def scale(self, number: int, plan: Callable[[int], Sequence[str]]) -> str:
        """Change the number of replicas to ``number``, reserved ones included, after all restarts.
        Returns what happened, in a line. ``plan`` makes `start` know a number of new replicas, and
        returns their names, or raises ConfigError if there is no room.

        Raises:
            ConfigError: the number is refused. Nothing has changed.
            ReplicaError: some replicas did not start, or were lost meanwhile; the others serve.
        """
        if self._is_closed:
            raise ConfigError("the run is ending")
        task = asyncio.create_task(self._scale(number, plan), name="the change of replicas")
        self._scalings.add(task)
        task.add_done_callback(self._scalings.discard)
        return await task

    async def vacate(self, is_there: Callable[[str], bool]) -> None:
        """Take the replicas for which ``is_there(name)`` is true out of service, because their host
        is about to end. Their restart waits until the host is back. Returns when nothing of them is
        left."""
        error = HostLeftError("its host is about to end")
        while not self._is_closed:
            self.router.give_up(lambda name: name in self._joining and is_there(name), error)
            names = [name for name in self.router.versions() if is_there(name)]
            if not names:
                return
            moving = [self._start_task(self._vacate(name, error)) for name in names]
            await asyncio.wait(moving)  # they go on if this call is cancelled
            for task in moving:
                task.result()

    async def _vacate(self, name: str, error: HostLeftError) -> None:
        returns = self.max_restarts > 0 and name not in self._leaving
        with self.router.expecting() if returns else nullcontext():
            replica = await self.router.leave(name)
            await _close(replica)
            if name in self.router.states():
                return  # it was lost before it had left
            self.say(f"{name} has left")
            if returns:
                self._num_quick.setdefault(first_name(name), 0)
                departure = Failure.of(Part.REPLICA, name, error, now_s=loop_s())
                self._start_task(self._come_back(replica, departure, self._expectation()))

    async def _come_back(self, left: Replica, departure: Failure, expectation: ExitStack) -> None:
        with expectation:
            await self._until_serving(left, departure)

    @property
    def waits_for(self) -> str:
        """What a running `scale` waits for."""
        if self._leaving:
            return f"{', '.join(sorted(self._leaving))} to leave"
        joining = f"{', '.join(sorted(self._joining))} to load weights and answer the probe"
        return joining if self._joining else "replicas that start"

    async def _scale(self, number: int, plan: Callable[[int], Sequence[str]]) -> str:
        async with self._scaling:
            while self._tasks:
                await asyncio.wait(self._tasks)
            # No await before all names are in `_leaving`: the replicas counted here still live.
            num_unreserved = self.router.num_unreserved
            num_reserved = len(self.router.versions()) - num_unreserved
            if number <= num_reserved:
                why = ", because the last one is reserved for evaluation" if num_reserved else ""
                raise ConfigError(f"--replicas is {number}: give at least {num_reserved + 1}{why}")
            missing = number - num_reserved - num_unreserved
            if missing > 0:
                works = [self._add(name) for name in plan(missing)]
            else:
                self._leaving.update(self.router.last_to_join(-missing))
                works = [self._remove(name) for name in sorted(self._leaving)]
            errors = [error for error in await asyncio.gather(*works) if error]
            live = sorted(self.router.versions())
            text = f"{len(live)} replica{'' if len(live) == 1 else 's'}: {', '.join(live)}"
            if len(live) < number and not errors:
                errors.append("a replica was lost meanwhile")
            if errors:
                raise ReplicaError(f"{'; '.join(errors)}; the run has {text}")
            return text

    async def _add(self, name: str) -> str:
        """Start a replica. Returns the error, or nothing."""
        try:
            replica = await self.start(name, name)
            shown = await self._join(replica, is_reserved=False)
        except (TorchtitanRLError, OSError) as error:
            self.say(f"{name} is not added: {error}")
            return f"{name} did not start: {error}"
        self._begun_s[name], self._num_quick[name] = loop_s(), 0
        self.say(f"{name} is added: {shown}")
        return ""

    async def _remove(self, name: str) -> str:
        replica = await self.router.leave(name)
        await _close(replica)
        self._leaving.discard(name)
        self.say(f"{name} has left")
        return ""

    def _on_dead(self, lost: Replica, error: BaseException) -> None:
        if self._is_closed or lost.name in self._joining:
            return
        failure = Failure.of(Part.REPLICA, lost.name, error, now_s=loop_s())
        self._unreported[lost.name] = failure
        if lost.name in self._leaving:
            why = "it was about to leave"
        elif self.max_restarts == 0:
            why = "restarts are disabled"
            self.say(f"{lost.name} is lost; the others continue: {failure.cause}")
        elif not self._may_restart(lost.name):
            why = f"after {self.max_restarts} restarts in a row"
            self.say(f"{lost.name} is lost and is not started again, {why}: {failure.cause}")
        else:
            self._start_task(self._replace(lost, failure, self._expectation()))
            return
        self._unreported[lost.name] = failure = failure.ended(why)
        self._start_task(self._report(failure))

    def _expectation(self) -> ExitStack:
        """Make requests wait for a replica that is started, in the first seconds."""
        expectation = ExitStack()
        expectation.enter_context(self.router.expecting())
        timer = asyncio.get_running_loop().call_later(EXPECTED_S, expectation.close)
        expectation.callback(timer.cancel)
        return expectation

    def _start_task(
        self, work: Coroutine[Any, Any, None], name: str = "the restart of a replica"
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.say(f"{task.get_name()} failed: {error!r}")

    async def _replace(self, lost: Replica, failure: Failure, expectation: ExitStack) -> None:
        with expectation:
            if self.is_alone is None or await self.is_alone(lost.name):
                self.say(f"{lost.name} is lost and is started again: {failure.cause}")
            failure = await self._until_serving(lost, failure)
        await self._report(failure)

    async def _report(self, failure: Failure) -> None:
        self._unreported[failure.name] = failure
        tokens = await self.router.lost_tokens(failure.name)
        del self._unreported[failure.name]
        self.on_failure(replace(failure, tokens_again=tokens))

    async def _until_serving(self, lost: Replica, failure: Failure) -> Failure:
        """Start replicas in place of a lost one until one serves, or too many did not. Returns the
        ended report."""
        first = first_name(lost.name)
        await _close(lost)
        last = lost.name  # the replica that was lost, or did not come to serve
        for num_failed in itertools.count(1):
            self._num_starts[first] = self._num_starts.get(first, 1) + 1
            name = f"{first}-{self._num_starts[first]}"
            try:
                async with self.router.keeping_awake() if self.shares_devices else nullcontext():
                    replica = await self.start(last, name)
                    failure = failure.restarted(name, now_s=loop_s())
                    shown = await self._join(replica, is_reserved=first in self.reserved)
            except Exception as error:  # any error counts as a start that failed
                why = str(error) if isinstance(error, TorchtitanRLError) else one_line(error)
                self._num_quick[first] += 1
                if self._num_quick[first] > self.max_restarts:
                    self.say(f"{first} is given up: {why}")
                    return failure.ended(why)
                self.say(f"{name} did not start, which is tried again: {why}")
                last = name
            else:
                self._begun_s[name] = loop_s()
                self.say(f"{name} takes the place of {lost.name}: {shown}")
                return failure.serving(now_s=loop_s(), detail=shown)
            await asyncio.sleep(restart_delay_s(num_failed))
        raise AssertionError

    async def _join(self, replica: Replica, *, is_reserved: bool) -> str:
        self._joining.add(replica.name)
        try:
            shown = await self.router.join(replica, is_reserved=is_reserved)
        except TorchtitanRLError:
            await _close(replica)
            raise
        finally:
            self._joining.discard(replica.name)
        self._start_task(self.router.share_queues(), "the sharing of queues")
        return shown

    def _may_restart(self, name: str) -> bool:
        """Count the restart. Returns whether it is allowed."""
        first, now_s = first_name(name), loop_s()
        begun_s = self._begun_s.pop(name, None)
        if begun_s is None or now_s - begun_s >= SETTLED_S:
            self._num_quick[first] = 0
        self._num_quick[first] += 1
        return self._num_quick[first] <= self.max_restarts


async def _close(lost: Replica) -> None:
    """End the processes of a lost replica, unless nothing on its host answers."""
    with suppress(TorchtitanRLError, TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await lost.close()
