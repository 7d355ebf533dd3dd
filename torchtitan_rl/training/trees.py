"""Prefix trees of episodes: tokens at the beginning of several episodes are computed once.

A token's logits depend only on the token and the tokens before it, so two episodes that begin with
the same tokens have the same logits there. With recorded experts (`TrainingBatch.routed_experts`)
they also depend on these, so a token is shared only between episodes that have the same experts for
it and for the tokens before it. Tokens of images are equal if their images are. The episodes of a
forward pass become trees, laid out depth first: a token comes after its parent, and its subtree is
contiguous.

```
A B C D, then a token with loss        token_ids     A B C D E F
A B E F, then a token with loss        position_ids  0 1 2 3 2 3    depth, not index
                                       subtree_end   6 6 4 4 6 6
```

Query q sees key k if ``k <= q < subtree_end[k]``.

The inputs of the loss are not in the trees: each trained token of each episode is a separate entry
(`Microbatch.sources_E`) with its own logprob, advantage and version, even if the token is computed
once for several episodes. Without sharing, each tree has one episode.

Invariants: the path from the root to an entry's predecessor has the episode's tokens before that
entry. Every selected token of a member has exactly one entry. Only tokens that an entry needs are
computed.

Shapes: T computed tokens, E entries, X layers, K experts of a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.types import UNKNOWN_EXPERT

_T = TypeVar("_T", np.int64, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The tokens of one forward pass and the entries that read their logits."""

    token_ids_T: npt.NDArray[np.int64]
    position_ids_T: npt.NDArray[np.int64]  # depth in the tree
    subtree_end_T: npt.NDArray[np.int64]  # index after the token's last descendant
    predecessors_E: npt.NDArray[np.int64]  # the token whose logits the entry reads; ascending
    sources_E: npt.NDArray[np.int64]  # the entry's token, as an index into the batch
    # The tokens' experts, like `TrainingBatch.routed_experts`.
    routed_experts_TXK: npt.NDArray[np.uint8] | None = None
    features_T: npt.NDArray[np.int64] | None = None  # like `TrainingBatch.features`
    positions_T3: npt.NDArray[np.int64] | None = None  # like `TrainingBatch.positions`


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedEpisodes:
    """The episodes of a batch that have a selected token, ordered so that those with a common
    beginning are neighbours. Entry i of each tuple describes the i-th episode in this order (member
    i).

    ``indices``: the episode's index in the batch. ``lengths``: number of tokens to compute, which
    are those before the episode's last selected token. ``shared``: number of these at the beginning
    that are equal to those of the member before, with the same experts; two members i < j share
    ``min(shared[i + 1 : j + 1])`` tokens.

    Selected tokens read the same row of logits if they share their predecessor and were sampled
    from the same set of tokens. ``rows_before``: for each selected token of a member, the last
    earlier member that reads the same row, or -1. None if there cannot be more rows than computed
    tokens.
    """

    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    shared: tuple[int, ...]
    rows_before: tuple[npt.NDArray[np.int64], ...] | None = None

    def num_computed(self, members: Sequence[int]) -> int:
        """Return the number of distinct tokens of these members (ascending)."""
        return sum(self.lengths[m] for m in members) - sum(self.shared_by(members))

    def num_new_rows(self, member: int, first: int) -> int:
        """Return the number of rows of logits that ``member`` reads and no earlier one from
        ``first`` on; 0 if ``rows_before`` is None: then there are no more rows than tokens."""
        if self.rows_before is None:
            return 0
        return int((self.rows_before[member] < first).sum())

    def shared_by(self, members: Sequence[int]) -> list[int]:
        """Return for each member the number of tokens that it shares with the member before it."""
        return [
            0 if before < 0 else min(self.shared[before + 1 : member + 1])
            for before, member in zip([-1, *members], members, strict=False)
        ]


def sort_episodes(
    batch: TrainingBatch, selected_N: npt.NDArray[np.bool_], *, share_prefixes: bool
) -> SortedEpisodes:
    """Sort the episodes lexicographically. Without ``share_prefixes``, keep the batch's order and
    share nothing."""
    starts = batch.episode_starts
    position_N = np.arange(batch.num_tokens) - np.repeat(starts, batch.episode_lengths)
    needed = np.maximum.reduceat(np.where(selected_N, position_N, 0), starts)
    indices = np.nonzero(needed)[0].tolist()
    if not share_prefixes:
        lengths = tuple(needed[indices].tolist())
        return SortedEpisodes(indices=tuple(indices), lengths=lengths, shared=(0,) * len(lengths))
    ends = starts + needed
    symbols_NW = _symbols(batch)
    keys = {i: symbols_NW[starts[i] : ends[i]].tobytes() for i in indices}
    indices.sort(key=lambda i: (keys[i], i))
    tokens = [symbols_NW[starts[i] : ends[i]] for i in indices]
    shared = [0, *(_num_common(a, b) for a, b in itertools.pairwise(tokens))]
    episodes = SortedEpisodes(
        indices=tuple(indices),
        lengths=tuple(map(len, tokens)),
        shared=tuple(shared[: len(tokens)]),
    )
    if batch.kept is None or not indices or (batch.kept[selected_N] < 0).all():
        return episodes
    return replace(episodes, rows_before=_rows_before(batch.kept, batch, selected_N, episodes))


def _rows_before(
    kept_N: npt.NDArray[np.int32],
    batch: TrainingBatch,
    selected_N: npt.NDArray[np.bool_],
    episodes: SortedEpisodes,
) -> tuple[npt.NDArray[np.int64], ...]:
    members = range(len(episodes.lengths))
    part = lay_out(batch, selected_N, episodes, members)
    member_of_episode = np.zeros(batch.num_episodes, dtype=np.int64)
    member_of_episode[list(episodes.indices)] = members
    member_E = member_of_episode[batch.episode_ids[part.sources_E]]
    order = np.lexsort((member_E, kept_N[part.sources_E], part.predecessors_E))
    member_E, predecessors_E = member_E[order], part.predecessors_E[order]
    kept_E = kept_N[part.sources_E[order]]
    is_same = (np.diff(predecessors_E) == 0) & (np.diff(kept_E) == 0)
    before_E = np.append(-1, np.where(is_same, member_E[:-1], -1))
    by_member = np.argsort(member_E, kind="stable")
    ends = np.cumsum(np.bincount(member_E, minlength=len(members)))
    return tuple(np.split(before_E[by_member], ends[:-1]))


def lay_out(
    batch: TrainingBatch,
    selected_N: npt.NDArray[np.bool_],
    episodes: SortedEpisodes,
    members: Sequence[int],
) -> Microbatch:
    """Lay out the trees of some of ``episodes``. ``members`` are positions in their order,
    ascending."""
    starts = batch.episode_starts.tolist()
    shared = episodes.shared_by(members)
    size = episodes.num_computed(members)
    position_ids = np.empty(size, dtype=np.int64)
    source = np.empty(size, dtype=np.int64)  # a token of the batch that it is computed from
    subtree_end = np.full(size, size, dtype=np.int64)
    path = np.empty(max((episodes.lengths[m] for m in members), default=0), dtype=np.int64)
    predecessors, sources = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    index, depth = 0, 0  # index of the next token; length of the previous member
    for member, common in zip(members, shared, strict=True):
        length, first = episodes.lengths[member], starts[episodes.indices[member]]
        subtree_end[path[common:depth]] = index
        own = slice(index, index + length - common)
        path[common:length] = np.arange(own.start, own.stop)
        source[own] = np.arange(first + common, first + length)
        position_ids[own] = np.arange(common, length)
        entries = np.nonzero(selected_N[first : first + length + 1])[0]
        predecessors.append(path[entries - 1])
        sources.append(first + entries)
        index, depth = own.stop, length
    predecessors_E, sources_E = np.concatenate(predecessors), np.concatenate(sources)
    order = np.argsort(predecessors_E, kind="stable")
    return Microbatch(
        token_ids_T=batch.token_ids[source],
        position_ids_T=position_ids,
        subtree_end_T=subtree_end,
        predecessors_E=predecessors_E[order],
        sources_E=sources_E[order],
        routed_experts_TXK=None if batch.routed_experts is None else batch.routed_experts[source],
        features_T=None if batch.features is None else batch.features[source],
        positions_T3=None if batch.positions is None else batch.positions[source],
    )


def padded(part: Microbatch, multiple: int) -> Microbatch:
    """Pad to a multiple of ``multiple`` tokens, at least one. Each padding token is a tree of its
    own, so that its attention costs almost nothing."""
    size = len(part.token_ids_T)
    missing = num_padding(size, multiple)

    def with_padding(values: npt.NDArray[_T], value: int) -> npt.NDArray[_T]:
        sides = [(0, missing)] + [(0, 0)] * (values.ndim - 1)
        return np.pad(values, sides, constant_values=value)

    routed, features, positions = part.routed_experts_TXK, part.features_T, part.positions_T3
    return replace(
        part,
        token_ids_T=with_padding(part.token_ids_T, 0),
        position_ids_T=with_padding(part.position_ids_T, 0),
        subtree_end_T=np.append(part.subtree_end_T, size + 1 + np.arange(missing)),
        routed_experts_TXK=None if routed is None else with_padding(routed, UNKNOWN_EXPERT),
        features_T=None if features is None else with_padding(features, -1),
        positions_T3=None if positions is None else with_padding(positions, 0),
    )


def num_padding(size: int, multiple: int) -> int:
    return -size % multiple if size else multiple


def _symbols(batch: TrainingBatch) -> npt.NDArray[np.uint8]:
    """Return W bytes for each of N tokens, which are equal where the tokens can be shared.
    Big-endian bytes sort in the same order as the token ids."""
    symbols_NW = batch.token_ids.astype(">u8").view(np.uint8).reshape(-1, 8)
    if batch.routed_experts is not None:
        routed_NW = batch.routed_experts.reshape(len(symbols_NW), -1)
        symbols_NW = np.concatenate([symbols_NW, routed_NW], axis=1)
    if batch.features is not None:
        features_NW = batch.features.astype(">i8").view(np.uint8).reshape(-1, 8)
        symbols_NW = np.concatenate([symbols_NW, features_NW], axis=1)
    return symbols_NW


def _num_common(a_TW: npt.NDArray[np.uint8], b_TW: npt.NDArray[np.uint8]) -> int:
    size = min(len(a_TW), len(b_TW))
    differs = (a_TW[:size] != b_TW[:size]).any(axis=1)
    return int(differs.argmax()) if differs.any() else size
