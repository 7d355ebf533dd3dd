"""Lists what each loop waits for, and reports it when nothing changes, so that no wait is silent.

Invariants: a wait is listed exactly while its ``with`` block is open. The watchdog only reads. It
reports a quiet period once per ``report_wait_s``. If nothing changes for ``max_wait_s``, or a wait
exceeds its own limit, the run ends with all waits in the error. Time in which the process itself
was stopped (Ctrl-Z, a debugger, a sleeping machine) does not count as quiet.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn

from torchtitan_rl.errors import DeadlineError
from torchtitan_rl.rollout.run import Phase, RolloutActivity

_MAX_TICK_S = 5.0
_MAX_SHOWN = 500  # rollouts in `activities_to_json`


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One open wait; ``since_s`` is on the clock of its registry."""

    name: str
    since_s: float
    limit_s: float | None
    details: Callable[[], str] | None  # called only when the wait is described

    def describe(self, now_s: float) -> str:
        """Describe the wait: ``trainer waits for a full batch (90 s): 3 of 16 groups finished``."""
        one = self.to_json(now_s)
        text = f"{self.name} ({one['seconds']:.0f} s)"
        return f"{text}: {one['details']}" if one["details"] else text

    def to_json(self, now_s: float) -> dict[str, Any]:
        details = self.details() if self.details is not None else ""
        return {"name": self.name, "seconds": now_s - self.since_s, "details": details}


class WaitRegistry:
    """The open waits of one event loop. ``clock`` replaces the loop's own in tests."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._open: list[Wait] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()

    @contextmanager
    def track(
        self,
        name: str,
        *,
        details: Callable[[], str] | None = None,
        limit_s: float | None = None,
    ) -> Iterator[None]:
        """List a wait while the block is open. ``name`` is a sentence that needs no context, such
        as "trainer waits for a full batch".

        While a wait is within its limit, the watchdog does not end the run; when the limit is
        exceeded, it does. If the awaited call has its own time-out, give a larger limit.
        """
        wait = Wait(name=name, since_s=self.now_s(), limit_s=limit_s, details=details)
        self._open.append(wait)
        try:
            yield
        finally:
            self._open.remove(wait)

    def open(self) -> tuple[Wait, ...]:
        """The open waits, longest first."""
        return tuple(self._open)


@dataclass(eq=False)
class Watchdog:
    """Reports when nothing changes in a run. Run `run` alongside the loops.

    Args:
        num_changes: a number that grows whenever anything changes (groups, steps, pulls ...).
        activities: returns the activity of each unfinished rollout. A new activity is a change too.
        notes: further lines for the report, such as `describe_replicas`.
    """

    waits: WaitRegistry
    _: KW_ONLY
    num_changes: Callable[[], int]
    report_wait_s: float
    max_wait_s: float
    activities: Callable[[], Sequence[RolloutActivity]]
    say: Callable[[str], None]
    notes: Callable[[], Sequence[str]] = tuple

    def __post_init__(self) -> None:
        self.tick_s = min(self.report_wait_s / 10, self.max_wait_s / 10, _MAX_TICK_S)
        self._last_seen: tuple[int, float | None] | None = None
        self._last_poll_s = 0.0
        self._quiet_s = 0.0
        self._num_reports = 0

    async def run(self) -> NoReturn:
        """Poll every ``tick_s``, until cancelled. Raises DeadlineError: nothing changed for
        ``max_wait_s``, or a wait exceeded its limit. The message lists all waits."""
        while True:
            self.poll()
            await asyncio.sleep(self.tick_s)

    def poll(self) -> None:
        """Poll once. Raises DeadlineError like `run`."""
        now_s = self.waits.now_s()
        newest_s = max((activity.since_s for activity in self.activities()), default=None)
        seen = (self.num_changes(), newest_s)
        if seen != self._last_seen:
            self._last_seen = seen
            self._quiet_s, self._num_reports = 0.0, 0
        else:
            self._quiet_s += min(now_s - self._last_poll_s, 2 * self.tick_s)
        self._last_poll_s = now_s
        limited = [(wait, wait.limit_s) for wait in self.waits.open() if wait.limit_s is not None]
        for wait, limit_s in limited:
            if now_s - wait.since_s > limit_s:
                raise DeadlineError(self._report(f"{wait.describe(now_s)}, over its limit"))
        headline = f"nothing has moved for {self._quiet_s:.0f} s"
        if self._quiet_s >= self.max_wait_s and not limited:
            raise DeadlineError(self._report(headline))
        if self._quiet_s >= self.report_wait_s * (self._num_reports + 1):
            self._num_reports += 1
            self.say(self._report(headline))

    def chain(self) -> str:
        """Return the lines of a report: waits (longest first, equal names in one line), rollouts,
        notes."""
        now_s = self.waits.now_s()
        by_name: dict[str, list[Wait]] = {}
        for wait in self.waits.open():
            by_name.setdefault(wait.name, []).append(wait)
        lines = []
        for longest, *others in by_name.values():
            more = f" [and {len(others)} more]" if others else ""
            lines.append(longest.describe(now_s) + more)
        lines += [_describe_activities(self.activities(), now_s), *self.notes()]
        return "\n".join(f"  {line}" for line in lines if line)

    def _report(self, headline: str) -> str:
        return f"{headline}:\n{self.chain() or '  no wait is listed'}"


def _describe_activities(activities: Sequence[RolloutActivity], now_s: float) -> str:
    if not activities:
        return ""
    counts = Counter(activity.phase.value for activity in activities)
    phases = ", ".join(f"{number} in {phase}" for phase, number in counts.most_common())
    return f"{len(activities)} rollouts run ({phases}); longest: {_longest(activities, now_s)}"


def activities_to_json(activities: Sequence[RolloutActivity], now_s: float) -> dict[str, Any]:
    """The number of rollouts in each phase, and those that have been in theirs for longest."""
    longest = heapq.nsmallest(_MAX_SHOWN, activities, key=lambda activity: activity.since_s)
    return {
        "total": len(activities),
        "by_phase": dict(Counter(activity.phase.value for activity in activities)),
        "shown": [
            {
                "rollout_id": one.rollout_id,
                "turn": one.turn,
                "phase": one.phase.value,
                "detail": one.detail,
                "seconds": now_s - one.since_s,
            }
            for one in longest
        ],
    }


def describe_group(group_id: str, activities: Sequence[RolloutActivity], now_s: float) -> str:
    """Describe what a group waits for: the longest current activity of its rollouts."""
    own = [one for one in activities if one.rollout_id.startswith(f"{group_id}/")]
    if not own:
        return f"group {group_id} has no running rollout"
    return f"group {group_id}: {len(own)} rollouts run; {_longest(own, now_s)}"


def describe_replicas(states: Mapping[str, str], outstanding_tokens: Mapping[str, int]) -> str:
    """Describe replicas: ``replica0 serving, 240 tokens outstanding; replica1 dead, 0 tokens
    outstanding``."""
    return "; ".join(
        f"{name} {state}, {outstanding_tokens.get(name, 0)} tokens outstanding"
        for name, state in states.items()
    )


def _longest(activities: Sequence[RolloutActivity], now_s: float) -> str:
    """Describe the longest activity: ``e0/p12/r3, turn 2, environment step for 88 s``. Turn 0 is
    before the first turn."""
    one = min(activities, key=lambda activity: activity.since_s)
    turn = one.turn + (one.phase is Phase.GENERATION)  # `turn` counts complete turns
    where = f"{one.rollout_id}, turn {turn}, {one.phase.value} {one.detail}"
    return f"{where} for {now_s - one.since_s:.0f} s"
