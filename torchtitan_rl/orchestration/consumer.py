"""The training side: full batches in, optimizer steps and published weights out.

Invariants: a batch is trained at the version that its age was checked for; a batch whose step
failed goes back into the buffer; step, version, account, buffer and metrics row move on together,
with no await between them, as soon as the optimizer step has ended; the weights are published
before anything can change them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.account import AccountCheck
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.orchestration.device_sharing import DeviceSharing
from torchtitan_rl.orchestration.producer import Producer
from torchtitan_rl.orchestration.records import BufferStates, Recorder, StepRecord, TokenCounts
from torchtitan_rl.orchestration.rows import Rows
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.saving import RunSaver
from torchtitan_rl.orchestration.trainer import Trainer
from torchtitan_rl.orchestration.watchdog import describe_group
from torchtitan_rl.orchestration.weight_feed import FinishedStep, WeightFeed
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.training.batch import StepOutput
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.weights.handle import WeightHandle

_PAST = (GroupState.TRAINED, GroupState.DISCARDED)


class StopRequested(TorchtitanRLError):
    """The run was asked to stop; it did so cleanly and can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    num_steps: int
    capacity: int  # of the buffer
    checkpoint_every: int
    max_empty_batches: int
    step_timeout_s: float


class Consumer:
    """Takes one batch after another until all steps are done."""

    def __init__(
        self,
        settings: ConsumerSettings,
        state: RunState,
        *,
        batcher: EpisodeBatcher,
        trainer: Trainer,
        router: GeneratorRouter,
        producer: Producer,
        feed: WeightFeed,
        devices: DeviceSharing,
        saver: RunSaver,
        account: AccountCheck,
        rows: Rows,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._state = state
        self._batcher = batcher
        self._trainer = trainer
        self._router = router
        self._producer = producer
        self._feed = feed
        self._devices = devices
        self._saver = saver
        self._account = account
        self._rows = rows
        self._recorder = recorder
        self._empty_batches = 0
        self._is_save_due = False
        self._since_last_row = _Times.start()

    async def run(self) -> None:
        """All steps that are left.

        Raises:
            StopRequested: the run is to stop; nothing is half done.
            DivergedError, TrainerLostError: what is saved is from before.
            GenerationError: no replica is left.
        """
        self._since_last_row = _Times.start()
        while self._state.step < self._settings.num_steps:
            await self._one_step(await self._next_batch())
            if self._state.step < self._settings.num_steps:  # the last one is saved at the end
                self._is_save_due |= _is_due(self._state.step, self._settings.checkpoint_every)
            if self._is_save_due and self._devices.trainer_is_ready:
                self._is_save_due = False
                with self._since_last_row.of("save_s"):
                    await self._saver.save()
                self._account.start()
            if not self._goes_on():
                self._devices.let_go()

    def _goes_on(self) -> bool:
        """The next batch is there, and nobody needs the replicas to hold this step's weights."""
        is_last = self._state.step == self._settings.num_steps
        return (
            not is_last
            and self._state.buffer.has_batch
            and not self._feed.is_evaluated(self._state.step)
        )

    async def _next_batch(self) -> tuple[RolloutGroup, ...]:
        state = self._state
        with self._recorder.phase("rollout"), self._since_last_row.of("wait_s"):
            await state.until(
                lambda: state.is_stopping or (state.buffer.has_batch and self._may_train()),
                f"the trainer waits for the batch of step {state.step + 1}",
                details=self._describe_buffer,
            )
        groups = None if state.is_stopping else state.buffer.take(state.version)
        if groups is None:
            raise StopRequested(
                f"stopped on request after step {state.step}; resume it by --checkpoint.resume"
            )
        return groups

    def _may_train(self) -> bool:
        """On shared devices evaluations and pulls end first."""
        is_free = self._devices.is_trainers or self._feed.is_idle
        return is_free or not self._devices.devices_are_shared

    async def _one_step(self, groups: tuple[RolloutGroup, ...]) -> None:
        state = self._state
        buffered = self._buffer_states()
        try:
            with self._since_last_row.of("train_s"):
                tokens, output = await self._train_on(groups)
        except BaseException:
            state.buffer.put_back()
            raise
        self._commit(groups, tokens, output, buffered)
        step = FinishedStep(step=state.step, handle=None)
        if output is not None:
            with self._since_last_row.of("publish_s"):
                step = FinishedStep(step=state.step, handle=await self._publish())
        self._feed.put(step)
        state.changed()

    async def _train_on(
        self, groups: tuple[RolloutGroup, ...]
    ) -> tuple[TokenCounts, StepOutput | None]:
        """Pack and train; without a token to train on the weights stay."""
        with self._recorder.phase("train"):
            batch, tokens = await asyncio.to_thread(self._batcher, groups)
            if batch is None:
                self._note_empty_batch()
                return tokens, None
            await self._devices.to_trainer()
            self._empty_batches = 0
            if not batch.advantages.any():
                self._recorder.say(f"step {self._state.step + 1}: no group has rewards that differ")
            with self._on_step():
                return tokens, await self._trainer.train_step(batch)

    def _commit(
        self,
        groups: tuple[RolloutGroup, ...],
        tokens: TokenCounts,
        output: StepOutput | None,
        buffered: BufferStates,
    ) -> None:
        """The step has been taken. No await: a checkpoint has all of it or nothing."""
        state = self._state
        state.ledger.train(
            [group.group_id for group in groups],
            tokens,
            masked_by_loss=_masked(output, tokens),
        )
        state.step += 1
        if output is not None:
            state.version = output.version
        overtaken = state.buffer.overtaken_in_batch()
        self._producer.restart(state.buffer.finish_batch())
        self._rows.step(
            self._record(groups, tokens, output, buffered=buffered, overtaken=overtaken)
        )

    async def _publish(self) -> WeightHandle:
        with self._recorder.phase("publish"), self._state.waits.on("the trainer publishes"):
            return await self._trainer.publish(self._feed.needed_versions)

    def _record(
        self,
        groups: tuple[RolloutGroup, ...],
        tokens: TokenCounts,
        output: StepOutput | None,
        *,
        buffered: BufferStates,
        overtaken: frozenset[str],
    ) -> StepRecord:
        times, self._since_last_row = self._since_last_row, _Times.start()
        return StepRecord(
            step=self._state.step,
            version=self._state.version,
            groups=groups,
            tokens=tokens,
            trainer=output.metrics if output is not None else {},
            syncs=self._feed.take_syncs(),
            publish_s=times.publish_s,
            rollout_s=times.wait_s,
            train_s=times.train_s,
            wall_s=time.monotonic() - times.started_s,
            trainer_busy_s=times.train_s + times.publish_s + times.save_s,
            buffer=buffered,
            overtaken=overtaken,
            totals=self._state.ledger.totals(),
            switch_s=self._devices.take_switch_s(),
        )

    def _buffer_states(self) -> BufferStates:
        counts = self._state.buffer.counts()
        return BufferStates(
            waiting=counts[GroupState.WAITING],
            running=counts[GroupState.RUNNING],
            finished=counts[GroupState.FINISHED],
            batched=counts[GroupState.BATCHED],
            capacity=self._settings.capacity,
        )

    def _note_empty_batch(self) -> None:
        """
        Raises:
            TorchtitanRLError: too many in a row, or no replica is left.
        """
        self._router.require_live()
        self._empty_batches += 1
        self._recorder.say(
            f"step {self._state.step + 1} has no token to train on; its weights stay"
        )
        if self._empty_batches >= self._settings.max_empty_batches:
            raise TorchtitanRLError(
                f"{self._empty_batches} steps in a row had no token to train on; see the endings "
                "by status in metrics.jsonl and the causes in rollouts.jsonl"
            )

    def _on_step(self) -> AbstractContextManager[None]:
        # The trainer's own deadline comes first, and says more.
        limit_s = 2 * self._settings.step_timeout_s
        return self._state.waits.on(
            f"the trainer takes step {self._state.step + 1}", limit_s=limit_s
        )

    def _describe_buffer(self) -> str:
        counts = self._state.buffer.counts()
        live = [one for one in GroupState if counts[one] and one not in _PAST]
        text = ", ".join(f"{counts[one]} groups {one.value}" for one in live)
        if self._state.buffer.has_batch and not self._may_train():
            return f"{text}; an evaluation or a pull has the devices"
        oldest = next((e for e in self._state.buffer.entries if e.group is None), None)
        if oldest is None:
            return text
        now_s = self._state.waits.now_s()
        activities = self._producer.activities()
        return f"{text}; {describe_group(oldest.group_id, activities, now_s)}"


@dataclass(slots=True, kw_only=True)
class _Times:
    """Seconds that the trainer spent on each part of its work since ``started_s``."""

    started_s: float  # time.monotonic()
    wait_s: float = 0.0
    train_s: float = 0.0
    publish_s: float = 0.0
    save_s: float = 0.0

    @classmethod
    def start(cls) -> _Times:
        return cls(started_s=time.monotonic())

    @contextmanager
    def of(self, part: Literal["wait_s", "train_s", "publish_s", "save_s"]) -> Iterator[None]:
        """Add the block's duration to one part."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + time.monotonic() - begun_s)


def _masked(output: StepOutput | None, tokens: TokenCounts) -> dict[str, int]:
    """Trained tokens that a rule of the loss left out."""
    share = 0.0 if output is None else output.metrics.get("masked_share", 0.0)
    number = round(share * tokens.trained)
    return {"loss_mask": number} if number else {}


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
