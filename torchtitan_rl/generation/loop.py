"""The engine loop of one rank: takes (rank 0, the leader) or receives decisions, and applies them
in its own thread. The leader owns the inbox and the outstanding requests.

Invariants
- All ranks apply the same decisions in the same order; weights change only between steps.
- Every future ends in one of four ways: with a result, with an error of its own request, with
  `LoopFailedError` (the cause is attached) once a step, broadcast or pull has failed, or with
  `LoopClosedError`. A call to a loop that has failed or is closed gets one of the last two errors.
  A `LoopFailedError` is a `StepFailedError` only if one of the requests may be the cause.
- A pause is answered once every rank is between two steps. No step follows before `Resume` or,
  after a sleep, before new weights were pulled.
- With several ranks, each rank runs exactly the decided steps, unless no request is left: if one
  rank stopped alone, the other ranks would wait for it in a collective. A single rank stops early
  when its inbox needs a decision.
- With `start_loop`, one thread builds, steps and closes the engine.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, TypeVar

from torchtitan_rl.errors import (
    DeadlineError,
    GenerationError,
    InvalidRequestError,
    LoopClosedError,
    LoopFailedError,
    ReplicaError,
    RequestGivenUpError,
    StepFailedError,
)
from torchtitan_rl.generation.commands import (
    AbortRequests,
    EngineCommand,
    ReadStats,
    Resume,
    done_future,
    fail_future,
    failed_future,
)
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.decision import Action, Inbox, LockstepChannel, LoopDecision
from torchtitan_rl.generation.engine import Engine, Pulse, validate_request
from torchtitan_rl.generation.requests import OutstandingRequests, ProgressSink
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    FinishReason,
    GenerationRequest,
    PullReport,
)

T = TypeVar("T")


OnWork = Callable[..., None]
"""``on_work(work, start_ns, end_ns, **details)``: called in the loop's thread after each piece of
the engine's work (a ``step``, a weight swap), with its times in ``time.perf_counter_ns()``."""


@dataclass(eq=False)
class EngineLoop:
    """Continuous batching on one engine. All methods may be called from any thread. The only rank
    of a replica has no ``channel``.

    ``on_end`` is called in the loop's thread when the loop has ended: with the failure, or with
    None after a close. In a follower that failed it must end the process, because the other ranks
    may wait for it inside a collective. ``on_pulled`` is called on every rank with each version
    that was swapped in. ``on_pulled`` and ``on_work`` must neither block nor raise.
    """

    engine: Engine
    channel: LockstepChannel | None
    _: KW_ONLY
    is_leader: bool
    config: LoopConfig = field(default_factory=LoopConfig)
    on_end: Callable[[LoopFailedError | None], None] | None = None
    on_pulled: Callable[[int], None] | None = None
    on_work: OnWork | None = None
    failure: LoopFailedError | None = field(default=None, init=False)  # the error that ended it

    def __post_init__(self) -> None:
        self._inbox = Inbox()
        self._lock = threading.Lock()  # guards the two below
        self._requests = OutstandingRequests(
            version=self.config.version,
            replica=self.config.name,
            stream_interval_s=self.config.stream_interval_s,
            interval_s=self.config.progress_interval_s,
        )
        self._ended: ReplicaError | None = None
        self._is_asleep = False
        self._num_done = 0  # the count of `Pulse`
        self._is_busy = False
        self._stats = self.engine.stats()
        self._stats_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._run, name=f"engine-loop-{self.config.name}", daemon=True
        )

    def start(self) -> None:
        """Run the loop in a new thread. The engine must allow other threads than the one that built
        it; otherwise use `start_loop`."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the loop has ended. Returns False if it still runs after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(
        self,
        request: GenerationRequest,
        sink: ProgressSink | None = None,
        *,
        streams: bool = False,
    ) -> Future[Completion]:
        """Queue a request. Its future cannot be cancelled: abort the request instead.

        ``sink`` gets progress until the future ends: of a request that ``streams`` within
        milliseconds, else about every second. If the engine refuses the request at admission, the
        future fails.

        Raises:
            InvalidRequestError: the engine could not serve the request.
        """
        self._check_leader()
        with self._lock:
            if self._ended is not None:
                return failed_future(self._ended)
            validate_request(request, self.engine.limits, self._requests)
            future = self._requests.add(request.request_id, sink, streams=streams)
            self._inbox.admit(request)
        return future

    def abort(self, request_ids: tuple[str, ...]) -> None:
        self._check_leader()
        with self._lock:
            outstanding = tuple(name for name in request_ids if name in self._requests)
        if outstanding:
            self._inbox.abort(outstanding)

    def execute(self, command: EngineCommand[T]) -> Future[T]:
        """Execute a command as its class describes. The future gets the command's answer."""
        self._check_leader()
        match command:
            case AbortRequests(request_ids):
                self.abort(request_ids)
                return done_future(None)
            case ReadStats():
                waiting = self._stats.waiting + self._inbox.num_admissions()
                return done_future(replace(self._stats, waiting=waiting))
            case Resume():
                name = self.config.name
                for future in self._inbox.resume():
                    fail_future(future, GenerationError(f"{name}: resumed before it was paused"))
                return done_future(None)
        with self._lock:
            if self._ended is not None:
                return failed_future(self._ended)
            return self._inbox.ask(command)

    def pulse(self) -> Pulse:
        return Pulse(count=self._num_done, is_busy=self._is_busy)

    def close(self, timeout_s: float = 60.0) -> None:
        """End the loop and fail its requests and commands. Followers end when the leader's close
        reaches them. Raises DeadlineError: the loop's thread still runs after ``timeout_s``."""
        name = self.config.name
        if self.is_leader:
            self._end(LoopClosedError(f"engine loop of {name} was closed"))
            self._inbox.close()
        if self._thread.ident is not None and not self.join(timeout_s):
            raise DeadlineError(f"engine loop of {name} did not end within {timeout_s} s of close")

    # The rest runs in the loop's thread.

    def _run(self) -> None:
        try:
            while self._apply(self._next_decision()):
                pass
            self.engine.close()
        except BaseException as cause:
            # Not busy: a weight swap, a pause or a sleep failed, which is no request's fault.
            failed = StepFailedError if self._is_busy else LoopFailedError
            failure = failed(f"engine loop of {self.config.name} failed: {cause!r}")
            failure.__cause__ = cause
            self.failure = failure
            self._end(failure)
        else:
            self._end(LoopClosedError(f"engine loop of {self.config.name} was closed"))
        if self.on_end is not None:
            self.on_end(self.failure)

    def _next_decision(self) -> LoopDecision:
        if self.channel is not None and not self.is_leader:
            received: LoopDecision = pickle.loads(self.channel.broadcast(None))
            return received
        if self._inbox.take_readings():
            self._report_progress(at_once=True)
            reading = EngineReading(
                sampled_tokens=self.engine.stats().generated_tokens,
                running_tokens=sum(self.engine.generated_lengths().values()),
            )
            self._inbox.answer(reading)
        is_idle = self.engine.num_unfinished() == 0
        self._read_stats(is_due=is_idle or self._inbox.num_admissions() > 0)
        if is_idle or self._inbox.is_stopped():
            self._is_busy = False
        decision = self._inbox.next_decision(
            is_idle=is_idle,
            sleep_s=None if self.channel is None else self.config.heartbeat_s,
            max_steps=self.config.max_steps_per_decision,
            kv_policy=self.config.kv_policy,
            stats=self._stats,
        )
        if self.channel is not None:
            self.channel.broadcast(pickle.dumps(decision, protocol=pickle.HIGHEST_PROTOCOL))
        return decision

    def _apply(self, decision: LoopDecision) -> bool:
        """Apply one decision; False ends the loop."""
        is_step = decision.action is Action.STEP
        self._num_done += not is_step
        self._is_busy = is_step and decision.num_steps > 0
        if decision.action is Action.CLOSE:
            return False
        if decision.action is Action.PULL:
            self._pull(decision)
            if self.on_pulled is not None:
                self.on_pulled(decision.version)
            self._is_busy = decision.num_steps > 0
            self._run_steps(decision.num_steps)
        elif decision.action is Action.STEP:
            for request in decision.admissions:
                self._admit(request, decision.arrival_s)
            if decision.aborts:
                in_flight = self.engine.num_unfinished()
                self._resolve(self.engine.abort(decision.aborts), in_flight)
            self._run_steps(decision.num_steps)
        else:
            self._stop(decision)
        return True

    def _run_steps(self, at_most: int) -> None:
        for _ in range(at_most):
            in_flight = self.engine.num_unfinished()
            if in_flight == 0:
                break
            with self._work("step"):
                outputs = self.engine.step()
            self._resolve(outputs, in_flight)
            self._read_stats(is_due=False)
            self._report_progress()
            if self.channel is None and self._inbox.needs_decision():
                break

    def _admit(self, request: GenerationRequest, arrival_s: float) -> None:
        request_id = request.request_id
        try:
            self.engine.add_request(request, arrival_s=arrival_s)
        except InvalidRequestError as error:
            # Every rank raises the same error here, so the ranks stay in step.
            if self.is_leader:
                with self._lock:
                    future = self._requests.refuse(request_id)
                if future is not None:
                    fail_future(future, error)
        else:
            if self.is_leader:
                with self._lock:
                    self._requests.admit(request_id)

    def _pull(self, decision: LoopDecision) -> None:
        start_s = time.monotonic()
        running = self.engine.num_unfinished()
        with self._work("swap weights", version=decision.version):
            self.engine.swap_weights(decision.version)
        recomputed = False
        if decision.kv_policy is not None:
            what = f"{self.config.name}: version {decision.version}"
            with self._work("reset prefix cache"):
                recomputed = decision.kv_policy.apply(self.engine, running=running, what=what)
        if self.channel is not None:
            self.channel.barrier()  # raises if another rank's swap failed; no request is blamed
        if not self.is_leader:
            return
        with self._lock:
            self._requests.pull(decision.version, self.engine.generated_lengths())
        self._read_stats(is_due=True)
        report = PullReport(
            version=decision.version,
            stall_s=time.monotonic() - start_s,
            running_requests=running,
            recomputed=recomputed,
        )
        self._inbox.answer(report)

    def _stop(self, decision: LoopDecision) -> None:
        """Apply a PAUSE, SLEEP or WAKE_UP, and wait until the other ranks have done so."""
        if decision.aborts_all:
            unfinished = self.engine.generated_lengths()
            self._resolve(self.engine.abort(tuple(unfinished)), len(unfinished))
        if decision.action is Action.SLEEP and not self._is_asleep:
            with self._work("sleep"):
                self.engine.sleep()
            self._is_asleep = True
        elif decision.action is Action.WAKE_UP and self._is_asleep:
            with self._work("wake up"):
                self.engine.wake_up()
            self._is_asleep = False
        if self.channel is not None:
            self.channel.barrier()
        if self.is_leader:
            self._report_progress(at_once=True)
            self._read_stats(is_due=True)
            self._inbox.answer(None)

    @contextmanager
    def _work(self, work: str, **details: Any) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            if self.on_work is not None:
                self.on_work(work, start_ns, time.perf_counter_ns(), **details)

    def _report_progress(self, *, at_once: bool = False) -> None:
        if not self.is_leader:
            return
        with self._lock:
            starts = self._requests.due(at_once=at_once)
        if not starts:
            return
        outputs = self.engine.sampled_since(starts)
        with self._lock:
            batches = self._requests.report(outputs)
        for sink, progress in batches:
            sink(progress)

    def _resolve(self, outputs: list[Completion], in_flight: int) -> None:
        self._num_done += any(one.finish_reason is not FinishReason.ABORT for one in outputs)
        if not outputs or not self.is_leader:
            return
        with self._lock:
            ended = self._requests.finish(outputs, in_flight)
        for future, outcome in ended:
            if isinstance(outcome, RequestGivenUpError):
                fail_future(future, outcome)
            else:
                future.set_result(outcome)

    def _read_stats(self, *, is_due: bool) -> None:
        now_s = time.monotonic()
        if is_due or now_s - self._stats_s >= self.config.stats_interval_s:
            before = self._stats.generated_tokens
            self._stats, self._stats_s = self.engine.stats(), now_s
            self._num_done += self._stats.generated_tokens != before

    def _end(self, error: ReplicaError) -> None:
        """Fail all outstanding requests and commands, and all later ones. The error of the first
        call is used."""
        with self._lock:
            if self._ended is None:
                self._ended = error
            ended = self._ended
            futures = [*self._requests.drain(), *self._inbox.drain()]
        for future in futures:
            fail_future(future, ended)

    def _check_leader(self) -> None:
        if not self.is_leader:
            raise RuntimeError(f"{self.config.name}: requests and pulls go to rank 0")


def start_loop(build: Callable[[], EngineLoop], *, name: str) -> EngineLoop:
    """Build an engine and its loop in a new thread, which then runs the loop; raise what ``build``
    raised.

    An engine belongs to the thread that built it. On CUDA, the current device and the streams on
    which vLLM orders its copies are those of a thread. On a CPU, libgomp keeps a team of threads
    for each thread that has computed, and an engine with two threads was 14 to 29 % slower when
    another living thread had built it.
    """
    built: Future[EngineLoop] = Future()

    def work() -> None:
        try:
            loop = build()
        except BaseException as error:
            built.set_exception(error)
            return
        loop._thread = threading.current_thread()
        built.set_result(loop)
        loop._run()

    threading.Thread(target=work, name=f"engine-loop-{name}", daemon=True).start()
    return built.result()
