"""A whole run without processes: the real controller, router and rollouts over simulated parts."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.support.simulated_faults import Fate, Undisturbed
from tests.support.simulated_parts import (
    ENVIRONMENTS,
    Habits,
    Memory,
    SimCurriculum,
    SimDataset,
    SimTeacher,
)
from tests.support.simulated_replica import SimReplica
from tests.support.simulated_trainer import SimTrainer
from torchtitan_rl.aio import background
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.distillation.scoring import Teachers
from torchtitan_rl.failures import Failure
from torchtitan_rl.observability.engine import EngineSampler
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.config import CheckpointConfig, EvaluationConfig, ScheduleConfig
from torchtitan_rl.orchestration.controller import Controller
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.orchestration.run_state import Claim, Parts, Unshared
from torchtitan_rl.orchestration.taken_steps import TakenSteps
from torchtitan_rl.orchestration.trainer_restarts import RestartedTrainer
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.rubric import Rubric
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.rollout.tree import RolloutEnv
from torchtitan_rl.routing.restarts import ReplicaRestarts
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.types import Completion, GenerationRequest, Problem
from torchtitan_rl.weights.config import WeightSyncConfig
from torchtitan_rl.weights.distribution import WeightDistribution


@dataclass(frozen=True, kw_only=True)
class Plan(Habits):
    """One simulated run."""

    num_steps: int = 6
    groups_per_step: int = 3
    group_size: int = 2
    staleness: int = 0
    window: float = 0.0
    during_step: str = "running"
    zero_variance: str = "train"
    credit: str = "outcome"
    advantage: str = "mean"
    replicas: int = 2
    train_s: float = 1.0
    order: str = "together"
    validate_every: int = 0
    evaluation_problems: int = 0
    reserves: bool = False  # the last replica, for evaluation
    restarts: int = 0  # of a replica that is lost, in a row
    restart_s: float = 20.0
    trainer_restarts: int = 0  # without a step between
    checkpoint_every: int = 0
    seed: int = 0
    chance: int = 0  # of delays and failures; the seed of everything that may not matter
    is_even: bool = False  # all delays are alike, so that much happens in the same moment
    max_empty_batches: int = 1000
    max_wait_s: float = 100_000.0
    mode: str = "hot_swap"
    env_kind: str = "replays"
    spare_turns: int = 0  # that rollouts may take and environments do not
    problems: int = 7
    adapts: bool = False  # the dataset, to what came of its problems
    token_s: float = 0.1
    max_tokens: int = 12
    checkpoint_s: float = 0.0  # writing one
    request_timeout_s: float = 5_000.0
    sync_timeout_s: float = 300.0
    rollout_timeout_s: float = 2_000.0
    env_timeout_s: float = 100.0
    trainer_timeout_s: float = 1_000.0
    max_rollouts: int | None = None  # at once; None: as the replicas' caches allow
    cache_tokens: int = 1 << 20  # of a replica
    teacher_s: float | None = None  # it takes to score a rollout; None: no teacher
    checks_idleness: bool = False  # of replicas, in the steps of a run that aborts its groups


class Simulation:
    """A controller with all its parts in reach. Make it on the loop that runs it."""

    def __init__(
        self,
        plan: Plan,
        root: Path,
        *,
        fate: Fate | None = None,
        recorder: Recorder | None = None,
        rubric: Rubric | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.plan = plan
        self.chance = chance = (_Even if plan.is_even else random.Random)(plan.chance)
        self.fate = fate = fate or Undisturbed()
        self._first_trainer = SimTrainer(
            chance=chance,
            step_s=plan.train_s,
            shares=plan.during_step == "asleep",
            write_s=plan.checkpoint_s,
            timeout_s=plan.trainer_timeout_s,
            waits_alone=plan.checks_idleness and plan.during_step == "aborted",
            cuts_tokens=True,
            fate=fate,
        )
        self.weights = WeightDistribution({}, fan_out=0)
        self.restarted: RestartedTrainer | None = None
        if plan.trainer_restarts:
            self.restarted = RestartedTrainer(
                self._first_trainer,
                self._start_trainer,
                weights=self.weights,
                steps=TakenSteps(root / "steps"),
                max_restarts=plan.trainer_restarts,
                check=lambda: None,
                is_offloaded=plan.during_step == "asleep",
                say=lambda line: self.said.append(line),
                on_failure=lambda failure: self.failures.append(failure),
            )
        self.restarts: ReplicaRestarts | None = None
        self._num_named = plan.replicas
        self.said: list[str] = []
        self.failures: list[Failure] = []
        self.replicas = [self._replica(f"r{i}") for i in range(plan.replicas)]
        self.reserved = [self.replicas[-1].name] if plan.reserves else []
        self.ledger = TokenLedger()
        self.router = GeneratorRouter(
            self.replicas,
            on_ended=self.on_ended,
            request_timeout_s=plan.request_timeout_s,
            sync_timeout_s=plan.sync_timeout_s,
            reserved=self.reserved,
            keeps_requests=True,
        )
        self.recorder = recorder or Memory()
        self.answered: list[Completion] = []  # by the environments: finished turns
        self.dataset = (SimCurriculum if plan.adapts else SimDataset)(plan.problems, fate)
        self.config = run_config(plan)
        self.places = Places(
            plan.max_rollouts, at_first=8, num_replicas=plan.replicas - len(self.reserved)
        )
        self.rollouter = Rollouter(
            generate=self.router.generate,
            environment=lambda problem: self.environment(problem),
            config=self.config.rollout,
            rubric=rubric,
            active_time=self.router.active_time,
            places=self.places,
        )
        is_taught = plan.teacher_s is not None
        teacher = TeacherConfig(url="sim" if is_taught else "")
        self.batcher = EpisodeBatcher(config=self.config.rollout, row_len=256, teacher=teacher)
        self.teacher = SimTeacher(chance, plan.teacher_s or 0.0, fate, timeout_s=teacher.timeout_s)
        self.checkpoints = CheckpointDirectory(root / "checkpoints")
        self.controller = Controller(
            self.config,
            Parts(
                dataset=self.dataset,
                evaluation_problems=[
                    Problem(problem_id=f"v{i}", data={"seed": i})
                    for i in range(plan.evaluation_problems)
                ],
                rollouter=self.rollouter,
                batcher=self.batcher,
                trainer=self.restarted or self.trainer,
                router=self.router,
                recorder=self.recorder,
                checkpoints=self.checkpoints,
                journal=Journal(root / JOURNAL),
                ledger=self.ledger,
                claim=claim or Unshared(),
                teachers=Teachers({"sim": self.teacher}, lambda _: "sim", vocab_size=1 << 17)
                if is_taught
                else None,
            ),
        )

    async def run(self, *, resume: bool = False) -> None:
        found = self.checkpoints.choose(lambda _: None, checksums=True) if resume else None
        try:
            await self.train(resume_from=found)
            await self.trainer.export_hf(self.checkpoints.path(0))
        finally:
            await self.close_trainer()
            assert not self.trainer.complaints
            assert not any(record.unaccounted for record in self.recorder.accounts)

    async def train(self, *, resume_from: NewestCheckpoint | None) -> None:
        await self.controller.run(resume_from=resume_from)

    def environment(self, problem: Problem) -> RolloutEnv:
        """Make the environment of a rollout."""
        make = ENVIRONMENTS[self.plan.env_kind]
        return make(problem, self.plan, self.chance, self.answered, self.fate)

    def on_ended(self, request: GenerationRequest, done: Completion, is_given: bool) -> None:
        self.ledger.on_ended(request, done, is_given)

    @property
    def trainer(self) -> SimTrainer:
        """The one that runs now."""
        trainer = self._first_trainer
        while trainer.successor is not None:
            trainer = trainer.successor
        return trainer

    async def _start_trainer(self) -> SimTrainer:
        await asyncio.sleep(self.plan.restart_s)
        return self.trainer.started_again()

    async def close_trainer(self) -> None:
        if self.restarted is not None:
            await self.restarted.close()
        await self.trainer.close()

    def restarting(self) -> ReplicaRestarts:
        """Starts replicas again while its ``async with`` is open."""
        self.restarts = ReplicaRestarts(
            self.router,
            self._start_again,
            max_restarts=self.plan.restarts,
            say=lambda line: None,
            reserved=self.reserved,
            shares_devices=self.plan.during_step == "asleep",
        )
        return self.restarts

    async def scale(self, number: int) -> str:
        """As ``torchtitan-rl scale`` does, while `restarting` is open."""
        assert self.restarts is not None
        return await self.restarts.scale(number, self._name_more)

    def _name_more(self, missing: int) -> list[str]:
        first, self._num_named = self._num_named, self._num_named + missing
        return [f"r{index}" for index in range(first, self._num_named)]

    def alongside(self) -> tuple[AbstractAsyncContextManager[object], ...]:
        """What a process of a run does next to its controller."""
        return self.restarting(), background(self.follow_caches())

    async def follow_caches(self) -> None:
        """Adapt the number of rollouts to the replicas' caches, until cancelled."""
        sampler = EngineSampler(self.router.stats, interval_s=2.0)
        sampler.on_reading = lambda stats: self.places.observe(stats, self.router.unreserved())
        await sampler.run()

    async def _start_again(self, lost: str, name: str) -> SimReplica:
        await asyncio.sleep(self.plan.restart_s)
        self.replicas.append(self._replica(name))
        return self.replicas[-1]

    def _replica(self, name: str) -> SimReplica:
        return SimReplica(
            name,
            chance=self.chance,
            trainer=self.trainer,
            token_s=self.plan.token_s,
            cache_tokens=self.plan.cache_tokens,
            fate=self.fate,
            weights=self.weights,
        )

    @property
    def requested(self) -> list[str]:
        """Ids of all requests that replicas were given, in order."""
        return [name for replica in self.replicas for name in replica.requested]


class _Even(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def run_config(plan: Plan) -> RunConfig:
    """What a user would write. It is not checked."""
    is_colocated = plan.during_step == "asleep"
    return RunConfig(
        policy=PolicyConfig(checkpoint="simulated"),
        task=Task(),
        seed=plan.seed,
        num_steps=plan.num_steps,
        placement="colocated" if is_colocated else "separate",
        rollout=RolloutConfig(
            groups_per_step=plan.groups_per_step,
            group_size=plan.group_size,
            max_turns=plan.turns + plan.spare_turns,
            max_total_tokens=200,
            step_timeout_s=plan.env_timeout_s,
            rollout_timeout_s=plan.rollout_timeout_s,
            credit=plan.credit,
            advantage=plan.advantage,
            sampling=SamplingConfig(max_tokens_per_turn=plan.max_tokens, top_p=0.9),
        ),
        schedule=ScheduleConfig(
            staleness=plan.staleness,
            max_overtaking_share=plan.window,
            during_training="pause" if plan.during_step == "aborted" else "continue",
            zero_variance=plan.zero_variance,
            max_empty_batches=plan.max_empty_batches,
            report_wait_s=1_000.0,
            max_wait_s=plan.max_wait_s,
        ),
        weight_sync=WeightSyncConfig(mode=plan.mode, order=plan.order),
        trainer=TrainerConfig(step_timeout_s=plan.trainer_timeout_s),
        evaluation=EvaluationConfig(every=plan.validate_every),
        checkpoint=CheckpointConfig(every=plan.checkpoint_every),
    )
