"""Advantages of a group's rollouts from their rewards. Pure.

A rollout without a reward (a failed one) gets no advantage and is in no baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AdvantageKind = Literal["mean", "std", "leave_one_out"]

STD_EPS = 1e-6  # keeps the division finite if rewards hardly differ


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """One value for each rollout, None if it had no reward.

    Without ``has_variance`` all rewards are equal (or fewer than two exist), every advantage is
    exactly 0.0, and the group gives no gradient.
    """

    values: tuple[float | None, ...]
    has_variance: bool
    mean: float = 0.0
    scale: float = 1.0

    def of(self, reward: float) -> float:
        """The advantage of a branch with a reward of its own: it is compared with the rollouts'
        rewards, and changes no baseline."""
        return (reward - self.mean) * self.scale


def group_advantages(rewards: Sequence[float | None], kind: AdvantageKind) -> GroupAdvantages:
    """Advantages of one group, over its N rollouts that have a reward ``r``.

    >>> group_advantages([1.0, 0.0, None, 0.5], "mean").values
    (0.5, -0.5, None, 0.0)

    - "mean": ``r - mean(r)`` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    - "std": ``(r - mean(r)) / (std(r) + eps)``, population std (GRPO, Shao et al. 2024,
      arXiv:2402.03300, eq. for outcome supervision)
    - "leave_one_out": ``r`` minus the mean of the other N - 1 (RLOO, Kool et al. 2019;
      Ahmadian et al. 2024, arXiv:2402.14740)

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [reward for reward in rewards if reward is not None]
    if not all(math.isfinite(reward) for reward in scored):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    mean = math.fsum(scored) / max(len(scored), 1)
    if len(scored) < 2 or min(scored) == max(scored):
        values = tuple(None if reward is None else 0.0 for reward in rewards)
        return GroupAdvantages(values=values, has_variance=False, mean=mean)
    scale = 1.0
    if kind == "std":
        variance = math.fsum((reward - mean) ** 2 for reward in scored) / len(scored)
        scale = 1.0 / (math.sqrt(variance) + STD_EPS)
    elif kind == "leave_one_out":  # r - (N mean - r) / (N - 1) = (r - mean) N / (N - 1)
        scale = len(scored) / (len(scored) - 1)
    values = tuple(None if reward is None else (reward - mean) * scale for reward in rewards)
    return GroupAdvantages(values=values, has_variance=True, mean=mean, scale=scale)
