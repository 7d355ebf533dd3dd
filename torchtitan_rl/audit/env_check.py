"""Rolls out a few problems of a task to find the usual mistakes of environments.

Each problem is rolled out twice at once, as siblings are in training. Then the rollout is continued
from each of its saved states and must go on as it did; one that ended by a limit is rolled out once
more with room for many turns.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from torchtitan_rl.audit.env_findings import (
    Finding,
    Mistake,
    blocking_findings,
    cut_note,
    rollout_findings,
    says_nothing_of_the_end,
)
from torchtitan_rl.audit.env_probe import Watched, watching
from torchtitan_rl.generation.engine import EngineLimits
from torchtitan_rl.generation.validation import validate_request
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.rubric import Rubric
from torchtitan_rl.rollout.run import EnvironmentFactory
from torchtitan_rl.rollout.session import EnvSession, NotResumableError
from torchtitan_rl.rollout.tree import RolloutEnded
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
_STOPS_CHECKS = {
    Mistake.EXCEPTION,
    Mistake.TIMEOUT,
    Mistake.GENERATION,
    Mistake.PROMPT_LENGTH,
}
"""An environment that makes these cannot be rolled out again or continued."""


class ScriptedPolicy:
    """A `GenerateFn` that says the same in every rollout: one text a turn, again from the first
    one after the last, each with a stop token. It refuses what an engine with a vocabulary of this
    size would refuse."""

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
    """The first sibling, and what is wrong with all. ``watched`` is None for agents.

    ``part`` is that of a mixture; ``has_ended``: the environment ended a rollout by itself.
    ``unclear`` says why it is not known whether it does.
    """

    part: str
    rollout: Rollout
    watched: Watched | None
    has_ended: bool
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unclear: str = ""


def settled(checked: Sequence[CheckedProblem]) -> tuple[list[Finding], list[str]]:
    """All findings and notes. What ended for one problem can end: a rollout of another that
    reached a limit is the policy's doing."""
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
    """``scripted`` is used where the limits of a real policy are in the way."""

    environment: EnvironmentFactory
    limits: RolloutConfig
    rubric: Rubric | None
    generate: GenerateFn
    scripted: GenerateFn
    decode: Callable[[Sequence[int]], str]
    seed: int
    max_block_s: float

    async def check(self, problem: Problem, *, is_first: bool) -> CheckedProblem:
        """``is_first``: caches are empty, so its first rollout may take its time."""
        all_watched: list[Watched] = []
        group = await self._rollouter(self.generate, self.limits, all_watched).run_group(
            f"check/{problem.problem_id}",
            problem,
            size=_SIBLINGS,
            seed=self.seed,
            on_turn=lambda record: None,  # so that states are saved
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
            what = f"{len(longer.turns)} turns, and no end"
            name = checked.rollout.rollout_id
            checked.findings.append(Finding(mistake=Mistake.NEVER_ENDS, rollout_id=name, what=what))

    async def _resuming(self, rollout: Rollout, watched: Watched) -> list[Finding]:
        """From each saved state; of an environment that is replayed, before its last turn."""
        saved: list[tuple[int, str | None]]
        if watched.is_stateful:
            saved = [
                (number, state) for number, state in enumerate(watched.states) if state is not None
            ]
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
                    mistake = Mistake.STATE
                    what = f"continued after {number} turns: {what}"
                    return [Finding(mistake=mistake, rollout_id=rollout.rollout_id, what=what)]
        return []

    async def _continue(
        self, rollout: Rollout, watched: Watched, number: int, state: str | None
    ) -> str | None:
        """What is different in the turns from ``number`` on."""
        answer = watched.answers[number]
        session = EnvSession(
            lambda: self.environment(watched.problem),
            timeout_s=self.limits.step_timeout_s,
            max_prompt_tokens=_MANY_TOKENS,  # prompts are compared whole
            on_call=lambda name: None,
        )
        saved = None if state is None else EnvState(answer=answer, state=json.loads(state))
        try:
            await session.restore(
                RecordedRollout(
                    rollout_id=rollout.rollout_id,
                    turns=rollout.turns[:number],
                    env_states={} if saved is None else {number: saved},
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
    """By the environment's own decision."""
    return rollout.status not in _BY_LIMIT and not rollout.status.is_failure


def _difference(before: Observation | Terminal, now: Observation | Terminal) -> str:
    if isinstance(before, Terminal) and isinstance(now, Terminal):
        # As text, in which NaN is itself.
        was, reward = (None if one.reward is None else float(one.reward) for one in (before, now))
        return "" if str(was) == str(reward) else f"is rewarded with {reward}, and was with {was}"
    if isinstance(before, Observation) and isinstance(now, Observation):
        is_same = tuple(before.prompt_token_ids) == now.prompt_token_ids
        return "" if is_same else "is followed by another prompt than it was"
    return f"is answered by {type(now).__name__}, and was by {type(before).__name__}"
