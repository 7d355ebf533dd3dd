"""Runs the policy trainer in separate processes, on one or more hosts: one actor per rank.

Every rank gets the whole batch and computes its share. The controller makes one call after another,
so that the ranks' collectives match. A call goes from `MonarchTrainer` to `TrainerActor`,
`TrainerRank` and `PolicyTrainer`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.aio import cancel_all, retrieve
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ActorThread,
    ProcessMesh,
    call,
    spawn_on_hosts,
    stop_processes,
)
from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import CheckpointError, DeadlineError, ProcessLostError, TrainerLostError
from torchtitan_rl.processes import collecting_later
from torchtitan_rl.training.batch import Examples, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.weights.config import Transport
from torchtitan_rl.weights.distribution import WeightHandle

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0
_LAST_WRITE_TIMEOUT_S = 300.0
_CAUSE_S = 1.0


class TrainerActor(Actor):
    """One rank of the trainer. Work runs in a separate thread, so that the actor always answers; in
    only one, because each computing thread would have its own OMP threads."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._rank = int(os.environ.get("RANK", "0"))  # unset for a single rank
        self._attachments: dict[str, bytes] = {}
        self._work = ActorThread("trainer").run

    @concurrent_endpoint
    async def start(self, transport: Transport) -> None:
        with collecting_later():
            from torchtitan_rl.backends.monarch.trainer_rank import TrainerRank

            self._trainer = await self._work(TrainerRank, self._spec, self._rank, transport)

    @concurrent_endpoint
    async def run(self, method: str, *arguments: Any) -> Any:
        """Call a method of `TrainerRank`."""
        return await self._work(getattr(self._trainer, method), *arguments)

    @concurrent_endpoint
    async def stay(self) -> None:
        """Never return. The caller gets an error when this process, or its host, is gone."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def attach(self, attachments: dict[str, bytes]) -> None:
        """Set additional files of the next checkpoint. Only on rank 0."""
        self._attachments = attachments

    @concurrent_endpoint
    async def save_checkpoint(self, path: Path, version: int) -> None:
        attachments, self._attachments = self._attachments, {}
        await self._work(self._trainer.save_checkpoint, path, attachments, version)

    @concurrent_endpoint
    async def finish_checkpoint(self) -> None:
        await asyncio.to_thread(self._trainer.finish_checkpoint)  # only waits


class MonarchTrainer:
    """A `Trainer` whose ranks are Monarch actors."""

    def __init__(self, meshes: Sequence[ProcessMesh], specs: Sequence[TrainerSpec]) -> None:
        self.name = meshes[0].name
        self._meshes = tuple(meshes)
        self._timeout_s = specs[0].trainer.step_timeout_s
        self._parts: list[Any] = [
            mesh.mesh.spawn("trainer", TrainerActor, spec)
            for mesh, spec in zip(meshes, specs, strict=True)
        ]
        self._leader = self._parts[0].slice(ranks=0)
        self._writing: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._watching = [
            asyncio.create_task(self._watch(part, mesh))
            for part, mesh in zip(self._parts, self._meshes, strict=True)
        ]

    @classmethod
    async def spawn(
        cls, group: ProcessGroup, spec: TrainerSpec, hosts: Hosts | None = None
    ) -> MonarchTrainer:
        """Start the processes; `start` then builds the model in them. ``spec.checkpoint`` is its
        path on the controller's host."""
        hosts = hosts or Hosts()
        meshes = await spawn_on_hosts(group, log_dir=spec.log_dir, hosts=hosts)
        there = [hosts[part.host].policy_dir for part in group.on_each_host()]
        return cls(meshes, [replace(spec, checkpoint=one or spec.checkpoint) for one in there])

    async def start(self, transport: Transport) -> None:
        """Build the model. Weights will be published through ``transport``."""
        await self._ask("start", lambda rank: rank.start.call(transport))

    async def wait_until_lost(self) -> None:
        cause = await asyncio.shield(self._lost)
        raise TrainerLostError(str(cause)) from cause

    async def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None = None, *, examples: Examples = None
    ) -> StepOutput:
        return await self._run("optimizer step", "train_step", batch, loss, examples)

    async def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        return await self._run("logprobs", "logprobs", batch)

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        return await self._run("publishing of weights", "publish", keep)

    async def save_checkpoint(
        self, path: Path, attachments: Mapping[str, bytes], *, version: int
    ) -> None:
        await self.finish_checkpoint()
        what = f"checkpoint {path}"
        await self._wait(self._leader.attach.call_one(dict(attachments)), what)
        await self._ask(what, lambda rank: rank.save_checkpoint.call(path, version))
        # All callers share one wait, because the ranks report a failure only once.
        self._writing = asyncio.ensure_future(
            self._ask(f"writing of {what}", lambda rank: rank.finish_checkpoint.call())
        )
        self._writing.add_done_callback(retrieve)  # a caller that awaits it gets its error

    async def finish_checkpoint(self) -> None:
        writing = self._writing
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    async def load_checkpoint(self, path: Path) -> None:
        await self._run(f"loading of {path}", "pass_on", "load_checkpoint", path)

    async def offload(self) -> None:
        await self._run("offload", "pass_on", "offload")

    async def onload(self) -> None:
        await self._run("onload", "pass_on", "onload")

    async def export_hf(self, path: Path) -> None:
        await self._run(f"export to {path}", "pass_on", "export_hf", path)

    async def close(self) -> None:
        """Let the ranks finish a checkpoint and clean up, unless the trainer is lost. Then end
        their processes, even if they hang."""
        try:
            async with asyncio.timeout(_LAST_WRITE_TIMEOUT_S):
                await self.finish_checkpoint()
        except (CheckpointError, TrainerLostError, DeadlineError, TimeoutError) as error:
            logger.warning("the last checkpoint is lost: %s", error)
        try:
            if not self._lost.done():
                closed = self._answer(lambda rank: rank.run.call("close"))
                await call(closed, what="close of the trainer", timeout_s=_CLOSE_TIMEOUT_S)
        except (ProcessLostError, DeadlineError, CheckpointError):
            pass  # the processes end below, whatever state they are in
        finally:
            await cancel_all(self._watching)
            await asyncio.gather(*map(stop_processes, self._meshes))

    def lose(self, cause: BaseException) -> None:
        """Let all running and later calls fail: a process or host is lost, or does not answer."""
        if not self._lost.done():
            self._lost.set_result(cause)

    async def _watch(self, part: Any, mesh: ProcessMesh) -> None:
        try:
            await mesh.call(part.stay.call(), what="trainer")
        except (ProcessLostError, DeadlineError) as error:
            self.lose(error)

    async def _run(self, what: str, method: str, *arguments: Any) -> Any:
        return await self._ask(what, lambda rank: rank.run.call(method, *arguments))

    async def _ask(self, what: str, ask: Callable[[Any], Any]) -> Any:
        """Return rank 0's answer, once all ranks have answered. ``ask`` calls the actors of one
        host. Raises the error of the first rank that fails."""
        return await self._wait(self._answer(ask), what)

    async def _answer(self, ask: Callable[[Any], Any]) -> Any:
        answers = await asyncio.gather(*map(ask, self._parts))  # raises the first error
        return next(iter(answers[0].values()))

    async def _wait(self, answer: Any, what: str) -> Any:
        calling = asyncio.ensure_future(
            call(answer, what=f"trainer: {what}", timeout_s=self._timeout_s)
        )
        calling.add_done_callback(retrieve)  # also if this call is cancelled
        try:
            await asyncio.wait({calling, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                cause = self._lost.result()
                raise TrainerLostError(str(cause)) from cause
            return calling.result()
        except ProcessLostError as error:
            # Monarch may have noticed it first; `_watch` knows what happened.
            await asyncio.wait([self._lost], timeout=_CAUSE_S)
            cause = self._lost.result() if self._lost.done() else error
            raise TrainerLostError(str(cause)) from cause
        finally:
            calling.cancel()
