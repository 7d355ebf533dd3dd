"""The run: loops that meet in a buffer of groups, from staleness 0 (synchronous) upwards.

- `Producer`: problems in, groups rolled out, as many as the buffer has room for;
- `Consumer`: full batches in, optimizer steps and published weights out;
- `WeightFeed`: published weights to the replicas, evaluations pinned;
- `Watchdog`: ends a run in which nothing moves.

Invariants: a loop that fails ends the run with its own error, after a checkpoint of the state at
that moment, taken while its rollouts still run; what a checkpoint holds is all that is needed to go
on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.errors import (
    CheckpointError,
    DivergedError,
    TrainerLostError,
)
from torchtitan_rl.orchestration.account import AccountCheck
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.capacity import Capacity
from torchtitan_rl.orchestration.consumer import Consumer, ConsumerSettings, StopRequested
from torchtitan_rl.orchestration.device_sharing import DeviceSharing, DuringStep
from torchtitan_rl.orchestration.evaluation import EvaluationSettings, Evaluator
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.producer import Producer, ProducerSettings
from torchtitan_rl.orchestration.records import LedgerTotals, Recorder
from torchtitan_rl.orchestration.recovery import RecordedGroups
from torchtitan_rl.orchestration.rows import Rows
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.sampling import SampledTokens
from torchtitan_rl.orchestration.saving import RunSaver
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.orchestration.watchdog import Watchdog, describe_replicas
from torchtitan_rl.orchestration.weight_feed import FeedSettings, WeightFeed
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.recorded import EnvState
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint
from torchtitan_rl.types import Problem, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Each loop's share of the configuration."""

    capacity: Capacity
    during_step: DuringStep
    producer: ProducerSettings
    consumer: ConsumerSettings
    evaluation: EvaluationSettings
    feed: FeedSettings
    checkpoints_kept: int
    max_checkpoint_failures: int
    save_timeout_s: float  # for the trainer to end its step and to save, where another loop failed
    report_wait_s: float
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the controller brings together. ``sampled`` is the router's observer; ``identity`` says
    which run this is."""

    dataset: Dataset
    evaluation_problems: Sequence[Problem]
    rollouter: Rollouter
    batcher: EpisodeBatcher
    trainer: Trainer
    router: GeneratorRouter
    recorder: Recorder
    checkpoints: CheckpointDirectory
    journals: JournalDirectory
    sampled: SampledTokens
    identity: Mapping[str, Any] = field(default_factory=dict)


class Controller:
    """Runs the loops to the end, to a stop request or to an error."""

    def __init__(self, settings: ControllerSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._state = RunState(settings.capacity)
        parts.sampled.bind(self._state.ledger)
        self._rows = rows = Rows(parts.recorder)
        self._saver = RunSaver(
            self._state,
            dataset=parts.dataset,
            trainer=parts.trainer,
            rollouter=parts.rollouter,
            router=parts.router,
            checkpoints=parts.checkpoints,
            journals=parts.journals,
            rows=rows,
            recorder=parts.recorder,
            identity=parts.identity,
            keep=settings.checkpoints_kept,
            max_failures=settings.max_checkpoint_failures,
        )
        self._evaluator = Evaluator(
            settings.evaluation,
            self._state,
            problems=parts.evaluation_problems,
            rollouter=parts.rollouter,
            router=parts.router,
            rows=rows,
            recorder=parts.recorder,
        )
        self._devices = DeviceSharing(
            settings.during_step,
            self._state,
            router=parts.router,
            trainer=parts.trainer,
            recorder=parts.recorder,
        )
        self._account = AccountCheck(
            self._state,
            router=parts.router,
            sampled=parts.sampled,
            rows=rows,
            recorder=parts.recorder,
        )
        self._feed = WeightFeed(
            settings.feed,
            self._state,
            router=parts.router,
            evaluator=self._evaluator,
            devices=self._devices,
            recorder=parts.recorder,
        )

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self._state.step

    def counts(self) -> dict[GroupState, int]:
        """Groups by state."""
        return self._state.buffer.counts()

    def totals(self) -> LedgerTotals:
        """Where all tokens and groups went."""
        return self._state.ledger.totals()

    def request_stop(self) -> None:
        """End cleanly: an optimizer step is finished, what rollouts have so far is saved."""
        self._state.is_stopping = True
        self._state.changed()

    async def run(self, *, resume_from: NewestCheckpoint | None) -> None:
        """Run all steps that are left.

        Args:
            resume_from: what `CheckpointDirectory.newest` found, which may be nothing; None starts
                anew.

        Raises:
            StopRequested: `request_stop` was called; a checkpoint is written.
            DivergedError, TrainerLostError: the newest checkpoint is from before.
            GenerationError, WeightSyncError: no replica is left; a checkpoint is written.
            DeadlineError: nothing moved for too long.
        """
        with self._parts.recorder.phase("restore"):
            recorded = await self._restore(resume_from)
        producer = Producer(
            self._settings.producer,
            self._state,
            dataset=self._parts.dataset,
            rollouter=self._parts.rollouter,
            router=self._parts.router,
            recorded=recorded,
            on_turn=self._keep_turn,
            on_group_ended=self._parts.journals.forget,
        )
        try:
            await self._run_loops(producer)
        finally:
            self._parts.journals.close()

    async def _restore(self, resume_from: NewestCheckpoint | None) -> RecordedGroups:
        if resume_from is not None and resume_from.path is not None:
            await self._devices.take_devices()
        recorded = await self._saver.restore(resume_from)
        if self._state.version > 0 or self._devices.engines_are_empty:
            handle = await self._parts.trainer.publish()
            self._devices.let_go()
            await self._feed.resume(handle)
        return recorded

    async def _run_loops(self, producer: Producer) -> None:
        consumer = Consumer(
            self._settings.consumer,
            self._state,
            batcher=self._parts.batcher,
            trainer=self._parts.trainer,
            router=self._parts.router,
            producer=producer,
            feed=self._feed,
            devices=self._devices,
            saver=self._saver,
            account=self._account,
            rows=self._rows,
            recorder=self._parts.recorder,
        )
        training = asyncio.create_task(self._train(consumer, producer), name="consumer")
        others = [
            _named_task("weight feed", self._feed.run()),
            _named_task("producer", producer.run()),
            _named_task("watchdog", self._watchdog().run()),
        ]
        try:
            await asyncio.wait({training, *others}, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in others if task.done()), None)
            if failed is None:
                await training
                return
            self.request_stop()  # so that the step that is being taken is saved too
            await self._await_save(training)
            raise _error_of(failed)
        finally:
            await _to_the_end(self._close([training, *others], producer))

    async def _close(self, tasks: Sequence[asyncio.Task[None]], producer: Producer) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await producer.close()
        await self._evaluator.close()
        await self._account.close()

    def _keep_turn(
        self, rollout_id: str, index: int, turn: Turn, env_state: EnvState | None
    ) -> None:
        try:
            self._parts.journals.append(rollout_id, index, turn, env_state)
        except JournalError as error:
            self._parts.recorder.say(
                f"NO JOURNAL until the next checkpoint: a killed run would lose its turns ({error})"
            )

    async def _await_save(self, training: asyncio.Task[None]) -> None:
        """Another loop failed: let the trainer end its step and save."""
        timeout_s = self._settings.save_timeout_s
        say = self._parts.recorder.say
        await asyncio.wait({training}, timeout=timeout_s)
        if not training.done():
            say(f"no checkpoint: the trainer did not end its step and save in {timeout_s:.0f} s")
        elif (error := training.exception()) is not None and not isinstance(error, StopRequested):
            say(f"the trainer ended with {type(error).__name__}: {error}")

    async def _train(self, consumer: Consumer, producer: Producer) -> None:
        try:
            await consumer.run()
            await self._feed.flush()
            await producer.settle()
        except (DivergedError, TrainerLostError, CheckpointError):
            raise
        except StopRequested:
            await self._save()
            raise
        except Exception:
            try:
                await self._save()
            except Exception as error:
                self._parts.recorder.say(f"no checkpoint: {type(error).__name__}: {error}")
            raise
        await self._save()

    async def _save(self) -> None:
        await self._account.finish()
        await self._devices.take_devices()  # nothing is sampled any more
        await self._saver.finish()

    def _watchdog(self) -> Watchdog:
        return Watchdog(
            self._state.waits,
            progress=lambda: self._state.progress,
            report_wait_s=self._settings.report_wait_s,
            max_wait_s=self._settings.max_wait_s,
            activities=self._parts.rollouter.activities,
            say=self._parts.recorder.say,
            notes=self._describe_replicas,
        )

    def _describe_replicas(self) -> list[str]:
        router = self._parts.router
        return [describe_replicas(router.states(), router.outstanding_tokens())]


def _named_task(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work, name=name)


def _error_of(task: asyncio.Task[None]) -> BaseException:
    """What ended a loop: the first error, out of the groups it came in."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or RuntimeError(f"{task.get_name()} ended by itself")


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """All of it, even where this call is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
