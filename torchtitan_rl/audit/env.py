"""Rolls out a few problems of a task to find common mistakes of environments.

Each problem is rolled out twice at the same time, like the rollouts of a group in training. If
limits ended both, it is rolled out once more with room for many turns. Then the first rollout is
continued from each of its saved states, and must proceed as before. Environments are observed from
outside: the answer of each call, its duration, and the time for which it blocked the event loop.
`audit/findings.py` finds the mistakes in these records.
"""

from __future__ import annotations

import itertools
import json
import time
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_rl.audit.findings import (
    EnvCall,
    Finding,
    Mistake,
    Watched,
    blocking_findings,
    cut_note,
    rollout_findings,
    says_nothing_of_the_end,
)
from torchtitan_rl.generation.engine import EngineLimits, validate_request
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal, is_stateful, replays, require_async
from torchtitan_rl.rollout.records import EnvState, RecordedRollout
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.rubric import Rubric
from torchtitan_rl.rollout.run import EnvironmentFactory
from torchtitan_rl.rollout.session import EnvSession, NotResumableError
from torchtitan_rl.rollout.tree import RolloutEnded, RolloutEnv, is_tree_env
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerateFn,
    GenerationRequest,
    OnProgress,
    Problem,
    Rollout,
    RolloutStatus,
    VersionRun,
)

_SIBLINGS = 2
_MANY_TURNS = 64
_MANY_TOKENS = 1 << 20
_BY_LIMIT = (RolloutStatus.MAX_TURNS, RolloutStatus.MAX_TOKENS)
# After one of these mistakes the environment is not rolled out again or continued.
_STOPS_CHECKS = {Mistake.EXCEPTION, Mistake.TIMEOUT, Mistake.GENERATION, Mistake.PROMPT_LENGTH}


class ScriptedPolicy:
    """A `GenerateFn` that gives the same texts in every rollout, in turns, each with a stop token;
    refuses what an engine with a vocabulary of this size would refuse."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], *, vocab_size: int) -> None:
        self._limits = EngineLimits(max_model_len=2 * _MANY_TOKENS, vocab_size=vocab_size)
        self._texts = [tuple(tokenizer.encode(one, add_special_tokens=False)) for one in texts]
        self._eos = tokenizer.eos_token_id

    async def __call__(
        self, request: GenerationRequest, on_progress: OnProgress | None = None, /
    ) -> Completion:
        validate_request(request, self._limits, outstanding=())
        turn, sampling = int(request.request_id.rsplit("/t", 1)[1]), request.sampling
        ends = sampling.stop_token_ids or (() if self._eos is None else (self._eos,))
        end = (self._eos,) if self._eos in ends else ends[:1]
        whole = self._texts[turn % len(self._texts)] + end
        tokens = whole[: sampling.max_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=tokens,
            logprobs=(-1.0,) * len(tokens),
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.STOP if tokens == whole else FinishReason.LENGTH,
        )


@dataclass(slots=True, kw_only=True)
class CheckedProblem:
    """The first rollout of a problem, and the findings of all its rollouts. ``watched`` is None for
    agents. ``part``: of a mixture. ``has_ended``: the environment ended a rollout by itself;
    ``unclear``: why that is unknown."""

    part: str
    rollout: Rollout
    watched: Watched | None
    has_ended: bool
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unclear: str = ""


def settled(checked: Sequence[CheckedProblem]) -> tuple[list[Finding], list[str]]:
    """The findings and notes of all problems. That rollouts never end is no finding if the
    environment ended any other one (in a mixture: of the same part): the cause is the policy."""
    ending = {one.part for one in checked if one.has_ended}
    findings = [
        finding
        for one in checked
        for finding in one.findings
        if finding.mistake is not Mistake.NEVER_ENDS or one.part not in ending
    ]
    unclear = (one.unclear for one in checked if one.unclear and one.part not in ending)
    notes = [note for one in checked for note in one.notes]
    return findings, [*notes[:1], *itertools.islice(unclear, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvChecker:
    """Checks an environment. ``scripted`` generates the long rollouts for which the context of a
    real policy may be too short."""

    environment: EnvironmentFactory
    limits: RolloutConfig
    rubric: Rubric | None
    generate: GenerateFn
    scripted: GenerateFn
    decode: Callable[[Sequence[int]], str]
    seed: int
    max_block_s: float

    async def check(self, problem: Problem, *, is_first: bool) -> CheckedProblem:
        """Check one problem. In the first rollout of the first problem caches are still empty, so
        it may block the event loop."""
        all_watched: list[Watched] = []
        group = await self._rollouter(self.generate, self.limits, all_watched).run_group(
            f"check/{problem.problem_id}",
            problem,
            size=_SIBLINGS,
            seed=self.seed,
            on_turn=lambda record: None,  # states are saved only with a callback
        )
        pairs = list(zip_longest(group.rollouts, all_watched))
        findings = [
            finding
            for rollout, watched in pairs
            for finding in rollout_findings(rollout, watched, self.limits, self.decode)
        ]
        rollout, watched = pairs[0]
        checked = CheckedProblem(
            part=problem.task,
            rollout=rollout,
            watched=watched,
            has_ended=any(_has_ended(one) for one in group.rollouts),
            findings=findings,
            notes=[note for one, of_one in pairs if (note := cut_note(one, of_one))],
        )
        if watched is None:
            return checked
        for one, of_one in pairs[1 if is_first else 0 :]:
            findings += blocking_findings(of_one, one.rollout_id, max_block_s=self.max_block_s)
        kinds = {finding.mistake for finding in findings}
        if not kinds & _STOPS_CHECKS:
            if not checked.has_ended and rollout.status in _BY_LIMIT:
                await self._check_end(checked, problem)
            if Mistake.STATE not in kinds:
                findings += await self._resuming(rollout, watched)
        return checked

    def _rollouter(
        self, generate: GenerateFn, limits: RolloutConfig, found: list[Watched]
    ) -> Rollouter:
        return Rollouter(
            generate=generate,
            environment=watching(self.environment, found),
            config=limits,
            rubric=self.rubric,
        )

    async def _check_end(self, checked: CheckedProblem, problem: Problem) -> None:
        """Roll out once more, with room for many turns."""
        turns = max(_MANY_TURNS, 2 * self.limits.max_turns)
        limits = replace(self.limits, max_turns=turns, max_total_tokens=_MANY_TOKENS)
        found: list[Watched] = []
        rollouter = self._rollouter(self.scripted, limits, found)
        group = await rollouter.run_group("check/end", problem, size=1, seed=self.seed)
        (longer,) = group.rollouts
        kinds = {finding.mistake for finding in checked.findings}
        again = rollout_findings(longer, found[0], limits, self.decode)
        checked.findings += [finding for finding in again if finding.mistake not in kinds]
        if longer.status not in _BY_LIMIT:
            checked.has_ended = _has_ended(longer)
        elif why := says_nothing_of_the_end(longer):
            checked.unclear = (
                f"whether the environment ends by itself is not known: {why}; --say some that it "
                "understands, or take --policy real"
            )
        else:
            what, name = f"{len(longer.turns)} turns, and no end", checked.rollout.rollout_id
            checked.findings.append(Finding(mistake=Mistake.NEVER_ENDS, rollout_id=name, what=what))

    async def _resuming(self, rollout: Rollout, watched: Watched) -> list[Finding]:
        """Continue a rollout from each saved state, or if the environment is replayed only from
        before the last turn."""
        saved: list[tuple[int, str | None]]
        if watched.is_stateful:
            saved = [pair for pair in enumerate(watched.states) if pair[1] is not None]
        elif watched.replays and rollout.turns:
            saved = [(len(rollout.turns) - 1, None)]
        else:
            return []
        for number, state in saved:
            if number < len(rollout.turns):
                try:
                    what = await self._continue(rollout, watched, number, state)
                except (NotResumableError, RolloutEnded) as error:
                    what = getattr(error, "cause", None) or str(error)
                if what:
                    what = f"continued after {number} turns: {what}"
                    name = rollout.rollout_id
                    return [Finding(mistake=Mistake.STATE, rollout_id=name, what=what)]
        return []

    async def _continue(
        self, rollout: Rollout, watched: Watched, number: int, state: str | None
    ) -> str | None:
        """Continue a rollout after ``number`` turns, and describe the first difference from its
        later turns; None if there is none."""
        answer = watched.answers[number]
        session = EnvSession(
            lambda: self.environment(watched.problem),
            timeout_s=self.limits.step_timeout_s,
            max_prompt_tokens=_MANY_TOKENS,  # prompts are compared in full
            on_call=lambda name: None,
        )
        env_states = {}
        if state is not None and isinstance(answer, Observation):
            env_states[number] = EnvState(observation=answer, state=state)
        try:
            await session.restore(
                RecordedRollout(
                    rollout_id=rollout.rollout_id,
                    turns=rollout.turns[:number],
                    env_states=env_states,
                    prompt_token_ids=rollout.turns[number].prompt_token_ids,
                )
            )
            for index, turn in enumerate(rollout.turns[number:], start=number + 1):
                before, now = watched.answers[index], await session.step(turn.completion)
                if difference := _difference(before, now):
                    return f"turn {index} {difference}"
            return None
        finally:
            await session.close()


def _has_ended(rollout: Rollout) -> bool:
    """Whether the environment itself ended the rollout."""
    return rollout.status not in _BY_LIMIT and not rollout.status.is_failure


def _difference(before: Observation | Terminal, now: Observation | Terminal) -> str:
    if isinstance(before, Terminal) and isinstance(now, Terminal):
        # Compare as text, in which NaN equals NaN.
        was, reward = (None if one.reward is None else float(one.reward) for one in (before, now))
        return "" if str(was) == str(reward) else f"is rewarded with {reward}, and was with {was}"
    if isinstance(before, Observation) and isinstance(now, Observation):
        is_same = tuple(before.prompt_token_ids) == now.prompt_token_ids
        return "" if is_same else "is followed by another prompt than it was"
    return f"is answered by {type(now).__name__}, and was by {type(before).__name__}"


_T = TypeVar("_T")
_SCHEDULING = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, switches


def watching(environment: EnvironmentFactory, found: list[Watched]) -> EnvironmentFactory:
    """Wrap the factory ``environment`` so that each environment is watched, and its `Watched` is
    added to ``found``. Environments of agents are not watched."""

    def make(problem: Problem) -> RolloutEnv:
        watched = Watched(problem=problem)
        found.append(watched)
        start_s, own_start_s = time.perf_counter(), _own_time_s()
        env = environment(problem)
        took_s, blocked_s = time.perf_counter() - start_s, _own_time_s() - own_start_s
        require_async(env)
        if is_tree_env(env):
            found.remove(watched)
            return env
        watched.calls.append(EnvCall("creation", took_s, blocked_s))
        return _WatchedEnv(env, watched)

    return make


class _WatchedEnv:
    """Implements the same protocols as the environment that it wraps."""

    def __init__(self, env: Any, watched: Watched) -> None:  # a TokenEnv
        self.wrapped_env = env
        self._watched = watched
        watched.is_stateful, watched.replays = is_stateful(env), replays(env)

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return getattr(self.wrapped_env, "messages", ())

    async def reset(self) -> Observation:
        answer: Observation = await self._timed("reset", self.wrapped_env.reset())
        self._watched.answers.append(answer)
        return answer

    async def step(self, completion: Completion) -> Observation | Terminal:
        stepping = self.wrapped_env.step(completion)
        answer: Observation | Terminal = await self._timed("step", stepping)
        self._watched.answers.append(answer)
        return answer

    async def finish(self, status: RolloutStatus) -> Terminal:
        return await self._timed("finish", self.wrapped_env.finish(status))

    async def close(self) -> None:
        await self._timed("close", self.wrapped_env.close())

    async def state_dict(self) -> Any:
        state = await self._timed("state_dict", self.wrapped_env.state_dict())
        self._watched.states.append(None if state is None else json.dumps(state))
        return state

    async def load_state_dict(self, state: Any) -> None:
        await self._timed("load_state_dict", self.wrapped_env.load_state_dict(state))

    async def _timed(self, method: str, work: Coroutine[Any, Any, _T]) -> _T:
        call, start_s = EnvCall(method), time.perf_counter()
        try:
            return await _watched(work, call)
        finally:
            call.seconds = time.perf_counter() - start_s
            self._watched.calls.append(call)


def _own_time_s() -> float:
    """A clock that excludes the time for which this thread waits for a core, if the kernel reports
    that, so that a busy machine does not change the result."""
    waited_ns = _waited_ns()
    while True:
        now_s = time.perf_counter()
        before_ns, waited_ns = waited_ns, _waited_ns()
        if waited_ns == before_ns:  # the thread did not wait between the two clocks
            return now_s - waited_ns / 1e9


def _waited_ns() -> int:
    try:
        _, waited_ns, _ = _SCHEDULING.read_text().split()
    except (OSError, ValueError):
        return 0
    return int(waited_ns)


@types.coroutine
def _watched(work: Coroutine[Any, Any, _T], call: EnvCall) -> Generator[Any, Any, _T]:
    """Await a coroutine, and record the longest time for which it ran without waiting."""
    go_on: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        start_s = _own_time_s()
        try:
            waits_for = go_on(value)
        except StopIteration as end:
            result: _T = end.value
            return result
        finally:
            call.blocked_s = max(call.blocked_s, _own_time_s() - start_s)
        try:
            go_on, value = work.send, (yield waits_for)
        except BaseException as error:  # also a cancellation: the coroutine must handle it
            go_on, value = work.throw, error
