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

from collections.abc import Callable

from torchtitan_rl.generation.kept_tokens import GRAMMAR_TOKENS, WHOLE_VOCABULARY
from torchtitan_rl.types import Completion, Episode, GrammarSpan, KeptTokens, Rollout, Turn


def rollout_to_episodes(
    rollout: Rollout, advantage: float, advantage_of: Callable[[float], float] | None = None
) -> list[Episode]:
    """The episodes of one rollout, in the order of their tokens; none if nothing was sampled.

    ``advantage_of`` turns a branch's own reward (`Turn.branch_reward`), which replaces the
    rollout's in its episode, into its advantage; None ignores those rewards.

    Raises:
        ValueError: a completion's token-aligned fields differ in length.
    """
    for turn in rollout.turns:
        _check_alignment(rollout.rollout_id, turn)
    episodes = []
    for turns in turns_by_episode(rollout):
        own = [turn.branch_reward for turn in turns if turn.branch_reward is not None]
        value = advantage_of(own[-1]) if own and advantage_of is not None else advantage
        episodes.append(_episode(rollout, turns, value))
    return episodes


def turns_by_episode(rollout: Rollout) -> list[list[Turn]]:
    """The turns of each episode, without those that are left out.

    Turns that ran at once have no order, so they are taken in that of their tokens, in which a turn
    comes before all that extend it.
    """
    episodes: list[list[Turn]] = []
    tokens_of: list[tuple[int, ...]] = []  # of each episode so far
    for turn in sorted(
        rollout.turns, key=lambda one: (one.prompt_token_ids, one.completion.token_ids)
    ):
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


def num_unseen_tokens(rollout: Rollout) -> int:
    """Sampled tokens of turns that their agent never saw: masked by rule, in no episode."""
    unseen = (turn for turn in rollout.turns if not turn.is_seen)
    return sum(len(turn.completion.token_ids) for turn in unseen)


def _extended(tokens_of: list[tuple[int, ...]], prompt: tuple[int, ...]) -> int | None:
    """Index of the episode that the prompt extends: the longest, the last of equal ones."""
    found, longest = None, 0
    for index, tokens in enumerate(tokens_of):
        length = len(tokens)
        may_fit = longest <= length <= len(prompt) and prompt[length - 1] == tokens[-1]  # quick
        if may_fit and prompt[:length] == tokens:
            found, longest = index, length
    return found


def _episode(rollout: Rollout, turns: list[Turn], advantage: float) -> Episode:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    kept_tokens: list[KeptTokens] = []
    grammars: list[GrammarSpan] = []
    for turn in turns:
        observed = turn.prompt_token_ids[len(token_ids) :]
        sampled = turn.completion
        kept = _known_kept(sampled)
        token_ids += observed + sampled.token_ids
        loss_mask += [False] * len(observed) + [one is not None for one in kept]
        logprobs += [0.0] * len(observed) + list(sampled.logprobs)
        versions += [-1] * len(observed) + list(sampled.versions)
        kept_tokens += [WHOLE_VOCABULARY] * len(observed) + kept
        if sampled.grammar is not None:
            start = len(token_ids) - len(sampled.token_ids)
            grammars.append(GrammarSpan(start, len(token_ids), sampled.grammar))
    is_cut = any(turn.completion.kept_tokens for turn in turns)
    return Episode(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        logprobs=tuple(logprobs),
        advantages=tuple(advantage if trained else 0.0 for trained in loss_mask),
        versions=tuple(versions),
        kept_tokens=tuple(kept_tokens) if is_cut else (),
        grammars=tuple(grammars),
    )


def _known_kept(completion: Completion) -> list[KeptTokens]:
    """What each token was sampled from; None where the grammar that says it is missing."""
    if completion.grammar is None and GRAMMAR_TOKENS in completion.kept_tokens:
        return [None if kept == GRAMMAR_TOKENS else kept for kept in completion.kept_tokens]
    return list(completion.kept_tokens or [WHOLE_VOCABULARY] * len(completion.token_ids))


def _check_alignment(rollout_id: str, turn: Turn) -> None:
    completion = turn.completion
    lengths = (
        len(completion.token_ids),
        len(completion.logprobs),
        len(completion.versions),
        len(completion.kept_tokens or completion.token_ids),
    )
    if len(set(lengths)) != 1:
        raise ValueError(
            f"rollout {rollout_id}, request {completion.request_id}: tokens, logprobs, versions "
            f"and kept tokens have lengths {lengths}"
        )
