"""Scores finished rollouts by their teachers.

A rollout's episodes are scored, each by one forward pass of the teacher over all its tokens, even
if it has many turns. Only the scores of sampled tokens are kept; tokens of prompts and environments
have none.

Invariants: a rollout gets the scores of all tokens of its episodes, or an error is raised; its
tokens are never changed. The scores do not depend on time, so a resumed run computes the same ones
again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from torchtitan_rl.errors import GenerationError, TeacherError
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import (
    GenerationRequest,
    Problem,
    Rollout,
    SamplingParams,
    TokenScores,
)


class Teacher(Protocol):
    async def score(self, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        """Score all tokens after the first one. ``name`` is unique among the running calls. Raises
        TeacherError: there is no hope that the teacher answers, or its deadline has passed."""

    def num_failures(self) -> int:
        """Failures so far that another replica or attempt had to make up for."""


class ReplicaTeacher:
    """A `Teacher` on replicas, with ``num_top`` most likely tokens at each position. The router
    retries on other replicas, until its own deadline."""

    def __init__(self, source: str, router: GeneratorRouter, *, num_top: int = 0) -> None:
        self._source = source
        self._router = router
        self._sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            with_logprobs=False,
            prompt_logprobs=num_top,
        )

    async def score(self, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        request = GenerationRequest(
            request_id=name, prompt_token_ids=token_ids, sampling=self._sampling
        )
        try:
            scores = None
            while scores is None:  # a replica was lost between its only token and the scores
                scores = (await self._router.generate(request)).prompt_scores
        except GenerationError as error:
            raise TeacherError(f"teacher {self._source}: {error}") from error
        return scores

    def num_failures(self) -> int:
        return sum(phase is Phase.DEAD for phase in self._router.states().values())


@dataclass(slots=True)
class Teachers:
    """Scores rollouts by ``teachers``, which are keyed by their source. ``source_for`` names that
    of a part of a mixture, or "". ``num_top`` most likely tokens of each position are needed, of a
    policy with ``vocab_size`` tokens."""

    teachers: Mapping[str, Teacher]
    source_for: Callable[[str], str]
    vocab_size: int
    num_top: int = 0
    _num_failures: int = 0  # as of the last `take`

    def teach(self, problem: Problem) -> bool:
        return bool(self.source_for(problem.task))

    async def score(self, rollout: Rollout, problem: Problem) -> Rollout:
        """Return the rollout with the scores of its turns. Turns that are in no episode have none.
        Raises TeacherError: see `Teacher.score`; or a score is not a finite number."""
        source, name = self.source_for(problem.task), f"{rollout.rollout_id}/teacher"
        episodes = turns_by_episode(rollout)
        async with asyncio.TaskGroup() as scoring:
            tasks = [
                scoring.create_task(self._score(source, f"{name}{number}", turns[-1].token_ids))
                for number, turns in enumerate(episodes)
            ]
        scores_of = {
            id(turn): task.result().part(len(turn.prompt_token_ids) - 1, len(turn.token_ids) - 1)
            for turns, task in zip(episodes, tasks, strict=True)
            for turn in turns
        }
        turns = (replace(turn, teacher=scores_of.get(id(turn))) for turn in rollout.turns)
        return replace(rollout, turns=tuple(turns))

    async def _score(self, source: str, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        scores = await self.teachers[source].score(name, token_ids)
        wrong = [one for one in scores.logprobs if not math.isfinite(one)]
        if wrong or len(scores.logprobs) != len(token_ids) - 1:
            raise TeacherError(
                f"teacher {source}, {name}: {len(scores.logprobs)} logprobs of "
                f"{len(token_ids)} tokens, {len(wrong)} of which are not finite; the teacher is "
                "damaged, or computes in a type that its weights exceed"
            )
        num_bytes = 4 * self.num_top * len(scores.logprobs)
        if not len(scores.top_ids) == len(scores.top_logprobs) == num_bytes:
            raise TeacherError(
                f"teacher {source}, {name}: the answer has not the {self.num_top} most likely "
                "tokens of each position (teacher.top_k)"
            )
        return _without_unknown(scores, self.vocab_size) if num_bytes else scores

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of `take`."""
        total = sum(teacher.num_failures() for teacher in self.teachers.values())
        new, self._num_failures = total - self._num_failures, total
        return {"teacher/failures": float(new)}


def _without_unknown(scores: TokenScores, vocab_size: int) -> TokenScores:
    """Leave out (NaN) positions where one of the most likely tokens is not in the policy's
    vocabulary: a server may return any number."""
    width = len(scores.logprobs)
    ids_NK = np.frombuffer(scores.top_ids, dtype="<i4").reshape(width, -1)
    logprobs_NK = np.frombuffer(scores.top_logprobs, dtype="<f4").reshape(width, -1)
    unknown_N1 = ((ids_NK < 0) | (ids_NK >= vocab_size)).any(axis=1, keepdims=True)
    if not unknown_N1.any():
        return scores
    return replace(
        scores,
        top_ids=np.where(unknown_N1, np.int32(0), ids_NK).tobytes(),
        top_logprobs=np.where(unknown_N1, np.float32(math.nan), logprobs_NK).tobytes(),
    )
