"""Packing: no token is lost or misplaced."""

from __future__ import annotations

import doctest
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support import episodes as support
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_of_each
from torchtitan_rl.training import packing
from torchtitan_rl.training.batch import TrainingBatch, num_masked_nonfinite, trained_mask
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.packing import first_fit_decreasing, pack_episodes
from torchtitan_rl.types import Episode

ROW_LEN = 16


def make_episode(length: int, *, first_token: int = 0, prompt: int = 1) -> Episode:
    mask = tuple(i >= prompt for i in range(length))
    return Episode(
        rollout_id=f"rollout-{first_token}",
        group_id="group",
        token_ids=tuple(range(first_token, first_token + length)),
        loss_mask=mask,
        logprobs=tuple(-0.5 - i if on else 0.0 for i, on in enumerate(mask)),
        advantages=tuple(0.25 if on else 0.0 for on in mask),
        versions=tuple(3 if on else -1 for on in mask),
    )


def make_batch(lengths: list[int]) -> TrainingBatch:
    episodes = [make_episode(n, first_token=100 * i) for i, n in enumerate(lengths)]
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=0.7).batch
    assert batch is not None
    return batch


lengths_lists = st.lists(st.integers(1, ROW_LEN + 4), min_size=1, max_size=30)


@given(lengths=lengths_lists)
def test_every_episode_is_whole_in_the_batch_or_listed_as_oversized(lengths: list[int]) -> None:
    """Trap 20: an oversized episode is reported and never dropped silently."""
    episodes = [make_episode(n, first_token=100 * i, prompt=2) for i, n in enumerate(lengths)]
    packed = pack_episodes(episodes, row_len=ROW_LEN, temperature=0.7)
    assert packed.oversized == tuple(i for i, n in enumerate(lengths) if n > ROW_LEN)
    fitting = [e for e in episodes if len(e.token_ids) <= ROW_LEN]
    if packed.batch is None:
        assert not fitting
        return
    batch = packed.batch
    assert batch.num_episodes == len(fitting)
    assert batch.num_tokens == sum(len(e.token_ids) for e in fitting)
    for index, (start, episode) in enumerate(zip(batch.episode_starts, fitting, strict=True)):
        own = slice(start, start + batch.episode_lengths[index])
        assert (batch.episode_ids[own] == index).all()
        for name in ("token_ids", "loss_mask", "logprobs", "advantages", "versions"):
            values = getattr(batch, name)
            assert np.array_equal(
                values[own], np.array(getattr(episode, name), dtype=values.dtype)
            ), name


@given(lengths=st.lists(st.integers(1, ROW_LEN), min_size=1, max_size=40))
def test_first_fit_decreasing_fills_rows_without_overflow(lengths: list[int]) -> None:
    bins = first_fit_decreasing(lengths, ROW_LEN)
    assert sorted(i for row in bins for i in row) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in row) for row in bins]
    assert max(totals) <= ROW_LEN
    # Two rows that are at most half full would fit into one.
    assert sum(2 * total <= ROW_LEN for total in totals) <= 1


def test_packing_is_deterministic_and_prefers_the_longest_first() -> None:
    assert doctest.testmod(packing) == (0, 1)  # failed, attempted


@given(cut=st.lists(st.booleans(), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_each_trained_token_has_the_set_it_was_sampled_from(cut: list[bool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    episodes = [
        support.make_episode(
            rng.integers(0, 4, 9).tolist(),
            (rng.random(9) < 0.6).tolist(),
            seed=seed + index,
            cut_from=4 if is_cut else 0,
        )
        for index, is_cut in enumerate(cut)
    ]
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0).batch
    assert batch is not None
    assert (batch.kept is None) is not any(cut)
    wanted = [
        packed if trained else WHOLE_VOCABULARY
        for one in episodes
        for packed, trained in zip(kept_of_each(one.kept_tokens, 9), one.loss_mask, strict=True)
    ]
    numbers = [-1] * batch.num_tokens if batch.kept is None else batch.kept.tolist()
    sets = [WHOLE_VOCABULARY if number < 0 else batch.kept_sets[number] for number in numbers]
    assert sets == wanted
    assert len(set(batch.kept_sets)) == len(batch.kept_sets)


def test_tokens_with_nonfinite_behaviour_logprobs_are_masked_and_counted() -> None:
    """Trap 15: invalid logprobs are never trained on as if on-policy."""
    batch = make_batch([6])
    batch.logprobs[2] = np.nan
    batch.logprobs[4] = -np.inf
    assert num_masked_nonfinite(batch) == 2
    assert np.nonzero(trained_mask(batch))[0].tolist() == [1, 3, 5]


def test_the_first_token_of_an_episode_is_never_trained_on() -> None:
    episodes = [make_episode(4, prompt=0), make_episode(3, prompt=0)]
    batch = pack_episodes(episodes, row_len=8, temperature=1.0).batch
    assert batch is not None
    assert trained_mask(batch).tolist() == [False, True, True, True, False, True, True]


@given(
    longest=st.integers(1, 3000),
    more=st.integers(0, 3000),
    context_parallel=st.sampled_from([1, 2]),
    tensor_parallel=st.sampled_from([1, 2, 3, 8]),
)
def test_on_cuda_padding_is_less_than_a_few_blocks_and_every_episode_fits(
    longest: int, more: int, context_parallel: int, tensor_parallel: int
) -> None:
    ranks = context_parallel * tensor_parallel
    longest, more = longest * ranks, more * ranks
    config = TrainerConfig(
        max_episode_tokens=longest,
        max_tokens_per_microbatch=longest + more,
        context_parallel=context_parallel,
        tensor_parallel=tensor_parallel,
    )
    largest, multiple = config.pass_sizes("cuda")
    assert multiple <= 128 * ranks
    assert multiple % 128 == multiple % ranks == 0
    assert longest <= largest <= longest + more
    padded = largest + -largest % multiple
    assert padded <= max(longest + more, longest + multiple)
    assert config.pass_sizes("cpu") == (longest + more, ranks)
    compiled = replace(config, compile=True)
    assert compiled.pass_sizes("cuda") == (longest + more, longest + more)
