"""Derives how many groups may be in the buffer so that no token gets too old, with the proof. Pure.

With P groups per step, the staleness cap S, and at most K younger groups that may overtake a slow
group (``schedule.max_overtaking_share`` times P), the buffer holds B groups:

    B = (S + 1) P - K        for S >= 1

**Why that bounds the age.** A group is admitted when the newest trained version is a, and its
tokens are sampled by replicas that hold a or a newer version. Slots are freed when a batch has been
trained, so when the group is admitted, at most B - 1 other groups are not yet trained. All of them
may be trained before the group, and at most K groups that were admitted later may overtake it.
Batches have P groups, so at most (B - 1 + K) // P whole batches are trained between the group's
admission and its own batch. It is trained at a version of at most a + (B - 1 + K) // P = a + ((S +
1) P - 1) // P = a + S. If a group is discarded, others are only trained earlier.

At S = 0 a group that was overtaken cannot be trained any more. So B = P + K groups start, the first
P to finish are trained, and the others are rolled out again with the new weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The numbers derived from a schedule: counts of groups, except for ``staleness``."""

    groups_per_step: int  # P
    staleness: int  # S
    max_overtakers: int  # K: number of younger groups that may overtake a group
    buffer: int  # B: number of groups that are admitted and not yet trained

    def describe(self) -> str:
        """Describe the schedule in one line, for ``--dry-run``."""
        if self.staleness == 0:
            excess = self.buffer - self.groups_per_step
            surplus = f", the last {excess} are restarted" if excess else ""
            return (
                f"schedule: synchronous, {self.buffer} groups start a step of "
                f"{self.groups_per_step}{surplus}"
            )
        return (
            f"schedule: tokens at most {self.staleness} versions old, {self.buffer} groups under "
            f"way, {self.groups_per_step} a step, at most {self.max_overtakers} overtake a slow one"
        )


def derive_capacity(*, groups_per_step: int, staleness: int, max_share: float) -> Capacity:
    """Compute the capacity from fields of a configuration without errors; ``max_share`` is
    ``schedule.max_overtaking_share``."""
    max_overtakers = int(max_share * groups_per_step)
    if staleness == 0:
        buffer = groups_per_step + max_overtakers
    else:
        buffer = (staleness + 1) * groups_per_step - max_overtakers
    return Capacity(
        groups_per_step=groups_per_step,
        staleness=staleness,
        max_overtakers=max_overtakers,
        buffer=buffer,
    )


def capacity_errors(*, staleness: int, max_share: float) -> list[str]:
    """Return an error if the buffer has no room for a batch and the groups that it overtakes."""
    # A larger share leaves no room in the buffer for a whole batch and the groups it overtakes.
    most = staleness / 2 if staleness > 0 else 1.0
    if 0.0 <= max_share <= most:
        return []
    return [
        f"schedule.max_overtaking_share is {max_share}: give 0 to {most:g} (a share of "
        f"rollout.groups_per_step, at schedule.staleness {staleness})"
    ]
