"""The synchronous loop: problems, rollouts, episodes, batch, optimizer step, publish, pull.

Invariants: no token is trained on that was sampled under other weights than the current ones
(staleness 0); a step either happens wholly or leaves the dataset where it was; the state saved at
step k is all that is needed to go on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torchtitan_rl.errors import GenerationError, TorchtitanRLError, WeightSyncError
from torchtitan_rl.orchestration.records import (
    Recorder,
    StepRecord,
    TokenCounts,
    ValidationRecord,
)
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter, SyncMode, SyncReport
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import Problem, RolloutGroup

_T = TypeVar("_T")

_MAX_EMPTY_STEPS = 5


class StopRequested(TorchtitanRLError):
    """Somebody asked the run to stop; it did so in order and can be resumed."""


class GroupRunner(Protocol):
    """Rolls out one problem's siblings."""

    async def run_group(
        self, group_id: str, problem: Problem, *, size: int, seed: int, temperature: float
    ) -> RolloutGroup: ...


class Batcher(Protocol):
    """Groups in, packed rows out; None where there is nothing to train on."""

    def __call__(
        self, groups: Sequence[RolloutGroup]
    ) -> tuple[TrainingBatch | None, TokenCounts]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The controller's share of the configuration."""

    num_steps: int
    groups_per_step: int
    group_size: int
    temperature: float
    seed: int
    sync_mode: SyncMode
    validate_every: int
    validation_samples: int
    validation_temperature: float
    checkpoint_every: int
    checkpoints_kept: int


class SyncController:
    """Runs the loop to its end, to a stop request or to an error."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        dataset: Dataset,
        validation_problems: Sequence[Problem],
        rollouter: GroupRunner,
        batcher: Batcher,
        trainer: Trainer,
        router: GeneratorRouter,
        recorder: Recorder,
        checkpoints: CheckpointDirectory,
    ) -> None:
        self._settings = settings
        self._dataset = dataset
        self._validation_problems = tuple(validation_problems)
        self._rollouter = rollouter
        self._batcher = batcher
        self._trainer = trainer
        self._router = router
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._stop = asyncio.Event()
        self._step = 0
        self._version = 0
        self._saved_step: int | None = None
        self._validated_step: int | None = None
        self._empty_steps = 0
        self._lost_replicas: set[str] = set()

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._step

    def request_stop(self) -> None:
        """End in order: the rollouts that run are given up, an optimizer step is finished."""
        self._stop.set()

    async def run(self, *, resume: bool) -> None:
        """Run all steps that are left.

        Raises:
            StopRequested: `request_stop` was called; a checkpoint of the last step is written.
            DivergedError, TrainerLostError: the newest checkpoint is from before.
            GenerationError, WeightSyncError: no replica is left; a checkpoint is written.
        """
        await self._restore(resume=resume)
        try:
            while True:
                if self._validation_is_due():
                    await self._validate()
                if _is_due(self._step, self._settings.checkpoint_every):
                    await self._save()
                if self._step == self._settings.num_steps:
                    break
                await self._one_step()
            await self._save()
        except (StopRequested, GenerationError, WeightSyncError):
            await self._save()
            raise

    async def _restore(self, *, resume: bool) -> None:
        if not resume:
            return
        found = self._checkpoints.newest()
        for torn in found.passed_over:
            self._recorder.say(torn)
        newest = found.path
        if newest is None:
            return
        with self._recorder.phase("restore"):
            state = await self._trainer.load_checkpoint(newest)
            self._step, self._version = int(state["step"]), int(state["version"])
            self._saved_step, self._validated_step = self._step, state["validated_step"]
            self._dataset.load_state_dict(state["dataset"])
            if self._version > 0:
                handle = await self._trainer.publish()
                await self._router.sync_weights(handle, mode=self._settings.sync_mode)
        self._recorder.say(f"resumed after step {self._step} from {newest}")

    async def _one_step(self) -> None:
        position = self._dataset.state_dict()
        started = time.monotonic()
        try:
            with self._recorder.phase("rollout"):
                groups = await self._unless_stopped(self._roll_out())
        except StopRequested:
            self._dataset.load_state_dict(position)
            raise
        rolled_out = time.monotonic()
        with self._recorder.phase("train"):
            batch, tokens = await asyncio.to_thread(self._batcher, groups)
            output = await self._train(batch)
            self._step += 1
            self._version = output.version if output is not None else self._version
        trained = time.monotonic()
        sync, publish_s = None, 0.0
        if output is not None:
            with self._recorder.phase("sync"):
                sync, publish_s = await self._publish()
        self._recorder.record_step(
            StepRecord(
                step=self._step,
                version=self._version,
                groups=groups,
                tokens=tokens,
                trainer=output.metrics if output is not None else {},
                sync=sync,
                publish_s=publish_s,
                rollout_s=rolled_out - started,
                train_s=trained - rolled_out,
                sync_s=time.monotonic() - trained,
            )
        )

    async def _roll_out(self) -> tuple[RolloutGroup, ...]:
        async with asyncio.TaskGroup() as tasks:
            running = []
            for _ in range(self._settings.groups_per_step):
                problem = self._dataset.next()
                running.append(
                    tasks.create_task(
                        self._rollouter.run_group(
                            f"e{self._dataset.epoch}/{problem.problem_id}",
                            problem,
                            size=self._settings.group_size,
                            seed=self._settings.seed,
                            temperature=self._settings.temperature,
                        )
                    )
                )
        return tuple(task.result() for task in running)

    async def _train(self, batch: TrainingBatch | None) -> StepOutput | None:
        if batch is not None:
            self._empty_steps = 0
            if not batch.advantages.any():
                self._recorder.say(f"step {self._step + 1}: no group has rewards that differ")
            return await self._trainer.train_step(batch)
        self._router.require_live()
        self._empty_steps += 1
        self._recorder.say(f"step {self._step + 1} has no token to train on; its weights stay")
        if self._empty_steps >= _MAX_EMPTY_STEPS:
            raise TorchtitanRLError(
                f"{self._empty_steps} steps in a row had no token to train on; see the endings by "
                "status in metrics.jsonl and the causes in rollouts.jsonl"
            )
        return None

    async def _publish(self) -> tuple[SyncReport, float]:
        started = time.monotonic()
        handle = await self._trainer.publish()
        publish_s = time.monotonic() - started
        report = await self._router.sync_weights(handle, mode=self._settings.sync_mode)
        for name in set(report.lost) - self._lost_replicas:
            self._recorder.say(f"{name} is lost; the others go on")
        self._lost_replicas.update(report.lost)
        return report, publish_s

    def _validation_is_due(self) -> bool:
        if not self._validation_problems or self._validated_step == self._step:
            return False
        is_end = self._step in (0, self._settings.num_steps)
        return is_end or _is_due(self._step, self._settings.validate_every)

    async def _validate(self) -> None:
        """Answer the fixed problems with fixed seeds, so that only the weights differ."""
        started = time.monotonic()
        with self._recorder.phase("validation"):
            groups = await self._unless_stopped(self._roll_out_validation())
        self._recorder.record_validation(
            ValidationRecord(
                step=self._step,
                version=self._version,
                groups=groups,
                seconds=time.monotonic() - started,
            )
        )
        self._validated_step = self._step

    async def _roll_out_validation(self) -> tuple[RolloutGroup, ...]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    self._rollouter.run_group(
                        f"validation/{problem.problem_id}",
                        problem,
                        size=self._settings.validation_samples,
                        seed=self._settings.seed,
                        temperature=self._settings.validation_temperature,
                    )
                )
                for problem in self._validation_problems
            ]
        return tuple(task.result() for task in running)

    async def _save(self) -> None:
        if self._saved_step == self._step:
            return
        with self._recorder.phase("checkpoint"):
            state: dict[str, Any] = {
                "step": self._step,
                "version": self._version,
                "validated_step": self._validated_step,
                "dataset": self._dataset.state_dict(),
            }
            await self._trainer.save_checkpoint(self._checkpoints.path(self._step), state)
            await self._trainer.finish_checkpoint()
            await asyncio.to_thread(self._checkpoints.prune, self._settings.checkpoints_kept)
        self._saved_step = self._step

    async def _unless_stopped(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``, which is cancelled where a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StopRequested(f"stopped on request after step {self._step}")
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
