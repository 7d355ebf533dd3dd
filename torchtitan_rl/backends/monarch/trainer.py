"""The policy trainer in processes of its own: one actor a rank, called together.

Every rank gets the whole batch and takes its share. Calls come one after another from the
controller, so that collectives line up.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint, current_rank

from torchtitan_rl.backends.monarch.runtime import (
    ProcessLostError,
    ProcessMesh,
    call,
    spawn_processes,
    stop_processes,
)
from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import CheckpointError, DeadlineError, TrainerLostError
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.transport import Transport

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 60.0
_LAST_WRITE_TIMEOUT_S = 300.0


class TrainerActor(Actor):
    """One rank of the trainer. Work runs in one thread, so that the actor always answers, and one
    only, since each thread that computes would have OMP threads of its own."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._rank = current_rank().rank
        self._attachments: dict[str, bytes] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def _work(self, function: Callable[..., _T], *arguments: Any) -> _T:
        # Monarch finds the actor to act for in a context variable.
        work = functools.partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @concurrent_endpoint
    async def start(self, transport: Transport) -> None:
        from torchtitan_rl.backends.monarch.trainer_rank import TrainerRank

        self._trainer = await self._work(TrainerRank, self._spec, self._rank, transport)

    @concurrent_endpoint
    async def run(self, method: str, *arguments: Any) -> Any:
        """A method of `TrainerRank`."""
        return await self._work(getattr(self._trainer, method), *arguments)

    @concurrent_endpoint
    async def attach(self, attachments: dict[str, bytes]) -> None:
        """On rank 0 alone: additional files of the next checkpoint."""
        self._attachments = attachments

    @concurrent_endpoint
    async def save_checkpoint(self, path: Path, state: dict[str, Any], version: int) -> None:
        attachments, self._attachments = self._attachments, {}
        await self._work(self._trainer.save_checkpoint, path, state, attachments, version)

    @concurrent_endpoint
    async def finish_checkpoint(self) -> None:
        await asyncio.to_thread(self._trainer.finish_checkpoint)  # only waits


class MonarchTrainer:
    """A `Trainer` whose ranks are Monarch actors."""

    def __init__(self, mesh: ProcessMesh, spec: TrainerSpec) -> None:
        self._mesh = mesh
        self._timeout_s = spec.trainer.step_timeout_s
        self._ranks = mesh.mesh.spawn("trainer", TrainerActor, spec)
        self._leader = self._ranks.slice(ranks=0)
        self._writing: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, group: ProcessGroup, spec: TrainerSpec) -> MonarchTrainer:
        """Start the processes; `start` then builds the model in them."""
        return cls(await spawn_processes(group, log_dir=spec.log_dir), spec)

    @property
    def host(self) -> str:
        """Where rank 0 runs, which publishes the weights."""
        return self._mesh.hosts[0]

    async def start(self, transport: Transport) -> None:
        """Build the model; weights will be published by way of ``transport``."""
        await self._call(self._ranks.start.call(transport), "start")

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        return await self._run("train_step", batch, what="optimizer step")

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        return await self._run("publish", keep, what="publishing of weights")

    async def save_checkpoint(
        self,
        path: Path,
        state: dict[str, Any],
        attachments: Mapping[str, bytes] | None = None,
        *,
        version: int,
    ) -> None:
        await self.finish_checkpoint()
        what = f"checkpoint {path}"
        if attachments:
            await self._call(self._leader.attach.call(dict(attachments)), what)
        await self._call(self._ranks.save_checkpoint.call(path, state, version), what)
        # One wait for all who ask: the ranks tell a failure once.
        self._writing = asyncio.ensure_future(self._write(what))
        self._writing.add_done_callback(_retrieve)

    async def finish_checkpoint(self) -> None:
        writing = self._writing
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    async def _write(self, what: str) -> None:
        await self._call(self._ranks.finish_checkpoint.call(), f"writing of {what}")

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        return await self._run("load_checkpoint", path, what=f"loading of {path}")

    async def offload(self) -> None:
        await self._run("offload")

    async def onload(self) -> None:
        await self._run("onload")

    async def export_hf(self, path: Path) -> None:
        await self._run("export_hf", path, what=f"export to {path}")

    async def close(self) -> None:
        """Let the ranks finish a checkpoint and clean up (published weights, above all), then end
        them in any case."""
        try:
            async with asyncio.timeout(_LAST_WRITE_TIMEOUT_S):
                await self.finish_checkpoint()
        except (CheckpointError, TrainerLostError, DeadlineError, TimeoutError) as error:
            logger.warning("the last checkpoint is lost: %s", error)
        try:
            await call(
                self._ranks.run.call("close"),
                what="close of the trainer",
                timeout_s=_CLOSE_TIMEOUT_S,
            )
        except (ProcessLostError, DeadlineError, CheckpointError):
            pass  # the processes end below, whatever state they are in
        finally:
            await stop_processes(self._mesh)

    async def _call(self, answers: Any, what: str) -> Any:
        try:
            return await call(answers, what=f"trainer: {what}", timeout_s=self._timeout_s)
        except ProcessLostError as error:
            raise TrainerLostError(str(error)) from error

    async def _run(self, method: str, *arguments: Any, what: str = "") -> Any:
        """Rank 0's answer; the others' are the same, or None."""
        answers = await self._call(self._ranks.run.call(method, *arguments), what or method)
        return answers.item(ranks=0)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark the failure as retrieved: a caller that awaits the task still gets it."""
    if not task.cancelled():
        task.exception()
