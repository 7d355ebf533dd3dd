"""Failed rollouts in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from torchtitan_rl.types import Rollout, RolloutGroup

_CAUSE_CHARS = 300
_PARTICULARS = re.compile(r"\S*\d\S*")  # ids, addresses and numbers


def num_failed(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.status.is_failure for group in groups for rollout in group.rollouts)


def describe_failures(groups: Sequence[RolloutGroup]) -> str:
    """``2 of 16 rollouts failed: env_error: no disk (2x)``, with the most frequent cause; empty
    where none failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if rollout.status.is_failure]
    if not failed:
        return ""
    causes = Counter(map(_kind, failed))
    ((kind, number),) = causes.most_common(1)
    cause = " ".join(_cause(next(one for one in failed if _kind(one) == kind)).split())
    if len(cause) > _CAUSE_CHARS:
        cause = f"{cause[:_CAUSE_CHARS]}..."
    others = len(causes) - 1
    more = f", and {others} other cause{'s' if others > 1 else ''}" if others else ""
    return f"{len(failed)} of {len(rollouts)} rollouts failed: {cause} ({number}x){more}"


def all_failed_alike(groups: Sequence[RolloutGroup]) -> bool:
    """Whether every rollout failed, and for one cause."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return all(one.status.is_failure for one in rollouts) and len(set(map(_kind, rollouts))) == 1


def _cause(rollout: Rollout) -> str:
    status = rollout.status.value
    return f"{status}: {rollout.cause}" if rollout.cause else status


def _kind(rollout: Rollout) -> str:
    """The cause without what differs between rollouts that failed alike."""
    return _PARTICULARS.sub("#", _cause(rollout).replace(rollout.rollout_id, "#0"))
