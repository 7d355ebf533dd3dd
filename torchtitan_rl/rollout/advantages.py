"""Advantages of a group's turns, from their rewards. Pure.

A rollout without a reward (a failed one) gets no advantage and is in no baseline.

``rollout.credit`` says what is compared with the siblings'. ``outcome``: the rollout's reward, for
all of its turns; in a branch with a reward of its own that one. ``turn``: the turn's return, which
is its reward and the discounted return of the next turn; after the last one comes the rollout's
reward R, weighted:

    G_t = r_t + turn_discount x G_(t+1)        G_last = r_last + final_reward_weight x R

Reward-to-go is of Sutton and Barto (2018, 3.3), as advantage of a turn of GTPO (Ding et al. 2025,
2511.14846), rewards of turns next to a weighted outcome of MT-GRPO (Zeng et al. 2025, 2505.11821).

The baseline is of the siblings' returns at the same turn; a sibling that ended before counts with
the return of its last turn. So it is always of all N siblings: ``leave_one_out`` is unbiased, and
``mean`` is the same times (N - 1) / N at every turn. Without rewards of turns, with both weights 1,
the two credits are equal bit for bit. `docs/training.md` says what was not done and why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

from torchtitan_rl.errors import TorchtitanRLError, one_line
from torchtitan_rl.functions import load_function
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.episodes import outcome_rewards, previous_turns
from torchtitan_rl.types import Rollout

ADVANTAGE_KINDS = ("mean", "std", "leave_one_out")
STD_EPS = 1e-6  # keeps the division finite if rewards hardly differ


def turn_advantages(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[list[float] | None]:
    """Of siblings: for each rollout the advantage of each of its turns, None if it has no reward.

    Turns that are not trained on (unseen ones) have 0.0.

    Raises:
        ValueError: a reward is not finite.
    """
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    by_credit = _of_turns if config.credit == "turn" else _of_outcomes
    advantages = iter(by_credit(scored, config))
    return [None if rollout.reward is None else next(advantages) for rollout in rollouts]


def has_signal(rollouts: Sequence[Rollout], config: RolloutConfig) -> bool:
    """Whether an advantage of these siblings differs from 0."""
    return any(any(of_rollout or ()) for of_rollout in turn_advantages(rollouts, config))


def _of_outcomes(scored: Sequence[Rollout], config: RolloutConfig) -> list[list[float]]:
    compare = _comparison([cast(float, one.reward) for one in scored], scored, config)
    return [
        [compare(index, reward) for reward in outcome_rewards(rollout)]
        for index, rollout in enumerate(scored)
    ]


def _of_turns(scored: Sequence[Rollout], config: RolloutConfig) -> list[list[float]]:
    found = [_returns(rollout, config) for rollout in scored]
    advantages = [[0.0] * len(rollout.turns) for rollout in scored]
    for number in range(max((len(by_number) for _, by_number in found), default=0)):
        at_number = [by_number[min(number, len(by_number) - 1)] for _, by_number in found]
        compare = _comparison(at_number, scored, config)
        for index, (of_turns, _) in enumerate(found):
            for turn, (number_of_turn, value) in of_turns.items():
                if number_of_turn == number:
                    advantages[index][turn] = compare(index, value)
    return advantages


def _returns(
    rollout: Rollout, config: RolloutConfig
) -> tuple[dict[int, tuple[int, float]], list[float]]:
    """Of a rollout with a reward: the number of each turn (how many come before it) and its return,
    by its index; and by number the mean return of the turns with it and of branches that ended
    before. In a tree of branches, what comes after a turn is the mean over the branches that
    continue it (as TreeRPO values a node, Yang et al. 2025, 2506.05183)."""
    previous = previous_turns(rollout.turns)
    final = config.final_reward_weight * cast(float, rollout.reward)
    numbers: dict[int | None, int] = {None: -1}
    finals: dict[int | None, float] = {None: final}  # 0 where a branch's reward replaces it
    following: defaultdict[int | None, list[float]] = defaultdict(list)
    for index, before in previous.items():
        numbers[index] = numbers[before] + 1
        has_own = rollout.turns[index].branch_reward is not None
        finals[index] = 0.0 if has_own else finals[before]
    returns: dict[int, tuple[int, float]] = {}
    for index, before in reversed(previous.items()):
        turn, after = rollout.turns[index], following[index]
        rest = config.turn_discount * _mean(after) if after else finals[index]
        value = (turn.reward or 0.0) + (turn.branch_reward or 0.0) + rest
        following[before].append(value)
        returns[index] = numbers[index], value
    by_number = [
        _mean(
            [
                value
                for index, (of_turn, value) in returns.items()
                if of_turn == number or (of_turn < number and not following[index])
            ]
        )
        for number in range(1 + max(numbers.values()))
    ]
    return returns, by_number or [final]


def _comparison(
    values: Sequence[float], rollouts: Sequence[Rollout], config: RolloutConfig
) -> Callable[[int, float], float]:
    """Return the function from a rollout's index and a value to the value's advantage.

    The value may be another than the rollout's in ``values``: a branch with a reward of its own is
    compared with the rollouts' rewards, and changes no baseline.
    """
    if config.advantage in ADVANTAGE_KINDS:
        baseline, scale = _baseline(values, config.advantage)
        return lambda _, value: (value - baseline) * scale
    own = _call(config.advantage, values, rollouts)

    def compare_in_its_place(index: int, value: float) -> float:
        if value == values[index]:
            return own[index]
        changed = [*values[:index], value, *values[index + 1 :]]
        return _call(config.advantage, changed, rollouts)[index]

    return compare_in_its_place


def _call(name: str, values: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
    """What the user's function of that name returns: see `docs/training.md`."""
    try:
        found = [float(one) for one in load_function(name)(list(values), list(rollouts))]
        if len(found) != len(values) or not all(map(math.isfinite, found)):
            raise ValueError(f"it returned {found}: give {len(values)} finite numbers")
    except (Exception, SystemExit) as error:
        cause = one_line(error)
        raise TorchtitanRLError(f"rollout.advantage {name}, for {list(values)}: {cause}") from error
    return found


def _baseline(values: Sequence[float], kind: str) -> tuple[float, float]:
    """The mean of N siblings' values ``r``, and the factor by which differences to it are scaled.

    - "mean": ``r - mean(r)`` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    - "std": ``(r - mean(r)) / (std(r) + eps)``, population std (GRPO, Shao et al. 2024,
      arXiv:2402.03300, eq. for outcome supervision)
    - "leave_one_out": ``r`` minus the mean of the other N - 1 (RLOO, Kool et al. 2019;
      Ahmadian et al. 2024, arXiv:2402.14740)

    Where all values are equal, each differs from the mean by exactly 0.0.

    Raises:
        ValueError: a value is not finite.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards must be finite, got {list(values)}")
    if len(set(values)) < 2:
        return (values[0] if values else 0.0), 1.0
    mean, number = _mean(values), len(values)
    if kind == "std":
        variance = math.fsum((value - mean) ** 2 for value in values) / number
        return mean, 1.0 / (math.sqrt(variance) + STD_EPS)
    if kind == "leave_one_out":  # r - (N mean - r) / (N - 1) = (r - mean) N / (N - 1)
        return mean, number / (number - 1)
    return mean, 1.0


def _mean(values: Sequence[float]) -> float:
    """Exact where all are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
