"""The training side: takes full batches, trains on them and publishes the weights.

Invariants: a batch is trained at the version for which its age was checked. Step, version, ledger,
buffer and metrics row change together, without an await between them, as soon as the optimizer step
has ended. Weights are published before anything can change them.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from torchtitan_rl.aio import loop_s
from torchtitan_rl.errors import (
    CheckpointError,
    DivergedError,
    NothingTrainedError,
    RunTakenOverError,
    TorchtitanRLError,
    TrainerLostError,
    one_line,
)
from torchtitan_rl.orchestration.batching import Batched
from torchtitan_rl.orchestration.checkpointing import RunCheckpointer
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.ledger import Reconciliation
from torchtitan_rl.orchestration.producer import Producer
from torchtitan_rl.orchestration.records import BufferStates, StepRecord
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.watchdog import describe_group
from torchtitan_rl.orchestration.weights import DeviceSharing, PublishedStep, WeightDelivery
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.rollout.episodes import has_signal
from torchtitan_rl.rollout.rollouter import all_failed_alike, describe_failures
from torchtitan_rl.training.batch import StepOutput
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.weights.distribution import WeightHandle


class StopRequested(TorchtitanRLError):
    """The run stopped cleanly on request and can be resumed."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped on request after step {step}; resume it by --checkpoint.resume")


@dataclass(eq=False)
class Consumer:
    """Takes one batch after another until all steps are done."""

    config: ControllerConfig
    state: RunState
    _: KW_ONLY
    producer: Producer
    weights: WeightDelivery
    devices: DeviceSharing
    checkpointer: RunCheckpointer
    reconciliation: Reconciliation

    def __post_init__(self) -> None:
        self._parts = self.state.parts
        self._recorder = self.state.recorder
        # Consecutive batches without a token to train on, since this process started.
        self._empty_batches: list[tuple[RolloutGroup, ...]] = []
        self._is_save_due = False
        rollout = self.config.rollout
        self._may_report_ignored = rollout.credit == "outcome" and rollout.advantage != "none"
        self._times = _Times()

    async def run(self) -> None:
        """Take all remaining steps.

        Raises:
            StopRequested: a stop was requested. Every begun step was finished.
            DivergedError, TrainerLostError: the trainer's state cannot be saved any more.
            GenerationError: no replica is left.
            NothingTrainedError: see `_require_progress`.
        """
        state, num_steps = self.state, self.config.num_steps
        self._times = _Times()
        self._require_progress()
        while state.step < num_steps:
            await self._take_step(await self._next_batch())
            self._require_progress()
            is_last = state.step == num_steps  # the controller saves after the last step
            if not is_last:
                every = self.config.checkpoint.every
                self._is_save_due |= every > 0 and state.step % every == 0
            if self._is_save_due and self.devices.trainer_can_save:
                self._is_save_due = False
                with self._times.measure("save"):
                    await self.checkpointer.save()
                self.reconciliation.start(state.step, state.version)
            is_next_ready = not is_last and state.buffer.has_batch
            if not is_next_ready or self.weights.needs_evaluation(state.step):
                self.devices.release()

    async def _next_batch(self) -> tuple[RolloutGroup, ...]:
        state = self.state
        with self._recorder.phase("rollout"), self._times.measure("wait"):
            await state.wait_until(
                lambda: state.is_stopping or (state.buffer.has_batch and self._may_train()),
                f"the trainer waits for the batch of step {state.step + 1}",
                details=self._describe_buffer,
            )
        groups = None if state.is_stopping else state.buffer.take(state.version)
        if groups is None:
            raise StopRequested(state.step)
        return groups

    def _may_train(self) -> bool:
        """Whether the trainer may use its devices: on shared devices, evaluations and pulls must
        end first."""
        is_free = self.devices.trainer_holds_devices or self.weights.is_idle
        return is_free or not self.devices.devices_are_shared

    async def _take_step(self, groups: tuple[RolloutGroup, ...]) -> None:
        state = self.state
        counts = {one.value: number for one, number in state.buffer.counts().items()}
        states = BufferStates(capacity=state.capacity.buffer, **counts)
        with self._times.measure("train"):
            batched, output = await self._train_on(groups)
        self._commit(groups, batched, output, states)
        state.notify()  # new groups can reset their environments while the weights are published
        handle: WeightHandle | None = None
        if output is not None:
            with (
                self._times.measure("publish"),
                self._recorder.phase("publish"),
                state.waits.track("the trainer publishes"),
            ):
                handle = await self._parts.trainer.publish(self.weights.needed_versions)
        self.weights.put(PublishedStep(step=state.step, version=state.version, handle=handle))
        state.notify()

    async def _train_on(
        self, groups: tuple[RolloutGroup, ...]
    ) -> tuple[Batched, StepOutput | None]:
        """Pack the groups and train. Without a token to train on, the weights do not change."""
        step = self.state.step + 1
        with self._recorder.phase("train"):
            batched = await asyncio.to_thread(self._parts.batcher, groups)
            batch = batched.batch
            if batch is None:
                self._parts.router.require_unreserved()
                self._empty_batches.append(groups)
                why = _in_brackets(describe_failures(groups))
                self._recorder.say(f"step {step} has no token to train on; its weights stay{why}")
                return batched, None
            self._empty_batches.clear()
            if self.config.mode == "generate":
                return _without_training(batched), None
            await self.devices.prepare_step()
            self._report_ignored_rewards(groups)
            if not batch.advantages.any() and not batch.teacher_coefficient:
                self._recorder.say(f"step {step}: no group has rewards that differ")
            read, examples = self._parts.examples, None
            if read is not None:
                examples = await asyncio.to_thread(read, step)
            # The trainer's own deadline is shorter, and has a better message.
            limit_s = self.config.trainer.call_limit_s
            with self.state.waits.track(f"the trainer takes step {step}", limit_s=limit_s):
                return batched, await self._parts.trainer.train_step(batch, examples=examples)

    def _require_progress(self) -> None:
        """Check that the run still trains on something. Raises NothingTrainedError: all rollouts of
        the run's first two steps failed for one cause. Or: no step of the whole run had a token to
        train on. Or: ``schedule.max_empty_batches`` steps in a row had no such token."""
        state, empty = self.state, self._empty_batches
        groups = tuple(group for batch in empty[-2:] for group in batch)
        is_over = state.step >= self.config.num_steps and self.config.mode != "generate"
        if len(empty) == state.step == 2 and all_failed_alike(groups):
            what = "all rollouts of the first two steps failed for one cause"
        elif state.version == 0 and is_over:
            what = "no step of the run had a token to train on"
        elif len(empty) >= self.config.schedule.max_empty_batches:
            what = f"{len(empty)} steps in a row had no token to train on"
        else:
            return
        raise NothingTrainedError(
            f"{what}{_in_brackets(describe_failures(groups))}; see the endings by status and "
            "tokens/discarded/* in metrics.jsonl, and the causes in rollouts.jsonl"
        )

    def _report_ignored_rewards(self, groups: tuple[RolloutGroup, ...]) -> None:
        """Report once that turns have rewards that are not trained on."""
        if self._may_report_ignored and any(
            len(rollout.turns) > 1 and any(turn.reward for turn in rollout.turns)
            for group in groups
            for rollout in group.rollouts
        ):
            self._may_report_ignored = False
            self._recorder.say(
                "note: turns have rewards of their own, and rollout.credit outcome trains on those "
                "of rollouts alone; rollout.credit turn trains on both"
            )

    def _commit(
        self,
        groups: tuple[RolloutGroup, ...],
        batched: Batched,
        output: StepOutput | None,
        states: BufferStates,
    ) -> None:
        """Record that the step was taken. There is no await, so a checkpoint contains all of this
        or nothing."""
        state, tokens, config = self.state, batched.tokens, self.config.rollout
        flat = frozenset(one.group_id for one in groups if not has_signal(one.rollouts, config))
        metrics = {} if output is None else output.metrics
        terms = None if output is None else output.tokens
        masked = round(metrics.get("masked_share", 0.0) * tokens.trained)
        overtaken = state.buffer.overtaken_in_batch()
        too_old = state.buffer.finish_batch(
            tokens, masked_by_loss={"loss_mask": masked} if masked else {}
        )
        state.step += 1
        if output is not None:
            state.version = output.version
        self.producer.restart(too_old)
        times, self._times = self._times, _Times()
        seconds = times.seconds
        self._recorder.record_step(
            StepRecord(
                step=state.step,
                version=state.version,
                groups=groups,
                tokens=tokens,
                episodes=batched.episodes,
                trainer_logprobs=() if terms is None else batched.by_episode(terms.logprobs),
                trainer=metrics,
                syncs=self.weights.pop_syncs(),
                publish_s=seconds["publish"],
                rollout_s=seconds["wait"],
                train_s=seconds["train"],
                wall_s=loop_s() - times.started_s,
                trainer_busy_s=seconds["train"] + seconds["publish"] + seconds["save"],
                buffer=states,
                overtaken=overtaken,
                flat=flat,
                totals=state.ledger.totals(),
                switch_s=self.devices.pop_switch_s(),
                dataset=state.dataset_metrics,
            )
        )
        state.record_outcomes(groups)  # last, because it is user code that may raise

    def _describe_buffer(self) -> str:
        state = self.state
        counts = state.buffer.counts()
        text = ", ".join(f"{counts[one]} groups {one.value}" for one in GroupState if counts[one])
        if state.buffer.has_batch and not self._may_train():
            return f"{text}; an evaluation or a pull has the devices"
        oldest = next((e for e in state.buffer.entries if e.group is None), None)
        if oldest is None:
            return text
        activities = self._parts.rollouter.activities()
        return f"{text}; {describe_group(oldest.group_id, activities, state.waits.now_s())}"


def _without_training(batched: Batched) -> Batched:
    """Count the tokens that could be trained on as discarded."""
    tokens = batched.tokens
    discarded = {**tokens.discarded, "only_generated": tokens.trained}
    return batched._replace(tokens=replace(tokens, trained=0, discarded=discarded), episodes=())


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


async def then_save(
    steps: Awaitable[None], save: Callable[[], Awaitable[None]], say: Callable[[str], None]
) -> None:
    """Await the run's ``steps``, then save its last state, whether the steps succeeded or not.
    Raises Exception: ``steps`` raised it, or else ``save``."""
    failure: Exception | None = None
    try:
        await steps
    except (DivergedError, TrainerLostError, CheckpointError, RunTakenOverError):
        raise  # the state is not valid, so nothing is saved
    except Exception as error:
        failure = error
    try:
        await save()
    except Exception as error:
        if failure is None or isinstance(failure, StopRequested):
            raise
        say(f"no checkpoint: {one_line(error)}")
    if failure is not None:
        raise failure


class _Times:
    """Seconds that the trainer spent on each part of its work since the last step's record."""

    def __init__(self) -> None:
        self.started_s = loop_s()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, part: Literal["wait", "train", "publish", "save"]) -> Iterator[None]:
        started_s = loop_s()
        try:
            yield
        finally:
            self.seconds[part] += loop_s() - started_s
