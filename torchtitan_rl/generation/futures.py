"""The requests that rank 0 owes an answer: futures, submission times, version runs, listeners.

Not thread-safe; the engine loop guards it with its lock. A request that was drained (its future
has failed) is unknown here, and what the engine still says about it is ignored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.generation.engine import EngineOutput
from torchtitan_rl.generation.progress import Listener, ProgressBook, ProgressSink
from torchtitan_rl.generation.versions import VersionLedger
from torchtitan_rl.types import Completion, CompletionMetrics, Progress, VersionRun

_Error = TypeVar("_Error", bound=GenerationError)


@dataclass(frozen=True, slots=True)
class _Owed:
    future: Future[Completion]
    submitted_s: float  # time.monotonic()
    listener: Listener | None


class OutstandingRequests:
    """Answers each request once; contains the ids that may not be used again yet."""

    def __init__(self, version: int, replica: str, book: ProgressBook) -> None:
        self._replica = replica
        self._book = book
        self._owed: dict[str, _Owed] = {}
        self._versions = VersionLedger(version)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._owed

    def __iter__(self) -> Iterator[str]:
        return iter(self._owed)

    def add(self, request_id: str, listener: Listener | None = None) -> Future[Completion]:
        future = uncancellable_future()
        self._owed[request_id] = _Owed(future, time.monotonic(), listener)
        return future

    def admit(self, request_id: str) -> None:
        """The engine takes it now, under the current version."""
        self._versions.admit(request_id)
        owed = self._owed.get(request_id)
        if owed is not None and owed.listener is not None:
            self._book.follow(request_id, owed.listener, time.monotonic())

    def pull(self, version: int, lengths: Mapping[str, int]) -> None:
        self._versions.pull(version, lengths)

    def finish(
        self, output: EngineOutput, in_flight: int
    ) -> tuple[Future[Completion], Completion] | None:
        """The future and the completion to resolve it with; None where nobody waits any more."""
        runs = self._versions.finish(output.request_id, len(output.token_ids))
        self._book.forget(output.request_id)
        owed = self._owed.pop(output.request_id, None)
        if owed is None:
            return None
        return owed.future, self._completion(output, owed, runs, in_flight)

    def so_far(self, output: EngineOutput, in_flight: int) -> Completion | None:
        """What an unfinished request has; None where nobody waits for it any more."""
        owed = self._owed.get(output.request_id)
        if owed is None:
            return None
        runs = self._versions.so_far(output.request_id, len(output.token_ids))
        return self._completion(output, owed, runs, in_flight)

    def untold(self, *, at_once: bool) -> dict[str, int]:
        """Whose progress is to be read now, and from which token on."""
        return self._book.due(time.monotonic(), at_once=at_once)

    def tell(
        self, outputs: list[EngineOutput], starts: Mapping[str, int]
    ) -> list[tuple[ProgressSink, tuple[Progress, ...]]]:
        """Each sink with the progress it is to be told, from what was read from ``starts`` on."""
        progress = []
        for output in outputs:
            request_id = output.request_id
            if request_id in self._owed:
                start = starts[request_id]
                end = start + len(output.token_ids)
                progress.append(
                    Progress(
                        request_id=request_id,
                        start=start,
                        token_ids=output.token_ids,
                        logprobs=output.logprobs,
                        version_runs=self._versions.so_far(request_id, end),
                        top_logprobs=output.top_logprobs,
                    )
                )
        return self._book.tell(progress, time.monotonic())

    def refuse(self, request_id: str) -> Future[Completion] | None:
        """The future of a request that the engine did not take; None where nobody waits."""
        owed = self._owed.pop(request_id, None)
        return owed.future if owed else None

    def drain(self) -> list[Future[Completion]]:
        """Forget all requests and return their futures."""
        futures = [owed.future for owed in self._owed.values()]
        self._owed.clear()
        return futures

    def _completion(
        self, output: EngineOutput, owed: _Owed, runs: tuple[VersionRun, ...], in_flight: int
    ) -> Completion:
        return Completion(
            request_id=output.request_id,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            version_runs=runs,
            finish_reason=output.finish_reason,
            metrics=completion_metrics(output, submitted_s=owed.submitted_s, in_flight=in_flight),
            replica=self._replica,
            stop_reason=output.stop_reason,
            top_logprobs=output.top_logprobs,
        )


def completion_metrics(
    output: EngineOutput, *, submitted_s: float, in_flight: int
) -> CompletionMetrics:
    """Times of one request; what it never reached (aborted before) counts until its end, now."""
    scheduled_s, first_s, last_s = output.scheduled_s, output.first_token_s, output.last_token_s
    now_s = time.monotonic()
    decode_s = last_s - first_s if first_s is not None and last_s is not None else 0.0
    num_intervals = len(output.token_ids) - 1
    return CompletionMetrics(
        queue_s=(now_s if scheduled_s is None else scheduled_s) - submitted_s,
        time_to_first_token_s=(now_s if first_s is None else first_s) - submitted_s,
        decode_s=decode_s,
        inter_token_latency_s=decode_s / num_intervals if num_intervals > 0 else 0.0,
        cached_tokens=output.cached_tokens,
        requests_in_flight=in_flight,
    )


def uncancellable_future() -> Future[Any]:
    """A future whose ``cancel`` does nothing, so that the loop can always resolve it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def done_future(result: Any) -> Future[Any]:
    future = uncancellable_future()
    future.set_result(result)
    return future


def failed_future(error: GenerationError) -> Future[Any]:
    future = uncancellable_future()
    fail_future(future, error)
    return future


def fail_future(future: Future[Any], error: GenerationError) -> None:
    """Fail it with a copy of ``error``."""
    future.set_exception(copy_of(error))


def copy_of(error: _Error) -> _Error:
    """One exception raised in many places mixes tracebacks, so each gets a copy."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
