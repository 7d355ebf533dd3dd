"""No silent wait: says who waits for whom when nothing moves, and ends the run when it lasts.

Invariants: the watchdog only looks, at what `Waits`, rollouts and replicas tell of themselves; a
quiet period is reported once per ``report_wait_s``; a run that made no progress for ``max_wait_s``,
or a wait that is over its own limit, ends with the whole chain in the error. Time in which the
process itself was stopped (Ctrl-Z, a debugger, a sleeping machine) is not quiet time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from torchtitan_rl.errors import DeadlineError
from torchtitan_rl.orchestration.waits import Wait, Waits
from torchtitan_rl.rollout.rollout_run import Phase, RolloutActivity

_MAX_TICK_S = 5.0


class Watchdog:
    """Run `run` beside the loops, in their task group.

    Args:
        progress: a number that changes whenever anything moved (groups, steps, pulls ...).
        activities: what each unfinished rollout does (`Rollouter.activities`); one that begins
            something new is progress too.
        notes: further lines for the chain, such as `describe_replicas`.
        say: shows a message to the user.
    """

    def __init__(
        self,
        waits: Waits,
        *,
        progress: Callable[[], int],
        report_wait_s: float,
        max_wait_s: float,
        activities: Callable[[], Sequence[RolloutActivity]],
        say: Callable[[str], None],
        notes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._waits = waits
        self._progress = progress
        self._report_wait_s = report_wait_s
        self._max_wait_s = max_wait_s
        self._activities = activities
        self._say = say
        self._notes = notes
        self.tick_s = min(report_wait_s / 10, max_wait_s / 10, _MAX_TICK_S)
        self._seen_progress: tuple[int, float | None] | None = None
        self._looked_s = 0.0
        self._quiet_s = 0.0
        self._reports = 0

    async def run(self) -> NoReturn:
        """Look every ``tick_s``, until cancelled.

        Raises:
            DeadlineError: nothing moved for too long; the message is the chain of waits.
        """
        while True:
            self.look()
            await asyncio.sleep(self.tick_s)

    def look(self) -> None:
        """Look once.

        Raises:
            DeadlineError: as `run`.
        """
        now_s = self._waits.now_s()
        self._note_quiet(now_s)
        waits = self._waits.open()
        for wait in waits:
            if wait.is_overdue(now_s):
                raise DeadlineError(self._with_chain(f"{wait.describe(now_s)}, over its limit"))
        has_own_limit = any(wait.limit_s is not None for wait in waits)
        if self._quiet_s >= self._max_wait_s and not has_own_limit:
            raise DeadlineError(self._with_chain(f"nothing has moved for {self._quiet_s:.0f} s"))
        if self._quiet_s >= self._report_wait_s * (self._reports + 1):
            self._reports += 1
            self._say(self._with_chain(f"nothing has moved for {self._quiet_s:.0f} s"))

    def chain(self) -> str:
        """Who waits for what, one a line: waits (the longest first, of equal ones only the
        longest), rollouts, notes."""
        now_s = self._waits.now_s()
        by_name: dict[str, list[Wait]] = {}
        for wait in self._waits.open():
            by_name.setdefault(wait.name, []).append(wait)
        lines = []
        for longest, *others in by_name.values():
            more = f" [and {len(others)} more]" if others else ""
            lines.append(longest.describe(now_s) + more)
        lines += [describe_activities(self._activities(), now_s), *self._notes()]
        return "\n".join(f"  {line}" for line in lines if line)

    def _with_chain(self, headline: str) -> str:
        return f"{headline}:\n{self.chain() or '  nobody says what it waits for'}"

    def _note_quiet(self, now_s: float) -> None:
        newest_s = max((activity.since_s for activity in self._activities()), default=None)
        progress = (self._progress(), newest_s)
        if progress != self._seen_progress:
            self._seen_progress = progress
            self._quiet_s, self._reports = 0.0, 0
        else:
            self._quiet_s += min(now_s - self._looked_s, 2 * self.tick_s)
        self._looked_s = now_s


def describe_activities(activities: Sequence[RolloutActivity], now_s: float) -> str:
    """What the rollouts do, and the one that has not moved for longest; empty where none runs."""
    if not activities:
        return ""
    counts = Counter(activity.phase.value for activity in activities)
    doing = ", ".join(f"{number} in {phase}" for phase, number in counts.most_common())
    longest = min(activities, key=lambda activity: activity.since_s)
    return f"{len(activities)} rollouts run ({doing}); longest: {describe_activity(longest, now_s)}"


def describe_activity(activity: RolloutActivity, now_s: float) -> str:
    """``e0/p12/r3, turn 2, environment step for 88 s``; turn 0 is before the first."""
    turn = activity.turn + (activity.phase is Phase.GENERATION)  # `turn` counts complete ones
    where = f"{activity.rollout_id}, turn {turn}"
    return f"{where}, {activity.phase.value} {activity.detail} for {now_s - activity.since_s:.0f} s"


def describe_group(group_id: str, activities: Sequence[RolloutActivity], now_s: float) -> str:
    """What one group waits for: its rollout that has not moved for longest."""
    own = [one for one in activities if one.rollout_id.startswith(f"{group_id}/")]
    if not own:
        return f"group {group_id} has no running rollout"
    longest = min(own, key=lambda activity: activity.since_s)
    return f"group {group_id}: {len(own)} rollouts run; {describe_activity(longest, now_s)}"


def describe_replicas(states: Mapping[str, str], outstanding_tokens: Mapping[str, int]) -> str:
    """``replica0 serving, 240 tokens outstanding; replica1 dead, 0 tokens outstanding``"""
    return "; ".join(
        f"{name} {state}, {outstanding_tokens.get(name, 0)} tokens outstanding"
        for name, state in states.items()
    )
