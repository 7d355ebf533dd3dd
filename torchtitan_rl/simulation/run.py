"""Simulates a training run: the real controller, buffer, router, rollouts and restarts on a virtual
clock, over replicas, a trainer and environments whose times come from a `Profile`.

The trainer's time is that of the profile per sampled token, divided by its ranks; its batches are
not packed. There are no evaluations and no checkpoints, and no bytes are written for turns and for
the tokens that replicas report, unless `simulate` is called with ``reports``.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from torchtitan_rl.aio import background
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.failures import Failure
from torchtitan_rl.observability.engine import GENERATOR_IDLE, EngineSampler, idle_share
from torchtitan_rl.observability.metrics import staleness_metrics
from torchtitan_rl.orchestration.batching import Batched
from torchtitan_rl.orchestration.controller import Controller
from torchtitan_rl.orchestration.fixed_policy import FixedPolicy
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    HeldOutRecord,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.orchestration.run_state import Parts
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.places import Places
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.restarts import ReplicaRestarts
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.simulation.clock import Load, run_virtually
from torchtitan_rl.simulation.profile import Profile, RecordedTurns
from torchtitan_rl.simulation.replica import SimulatedReplica, Speeds, zeros
from torchtitan_rl.training.batch import Examples, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Completion, Problem, RolloutGroup, RolloutStatus
from torchtitan_rl.weights.distribution import SharedMemoryHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulated run would be like, over its steady steps: without the first ``staleness`` +
    1 steps, in which the buffer fills, and the last ones, in which it empties.

    ``staleness``: share of the trained tokens by their age in versions. ``groups_running``,
    ``groups_finished``: means, at the time when a batch was taken; ``place_s``: mean wait of a
    rollout for its place. ``lost_tokens`` were sampled again; ``replica_down_s`` are seconds of all
    replicas together. ``loop_cpu_s`` is the CPU time of the controller's event loop, the simulated
    parts included, ``loop_cpu_us`` that of each request, and ``loop_busy_share`` the share of the
    simulated time. ``late_share``: share of the time in which the loop would lag over 100 ms.
    """

    replicas: int
    trainer_ranks: int
    steps: int
    groups: int
    requests: int
    tokens_per_s: float
    steps_per_hour: float
    trainer_idle_share: float
    generator_idle_share: float
    staleness: Mapping[str, float]
    groups_running: float
    groups_finished: float
    place_s: float
    losses: int
    lost_tokens: int
    replica_down_s: float
    simulated_s: float
    loop_cpu_s: float
    loop_cpu_us: float
    loop_busy_share: float
    loop_lag_max_s: float
    late_share: float
    wall_s: float
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def simulation_errors(config: RunConfig) -> list[str]:
    """What of a configuration cannot be simulated."""
    errors = []
    if config.placement == "colocated":
        errors.append("placement is colocated: only separate devices are simulated; give separate")
    if config.mode != "both":
        errors.append(f"mode is {config.mode}: only runs that generate and train are simulated")
    if config.generator.endpoint:
        errors.append("generator.endpoint: engines of another server are not simulated")
    if config.teacher.is_on:
        errors.append("teacher: teachers are not simulated; leave it out")
    return errors


def simulate(
    config: RunConfig,
    profile: Profile,
    *,
    mtbf_hours: float | None = None,
    deaths: Sequence[tuple[float, int]] = (),
    reports: bool = False,
) -> Simulated:
    """Raises ConfigError (see `simulation_errors`), or TorchtitanRLError if the run would fail.

    Args:
        mtbf_hours: mean time between two failures of one replica; None: there are none.
        deaths: further failures: seconds from the start, and the number of the replica.
        reports: also simulate replicas' reports of their progress, and write the journal.
    """
    if errors := simulation_errors(config):
        raise ConfigError(errors)
    config = replace(
        config,
        evaluation=replace(config.evaluation, num_problems=0),
        checkpoint=replace(config.checkpoint, every=0),
    )
    load = Load()
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(config, profile, Path(folder), load=load, mtbf_hours=mtbf_hours, reports=reports)
        started_s = time.perf_counter()
        run_virtually(run.run(deaths), load=load)
        return run.result(time.perf_counter() - started_s)


class _Run:
    def __init__(
        self,
        config: RunConfig,
        profile: Profile,
        root: Path,
        *,
        load: Load,
        mtbf_hours: float | None,
        reports: bool,
    ) -> None:
        self._config, self._profile, self._root = config, profile, root
        self._mtbf_s = None if mtbf_hours is None else 3600 * mtbf_hours
        self._reports = reports
        self._detect_s = profile.losses.detect_s
        self._chance = random.Random(config.seed)
        self._lives = random.Random(f"{config.seed} lives")  # a failure draws no other rollouts
        decoding, syncs = profile.decoding, profile.syncs
        self._speeds = Speeds(
            prefill_s=0.0,
            first_token_s=decoding.first_token_s,
            step_s=decoding.step_s,
            token_s=decoding.request_s,
            max_running=config.generator.max_running_requests or decoding.max_running,
            cache_tokens=decoding.kv_cache_tokens,
            stage_s=fmean(syncs.stage_s),
            pull_s=fmean(syncs.pull_s),
            stall_s=fmean(syncs.stall_s),
        )
        self._replicas: list[SimulatedReplica] = []
        self._failures: list[Failure] = []
        self._recorder = _Recorder(load)

    async def run(self, deaths: Sequence[tuple[float, int]]) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        replicas = [self._replica(f"replica{n}") for n in range(config.generator.replicas)]
        for at_s, number in deaths:
            loop.call_later(at_s, replicas[number].die, self._detect_s)
        ledger = TokenLedger()
        router = GeneratorRouter(
            replicas,
            on_ended=ledger.on_ended,
            request_timeout_s=config.request_timeout_s,
            sync_timeout_s=config.weight_sync.timeout_s,
            keeps_requests=True,
        )
        places = None
        if (limit := config.schedule.max_rollouts) != "all":
            places = Places(
                None if limit == "auto" else limit,
                at_first=max(1, self._speeds.max_running // 4),
                num_replicas=len(replicas),
            )
        engines = self._recorder.engines = EngineSampler(router.stats)
        if places is not None:
            engines.on_reading = lambda stats: places.observe(stats, router.unreserved())
        chance, groups = self._chance, self._profile.groups
        journal = (Journal if self._reports else _NoJournal)(self._root / JOURNAL)
        parts = Parts(
            dataset=_Dataset(len(groups), chance),
            evaluation_problems=(),
            rollouter=Rollouter(
                generate=router.generate,
                environment=lambda problem: _Environment(
                    chance.choice(groups[problem.data["group"]])
                ),
                config=config.rollout,
                active_time=router.active_time,
                num_replicas=lambda: router.num_unreserved,
                places=places,
            ),
            batcher=_count,
            trainer=_Trainer(self._profile, chance, config.trainer.world_size),
            router=router,
            recorder=self._recorder,
            checkpoints=CheckpointDirectory(self._root / "checkpoints"),
            journal=journal,
            ledger=ledger,
        )
        restarts = ReplicaRestarts(
            router,
            self._restart,
            max_restarts=config.generator.max_restarts,
            say=self._recorder.say,
            on_failure=self._failures.append,
        )
        async with restarts, background(engines.run()):
            await Controller(config, parts).run(resume_from=None)

    def result(self, wall_s: float) -> Simulated:
        config = self._config
        every = self._recorder.rows
        edge = config.schedule.staleness + 1
        rows = every[edge:-edge] or every[1:] or every
        seconds = sum(row.wall_s for row in rows)
        requests, cpu_s = sum(row.requests for row in rows), sum(row.load.cpu_s for row in rows)
        ages: Counter[str] = Counter()
        for row in rows:
            ages.update({age: share * row.tokens for age, share in row.ages.items()})
        return Simulated(
            replicas=config.generator.replicas,
            trainer_ranks=config.trainer.world_size,
            steps=len(rows),
            groups=sum(row.groups for row in every),
            requests=sum(row.requests for row in every),
            tokens_per_s=sum(row.tokens for row in rows) / seconds,
            steps_per_hour=3600 * len(rows) / seconds,
            trainer_idle_share=idle_share(wall_s=seconds, busy_s=sum(row.busy_s for row in rows)),
            generator_idle_share=sum(row.idle_share * row.wall_s for row in rows) / seconds,
            staleness={age: n / ages.total() for age, n in sorted(ages.items())},
            groups_running=fmean(row.running for row in rows),
            groups_finished=fmean(row.finished for row in rows),
            place_s=fmean(row.place_s for row in rows),
            losses=len(self._failures),
            lost_tokens=sum(replica.lost_tokens for replica in self._replicas),
            replica_down_s=sum(one.serve_s or 0.0 for one in self._failures),
            simulated_s=sum(row.wall_s for row in every),
            loop_cpu_s=sum(row.load.cpu_s for row in every),
            loop_cpu_us=1e6 * cpu_s / max(1, requests),
            loop_busy_share=cpu_s / seconds,
            loop_lag_max_s=max(row.load.max_lag_s for row in rows),
            late_share=sum(row.load.late_s for row in rows) / seconds,
            wall_s=wall_s,
            notes=tuple(self._recorder.notes),
        )

    def _replica(self, name: str) -> SimulatedReplica:
        replica = SimulatedReplica(name, self._speeds, reports=self._reports)
        self._replicas.append(replica)
        if self._mtbf_s is not None:
            life_s, detect_s = self._lives.expovariate(1 / self._mtbf_s), self._detect_s
            asyncio.get_running_loop().call_later(life_s, replica.die, detect_s)
        return replica

    async def _restart(self, lost: str, name: str) -> SimulatedReplica:
        await asyncio.sleep(self._profile.losses.restart_s)
        return self._replica(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    wall_s: float
    busy_s: float
    idle_share: float  # of the replicas
    groups: int
    requests: int
    tokens: int
    ages: Mapping[str, float]
    running: int
    finished: int
    place_s: float
    load: Load


class _Recorder:
    """Keeps a row of each step, without its groups, and the first of the messages."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self.engines: EngineSampler | None = None
        self.rows: list[_Row] = []
        self.notes: list[str] = []

    def record_step(self, record: StepRecord) -> None:
        assert self.engines is not None
        rollouts = [rollout for group in record.groups for rollout in group.rollouts]
        ages = staleness_metrics(record.groups, trained_version=record.version - 1)
        buffer = record.buffer
        self.rows.append(
            _Row(
                wall_s=record.wall_s,
                busy_s=record.trainer_busy_s or 0.0,
                idle_share=self.engines.take().get(GENERATOR_IDLE, 0.0),
                groups=len(record.groups),
                requests=sum(len(rollout.turns) for rollout in rollouts),
                tokens=record.tokens.generated,
                ages={
                    name.removeprefix(_AGE): share
                    for name, share in ages.items()
                    if name.startswith(_AGE)
                },
                running=0 if buffer is None else buffer.running,
                finished=0 if buffer is None else buffer.finished,
                place_s=fmean(rollout.phase_s.get("place", 0.0) for rollout in rollouts),
                load=self._load.take(),
            )
        )

    def record_evaluation(self, record: EvaluationRecord) -> None: ...

    def record_held_out(self, record: HeldOutRecord) -> None: ...

    def record_account(self, record: AccountRecord) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, message: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(message)


_AGE = "policy/age_share/"
_MAX_NOTES = 20


class _Dataset:
    """Problems without end; each has the number of a group of the profile."""

    epoch = 0

    def __init__(self, num_groups: int, chance: random.Random) -> None:
        self._num_groups, self._chance = num_groups, chance
        self._position = 0

    def next(self) -> Problem:
        self._position += 1
        number = self._chance.randrange(self._num_groups)
        return Problem(problem_id=str(self._position), data={"group": number})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


class _Environment:
    """Takes the turns of a recorded rollout."""

    def __init__(self, recorded: RecordedTurns) -> None:
        self._recorded = recorded
        self._turn = 0

    async def reset(self) -> Observation:
        await asyncio.sleep(self._recorded.environment_s[0])
        return self._observation()

    async def step(self, completion: Completion) -> Observation | Terminal:
        recorded = self._recorded
        self._turn += 1
        await asyncio.sleep(recorded.environment_s[self._turn])
        if self._turn < len(recorded.sampled_tokens):
            return self._observation()
        if recorded.cause:
            raise RuntimeError(f"as recorded: {recorded.cause}")
        return Terminal(reward=recorded.reward)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=self._recorded.reward)

    async def close(self) -> None: ...

    def _observation(self) -> Observation:
        recorded, turn = self._recorded, self._turn
        return Observation(
            prompt_token_ids=zeros(max(1, recorded.prompt_tokens[turn])),
            max_tokens=max(1, recorded.sampled_tokens[turn]),
        )


class _Trainer(FixedPolicy):
    """A `Trainer` of ``ranks`` ranks that needs the profile's seconds per token."""

    def __init__(self, profile: Profile, chance: random.Random, ranks: int) -> None:
        self._profile, self._chance = profile, chance
        self._speed = ranks / profile.training.ranks
        self._version = 0

    async def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None = None, *, examples: Examples = None
    ) -> StepOutput:
        token_s = self._chance.choice(self._profile.training.token_s)
        await asyncio.sleep(token_s * int(batch.episode_lengths.sum()) / self._speed)
        self._version += 1
        return StepOutput(version=self._version, metrics={"loss": 0.0})

    async def publish(self, keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
        await asyncio.sleep(self._chance.choice(self._profile.training.publish_s))
        return SharedMemoryHandle(version=self._version, path="", num_bytes=0)


class _NoJournal(Journal):
    def append(self, recorded: RecordedRollout, first: int = -1) -> None:
        return


def _count(groups: Sequence[RolloutGroup]) -> Batched:
    """Count tokens as `EpisodeBatcher` does. The batch has one array entry for all tokens."""
    discarded: Counter[str] = Counter()
    trained = 0
    for group in groups:
        for rollout in group.rollouts:
            if rollout.status.is_failure:
                discarded[rollout.status.value] += rollout.num_sampled_tokens
            else:
                trained += rollout.num_sampled_tokens
    counts = TokenCounts(
        generated=trained + discarded.total(), trained=trained, discarded=+discarded
    )
    one = np.ones(1, dtype=np.float32)
    batch = TrainingBatch(
        episode_lengths=np.array([trained]),
        token_ids=one.astype(np.int64),
        loss_mask=one.astype(np.bool_),
        logprobs=one,
        advantages=one,
        versions=one.astype(np.int64),
        temperature=1.0,
        groups=one.astype(np.int64),
    )
    return Batched(batch if trained else None, counts, ())
