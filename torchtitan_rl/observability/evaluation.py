"""Statistics of an evaluation: how sure its mean reward is, and pass@k. Pure.

The unit is the problem: its samples share a difficulty, so they are averaged first, and the
interval is over problems. It says how much the mean would differ on other problems of the same
kind; two evaluations on the same problems differ by less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from torchtitan_rl.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval | None:
    """Student's interval: mean ± t sqrt(s² / n), with the t of n - 1 degrees of freedom (Student,
    "The Probable Error of a Mean", 1908). None for fewer than two values, which have no spread.

    Rewards are not normal, but their mean nearly is from some tens of problems on; with fewer the
    t makes the interval as wide as it must be.
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    t = t_quantile(0.5 + confidence / 2, degrees=len(values) - 1)
    half = t * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half)


def t_quantile(probability: float, *, degrees: int) -> float:
    """Quantile of Student's t: exact for 1 and 2 degrees of freedom, else by the expansion around
    the normal quantile (Abramowitz and Stegun, 26.7.5; at 97.5 % at most 0.2 % too small)."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**i for i, term in enumerate(terms, start=1))


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that one of ``k`` samples solves a problem, without bias from ``num_samples``
    samples of which ``num_solved`` did: 1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating Large
    Language Models Trained on Code", 2021, equation 1).

    Raises:
        ValueError: not 1 <= k <= num_samples, or not 0 <= num_solved <= num_samples.
    """
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise ValueError(f"pass@{k} of {num_solved} solved in {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def evaluation_statistics(
    groups: Sequence[RolloutGroup], *, success_reward: float
) -> dict[str, float]:
    """Of one evaluation; without the prefix ``evaluation/``.

    A failed rollout has no reward: it is left out of its problem's mean, but counts as a sample
    that did not solve it. pass@k is given for the powers of two up to the smallest number of
    samples of a problem, and for that number.
    """
    rewards = [[r.reward for r in group.rollouts if r.reward is not None] for group in groups]
    metrics: dict[str, float] = {}
    interval = mean_interval([fmean(of_problem) for of_problem in rewards if of_problem])
    if interval is not None:
        metrics = {"reward_ci95_low": interval.low, "reward_ci95_high": interval.high}
    counts = [
        (len(group.rollouts), sum(reward >= success_reward for reward in of_problem))
        for group, of_problem in zip(groups, rewards, strict=True)
        if group.rollouts
    ]
    for k in _ks(min((samples for samples, _ in counts), default=0)):
        metrics[f"pass_at_k/{k}"] = fmean(pass_at_k(n, solved, k) for n, solved in counts)
    return metrics


def _ks(most: int) -> list[int]:
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({*powers, most}) if most else []
