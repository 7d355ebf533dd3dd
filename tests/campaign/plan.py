"""What one case of the campaign runs: everything follows from its seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.support.simulated_faults import Fate
from tests.support.simulation import Plan, Simulation, run_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score
from torchtitan_rl.types import Problem, Rollout


@dataclass(frozen=True, kw_only=True)
class CampaignPlan(Plan):
    """``rubric``: none, alone (each rollout by itself) or group. ``lives`` are disturbed ones; an
    undisturbed one follows."""

    rubric: str = "none"
    lives: int = 1
    checks_idleness: bool = True

    @property
    def buffer(self) -> int:
        overtakers = int(self.window * self.groups_per_step)
        if self.staleness == 0:
            return self.groups_per_step + overtakers
        return (self.staleness + 1) * self.groups_per_step - overtakers

    @property
    def is_determined(self) -> bool:
        """At S = 0 the data are the same, whatever is stopped, killed or slow. Where groups are
        skipped, a rollout that runs out of time decides which: no row tells of it."""
        skips_by_time = self.zero_variance == "skip" and self.rollout_timeout_s < 100.0
        return (
            self.staleness == 0
            and int(self.window * self.groups_per_step) == 0
            and self.zero_variance != "resample"
            and not skips_by_time
        )

    def config(self, root: Path) -> RunConfig:
        """Of the run whose folder is ``root``."""
        return replace(run_config(self), output_dir=root.parent, name=root.name)

    def simulation(self, root: Path, fate: Fate, recorder: Recorder) -> Simulation:
        return self.make(root, _rubric(self, fate), fate, recorder)

    def make(self, root: Path, rubric: Rubric | None, fate: Fate, recorder: Recorder) -> Simulation:
        return Simulation(self, root, fate=fate, recorder=recorder, rubric=rubric)

    def describe(self) -> str:
        """What differs from the usual."""
        usual = Plan()
        differing = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(usual, field.name, None)
        ]
        return ", ".join(differing)


def draw(seed: int) -> CampaignPlan:
    rng = random.Random(f"plan {seed}")
    staleness = rng.choice([0, 0, 1, 1, 2, 3])
    placement = rng.choice(["running", "running", "aborted", "asleep"])
    replicas = rng.randint(1, 3)
    validates = rng.random() < 0.4
    hurries = rng.random() < 0.25  # time-outs that strike
    zero_variance = rng.choice(["train", "train", "skip", "resample"])
    others = random.Random(f"restarts {seed}")
    restarts = 0 if placement == "asleep" else others.choice([0, 0, 1, 2])
    told_early = staleness == 0 and zero_variance == "skip"
    adapts = random.Random(f"adapts {seed}").random() < (0.8 if told_early else 0.5)
    limits = random.Random(f"places {seed}")
    plan = CampaignPlan(
        max_rollouts=limits.choice([None, None, 1, 3]),
        cache_tokens=limits.choice([40, 400]),  # some or many rollouts fit
        num_steps=rng.randint(2, 5),
        groups_per_step=rng.randint(1, 3),
        group_size=rng.choice([1, 2, 2, 3]) if zero_variance == "train" else 2,
        staleness=staleness,
        window=rng.choice([0.0, 0.0, 0.34, 0.5]),
        turns=rng.randint(1, 3),
        during_step=placement,
        zero_variance=zero_variance,
        reward_levels=rng.choice([2, 3, 5]),
        replicas=replicas,
        restarts=restarts,
        reserves=replicas > 1 and validates and rng.random() < 0.5,
        order=rng.choice(["together", "one_by_one"]),
        mode=rng.choice(["hot_swap", "hot_swap", "drain"]),
        validate_every=rng.randint(0, 2) if validates else 0,
        evaluation_problems=rng.randint(1, 2) if validates else 0,
        checkpoint_every=rng.choice([0, 1, 1, 2, 3]),
        train_s=rng.choice([0.0, 1.0, 5.0]),
        checkpoint_s=rng.choice([0.0, 0.5, 5.0]),
        token_s=rng.choice([0.1, 0.3]),
        max_tokens=rng.choice([6, 10]),
        env_delay_s=rng.choice([0.0, 0.5, 2.0]),
        env_kind=rng.choice(["replays", "saved", "forgetful", "tree", "tree", "forgetful tree"]),
        problems=rng.choice([7, 12]),
        adapts=adapts,
        request_timeout_s=rng.choice([2.0, 8.0]) if hurries else 600.0,
        rollout_timeout_s=rng.choice([2.0, 5.0]) if hurries else 400.0,
        env_timeout_s=rng.choice([0.5, 1.5]) if hurries else 60.0,
        teacher_s=random.Random(f"teacher {seed}").choice([None, None, None, 0.5, 3.0]),
        sync_timeout_s=30.0,
        trainer_timeout_s=400.0,
        max_wait_s=2_000.0,
        rubric=rng.choice(["none", "none", "alone", "group"]),
        seed=rng.randrange(1000),
        chance=rng.randrange(10**6),
        lives=rng.choice([1, 1, 2, 2, 3]),
    )
    is_paired = random.Random(f"pairs {seed}").random() < 0.25
    if is_paired and plan.group_size > 1 and plan.teacher_s is None:
        return replace(plan, advantage="pair")
    return plan


def draw_restarts(seed: int) -> CampaignPlan:
    """Replicas and trainers are lost and started again soon: replicas as those with adapters are,
    from the base, with the newest published version."""
    rng = random.Random(f"restart times {seed}")
    plan = draw(seed)
    return replace(
        plan,
        num_steps=plan.num_steps + 2,
        restarts=2,
        restart_s=rng.choice([0.5, 3.0, 20.0]),
        trainer_restarts=rng.choice([0, 1, 2, 3]),
    )


def draw_elastic(seed: int) -> CampaignPlan:
    """As `draw_restarts`, of runs whose number of replicas may change."""
    plan = draw_restarts(seed)
    if plan.during_step == "asleep":
        plan = replace(plan, during_step="running")
    return replace(plan, restart_s=min(plan.restart_s, 3.0))


def _rubric(plan: CampaignPlan, fate: Fate) -> Rubric | None:
    async def reward(rollout: Rollout, problem: Problem) -> float:
        strike = fate.at("reward")
        if strike is not None and strike.action == "late":
            await asyncio.sleep(strike.seconds)
        if strike is not None and strike.action == "raise":
            raise RuntimeError("the reward failed as planned")
        if strike is not None and strike.action == "nonsense":
            return math.nan
        return rollout.reward or 0.0

    class GroupRubric(Rubric):
        async def score_group(self, rollouts: Any, problem: Problem) -> Sequence[Score]:
            return [Score(reward=await reward(rollout, problem)) for rollout in rollouts]

    functions = [RewardFunction(name="sum", function=reward)]
    match plan.rubric:
        case "alone":
            return Rubric(functions, timeout_s=20.0)
        case "group":
            return GroupRubric(functions, timeout_s=20.0)
    return None
