"""One rollout from reset to close: the turns between an environment and a generator.

All limits of a rollout are enforced here, whatever kind of environment it is:

- ``max_turns``: completions in all;
- ``max_total_tokens``: the length of any turn's prompt plus completion (for a rollout whose
  history is never edited, that is all of its tokens). A turn's budget is the smallest of what is
  left of it, ``max_tokens_per_turn`` and the observation's own; a completion that was cut at its
  budget is stepped with like any other;
- ``step_timeout_s``: one call of the environment;
- ``rollout_timeout_s``: interrupts generation, but not an environment's call, which has a limit of
  its own: an environment is never called while it is still in a call (`close` excepted).

Invariants: a rollout ends once, with one status; `close` is called exactly once on every path; an
error of the environment or the generator becomes a status with a cause and is never raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NoReturn

from torchtitan_rl.config import RolloutConfig
from torchtitan_rl.rollout.calls import call, is_cancelled, summary
from torchtitan_rl.rollout.env import Conversation, Observation, Terminal, TokenEnv
from torchtitan_rl.rollout.seeds import request_seed
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerateFn,
    GenerationRequest,
    Problem,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Turn,
)

EnvironmentFactory = Callable[[Problem], TokenEnv]


class Phase(StrEnum):
    """What a running rollout waits for."""

    ENVIRONMENT = "environment"
    GENERATION = "generation"
    REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutActivity:
    """Where a running rollout is. ``since_s`` is on the event loop's clock."""

    rollout_id: str
    turn: int
    phase: Phase
    detail: str  # the environment's method, the request's id, ...
    since_s: float


class _Ended(Exception):
    """The rollout is over without a `Terminal`."""

    def __init__(self, status: RolloutStatus, cause: str) -> None:
        super().__init__(cause)
        self.status = status
        self.cause = cause


class RolloutRun:
    """Use once: `run`. `activity` and `so_far` may be read at any time."""

    def __init__(
        self,
        *,
        rollout_id: str,
        group_id: str,
        problem: Problem,
        environment: EnvironmentFactory,
        generate: GenerateFn,
        config: RolloutConfig,
        seed: int,
        temperature: float,
    ) -> None:
        self.rollout_id = rollout_id
        self._group_id = group_id
        self._problem = problem
        self._environment = environment
        self._generate_fn = generate
        self._config = config
        self._seed = seed
        self._temperature = temperature
        self._turns: list[Turn] = []
        self._messages: tuple[Mapping[str, Any], ...] = ()
        self._deadline_s = 0.0
        self.enter(Phase.ENVIRONMENT, "waits to start")

    def enter(self, phase: Phase, detail: str) -> None:
        now = asyncio.get_running_loop().time()
        self.activity = RolloutActivity(
            rollout_id=self.rollout_id,
            turn=len(self._turns),
            phase=phase,
            detail=detail,
            since_s=now,
        )

    def so_far(self, status: RolloutStatus, cause: str | None = None) -> Rollout:
        """The rollout as if it ended now with this status, without a reward."""
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self._group_id,
            problem_id=self._problem.problem_id,
            turns=tuple(self._turns),
            status=status,
            reward=None,
            cause=cause,
            messages=self._messages,
        )

    async def run(self) -> Rollout:
        """The rollout with the environment's own reward, if that gave one; not scored yet.

        Raises:
            asyncio.CancelledError: only where the task is cancelled; the environment is closed.
        """
        self._deadline_s = asyncio.get_running_loop().time() + self._config.rollout_timeout_s
        env: TokenEnv | None = None
        causes: list[str | None] = []
        try:
            env = self._create()
            ended = await self._converse(env)
        except _Ended as end:
            ended = self.so_far(end.status, end.cause)
        finally:
            if env is not None:
                causes = [self._note_messages(env), await self._close(env)]
        cause = "; ".join(filter(None, (ended.cause, *causes))) or None
        return replace(ended, messages=self._messages, cause=cause)

    def _create(self) -> TokenEnv:
        # On the event loop, so that no half-made environment is left behind by a time-out.
        try:
            return self._environment(self._problem)
        except Exception as error:
            raise _Ended(RolloutStatus.ENV_ERROR, f"creation: {summary(error)}") from error

    async def _converse(self, env: TokenEnv) -> Rollout:
        observation = await self._call_env(env.reset)
        while True:
            if not isinstance(observation, Observation) or not observation.prompt_token_ids:
                _wrong_answer("an Observation with at least one token", observation)
            prompt = tuple(observation.prompt_token_ids)  # whatever sequence the author gave
            observation = replace(observation, prompt_token_ids=prompt)
            limit = self._reached_limit(observation)
            completion = None if limit else await self._generate(observation)
            if completion is None:
                status = limit or RolloutStatus.ROLLOUT_TIMEOUT
                terminal = await self._call_env(env.finish, status)
                if not isinstance(terminal, Terminal):
                    _wrong_answer("a Terminal", terminal)
                return self._rollout(replace(terminal, status=status))
            turn = Turn(prompt_token_ids=prompt, completion=completion)
            self._turns.append(turn)
            if completion.finish_reason is FinishReason.ABORT:
                cause = f"{completion.request_id}: aborted by somebody else"
                raise _Ended(RolloutStatus.GENERATION_ERROR, cause)
            answer = await self._call_env(env.step, completion)
            if isinstance(answer, Observation | Terminal):
                self._turns[-1] = replace(turn, reward=answer.turn_reward, text=answer.turn_text)
            if isinstance(answer, Terminal):
                return self._rollout(answer)
            observation = answer

    def _rollout(self, terminal: Terminal) -> Rollout:
        reward = None if terminal.status.is_failure else terminal.reward
        rollout = self.so_far(terminal.status)
        return replace(rollout, reward=reward, metrics=dict(terminal.metrics))

    def _reached_limit(self, observation: Observation) -> RolloutStatus | None:
        if len(self._turns) >= self._config.max_turns:
            return RolloutStatus.MAX_TURNS
        if len(observation.prompt_token_ids) >= self._config.max_total_tokens:
            return RolloutStatus.MAX_TOKENS
        if asyncio.get_running_loop().time() >= self._deadline_s:
            return RolloutStatus.ROLLOUT_TIMEOUT
        return None

    async def _generate(self, observation: Observation) -> Completion | None:
        """The turn's completion; None where the rollout's time ran out in it."""
        request = self._request(observation)
        self.enter(Phase.GENERATION, request.request_id)
        try:
            async with asyncio.timeout_at(self._deadline_s) as limit:
                completion = await self._generate_fn(request)
            _check_alignment(completion)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            _generation_error(request, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return None
            _generation_error(request, error)
        return completion

    def _request(self, observation: Observation) -> GenerationRequest:
        turn = len(self._turns)
        sampling = self._config.sampling
        room = self._config.max_total_tokens - len(observation.prompt_token_ids)
        budget = min(room, sampling.max_tokens_per_turn)
        if observation.max_tokens is not None:
            budget = min(budget, observation.max_tokens)
        if budget < 1:
            _wrong_answer("max_tokens of at least 1", observation.max_tokens)
        return GenerationRequest(
            request_id=f"{self.rollout_id}/t{turn}",
            session_id=self.rollout_id,
            prompt_token_ids=observation.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=budget,
                temperature=self._temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=observation.stop_token_ids,
                seed=request_seed(self._seed, self.rollout_id, turn),
            ),
        )

    async def _call_env(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call the environment within ``step_timeout_s``; every failure is an `_Ended`."""
        name = getattr(method, "__name__", repr(method))
        self.enter(Phase.ENVIRONMENT, name)
        try:
            async with asyncio.timeout(self._config.step_timeout_s) as limit:
                return await call(method, *args)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            raise _Ended(RolloutStatus.ENV_ERROR, f"{name}: {summary(error)}") from error
        except (Exception, SystemExit) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                cause = f"{name}: no answer after {self._config.step_timeout_s} s"
                raise _Ended(RolloutStatus.STEP_TIMEOUT, cause) from error
            raise _Ended(RolloutStatus.ENV_ERROR, f"{name}: {summary(error)}") from error

    def _note_messages(self, env: TokenEnv) -> str | None:
        try:
            if isinstance(env, Conversation):
                self._messages = tuple(env.messages)
        except Exception as error:
            return f"messages: {summary(error)}"
        return None

    async def _close(self, env: TokenEnv) -> str | None:
        """Close to the end (or its time-out), cancelled or not; returns what went wrong."""
        closing = asyncio.ensure_future(self._call_env(env.close))
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        failure = None if closing.cancelled() else closing.exception()
        return str(failure) if failure else None


def _check_alignment(completion: Completion) -> None:
    lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
    if len(set(lengths)) != 1:
        raise ValueError(f"tokens, logprobs and versions have lengths {lengths}")


def _generation_error(request: GenerationRequest, error: BaseException) -> NoReturn:
    cause = f"{request.request_id}: {summary(error)}"
    raise _Ended(RolloutStatus.GENERATION_ERROR, cause) from error


def _wrong_answer(wanted: str, got: object) -> NoReturn:
    raise _Ended(RolloutStatus.ENV_ERROR, f"the environment owes {wanted}, not {got!r}"[:500])
