"""From a rollout's turns to the token sequences that are trained on. Pure.

A turn extends an episode if its prompt begins with all tokens of that episode so far: the prompt
and completion of the episode's last turn. If it extends several, it joins the longest, so that two
conversations that an agent has at once stay one episode each. A prompt that extends none (its
history was edited) starts a new episode. Turns without sampled tokens are left out, and so are
turns that their agent never saw.

Invariant: every other sampled token is in exactly one episode, and has loss if it is known which
tokens it was sampled from; no other token has loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_error
from torchtitan_rl.types import Episode, KeptRun, Rollout, Turn, spans


def rollout_to_episodes(rollout: Rollout, advantage: float | Sequence[float]) -> list[Episode]:
    """The episodes of one rollout, in the order of their tokens; none if nothing was sampled.

    ``advantage`` is that of all turns, or has one for each of them.

    Raises:
        ValueError: a completion's token-aligned fields differ in length.
    """
    for turn in rollout.turns:
        _check_alignment(rollout.rollout_id, turn)
    of_each = [advantage] * len(rollout.turns) if isinstance(advantage, int | float) else advantage
    advantage_of = dict(zip(map(id, rollout.turns), of_each, strict=True))
    return [
        _episode(rollout, turns, [advantage_of[id(turn)] for turn in turns])
        for turns in turns_by_episode(rollout)
    ]


def turns_by_episode(rollout: Rollout) -> list[list[Turn]]:
    """The turns of each episode, without those that are left out.

    Turns that ran at once have no order, so they are taken in that of their tokens, in which a turn
    comes before all that extend it.
    """
    episodes: list[list[Turn]] = []
    tokens_of: list[tuple[int, ...]] = []  # of each episode so far
    for turn in sorted(rollout.turns, key=_tokens_in_order):
        if not turn.completion.token_ids or not turn.is_seen:
            continue
        tokens = turn.prompt_token_ids + turn.completion.token_ids
        extended = _extended(tokens_of, turn.prompt_token_ids)
        if extended is None:
            episodes.append([turn])
            tokens_of.append(tokens)
        else:
            episodes[extended].append(turn)
            tokens_of[extended] = tokens
    return episodes


def outcome_rewards(rollout: Rollout) -> list[float]:
    """For each turn the reward of its episode: its own (the last `Turn.branch_reward`), or else
    that of the rollout, which has one."""
    assert rollout.reward is not None
    rewards = dict.fromkeys(map(id, rollout.turns), rollout.reward)
    if any(turn.branch_reward is not None for turn in rollout.turns):
        for turns in turns_by_episode(rollout):
            own = [turn.branch_reward for turn in turns if turn.branch_reward is not None]
            rewards |= dict.fromkeys(map(id, turns), own[-1]) if own else {}
    return [rewards[id(turn)] for turn in rollout.turns]


def previous_turns(turns: Sequence[Turn]) -> dict[int, int | None]:
    """By the index of each turn that was seen: that of the turn before it, None for a first one.
    A turn comes after the one before it.

    An environment's turns follow one another in the order of the record, also where it edited the
    history. Turns that an agent asked for itself (`TurnTree`) follow the one that their prompt
    extends; those without tokens are left out.
    """
    seen = [index for index, turn in enumerate(turns) if turn.is_seen]
    if all(turns[index].request_key is None for index in seen):
        return dict(zip(seen, [None, *seen], strict=False))
    previous: dict[int, int | None] = {}
    tokens_of: list[tuple[int, ...]] = []
    for index in sorted(seen, key=lambda one: _tokens_in_order(turns[one])):
        turn = turns[index]
        if turn.completion.token_ids:
            found = _extended(tokens_of, turn.prompt_token_ids)
            previous[index] = None if found is None else list(previous)[found]
            tokens_of.append(turn.prompt_token_ids + turn.completion.token_ids)
    return previous


def num_unseen_tokens(rollout: Rollout) -> int:
    """Sampled tokens of turns that their agent never saw: masked by rule, in no episode."""
    unseen = (turn for turn in rollout.turns if not turn.is_seen)
    return sum(len(turn.completion.token_ids) for turn in unseen)


def _tokens_in_order(turn: Turn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return turn.prompt_token_ids, turn.completion.token_ids


def _extended(tokens_of: list[tuple[int, ...]], prompt: tuple[int, ...]) -> int | None:
    """Index of the tokens that the prompt extends: the longest, the last of equal ones."""
    found, longest = None, 0
    for index, tokens in enumerate(tokens_of):
        length = len(tokens)
        may_fit = longest <= length <= len(prompt) and prompt[length - 1] == tokens[-1]  # quick
        if may_fit and prompt[:length] == tokens:
            found, longest = index, length
    return found


def _episode(rollout: Rollout, turns: list[Turn], turn_advantages: list[float]) -> Episode:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    kept_tokens: list[KeptRun] = []
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
        runs = sampled.kept_tokens or (KeptRun(0, WHOLE_VOCABULARY),)
        for first, end, kept in spans(runs, num_sampled):
            kept_tokens.append(KeptRun(start + first, kept))
            loss_mask += [kept is not None] * (end - first)
            advantages += [0.0 if kept is None else advantage] * (end - first)
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
    )


def _check_alignment(rollout_id: str, turn: Turn) -> None:
    completion = turn.completion
    lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
    error = kept_error(completion.kept_tokens, lengths[0])
    if len(set(lengths)) != 1:
        error = f"tokens, logprobs and versions have lengths {lengths}"
    if error:
        raise ValueError(f"rollout {rollout_id}, request {completion.request_id}: {error}")
