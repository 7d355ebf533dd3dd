"""One run of the real controller on the long-tailed task, with real replicas.

Controller, work buffer, rollouter, batcher, router and publisher are those of a training run, and
are composed in the same way. The replicas (vLLM, in processes of their own) and the weights that
they pull are real too. Only the trainer is simulated: it takes the batch, waits for a given time,
and publishes the unchanged weights as the next version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchmarks.long_tail_parts import StandInTrainer
from benchmarks.long_tail_work import LongTail, LongTailTask, with_lengths
from tests.support.simulated_parts import Memory
from torchtitan_rl.config.plan import ProcessGroup, replica_name
from torchtitan_rl.config.run import PolicyConfig, RunConfig
from torchtitan_rl.generation.commands import Pull, ReadStats
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.config import CheckpointConfig, EvaluationConfig, ScheduleConfig
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.controller import Controller
from torchtitan_rl.orchestration.journal import Journal
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import StepRecord
from torchtitan_rl.orchestration.run_state import Parts
from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.types import GenerationRequest, SamplingParams
from torchtitan_rl.weights.config import WeightSyncConfig

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.generator import MonarchReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all modes share. ``cores``: one core for each replica; empty: replicas are
    not pinned."""

    policy: Path
    tail: LongTail
    folder: Path
    train_s: float
    replicas: int = 2
    max_running: int = 128
    kv_cache_bytes: int = 256 << 20
    keeps_kv: bool = False  # running requests keep the KV of older weights
    device: Literal["cpu", "cuda"] = "cpu"
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """The result of `run_mode`. ``mean_batch``: mean number of tokens in an engine step, over the
    whole run."""

    steps: tuple[StepRecord, ...]
    mean_batch: float


class _Log(Memory):
    """Records the steps in memory, and stops the controller after a number of steps."""

    controller: Controller

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self._num_steps = num_steps

    def record_step(self, record: StepRecord) -> None:
        super().record_step(record)
        if record.step == self._num_steps:
            self.controller.request_stop()


@asynccontextmanager
async def running_replicas(setting: Setting) -> AsyncIterator[Sequence[MonarchReplica]]:
    """Start the replicas, which run while the context is open."""
    from torchtitan_rl.backends.monarch.generator import spawn_replica
    from torchtitan_rl.backends.monarch.runtime import all_of, supervise
    from torchtitan_rl.backends.specs import GeneratorSpec

    supervise()
    config = run_config(setting, ScheduleConfig(), num_steps=1)
    replicas: list[MonarchReplica] = []
    try:
        for index in range(setting.replicas):
            group = ProcessGroup(
                name=replica_name(index),
                ranks=1,
                threads=1,
                devices=(str(index),) if setting.device == "cuda" else (),
                cores=setting.cores[index : index + 1],
            )
            spec = GeneratorSpec(
                name=group.name,
                model=setting.policy,
                device=setting.device,
                dtype="bfloat16",
                seed=index,
                generator=config.generator,
                weight_sync=config.weight_sync,
                log_dir=setting.folder,
                trace_dir=None,
            )
            replicas.append(await spawn_replica(group, spec))
        await all_of(*(one.peer.start() for one in replicas))
        yield replicas
    finally:
        await asyncio.gather(*(one.close() for one in replicas))


async def run_mode(
    setting: Setting,
    schedule: ScheduleConfig,
    replicas: Sequence[MonarchReplica],
    *,
    name: str,
    num_steps: int,
) -> FinishedRun:
    """Run ``num_steps`` steps from version 0. Afterwards the replicas have no requests."""
    # With these further steps, the run generates as much at its last counted step as in the middle
    # of a long run.
    longer = schedule.staleness + 1 if schedule.staleness else 0
    config = run_config(setting, schedule, num_steps=num_steps + longer)
    folder = setting.folder / name
    folder.mkdir()
    trainer = StandInTrainer(setting.policy, train_s=setting.train_s, folder=setting.folder)
    try:
        first = await trainer.publish()
        for replica in replicas:  # they still hold the last version of the previous run
            await replica.stage(first)
            await replica.execute(Pull(first.version))
        log = _Log(num_steps)
        controller = log.controller = _controller(config, replicas, trainer, log, folder)
        before = [await replica.execute(ReadStats()) for replica in replicas]
        with suppress(StopRequested):
            await controller.run(resume_from=None)
        after = [await replica.execute(ReadStats()) for replica in replicas]
    finally:
        await trainer.close()
    await _until_idle(replicas)
    pairs = list(zip(before, after, strict=True))
    engine_steps = sum(new.steps - old.steps for old, new in pairs)
    tokens = sum(new.generated_tokens - old.generated_tokens for old, new in pairs)
    return FinishedRun(steps=tuple(log.steps), mean_batch=tokens / engine_steps)


async def run_limit(
    setting: Setting, replicas: Sequence[MonarchReplica], *, num_groups: int
) -> float:
    """Return the seconds that the same answers take if all are known in advance, the longest start
    first, and the weights do not change. No schedule can keep the engines busier."""
    tail, router = setting.tail, GeneratorRouter(replicas)
    dataset = LongTailTask(tail=tail).dataset("train", seed=0)
    requests = [
        GenerationRequest(
            request_id=f"limit/{problem.problem_id}/r{sibling}",
            prompt_token_ids=problem.data["prompt"],
            sampling=SamplingParams(max_tokens=length, ignore_eos=True, seed=sibling),
            session_id=f"limit/{problem.problem_id}/r{sibling}",
        )
        for problem in (dataset.next() for _ in range(num_groups))
        for sibling, length in enumerate(tail.lengths(int(problem.problem_id)))
    ]
    requests.sort(key=lambda request: request.sampling.max_tokens, reverse=True)
    started_s = time.monotonic()
    await asyncio.gather(*(router.generate(request) for request in requests))
    return time.monotonic() - started_s


def run_config(setting: Setting, schedule: ScheduleConfig, *, num_steps: int) -> RunConfig:
    """Return the configuration that a user would write for this run."""
    tail = setting.tail
    longest = tail.prompt + tail.longest
    return RunConfig(
        policy=PolicyConfig(checkpoint=str(setting.policy)),
        task=LongTailTask(tail=tail),
        num_steps=num_steps,
        rollout=RolloutConfig(
            groups_per_step=tail.groups_per_step,
            group_size=tail.group_size,
            max_turns=1,
            max_total_tokens=longest,
            sampling=SamplingConfig(max_tokens_per_turn=tail.longest),
        ),
        schedule=schedule,
        generator=GeneratorConfig(
            replicas=setting.replicas,
            max_model_len=longest,
            max_running_requests=setting.max_running,
            kv_cache_bytes=setting.kv_cache_bytes,
        ),
        weight_sync=WeightSyncConfig(recompute_running_on_pull=not setting.keeps_kv),
        trainer=TrainerConfig(max_episode_tokens=longest, max_tokens_per_microbatch=8 * longest),
        evaluation=EvaluationConfig(every=0, num_problems=0),
        checkpoint=CheckpointConfig(every=0),
    )


def _controller(
    config: RunConfig,
    replicas: Sequence[MonarchReplica],
    trainer: StandInTrainer,
    log: Memory,
    folder: Path,
) -> Controller:
    """Make the controller as `torchtitan_rl.commands.train` does."""
    task, rollout = config.task, config.rollout
    assert isinstance(task, LongTailTask)
    ledger = TokenLedger()
    router = GeneratorRouter(replicas, on_ended=ledger.on_ended)
    return Controller(
        config,
        Parts(
            dataset=task.dataset("train", seed=0),
            evaluation_problems=(),
            rollouter=Rollouter(
                generate=with_lengths(router.generate, task.tail),
                environment=lambda problem: task.environment(
                    problem, tokenizer=None, limits=rollout
                ),
                config=rollout,
                num_replicas=lambda: router.num_unreserved,
            ),
            batcher=EpisodeBatcher(
                config=rollout,
                row_len=config.trainer.max_episode_tokens,
            ),
            trainer=trainer,
            router=router,
            recorder=log,
            checkpoints=CheckpointDirectory(folder / "checkpoints"),
            journal=Journal(folder / "journal.sqlite"),
            ledger=ledger,
        ),
    )


async def _until_idle(replicas: Sequence[MonarchReplica], *, timeout_s: float = 30.0) -> None:
    """Wait until no engine has a request: cancelled requests leave their engines a moment later."""
    deadline_s = time.monotonic() + timeout_s
    for replica in replicas:
        while (stats := await replica.execute(ReadStats())).running + stats.waiting:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{replica.name} still has {stats.running} requests")
            await asyncio.sleep(0.01)
