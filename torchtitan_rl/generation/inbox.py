"""Where rank 0 queues what callers want, and how it is turned into the next decision.

Invariants: what is put in leaves exactly once, in a decision; close goes before a pull, a pull
before admissions and aborts; at most one pull waits (the latest). Waiting never spins.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass

from torchtitan_rl.generation.decision import Action, KvPolicy, LoopDecision
from torchtitan_rl.generation.engine import Admission
from torchtitan_rl.generation.futures import uncancellable_future
from torchtitan_rl.types import PullReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """What waits in an inbox at one moment."""

    must_close: bool = False
    pull_version: int | None = None
    admissions: tuple[Admission, ...] = ()
    aborts: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self == Queued()


def decide(queued: Queued, *, max_steps: int, kv_policy: KvPolicy) -> tuple[LoopDecision, Queued]:
    """The next decision, and what stays queued after it."""
    if queued.must_close:
        return LoopDecision(action=Action.CLOSE), Queued()
    if queued.pull_version is not None:
        decision = LoopDecision(
            action=Action.PULL, version=queued.pull_version, kv_policy=kv_policy
        )
        return decision, Queued(admissions=queued.admissions, aborts=queued.aborts)
    decision = LoopDecision(
        action=Action.STEP,
        admissions=queued.admissions,
        aborts=queued.aborts,
        num_steps=max_steps,
    )
    return decision, Queued()


class Inbox:
    """Thread-safe queue of one engine loop: many threads put, the loop's thread takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._must_close = False
        self._pull_version: int | None = None
        self._pull_futures: list[Future[PullReport]] = []
        self._admissions: list[Admission] = []
        self._aborts: list[str] = []

    def admit(self, admission: Admission) -> None:
        with self._changed:
            self._admissions.append(admission)
            self._changed.notify()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        with self._changed:
            self._aborts.extend(request_ids)
            self._changed.notify()

    def pull(self, version: int) -> Future[PullReport]:
        """Ask for a pull. One that waits already is replaced; who waits for it waits on."""
        future: Future[PullReport] = uncancellable_future()
        with self._changed:
            self._pull_version = version
            self._pull_futures.append(future)
            self._changed.notify()
        return future

    def drain_pulls(self) -> list[Future[PullReport]]:
        """Give up the pull that waits, if any; returns the futures of those who wait for it."""
        with self._changed:
            futures, self._pull_futures, self._pull_version = self._pull_futures, [], None
            return futures

    def close(self) -> None:
        with self._changed:
            self._must_close = True
            self._changed.notify()

    def is_empty(self) -> bool:
        with self._changed:
            return self._queued().is_empty

    def num_admissions(self) -> int:
        with self._changed:
            return len(self._admissions)

    def next_decision(
        self, *, may_sleep: bool, sleep_s: float | None, max_steps: int, kv_policy: KvPolicy
    ) -> tuple[LoopDecision, list[Future[PullReport]]]:
        """Take the next decision and, for a PULL, the futures that wait for it.

        With ``may_sleep`` (nothing to step) and nothing queued it sleeps until something is, or
        for ``sleep_s`` seconds, after which it returns an empty STEP. None sleeps without end.
        """
        with self._changed:
            if may_sleep:
                self._changed.wait_for(lambda: not self._queued().is_empty, timeout=sleep_s)
            decision, rest = decide(self._queued(), max_steps=max_steps, kv_policy=kv_policy)
            self._must_close = rest.must_close
            self._pull_version = rest.pull_version
            self._admissions = list(rest.admissions)
            self._aborts = list(rest.aborts)
            pull_futures: list[Future[PullReport]] = []
            if decision.action is Action.PULL:
                pull_futures, self._pull_futures = self._pull_futures, []
            return decision, pull_futures

    def _queued(self) -> Queued:
        return Queued(
            must_close=self._must_close,
            pull_version=self._pull_version,
            admissions=tuple(self._admissions),
            aborts=tuple(self._aborts),
        )
