"""Monarch processes: spawning a mesh of them with its environment, calling them, ending them.

Faults are supervised on purpose: Monarch's default for one that nobody handles is to end the
controller; ours notes it, because every caller of a lost process gets an error of its own.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError, ProcMesh, current_rank, this_host
from monarch.spmd import setup_torch_elastic_env_async

from torchtitan_rl.cpu_cores import stay_on_cores
from torchtitan_rl.errors import DeadlineError, ReplicaError, TorchtitanRLError
from torchtitan_rl.plan import ProcessGroup

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 20.0

ACTOR_NAMES = ("generator", "trainer", "endpoint")  # as our meshes are named


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
    if group.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(group.devices)
    return environment


async def spawn_processes(
    group: ProcessGroup, environment: Mapping[str, str], *, log_dir: Path
) -> ProcMesh:
    """Fresh processes on this host with torchrun's variables (RANK, WORLD_SIZE, MASTER_*) set.

    What they print goes to ``log_dir``, which exists, a file each.
    """
    log_file = str(log_dir / f"{group.name}-rank{{rank}}.log")
    mesh = this_host().spawn_procs(
        per_host={"ranks": group.ranks},
        bootstrap=functools.partial(_prepare_process, dict(environment), log_file, group.cores),
        name=group.name,
    )
    await setup_torch_elastic_env_async(mesh, *_free_endpoint())
    return mesh


def _prepare_process(environment: dict[str, str], log_file: str, cores: tuple[int, ...]) -> None:
    """Runs first in each process. Its own process group keeps a terminal's Ctrl-C from it: the
    controller decides how to end."""
    os.environ.update(environment)
    stay_on_cores(cores)
    os.setpgid(0, 0)
    path = log_file.format(rank=current_rank().rank)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)


def _free_endpoint() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def host_name() -> str:
    """Of the machine that the calling process runs on: equal where memory can be shared."""
    return socket.gethostname()


async def call(awaitable: Awaitable[_T], *, what: str, timeout_s: float | None = None) -> _T:
    """The answer of an actor, with its errors as ours.

    Raises:
        TorchtitanRLError: what the actor raised, if it was one of ours.
        ProcessLostError: the process is gone, or the actor raised something else.
        DeadlineError: no answer within ``timeout_s``.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await awaitable
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not end within {timeout_s:.0f} s") from error
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


async def stop_processes(mesh: ProcMesh) -> None:
    """End a mesh's processes; one that is dead already is no error."""
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await mesh.stop()
    except (SupervisionError, RuntimeError, TimeoutError) as error:
        logger.warning("a mesh did not stop in order: %s", str(error).splitlines()[0])
