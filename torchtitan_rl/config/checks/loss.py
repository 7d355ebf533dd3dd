"""Fields of the loss and of advantages that are refused; `rules` has the values of each number.

Functions of the user's own are loaded and tried.

Three policies take part: behaviour (sampled the tokens), proximal (the ratio is taken against it)
and the policy that is trained. policy / proximal is the ratio, proximal / behaviour the importance
weight. Each of the two must be corrected exactly once.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl.errors import ConfigError, TorchtitanRLError
from torchtitan_rl.functions import load_function
from torchtitan_rl.rollout.advantages import ADVANTAGE_KINDS, turn_advantages
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    Rollout,
    RolloutStatus,
    Turn,
    VersionRun,
)


def loss_errors(config: LossConfig, *, staleness: int, updates: int = 1) -> list[str]:
    """One message per error: field, value, fix. ``staleness`` is `ScheduleConfig.staleness`,
    ``updates`` is `TrainerConfig.updates_per_batch`."""
    return [
        *_corrections(config, staleness, updates),
        *_lengths(config),
        *_function(config, updates),
    ]


def advantage_errors(config: RolloutConfig) -> list[str]:
    """One message per error: field, value, fix."""
    errors = []
    for name in ("turn_discount", "final_reward_weight"):
        value = getattr(config, name)
        if config.credit == "outcome" and value != 1.0:
            errors.append(
                f"rollout.{name} is {value}: rollout.credit outcome does not read it; give 1, or "
                "rollout.credit turn"
            )
    if config.credit == "turn" and not config.final_reward_weight and config.overlong.buffer_tokens:
        errors.append(
            "rollout.final_reward_weight is 0: the penalty of rollout.overlong.buffer_tokens is "
            "taken off the reward that it weighs; give a weight, or 0 tokens"
        )
    if config.advantage not in ADVANTAGE_KINDS:
        try:
            load_function(config.advantage)
            for size in (1, 3):  # what is left where siblings fail
                siblings = [_made_rollout(number) for number in range(size)]
                turn_advantages(siblings, replace(config, credit="outcome"))
        except TorchtitanRLError as error:
            kinds = ", ".join(ADVANTAGE_KINDS)
            errors.append(f"rollout.advantage is {config.advantage!r}: {error}; or {kinds}")
    return errors


def _made_rollout(number: int) -> Rollout:
    completion = Completion(
        request_id=f"made/r{number}/t0",
        token_ids=(number,),
        logprobs=(-1.0,),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.STOP,
    )
    return Rollout(
        rollout_id=f"made/r{number}",
        group_id="made",
        problem_id="made",
        turns=(Turn(prompt_token_ids=(0,), completion=completion),),
        status=RolloutStatus.COMPLETED,
        reward=number / 2,
    )


def _function(config: LossConfig, updates: int) -> list[str]:
    if not config.function:
        return []
    from torchtitan_rl.training.losses.contract import loss_problem  # torch takes seconds

    try:
        problem = loss_problem(load_function(config.function), config, updates)
    except ConfigError as error:
        problem = str(error)
    return [f"trainer.loss.function is {config.function!r}: {problem}"] if problem else []


def _corrections(config: LossConfig, staleness: int, updates: int) -> list[str]:
    errors = []
    if config.proximal_policy == "behaviour" and config.importance_weight != "none":
        errors.append(
            f"trainer.loss.importance_weight is {config.importance_weight}: with "
            "trainer.loss.proximal_policy behaviour the ratio already is policy / behaviour, and a "
            "weight would correct twice; give none, or trainer.loss.proximal_policy recomputed"
        )
    if config.proximal_policy == "interpolated" and staleness == 0:
        errors.append(
            "trainer.loss.proximal_policy is interpolated: with schedule.staleness 0 no version "
            "lies between behaviour and policy; give recomputed or behaviour"
        )
    elif config.proximal_policy != "behaviour" and config.importance_weight == "none":
        errors.append(
            f"trainer.loss.proximal_policy is {config.proximal_policy}: without a weight nothing "
            "corrects for the policy that sampled the tokens; give importance_weight token or "
            "sequence, or proximal_policy behaviour"
        )
    if config.proximal_policy == "recomputed" and config.ratio == "sequence" and updates == 1:
        errors.append(
            "trainer.loss.ratio is sequence: with proximal_policy recomputed every ratio is 1 and "
            "the choice would do nothing; give token, or importance_weight sequence for a "
            "sequence-level correction"
        )
    return errors


def _lengths(config: LossConfig) -> list[str]:
    if config.aggregation == "constant" and config.constant_length < 1:
        return [
            f"trainer.loss.constant_length is {config.constant_length}: "
            "trainer.loss.aggregation constant divides by it; give the longest response in tokens, "
            "rollout.max_total_tokens for one"
        ]
    if config.aggregation != "constant" and config.constant_length != 0:
        return [
            f"trainer.loss.constant_length is {config.constant_length}: "
            f"trainer.loss.aggregation {config.aggregation} does not read it; give 0, or constant"
        ]
    return []
