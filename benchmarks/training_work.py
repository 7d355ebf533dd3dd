"""The work of an optimizer step, which is drawn once for all sides, and its size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

MEDIAN_LENGTH, SIGMA = 148, 0.7  # of the log-normal lengths, in tokens and in nats
_SHORTEST, _LONGEST = 8, 512


def siblings(
    rng: np.random.Generator, vocab_size: int, *, groups: int, size: int, prompt: int, answer: int
) -> list[Episode]:
    """Make groups of ``size`` answers; the answers of a group share a prompt."""
    episodes = []
    for _ in range(groups):
        stem = _tokens(rng, prompt, vocab_size)
        for _ in range(size):
            tokens = [*stem, *_tokens(rng, answer, vocab_size)]
            episodes.append(_episode(rng, tokens, [False] * prompt + [True] * answer))
    return episodes


def branches(rng: np.random.Generator, vocab_size: int) -> list[Episode]:
    """Make 2 groups of 8 rollouts. A rollout has a prompt of 205 tokens and 4 turns, each with 40
    sampled tokens and a reply of 20. Then it has 3 branches, each with 3 further tokens and 48
    sampled ones. The turns have a loss in the first branch only.
    """
    episodes = []
    turn = [True] * 40 + [False] * 20
    for _ in range(2):
        prompt = _tokens(rng, 205, vocab_size)
        for _ in range(8):
            history = [*prompt, *_tokens(rng, 4 * 60, vocab_size)]
            for branch in range(3):
                tokens = [*history, *_tokens(rng, 3 + 48, vocab_size)]
                before = [False] * 205 + (turn * 4 if branch == 0 else [False] * (4 * 60))
                episodes.append(_episode(rng, tokens, [*before, *[False] * 3, *[True] * 48]))
    return episodes


def alone(rng: np.random.Generator, vocab_size: int) -> list[Episode]:
    """Make 128 episodes of log-normal lengths that share no tokens. A third of each is its
    prompt."""
    lengths = np.exp(rng.normal(np.log(MEDIAN_LENGTH), SIGMA, 128)).astype(int)
    return [
        _episode(rng, _tokens(rng, length, vocab_size), [i >= length // 3 for i in range(length)])
        for length in lengths.clip(_SHORTEST, _LONGEST).tolist()
    ]


WORKLOADS: Mapping[str, Callable[[np.random.Generator, int], list[Episode]]] = {
    "8 x 8 answers of 48 to prompts of 205": lambda rng, vocab_size: siblings(
        rng, vocab_size, groups=8, size=8, prompt=205, answer=48
    ),
    "16 answers of 100 to a prompt of 1,000": lambda rng, vocab_size: siblings(
        rng, vocab_size, groups=1, size=16, prompt=1000, answer=100
    ),
    "3 branches of 16 rollouts of 4 turns": branches,
    "128 episodes that share nothing": alone,
}


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    drawn: list[int] = rng.integers(0, vocab_size, count).tolist()
    return drawn


def _episode(rng: np.random.Generator, tokens: Sequence[int], mask: Sequence[bool]) -> Episode:
    advantage = float(rng.normal())
    return Episode(
        rollout_id="rollout",
        group_id="group",
        token_ids=tuple(tokens),
        loss_mask=tuple(mask),
        logprobs=tuple(-5.0 if on else 0.0 for on in mask),
        advantages=tuple(advantage if on else 0.0 for on in mask),
        versions=tuple(0 if on else -1 for on in mask),
    )


def pack(episodes: Sequence[Episode]) -> TrainingBatch:
    longest = max(len(episode.token_ids) for episode in episodes)
    batch = pack_episodes(episodes, row_len=longest, temperature=1.0).batch
    assert batch is not None
    return batch


def fitting(
    names: Collection[str], *, vocab_size: int, row_lens: Sequence[int]
) -> dict[str, TrainingBatch]:
    """Return the batches of the workloads whose episodes fit into the longest row. Prints the names
    of the other workloads.

    Raises:
        SystemExit: no workload fits.
    """
    found = {}
    for name in names:
        batch = pack(WORKLOADS[name](np.random.default_rng(0), vocab_size))
        longest = int(batch.episode_lengths.max())
        if longest <= max(row_lens):
            found[name] = batch
        else:
            print(f"{name}: left out, an episode has {longest} tokens")
    if not found:
        raise SystemExit(f"--row-lens: no workload fits into rows of {max(row_lens)} tokens")
    return found
