"""A `TokenEnv` with control inverted: the agent asks, the rollout answers.

`reset` starts the agent in a session of its own and waits for its first request, whose prompt is
the observation; `step` answers that request, and waits for the next one or for the agent's end. So
limits, seeds, versions, journal and advantages are those of any rollout; several requests at once
are answered one after another, in the order in which they came.

The run samples, whatever the agent asks for: ``temperature`` and ``seed`` are the run's; ``top_p``,
``top_k``, ``min_p`` and penalties, which agents set by habit, are ignored and counted (the loss
would not know the distribution); what an answer's form depends on (``logit_bias``, structured
outputs, ``min_tokens``, ...) is refused with a 400. ``max_tokens``, stop strings, stop tokens and
logprobs are the agent's, within the rollout's limits. Tokens are not streamed, they come at once.

Invariants: each request is answered or refused, once. A turn whose caller was gone before its
answer came is not seen, and not trained on; it is sampled to its end all the same, so that its
tokens do not depend on when that was. The agent has ended, or is reported, when `close` returns.
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
from torchtitan_rl.serving.messages import Refusal, RefusedError
from torchtitan_rl.serving.session_record import SessionEnding
from torchtitan_rl.types import (
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
)  # of the engine's options; any other is refused


@dataclass(slots=True, kw_only=True, eq=False)
class _Asked:
    request: GenerationRequest
    answer: asyncio.Future[Completion]


class AgentEnv:
    """One run of an agent. It can neither be saved nor replayed: a resumed run begins it anew.

    ``grace_s``: how long an agent may still return its reward after a limit, and how long it may
    take to end once it is cancelled. ``reward_at_limit``: what it is worth where it returns none
    by then. ``decode`` makes the turns readable in the records.
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
        self._waiting: deque[_Asked] = deque()
        self._current: _Asked | None = None
        self._changed = asyncio.Event()
        self._is_over = False  # no request is taken any more
        self._posted: float | None = None  # the reward of whoever closed the session
        self._ending = SessionEnding.FAILED  # until it is known better
        self._reward: float | None = None
        self._counts = {"ignored_options": 0, "refused_requests": 0, "unseen_turns": 0}

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        outcome = self._running.outcome if self._running is not None else None
        return tuple(outcome.messages) if isinstance(outcome, AgentResult) else ()

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
        """A limit ended the rollout: the agent's requests are refused from now on."""
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
        self._waiting.append(_Asked(request=request, answer=answer))
        self._changed.set()
        return await answer  # cancelled with its caller

    def close_session(self, reward: float | None) -> None:
        """`SessionDriver`: with a reward the rollout is over, else the agent may still return
        one."""
        self._posted = reward
        self._refuse_all()
        self._changed.set()

    def _answer(self, completion: Completion) -> bool:
        """Whether the agent gets the completion that it asked for."""
        asked = self._current
        if self._has_ended():
            self._refuse_all()
        self._current = None
        if asked is None or asked.answer.done():
            return False
        asked.answer.set_result(replace(completion, request_id=asked.request.request_id))
        return True

    async def _next(self) -> Observation | Terminal:
        while True:
            self._changed.clear()
            if self._posted is not None or self._has_ended():
                return await self._over()
            while self._waiting:
                asked = self._waiting.popleft()
                if not asked.answer.done():  # else its caller is gone: nothing was sampled
                    self._current = asked
                    return _observation(asked.request)
            await self._changed.wait()

    async def _over(self) -> Terminal:
        self._refuse_all()
        if self._running is not None and self._posted is not None:
            await self._running.wait(self._grace_s)  # it may be what closed its session
        elif self._running is not None and isinstance(self._running.outcome, BaseException):
            raise _bearable(self._running.outcome)
        result = self._result()
        reward = self._posted if self._posted is not None or result is None else result.reward
        self._ending = SessionEnding.UNREWARDED if reward is None else SessionEnding.REWARDED
        return self._terminal(result, reward)

    def _terminal(self, result: AgentResult | None, reward: float | None) -> Terminal:
        self._reward = reward
        metrics = {} if result is None else dict(result.metrics)
        counts = {f"agent/{name}": float(number) for name, number in self._counts.items()}
        return Terminal(reward=reward, metrics={**metrics, **counts})

    def _result(self) -> AgentResult | None:
        outcome = self._running.outcome if self._running is not None else None
        return outcome if isinstance(outcome, AgentResult) else None

    def _has_ended(self) -> bool:
        return self._running is not None and self._running.outcome is not None

    def _refuse_all(self) -> None:
        self._is_over = True
        asked = [*self._waiting, *([self._current] if self._current else [])]
        self._waiting.clear()
        for one in asked:
            if not one.answer.done():
                one.answer.set_exception(self._closed())

    def _closed(self) -> RefusedError:
        self._counts["refused_requests"] += 1
        message = f"session {self._session_id!r} is closed: its rollout is over"
        return RefusedError(Refusal(status=400, message=message, code="session_closed"))

    def _check(self, sampling: SamplingParams) -> None:
        """Refuse what would change the distribution and cannot be left out; count the rest."""
        options = set(sampling.engine_options)
        refused = options - _IGNORED
        if sampling.min_tokens > 0:
            refused.add("min_tokens")
        if sampling.ignore_eos:
            refused.add("ignore_eos")
        if refused:
            self._counts["refused_requests"] += 1
            message = (
                f"{', '.join(sorted(refused))}: not in a training session, whose loss would not "
                "know the distribution that was sampled from; leave it out"
            )
            raise RefusedError(Refusal(status=400, message=message, code="invalid_request"))
        cut = (sampling.top_p < 1.0, sampling.top_k > 0, sampling.min_p > 0.0)
        self._counts["ignored_options"] += sum(cut) + len(options)


def _bearable(error: BaseException) -> BaseException:
    """An error that ends a rollout and not the run."""
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
    )
