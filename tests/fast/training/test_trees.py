"""Prefix trees: what is shared is computed once, and every loss entry keeps its own episode."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.episodes import batch_of, branching_episodes, make_episode
from torchtitan_rl.token_sets import pack_kept
from torchtitan_rl.training.batch import TrainingBatch, predicted_mask, trained_mask
from torchtitan_rl.training.packing import Share, cut, rank_share
from torchtitan_rl.training.trees import Microbatch, SortedEpisodes, lay_out, padded, sort_episodes
from torchtitan_rl.types import UNKNOWN_EXPERT, Episode, KeptRun

MAX_LEN = 12


def shares(
    batch: TrainingBatch, *, max_tokens: int, num_ranks: int = 1, multiple: int = 1, on: bool = True
) -> list[Share]:
    """Of every rank."""
    return [
        rank_share(
            batch,
            trained_mask(batch),
            max_tokens=max_tokens,
            padding_multiple=multiple,
            share_prefixes=on,
            rank=rank,
            num_ranks=num_ranks,
        )
        for rank in range(num_ranks)
    ]


def visible(part: Microbatch) -> np.ndarray:
    """[T, T]: which key (dim 1) a query (dim 0) sees, by the rule."""
    index = np.arange(len(part.token_ids_T))
    return (index[None] <= index[:, None]) & (index[:, None] < part.subtree_end_T[None])


def check_entries(batch: TrainingBatch, parts: list[Microbatch]) -> None:
    """Walks from every entry to its root, and counts the entries."""
    starts, episodes = batch.episode_starts, batch.episode_ids
    for part in parts:
        mask = visible(part)
        for predecessor, source in zip(part.predecessors_E, part.sources_E, strict=True):
            path = np.nonzero(mask[predecessor])[0]
            begin = starts[episodes[source]]
            assert np.array_equal(part.token_ids_T[path], batch.token_ids[begin:source])
            assert np.array_equal(part.position_ids_T[path], np.arange(len(path)))
            if batch.routed_experts is not None:
                experts_TXK = batch.routed_experts[begin:source]
                assert np.array_equal(part.routed_experts_TXK[path], experts_TXK)
    found = np.concatenate([part.sources_E for part in parts])
    assert sorted(found) == np.nonzero(trained_mask(batch))[0].tolist()


def with_sets(episodes: list[Episode]) -> list[Episode]:
    """The same, their tokens sampled from sets of a vocabulary of four."""
    return [
        replace(
            episode,
            kept_tokens=make_episode(
                episode.token_ids, episode.loss_mask, seed=seed, cut_from=4
            ).kept_tokens,
        )
        for seed, episode in enumerate(episodes)
    ]


def with_experts(episodes: list[Episode]) -> list[Episode]:
    """The same, each with experts of its own; but the first episode's are not known."""
    return [
        replace(
            episode,
            routed_experts=make_episode(
                episode.token_ids, episode.loss_mask, seed=seed, num_experts=3
            ).routed_experts
            if seed
            else None,
        )
        for seed, episode in enumerate(episodes)
    ]


def rows_of_logits(batch: TrainingBatch, sources: Iterable[int]) -> int:
    """Distinct pairs of the tokens before a source and the set it was sampled from."""
    starts, episodes = batch.episode_starts, batch.episode_ids
    kept = np.full(batch.num_tokens, -1) if batch.kept is None else batch.kept
    return len(
        {(*_prefix(batch, starts[episodes[source]], source), kept[source]) for source in sources}
    )


def _prefix(batch: TrainingBatch, start: int, end: int) -> tuple[bytes, bytes]:
    experts = b"" if batch.routed_experts is None else batch.routed_experts[start:end].tobytes()
    return batch.token_ids[start:end].tobytes(), experts


def rows_of_members(batch: TrainingBatch, members: SortedEpisodes, piece: Iterable[int]) -> int:
    chosen = {members.indices[member] for member in piece}
    selected = np.nonzero(predicted_mask(batch))[0]
    return rows_of_logits(batch, [i for i in selected if batch.episode_ids[i] in chosen])


def needed_prefixes(episodes: list[Episode]) -> list[tuple[int, ...]]:
    """Every token that a loss reads logits of or that such a token attends to, as its path."""
    prefixes = []
    for episode in episodes:
        last = max((i for i, on in enumerate(episode.loss_mask) if on and i > 0), default=0)
        prefixes += [episode.token_ids[: i + 1] for i in range(last)]
    return prefixes


@given(episodes=branching_episodes(max_len=MAX_LEN), on=st.booleans())
def test_walking_from_an_entry_to_the_root_gives_its_episode(
    episodes: list[Episode], on: bool
) -> None:
    batch = batch_of(episodes, row_len=MAX_LEN)
    (share,) = shares(batch, max_tokens=1000, on=on)
    check_entries(batch, list(share.parts))


@given(episodes=branching_episodes(max_len=MAX_LEN, max_episodes=20))
def test_a_prefix_is_shared_only_where_its_experts_are_equal(episodes: list[Episode]) -> None:
    episodes = with_experts(episodes)
    batch = batch_of(episodes, row_len=MAX_LEN)
    (share,) = shares(batch, max_tokens=1000, multiple=4)
    check_entries(batch, list(share.parts))
    prefixes = set()
    for one, start in zip(episodes, batch.episode_starts, strict=True):
        for prefix in needed_prefixes([one]):
            if batch.routed_experts is None:
                experts = b""
            else:
                experts = batch.routed_experts[start : start + len(prefix)].tobytes()
            prefixes.add((prefix, experts))
    assert share.num_computed == len(prefixes)
    (unshared,) = shares(batch, max_tokens=1000, on=False)
    check_entries(batch, list(unshared.parts))


@given(episodes=branching_episodes(max_len=MAX_LEN))
def test_each_distinct_prefix_that_an_entry_needs_is_computed_once(episodes: list[Episode]) -> None:
    (share,) = shares(batch_of(episodes, row_len=MAX_LEN), max_tokens=1000)
    prefixes = needed_prefixes(episodes)
    assert share.num_needed == len(prefixes)
    assert share.num_computed == len(set(prefixes))


@given(
    episodes=branching_episodes(max_len=MAX_LEN, max_episodes=20),
    spare=st.integers(0, 30),
    num_ranks=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 4]),
    on=st.booleans(),
    cuts_tokens=st.booleans(),
    has_experts=st.booleans(),
)
def test_ranks_get_equally_many_microbatches_none_too_large_and_together_every_entry_once(
    episodes: list[Episode],
    spare: int,
    num_ranks: int,
    multiple: int,
    on: bool,
    cuts_tokens: bool,
    has_experts: bool,
) -> None:
    episodes = with_experts(episodes) if has_experts else episodes
    batch = batch_of(with_sets(episodes) if cuts_tokens else episodes, row_len=MAX_LEN)
    max_tokens = 4 * ((MAX_LEN + spare) // 4)
    of_ranks = shares(batch, max_tokens=max_tokens, num_ranks=num_ranks, multiple=multiple, on=on)
    parts = [part for share in of_ranks for part in share.parts]
    assert all(rows_of_logits(batch, part.sources_E) <= max_tokens for part in parts)
    assert len({len(share.parts) for share in of_ranks}) == 1
    assert all(share.parts for share in of_ranks)
    sizes = [len(part.token_ids_T) for part in parts]
    assert min(sizes) > 0
    assert max(sizes) <= max_tokens
    assert all(size % multiple == 0 for size in sizes)
    first = of_ranks[0]
    assert sum(sizes) == first.num_computed + first.num_padding
    if trained_mask(batch).any():
        check_entries(batch, parts)
        assert 0.0 <= first.shared_share < 1.0


@settings(max_examples=50)
@given(
    episodes=branching_episodes(max_len=MAX_LEN),
    limit=st.integers(MAX_LEN, 40),
    cuts_tokens=st.booleans(),
)
def test_a_tree_is_cut_only_where_it_is_larger_than_the_limit(
    episodes: list[Episode], limit: int, cuts_tokens: bool
) -> None:
    batch = batch_of(with_sets(episodes) if cuts_tokens else episodes, row_len=MAX_LEN)
    members = sort_episodes(batch, predicted_mask(batch), share_prefixes=True)
    pieces = cut(members, limit)
    assert [m for piece in pieces for m in piece] == list(range(len(members.lengths)))
    assert all(members.num_computed(piece) <= limit for piece in pieces)
    assert all(rows_of_members(batch, members, piece) <= limit for piece in pieces)
    for before, after in itertools.pairwise(pieces):
        if members.shared[after.start]:
            tree = [
                m
                for m in range(len(members.lengths))
                if 0 not in members.shared[min(m, after.start) + 1 : max(m, after.start) + 1]
            ]
            sizes = members.num_computed(tree), rows_of_members(batch, members, tree)
            assert max(sizes) > limit
            assert before.stop == after.start


def test_siblings_with_the_same_tokens_from_many_sets_are_bounded_by_their_rows_of_logits() -> None:
    """Eight that compute ten tokens together, and read ten rows of logits each."""
    tokens = list(range(11))
    answers = [
        replace(
            make_episode(tokens, [False] + [True] * 10),
            kept_tokens=(KeptRun(0, pack_kept(np.arange(32) < 12 + answer)),),
        )
        for answer in range(8)
    ]
    (share,) = shares(batch_of(answers, row_len=16), max_tokens=30)
    assert [len(part.sources_E) for part in share.parts] == [30, 30, 20]
    assert [len(part.token_ids_T) for part in share.parts] == [10, 10, 10]


def test_siblings_whose_tree_is_too_large_share_their_stem_in_every_microbatch() -> None:
    """16 answers of 10 to one prompt of 100, at most 150 tokens: 5 answers to a stem."""
    prompt = list(range(100))
    answers = [
        make_episode([*prompt, *range(200 + 20 * i, 211 + 20 * i)], [False] * 100 + [True] * 11)
        for i in range(16)
    ]
    (share,) = shares(batch_of(answers, row_len=128), max_tokens=150)
    assert [len(part.token_ids_T) for part in share.parts] == [150, 150, 150, 110]
    assert share.num_needed == 16 * 110


def test_padding_is_trees_of_one_token() -> None:
    episode = make_episode([1, 2, 3, 4], [False, True, True, True], num_experts=3)
    batch = batch_of([episode], row_len=8)
    members = sort_episodes(batch, trained_mask(batch), share_prefixes=True)
    part = padded(lay_out(batch, trained_mask(batch), members, [0]), 8)
    assert visible(part)[3:].sum() == 5
    assert not visible(part)[3:, :3].any()
    assert (part.position_ids_T[3:] == 0).all()
    assert part.routed_experts_TXK is not None
    assert (part.routed_experts_TXK[3:] == UNKNOWN_EXPERT).all()
    empty = padded(lay_out(batch, trained_mask(batch), members, []), 2)
    assert len(empty.token_ids_T) == 2
    assert len(empty.sources_E) == 0
