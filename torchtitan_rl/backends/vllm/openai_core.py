"""`RouterCore`: the engine core client of vLLM's front end, connected to the router.

It sends `GenerationRequest`s to the router and returns vLLM's `EngineCoreOutput`s. Tokenization,
detokenization, the format of logprobs and the expansion of ``n`` are vLLM's.

Invariants
- Every token reaches vLLM's output processor once, in order, with its logprob and policy version.
  Tokens arrive in progress messages or with the request's end.
- A request ends once: with its completion, with its refusal, or by vLLM's abort.
- A refusal ends only the refused request and the other choices of its ``n``.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
)
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from torchtitan_rl.backends.vllm.openai_images import taken_images
from torchtitan_rl.backends.vllm.sampling import ENGINE_OPTIONS
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import ControllerLink, RequestEnd
from torchtitan_rl.serving.middleware import is_session_id, session_id
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    GenerationRequest,
    Progress,
    SamplingParams,
    TokenScores,
    VersionRun,
)

# These options decide in which text a stop string is searched.
_TEXT_OPTIONS = {"skip_special_tokens", "spaces_between_special_tokens"}
_NOT_SENT = {"include_stop_str_in_output", "repetition_detection", "skip_reading_prefix_cache"}
_OPTIONS = ENGINE_OPTIONS - _TEXT_OPTIONS - _NOT_SENT
_UNSERVED = (  # they request results or finish reasons that the engine does not have
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
_DEFAULTS = VllmSamplingParams()
_FINISH_REASONS = {
    FinishReason.STOP: VllmFinishReason.STOP,
    FinishReason.LENGTH: VllmFinishReason.LENGTH,
    FinishReason.ABORT: VllmFinishReason.ABORT,
}


class RefusedRequest(GracefulHTTPError):
    """Wraps a refusal in an error that vLLM's front end passes on to the client."""

    def __init__(self, refusal: RefusedError) -> None:
        super().__init__(refusal.message, HTTPStatus(refusal.status))
        self.refusal = refusal


def refuse_unserved(params: VllmSamplingParams, *, scores_prompts: bool) -> None:
    """Raise `VLLMValidationError` (a 400) for an option that the engines do not support.
    ``scores_prompts``: ``prompt_logprobs`` are served, unless the answer is streamed."""
    for name in _UNSERVED:
        if getattr(params, name) is not None:
            raise VLLMValidationError(f"{name} is not served here", parameter=name)
    number, is_streamed = params.prompt_logprobs, params.output_kind != RequestOutputKind.FINAL_ONLY
    if number is None or (scores_prompts and number >= 0 and not is_streamed):
        return
    why = "it needs endpoint.prompt_logprobs, no stream, and a number from 0 on"
    raise VLLMValidationError(
        f"prompt_logprobs is not served here: {why}", parameter="prompt_logprobs"
    )


def session_of_request(named: str | None) -> str | None:
    """Return the session of the current HTTP request, from the headers or ``named`` in the body.
    Raises VLLMValidationError: ``named`` is not a valid session id, or the headers have another
    one."""
    of_headers = session_id.get()
    if named is None:
        return of_headers
    if not is_session_id(named):
        message = "session_id: use 1 to 128 characters of A-Z, a-z, 0-9 and ._:/-"
        raise VLLMValidationError(message, parameter="session_id")
    if of_headers not in (None, named):
        message = "the body and the headers name different sessions"
        raise VLLMValidationError(message, parameter="session_id")
    return named


def generation_request(
    request: EngineCoreRequest, *, model_reasons: bool = False
) -> GenerationRequest:
    """Convert vLLM's request to one for the router. ``model_reasons``: the model may reason before
    a structured output."""
    session = session_of_request(request.session_id)
    sampling = _sampling(request, model_reasons=model_reasons)
    if session is None and request.sampling_params.num_logprobs is None:
        sampling = replace(sampling, with_logprobs=False)  # only sessions are recorded
    return GenerationRequest(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=sampling,
        session_id=session,
        adapter="" if request.lora_request is None else request.lora_request.lora_name,
        images=taken_images(request.mm_features),
    )


def _sampling(request: EngineCoreRequest, *, model_reasons: bool) -> SamplingParams:
    params = request.sampling_params
    options = _engine_options(params)
    if model_reasons and params.structured_outputs is not None:
        options["reasoning_ended"] = request.reasoning_ended
        options["reasoning_parser_kwargs"] = request.reasoning_parser_kwargs
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        ignore_eos=params.ignore_eos,
        seed=params.seed,
        num_logprobs=params.num_logprobs or 0,
        prompt_logprobs=params.prompt_logprobs,
        engine_options=options,
    )


def _engine_options(params: VllmSamplingParams) -> dict[str, Any]:
    options = {
        name: value
        for name in sorted(_OPTIONS | _TEXT_OPTIONS if params.stop else _OPTIONS)
        if (value := getattr(params, name)) != getattr(_DEFAULTS, name) and value is not None
    }
    if "logit_bias" in options:
        options["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if "structured_outputs" in options:
        options["structured_outputs"] = {
            name: value
            for name, value in vars(params.structured_outputs).items()
            if value and not name.startswith("_")
        }
    return options


@dataclass(slots=True)
class _SentRequest:
    prompt_token_ids: Sequence[int]
    has_logprobs: bool
    submitted_s: float  # time.monotonic()
    num_delivered: int = 0  # tokens


Piece = tuple[int | None, EngineCoreOutput]  # a policy version, and tokens sampled under it


class RouterCore(EngineCoreClient):
    """The engine core client of an `AsyncLLM`; it reaches the engines through a `ControllerLink`.
    ``fail`` is called for each refused request; it is set after vLLM's output processor exists."""

    def __init__(self, link: ControllerLink, *, model_reasons: bool = False) -> None:
        self.fail: Callable[[str, RefusedRequest], None]
        # AsyncLLM reads both attributes. After the controller is lost, the link refuses requests.
        self.resources = SimpleNamespace(engine_dead=False)
        self.engine_ranks_managed = [0]
        self._link = link
        self._model_reasons = model_reasons
        self._running: dict[str, _SentRequest] = {}
        self._ready: deque[EngineCoreOutputs] = deque()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        params = request.sampling_params
        self._running[request.request_id] = _SentRequest(
            prompt_token_ids=request.prompt_token_ids,
            has_logprobs=params.num_logprobs is not None,
            submitted_s=time.monotonic(),
        )
        # A client that does not stream needs no progress.
        streams = params.output_kind != RequestOutputKind.FINAL_ONLY
        sent = generation_request(request, model_reasons=self._model_reasons)
        self._link.submit(sent, streams=streams)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.abort(request_ids)

    def abort(self, request_ids: list[str]) -> None:
        running = [name for name in request_ids if self._running.pop(name, None) is not None]
        if running:
            self._link.abort(running)

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._ready:
            self._take(await self._link.next_outputs())
        return self._ready.popleft()

    def shutdown(self, timeout: float | None = None) -> None:
        self.resources.engine_dead = True

    def _take(self, outputs: Sequence[Progress | RequestEnd]) -> None:
        pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        for one in outputs:
            if isinstance(one, Progress):
                if (running := self._running.get(one.request_id)) is not None:
                    pieces[one.request_id].extend(_progressed(running, one))
                continue
            request_id = str(one.call_id)
            running = self._running.pop(request_id, None)
            if running is not None and one.result is not None:
                pieces[request_id].extend(_completed(running, one.result))
            elif running is not None and one.error is not None:
                self.fail(request_id, RefusedRequest(one.error))
        self._ready.extend(_batches(list(pieces.values())))


def _progressed(running: _SentRequest, progress: Progress) -> Iterator[Piece]:
    skipped = running.num_delivered - progress.start
    if 0 <= skipped < len(progress.token_ids):  # tokens after a gap come with the completion
        yield from _new_tokens(running, progress, progress.start, metrics=None)


def _completed(running: _SentRequest, completion: Completion) -> Iterator[Piece]:
    last: EngineCoreOutput | None = None
    scores = completion.prompt_scores
    for version, last in _new_tokens(running, completion, 0, metrics=completion.metrics):
        if scores is not None:  # with the first piece
            last.new_prompt_logprobs_tensors = _prompt_logprobs(running, scores)
            scores = None
        yield version, last
    reason = _FINISH_REASONS[completion.finish_reason]
    if last is not None and not isinstance(completion.stop_reason, str):
        last.finish_reason, last.stop_reason = reason, completion.stop_reason
        return
    # vLLM's output processor searches the text for stop strings itself, and cuts the text at the
    # first one. If it has found one, it ignores the output below; otherwise that output ends the
    # request.
    yield (
        None,
        EngineCoreOutput(
            request_id=completion.request_id,
            new_token_ids=[],
            finish_reason=reason,
            stop_reason=completion.stop_reason,
        ),
    )


def _new_tokens(
    running: _SentRequest,
    part: Progress | Completion,
    start: int,
    *,
    metrics: CompletionMetrics | None,
) -> Iterator[Piece]:
    """Yield the tokens of ``part``, of which the first has index ``start`` in the completion, that
    were not delivered yet, one piece per policy version."""
    end = start + len(part.token_ids)
    for version, first, last in _spans(part.version_runs, running.num_delivered, end):
        tokens = slice(first - start, last - start)
        output = EngineCoreOutput(
            request_id=part.request_id, new_token_ids=list(part.token_ids[tokens])
        )
        if running.has_logprobs:
            output.new_logprobs = _logprobs(part, tokens)
        if running.num_delivered == 0:
            output.events = _events(running, metrics)
            output.prefill_stats = _prefill_stats(running, metrics)
        running.num_delivered = last
        yield version, output


def _spans(runs: Sequence[VersionRun], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (version, first, end) for the tokens from ``start`` to ``end``."""
    run_ends = [run.start for run in runs[1:]] + [end]
    for run, run_end in zip(runs, run_ends, strict=False):  # without tokens there are no runs
        first, last = max(run.start, start), min(run_end, end)
        if first < last:
            yield run.version, first, last


def _logprobs(part: Progress | Completion, tokens: slice) -> LogprobsLists:
    """Return one row per token: the sampled token, then the most likely ones. The ranks of tokens
    are dummy values, because no OpenAI answer has them."""
    if part.top_logprobs:
        rows = part.top_logprobs[tokens]
    else:
        sampled = zip(part.token_ids[tokens], part.logprobs[tokens], strict=True)
        rows = tuple((pair,) for pair in sampled)
    # vLLM reads rows one by one, so they may differ in length.
    return LogprobsLists(
        logprob_token_ids=[np.array([token for token, _ in row]) for row in rows],
        logprobs=[np.array([logprob for _, logprob in row]) for row in rows],
        sampled_token_ranks=np.ones(len(rows), dtype=np.int64),
    )


def _prompt_logprobs(running: _SentRequest, scores: TokenScores) -> LogprobsTensors:
    """Return vLLM's form of the scores: a column for the prompt's own tokens, then the most likely
    ones. A token that is not one of these has the rank after them."""
    own = torch.tensor(scores.logprobs)[:, None]
    top_ids = np.frombuffer(scores.top_ids, dtype="<i4").reshape(len(own), -1)
    top = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(len(own), -1)
    logprobs = torch.cat([own, torch.from_numpy(top.copy())], dim=1)
    tokens = torch.tensor(running.prompt_token_ids[1:], dtype=torch.int32)[:, None]
    return LogprobsTensors(
        logprob_token_ids=torch.cat([tokens, torch.from_numpy(top_ids.copy())], dim=1),
        logprobs=logprobs,
        selected_token_ranks=1 + (logprobs > own).sum(dim=1),
    )


def _events(running: _SentRequest, metrics: CompletionMetrics | None) -> list[EngineCoreEvent]:
    """Return when the request was queued and scheduled, on this process's clock; the latter is
    estimated while it is streamed, because ``metrics`` arrive with its end."""
    scheduled_s = running.submitted_s + metrics.queue_s if metrics else time.monotonic()
    return [
        EngineCoreEvent.new_event(EngineCoreEventType.QUEUED, running.submitted_s),
        EngineCoreEvent.new_event(EngineCoreEventType.SCHEDULED, scheduled_s),
    ]


def _prefill_stats(running: _SentRequest, metrics: CompletionMetrics | None) -> PrefillStats:
    stats = PrefillStats()
    num_tokens = len(running.prompt_token_ids)
    cached = min(metrics.cached_tokens, num_tokens) if metrics else 0
    stats.set(num_tokens, cached, 0)
    return stats


def _batches(requests: list[list[Piece]]) -> Iterator[EngineCoreOutputs]:
    """Yield batches of one version: first the first pieces of all requests, then the second, and so
    on."""
    for index in range(max(map(len, requests), default=0)):
        by_version: dict[int | None, list[EngineCoreOutput]] = {}
        for pieces in requests:
            if index < len(pieces):
                version, output = pieces[index]
                by_version.setdefault(version, []).append(output)
        for version, outputs in by_version.items():
            label = None if version is None else str(version)
            yield EngineCoreOutputs(outputs=outputs, weight_version=label)
