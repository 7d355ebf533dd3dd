"""Starts a lost trainer again within the run. The new trainer loads a checkpoint and takes the
steps since then again, with the same batches; generation continues meanwhile.

A trainer is lost if one of its processes dies, or if a call exceeds its deadline (a collective that
never ends); all its processes are ended.

Invariants
- Callers notice nothing but the time: a call that was interrupted is made again, on weights of the
  same version. Only a checkpoint that was being written fails.
- A step that is taken again gets the batch that it had. On a CPU its weights are equal bit for bit;
  if their digest differs (kernels of CUDA may), the run says so.
- Versions that replicas may still read are published again under the same number before any call
  continues.
- After ``max_restarts`` restarts without a new step, every call raises `TrainerLostError`.
- A trainer that is lost while it is offloaded is started when it gets its devices back, or when a
  replica needs its weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from torchtitan_rl.aio import cancel_all, loop_s, retrieve
from torchtitan_rl.errors import (
    CheckpointError,
    DeadlineError,
    DeviceMemoryError,
    DivergedError,
    OutputError,
    TorchtitanRLError,
    TrainerLostError,
    one_line,
)
from torchtitan_rl.failures import Failure, Part, restart_delay_s
from torchtitan_rl.orchestration.checkpointing import read_position
from torchtitan_rl.orchestration.run_state import Trainer
from torchtitan_rl.orchestration.taken_steps import TakenStep, TakenSteps
from torchtitan_rl.training.batch import Examples, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.weights.distribution import WeightDistribution, WeightHandle, versions_to_free

_T = TypeVar("_T")


class TrainerProcesses(Trainer, Protocol):
    """A trainer that can be ended and started again."""

    @property
    def name(self) -> str: ...

    def lose(self, cause: BaseException) -> None:
        """Treat the trainer as lost: running and later calls fail, and `close` does not wait for
        its processes' work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a new trainer can start. ``checkpoint`` None: the initial policy."""

    version: int
    checkpoint: Path | None


@dataclass(eq=False)
class RestartedTrainer:
    """A `Trainer` that survives the loss of its processes. Close it before its trainer.

    Args:
        start: starts another trainer. The processes of the one before have ended.
        weights: distributes what the trainer publishes.
        check: the right to write into the run's folder; see `Claim.check`.
        is_offloaded: whether the trainer's state is in host memory at first.
        on_failure: called with the ended report of each loss.
    """

    trainer: TrainerProcesses
    start: Callable[[], Awaitable[TrainerProcesses]]
    _: KW_ONLY
    weights: WeightDistribution
    steps: TakenSteps
    max_restarts: int
    check: Callable[[], None]
    is_offloaded: bool
    say: Callable[[str], None]
    on_failure: Callable[[Failure], None] = lambda failure: None

    def __post_init__(self) -> None:
        self._version = 0
        self._starts = [_Start(version=0, checkpoint=None)]  # oldest first; never empty
        self._readable: list[int] = []  # the versions that replicas can read, as published
        self._saving: tuple[_Start, TrainerProcesses] | None = None  # being written, by whom
        self._unwritten: tuple[int, str] | None = None  # the newest step not stored, and why
        self._num_restarts = 0  # since the newest step
        self._restarting: asyncio.Task[None] | None = None
        self._failure: Failure | None = None  # the loss that is not reported yet
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = self._watched(self.trainer)

    def lose(self, cause: BaseException) -> None:
        self.trainer.lose(cause)

    async def wait_until_lost(self) -> None:
        raise TrainerLostError(await asyncio.shield(self._given_up))

    async def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None = None, *, examples: Examples = None
    ) -> StepOutput:
        writing = asyncio.create_task(self._write(batch, loss, examples))
        writing.add_done_callback(retrieve)
        output = await self._call(
            lambda trainer: trainer.train_step(batch, loss, examples=examples)
        )
        taken = await writing
        if taken is not None:
            self.steps.add(replace(taken, digest=output.metrics.get("weights_digest")))
        self._version = output.version
        self._num_restarts = 0
        return output

    async def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        return await self._call(lambda trainer: trainer.logprobs(batch))

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        handle = await self._call(lambda trainer: trainer.publish(keep))
        freed = {*versions_to_free(self._readable, keep), handle.version}
        self._readable = [one for one in self._readable if one not in freed] + [handle.version]
        self._forget()
        return handle

    async def save_checkpoint(
        self, path: Path, attachments: Mapping[str, bytes], *, version: int
    ) -> None:
        await self._call(
            lambda trainer: trainer.save_checkpoint(path, attachments, version=version)
        )
        self._saving = _Start(version=version, checkpoint=path), self.trainer

    async def finish_checkpoint(self) -> None:
        saving = self._saving
        if saving is None:
            return
        start, trainer = saving
        try:
            await trainer.finish_checkpoint()
        except (TrainerLostError, DeadlineError) as error:
            self._restart(trainer, error)
            raise CheckpointError(f"{start.checkpoint}: {one_line(error)}") from error
        finally:
            if self._saving is saving:
                self._saving = None
        self._starts.append(start)
        self._forget()

    async def load_checkpoint(self, path: Path) -> None:
        await self._call(lambda trainer: trainer.load_checkpoint(path))
        position = await asyncio.to_thread(read_position, path)
        self._version = position.version
        self._starts = [_Start(version=self._version, checkpoint=path)]

    async def offload(self) -> None:
        await self._call(lambda trainer: trainer.offload())
        self.is_offloaded = True

    async def onload(self) -> None:
        await self._call(lambda trainer: trainer.onload())
        self.is_offloaded = False

    async def export_hf(self, path: Path) -> None:
        await self._call(lambda trainer: trainer.export_hf(path))

    async def close(self) -> None:
        self._set_given_up("the run has ended")  # a call that still runs starts it no more
        await cancel_all(filter(None, [self._watching, self._restarting]))
        if self._failure is not None:
            self._report(self._failure.ended("the run ended first"))
        await asyncio.to_thread(self.steps.close)

    async def _call(self, ask: Callable[[TrainerProcesses], Awaitable[_T]]) -> _T:
        while True:
            if self._restarting is not None:
                await asyncio.shield(self._restarting)
            if self._given_up.done():
                raise TrainerLostError(self._given_up.result())
            trainer = self.trainer
            try:
                return await ask(trainer)
            except DeviceMemoryError:
                raise  # the same step would need as much again
            except (TrainerLostError, DeadlineError) as error:
                self._restart(trainer, error)

    def _watched(self, trainer: TrainerProcesses) -> asyncio.Task[None]:
        return asyncio.create_task(self._watch(trainer), name="watch over the trainer")

    async def _watch(self, trainer: TrainerProcesses) -> None:
        """Start the trainer again as soon as it is lost, whether or not a call runs."""
        try:
            await trainer.wait_until_lost()
        except TrainerLostError as error:
            restart = partial(self._restart, trainer, error)
            if not self.is_offloaded:
                restart()
            elif self._restarting is None and not self._given_up.done():
                self._note(trainer, error)
                self.weights.lose_source(on_wanted=restart)

    def _restart(self, lost: TrainerProcesses, error: TorchtitanRLError) -> None:
        """Begin to replace ``lost``, unless that has begun."""
        if lost is not self.trainer or self._restarting is not None or self._given_up.done():
            return
        lost.lose(error)
        self.weights.lose_source()
        failure = self._note(lost, error)
        self._restarting = asyncio.create_task(
            self._replace(failure), name="restart of the trainer"
        )
        self._restarting.add_done_callback(self._on_end)

    def _note(self, lost: TrainerProcesses, error: TorchtitanRLError) -> Failure:
        self._failure = failure = Failure.of(Part.TRAINER, lost.name, error, now_s=loop_s())
        return failure

    def _report(self, failure: Failure) -> None:
        self._failure = None
        self.on_failure(failure)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._restarting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            why = f"the restart of the trainer failed: {error!r}"
            if self._failure is not None:
                self._report(self._failure.ended(why))
            self._set_given_up(why)

    async def _replace(self, failure: Failure) -> None:
        lost, cause = self.trainer, failure.cause
        while True:
            why = self._why_not()
            if why:
                self._give_up(failure, f"{cause}; {why}")
                return
            self._num_restarts += 1
            start = self._choose_start()
            num_steps = self._version - start.version
            origin = "the initial policy" if start.checkpoint is None else start.checkpoint.name
            self.say(
                f"{lost.name} is lost and is started again, from {origin}; {num_steps} steps "
                f"are taken again: {cause}"
            )
            with suppress(TorchtitanRLError):  # nothing answers
                await lost.close()
            try:
                lost = await self.start()
                self._failure = failure = failure.restarted(lost.name, now_s=loop_s())
                handles = await self._retake(lost, start)
                break
            except (DivergedError, DeviceMemoryError) as error:
                self._give_up(failure, str(error))
                return
            except (TorchtitanRLError, OSError, KeyError, msgspec.DecodeError) as error:
                cause = str(error) if isinstance(error, TorchtitanRLError) else one_line(error)
            await asyncio.sleep(restart_delay_s(self._num_restarts))
        await cancel_all([self._watching])
        self.trainer, self._watching = lost, self._watched(lost)
        self.weights.renew_source(handles)
        self._report(failure.serving(now_s=loop_s(), steps_again=num_steps))

    async def _retake(self, trainer: TrainerProcesses, start: _Start) -> dict[int, WeightHandle]:
        """Bring a new trainer to the current version. Returns what it published."""
        handles: dict[int, WeightHandle] = {}
        keep = frozenset(self._readable)
        if start.checkpoint is not None:
            await trainer.load_checkpoint(start.checkpoint)
        if start.version in keep:
            handles[start.version] = await trainer.publish(keep)
        for taken in self.steps.since(start.version, self._version):
            batch, examples = await asyncio.to_thread(taken.read)
            output = await trainer.train_step(batch, taken.loss, examples=examples)
            if taken.digest not in (None, output.metrics.get("weights_digest")):
                self.say(
                    f"version {output.version}, which was trained again, differs from the one "
                    "that was published: this device does not compute the same twice"
                )
            if output.version in keep:
                handles[output.version] = await trainer.publish(keep)
        if self.is_offloaded:
            await trainer.offload()
        return handles

    def _why_not(self) -> str:
        """Return why the trainer is not started again; empty if it is."""
        if self._num_restarts >= self.max_restarts:
            return f"it was started again {self._num_restarts} times without a new step"
        if self._unwritten is not None:
            version, why = self._unwritten
            if version >= self._choose_start().version:
                return f"it cannot be started again, because a batch was not stored: {why}"
        return ""

    def _choose_start(self) -> _Start:
        """Return the newest start before all readable versions; if its checkpoint was removed, the
        oldest start that is left."""
        left = [one for one in self._starts if one.checkpoint is None or one.checkpoint.exists()]
        oldest = min(self._readable, default=self._version)
        return max(
            (one for one in left if one.version <= oldest),
            key=lambda one: one.version,
            default=left[0] if left else self._starts[-1],
        )

    def _forget(self) -> None:
        """Forget starts, and the steps before them, that no restart needs any more."""
        oldest = min(self._readable, default=self._version)
        usable = [one for one in self._starts if one.version <= oldest]
        if usable:
            self._starts = self._starts[self._starts.index(usable[-1]) :]
        self.steps.drop_before(self._starts[0].version)

    async def _write(
        self, batch: TrainingBatch, loss: StepLoss | None, examples: Examples
    ) -> TakenStep | None:
        version = self._version
        try:
            self.check()
            return await asyncio.to_thread(self.steps.write, version, batch, loss, examples)
        except (OSError, OutputError) as error:
            if self._unwritten is None:
                self.say(f"until the next checkpoint a lost trainer ends the run: {error}")
            self._unwritten = version, str(error)
            return None

    def _give_up(self, failure: Failure, why: str) -> None:
        self._report(failure.ended(why))
        self._set_given_up(why)

    def _set_given_up(self, why: str) -> None:
        if not self._given_up.done():
            self._given_up.set_result(why)
