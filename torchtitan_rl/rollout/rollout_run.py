"""One rollout from reset to close: the turns between an environment and a generator.

All limits of a rollout are enforced here, whatever kind of environment it is:

- ``max_turns``: completions in all;
- ``max_total_tokens``: the length of any turn's prompt plus completion (for a rollout whose
  history is never edited, that is all of its tokens). A turn's budget is the smallest of what is
  left of it, ``max_tokens_per_turn`` and the observation's own; a completion that was cut at its
  budget is stepped with like any other;
- ``step_timeout_s``: one call of the environment;
- ``rollout_timeout_s``, of the time in which it could run (no pause counts): interrupts generation,
  but not an environment's call, which has a limit of its own: an environment is never called while
  it is still in a call (`close` excepted). Such a rollout has failed: how far it got depends on the
  machine, so its reward would, too.

Invariants: a rollout ends once, with one status; `close` is called exactly once on every path, of
every environment that was made; an error of the environment or the generator becomes a status with
a cause and is never raised.

A rollout that was recorded goes on behind its finished turns, with the requests (and seeds) of
later turns that it would have had undisturbed; only its time begins anew. Where its environment
cannot be brought back it begins from nothing, and what was sampled is reported as discarded.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NoReturn

from torchtitan_rl.rollout.calls import is_cancelled, summary
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Conversation, Observation, Terminal, TokenEnv
from torchtitan_rl.rollout.env_calls import EnvCalls, RolloutEnded
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout
from torchtitan_rl.rollout.records import plain
from torchtitan_rl.rollout.restore_env import NotResumableError, restore_env, state_of
from torchtitan_rl.rollout.seeds import request_seed
from torchtitan_rl.routing.active_time import ActiveTime
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
OnTurn = Callable[[str, int, Turn, EnvState | None], None]  # rollout id, index, turn, state behind
OnDiscard = Callable[[str, str, int], None]  # rollout id, cause, number of sampled tokens

ENV_NOT_RESUMABLE = "env_not_resumable"
ROLLED_BACK = "rolled_back"


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


class RolloutRun:
    """Use once: `run`. `activity`, `so_far` and `snapshot` may be called at any time."""

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
        active_time: ActiveTime,
        attempt: int = 0,
        min_version: int = 0,
        recorded: RecordedRollout | None = None,
        on_turn: OnTurn | None = None,
        on_discard: OnDiscard | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self._group_id = group_id
        self._problem = problem
        self._environment = environment
        self._generate_fn = generate
        self._config = config
        self._seed = seed
        self._temperature = temperature
        self._active_time = active_time
        self._attempt = attempt
        self._min_version = min_version
        self._on_turn = on_turn
        self._on_discard = on_discard
        self._calls = EnvCalls(
            timeout_s=config.step_timeout_s,
            max_prompt_tokens=config.max_total_tokens,
            on_call=functools.partial(self.enter, Phase.ENVIRONMENT),
        )
        # What is still to be brought back.
        self._recorded = recorded if recorded and self._is_mine(recorded) else None
        self._num_foreign = recorded.num_tokens if recorded and self._recorded is None else 0
        # Tokens of the recorded running turn, until a completion has them.
        self._num_unclaimed = (
            len(self._recorded.partial.token_ids)
            if self._recorded is not None and self._recorded.partial is not None
            else 0
        )
        self._turns: list[Turn] = list(self._recorded.turns) if self._recorded else []
        self._num_finished = len(self._turns)  # turns that the environment has answered
        self._env_state: EnvState | None = None  # behind those
        self._prompt: tuple[int, ...] | None = None  # of the turn that runs
        self._partial: Completion | None = None  # of that turn, from before
        self._ended: Rollout | None = None
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

    def snapshot(self, partials: Mapping[str, Completion]) -> RecordedRollout:
        """What another process needs to continue this rollout. ``partials``: what was sampled so
        far for running requests, by request id."""
        if self._ended is None and self._recorded is not None:  # is still being brought back
            return self._recorded
        if self._ended is not None:
            return RecordedRollout(
                rollout_id=self.rollout_id, turns=self._ended.turns, ended=self._ended
            )
        done = self._num_finished
        unanswered = self._turns[done].completion if len(self._turns) > done else None
        return RecordedRollout(
            rollout_id=self.rollout_id,
            turns=tuple(self._turns[:done]),
            env_states={} if self._env_state is None else {done: self._env_state},
            partial=unanswered or partials.get(self._request_id(done), self._partial),
            prompt_token_ids=self._prompt,
        )

    async def run(self) -> Rollout:
        """The rollout with the environment's own reward, if that gave one; not scored yet.

        Raises:
            asyncio.CancelledError: only where the task is cancelled; the environment is closed.
            Exception: only what ``on_turn`` or ``on_discard`` raised.
        """
        self._deadline_s = self._active_time.now_s() + self._config.rollout_timeout_s
        self._tell_discarded(ROLLED_BACK, self._num_foreign)
        ended = self._over()
        if ended is None:
            try:
                ended = await self._run()
            except NotResumableError:
                self._discard()
                ended = await self._run()
        self._tell_discarded(ROLLED_BACK, self._num_unclaimed)
        self._ended, self._recorded = ended, None
        return ended

    def _discard(self) -> None:
        """Forget what was recorded."""
        recorded, self._recorded = self._recorded, None
        self._turns, self._num_finished, self._messages = [], 0, ()
        self._num_unclaimed = 0
        if recorded is not None:
            self._tell_discarded(ENV_NOT_RESUMABLE, recorded.num_tokens)

    def _tell_discarded(self, cause: str, num_tokens: int) -> None:
        if num_tokens and self._on_discard is not None:
            self._on_discard(self.rollout_id, cause, num_tokens)

    def _over(self) -> Rollout | None:
        """The recorded rollout where it needs no environment any more."""
        if self._recorded is None:
            return None
        state = self._recorded.env_state
        if self._recorded.ended is None and state and isinstance(state.answer, Terminal):
            self._messages = state.messages
            return self._rollout(state.answer)
        return self._recorded.ended

    async def _run(self) -> Rollout:
        env: TokenEnv | None = None
        causes: list[str | None] = []
        try:
            env = self._create()
            ended = await self._converse(env)
        except RolloutEnded as end:
            ended = self.so_far(end.status, end.cause)
        finally:
            if env is not None:
                causes = [self._note_messages(env), await self._calls.close(env)]
        cause = "; ".join(filter(None, (ended.cause, *causes))) or None
        return replace(ended, messages=self._messages, cause=cause)

    def _create(self) -> TokenEnv:
        # On the event loop, so that no half-made environment is left behind by a time-out.
        try:
            return self._environment(self._problem)
        except Exception as error:
            raise RolloutEnded(RolloutStatus.ENV_ERROR, f"creation: {summary(error)}") from error

    async def _converse(self, env: TokenEnv) -> Rollout:
        answer: Observation | Terminal = await self._start(env)
        self._partial = self._recorded.partial if self._recorded else None
        self._recorded = None
        while isinstance(answer, Observation):
            prompt = self._prompt = answer.prompt_token_ids
            limit = self._reached_limit(answer)
            completion = None if limit else await self._generate(answer, self._partial)
            self._partial = None
            if completion is None:
                status = limit or RolloutStatus.ROLLOUT_TIMEOUT
                return self._rollout(replace(await self._calls.finish(env, status), status=status))
            turn = Turn(prompt_token_ids=prompt, completion=completion)
            self._turns.append(turn)
            if completion.finish_reason is FinishReason.ABORT:
                cause = f"{completion.request_id}: aborted by somebody else"
                raise RolloutEnded(RolloutStatus.GENERATION_ERROR, cause)
            answer = await self._calls.step(env, completion)
            self._turns[-1] = replace(
                turn,
                reward=answer.turn_reward,
                text=answer.turn_text,
                is_seen=answer.turn_is_seen,
            )
            await self._note_state(env, answer)
            if self._on_turn is not None:
                index = len(self._turns) - 1
                self._on_turn(self.rollout_id, index, self._turns[-1], self._env_state)
        return self._rollout(answer)

    async def _start(self, env: TokenEnv) -> Observation:
        """The first observation, or the one behind the recorded turns.

        Raises:
            NotResumableError: the rollout has to begin anew.
        """
        if self._recorded is None:
            answer = await self._calls.reset(env)
            await self._note_state(env, answer)
            return answer
        observation = await restore_env(env, self._recorded, self._calls)
        self._env_state = self._recorded.env_state
        return observation

    async def _note_state(self, env: TokenEnv, answer: Observation | Terminal) -> None:
        """Keep what continues the rollout from here; states are taken where turns are recorded."""
        env_state: EnvState | None = None
        if isinstance(answer, Terminal):
            self._note_messages(env)
            env_state = EnvState(answer=answer, messages=self._messages)
        elif self._on_turn is not None:
            state = await state_of(env, self._calls)
            env_state = None if state is None else EnvState(answer=answer, state=state)
        self._num_finished, self._env_state = len(self._turns), env_state
        self._prompt = None

    def _rollout(self, terminal: Terminal) -> Rollout:
        reward = None if terminal.status.is_failure else terminal.reward
        rollout = self.so_far(terminal.status)
        return replace(rollout, reward=reward, metrics=dict(terminal.metrics))

    def _reached_limit(self, observation: Observation) -> RolloutStatus | None:
        if len(self._turns) >= self._config.max_turns:
            return RolloutStatus.MAX_TURNS
        if len(observation.prompt_token_ids) >= self._config.max_total_tokens:
            return RolloutStatus.MAX_TOKENS
        if self._active_time.now_s() >= self._deadline_s:
            return RolloutStatus.ROLLOUT_TIMEOUT
        return None

    async def _generate(
        self, observation: Observation, partial: Completion | None
    ) -> Completion | None:
        """The turn's completion; None where the rollout's time ran out in it."""
        self._num_unclaimed = 0  # a completion has them, or the router says that they are lost
        if partial is not None and partial.finish_reason is not FinishReason.ABORT:
            return partial
        request = self._request(observation, partial)
        self.enter(Phase.GENERATION, request.request_id)
        try:
            async with self._active_time.timeout_at(self._deadline_s) as limit:
                completion = await self._generate_fn(request)
            self._check_completion(request, completion)
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            _generation_error(request, error)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return None
            _generation_error(request, error)
        return completion

    def _check_completion(self, request: GenerationRequest, completion: Completion) -> None:
        lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
        if completion.request_id != request.request_id:
            message = f"got the completion of {completion.request_id!r}"
        elif len(set(lengths)) != 1:
            message = f"tokens, logprobs and versions have lengths {lengths}"
        else:
            return
        self._tell_discarded(RolloutStatus.GENERATION_ERROR.value, len(completion.token_ids))
        raise ValueError(message)

    def _request(self, observation: Observation, partial: Completion | None) -> GenerationRequest:
        turn = len(self._turns)
        sampling = self._config.sampling
        room = self._config.max_total_tokens - len(observation.prompt_token_ids)
        budget = min(room, sampling.max_tokens_per_turn)
        if observation.max_tokens is not None:
            budget = min(budget, observation.max_tokens)
        return GenerationRequest(
            request_id=self._request_id(turn),
            session_id=self.rollout_id,
            prompt_token_ids=observation.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=budget,
                temperature=self._temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=observation.stop_token_ids,
                stop=observation.stop,
                num_logprobs=observation.num_logprobs,
                seed=request_seed(self._seed, self.rollout_id, turn, self._attempt),
            ),
            min_version=self._min_version,
            resume_from=partial if partial and partial.token_ids else None,
        )

    def _request_id(self, turn: int) -> str:
        attempt = f"a{self._attempt}/" if self._attempt else ""
        return f"{self.rollout_id}/{attempt}t{turn}"

    def _is_mine(self, recorded: RecordedRollout) -> bool:
        """Whether there is something recorded, and of this attempt."""
        completions = [turn.completion for turn in recorded.turns]
        if recorded.partial is not None:
            completions.append(recorded.partial)
        ids = (completion.request_id for completion in completions)
        return all(id_ == self._request_id(turn) for turn, id_ in enumerate(ids)) and bool(
            completions or recorded.ended
        )

    def _note_messages(self, env: TokenEnv) -> str | None:
        try:
            if isinstance(env, Conversation):
                messages = tuple(env.messages)
                if not all(isinstance(message, Mapping) for message in messages):
                    return "messages: not all are mappings"
                self._messages = tuple(plain(message) for message in messages)
        except Exception as error:
            return f"messages: {summary(error)}"
        return None


def _generation_error(request: GenerationRequest, error: BaseException) -> NoReturn:
    cause = f"{request.request_id}: {summary(error)}"
    raise RolloutEnded(RolloutStatus.GENERATION_ERROR, cause) from error
