"""The inference engine that an engine loop steps, and the requests that it can serve.

The loop's thread calls all methods of an engine, between steps, in the same order on every rank.

At admission, an engine may still refuse a request that passes the checks here (because of its
options or a grammar): `EngineLoop` then fails only that request. But an error inside an engine step
ends the loop with all its requests. So a request that could cause such an error must be refused
here or at admission.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.images import images_error
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
    """The limits of every request. The token ids of a prompt are below ``vocab_size``.
    ``image_token_id`` is the placeholder for images; None: the policy takes no images."""

    max_model_len: int
    vocab_size: int
    image_token_id: int | None = None


def engine_metrics(
    num_tokens: int,
    *,
    added_s: float,
    scheduled_s: float | None,
    first_token_s: float | None,
    last_token_s: float | None,
    cached_tokens: int,
) -> CompletionMetrics:
    """Compute a request's durations since the engine got it, from time.monotonic() seconds. The
    time of an event is None if the request was aborted before it; durations until then last until
    now."""
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

    The completions and progress of an engine have no ``version_runs``, and their metrics begin at
    `add_request`: the engine loop adds the version runs and the time in the inbox.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        """Queue a request in the engine. ``arrival_s`` is a time.time() that is equal on all ranks.
        Raises InvalidRequestError: the engine refuses the request, on every rank, and has not
        changed."""

    def abort(self, request_ids: tuple[str, ...]) -> list[Completion]:
        """End these requests with their tokens so far. Unknown and ended ids are ignored."""

    def step(self) -> list[Completion]:
        """Run one forward pass over the scheduled requests. Returns the completions that it
        finished.

        A completion that cannot continue, for example because constraints leave no token, ends with
        ABORT and the reason in ``stop_reason``: only its request fails.
        """

    def num_unfinished(self) -> int: ...

    def generated_lengths(self) -> dict[str, int]:
        """Return the number of tokens sampled so far, by id of each unfinished request."""

    def sampled_since(self, starts: Mapping[str, int]) -> list[Progress]:
        """Return the tokens from index ``starts[id]`` on, for each of these unfinished requests
        with new tokens. Only rank 0 calls this method, which changes nothing."""

    def sleep(self) -> None:
        """Release the device's memory. All requests have ended before. `wake_up` and then
        `swap_weights` are called before the next step."""

    def wake_up(self) -> None: ...

    def swap_weights(self, version: int) -> None:
        """Copy the staged weights of ``version`` into the model. Requests added later do not read
        earlier prefix blocks, even if `reset_prefix_cache` fails, unless the engine was configured
        to share them.

        Raises:
            WeightSyncError: the version is not staged, or a tensor does not fit.
        """

    def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
        """Drop cached prefixes. With ``recompute_running``, running requests also lose their KV and
        prefill again. Returns False if the reset failed."""

    def stats(self) -> EngineStats:
        """Return the engine's statistics. ``generated_tokens`` counts each sampled token in the
        step that samples it, of finished, failed, aborted and unfinished requests."""

    def close(self) -> None: ...


MIN_WINDOW_S = 0.05  # a reading after less time repeats the last rate


class ReadingRate:
    """Computes the rate of a counter, in 1/s, since the previous reading."""

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
    themselves, and decisions other than STEP, not by calls of the loop's methods. ``is_busy``: the
    loop has requests to step, and is not stopped by a pause, a swap or a sleep."""

    count: int
    is_busy: bool


class StallWatch:
    """Detects a stuck loop: one that is busy and makes no progress for ``timeout_s``. That the
    loop's process answers is no progress."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pulse = Pulse(count=0, is_busy=False)
        self._since_s = 0.0

    def is_stuck(self, pulse: Pulse, now_s: float) -> bool:
        if not pulse.is_busy or pulse != self._pulse:
            self._pulse, self._since_s = pulse, now_s
        return now_s - self._since_s >= self.timeout_s


MAX_TEMPERATURE = 2.0  # vLLM's limit
MIN_TEMPERATURE = 0.01  # vLLM silently raises lower values; the logprobs would then be wrong
MAX_SEED = 2**63 - 1  # the smallest seed is -MAX_SEED; -1 means no seed in vLLM
MAX_LOGPROBS = 20  # the limit of vLLM and of OpenAI


def validate_request(
    request: GenerationRequest, limits: EngineLimits, outstanding: Container[str]
) -> None:
    """Check ``request`` against the engine's limits and the ids that are still outstanding. Raises
    InvalidRequestError: the message has field, value and fix of every error."""
    errors = [
        *_id_errors(request, outstanding),
        *_length_errors(request, limits),
        *_image_errors(request, limits),
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
    if not 0 <= request.routed_from < max(num_tokens, 1):
        return [f"routed_from = {request.routed_from} of {num_tokens} prompt tokens: leave it out"]
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


def _image_errors(request: GenerationRequest, limits: EngineLimits) -> list[str]:
    prompt = request.prompt_token_ids
    given = prompt[: len(prompt) - request.num_resumed]
    error = images_error(request.images, given, limits.image_token_id)
    return [error] if error else []


def sampling_errors(sampling: SamplingParams, limits: EngineLimits) -> list[str]:
    """Return the errors in the sampling parameters, one message per field."""
    temperature, seed = sampling.temperature, sampling.seed
    is_warm = MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE
    last = limits.vocab_size - 1
    checks = (
        (
            "temperature",
            temperature == 0.0 or is_warm,
            f"use 0 (greedy) or a value from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
        ),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "use a value in (0, 1]"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "use a value in [0, 1]"),
        ("top_k", sampling.top_k >= 0, "use 0 for the whole vocabulary"),
        (
            "min_tokens",
            0 <= sampling.min_tokens <= max(sampling.max_tokens, 0),
            f"use a value from 0 to max_tokens = {sampling.max_tokens}",
        ),
        (
            "stop_token_ids",
            all(0 <= token <= last for token in sampling.stop_token_ids),
            f"use ids inside the vocabulary 0..{last}",
        ),
        (
            "seed",
            seed is None or -MAX_SEED <= seed <= MAX_SEED,
            f"use a value from -{MAX_SEED} to {MAX_SEED}, or None",
        ),
        (
            "num_logprobs",
            0 <= sampling.num_logprobs <= (MAX_LOGPROBS if sampling.with_logprobs else 0),
            f"use a value from 0 to {MAX_LOGPROBS}, and 0 without with_logprobs",
        ),
        ("prompt_logprobs", (sampling.prompt_logprobs or 0) >= 0, "use 0 or more, or None"),
    )
    errors = [
        f"sampling.{name} = {getattr(sampling, name)}: {fix}"
        for name, is_valid, fix in checks
        if not is_valid
    ]
    return [*errors, *_stop_errors(sampling.stop), *_option_errors(sampling.engine_options)]


def _stop_errors(stop: object) -> list[str]:
    is_strings = isinstance(stop, tuple) and all(isinstance(one, str) for one in stop)
    if is_strings and all(cast(tuple[str, ...], stop)):
        return []
    return [f"sampling.stop = {stop!r}: use a tuple of strings that are not empty"]


def _option_errors(options: object) -> list[str]:
    """Return an error if the options cannot be written as JSON. The engine checks their names."""
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options):
        try:
            json.dumps(dict(options), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as cause:
            return [f"sampling.engine_options cannot be written as JSON: {cause}"]
        return []
    return [f"sampling.engine_options = {options!r}: use a mapping from names to JSON values"]
