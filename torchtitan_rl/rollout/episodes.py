"""From a rollout's turns to the token sequences that are trained on. Pure.

Turns share an episode as long as each prompt begins with all tokens of the episode so far, that
is, the previous prompt and completion; a prompt that does not (its history was edited) opens a
new episode. Every sampled token is in exactly one episode, under loss; no other token is under
loss. A turn without sampled tokens leaves nothing to train on and is passed over; so is one that
its agent never saw, whose tokens can be in no later prompt (`num_unseen_tokens`).
"""

from __future__ import annotations

from torchtitan_rl.types import Episode, Rollout, Turn


def rollout_to_episodes(rollout: Rollout, advantage: float) -> list[Episode]:
    """The episodes of one rollout, in order; none where nothing was sampled.

    Raises:
        ValueError: a completion's tokens, logprobs and versions differ in length.
    """
    drafts: list[_Draft] = []
    for turn in rollout.turns:
        _check_alignment(rollout.rollout_id, turn)
        if not turn.completion.token_ids or not turn.is_seen:
            continue
        if not drafts or not drafts[-1].is_extended_by(turn.prompt_token_ids):
            drafts.append(_Draft())
        drafts[-1].append(turn)
    return [draft.episode(rollout, advantage) for draft in drafts]


def num_unseen_tokens(rollout: Rollout) -> int:
    """Sampled tokens of turns that no agent ever saw: masked by rule, in no episode."""
    unseen = (turn for turn in rollout.turns if not turn.is_seen)
    return sum(len(turn.completion.token_ids) for turn in unseen)


class _Draft:
    """An episode that still grows."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def is_extended_by(self, prompt: tuple[int, ...]) -> bool:
        return list(prompt[: len(self._token_ids)]) == self._token_ids

    def append(self, turn: Turn) -> None:
        observed = turn.prompt_token_ids[len(self._token_ids) :]
        self._token_ids.extend(observed)
        self._loss_mask.extend([False] * len(observed))
        self._logprobs.extend([0.0] * len(observed))
        self._versions.extend([-1] * len(observed))
        sampled = turn.completion
        self._token_ids.extend(sampled.token_ids)
        self._loss_mask.extend([True] * len(sampled.token_ids))
        self._logprobs.extend(sampled.logprobs)
        self._versions.extend(sampled.versions)

    def episode(self, rollout: Rollout, advantage: float) -> Episode:
        return Episode(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            token_ids=tuple(self._token_ids),
            loss_mask=tuple(self._loss_mask),
            logprobs=tuple(self._logprobs),
            advantages=tuple(advantage if trained else 0.0 for trained in self._loss_mask),
            versions=tuple(self._versions),
        )


def _check_alignment(rollout_id: str, turn: Turn) -> None:
    completion = turn.completion
    lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
    if len(set(lengths)) != 1:
        raise ValueError(
            f"rollout {rollout_id}, request {completion.request_id}: tokens, logprobs and versions "
            f"have lengths {lengths}"
        )
