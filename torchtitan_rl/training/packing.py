"""Packs episodes into one batch, splits the batch into minibatches (one for each optimizer update),
and splits each minibatch over data-parallel ranks and microbatches.

All ranks get the same number of microbatches, because each forward and backward pass is a
collective; some may be empty. A microbatch computes at most ``max_tokens`` tokens and rows of
logits (which are more than tokens if episodes share a token but sampled it from different sets). A
larger tree is cut, and each part repeats the tokens that its episodes share with other parts; their
loss still counts once per episode.

Invariants: every episode is in the batch or listed in `Packing.oversized`. No episode is split over
microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchtitan_rl.images import PromptImage, rope_positions
from torchtitan_rl.routed_experts import to_array
from torchtitan_rl.token_sets import WHOLE_VOCABULARY, kept_error, kept_of_each
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.trees import (
    Microbatch,
    SortedEpisodes,
    lay_out,
    num_padding,
    padded,
    sort_episodes,
)
from torchtitan_rl.types import UNKNOWN_EXPERT, Episode

_BALANCING_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's microbatches, with padding. The token counts are sums over all ranks."""

    parts: tuple[Microbatch, ...]
    num_needed: int  # tokens that entries need; shared tokens count in each episode
    num_computed: int  # tokens computed, after sharing, without padding
    num_padding: int

    @property
    def shared_share(self) -> float:
        """Share of the needed tokens that are not computed, because another episode shares them."""
        return 1.0 - self.num_computed / self.num_needed

    @property
    def padding_share(self) -> float:
        return self.num_padding / (self.num_computed + self.num_padding)


def sum_of_shares(shares: Sequence[Share]) -> Share:
    return Share(
        parts=(),
        num_needed=sum(share.num_needed for share in shares),
        num_computed=sum(share.num_computed for share in shares),
        num_padding=sum(share.num_padding for share in shares),
    )


def minibatches(
    batch: TrainingBatch, selected_N: npt.NDArray[np.bool_], number: int, *, seed: tuple[int, int]
) -> list[npt.NDArray[np.bool_]]:
    """Split the selected tokens into ``number`` minibatches of whole groups, in a random order that
    is the same on every rank. Their numbers of groups differ by at most one. There are fewer
    minibatches if fewer groups have a selected token."""
    if number == 1:
        return [selected_N]
    group_N = batch.groups[batch.episode_ids]
    groups = np.random.default_rng(seed).permutation(np.unique(group_N[selected_N]))
    number = min(number, max(len(groups), 1))
    return [selected_N & np.isin(group_N, chosen) for chosen in np.array_split(groups, number)]


def rank_share(
    batch: TrainingBatch,
    selected_N: npt.NDArray[np.bool_],
    *,
    max_tokens: int,
    padding_multiple: int,
    share_prefixes: bool,
    rank: int,
    num_ranks: int,
) -> Share:
    """Compute the microbatches of ``rank``, whose entries are the tokens in ``selected_N``. Each
    computes at most ``max_tokens`` tokens and at most as many rows of logits, and is padded to a
    multiple of ``padding_multiple`` tokens."""
    episodes = sort_episodes(batch, selected_N, share_prefixes=share_prefixes)
    bins = split_evenly(episodes, max_tokens, num_ranks)
    sizes = [episodes.num_computed(members) for members in bins]
    parts = [lay_out(batch, selected_N, episodes, members) for members in bins[rank::num_ranks]]
    return Share(
        parts=tuple(padded(part, padding_multiple) for part in parts),
        num_needed=sum(episodes.lengths),
        num_computed=sum(sizes),
        num_padding=sum(num_padding(size, padding_multiple) for size in sizes),
    )


def split_evenly(episodes: SortedEpisodes, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Split the members of ``episodes`` (positions in their order) into bins, the largest bin
    first.

    Each bin has at most ``max_tokens`` computed tokens and rows of logits. The number of bins is a
    multiple of ``num_ranks``; rank r takes the bins ``r, r + num_ranks, ...``. For one rank, the
    bins are those of first-fit-decreasing. For several, the limit is then lowered as far as
    possible without an additional bin, so that the bins have similar sizes.
    """
    bins = _bins(episodes, max_tokens)
    num_bins = max(len(bins) + -len(bins) % num_ranks, num_ranks)
    if num_ranks > 1 and bins:
        total = episodes.num_computed(range(len(episodes.lengths)))
        low, high = max(*episodes.lengths, -(-total // num_bins)) - 1, max_tokens
        for _ in range(_BALANCING_ROUNDS):
            limit = (low + high + 1) // 2
            tried = _bins(episodes, limit)
            if len(tried) > num_bins:
                low = limit
            else:
                bins, high = tried, limit
    bins.sort(key=episodes.num_computed, reverse=True)
    return bins + [[] for _ in range(num_bins - len(bins))]


def _bins(episodes: SortedEpisodes, limit: int) -> list[list[int]]:
    """Pack pieces of trees by first-fit-decreasing into bins of at most ``limit`` tokens and
    rows."""
    pieces = cut(episodes, limit)
    sizes = [max(episodes.num_computed(piece), num_rows(episodes, piece)) for piece in pieces]
    return [
        sorted(member for piece in chosen for member in pieces[piece])
        for chosen in first_fit_decreasing(sizes, limit)
    ]


def num_rows(episodes: SortedEpisodes, piece: range) -> int:
    """Return the number of rows of logits that the members in ``piece`` read; see
    `num_new_rows`."""
    return sum(episodes.num_new_rows(member, piece.start) for member in piece)


def cut(episodes: SortedEpisodes, limit: int) -> list[range]:
    """Split the members into pieces of consecutive ones, each of at most ``limit`` computed tokens
    and rows of logits. Trees that fit stay whole. A larger tree is cut at the position with the
    fewest repeated tokens per token before the cut."""
    pieces = []
    start, num_members = 0, len(episodes.lengths)
    while start < num_members:
        size, end, least = episodes.lengths[start], start + 1, math.inf
        rows = episodes.num_new_rows(start, start)
        for i in range(start + 1, num_members + 1):
            repeated = episodes.shared[i] if i < num_members else 0
            if repeated <= least * size:
                end, least = i, repeated / size
            if repeated == 0:
                break
            size += episodes.lengths[i] - repeated
            rows += episodes.num_new_rows(i, start)
            if max(size, rows) > limit:
                break
        pieces.append(range(start, end))
        start = end
    return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The result of `pack_episodes`. ``oversized`` has the indices of episodes that are longer than
    ``row_len``, which the caller counts as discarded. ``batch`` is None if all are."""

    batch: TrainingBatch | None
    oversized: tuple[int, ...]


def pack_episodes(
    episodes: Sequence[Episode], *, row_len: int, temperature: float, num_top: int = 0
) -> Packing:
    """Pack all episodes of at most ``row_len`` tokens into one batch, in their order. ``num_top``
    is the number of a teacher's most likely tokens at each position. Raises ValueError: an episode
    has no tokens, or fields of different lengths; or episodes have experts of different shapes."""
    for index, episode in enumerate(episodes):
        _check(index, episode)
    oversized = tuple(i for i, one in enumerate(episodes) if len(one.token_ids) > row_len)
    fitting = [one for one in episodes if len(one.token_ids) <= row_len]
    if not fitting:
        return Packing(batch=None, oversized=oversized)
    kept, kept_sets = _kept(fitting)
    teacher_ids, teacher_logprobs = _teacher_top(fitting, num_top)
    images, features, positions = _images(fitting)
    batch = TrainingBatch(
        episode_lengths=np.array([len(one.token_ids) for one in fitting]),
        token_ids=np.concatenate([np.array(one.token_ids, dtype=np.int64) for one in fitting]),
        loss_mask=np.concatenate([np.array(one.loss_mask, dtype=np.bool_) for one in fitting]),
        logprobs=np.concatenate([np.array(one.logprobs, dtype=np.float32) for one in fitting]),
        advantages=np.concatenate([np.array(one.advantages, dtype=np.float32) for one in fitting]),
        versions=np.concatenate([np.array(one.versions, dtype=np.int64) for one in fitting]),
        temperature=temperature,
        kept=kept,
        kept_sets=kept_sets,
        teacher_ids=teacher_ids,
        teacher_logprobs=teacher_logprobs,
        routed_experts=_routed(fitting),
        images=images,
        features=features,
        positions=positions,
        groups=np.unique([one.group_id for one in fitting], return_inverse=True)[1],
    )
    return Packing(batch=batch, oversized=oversized)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of indices into ``lengths``, each with a total of at most ``capacity``, longest
    item first.

    Needs at most 11/9 of the optimal number of bins, plus one (Johnson 1973).

    >>> first_fit_decreasing([3, 9, 7, 6, 7], 16)
    [[1, 2], [4, 3, 0]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    free = np.full(len(lengths), capacity, dtype=np.int64)
    bins: list[list[int]] = []
    for i in order:
        # A bin that is not open yet has its full capacity, so there is always a fit.
        first = int(np.argmax(free >= lengths[i]))
        if first >= len(bins):
            bins.append([])
        bins[first].append(i)
        free[first] -= lengths[i]
    return bins


def _kept(episodes: Sequence[Episode]) -> tuple[npt.NDArray[np.int32] | None, tuple[bytes, ...]]:
    """Return `TrainingBatch.kept`, and the distinct sets of the episodes' trained tokens."""
    if not any(one.kept_tokens for one in episodes):
        return None, ()
    numbers = {WHOLE_VOCABULARY: -1}
    kept: list[int] = []
    for one in episodes:
        for packed, trained in zip(
            kept_of_each(one.kept_tokens, len(one.token_ids)), one.loss_mask, strict=True
        ):
            if trained and isinstance(packed, bytes):
                kept.append(numbers.setdefault(packed, len(numbers) - 1))
            else:
                kept.append(-1)
    return np.array(kept, dtype=np.int32), tuple(numbers)[1:]


def _teacher_top(
    episodes: Sequence[Episode], num_top: int
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.float32] | None]:
    if not num_top:
        return None, None
    num_tokens = sum(len(one.token_ids) for one in episodes)
    ids_NK = np.zeros((num_tokens, num_top), dtype=np.int32)
    logprobs_NK = np.full((num_tokens, num_top), np.nan, dtype=np.float32)
    start = 0
    for one in episodes:
        for first, scores in one.teacher_top:
            own = slice(start + first, start + first + len(scores.logprobs))
            ids_NK[own] = np.frombuffer(scores.top_ids, dtype="<i4").reshape(-1, num_top)
            logprobs_NK[own] = np.frombuffer(scores.top_logprobs, "<f4").reshape(-1, num_top)
        start += len(one.token_ids)
    return ids_NK, logprobs_NK


def _routed(episodes: Sequence[Episode]) -> npt.NDArray[np.uint8] | None:
    found = [one.routed_experts for one in episodes if one.routed_experts is not None]
    shapes = {(one.num_layers, one.per_token) for one in found}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"the episodes' routed experts have shapes {sorted(shapes)}: need one")
    (shape,) = shapes
    return np.concatenate(
        [
            np.full((len(one.token_ids), *shape), UNKNOWN_EXPERT, dtype=np.uint8)
            if one.routed_experts is None
            else to_array(one.routed_experts)
            for one in episodes
        ]
    )


def _images(
    episodes: Sequence[Episode],
) -> tuple[tuple[PromptImage, ...], npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None]:
    if not any(one.images for one in episodes):
        return (), None, None
    first: dict[str, int] = {}  # the number of an image's first token, by the image's digest
    images: list[PromptImage] = []
    features, num_features = [], 0
    for one in episodes:
        own = np.full(len(one.token_ids), -1, dtype=np.int64)
        for image in one.images:
            if (digest := image.digest) not in first:
                first[digest], num_features = num_features, num_features + image.num_tokens
                images.append(replace(image, start=0))
            own[image.start : image.end] = first[digest] + np.arange(image.num_tokens)
        features.append(own)
    positions = [rope_positions(len(one.token_ids), one.images) for one in episodes]
    return tuple(images), np.concatenate(features), np.concatenate(positions)


def _check(index: int, episode: Episode) -> None:
    routed, num_tokens = episode.routed_experts, len(episode.token_ids)
    others = (episode.loss_mask, episode.logprobs, episode.advantages, episode.versions)
    sizes = {num_tokens, *map(len, others)}
    where = f"episode {index} of rollout {episode.rollout_id}"
    if sizes == {0} or len(sizes) > 1:
        raise ValueError(f"{where}: its fields must have one length, above 0, not {sorted(sizes)}")
    if routed is not None and len(routed.data) != num_tokens * routed.bytes_per_token:
        what = f"routed experts of {len(routed.data)} bytes, for {num_tokens} tokens"
        raise ValueError(f"{where}: {what}")
    if error := kept_error(episode.kept_tokens, num_tokens):
        raise ValueError(f"{where}: {error}")
