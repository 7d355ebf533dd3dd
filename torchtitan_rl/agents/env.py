"""`AgentEnv`: runs an agent and turns its requests into the turns of a rollout.

Requests of one session run concurrently. Their turns form a tree (`rollout/tree.py`): a prompt that
extends an earlier turn continues that turn's branch, any other prompt begins a new branch. Limits,
seeds, versions, journal and advantages work as for any other rollout.

| sampling option of a request | what happens |
|---|---|
| ``max_tokens``, stop strings, stop tokens, logprobs | used, within the rollout's limits |
| ``temperature``, ``seed`` | the run's own values are used |
| ``top_p``, ``top_k``, ``min_p`` | the run's own values are used; the request is counted |
| structured outputs, allowed tokens, bad words | used: the loss knows the remaining candidates |
| penalties | ignored and counted: the loss cannot account for them |
| ``logit_bias``, ``min_tokens``, ... | refused (400): ignoring them would give a wrong answer |

Invariants: each request is answered or refused, once. If the caller of a turn leaves before it gets
the answer, the turn counts as unseen, and is not trained on, but is sampled to its end, so that its
tokens do not depend on when the caller left. When `close` returns, the agent has ended; `close`
raises if it does not end. ``on_end`` is called once, on the event loop that started the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from torchtitan_rl.agents.agent import (
    Agent,
    AgentCall,
    AgentError,
    AgentResult,
    RemoteAgent,
    run_agent,
)
from torchtitan_rl.agents.queue import LeaseLostError, ProblemQueue
from torchtitan_rl.rollout.calls import summary
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.episodes import previous_turns
from torchtitan_rl.rollout.tree import LimitReachedError, TurnTree
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.report import SessionEnding
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import (
    CONSTRAINTS,
    Completion,
    GenerationRequest,
    OnProgress,
    Problem,
    Progress,
    RolloutStatus,
    SamplingParams,
)

logger = logging.getLogger(__name__)

_PREPARE_S = 600.0
_JOIN_TIMEOUT_S = 10.0
_IGNORED = frozenset(
    {
        "frequency_penalty",
        "include_stop_str_in_output",
        "presence_penalty",
        "repetition_penalty",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)  # engine options that are ignored; others are refused, except `CONSTRAINTS`


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """The endpoint that agents use, and the place where they run.

    ``loop`` runs async agents, in another thread (`AgentThread`). On the current loop (None), which
    answers its requests, an agent that blocks would cause a deadlock. ``problems`` is the queue in
    which problems of `RemoteAgent`s wait for workers.
    """

    base_url: str
    model: str
    sessions: Sessions
    api_key: str = field(default="", repr=False)  # empty: the endpoint needs no key
    loop: asyncio.AbstractEventLoop | None = None
    problems: ProblemQueue | None = None

    def call(self, problem: Problem, session_id: str) -> AgentCall:
        return AgentCall(
            base_url=self.base_url,
            api_key=f"{self.api_key or 'agent'}:{session_id}",
            model=self.model,
            problem=problem,
            session_id=session_id,
        )


class AgentThread:
    """A daemon thread with an event loop for agents, for a ``with`` block. An agent that blocks
    delays the others, but not the controller, which answers their requests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel the agents that still run. The thread does not end while an agent blocks it."""
        self._is_ending = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:  # cancels, then closes
            while not self._is_ending:
                try:
                    runner.get_loop().run_forever()
                except (SystemExit, KeyboardInterrupt):
                    # Raised in a task that an agent started: the other agents go on.
                    logger.exception("a task of an agent raised SystemExit or KeyboardInterrupt")


class RunningAgent:
    """One run of an agent, whose ``work`` is started at once. ``outcome`` is None until it has
    ended; then it is its result or exception."""

    def __init__(
        self,
        work: Callable[[], Coroutine[Any, Any, AgentResult]],
        *,
        loop: asyncio.AbstractEventLoop | None,
        on_end: Callable[[], None],
    ) -> None:
        self.outcome: AgentResult | BaseException | None = None
        self._on_end = on_end
        self._home = asyncio.get_running_loop()
        self._loop = loop or self._home
        self._ended = asyncio.Event()
        self._task: asyncio.Task[AgentResult | BaseException] | None = None
        if self._loop is self._home:
            self._start(work)
        else:
            self._loop.call_soon_threadsafe(self._start, work)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has ended; False if it has not ended within ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def end(self, timeout_s: float) -> None:
        """Cancel the agent, and wait for its end. AgentError: it has not ended in time."""
        if self._ended.is_set():
            return
        with contextlib.suppress(RuntimeError):  # a closed loop has already cancelled its tasks
            self._loop.call_soon_threadsafe(self._cancel)
        if not await self.wait(timeout_s):
            raise AgentError(f"the agent did not end within {timeout_s} s of its cancellation")

    def _start(self, work: Callable[[], Coroutine[Any, Any, AgentResult]]) -> None:
        async def outcome() -> AgentResult | BaseException:
            try:
                return await work()
            except BaseException as error:  # SystemExit would end the event loop
                return error

        self._task = self._loop.create_task(outcome())
        self._task.add_done_callback(self._report)  # called even if the task never started

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _report(self, task: asyncio.Task[AgentResult | BaseException]) -> None:
        outcome = asyncio.CancelledError() if task.cancelled() else task.result()
        with contextlib.suppress(RuntimeError):  # raised if that loop is closed
            self._home.call_soon_threadsafe(self._finish, outcome)

    def _finish(self, outcome: AgentResult | BaseException) -> None:
        self.outcome = outcome
        self._ended.set()
        self._on_end()


@dataclass(kw_only=True, eq=False)
class AgentEnv:
    """One rollout of an agent; a `TreeEnv`. `AgentTask` describes the options; ``replays`` is its
    ``replayable``. ``decode`` makes the turns readable in logged rollouts.

    If the worker of a `RemoteAgent` is lost, the problem is always handed out again, without
    ``replays`` in a new conversation.
    """

    agent: Agent
    problem: Problem
    host: AgentHost
    grace_s: float = 5.0
    reward_at_limit: float | None = 0.0
    decode: Callable[[tuple[int, ...]], str] | None = None
    replays: bool = False
    max_restarts: int = 2
    prepare: Callable[[], Awaitable[None]] | None = None

    def __post_init__(self) -> None:
        self._turns: TurnTree | None = None
        self._session_id = ""
        self._running: RunningAgent | None = None
        self._answers: dict[str, asyncio.Future[Completion]] = {}  # by the client's request id
        self._turn_ids: dict[str, str] = {}  # ids of turns, by the client's request id
        self._parts: dict[str, list[str]] = {}  # ids of turns, by the session's part
        self._changed = asyncio.Event()
        self._is_over = False  # further requests are refused
        self._posted: float | None = None  # the reward with which a client closed the session
        self._ending = SessionEnding.FAILED  # stays if the rollout fails
        self._reward: float | None = None
        self._counts = {"ignored_options": 0, "refused_requests": 0, "restarts": 0}

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self._result().messages)

    async def run(self, turns: TurnTree) -> Terminal:
        """Run the agent until it returns or a client closes its session with a reward.

        Raises:
            AgentError: the agent ended, or its session was closed, before it made any request.
            LimitReachedError: the agent failed after a limit; it is not started again.
            Exception: the agent raised it, and is not restarted.
        """
        self._turns = turns
        while True:
            await self._run_once(turns)
            outcome = self._outcome
            if self._posted is None and isinstance(outcome, BaseException):
                if not self._may_restart(outcome):
                    raise _rollout_error(outcome)
                await turns.restart(replays=self.replays)
                self._counts["restarts"] += 1
                self.host.sessions.release(self._session_id, SessionEnding.RESTARTED)
                continue
            if not turns.num_asked:
                raise AgentError("the agent ended without asking for a single completion")
            result = self._result()
            reward = result.reward if self._posted is None else self._posted
            self._ending = SessionEnding.UNREWARDED if reward is None else SessionEnding.REWARDED
            return self._terminal(result, reward)

    async def finish(self, status: RolloutStatus) -> Terminal:
        """Refuse the agent's requests, because a limit ended the rollout; wait for its reward."""
        self._ending = SessionEnding.LIMIT
        self._refuse_all()
        if self._running is not None:
            await self._running.wait(self.grace_s)
        result = self._result()
        posted = self._posted if result.reward is None else result.reward
        return self._terminal(result, self.reward_at_limit if posted is None else posted)

    async def close(self) -> None:
        """End the agent and its session. AgentError: it has not ended within its time limit."""
        self._refuse_all()
        try:
            if self._running is not None:
                await self._running.end(self.grace_s)
        finally:
            self.host.sessions.release(self._session_id, self._ending, self._reward)

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        if self._is_over or self._turns is None:
            raise self._closed()
        self._check(request.sampling)
        name = request.request_id
        if name in self._answers:
            raise RefusedError(400, "invalid_request", f"request {name!r} is running already")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def answer(completion: Completion) -> bool:
            if future.done() or self._outcome is not None:  # the caller or the agent is gone
                return False
            future.set_result(replace(completion, request_id=name))
            return True

        def progress(progress: Progress) -> None:
            if on_progress is not None and not future.done():
                on_progress(progress)

        self._answers[name] = future
        self._record_use()
        try:
            self._turn_ids[name] = self._turns.request(
                _observation(request),
                answer,
                on_progress=None if on_progress is None else progress,
                decode=self.decode,
            )
            part = (request.session_id or "").partition(".")[2]
            self._parts.setdefault(part, []).append(self._turn_ids[name])
            return await future  # cancelled if the caller is cancelled
        except LimitReachedError:
            raise self._closed() from None
        finally:
            del self._answers[name]
            self._record_use()

    @property
    def request_ids(self) -> list[str]:
        return list(self._turn_ids)

    def reward_turns(self, request_ids: Collection[str], reward: float) -> None:
        for request_id in request_ids:
            assert self._turns is not None
            self._turns.reward(self._turn_ids[request_id], reward)

    def close_session(self, reward: float | None) -> None:
        self._posted = reward
        self._refuse_all()
        self._changed.set()
        if self.host.problems is not None:
            self.host.problems.end(self._session_id)

    def _record_use(self) -> None:
        if self.host.problems is not None:
            self.host.problems.record_use(self._session_id)

    async def _run_once(self, turns: TurnTree) -> None:
        """Run the agent in a new session until the agent has ended or a client gave a reward."""
        self._is_over = False
        self._turn_ids.clear()
        self._parts.clear()
        if self.prepare is not None:
            turns.expect("what the agent needs", within_s=_PREPARE_S)
            await self.prepare()
        self._session_id = self.host.sessions.drive(self)
        call = self.host.call(self.problem, self._session_id)
        work: Callable[[], Coroutine[Any, Any, AgentResult]]
        if isinstance(self.agent, RemoteAgent):
            if self.host.problems is None:
                raise AgentError("there is no queue for problems of remote agents")
            work, loop = partial(self.host.problems.serve, self.agent, call, turns), None
        else:
            work, loop = partial(run_agent, self.agent, call), self.host.loop
            turns.expect("the agent's next request")
        self._running = RunningAgent(work, loop=loop, on_end=self._changed.set)
        while self._posted is None and self._outcome is None:
            self._changed.clear()
            await self._changed.wait()
        self._refuse_all()
        if self._posted is not None:
            await self._running.wait(self.grace_s)  # the agent itself may have given the reward

    def _may_restart(self, outcome: BaseException) -> bool:
        if isinstance(outcome, LeaseLostError):
            assert isinstance(self.agent, RemoteAgent)
            return self._counts["restarts"] + 1 < self.agent.max_leases
        is_failure = isinstance(outcome, Exception) and self.replays
        return is_failure and self._counts["restarts"] < self.max_restarts

    def _terminal(self, result: AgentResult, reward: float | None) -> Terminal:
        self._reward = reward
        self._reward_parts(result.part_rewards)
        counts = dict(self._counts)
        if self._turns is not None:
            counts["unseen_turns"] = sum(not turn.is_seen for turn in self._turns.turns)
            counts["replayed_turns"] = self._turns.num_replayed
            counts["unreplayed_turns"] = len(self._turns.unreplayed)
        own = {f"agent/{name}": float(number) for name, number in counts.items()}
        return Terminal(reward=reward, metrics=dict(result.metrics) | own)

    def _reward_parts(self, rewards: Mapping[str, float]) -> None:
        """Give each part's reward to the last turns of the part's branches."""
        if self._turns is None:
            return
        for part, reward in rewards.items():
            of_part = set(self._parts.get(part, ()))
            turns = [one for one in self._turns.turns if one.completion.request_id in of_part]
            previous = previous_turns(turns)
            for last in previous.keys() - previous.values():
                self._turns.reward(turns[last].completion.request_id, reward)

    @property
    def _outcome(self) -> AgentResult | BaseException | None:
        return None if self._running is None else self._running.outcome

    def _result(self) -> AgentResult:
        """The agent's result; an empty one if there is none yet, or the agent has failed."""
        return self._outcome if isinstance(self._outcome, AgentResult) else AgentResult()

    def _refuse_all(self) -> None:
        self._is_over = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._closed())

    def _closed(self) -> RefusedError:
        self._counts["refused_requests"] += 1
        message = f"session {self._session_id!r} is closed: its rollout is over"
        return RefusedError(400, "session_closed", message)

    def _check(self, sampling: SamplingParams) -> None:
        """Refuse options that cannot be ignored; count ignored ones."""
        options = set(sampling.engine_options)
        unsupported = options - _IGNORED - CONSTRAINTS
        if sampling.min_tokens > 0:
            unsupported.add("min_tokens")
        if sampling.ignore_eos:
            unsupported.add("ignore_eos")
        why = "the loss would not know the sampling distribution"
        if sampling.prompt_logprobs is not None:
            unsupported, why = {"prompt_logprobs"}, "a rollout has no scores of prompts"
        if unsupported:
            self._counts["refused_requests"] += 1
            message = f"{', '.join(sorted(unsupported))}: {why}; leave it out"
            raise RefusedError(400, "invalid_request", message)
        truncations = (sampling.top_p < 1.0, sampling.top_k > 0, sampling.min_p > 0.0)
        self._counts["ignored_options"] += sum(truncations) + len(options - CONSTRAINTS)


def _rollout_error(error: BaseException) -> BaseException:
    """Return an error that ends only the rollout, not the run, as `KeyboardInterrupt` would."""
    if isinstance(error, Exception | asyncio.CancelledError | SystemExit):
        return error
    return AgentError(f"the agent raised {summary(error)}")


def _observation(request: GenerationRequest) -> Observation:
    sampling = request.sampling
    options = sampling.engine_options
    return Observation(
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        num_logprobs=sampling.num_logprobs,
        constraints={name: options[name] for name in options if name in CONSTRAINTS},
        images=request.images,
    )
