"""The decisions of rank 0, which every rank of a replica applies, one per loop iteration.

`Inbox` queues requests and commands, `decide` (a pure function) turns them into decisions, and a
`LockstepChannel` sends each decision to all ranks. A decision contains everything that must be
equal on all ranks. Its pickled bytes are sent only between the ranks of one replica, which trust
each other.

Invariants
- The ranks of one channel receive the same bytes in the same order.
- Each item put into the inbox leaves it exactly once, in a decision. The order is: close, pull,
  sleep or wake-up, pause, then admissions and aborts. Only the latest pull and the latest pause are
  kept.
- While the inbox is held (paused, or waiting for a pause), no request is admitted. While it is
  paused, no step runs. Pulls and aborts continue. A sleep is also a pause: even after a resume, no
  step runs and no request is admitted before a pull that follows the wake-up.
- Requests are admitted in the order of their arrival, and while the KV cache has room for them.
- Each command has one future. Either the future is resolved here, or the caller of `drain` or
  `resume` fails it, or it is still pending. Waiting never spins.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.generation.commands import (
    EngineCommand,
    Pause,
    PauseMode,
    Pull,
    ReadTokens,
    Sleep,
    WakeUp,
    uncancellable_future,
)
from torchtitan_rl.generation.engine import Engine
from torchtitan_rl.types import EngineStats, GenerationRequest


class Power(StrEnum):
    """Whether an engine can step. A sleep discards the weights, so only a pull makes the engine
    AWAKE."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    EMPTY = "empty"  # after a wake-up, still without weights


class Action(StrEnum):
    STEP = "step"  # admit, abort, then run engine steps
    PULL = "pull"  # swap the weights, apply the KV policy, then step
    PAUSE = "pause"  # abort all requests if ``aborts_all``, then wait for the other ranks
    SLEEP = "sleep"  # abort all requests, release the device's memory, wait for the other ranks
    WAKE_UP = "wake_up"  # allocate the device's memory again; the next pull loads the weights
    CLOSE = "close"  # leave the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPolicy:
    """What happens at a weight pull to KV-cache entries that were computed with older weights.

    ``reset_prefix_cache``: no request admitted later reads these entries. ``recompute_running``:
    running requests prefill again with the new weights; otherwise they keep their entries.
    """

    reset_prefix_cache: bool = True
    recompute_running: bool = True

    def apply(self, engine: Engine, *, running: int, what: str) -> bool:
        """Apply the policy while ``running`` requests are unfinished; return whether they recompute
        their KV. Raises WeightSyncError: the engine kept old prefixes in the cache. ``what``
        (replica and version) begins the message."""
        if not self.reset_prefix_cache:
            return False
        was_reset = engine.reset_prefix_cache(recompute_running=self.recompute_running)
        # While running requests keep their KV, the engine is expected to refuse the reset. The
        # engine itself keeps later requests from reading old blocks (see `Engine.swap_weights`).
        if not was_reset and (self.recompute_running or running == 0):
            raise WeightSyncError(
                f"{what}: the prefix cache was not reset ({running} requests unfinished)"
            )
        return self.recompute_running and running > 0


def kv_policy_errors(*, resets: bool, recomputes: bool, drains: bool = False) -> list[str]:
    """Return a message for each contradiction. ``drains``: whether ``weight_sync.mode`` is
    "drain"."""
    if resets:
        return []
    needs_reset = {
        "weight_sync.recompute_running_on_pull = True": recomputes,
        'weight_sync.mode = "drain"': drains,
    }
    return [
        f"weight_sync.reset_prefix_cache_on_pull = False contradicts {what}: set it to True"
        for what, is_wanted in needs_reset.items()
        if is_wanted
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """One iteration of the engine loop. An empty STEP keeps idle ranks' connections alive.

    STEP admits ``admissions`` in order, with the arrival time ``arrival_s`` (rank 0's time.time()),
    ends the requests in ``aborts``, then runs up to ``num_steps`` engine steps. PULL uses
    ``version``, ``kv_policy`` and ``num_steps``; its steps let decoding continue without a further
    decision. PAUSE and SLEEP use ``aborts_all``.
    """

    action: Action
    admissions: tuple[GenerationRequest, ...] = ()
    arrival_s: float = 0.0
    aborts: tuple[str, ...] = ()
    num_steps: int = 0
    version: int = 0
    kv_policy: KvPolicy | None = None
    aborts_all: bool = False


class LockstepChannel(Protocol):
    """One rank's end of the broadcast from rank 0 to several ranks."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Send ``data`` on rank 0, or receive it on the other ranks, which pass None. Returns it.
        Raises Exception: a peer is gone, or the wait timed out. The ranks are no longer in step."""

    def barrier(self) -> None:
        """Return once all ranks have called this, each after the same decisions. Raises as
        `broadcast`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The content of an inbox at one moment. ``pause`` is not decided yet. ``power`` is the
    engine's state before ``powers``, the queued SLEEP and WAKE_UP actions, oldest first."""

    must_close: bool = False
    pull_version: int | None = None
    powers: tuple[Action, ...] = ()
    power: Power = Power.AWAKE
    pause: PauseMode | None = None
    is_paused: bool = False
    admissions: tuple[GenerationRequest, ...] = ()
    aborts: tuple[str, ...] = ()

    @property
    def is_stopped(self) -> bool:
        return self.is_paused or self.power is not Power.AWAKE

    @property
    def is_held(self) -> bool:
        return self.is_stopped or self.pause == "wait"

    @property
    def pull_is_due(self) -> bool:
        return self.pull_version is not None and self.power is not Power.ASLEEP

    def pause_is_due(self, *, is_idle: bool) -> bool:
        return self.pause is not None and (self.pause != "wait" or is_idle)

    def needs_decision(self, *, is_idle: bool) -> bool:
        """Whether a decision is due, other than to continue stepping."""
        return (
            self.must_close
            or self.pull_is_due
            or bool(self.powers)
            or self.pause_is_due(is_idle=is_idle)
            or bool(self.aborts)
            or (bool(self.admissions) and not self.is_held)
        )


_RESERVED = 0.05  # share of the KV cache


def num_fitting(prompts: Sequence[int], stats: EngineStats, *, is_idle: bool) -> int:
    """Return how many of the waiting requests, whose prompts have these lengths, may start.

    An engine would start a request as soon as its prompt fits, and preempt it again when running
    requests grow. So a share of the cache is reserved for their growth. Prompts count in full
    although siblings share them, and each request that waits in the engine as much as the first
    prompt. An idle engine starts at least one request.
    """
    if not stats.kv_tokens:
        return len(prompts)
    room = stats.kv_tokens * (1.0 - _RESERVED - stats.kv_use) - stats.waiting * sum(prompts[:1])
    fitting = sum(total <= room for total in accumulate(prompts))
    return max(1, fitting) if is_idle else fitting


def decide(
    queued: Queued, *, max_steps: int, kv_policy: KvPolicy, is_idle: bool, stats: EngineStats
) -> tuple[LoopDecision, Queued]:
    """Return the next decision, and the content that stays queued. ``is_idle``: the engine, whose
    ``stats`` these are, has no unfinished request."""
    if queued.must_close:
        return LoopDecision(action=Action.CLOSE), Queued()
    if queued.pull_version is not None and queued.pull_is_due:
        rest = replace(queued, pull_version=None, power=Power.AWAKE)
        pull = LoopDecision(
            action=Action.PULL,
            version=queued.pull_version,
            kv_policy=kv_policy,
            num_steps=0 if rest.is_stopped else 1,
        )
        return pull, rest
    if queued.powers:
        return _decide_power(queued)
    if queued.pause_is_due(is_idle=is_idle):
        pause = LoopDecision(action=Action.PAUSE, aborts_all=queued.pause == "abort")
        return pause, replace(queued, pause=None, is_paused=True)
    fitting = 0
    if not queued.is_held:
        prompts = [len(one.prompt_token_ids) for one in queued.admissions]
        fitting = num_fitting(prompts, stats, is_idle=is_idle)
    admitted, kept = queued.admissions[:fitting], queued.admissions[fitting:]
    if kept and queued.aborts:
        # A request that is to be aborted is admitted in any case: the engine then ends it.
        aborts = frozenset(queued.aborts)
        admitted += tuple(one for one in kept if one.request_id in aborts)
        kept = tuple(one for one in kept if one.request_id not in aborts)
    step = LoopDecision(
        action=Action.STEP,
        admissions=admitted,
        aborts=queued.aborts,
        num_steps=0 if queued.is_stopped else max_steps,
    )
    return step, replace(queued, admissions=kept, aborts=())


def _decide_power(queued: Queued) -> tuple[LoopDecision, Queued]:
    action, *rest = queued.powers
    queued = replace(queued, powers=tuple(rest))
    if action is Action.SLEEP:
        sleep = LoopDecision(action=action, aborts_all=True)
        return sleep, replace(queued, power=Power.ASLEEP, is_paused=True)
    power = Power.EMPTY if queued.power is Power.ASLEEP else queued.power
    return LoopDecision(action=action), replace(queued, power=power)


class Inbox:
    """Thread-safe queue of one engine loop: many threads put, the loop's thread takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued = Queued()
        self._admissions: list[GenerationRequest] = []
        self._aborts: list[str] = []
        self._waiters: defaultdict[Action, list[Future[Any]]] = defaultdict(list)
        self._readers: list[Future[Any]] = []
        self._answering: list[Future[Any]] = []  # futures of the commands or readings taken last

    def admit(self, request: GenerationRequest) -> None:
        with self._changed:
            self._admissions.append(request)
            self._changed.notify()

    def abort(self, request_ids: tuple[str, ...]) -> None:
        with self._changed:
            self._aborts.extend(request_ids)
            self._changed.notify()

    def ask(self, command: EngineCommand[Any]) -> Future[Any]:
        """Queue a command. A pull or pause replaces an earlier one that still waits; the futures of
        both get the later one's answer. Sleeps and wake-ups are decided in order."""
        with self._changed:
            queued = self._queued
            match command:
                case Pull(version):
                    self._queued = replace(queued, pull_version=version)
                    return self._wait_in(self._waiters[Action.PULL])
                case Pause(mode):
                    # Running requests cannot finish while nothing is stepped.
                    is_paused = queued.is_paused and mode != "wait"
                    self._queued = replace(queued, pause=mode, is_paused=is_paused)
                    return self._wait_in(self._waiters[Action.PAUSE])
                case Sleep() | WakeUp():
                    action = Action.SLEEP if isinstance(command, Sleep) else Action.WAKE_UP
                    self._queued = replace(queued, powers=(*queued.powers, action))
                    return self._wait_in(self._waiters[action])
                case ReadTokens():
                    return self._wait_in(self._readers)
                case _:
                    raise TypeError(f"no engine loop executes {command!r}")

    def resume(self) -> list[Future[None]]:
        """End the pause. Returns the futures of pauses that were not decided yet."""
        with self._changed:
            self._queued = replace(self._queued, pause=None, is_paused=False)
            self._changed.notify()
            return self._waiters.pop(Action.PAUSE, [])

    def take_readings(self) -> bool:
        """Take all requested readings (`ReadTokens`), for the next `answer`; whether there are
        any."""
        with self._changed:
            self._answering, self._readers = self._readers, []
            return bool(self._answering)

    def answer(self, result: Any) -> None:
        with self._changed:
            futures, self._answering = self._answering, []
        for future in futures:
            future.set_result(result)

    def drain(self) -> list[Future[Any]]:
        """Drop all queued commands. Returns their futures."""
        with self._changed:
            futures = [one for waiting in self._waiters.values() for one in waiting]
            futures += self._readers + self._answering
            self._waiters.clear()
            self._readers, self._answering = [], []
            self._queued = replace(self._queued, pull_version=None, powers=(), pause=None)
            return futures

    def close(self) -> None:
        with self._changed:
            self._queued = replace(self._queued, must_close=True)
            self._changed.notify()

    def needs_decision(self) -> bool:
        """Whether steps should stop early because a decision is due."""
        with self._changed:
            return self._needs_decision(is_idle=False)

    def is_stopped(self) -> bool:
        with self._changed:
            return self._queued.is_stopped

    def num_admissions(self) -> int:
        with self._changed:
            return len(self._admissions)

    def next_decision(
        self,
        *,
        is_idle: bool,
        sleep_s: float | None,
        max_steps: int,
        kv_policy: KvPolicy,
        stats: EngineStats,
    ) -> LoopDecision:
        """Take the next decision. The next `answer` resolves the commands that it executes.

        With nothing to step (idle or paused) and nothing to decide, this call sleeps until there
        is. After ``sleep_s`` seconds (None: no limit) it returns an empty STEP.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._needs_decision(is_idle=is_idle)
                    or not (is_idle or self._queued.is_stopped)
                ),
                timeout=sleep_s,
            )
            decision, rest = decide(
                self._all_queued(),
                max_steps=max_steps,
                kv_policy=kv_policy,
                is_idle=is_idle,
                stats=stats,
            )
            self._admissions, self._aborts = list(rest.admissions), list(rest.aborts)
            self._queued = replace(rest, admissions=(), aborts=())
            waiting = self._waiters[decision.action]
            # A decision answers one sleep or wake-up, but all waiting pulls or pauses.
            count = 1 if decision.action in (Action.SLEEP, Action.WAKE_UP) else len(waiting)
            self._answering = waiting[:count]
            self._waiters[decision.action] = waiting[count:]
            return replace(decision, arrival_s=time.time())

    def _wait_in(self, futures: list[Future[Any]]) -> Future[Any]:
        future = uncancellable_future()
        futures.append(future)
        self._changed.notify()
        return future

    def _needs_decision(self, *, is_idle: bool) -> bool:
        return bool(self._readers) or self._all_queued().needs_decision(is_idle=is_idle)

    def _all_queued(self) -> Queued:
        return replace(self._queued, admissions=tuple(self._admissions), aborts=tuple(self._aborts))
