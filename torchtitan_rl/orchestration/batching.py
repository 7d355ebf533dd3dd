"""Turns groups into one packed batch and counts where each of their sampled tokens went.

Answers that are too long: a penalty that grows before the limit, or no loss at all. Pure.

Both are of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.4): "soft overlong punishment" and
"overlong filtering".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchtitan_rl.errors import DivergedError
from torchtitan_rl.orchestration.records import TokenCounts
from torchtitan_rl.rollout.advantages import turn_advantages
from torchtitan_rl.rollout.config import OverlongConfig, RolloutConfig
from torchtitan_rl.rollout.episodes import num_unseen_tokens, rollout_to_episodes
from torchtitan_rl.training.batch import TrainingBatch, num_masked_nonfinite, trained_mask
from torchtitan_rl.training.grammars import without_grammars
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Completion, Episode, FinishReason, Rollout, RolloutGroup


class Batched(NamedTuple):
    """``batch`` is None where it has no token to train on. ``episodes`` are those of all groups;
    the mask of one that does not fit a row is empty."""

    batch: TrainingBatch | None
    tokens: TokenCounts
    episodes: tuple[Episode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatcher:
    """Computes advantages within each group, turns rollouts into episodes and packs them.

    ``replay_grammars`` finds what tokens were sampled from under a grammar.
    """

    config: RolloutConfig
    row_len: int
    replay_grammars: Callable[[Episode], Episode] = without_grammars

    def __call__(self, groups: Sequence[RolloutGroup]) -> Batched:
        """The batch, its token counts and its episodes.

        Failed rollouts and episodes longer than a row are discarded; rollouts that were cut (where
        ``overlong.mask`` says so), turns that no agent saw, tokens of which it is not known what
        they were sampled from and tokens with non-finite logprobs are masked; each is counted by
        cause.

        Raises:
            DivergedError: every token that would be trained on has a logprob that is not finite.
        """
        discarded: Counter[str] = Counter()
        episodes: list[Episode] = []
        for group in groups:
            advantages = turn_advantages(list(map(self._shaped, group.rollouts)), self.config)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                if advantage is None:
                    discarded[rollout.status.value] += rollout.num_sampled_tokens
                elif self.config.overlong.mask and is_cut(rollout):
                    discarded["overlong"] += rollout.num_sampled_tokens
                else:
                    discarded["unseen_turn"] += num_unseen_tokens(rollout)
                    made = rollout_to_episodes(rollout, advantage)
                    episodes += map(self.replay_grammars, made)
        unknown = sum(episode.num_unknown_tokens for episode in episodes)
        discarded["truncated_sampling"] += unknown
        temperature = self.config.sampling.temperature
        packing = pack_episodes(episodes, row_len=self.row_len, temperature=temperature)
        for index in packing.oversized:
            discarded["oversized_episode"] += episodes[index].num_trained_tokens
            no_loss = (False,) * len(episodes[index].token_ids)
            episodes[index] = replace(episodes[index], loss_mask=no_loss)
        batch, trained = packing.batch, 0
        if batch is not None:
            trained = int(trained_mask(batch).sum())
            masked = num_masked_nonfinite(batch)
            discarded["nonfinite_logprob"] += masked
            if masked and not trained:
                raise DivergedError(
                    f"no loss can be computed: each of the batch's {masked} sampled tokens has a "
                    "logprob that is not finite; the policy that generated them has diverged"
                )
        generated = sum(
            rollout.num_sampled_tokens for group in groups for rollout in group.rollouts
        )
        tokens = TokenCounts(generated=generated, trained=trained, discarded=+discarded)
        return Batched(batch if trained else None, tokens, tuple(episodes))

    def _shaped(self, rollout: Rollout) -> Rollout:
        """With the reward that is trained on."""
        if rollout.reward is None or not self.config.overlong.buffer_tokens:
            return rollout
        limit = self.config.sampling.max_tokens_per_turn
        penalty = overlong_penalty(rollout, self.config.overlong, max_tokens=limit)
        return replace(rollout, reward=rollout.reward - penalty)


def is_cut(rollout: Rollout) -> bool:
    """Whether one of its turns ended at its budget of tokens."""
    return any(turn.completion.finish_reason is FinishReason.LENGTH for turn in rollout.turns)


def overlong_penalty(rollout: Rollout, config: OverlongConfig, *, max_tokens: int) -> float:
    """What is taken off the reward, for the longest of the rollout's turns.

    With a limit L (``max_tokens``) and a buffer B, a turn of n tokens costs ``penalty`` times
    ``min(1, max(0, (n - (L - B)) / B))``; one that was cut costs all of it.
    """
    if not config.buffer_tokens:
        return 0.0
    shares = (_share(turn.completion, config.buffer_tokens, max_tokens) for turn in rollout.turns)
    return config.penalty * max(shares, default=0.0)


def _share(completion: Completion, buffer: int, max_tokens: int) -> float:
    if completion.finish_reason is FinishReason.LENGTH:
        return 1.0
    beyond = len(completion.token_ids) - (max_tokens - buffer)
    return min(1.0, max(0.0, beyond / buffer))
