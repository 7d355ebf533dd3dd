"""`AgentEnv`: a `TokenEnv` that runs an agent and turns its requests into the rollout's turns.

`reset` starts the agent in a session of its own and waits for its first request, whose prompt is
the observation. `step` answers that request, and waits for the next one or for the agent's end. So
limits, seeds, versions, journal and advantages are those of any rollout. Requests that come at once
are answered one after another, first come, first served.

| sampling option of a request | what happens |
|---|---|
| ``max_tokens``, stop strings, stop tokens, logprobs | used, within the rollout's limits |
| ``temperature``, ``seed`` | the run's are used |
| ``top_p``, ``top_k``, ``min_p`` | the run's are used; counted |
| structured outputs, allowed tokens, bad words | used: the loss knows what they leave |
| penalties | ignored and counted: the loss does not know them |
| ``logit_bias``, ``min_tokens``, ... | refused (400): the answer needs them |

Tokens are not streamed: they come at once, at the end of the turn.

Invariants: each request is answered or refused, once. A turn whose caller left before the answer is
unseen, and not trained on; it is still sampled to its end, so that its tokens do not depend on when
the caller left. When `close` returns, the agent has ended or an error says that it has not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl.agents.agent import Agent, AgentError, AgentHost, AgentResult
from torchtitan_rl.agents.running import RunningAgent
from torchtitan_rl.rollout.calls import compute, summary
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.serving.messages import RefusedError, refused
from torchtitan_rl.serving.session_report import SessionEnding
from torchtitan_rl.types import (
    CONSTRAINTS,
    Completion,
    GenerationRequest,
    Problem,
    RolloutStatus,
    SamplingParams,
)

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
)  # engine options; any other is refused


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    request: GenerationRequest
    answer: asyncio.Future[Completion]


class AgentEnv:
    """One run of an agent. It cannot be saved or replayed: a resumed run starts it again.

    ``grace_s``: how long an agent may take to return its reward after a limit, and to end once it
    is cancelled. ``reward_at_limit``: the reward where it returns none by then. ``decode`` makes
    the turns readable in the records.
    """

    def __init__(
        self,
        *,
        agent: Agent,
        problem: Problem,
        host: AgentHost,
        grace_s: float = 5.0,
        reward_at_limit: float | None = 0.0,
        decode: Callable[[tuple[int, ...]], str] | None = None,
    ) -> None:
        self._agent = agent
        self._problem = problem
        self._host = host
        self._grace_s = grace_s
        self._reward_at_limit = reward_at_limit
        self._decode = decode
        self._session_id = ""
        self._running: RunningAgent | None = None
        self._waiting: deque[_Request] = deque()
        self._current: _Request | None = None
        self._changed = asyncio.Event()
        self._is_over = False  # no more requests are taken
        self._posted: float | None = None  # the reward that a client closed the session with
        self._ending = SessionEnding.FAILED  # until the end says otherwise
        self._reward: float | None = None
        self._counts = {"ignored_options": 0, "refused_requests": 0, "unseen_turns": 0}

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        result = self._result()
        return () if result is None else tuple(result.messages)

    async def reset(self) -> Observation:
        """
        Raises:
            AgentError: the agent ended, or its session was closed, without a request.
            Exception: what the agent raised.
        """
        self._session_id = self._host.sessions.drive(self)
        self._running = RunningAgent(
            self._agent,
            self._host.call(self._problem, self._session_id),
            loop=self._host.loop,
            on_end=self._changed.set,
        )
        answer = await self._next()
        if isinstance(answer, Terminal):
            raise AgentError("the agent ended without asking for a single completion")
        return answer

    async def step(self, completion: Completion) -> Observation | Terminal:
        """
        Raises:
            Exception: what the agent raised.
        """
        is_seen = self._answer(completion)
        self._counts["unseen_turns"] += not is_seen
        text = None
        if self._decode is not None:
            text = await compute(self._decode, completion.token_ids)
        return replace(await self._next(), turn_is_seen=is_seen, turn_text=text)

    async def finish(self, status: RolloutStatus) -> Terminal:
        """A limit ended the rollout: refuse the agent's requests, and wait for its reward."""
        self._ending = SessionEnding.LIMIT
        self._refuse_all()
        if self._running is not None:
            await self._running.wait(self._grace_s)
        result = self._result()
        reward = self._reward_at_limit if result is None or result.reward is None else result.reward
        return self._terminal(result, reward)

    async def close(self) -> None:
        """
        Raises:
            AgentError: the agent does not end.
        """
        self._refuse_all()
        try:
            if self._running is not None:
                await self._running.end(self._grace_s)
        finally:
            self._host.sessions.release(self._session_id, self._ending, self._reward)

    async def complete(self, request: GenerationRequest) -> Completion:
        """`SessionDriver`: one of the agent's requests."""
        if self._is_over:
            raise self._closed()
        self._check(request.sampling)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(request=request, answer=answer))
        self._changed.set()
        return await answer  # cancelled with its caller

    def close_session(self, reward: float | None) -> None:
        """`SessionDriver`: a reward ends the rollout, without one the agent may still return
        its own."""
        self._posted = reward
        self._refuse_all()
        self._changed.set()

    def _answer(self, completion: Completion) -> bool:
        """Whether the caller of the current request gets its completion."""
        request = self._current
        if self._outcome is not None:  # the agent has ended
            self._refuse_all()
        self._current = None
        if request is None or request.answer.done():
            return False
        request.answer.set_result(replace(completion, request_id=request.request.request_id))
        return True

    async def _next(self) -> Observation | Terminal:
        while True:
            self._changed.clear()
            if self._posted is not None or self._outcome is not None:
                return await self._over()
            while self._waiting:
                request = self._waiting.popleft()
                if not request.answer.done():  # else its caller has left: nothing is sampled
                    self._current = request
                    return _observation(request.request)
            await self._changed.wait()

    async def _over(self) -> Terminal:
        self._refuse_all()
        if self._running is not None and self._posted is not None:
            await self._running.wait(self._grace_s)  # the agent itself may have closed it
        elif isinstance(self._outcome, BaseException):
            raise _rollout_error(self._outcome)
        result = self._result()
        reward = self._posted if self._posted is not None or result is None else result.reward
        self._ending = SessionEnding.UNREWARDED if reward is None else SessionEnding.REWARDED
        return self._terminal(result, reward)

    def _terminal(self, result: AgentResult | None, reward: float | None) -> Terminal:
        self._reward = reward
        metrics = {} if result is None else dict(result.metrics)
        counts = {f"agent/{name}": float(number) for name, number in self._counts.items()}
        return Terminal(reward=reward, metrics={**metrics, **counts})

    @property
    def _outcome(self) -> AgentResult | BaseException | None:
        return None if self._running is None else self._running.outcome

    def _result(self) -> AgentResult | None:
        return self._outcome if isinstance(self._outcome, AgentResult) else None

    def _refuse_all(self) -> None:
        self._is_over = True
        open_requests = [*self._waiting, *([self._current] if self._current else [])]
        self._waiting.clear()
        for request in open_requests:
            if not request.answer.done():
                request.answer.set_exception(self._closed())

    def _closed(self) -> RefusedError:
        self._counts["refused_requests"] += 1
        message = f"session {self._session_id!r} is closed: its rollout is over"
        return refused(400, "session_closed", message)

    def _check(self, sampling: SamplingParams) -> None:
        """Refuse what would change the distribution and cannot be ignored; count the rest."""
        options = set(sampling.engine_options)
        unsupported = options - _IGNORED - CONSTRAINTS
        if sampling.min_tokens > 0:
            unsupported.add("min_tokens")
        if sampling.ignore_eos:
            unsupported.add("ignore_eos")
        if unsupported:
            self._counts["refused_requests"] += 1
            message = (
                f"{', '.join(sorted(unsupported))}: not in a training session, for its loss would "
                "not know the sampling distribution; leave it out"
            )
            raise refused(400, "invalid_request", message)
        truncations = (sampling.top_p < 1.0, sampling.top_k > 0, sampling.min_p > 0.0)
        self._counts["ignored_options"] += sum(truncations) + len(options - CONSTRAINTS)


def _rollout_error(error: BaseException) -> BaseException:
    """An error that ends the rollout; others (`KeyboardInterrupt`) would end the run."""
    if isinstance(error, Exception | asyncio.CancelledError | SystemExit):
        return error
    return AgentError(f"the agent raised {summary(error)}")


def _observation(request: GenerationRequest) -> Observation:
    return Observation(
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.sampling.max_tokens,
        stop_token_ids=request.sampling.stop_token_ids,
        stop=request.sampling.stop,
        num_logprobs=request.sampling.num_logprobs,
        constraints={
            name: value
            for name, value in request.sampling.engine_options.items()
            if name in CONSTRAINTS
        },
    )
