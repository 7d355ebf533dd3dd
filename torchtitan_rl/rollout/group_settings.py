"""What the rollouts of one group share, and the requests that follow from it. Pure.

A request is the same in every run with the same seed, whatever else runs: its id and seed depend
only on the run's seed, the rollout, the turn and the attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.env import Observation
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.turn_tree import RolloutEnv
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.types import (
    Completion,
    GenerateFn,
    GenerationRequest,
    Problem,
    SamplingParams,
)

EnvironmentFactory = Callable[[Problem], RolloutEnv]
OnTurn = Callable[[RecordedRollout], None]  # after a turn; with the state after it
OnDiscard = Callable[[str, str, int], None]  # rollout id, cause, number of sampled tokens

_MOST_UNEVEN = 1.125  # rollouts of the busiest replica, of the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """See `Rollouter.run_group`, which creates it."""

    group_id: str
    problem: Problem
    environment: EnvironmentFactory
    generate: GenerateFn
    config: RolloutConfig
    seed: int
    sampling: SamplingConfig
    active_time: ActiveTime
    attempt: int
    min_version: int
    siblings_together: int
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
        """The request for a turn's completion, which continues ``partial``.

        The seed depends on ``branch`` instead of the turn where it is given: turns that run at once
        have no order.
        """
        sampling = self.sampling
        room = self.config.max_total_tokens - len(observation.prompt_token_ids)
        budget = min(room, sampling.max_tokens_per_turn)
        if observation.max_tokens is not None:
            budget = min(budget, observation.max_tokens)
        return GenerationRequest(
            request_id=self.request_id(rollout_id, turn),
            session_id=rollout_id,
            prompt_id=self._prompt_id(rollout_id),
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
        )

    def _prompt_id(self, rollout_id: str) -> str:
        """The same for so many siblings as are to be on one replica."""
        number = int(rollout_id.removeprefix(f"{self.group_id}/r"))
        return f"{self.group_id}/prompt{number // self.siblings_together}"

    def may_resume(self, recorded: RecordedRollout) -> bool:
        """Whether there is something recorded, and all of it in this attempt."""
        completions = [turn.completion for turn in recorded.turns]
        if recorded.partial is not None:
            completions.append(recorded.partial)
        ids = [completion.request_id for completion in completions]
        # Of one attempt; turns that ran at once are recorded in the order of their ends.
        prefix = self.request_id(recorded.rollout_id, 0)[:-1]
        numbers = [name.removeprefix(prefix) for name in ids]
        return all(number.isdigit() for number in numbers) and bool(ids or recorded.ended)


def siblings_together(config: RolloutConfig, num_replicas: int) -> int:
    """How many siblings share a replica, which then computes their prompt once: as many as leave
    the busiest replica at most an eighth more rollouts of a step than the mean.

    >>> [siblings_together(RolloutConfig(groups_per_step=8, group_size=8), n) for n in (2, 5, 16)]
    [8, 2, 4]
    """
    size = config.group_size
    for together in range(size, 1, -1):
        parts = config.groups_per_step * (size // together)
        busiest = -(-parts // num_replicas)
        if size % together == 0 and busiest * num_replicas <= _MOST_UNEVEN * parts:
            return together
    return 1


def request_seed(run_seed: int, rollout_id: str, turn: int | str, attempt: int = 0) -> int:
    """In [0, 2**63), and the same in every process."""
    key = f"{run_seed}\x00{rollout_id}\x00{turn}"
    if attempt:
        key += f"\x00{attempt}"
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
