"""Packs groups into one batch. Counts the sampled tokens that are trained on, and by cause those
that are not.

Completions that are too long get a penalty that grows towards the limit, or are left out of the
loss. Both methods are from DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.4): "soft overlong
punishment" and "overlong filtering".

A grammar allows nearly the whole vocabulary inside a string, so the sets of allowed tokens are not
recorded with the tokens: `GrammarReplay` computes them again. For the same grammar and tokens, the
same version of xgrammar allows the same sets.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.errors import DivergedError
from torchtitan_rl.orchestration.records import TokenCounts
from torchtitan_rl.rollout.config import OverlongConfig, RolloutConfig
from torchtitan_rl.rollout.episodes import num_unseen_tokens, rollout_to_episodes, turn_advantages
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_runs, pack_kept
from torchtitan_rl.training.batch import TrainingBatch, num_masked_nonfinite, trained_mask
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import (
    Episode,
    FinishReason,
    Grammar,
    KeptRun,
    KeptTokens,
    Rollout,
    RolloutGroup,
    spans,
)


def without_grammars(episode: Episode) -> Episode:
    """Return the episode with all tokens that were sampled under a grammar left out of the loss."""
    return _replayed(episode, lambda _grammar, _token_ids: iter(()))


class GrammarReplay:
    """Replays grammars on the policy's vocabulary. Not thread-safe.

    ``tokenizer`` is the engine's tokenizer. xgrammar is imported when the first grammar is
    replayed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None

    def __call__(self, episode: Episode) -> Episode:
        """Return the episode with each grammar replaced by the sets of tokens that it allowed.

        These tokens are left out of the loss: all from the first on that a grammar rejects, and all
        of a grammar that another version of xgrammar wrote.
        """
        return _replayed(episode, self._allowed)

    def _allowed(self, grammar: Grammar, token_ids: tuple[int, ...]) -> Iterator[KeptTokens]:
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size
            )
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        try:
            parsed = xgrammar.Grammar.deserialize_json(zlib.decompress(grammar.data).decode())
        except RuntimeError:  # written by another version
            return
        matcher = xgrammar.GrammarMatcher(
            self._compiler.compile_grammar(parsed),
            override_stop_tokens=list(grammar.stop_token_ids) or None,
        )
        bits = xgrammar.allocate_token_bitmask(1, self._vocab_size)
        packed: dict[bytes, bytes] = {}  # most tokens inside a string have the same set
        for token_id in token_ids:
            if matcher.is_terminated():
                yield WHOLE_VOCABULARY
                continue
            bits.fill_(-1)
            matcher.fill_next_token_bitmask(bits)
            row = bits.numpy().tobytes()
            if not matcher.accept_token(token_id):
                return
            if row not in packed:
                row_B = np.frombuffer(row, dtype=np.uint8)
                kept_V = np.unpackbits(row_B, count=self._vocab_size, bitorder="little")
                packed[row] = pack_kept(kept_V.astype(np.bool_))
            yield packed[row]


def _replayed(
    episode: Episode, allowed: Callable[[Grammar, tuple[int, ...]], Iterator[KeptTokens]]
) -> Episode:
    """Return the episode with the sets that ``allowed`` yields for each grammar. Tokens for which
    it yields no set are left out of the loss."""
    if not any(isinstance(run.kept, Grammar) for run in episode.kept_tokens):
        return episode
    runs: list[KeptRun] = []
    mask = list(episode.loss_mask)
    for start, end, kept in spans(episode.kept_tokens, len(episode.token_ids)):
        found: list[KeptTokens] = [kept]
        if isinstance(kept, Grammar):
            found = list(allowed(kept, episode.token_ids[start:end]))
            unknown = start + len(found)
            mask[unknown:end] = [False] * (end - unknown)
            found += [None] * (end - unknown)
        runs += (KeptRun(start + run.start, run.kept) for run in kept_runs(found))
    return replace(episode, loss_mask=tuple(mask), kept_tokens=tuple(runs))


class Batched(NamedTuple):
    """The result of `EpisodeBatcher`. ``batch`` is None if the groups have no token to train on.
    ``episodes`` are the episodes of all groups; in an episode longer than ``row_len`` no token is
    in the loss. ``oversized`` has the indices of these episodes."""

    batch: TrainingBatch | None
    tokens: TokenCounts
    episodes: tuple[Episode, ...]
    oversized: frozenset[int] = frozenset()

    def by_episode(self, values_N: npt.NDArray[Any]) -> list[npt.NDArray[Any] | None]:
        """Split values of the batch's tokens by episode; None for an oversized episode."""
        assert self.batch is not None
        parts = iter(np.split(values_N, self.batch.episode_starts[1:]))
        indices = range(len(self.episodes))
        return [None if index in self.oversized else next(parts) for index in indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatcher:
    """Computes advantages within each group, turns rollouts into episodes and packs them.

    ``replay_grammars`` finds the sets of tokens that grammars allowed.
    """

    config: RolloutConfig
    row_len: int
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    replay_grammars: Callable[[Episode], Episode] = without_grammars

    def __call__(self, groups: Sequence[RolloutGroup]) -> Batched:
        """Return the batch, its token counts and its episodes.

        Failed rollouts and episodes longer than ``row_len`` are discarded. These are masked:
        rollouts cut off at the token budget (with ``overlong.mask``), rollouts of no whole pair
        (with ``advantage pair``), turns that their agent never saw, tokens whose set of kept tokens
        is unknown, and tokens with non-finite logprobs. All are counted by cause.

        Raises:
            DivergedError: every token that would be trained on has a logprob that is not finite.
        """
        discarded: Counter[str] = Counter()
        episodes: list[Episode] = []
        teacher, numbers = self.teacher, dict[str, int]()
        coefficient = teacher.coefficient if teacher.is_on else 0.0
        of_tokens = coefficient if teacher.loss == "sampled" else 0.0
        for group in groups:
            numbers[group.group_id] = teacher.number_for(group.problem.task)
            advantages = turn_advantages(list(map(self._shaped, group.rollouts)), self.config)
            own: list[Episode] = []
            for rollout, advantage in zip(group.rollouts, advantages, strict=True):
                if advantage is None:
                    discarded[rollout.status.value] += rollout.num_sampled_tokens
                elif self.config.overlong.mask and is_cut(rollout):
                    discarded["overlong"] += rollout.num_sampled_tokens
                else:
                    discarded["unseen_turn"] += num_unseen_tokens(rollout)
                    made = rollout_to_episodes(rollout, advantage, teacher_coefficient=of_tokens)
                    own += map(self.replay_grammars, made)
            if self.config.advantage == "pair":
                own, unpaired = self._pair(own)
                discarded["unpaired"] += unpaired
            episodes += own
        unknown = sum(episode.num_unknown_tokens for episode in episodes)
        discarded["truncated_sampling"] += unknown
        temperature = self.config.sampling.temperature
        packing = pack_episodes(
            episodes, row_len=self.row_len, temperature=temperature, num_top=teacher.num_top
        )
        for index in packing.oversized:
            discarded["oversized_episode"] += episodes[index].num_trained_tokens
            no_loss = (False,) * len(episodes[index].token_ids)
            episodes[index] = replace(episodes[index], loss_mask=no_loss)
        batch, trained = packing.batch, 0
        if batch is not None:
            batch = replace(batch, teacher_coefficient=coefficient - of_tokens)
            if teacher.is_in_trainer:
                fitting = (one for i, one in enumerate(episodes) if i not in packing.oversized)
                of_episodes = np.array([numbers[one.group_id] for one in fitting])
                batch = replace(batch, teachers=of_episodes)
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
        oversized = frozenset(packing.oversized)
        return Batched(batch if trained else None, tokens, tuple(episodes), oversized)

    def _pair(self, episodes: Sequence[Episode]) -> tuple[list[Episode], int]:
        """Return the episodes of a group without those that form no whole pair, and the number of
        sampled tokens in these. An episode that has its own cause stays, to be counted there: it is
        too long, or none of its tokens can be trained on."""
        described = [(one, _sign(one), self._can_train(one)) for one in episodes]
        lost = {sign for _, sign, is_usable in described if not is_usable}
        is_whole = {sign for _, sign, _ in described} - lost >= {1.0, -1.0}
        kept, unpaired = [], 0
        for one, sign, is_usable in described:
            if not is_usable or (is_whole and sign):
                kept.append(one)
            else:
                unpaired += one.num_trained_tokens + one.num_unknown_tokens
        return kept, unpaired

    def _can_train(self, episode: Episode) -> bool:
        values = zip(episode.loss_mask[1:], episode.logprobs[1:], strict=True)
        fits = len(episode.token_ids) <= self.row_len
        return fits and any(on and math.isfinite(logprob) for on, logprob in values)

    def _shaped(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the reward to train on, after the overlong penalty."""
        if rollout.reward is None or not self.config.overlong.buffer_tokens:
            return rollout
        limit = self.config.sampling.max_tokens_per_turn
        penalty = _overlong_penalty(rollout, self.config.overlong, max_tokens=limit)
        return replace(rollout, reward=rollout.reward - penalty)


def _sign(episode: Episode) -> float:
    """Return 1 for an episode of a pair's chosen rollout, -1 for the rejected one, 0 for others."""
    return next(filter(None, episode.advantages), 0.0)


def is_cut(rollout: Rollout) -> bool:
    """Whether a turn of the rollout ended at its token budget."""
    return any(turn.completion.finish_reason is FinishReason.LENGTH for turn in rollout.turns)


def _overlong_penalty(rollout: Rollout, config: OverlongConfig, *, max_tokens: int) -> float:
    """Return the amount to subtract from the reward. The longest turn of the rollout determines it.

    With a limit L (``max_tokens``) and a buffer B, a turn of n tokens costs ``penalty`` times
    ``min(1, max(0, (n - (L - B)) / B))``; a turn that was cut off costs the full ``penalty``.
    """
    start, buffer = max_tokens - config.buffer_tokens, config.buffer_tokens
    lengths = [len(turn.completion.token_ids) - start for turn in rollout.turns]
    share = 1.0 if is_cut(rollout) else min(1.0, max([0, *lengths]) / buffer)
    return config.penalty * share
