"""Runs the loops of a training run, at any staleness >= 0 (0 is synchronous). A buffer of groups
connects the loops.

| loop | waits for | unblocked by |
|---|---|---|
| `Producer.run`: admits problems | room in the buffer | a trained batch, a discarded group |
| a task per group: rolls it out | a replica with the group's version | `WeightDelivery` |
| | completions; its environment | the router; the environment |
| `Consumer.run`: trains, publishes, saves | a full batch | the group tasks |
| | on shared devices: syncs, evaluations | `WeightDelivery`, `Evaluator` |
| `WeightDelivery.run`: syncs the replicas | a finished step | the consumer |
| | on shared devices: the trainer's release of them | the consumer |
| `Evaluator`: evaluates a version | a replica to pin; completions | the router |
| `Watchdog.run`: reports silent waits | its next poll | the clock |
| `Claim.wait_until_lost` | the loss of the run's folder | another controller |
| `Trainer.wait_until_lost` | the loss of the trainer | a process that died |

Invariants: if a loop fails, the run saves a checkpoint of the state at that moment, while rollouts
still run, and then ends with the loop's error. A checkpoint contains everything that is needed to
continue as if the run had not stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.aio import cancel_all, first_of, uninterrupted
from torchtitan_rl.errors import RunTakenOverError, TrainerLostError, one_line
from torchtitan_rl.orchestration.checkpointing import RunCheckpointer
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.consumer import Consumer, StopRequested, then_save
from torchtitan_rl.orchestration.evaluation import Evaluator
from torchtitan_rl.orchestration.ledger import Reconciliation
from torchtitan_rl.orchestration.producer import Producer
from torchtitan_rl.orchestration.run_state import Parts, RunState
from torchtitan_rl.orchestration.watchdog import Watchdog, activities_to_json, describe_replicas
from torchtitan_rl.orchestration.weights import DeviceSharing, WeightDelivery, during_step
from torchtitan_rl.training.checkpoints import NewestCheckpoint

_MAX_SHOWN = 500  # waits in `Controller.now`


class Controller:
    """Runs the loops to the end, to a stop request or to an error."""

    def __init__(self, config: ControllerConfig, parts: Parts) -> None:
        self._config = config
        self._parts = parts
        self._state = state = RunState(config.capacity, parts)
        self._checkpointer = RunCheckpointer(state, config.checkpoint)
        self._evaluator = Evaluator(config, state)
        self._devices = DeviceSharing(during_step(config), state)
        self._reconciliation = Reconciliation(
            state.ledger, parts.router, state.recorder, state.waits
        )
        self._weights = WeightDelivery(
            config.weight_sync, state, evaluator=self._evaluator, devices=self._devices
        )
        self._watchdog = Watchdog(
            state.waits,
            num_changes=lambda: state.num_changes,
            report_wait_s=config.schedule.report_wait_s,
            max_wait_s=config.schedule.max_wait_s,
            activities=parts.rollouter.activities,
            say=state.recorder.say,
            notes=lambda: [
                describe_replicas(parts.router.states(), parts.router.outstanding_tokens())
            ],
        )

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._state.step

    def request_stop(self) -> None:
        """Stop cleanly: finish the optimizer step and save, including the rollouts so far."""
        self._state.is_stopping = True
        self._state.notify()

    def now(self) -> dict[str, Any]:
        """Describe what happens at this moment, as JSON types: waits, rollouts, replicas and the
        groups in the buffer."""
        state, router = self._state, self._parts.router
        now_s, outstanding = state.waits.now_s(), router.outstanding_tokens()
        versions = router.versions()
        return {
            "step": state.step,
            "version": state.version,
            "num_steps": self._config.num_steps,
            "waits": [wait.to_json(now_s) for wait in state.waits.open()[:_MAX_SHOWN]],
            "chain": self._watchdog.chain(),
            "rollouts": activities_to_json(self._parts.rollouter.activities(), now_s),
            "replicas": [
                {
                    "name": name,
                    "state": phase.value,
                    "version": versions.get(name),
                    "outstanding_tokens": outstanding.get(name, 0),
                }
                for name, phase in router.states().items()
            ],
            "groups": {one.value: number for one, number in state.buffer.counts().items()}
            | {"capacity": state.capacity.buffer},
            "evaluation": self._evaluator.progress(),
        }

    async def run(self, *, resume_from: NewestCheckpoint | None) -> None:
        """Take all remaining steps. ``resume_from`` is the result of `choose_checkpoint`, which may
        have found no checkpoint; with None a new run begins.

        Raises:
            StopRequested: `request_stop` was called; a checkpoint is written.
            DivergedError, TrainerLostError: no checkpoint is written; earlier ones are unchanged.
            GenerationError, WeightSyncError: no replica is left; a checkpoint is written.
            NothingTrainedError: there is nothing to train on; a checkpoint is written.
            DeadlineError: nothing changed for ``schedule.max_wait_s``.
            RunTakenOverError: another controller owns the run's folder; nothing is saved.
        """
        await first_of(self._run(resume_from), self._parts.trainer.wait_until_lost())

    async def _run(self, resume_from: NewestCheckpoint | None) -> None:
        with self._state.recorder.phase("restore"):
            if resume_from is not None and resume_from.path is not None:
                await self._devices.take_devices()
            recorded = await self._checkpointer.restore(resume_from)
            if self._state.version > 0 or self._devices.engines_are_empty:
                handle = await self._parts.trainer.publish()
                self._devices.release()
                await self._weights.resume(handle)
        self._state.measure_dataset()
        producer = Producer(self._config, self._state, recorded=recorded)
        try:
            await self._run_loops(producer)
        finally:
            self._parts.journal.close()

    async def _run_loops(self, producer: Producer) -> None:
        training = asyncio.create_task(self._train(producer), name="consumer")
        others: list[asyncio.Task[None]] = [
            asyncio.create_task(self._weights.run(), name="weight delivery"),
            asyncio.create_task(producer.run(), name="producer"),
            asyncio.create_task(self._watchdog.run(), name="watchdog"),
            asyncio.create_task(self._parts.router.wait_until_lost(), name="replicas"),
            asyncio.create_task(self._parts.claim.wait_until_lost(), name="run folder"),
        ]
        try:
            await asyncio.wait({training, *others}, return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in others if task.done()), None)
            if failed is None:
                await training
                return
            error = _error_of(failed)
            if isinstance(error, RunTakenOverError):
                raise error  # nothing may be saved
            self.request_stop()  # so that the current step is saved too
            lost = await self._wait_for_save(training)
            if lost is not None:  # then replicas cannot fetch the trainer's weights any more
                self._state.recorder.say(f"{failed.get_name()}: {one_line(error)}")
                raise lost from error
            raise error
        finally:
            await uninterrupted(self._close([training, *others], producer))

    async def _close(self, tasks: Sequence[asyncio.Task[None]], producer: Producer) -> None:
        await cancel_all(tasks)
        await producer.close()
        await self._evaluator.close()
        await self._reconciliation.close()

    async def _train(self, producer: Producer) -> None:
        """Take all steps, then write a checkpoint, whether the steps succeeded or not."""
        consumer = Consumer(
            self._config,
            self._state,
            producer=producer,
            weights=self._weights,
            devices=self._devices,
            checkpointer=self._checkpointer,
            reconciliation=self._reconciliation,
        )

        async def take_steps() -> None:
            await consumer.run()
            await self._weights.flush()
            await producer.settle()

        async def save() -> None:
            await self._reconciliation.finish(self._state.step, self._state.version)
            await self._devices.take_devices()
            await self._checkpointer.finish()

        await then_save(take_steps(), save, self._state.recorder.say)

    async def _wait_for_save(self, training: asyncio.Task[None]) -> TrainerLostError | None:
        """After another loop failed, let the trainer finish its step and save. Returns an error if
        the trainer is lost."""
        timeout_s, say = self._config.trainer.call_limit_s, self._state.recorder.say
        await asyncio.wait({training}, timeout=timeout_s)
        if not training.done():
            say(f"no checkpoint: the trainer did not end its step and save in {timeout_s:.0f} s")
            return None
        error = training.exception()
        if isinstance(error, TrainerLostError):
            return error
        if error is not None and not isinstance(error, StopRequested):
            say(f"the trainer ended with {one_line(error)}")
        return None


def _error_of(task: asyncio.Task[None]) -> BaseException:
    """Return the error that ended a loop; of an exception group, the first one."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or RuntimeError(f"{task.get_name()} ended by itself")
