"""Random episodes with common beginnings, for the tests of prefix sharing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from torchtitan_rl.routed_experts import to_routed
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_runs, pack_kept
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import UNKNOWN_EXPERT, Episode, RoutedExperts


def make_episode(
    token_ids: Sequence[int],
    mask: Sequence[bool],
    *,
    name: str = "rollout",
    seed: int = 0,
    cut_from: int = 0,
    num_experts: int = 0,
) -> Episode:
    """Its logprobs, advantages and versions differ from token to token and from seed to seed; so do
    the sets that tokens were sampled from, where they were cut from ``cut_from`` tokens. With
    ``num_experts`` each token has one of them in each of two layers, mostly the first one."""
    rng = np.random.default_rng(seed)
    size = len(token_ids)
    values = zip(
        mask,
        rng.normal(-5.0, 1.0, size).tolist(),
        rng.normal(0.0, 1.0, size).tolist(),
        rng.integers(-3, 1, size).tolist(),
        strict=True,
    )
    drawn = [(p, a, v) if on else (0.0, 0.0, -1) for on, p, a, v in values]
    return Episode(
        rollout_id=name,
        group_id="group",
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        logprobs=tuple(p for p, _, _ in drawn),
        advantages=tuple(a for _, a, _ in drawn),
        versions=tuple(v for _, _, v in drawn),
        kept_tokens=kept_runs(random_set(rng, token, cut_from) for token in token_ids)
        if cut_from
        else (),
        routed_experts=random_experts(rng, size, num_experts) if num_experts else None,
    )


def random_experts(rng: np.random.Generator, size: int, number: int) -> RoutedExperts:
    """Two layers of one expert, mostly the first one; some of the tokens are unknown."""
    experts_TXK = rng.integers(0, number, (size, 2, 1)) * (rng.random((size, 2, 1)) < 0.2)
    experts_TXK[rng.random(size) < 0.1] = UNKNOWN_EXPERT
    return to_routed(experts_TXK.astype(np.uint8))


def random_set(rng: np.random.Generator, token_id: int, vocab_size: int) -> bytes:
    """A packed set that has the token: half of the time one of few, a third of it all."""
    if rng.random() < 0.3:
        return WHOLE_VOCABULARY
    if rng.random() < 0.5:
        kept_V = np.arange(vocab_size) % 2 == token_id % 2
    else:
        kept_V = rng.random(vocab_size) < rng.random()
        kept_V[token_id] = True
    return pack_kept(kept_V)


def batch_of(
    episodes: Sequence[Episode], *, row_len: int, temperature: float = 0.7
) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=row_len, temperature=temperature).batch
    assert batch is not None
    return batch


@st.composite
def branching_episodes(draw: st.DrawFn, *, max_len: int, max_episodes: int = 12) -> list[Episode]:
    """Few different tokens, and many an episode that branches off another one, or repeats it."""
    token = st.integers(0, 3)
    episodes: list[Episode] = []
    for index in range(draw(st.integers(1, max_episodes))):
        start: tuple[int, ...] = ()
        if episodes and draw(st.booleans()):
            stem = draw(st.sampled_from(episodes)).token_ids
            start = stem[: draw(st.integers(0, len(stem)))]
        least = 0 if start else 1
        end = draw(st.lists(token, min_size=least, max_size=max(least, max_len - len(start))))
        tokens = (*start, *end)[:max_len]
        mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        episodes.append(make_episode(tokens, mask, name=f"rollout-{index}", seed=index))
    return episodes
