"""One rollout from reset to close: the turns between an environment and a generator.

All limits of a rollout are enforced here, for every kind of environment:

| limit | of | status |
|---|---|---|
| ``max_turns`` | completions | MAX_TURNS |
| ``max_total_tokens`` | prompt plus completion of any turn | MAX_TOKENS |
| ``step_timeout_s`` | one call of the environment | STEP_TIMEOUT |
| ``rollout_timeout_s`` | the rollout's running time without pauses | ROLLOUT_TIMEOUT |

A completion's length is limited by the rest of ``max_total_tokens``, by ``max_tokens_per_turn`` and
by the observation; a completion cut off there is passed to the environment like any other. The
rollout's time-out interrupts generation, but no call of the environment. It makes the rollout
fail, because its length, and so its reward, depends on the machine's speed.

Invariants: a rollout ends once, with one status. Every created environment is closed exactly once.
Errors of the environment and the generator become a status with a cause and are never raised.

A recorded rollout continues after its finished turns, with the same requests and seeds as without
the interruption; only its time-out starts again. If its environment cannot be restored, it starts
from the beginning, and the recorded tokens are reported as discarded.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from torchtitan_rl.aio import loop_s
from torchtitan_rl.rollout.calls import is_cancelled, summary
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.records import EnvState, RecordedRollout
from torchtitan_rl.rollout.session import EnvSession, NotResumableError
from torchtitan_rl.rollout.tree import RolloutEnded, RolloutEnv, TurnTree
from torchtitan_rl.routed_experts import num_known, of_new_tokens
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerateFn,
    GenerationRequest,
    OnProgress,
    Problem,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Turn,
)

ENV_NOT_RESUMABLE = "env_not_resumable"
ROLLED_BACK = "rolled_back"


class Phase(StrEnum):
    """What a running rollout waits for."""

    PLACE = "place"  # see `places.py`
    ENVIRONMENT = "environment"
    GENERATION = "generation"
    REWARD = "reward"
    TEACHER = "teacher"  # see `distillation/scoring.py`


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutActivity:
    """The current activity of a running rollout. ``since_s`` is its start on the event loop's
    clock."""

    rollout_id: str
    turn: int
    phase: Phase
    detail: str  # the environment's method, the request's id, ...
    since_s: float


EnvironmentFactory = Callable[[Problem], RolloutEnv]
OnTurn = Callable[[RecordedRollout], None]  # called after a turn, with the record of all turns
OnDiscard = Callable[[str, str, int], None]  # rollout id, cause, number of sampled tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The settings that the rollouts of one group share: see `Rollouter.run_group`."""

    group_id: str
    problem: Problem
    environment: EnvironmentFactory
    generate: GenerateFn
    config: RolloutConfig
    seed: int
    active_time: ActiveTime
    attempt: int
    min_version: int
    siblings_together: int
    places: Places | None
    on_turn: OnTurn | None
    on_discard: OnDiscard | None

    def request_id(self, rollout_id: str, turn: int) -> str:
        attempt = f"a{self.attempt}/" if self.attempt else ""
        return f"{rollout_id}/{attempt}t{turn}"

    def request(
        self,
        rollout_id: str,
        turn: int,
        observation: Observation,
        partial: Completion | None = None,
        *,
        branch: str | None = None,
    ) -> GenerationRequest:
        """Build the request for a turn's completion, which continues ``partial``. The seed depends
        on ``branch`` if it is given, because simultaneous turns have no order."""
        sampling = self.config.sampling
        sibling = int(rollout_id.removeprefix(f"{self.group_id}/r"))
        room = self.config.max_total_tokens - len(observation.prompt_token_ids)
        budget = min(room, sampling.max_tokens_per_turn)
        if observation.max_tokens is not None:
            budget = min(budget, observation.max_tokens)
        return GenerationRequest(
            request_id=self.request_id(rollout_id, turn),
            session_id=rollout_id,
            # Siblings that should share a replica have the same.
            prompt_id=f"{self.group_id}/prompt{sibling // self.siblings_together}",
            prompt_token_ids=observation.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=budget,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=observation.stop_token_ids,
                stop=observation.stop,
                num_logprobs=observation.num_logprobs,
                engine_options=observation.constraints,
                seed=request_seed(
                    self.seed, rollout_id, turn if branch is None else branch, self.attempt
                ),
            ),
            min_version=self.min_version,
            resume_from=partial if partial and partial.token_ids else None,
            images=observation.images,
        )

    def may_resume(self, recorded: RecordedRollout) -> bool:
        """Whether the record is not empty and all of it belongs to this attempt."""
        completions = [turn.completion for turn in recorded.turns]
        if recorded.partial is not None:
            completions.append(recorded.partial)
        ids = [completion.request_id for completion in completions]
        # Ids of one attempt; simultaneous turns are recorded in the order in which they ended.
        prefix = self.request_id(recorded.rollout_id, 0)[:-1]
        numbers = [name.removeprefix(prefix) for name in ids]
        return all(number.isdigit() for number in numbers) and bool(ids or recorded.ended)


class RolloutRun:
    """One rollout. Call `run` once; `activity`, `so_far` and `snapshot` may be used at any time."""

    def __init__(
        self, rollout_id: str, group: GroupSettings, recorded: RecordedRollout | None
    ) -> None:
        self.rollout_id = rollout_id
        self._group = group
        nothing = RecordedRollout(rollout_id=rollout_id)
        recorded = recorded or nothing
        self._is_restoring = group.may_resume(recorded)
        # The turns that the environment has answered, and the data to continue after them.
        self._record = recorded if self._is_restoring else nothing
        self._num_refused = 0 if self._is_restoring else recorded.num_tokens
        self._open_turn: Turn | None = None  # sampled, and not yet in the record
        self._tree: TurnTree | None = None  # of an environment with simultaneous turns
        self._messages: tuple[Mapping[str, Any], ...] = ()
        self._deadline_s = 0.0
        self._phase_s: dict[str, float] = {}
        self._is_timed = False
        self.enter(Phase.ENVIRONMENT, "waits to start")

    def enter(self, phase: Phase, detail: str) -> None:
        self.leave()
        self._is_timed = True
        self.activity = RolloutActivity(
            rollout_id=self.rollout_id,
            turn=len(self._turns()),
            phase=phase,
            detail=detail,
            since_s=loop_s(),
        )

    def leave(self) -> None:
        """End the current phase. Time until the next `enter` counts for no phase."""
        if self._is_timed:
            phase = self.activity.phase.value
            seconds = loop_s() - self.activity.since_s
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + seconds
        self._is_timed = False

    def timed(self, rollout: Rollout) -> Rollout:
        """Return this run's rollout with the time of its phases so far."""
        self.leave()
        return replace(rollout, phase_s=dict(self._phase_s))

    def so_far(self, status: RolloutStatus, cause: str | None = None) -> Rollout:
        """Return the rollout as if it ended now with this status, without a reward."""
        return Rollout(
            rollout_id=self.rollout_id,
            group_id=self._group.group_id,
            problem_id=self._group.problem.problem_id,
            turns=self._turns(),
            status=status,
            reward=None,
            cause=cause,
            messages=self._messages,
        )

    def snapshot(self, partials: Mapping[str, Completion]) -> RecordedRollout:
        """Return the record from which another process can continue; see `Rollouter.snapshot`."""
        record = self._record
        if self._is_restoring or record.ended is not None:
            return record
        if self._tree is not None:
            return replace(record, turns=self._tree.turns)
        if self._open_turn is not None:
            return replace(record, partial=self._open_turn.completion)
        request_id = self._group.request_id(self.rollout_id, len(record.turns))
        return replace(record, partial=partials.get(request_id, record.partial))

    async def run(self) -> Rollout:
        """Run the rollout to its end. The result has the environment's own reward, if there is one,
        and is not scored yet.

        Raises:
            asyncio.CancelledError: the task was cancelled; the environment is closed.
            HangingCallsError: too many abandoned calls hang.
            Exception: ``on_turn`` or ``on_discard`` raised it.
        """
        self._report_discarded(ROLLED_BACK, self._num_refused)
        ended = self._recorded_end()
        if ended is None:
            async with self._place():
                self._start_time()
                try:
                    ended = await self._roll_out()
                except NotResumableError:
                    self._report_discarded(ENV_NOT_RESUMABLE, self._record.num_tokens)
                    self._record = RecordedRollout(rollout_id=self.rollout_id)
                    self._is_restoring, self._messages = False, ()
                    ended = await self._roll_out()
        if self._record.partial is not None:  # no request has continued it
            self._report_discarded(ROLLED_BACK, len(self._record.partial.token_ids))
        self._record = RecordedRollout(rollout_id=self.rollout_id, turns=ended.turns, ended=ended)
        self._open_turn = None
        self.leave()
        return ended

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        places = self._group.places
        if places is None:
            yield
            return
        if places.are_taken:
            self.enter(Phase.PLACE, "waits to start")
        async with places.take():
            self.enter(Phase.ENVIRONMENT, "starts")
            yield

    def _start_time(self) -> None:
        self._deadline_s = self._group.active_time.now_s() + self._group.config.rollout_timeout_s

    def _recorded_end(self) -> Rollout | None:
        """Return the recorded rollout if it has ended; None if it needs an environment."""
        state = self._record.env_state
        if self._record.ended is None and state and state.terminal is not None:
            self._messages = state.messages
            return self._rollout(state.terminal)
        return self._record.ended

    async def _roll_out(self) -> Rollout:
        env: EnvSession | None = None
        causes: list[str | None] = []
        try:
            env = EnvSession(
                functools.partial(self._group.environment, self._group.problem),
                timeout_s=self._group.config.step_timeout_s,
                max_prompt_tokens=self._group.config.max_total_tokens,
                on_call=functools.partial(self.enter, Phase.ENVIRONMENT),
            )
            ended = await (self._grow_tree(env) if env.is_tree else self._take_turns(env))
        except RolloutEnded as end:
            ended = self.so_far(end.status, end.cause)
        finally:
            if env is not None:
                causes = [self._read_messages(env), await env.close()]
        cause = "; ".join(filter(None, (ended.cause, *causes))) or None
        return replace(ended, messages=self._messages, cause=cause)

    async def _take_turns(self, env: EnvSession) -> Rollout:
        answer: Observation | Terminal = await self._start(env)
        while isinstance(answer, Observation):
            self._record = replace(
                self._record, prompt_token_ids=answer.prompt_token_ids, images=answer.images
            )
            limit = self._reached_limit(answer, len(self._record.turns))
            completion = None if limit else await self._generate(answer)
            if completion is None:
                status = limit or RolloutStatus.ROLLOUT_TIMEOUT
                return self._rollout(replace(await env.finish(status), status=status))
            answer = await self._step(env, answer, completion)
        return self._rollout(answer)

    async def _grow_tree(self, env: EnvSession) -> Rollout:
        """Let the environment request its own turns, until its end or a limit."""
        if self._is_restoring:
            env.require_replayable(self._record)
        if self._record.partial is not None:
            self._report_discarded(ROLLED_BACK, len(self._record.partial.token_ids))
        tree = TurnTree(
            make_request=lambda number, observation, branch: self._group.request(
                self.rollout_id, number, observation, branch=branch
            ),
            complete=self._complete,
            reached_limit=self._reached_limit,
            on_turns=self._record_tree,
            on_activity=self._enter_tree,
            start_time=self._start_time,
            step_timeout_s=self._group.config.step_timeout_s,
            recorded=self._record.turns,
        )
        self._record = RecordedRollout(rollout_id=self.rollout_id, turns=tree.turns)
        self._tree, self._is_restoring = tree, False
        try:
            terminal = await env.run(tree)
            if tree.limit is not None:
                terminal = replace(await env.finish(tree.limit), status=tree.limit)
        finally:
            await tree.close()
        assert terminal is not None
        self._read_messages(env)
        # Record the end, so that a killed run need not replay the agent; but not if turns that
        # `on_turn` has reported have changed since.
        if tree.limit is None and not tree.is_amended and self._group.on_turn is not None:
            state = EnvState(terminal=terminal, messages=self._messages)
            self._record = replace(self._record, env_states={len(self._record.turns): state})
            self._group.on_turn(self._record)
        return self._rollout(terminal)

    def _record_tree(self, turns: tuple[Turn, ...], is_new: bool) -> None:
        self._record = RecordedRollout(rollout_id=self.rollout_id, turns=turns)
        if is_new and self._group.on_turn is not None:
            self._group.on_turn(self._record)

    def _enter_tree(self, request_id: str | None, detail: str) -> None:
        phase = Phase.ENVIRONMENT if request_id is None else Phase.GENERATION
        self.enter(phase, request_id or detail)

    async def _start(self, env: EnvSession) -> Observation:
        """Return the first observation, or the one after the recorded turns; raises
        NotResumableError if the rollout has to start from the beginning."""
        if self._is_restoring:
            observation = await env.restore(self._record)
            self._is_restoring = False
            return observation
        observation = await env.reset()
        await self._record_turns(env, (), observation)
        return observation

    async def _step(
        self, env: EnvSession, asked: Observation, completion: Completion
    ) -> Observation | Terminal:
        turn = Turn(
            prompt_token_ids=asked.prompt_token_ids, completion=completion, images=asked.images
        )
        self._open_turn = of_new_tokens(turn, self._record.turns[-1:])
        if completion.finish_reason is FinishReason.ABORT:
            cause = f"{completion.request_id}: aborted, but not by this rollout"
            raise RolloutEnded(RolloutStatus.GENERATION_ERROR, cause)
        answer = await env.step(completion)
        turn = replace(self._open_turn, reward=answer.turn_reward, text=answer.turn_text)
        self._open_turn = turn
        await self._record_turns(env, (*self._record.turns, turn), answer)
        if self._group.on_turn is not None:
            self._group.on_turn(self._record)
        return answer

    async def _record_turns(
        self, env: EnvSession, turns: tuple[Turn, ...], answer: Observation | Terminal
    ) -> None:
        """Record the turns, and the environment's state if there is an ``on_turn``."""
        env_state: EnvState | None = None
        if isinstance(answer, Terminal):
            self._read_messages(env)
            env_state = EnvState(terminal=answer, messages=self._messages)
        elif self._group.on_turn is not None:
            state = await env.state()
            env_state = None if state is None else EnvState(observation=answer, state=state)
        self._record = RecordedRollout(
            rollout_id=self.rollout_id,
            turns=turns,
            env_states={} if env_state is None else {len(turns): env_state},
        )
        self._open_turn = None

    def _reached_limit(self, observation: Observation, num_turns: int) -> RolloutStatus | None:
        if num_turns >= self._group.config.max_turns:
            return RolloutStatus.MAX_TURNS
        if len(observation.prompt_token_ids) >= self._group.config.max_total_tokens:
            return RolloutStatus.MAX_TOKENS
        if self._group.active_time.now_s() >= self._deadline_s:
            return RolloutStatus.ROLLOUT_TIMEOUT
        return None

    async def _generate(self, observation: Observation) -> Completion | None:
        """Return the turn's completion; None if the rollout's time ran out."""
        partial = self._record.partial
        if partial is not None and partial.finish_reason is not FinishReason.ABORT:
            self._record = replace(self._record, partial=None)
            return partial  # it is whole: only the environment's answer was missing
        turn = len(self._record.turns)
        request = self._group.request(self.rollout_id, turn, observation, partial)
        if known := num_known(request.prompt_token_ids, self._record.turns[-1:]):
            request = replace(request, routed_from=known)
        self.enter(Phase.GENERATION, request.request_id)
        try:
            completion = await self._complete(request)
        except RolloutEnded:
            # From here on, the generator accounts for the tokens of the partial completion.
            self._record = replace(self._record, partial=None)
            raise
        if partial is not None:
            self._record = replace(self._record, partial=None)
        return completion

    async def _complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion | None:
        """Complete a request; None if the rollout's time ran out."""
        progress = () if on_progress is None else (on_progress,)
        try:
            async with self._group.active_time.timeout_at(self._deadline_s) as limit:
                completion = await self._group.generate(request, *progress)
            self._check_completion(request, completion)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            if isinstance(error, TimeoutError) and limit.expired():
                return None
            cause = f"{request.request_id}: {summary(error)}"
            raise RolloutEnded(RolloutStatus.GENERATION_ERROR, cause) from error
        return completion

    def _check_completion(self, request: GenerationRequest, completion: Completion) -> None:
        lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
        if completion.request_id != request.request_id:
            message = f"got the completion of {completion.request_id!r}"
        elif len(set(lengths)) != 1:
            message = f"tokens, logprobs and versions have lengths {lengths}"
        else:
            return
        self._report_discarded(RolloutStatus.GENERATION_ERROR.value, len(completion.token_ids))
        raise ValueError(message)

    def _turns(self) -> tuple[Turn, ...]:
        open_turns = () if self._open_turn is None else (self._open_turn,)
        return self._record.turns + open_turns

    def _rollout(self, terminal: Terminal) -> Rollout:
        reward = None if terminal.status.is_failure else terminal.reward
        rollout = self.so_far(terminal.status)
        return replace(rollout, reward=reward, metrics=dict(terminal.metrics))

    def _read_messages(self, env: EnvSession) -> str | None:
        """Copy the environment's messages. Returns the error, or None."""
        try:
            self._messages = env.messages()
        except Exception as error:
            return f"messages: {summary(error)}"
        return None

    def _report_discarded(self, cause: str, num_tokens: int) -> None:
        if num_tokens and self._group.on_discard is not None:
            self._group.on_discard(self.rollout_id, cause, num_tokens)


def request_seed(run_seed: int, rollout_id: str, turn: int | str, attempt: int = 0) -> int:
    """Derive a request's seed in [0, 2**63), equal in every process."""
    key = f"{run_seed}\x00{rollout_id}\x00{turn}"
    if attempt:
        key += f"\x00{attempt}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
