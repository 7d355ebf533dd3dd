"""The inference engine that an engine loop steps, and the requests that it can serve.

The loop's thread calls all methods of an engine, between steps, in the same order on every rank.

`ReadingRate` computes tokens per second between two readings of a counter. `StallWatch` decides
whether an engine loop is stuck: from its progress, not from its process's answers.

An engine may still refuse a request that passes the checks here (its options, a grammar) when it is
admitted: `EngineLoop` then fails that request alone. An error inside of an engine step, however,
ends the loop with all its requests, so what could raise one there must be refused here or at
admission.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    EngineStats,
    GenerationRequest,
    Progress,
    SamplingParams,
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


MAX_TEMPERATURE = 2.0  # vLLM's
MIN_TEMPERATURE = 0.01  # vLLM silently raises lower ones, and the logprobs would not be ours
MAX_SEED = 2**63 - 1  # and as far below zero; -1 is vLLM's way to say none
MAX_LOGPROBS = 20  # vLLM's and OpenAI's


def validate_request(
    request: GenerationRequest, limits: EngineLimits, outstanding: Container[str]
) -> None:
    """Check ``request`` against the engine's limits and the ids that are still outstanding.

    Raises:
        InvalidRequestError: field, value and fix of every error.
    """
    errors = [
        *_id_errors(request, outstanding),
        *_length_errors(request, limits),
        *sampling_errors(request.sampling, limits),
    ]
    if errors:
        raise InvalidRequestError(f"request {request.request_id!r} refused: {'; '.join(errors)}")


def _id_errors(request: GenerationRequest, outstanding: Container[str]) -> list[str]:
    if not request.request_id:
        return ["request_id is empty: give each request an id of its own"]
    if request.request_id in outstanding:
        return ["request_id is still outstanding: wait for that request, or use another id"]
    if request.resume_from is not None:
        return ["resume_from is set: only GeneratorRouter.generate continues a completion"]
    num_tokens = len(request.prompt_token_ids)
    if not 0 <= request.num_resumed < max(num_tokens, 1):
        return [
            f"num_resumed = {request.num_resumed} of {num_tokens} prompt tokens: leave it to "
            "GeneratorRouter.generate"
        ]
    return []


def _length_errors(request: GenerationRequest, limits: EngineLimits) -> list[str]:
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    errors = []
    if not prompt:
        errors.append("prompt_token_ids is empty: give at least one token")
    elif not 0 <= min(prompt) <= max(prompt) < limits.vocab_size:
        bad = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        errors.append(
            f"prompt_token_ids holds {bad}, outside the vocabulary 0..{limits.vocab_size - 1}: "
            "encode the prompt with this model's tokenizer"
        )
    room = limits.max_model_len - len(prompt)
    if max_tokens < 1:
        errors.append(f"sampling.max_tokens = {max_tokens}: set it to at least 1")
    elif room < 1:
        errors.append(
            f"prompt_token_ids has {len(prompt)} tokens and leaves no room in max_model_len = "
            f"{limits.max_model_len}: shorten the prompt"
        )
    elif max_tokens > room:
        errors.append(
            f"sampling.max_tokens = {max_tokens} with a prompt of {len(prompt)} exceeds "
            f"max_model_len = {limits.max_model_len}: set it to at most {room}"
        )
    return errors


def sampling_errors(sampling: SamplingParams, limits: EngineLimits) -> list[str]:
    """Errors in the sampling parameters alone, one message per field."""
    temperature, seed = sampling.temperature, sampling.seed
    errors = []
    if not (temperature == 0.0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        errors.append(
            f"sampling.temperature = {temperature}: use 0 (greedy) or a value from "
            f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        )
    if not 0.0 < sampling.top_p <= 1.0:
        errors.append(f"sampling.top_p = {sampling.top_p}: use a value in (0, 1]")
    if not 0.0 <= sampling.min_p <= 1.0 or math.isnan(sampling.min_p):
        errors.append(f"sampling.min_p = {sampling.min_p}: use a value in [0, 1]")
    if sampling.top_k < 0:
        errors.append(f"sampling.top_k = {sampling.top_k}: use 0 for the whole vocabulary")
    if not 0 <= sampling.min_tokens <= max(sampling.max_tokens, 0):
        errors.append(
            f"sampling.min_tokens = {sampling.min_tokens}: use a value from 0 to max_tokens = "
            f"{sampling.max_tokens}"
        )
    if any(not 0 <= token < limits.vocab_size for token in sampling.stop_token_ids):
        errors.append(
            f"sampling.stop_token_ids = {sampling.stop_token_ids}: use ids inside the vocabulary "
            f"0..{limits.vocab_size - 1}"
        )
    if seed is not None and not -MAX_SEED <= seed <= MAX_SEED:
        errors.append(
            f"sampling.seed = {seed}: use a value from -{MAX_SEED} to {MAX_SEED}, or None"
        )
    if not 0 <= sampling.num_logprobs <= MAX_LOGPROBS:
        errors.append(
            f"sampling.num_logprobs = {sampling.num_logprobs}: use a value from 0 to {MAX_LOGPROBS}"
        )
    elif sampling.num_logprobs and not sampling.with_logprobs:
        errors.append(
            f"sampling.num_logprobs = {sampling.num_logprobs} without with_logprobs: alternatives "
            "come with the tokens' own logprobs"
        )
    return [*errors, *_stop_errors(sampling.stop), *_option_errors(sampling.engine_options)]


def _stop_errors(stop: object) -> list[str]:
    is_strings = isinstance(stop, tuple) and all(isinstance(one, str) for one in stop)
    if is_strings and all(cast(tuple[str, ...], stop)):
        return []
    return [f"sampling.stop = {stop!r}: use a tuple of strings that are not empty"]


def _option_errors(options: object) -> list[str]:
    """Whether they are what JSON can carry; which options there are is the engine's matter."""
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options):
        try:
            json.dumps(dict(options), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as cause:
            return [f"sampling.engine_options cannot be written as JSON: {cause}"]
        return []
    return [f"sampling.engine_options = {options!r}: use a mapping from names to JSON values"]
