"""Monarch processes: spawning a mesh of them with its environment, calling them, ending them.

Faults are supervised: by default Monarch ends the controller at an unhandled fault. This module
only records it, because every caller of a lost process gets an error of its own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    default_bootstrap_cmd,
    this_host,
)
from monarch.spmd import setup_torch_elastic_env_async

from torchtitan_rl.backends.monarch.cpu_cores import stay_on_cores
from torchtitan_rl.backends.monarch.ports import free_port
from torchtitan_rl.backends.monarch.processes import Processes
from torchtitan_rl.config.plan import KEEPS_MEMORY, ProcessGroup
from torchtitan_rl.deadlines import deadline
from torchtitan_rl.errors import DeadlineError, ReplicaError, TorchtitanRLError
from torchtitan_rl.weights.transport import host_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 15.0  # of what Monarch does to end a mesh
_EXIT_TIMEOUT_S = 5.0  # until its processes have exited
_ASK_TIMEOUT_S = 60.0

ACTOR_NAMES = ("generator", "trainer", "endpoint", "weights")  # as our meshes are named


class ProcessLostError(ReplicaError):
    """A process died, or the actor in it did."""


def supervise() -> None:
    """Keep the controller alive when a process of its meshes dies."""
    monarch.actor.unhandled_fault_hook = _note_fault


def _note_fault(failure: Any) -> None:
    # Each mesh has actors of Monarch's own, whose failures say the same once more.
    if failure.mesh_name.startswith(ACTOR_NAMES):
        logger.warning("a process is lost: %s", failure)


def process_environment(group: ProcessGroup) -> dict[str, str]:
    """What each process of a group has in its environment, whatever the user's shell says."""
    environment = {
        "OMP_NUM_THREADS": str(group.threads),
        "MKL_NUM_THREADS": str(group.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    if group.yields_cores:
        environment["OMP_WAIT_POLICY"] = "passive"
    if group.keeps_memory:
        environment |= KEEPS_MEMORY
    if group.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(group.devices)
    return environment


class _ProcessActor(Actor):
    @concurrent_endpoint
    async def identity(self) -> tuple[int, str]:
        return os.getpid(), host_name()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """A mesh whose processes can be ended in any case."""

    name: str
    mesh: ProcMesh
    processes: Processes
    hosts: tuple[str, ...]  # of each rank


async def spawn_processes(
    group: ProcessGroup, *, log_dir: Path, environment: Mapping[str, str] | None = None
) -> ProcessMesh:
    """Fresh processes on this host with torchrun's variables (RANK, WORLD_SIZE, MASTER_*) set.

    What they print goes to ``log_dir``, which exists, a file each. They have the environment of
    their group, and ``environment``, from their first instruction on: a preloaded OpenMP library
    reads its variables before Python starts.
    """
    variables = process_environment(group) | dict(environment or {})
    log_file = str(log_dir / f"{group.name}-rank{{rank}}.log")
    mesh = this_host().spawn_procs(
        per_host={"ranks": group.ranks},
        bootstrap=functools.partial(_prepare_process, log_file, group.cores),
        name=group.name,
        bootstrap_command=default_bootstrap_cmd().with_env(variables),
    )
    await setup_torch_elastic_env_async(mesh, "127.0.0.1", free_port())
    actors: Any = mesh.spawn("process", _ProcessActor)
    what = f"start of the processes of {group.name}"
    answers = await call(actors.identity.call(), what=what, timeout_s=_ASK_TIMEOUT_S)
    pids, hosts = zip(*answers.values(), strict=True)
    return ProcessMesh(name=group.name, mesh=mesh, processes=Processes(pids), hosts=hosts)


def _prepare_process(log_file: str, cores: tuple[int, ...]) -> None:
    """Runs first in each process. Its own process group keeps a terminal's Ctrl-C from it: the
    controller decides how to end."""
    stay_on_cores(cores)
    os.setpgid(0, 0)
    path = log_file.format(rank=current_rank().rank)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)


async def call(awaitable: Awaitable[_T], *, what: str, timeout_s: float | None = None) -> _T:
    """The answer of an actor, with its errors as ours.

    Raises:
        TorchtitanRLError: what the actor raised, if it was one of ours.
        ProcessLostError: the process is gone, or the actor raised something else.
        DeadlineError: no answer within ``timeout_s``, or what carries it gave up.
    """
    limit: asyncio.Timeout | None = None
    try:
        async with deadline(timeout_s) as limit:
            return await awaitable
    except TimeoutError as error:
        if limit is not None and limit.expired():
            raise DeadlineError(f"{what} did not end within {timeout_s} s") from error
        raise DeadlineError(f"{what} timed out: {first_line(error)}") from error
    except ActorError as error:
        if isinstance(error.exception, TorchtitanRLError):
            raise error.exception from error
        raise ProcessLostError(f"{what} failed: {error}") from error
    except SupervisionError as error:
        raise ProcessLostError(f"{what}: {error}") from error


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    """All of it, or the first error, with the rest cancelled."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def stop_processes(mesh: ProcessMesh) -> None:
    """End a mesh's processes, by a kill where they do not end by themselves; one that is dead
    already is no error. One line says what went wrong."""
    complaint = ""
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await mesh.mesh.stop()
    except TimeoutError:
        complaint = f"no end within {_STOP_TIMEOUT_S:.0f} s"
    except (SupervisionError, RuntimeError) as error:
        complaint = first_line(error)
    if not await mesh.processes.wait(_EXIT_TIMEOUT_S):
        killed = mesh.processes.kill()
        complaint = f"processes {killed} were killed, for they did not end by themselves"
        await mesh.processes.wait(_EXIT_TIMEOUT_S)
    mesh.processes.close()
    if complaint:
        logger.warning("%s did not stop in order: %s", mesh.name, complaint)


def first_line(error: BaseException) -> str:
    """What an error says, in one line, also where it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
