"""Failed rollouts in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torchtitan_rl.types import RolloutGroup

_CAUSE_CHARS = 300


def num_failed(groups: Sequence[RolloutGroup]) -> int:
    return sum(rollout.status.is_failure for group in groups for rollout in group.rollouts)


def describe_failures(groups: Sequence[RolloutGroup]) -> str:
    """``2 of 16 rollouts failed: env_error: no disk (2x)``, with the most frequent cause; empty
    where none failed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    causes = Counter(
        f"{rollout.status.value}: {rollout.cause}" if rollout.cause else rollout.status.value
        for rollout in rollouts
        if rollout.status.is_failure
    )
    if not causes:
        return ""
    ((cause, number),) = causes.most_common(1)
    cause = " ".join(cause.split())
    if len(cause) > _CAUSE_CHARS:
        cause = f"{cause[:_CAUSE_CHARS]}..."
    others = len(causes) - 1
    more = f", and {others} other cause{'s' if others > 1 else ''}" if others else ""
    return f"{causes.total()} of {len(rollouts)} rollouts failed: {cause} ({number}x){more}"
