"""The outstanding requests of rank 0: one record for each, from its submission to its end.

Invariants
- Each request is answered once.
- No token is reported twice, and no token before an earlier one.
- The progress of a request that streams is reported at once if nothing was streamed during the last
  interval, and otherwise at most once per interval.
- The progress of a request without a sink is never read.
- After `drain` the engine's outputs for earlier requests are ignored.

Not thread-safe: the engine loop guards it with its lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from torchtitan_rl.errors import RequestGivenUpError
from torchtitan_rl.generation.commands import uncancellable_future
from torchtitan_rl.types import Completion, FinishReason, Progress, VersionRun, add_run, runs_before

ProgressSink = Callable[[tuple[Progress, ...]], None]
"""Gets the new progress of its requests, in the loop's thread; must neither block nor raise."""


@dataclass(slots=True)
class _Request:
    future: Future[Completion]
    submitted_s: float
    sink: ProgressSink | None
    streams: bool
    inbox_s: float = 0.0  # time between submission and admission
    runs: tuple[VersionRun, ...] = ()  # empty before admission
    num_reported: int = 0  # number of tokens that the sink got


@dataclass(kw_only=True, slots=True)
class OutstandingRequests:
    """All outstanding requests. ``id in requests`` is True while an id may not be used again.

    ``version`` is the policy version of the engine's weights. A request's progress is reported
    every ``stream_interval_s`` if it streams, else every ``interval_s``, so that a lost replica
    costs few tokens. ``clock`` gives monotonic seconds.
    """

    version: int
    replica: str
    stream_interval_s: float
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    _requests: dict[str, _Request] = field(default_factory=dict, init=False)
    # Admitted requests with a sink, by `streams`.
    _num_reporting: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0}, init=False)
    _streamed_s: float = field(default=0.0, init=False)  # the time of the last report
    _reported_all_s: float = field(default=0.0, init=False)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def add(
        self, request_id: str, sink: ProgressSink | None = None, *, streams: bool = False
    ) -> Future[Completion]:
        future = uncancellable_future()
        self._requests[request_id] = _Request(future, self.clock(), sink, streams)
        return future

    def admit(self, request_id: str) -> None:
        """Record that the engine admitted a request, under the current version."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.runs = (VersionRun(0, self.version),)
        request.inbox_s = self.clock() - request.submitted_s
        if request.sink is not None:
            if not self._num_reporting[False]:
                self._reported_all_s = self.clock()  # the first interval begins
            self._num_reporting[request.streams] += 1

    def pull(self, version: int, lengths: Mapping[str, int]) -> None:
        """Record new weights. ``lengths``: number of tokens sampled so far, by id of each
        unfinished request."""
        self.version = version
        for request_id, length in lengths.items():
            if (request := self._requests.get(request_id)) is not None:
                request.runs = add_run(request.runs, length=length, version=version)

    def due(self, *, at_once: bool = False) -> dict[str, int]:
        """Return the requests whose progress is to be read now, each with its first unreported
        token's index; with ``at_once`` all requests with a sink."""
        now_s = self.clock()
        if not any(self._num_reporting.values()):
            return {}
        if at_once or now_s - self._reported_all_s >= self.interval_s:
            self._reported_all_s = now_s
            return self._unreported(streaming_only=False)
        if self._num_reporting[True] and now_s - self._streamed_s >= self.stream_interval_s:
            return self._unreported(streaming_only=True)
        return {}

    def report(
        self, outputs: Iterable[Progress]
    ) -> list[tuple[ProgressSink, tuple[Progress, ...]]]:
        """Return the progress for each sink, and count it as reported. ``outputs`` are the engine's
        tokens for the requests that `due` returned."""
        batches: dict[ProgressSink, list[Progress]] = {}
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None or request.sink is None:
                continue
            request.num_reported += len(output.token_ids)
            runs = runs_before(request.runs, request.num_reported)
            progress = replace(output, version_runs=runs)
            batches.setdefault(request.sink, []).append(progress)
            if request.streams:
                self._streamed_s = self.clock()
        return [(sink, tuple(batch)) for sink, batch in batches.items()]

    def finish(
        self, outputs: Iterable[Completion], in_flight: int
    ) -> list[tuple[Future[Completion], Completion | RequestGivenUpError]]:
        """Return the future of each request that ended with ``outputs``, and the result or error to
        set. ``in_flight``: number of requests in the engine at the step that ended them."""
        ended = []
        for output in outputs:
            request = self._requests.pop(output.request_id, None)
            if request is None:
                continue
            if request.sink is not None:
                self._num_reporting[request.streams] -= 1
            ended.append((request.future, self._outcome(output, request, in_flight)))
        return ended

    def refuse(self, request_id: str) -> Future[Completion] | None:
        """Drop a request that the engine did not admit. Returns its future; None if the id is
        unknown."""
        request = self._requests.pop(request_id, None)
        return None if request is None else request.future

    def drain(self) -> list[Future[Completion]]:
        """Forget all requests and return their futures."""
        futures = [request.future for request in self._requests.values()]
        self._requests.clear()
        self._num_reporting = {True: 0, False: 0}
        return futures

    def _outcome(
        self, output: Completion, request: _Request, in_flight: int
    ) -> Completion | RequestGivenUpError:
        metrics = output.metrics
        if metrics is not None:
            metrics = replace(
                metrics,
                queue_s=metrics.queue_s + request.inbox_s,
                time_to_first_token_s=metrics.time_to_first_token_s + request.inbox_s,
                requests_in_flight=in_flight,
            )
        completion = replace(
            output,
            version_runs=runs_before(request.runs, len(output.token_ids)),
            metrics=metrics,
            replica=self.replica,
        )
        if output.finish_reason is FinishReason.ABORT and output.stop_reason:
            message = f"request {output.request_id!r} given up: {output.stop_reason}"
            return RequestGivenUpError(message, replace(completion, stop_reason=None))
        return completion

    def _unreported(self, *, streaming_only: bool) -> dict[str, int]:
        return {
            request_id: request.num_reported
            for request_id, request in self._requests.items()
            if request.runs and request.sink is not None and (request.streams or not streaming_only)
        }
