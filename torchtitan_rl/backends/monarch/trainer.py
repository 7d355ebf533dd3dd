"""The policy trainer in processes of its own: one actor a rank, called together, on one host or
several.

Every rank gets the whole batch and takes its share. Calls come one after another from the
controller, so that collectives line up.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.aio import cancel_all, retrieve
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.backends.monarch.runtime import (
    ProcessLostError,
    ProcessMesh,
    call,
    spawn_on_hosts,
    stop_processes,
)
from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.config.plan import ProcessGroup
from torchtitan_rl.errors import CheckpointError, DeadlineError, TrainerLostError
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.config import Transport
from torchtitan_rl.weights.handle import WeightHandle

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLOSE_TIMEOUT_S = 60.0
_LAST_WRITE_TIMEOUT_S = 300.0


class TrainerActor(Actor):
    """One rank of the trainer. Work runs in one thread, so that the actor always answers, and one
    only, since each thread that computes would have OMP threads of its own."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._rank = int(os.environ.get("RANK", "0"))  # alone without it
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
    async def stay(self) -> None:
        """Never answers; fails when this process, or its host, is gone."""
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def attach(self, attachments: dict[str, bytes]) -> None:
        """On rank 0 alone: additional files of the next checkpoint."""
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
        self._meshes = tuple(meshes)
        self._timeout_s = specs[0].trainer.step_timeout_s
        self._parts: list[Any] = [
            mesh.mesh.spawn("trainer", TrainerActor, spec)
            for mesh, spec in zip(meshes, specs, strict=True)
        ]
        self._leader = self._parts[0].slice(ranks=0)
        self._writing: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching = [asyncio.create_task(self._watch(part)) for part in self._parts]

    @classmethod
    async def spawn(
        cls, group: ProcessGroup, spec: TrainerSpec, hosts: Hosts | None = None
    ) -> MonarchTrainer:
        """Start the processes; `start` then builds the model in them. ``spec.checkpoint`` is where
        the controller has it."""
        hosts = hosts or Hosts()
        meshes = await spawn_on_hosts(group, log_dir=spec.log_dir, hosts=hosts)
        there = [hosts[part.host].policy_dir for part in group.on_each_host()]
        return cls(meshes, [replace(spec, checkpoint=one or spec.checkpoint) for one in there])

    async def start(self, transport: Transport) -> None:
        """Build the model; weights will be published by way of ``transport``."""
        await self._on_all("start", transport, what="start")

    async def wait_until_lost(self) -> None:
        raise TrainerLostError(await asyncio.shield(self._lost))

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        return await self._run("train_step", batch, what="optimizer step")

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        return await self._run("publish", keep, what="publishing of weights")

    async def save_checkpoint(
        self, path: Path, attachments: Mapping[str, bytes], *, version: int
    ) -> None:
        await self.finish_checkpoint()
        what = f"checkpoint {path}"
        await self._call(self._leader.attach.call_one(dict(attachments)), what)
        await self._on_all("save_checkpoint", path, version, what=what)
        # One wait for all who ask: the ranks tell a failure once.
        self._writing = asyncio.ensure_future(self._write(what))
        self._writing.add_done_callback(retrieve)  # who awaits it gets its error

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
        await self._on_all("finish_checkpoint", what=f"writing of {what}")

    async def load_checkpoint(self, path: Path) -> None:
        await self._run("load_checkpoint", path, what=f"loading of {path}")

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
            closed = self._answers("run", "close")
            await call(closed, what="close of the trainer", timeout_s=_CLOSE_TIMEOUT_S)
        except (ProcessLostError, DeadlineError, CheckpointError):
            pass  # the processes end below, whatever state they are in
        finally:
            await cancel_all(self._watching)
            await asyncio.gather(*map(stop_processes, self._meshes))

    async def _answers(self, endpoint: str, *arguments: Any) -> list[Any]:
        """Of all ranks, in their order; the error of the first that fails."""
        calls = [getattr(part, endpoint).call(*arguments) for part in self._parts]
        return [answer for part in await asyncio.gather(*calls) for answer in part.values()]

    async def _on_all(self, endpoint: str, *arguments: Any, what: str) -> list[Any]:
        answers: list[Any] = await self._call(self._answers(endpoint, *arguments), what)
        return answers

    def lose(self, cause: str) -> None:
        """A process or a host of its ranks is lost: every call that runs, and every later one,
        fails."""
        if not self._lost.done():
            self._lost.set_result(cause)

    async def _watch(self, part: Any) -> None:
        """A process that dies while nobody calls it is noticed, too."""
        try:
            await call(part.stay.call(), what="trainer")
        except (ProcessLostError, DeadlineError) as error:
            self.lose(str(error))

    async def _call(self, answers: Any, what: str) -> Any:
        calling = asyncio.ensure_future(
            call(answers, what=f"trainer: {what}", timeout_s=self._timeout_s)
        )
        calling.add_done_callback(retrieve)  # also where this call is cancelled
        try:
            await asyncio.wait({calling, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise TrainerLostError(self._lost.result())
            return calling.result()
        except ProcessLostError as error:
            raise TrainerLostError(str(error)) from error
        finally:
            calling.cancel()

    async def _run(self, method: str, *arguments: Any, what: str = "") -> Any:
        """Rank 0's answer; the others' are the same, or None."""
        return (await self._on_all("run", method, *arguments, what=what or method))[0]
