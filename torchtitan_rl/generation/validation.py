"""Refuses a request that its engine could not serve, before it reaches the engine.

An engine may still refuse what passes here (its options, a grammar) when the request is admitted:
`EngineLoop` then fails that request alone. An error inside of an engine step, however, ends the
loop with all its requests, so what could raise one there must be refused here or at admission.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from typing import cast

from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.generation.engine import EngineLimits
from torchtitan_rl.types import GenerationRequest, SamplingParams

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
