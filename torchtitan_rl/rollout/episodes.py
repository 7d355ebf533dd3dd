"""Converts a rollout's turns to the token sequences to train on, and a group's rewards to the
advantages of its turns. No I/O and no state.

A turn extends an episode if its prompt begins with all tokens of that episode so far. A turn that
extends several episodes joins the longest of them, so that two simultaneous conversations of an
agent stay separate episodes. A turn that extends none (its history was edited) starts a new
episode. Turns without sampled tokens, and turns that their agent never saw, are left out.

Invariant: each sampled token of the remaining turns is in exactly one episode, and is in the loss
if its set of kept tokens is known. No other token is in the loss.

A rollout without a reward (a failed rollout) gets no advantage and does not enter a baseline.

``rollout.credit`` selects the value that is compared with the siblings' values: with ``outcome``
the reward of the turn's branch, or else of the rollout; with ``turn`` the turn's return, which is
its reward plus the discounted return of the next turn. The return of the last turn includes the
rollout's reward R, with a weight:

    G_t = r_t + turn_discount x G_(t+1)        G_last = r_last + final_reward_weight x R

Sources: the return (reward-to-go) is from Sutton and Barto (2018, 3.3), its use as a turn's
advantage from GTPO (Ding et al. 2025, 2511.14846), and the sum of turn rewards and a weighted
outcome from MT-GRPO (Zeng et al. 2025, 2505.11821).

The baseline is computed from the siblings' returns at the same turn; a sibling that ended earlier
counts with the return of its last turn. As every baseline includes all N siblings,
``leave_one_out`` is unbiased, and the advantages of ``mean`` are (N - 1) / N times those of
``leave_one_out`` at every turn. Without turn rewards, and with a discount and a weight of 1,
``outcome`` and ``turn`` give bitwise equal advantages. `docs/training.md` describes the
alternatives that were rejected.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import cast

from torchtitan_rl.bounds import load_function
from torchtitan_rl.errors import TorchtitanRLError, one_line
from torchtitan_rl.images import images_before
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.routed_experts import of_episode, routed_error
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_error
from torchtitan_rl.types import (
    Episode,
    KeptRun,
    Rollout,
    RoutedExperts,
    TokenScores,
    Turn,
    spans,
)


def rollout_to_episodes(
    rollout: Rollout, advantage: float | Sequence[float], *, teacher_coefficient: float = 0.0
) -> list[Episode]:
    """Return the episodes of one rollout, ordered by their tokens.

    ``advantage`` is one number for all turns, or one per turn. The advantage of each token that a
    teacher scored also gets ``teacher_coefficient`` x (teacher's logprob - logprob): see
    `docs/distillation.md`. Raises ValueError: a completion's token-aligned fields differ in length.
    """
    for turn in rollout.turns:
        _check_alignment(rollout.rollout_id, turn)
    of_each = [advantage] * len(rollout.turns) if isinstance(advantage, int | float) else advantage
    advantage_of = dict(zip(map(id, rollout.turns), of_each, strict=True))
    return [
        _episode(rollout, turns, [advantage_of[id(turn)] for turn in turns], teacher_coefficient)
        for turns in turns_by_episode(rollout)
    ]


def turns_by_episode(rollout: Rollout) -> list[list[Turn]]:
    """Return the turns of each episode, sorted by their tokens, because simultaneous turns have no
    order in time: a turn comes before all turns that extend it."""
    episodes: list[list[Turn]] = []
    for turn in sorted(rollout.turns, key=_tokens_in_order):
        if not turn.completion.token_ids or not turn.is_seen:
            continue
        extended = _extended([turns[-1] for turns in episodes], turn)
        if extended is None:
            episodes.append([turn])
        else:
            episodes[extended].append(turn)
    return episodes


def outcome_rewards(rollout: Rollout) -> list[float]:
    """Return for each turn the reward of its episode: the episode's last `Turn.branch_reward` if
    there is one, or else the rollout's reward. The rollout's reward must not be None."""
    assert rollout.reward is not None
    rewards = dict.fromkeys(map(id, rollout.turns), rollout.reward)
    if any(turn.branch_reward is not None for turn in rollout.turns):
        for turns in turns_by_episode(rollout):
            own = [turn.branch_reward for turn in turns if turn.branch_reward is not None]
            rewards |= dict.fromkeys(map(id, turns), own[-1]) if own else {}
    return [rewards[id(turn)] for turn in rollout.turns]


def previous_turns(turns: Sequence[Turn]) -> dict[int, int | None]:
    """Map the index of each seen turn to that of the previous turn, which comes before it in the
    result; None for a first turn.

    An environment's turns follow each other in recorded order, even after edits of the history.
    Turns that an agent requested itself (`TurnTree`) follow the turn that their prompt extends;
    turns without tokens are left out.
    """
    seen = [index for index, turn in enumerate(turns) if turn.is_seen]
    if all(turns[index].request_key is None for index in seen):
        return dict(zip(seen, [None, *seen], strict=False))
    previous: dict[int, int | None] = {}
    earlier: list[Turn] = []
    for index in sorted(seen, key=lambda one: _tokens_in_order(turns[one])):
        turn = turns[index]
        if turn.completion.token_ids:
            found = _extended(earlier, turn)
            previous[index] = None if found is None else list(previous)[found]
            earlier.append(turn)
    return previous


def num_unseen_tokens(rollout: Rollout) -> int:
    """Return the number of sampled tokens in turns that their agent never saw. These tokens are in
    no episode."""
    unseen = (turn for turn in rollout.turns if not turn.is_seen)
    return sum(len(turn.completion.token_ids) for turn in unseen)


def _tokens_in_order(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return turn.prompt_token_ids, turn.completion.token_ids


def _extended(earlier: Sequence[Turn], turn: Turn) -> int | None:
    """Return the index of the longest turn whose tokens and images the prompt of ``turn`` extends;
    if several are equally long, the index of the last. Earlier turns have completions."""
    found, longest, prompt = None, 0, turn.prompt_token_ids
    for index, one in enumerate(earlier):
        said = one.completion.token_ids
        length = len(one.prompt_token_ids) + len(said)
        may_fit = longest <= length <= len(prompt) and prompt[length - 1] == said[-1]  # quick
        if not may_fit or prompt[:length] != one.token_ids:
            continue
        if images_before(turn.images, length) == one.images:
            found, longest = index, length
    return found


def _episode(
    rollout: Rollout, turns: list[Turn], turn_advantages: list[float], teacher_coefficient: float
) -> Episode:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    kept_tokens: list[KeptRun] = []
    teacher_top: list[tuple[int, TokenScores]] = []
    routed: list[tuple[int, RoutedExperts | None]] = []
    for turn, advantage in zip(turns, turn_advantages, strict=True):
        observed = turn.prompt_token_ids[len(token_ids) :]
        sampled = turn.completion
        start, num_sampled = len(token_ids) + len(observed), len(sampled.token_ids)
        if observed:
            kept_tokens.append(KeptRun(len(token_ids), WHOLE_VOCABULARY))
        token_ids += observed + sampled.token_ids
        loss_mask += [False] * len(observed)
        advantages += [0.0] * len(observed)
        logprobs += [0.0] * len(observed) + list(sampled.logprobs)
        versions += [-1] * len(observed) + list(sampled.versions)
        if turn.teacher is not None and turn.teacher.top_ids:
            teacher_top.append((start, turn.teacher))
        routed.append((len(token_ids), sampled.routed_experts))
        runs = sampled.kept_tokens or (KeptRun(0, WHOLE_VOCABULARY),)
        own = _token_advantages(turn, advantage, teacher_coefficient)
        for first, end, kept in spans(runs, num_sampled):
            kept_tokens.append(KeptRun(start + first, kept))
            loss_mask += [kept is not None] * (end - first)
            advantages += [0.0] * (end - first) if kept is None else own[first:end]
    is_cut = any(turn.completion.kept_tokens for turn in turns)
    return Episode(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprobs),
        advantages=tuple(advantages),
        versions=tuple(versions),
        kept_tokens=tuple(kept_tokens) if is_cut else (),
        teacher_top=tuple(teacher_top),
        routed_experts=of_episode(routed, len(token_ids)),
        images=turns[-1].images,
    )


def _token_advantages(turn: Turn, advantage: float, teacher_coefficient: float) -> list[float]:
    """Return the advantages of a turn's sampled tokens.

    The teacher's part is the single-sample estimate of the gradient of the reverse KL to the
    teacher (Lu, "On-Policy Distillation", Thinking Machines Lab 2025).
    """
    logprobs, teacher = turn.completion.logprobs, turn.teacher
    if teacher is None or teacher_coefficient == 0.0:
        return [advantage] * len(logprobs)
    return [
        advantage + (teacher_coefficient * (of_teacher - own) if math.isfinite(own) else 0.0)
        for of_teacher, own in zip(teacher.logprobs, logprobs, strict=True)
    ]


def _check_alignment(rollout_id: str, turn: Turn) -> None:
    completion = turn.completion
    lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
    error = kept_error(completion.kept_tokens, lengths[0]) or routed_error(
        completion.routed_experts, num_sampled=lengths[0], num_prompt=len(turn.prompt_token_ids)
    )
    if len(set(lengths)) != 1:
        error = f"tokens, logprobs and versions have lengths {lengths}"
    if turn.teacher is not None and len(turn.teacher.logprobs) != lengths[0]:
        error = f"a teacher scored {len(turn.teacher.logprobs)} of {lengths[0]} tokens"
    if error:
        raise ValueError(f"rollout {rollout_id}, request {completion.request_id}: {error}")


ADVANTAGE_KINDS = ("mean", "std", "leave_one_out", "pair", "none")
STD_EPS = 1e-6  # keeps the division finite if rewards hardly differ


def turn_advantages(rollouts: Sequence[Rollout], config: RolloutConfig) -> list[list[float] | None]:
    """Return for each sibling the advantages of its turns, or None if the rollout has no reward.
    Unseen turns, which are not trained on, have 0.0. Raises ValueError: a reward is not finite."""
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
    """Return the turn returns of a rollout with a reward.

    The first result maps a turn's index to its number (how many turns come before it) and its
    return. The second result has for each number the mean return of the turns with this number and
    of the branches that ended earlier. In a tree of branches, the next turn's return is the mean
    over the branches that continue the turn (as TreeRPO values a node, Yang et al. 2025,
    2506.05183).
    """
    previous = previous_turns(rollout.turns)
    final = config.final_reward_weight * cast(float, rollout.reward)
    numbers: dict[int | None, int] = {None: -1}
    finals: dict[int | None, float] = {None: final}  # 0 if a branch's reward replaces it
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

    The value may differ from the rollout's entry in ``values``: a branch with its own reward is
    compared with the rollouts' rewards, and does not change a built-in baseline.
    """
    if config.advantage == "none":
        return lambda _index, _value: 0.0
    if config.advantage == "pair":
        signs = _pair(values)
        return lambda index, _value: signs.get(index, 0.0)
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


def _pair(values: Sequence[float]) -> dict[int, float]:
    """Return 1 for the first best value, -1 for the first worst one; nothing if all are equal."""
    _require_finite(values)
    if len(set(values)) < 2:
        return {}
    return {values.index(max(values)): 1.0, values.index(min(values)): -1.0}


def _call(name: str, values: Sequence[float], rollouts: Sequence[Rollout]) -> list[float]:
    """Call the user's advantage function ``name``: see `docs/training.md`."""
    try:
        found = [float(one) for one in load_function(name)(list(values), list(rollouts))]
        if len(found) != len(values) or not all(map(math.isfinite, found)):
            raise ValueError(f"it returned {found}: give {len(values)} finite numbers")
    except (Exception, SystemExit) as error:
        cause = one_line(error)
        raise TorchtitanRLError(f"rollout.advantage {name}, for {list(values)}: {cause}") from error
    return found


def _baseline(values: Sequence[float], kind: str) -> tuple[float, float]:
    """Return the mean of N siblings' values ``r``, and the factor for differences from the mean.

    - "mean": ``r - mean(r)`` (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    - "std": ``(r - mean(r)) / (std(r) + eps)``, population std (GRPO, Shao et al. 2024,
      arXiv:2402.03300, eq. for outcome supervision)
    - "leave_one_out": ``r`` minus the mean of the other N - 1 (RLOO, Kool et al. 2019;
      Ahmadian et al. 2024, arXiv:2402.14740)

    If all values are equal, each differs from the mean by exactly 0.0.
    """
    _require_finite(values)
    if len(set(values)) < 2:
        return (values[0] if values else 0.0), 1.0
    mean, number = _mean(values), len(values)
    if kind == "std":
        variance = math.fsum((value - mean) ** 2 for value in values) / number
        return mean, 1.0 / (math.sqrt(variance) + STD_EPS)
    if kind == "leave_one_out":  # r - (N mean - r) / (N - 1) = (r - mean) N / (N - 1)
        return mean, number / (number - 1)
    return mean, 1.0


def _require_finite(values: Sequence[float]) -> None:
    """Raise ValueError if a value is not finite."""
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards must be finite, got {list(values)}")


def _mean(values: Sequence[float]) -> float:
    """Compute the mean; it is exact if all values are equal."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)
