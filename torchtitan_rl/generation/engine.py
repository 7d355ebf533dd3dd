"""The inference engine that an engine loop steps; one implementation per framework.

All methods are called from the loop's thread, between steps, in the same order on every rank.

`ReadingRate` computes tokens per second between two readings of a counter. `StallWatch` decides
whether an engine loop is stuck: from its progress, not from its process's answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    EngineStats,
    GenerationRequest,
    Progress,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits of every request. ``vocab_size`` bounds the token ids of a prompt."""

    max_model_len: int
    vocab_size: int


def engine_metrics(
    num_tokens: int,
    *,
    added_s: float,
    scheduled_s: float | None,
    first_token_s: float | None,
    last_token_s: float | None,
    cached_tokens: int,
) -> CompletionMetrics:
    """The times of a request since the engine got it, from time.monotonic() seconds.

    A phase that it never reached (None: aborted before) ends now.
    """
    now_s, decode_s = time.monotonic(), 0.0
    if first_token_s is not None and last_token_s is not None:
        decode_s = last_token_s - first_token_s
    return CompletionMetrics(
        queue_s=(now_s if scheduled_s is None else scheduled_s) - added_s,
        time_to_first_token_s=(now_s if first_token_s is None else first_token_s) - added_s,
        decode_s=decode_s,
        inter_token_latency_s=decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0,
        cached_tokens=cached_tokens,
        requests_in_flight=0,
    )


class Engine(Protocol):
    """A continuous-batching engine that is stepped from outside.

    Its completions and progress have no ``version_runs``, and its metrics count from `add_request`
    on: the engine loop adds the rest.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        """Queue a request in the engine; ``arrival_s``, a time.time(), is equal on all ranks.

        Raises:
            InvalidRequestError: it is refused, on every rank alike, and nothing has changed.
        """
        ...

    def abort(self, request_ids: tuple[str, ...]) -> list[Completion]:
        """End these requests with the tokens they have; unknown and ended ids are ignored."""
        ...

    def step(self) -> list[Completion]:
        """One forward pass over what is scheduled; returns the completions that it finished.

        One that cannot be continued, such as by constraints that leave no token, ends with ABORT
        and the reason as its ``stop_reason``: its request fails alone.
        """
        ...

    def num_unfinished(self) -> int: ...

    def generated_lengths(self) -> dict[str, int]:
        """Tokens sampled so far, for each unfinished request."""
        ...

    def sampled_since(self, starts: Mapping[str, int]) -> list[Progress]:
        """The tokens from index ``start`` on, of each of these unfinished requests that has some.

        Read on rank 0 alone: it changes nothing.
        """
        ...

    def sleep(self) -> None:
        """Release the device's memory; all requests have ended. `wake_up`, then `swap_weights`,
        precede the next step."""
        ...

    def wake_up(self) -> None: ...

    def swap_weights(self, version: int) -> None:
        """Copy the staged weights of ``version`` into the model.

        Requests added later read no earlier prefix blocks, also where `reset_prefix_cache` fails,
        unless the engine was configured to share them.

        Raises:
            WeightSyncError: that version is not staged, or a tensor does not fit.
        """
        ...

    def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
        """Forget cached prefixes; with ``recompute_running`` running requests lose their KV too
        and prefill again. Returns False where it could not be done."""
        ...

    def stats(self) -> EngineStats:
        """``generated_tokens`` counts each sampled token in the step that samples it: those of all
        outputs, refused and aborted ones too, and of all unfinished requests, and no others."""
        ...

    def close(self) -> None: ...


MIN_WINDOW_S = 0.05  # a reading sooner than this repeats the last rate


class ReadingRate:
    """Keeps the counter and the time of the previous reading."""

    def __init__(self) -> None:
        self._time_s = time.monotonic()
        self._count = 0
        self._rate = 0.0

    def read(self, count: int) -> float:
        now_s = time.monotonic()
        if now_s - self._time_s >= MIN_WINDOW_S:
            self._rate = (count - self._count) / (now_s - self._time_s)
            self._time_s, self._count = now_s, count
        return self._rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """An engine loop's progress. ``count`` grows with sampled tokens, requests that end by
    themselves, and decisions other than STEP; not with calls of its methods.

    ``is_busy``: it has requests to step, and is not stopped by a pause, a swap or a sleep.
    """

    count: int
    is_busy: bool


class StallWatch:
    """``timeout_s``: without progress for so long a busy loop is stuck."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pulse = Pulse(count=0, is_busy=False)
        self._since_s = 0.0

    def stalled_s(self, pulse: Pulse, now_s: float) -> float:
        """Observed seconds in which the loop was busy without progress."""
        if not pulse.is_busy or pulse != self._pulse:
            self._pulse, self._since_s = pulse, now_s
        return now_s - self._since_s

    def is_stuck(self, pulse: Pulse, now_s: float) -> bool:
        return self.stalled_s(pulse, now_s) >= self.timeout_s
