"""Statistics of an evaluation: how sure its mean reward is, and pass@k. Pure.

The unit is the problem: its samples share a difficulty, so they are averaged first, and the
interval is over problems. It says how much the mean would differ on other problems of the same
kind; two evaluations on the same problems differ by less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance

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


def share_interval(
    values: Sequence[float], *, size: int, confidence: float = 0.95
) -> Interval | None:
    """The mean of shares between 0 and 1, one a problem, with Wilson's score interval (Wilson,
    "Probable Inference, the Law of Succession, and Statistical Inference", 1927). None for fewer
    than two values, which have no spread.

    Wilson's interval is for n throws of a coin. Here n is the effective sample size (Kish, "Survey
    Sampling", 1965): the number of throws whose mean would vary as much as that of these values, at
    most ``size``, the number of all samples; where all values are equal, it is their number. So the
    interval stays between 0 and 1, and has a width where all problems are solved or none is. Its
    quantile is Student's, since the spread is estimated from the values.
    """
    if len(values) < 2:
        return None
    mean, number = fmean(values), float(len(values))
    if sample_variance := variance(values):
        number = min(mean * (1 - mean) * number / sample_variance, size)
    t2 = t_quantile(0.5 + confidence / 2, degrees=len(values) - 1) ** 2
    middle = (mean + t2 / (2 * number)) / (1 + t2 / number)
    spread = mean * (1 - mean) / number + t2 / (4 * number**2)
    half = math.sqrt(t2 * spread) / (1 + t2 / number)
    # Rounding must not leave the mean outside where it is 0 or 1.
    low, high = min(mean, max(0.0, middle - half)), max(mean, min(1.0, middle + half))
    return Interval(mean=mean, low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemScores:
    """The samples of one problem.

    A failed rollout is left out of the mean ``reward`` (None if all failed), and counts as a sample
    that did not solve the problem.
    """

    problem_id: str
    reward: float | None
    num_samples: int
    num_solved: int


def problem_scores(groups: Sequence[RolloutGroup], *, success_reward: float) -> list[ProblemScores]:
    """One for each group with a rollout."""
    scores = []
    for group in groups:
        rewards = [r.reward for r in group.rollouts if r.reward is not None]
        if group.rollouts:
            scores.append(
                ProblemScores(
                    problem_id=group.problem.problem_id,
                    reward=fmean(rewards) if rewards else None,
                    num_samples=len(group.rollouts),
                    num_solved=sum(reward >= success_reward for reward in rewards),
                )
            )
    return scores


def evaluation_statistics(
    groups: Sequence[RolloutGroup], *, success_reward: float
) -> dict[str, float]:
    """Compute the metrics of one evaluation, named without ``evaluation/``; pass@k for `powers`."""
    scores = problem_scores(groups, success_reward=success_reward)
    metrics: dict[str, float] = {}
    interval = mean_interval([one.reward for one in scores if one.reward is not None])
    if interval is not None:
        metrics = {"reward_ci95_low": interval.low, "reward_ci95_high": interval.high}
    for k in powers(min((one.num_samples for one in scores), default=0)):
        metrics[f"pass_at_k/{k}"] = fmean(pass_at_k(n.num_samples, n.num_solved, k) for n in scores)
    return metrics


def powers(most: int) -> list[int]:
    """List the k of pass@k: powers of two up to ``most``, the smallest number of samples of a
    problem, and that number."""
    found = [1 << i for i in range(most.bit_length())]
    return sorted({*found, most}) if most else []
