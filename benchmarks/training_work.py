"""The work of an optimizer step, drawn once and the same for all sides, and its size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import first_fit_decreasing, pack_episodes
from torchtitan_rl.types import Episode

MEDIAN_LENGTH, SIGMA = 148, 0.7  # of the log-normal lengths, in tokens and in nats
_SHORTEST = 8


def draw_lengths(rng: np.random.Generator, count: int, row_len: int) -> list[int]:
    """Log-normal, 8 to ``row_len`` tokens."""
    lengths = np.exp(rng.normal(np.log(MEDIAN_LENGTH), SIGMA, count)).astype(int)
    drawn: list[int] = lengths.clip(_SHORTEST, row_len).tolist()
    return drawn


def draw_episodes(
    rng: np.random.Generator, count: int, row_len: int, vocab_size: int
) -> list[Episode]:
    """Episodes of such lengths; all but the first third of each is trained on."""
    episodes = []
    for index, length in enumerate(draw_lengths(rng, count, row_len)):
        mask = tuple(i >= length // 3 for i in range(length))
        episodes.append(
            Episode(
                rollout_id=f"g/r{index}",
                group_id="g",
                token_ids=tuple(rng.integers(0, vocab_size, length).tolist()),
                loss_mask=mask,
                logprobs=tuple(-5.0 if on else 0.0 for on in mask),
                advantages=tuple(float(index % 2) - 0.5 if on else 0.0 for on in mask),
                versions=tuple(0 if on else -1 for on in mask),
            )
        )
    return episodes


def pack(episodes: Sequence[Episode], row_len: int) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=row_len, temperature=1.0).batch
    if batch is None:
        raise SystemExit("no episode fits a row")
    return batch


def one_row_each(episodes: Sequence[Episode], row_len: int) -> TrainingBatch:
    """The batch without packing: a row for each episode, the rest of it padding."""
    rows = [pack([episode], row_len) for episode in episodes]
    fields: dict[str, Any] = {
        name: np.concatenate([getattr(row, name) for row in rows])
        for name in (
            "token_ids",
            "position_ids",
            "document_ids",
            "loss_mask",
            "logprobs",
            "advantages",
            "versions",
        )
    }
    return replace(rows[0], num_episodes=len(rows), **fields)


def padding_shares(count: int, row_len: int, *, draws: int) -> list[float]:
    """Padding of a step of ``count`` episodes, packed, for each of ``draws`` seeds."""
    shares = []
    for seed in range(draws):
        lengths = draw_lengths(np.random.default_rng(seed), count, row_len)
        rows = first_fit_decreasing(lengths, row_len)
        shares.append(1.0 - sum(lengths) / (len(rows) * row_len))
    return shares


def step_flops(
    lengths: Sequence[int],
    num_selected: int,
    *,
    num_layer_parameters: int,
    num_head_parameters: int,
    attention_width: int,
) -> float:
    """What an optimizer step on documents of these lengths has to compute, whoever does it.

    6 FLOPs for each weight and token that passes it (Kaplan et al. 2020, 2001.08361), for the head
    only the ``num_selected`` tokens; attention's two products, three times for the backward pass,
    over the causal half of each document. ``attention_width`` is layers x heads x head dimension.
    """
    weights = sum(lengths) * num_layer_parameters + num_selected * num_head_parameters
    attention = attention_width * sum(length**2 for length in lengths)
    return 6.0 * weights + 6.0 * attention
