"""Starts meshes of Monarch processes, calls their actors, exchanges messages with them, and ends
them.

By default Monarch ends the controller at an unhandled fault. This module only logs the fault,
because every caller of a lost process gets its own error.

An `ActorChannel` carries batches of messages between the controller and one actor, without answers:
0.1 ms of CPU time a message (in both processes together), where a call, which has an answer, costs
0.7 ms. Invariants: batches arrive in order, each once. One call of `serve_channel` lasts as long as
the channel: an error of this call, or the end of the actor's process, ends the channel.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Generic, NoReturn, TypeVar

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    Port,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
)

from torchtitan_rl.aio import cancel_all, deadline, first_of, retrieve
from torchtitan_rl.backends.monarch import log_to_stderr
from torchtitan_rl.backends.monarch.hosts import HeldProcesses, Host, Hosts, start_command
from torchtitan_rl.config.machine import host_name
from torchtitan_rl.config.plan import KEEPS_MEMORY, ProcessGroup
from torchtitan_rl.errors import DeadlineError, ProcessLostError, TorchtitanRLError
from torchtitan_rl.generation.commands import copy_of
from torchtitan_rl.launch.interfaces import take_port
from torchtitan_rl.observability.trace import HOST_VARIABLE
from torchtitan_rl.processes import LOOK_S, MARK_VARIABLE, stay_on_cores

logger = logging.getLogger(__name__)
_monarch_logger = logging.getLogger("monarch")  # whose messages do not reach the console

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 15.0  # for Monarch to end a mesh
_LOST_STOP_S = 2.0  # for Monarch to forget a mesh whose processes were killed
_EXIT_TIMEOUT_S = 5.0  # for the mesh's processes to exit
_NEXT_LOOK_S = 2 * LOOK_S
_KILL_S = 0.1  # what did not start gets no time to end by itself
_ASK_TIMEOUT_S = 60.0
_SPAWN_ERRORS = (RuntimeError, ValueError)  # Monarch's, for a process that ends while it starts
_MAX_CAUSE = 300  # characters

ACTOR_NAMES = ("generator", "trainer", "endpoint", "weights")  # the names of our meshes


def supervise() -> None:
    """Keep the controller alive when a process of its meshes dies, and redirect Monarch's log to
    stderr."""
    log_to_stderr()
    monarch.actor.unhandled_fault_hook = _note_fault


def _note_fault(failure: Any) -> None:
    # Each mesh also has Monarch's own actors, whose failures would repeat the same message.
    if failure.mesh_name.startswith(ACTOR_NAMES):
        _monarch_logger.warning("a process is lost: %s", failure)


def process_environment(group: ProcessGroup) -> dict[str, str]:
    """Return a group's environment variables, which override those of the user's shell."""
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


def _host_environment(host: Host) -> dict[str, str]:
    """Return the variable that names the host whose clock a process uses
    (`observability.trace`)."""
    return {HOST_VARIABLE: host_name(host.index)} if host.agent is not None else {}


def _host_prefix(host: Host) -> str:
    """Return the prefix of the host's file names, because hosts may share a folder."""
    return f"{host_name(host.index)}-" if host.agent is not None else ""


class _ProcessActor(Actor):
    """One rank of a mesh. ``first_rank`` is the number of ranks on earlier hosts."""

    def __init__(self, first_rank: int) -> None:
        self._local_rank = current_rank().rank
        self._rank = first_rank + self._local_rank

    @concurrent_endpoint
    async def answer(self) -> None:
        """Return at once."""

    @concurrent_endpoint
    async def take_port(self, ip: str) -> int:
        return take_port(ip)

    @concurrent_endpoint
    async def join(self, ip: str, port: int, world_size: int) -> None:
        """Set torchrun's variables, by which the ranks of all hosts find each other."""
        os.environ |= {
            "MASTER_ADDR": ip,
            "MASTER_PORT": str(port),
            "RANK": str(self._rank),
            "LOCAL_RANK": str(self._local_rank),
            "WORLD_SIZE": str(world_size),
            # This tells torch that a store already runs, so that no rank starts one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """A mesh whose processes can be ended even if they hang. All are on one host."""

    name: str
    mesh: ProcMesh
    processes: HeldProcesses
    actors: Any  # a `_ProcessActor` in each process
    watch: asyncio.Future[NoReturn]  # over the processes, from their first moment on

    async def wait_until_lost(self) -> NoReturn:
        """See `Processes.wait_until_lost`."""
        await asyncio.wait([self.watch])
        error = self.watch.exception()
        assert isinstance(error, ProcessLostError)
        raise copy_of(error)

    async def call(
        self, answer: Awaitable[Any], *, what: str, timeout_s: float | None = None
    ) -> Any:
        """As `runtime.call`; a process that ends or is stopped also ends the call, with the error
        of `wait_until_lost`."""
        calling = call(answer, what=what, timeout_s=timeout_s)
        try:
            return await first_of(calling, self.wait_until_lost())
        except ProcessLostError:
            # Monarch may have noticed it first, and cannot tell what happened.
            await asyncio.wait([self.watch], timeout=_NEXT_LOOK_S)
            if self.watch.done():
                await self.wait_until_lost()
            raise


async def spawn_processes(
    group: ProcessGroup,
    *,
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> ProcessMesh:
    """Like `spawn_on_hosts`, for a group on one host."""
    (mesh,) = await spawn_on_hosts(group, log_dir=log_dir, environment=environment, hosts=hosts)
    return mesh


async def spawn_on_hosts(
    group: ProcessGroup,
    *,
    log_dir: Path,
    environment: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
) -> tuple[ProcessMesh, ...]:
    """Start new processes: one mesh for each host of the group, in the order of their ranks. With
    several ranks, torchrun's variables (RANK, WORLD_SIZE, MASTER_*) are set.

    Each process prints to a file in ``log_dir`` on its host. The environment is set from the first
    instruction on, because a preloaded OpenMP library reads its variables before Python starts.

    Raises:
        ProcessLostError, DeadlineError: some processes did not start; the others are ended.
    """
    hosts = hosts or Hosts()
    places = [(part, hosts[part.host]) for part in group.on_each_host()]
    variables = dict(environment or {})
    spawning = [
        asyncio.ensure_future(_spawn(part, host, log_dir, variables)) for part, host in places
    ]
    try:
        meshes = tuple(await asyncio.gather(*spawning))  # raises the first error
        if group.ranks > 1:
            ip = "127.0.0.1" if len(places) == 1 else places[0][1].ip
            await _introduce(group, meshes, ip)
    except BaseException:
        await cancel_all(spawning)
        started = [one for one in spawning if not one.cancelled() and one.exception() is None]
        await asyncio.gather(*(stop_processes(one.result()) for one in started))
        raise
    return meshes


async def _introduce(group: ProcessGroup, meshes: Sequence[ProcessMesh], ip: str) -> None:
    what = f"start of the processes of {group.name}"
    first = meshes[0].actors.slice(ranks=0)
    taking = first.take_port.call_one(ip)
    port = await meshes[0].call(taking, what=what, timeout_s=_ASK_TIMEOUT_S)
    for mesh in meshes:
        joining = mesh.actors.join.call(ip, port, group.ranks)
        await mesh.call(joining, what=what, timeout_s=_ASK_TIMEOUT_S)


async def _spawn(
    group: ProcessGroup, host: Host, log_dir: Path, environment: Mapping[str, str]
) -> ProcessMesh:
    log_file = str(log_dir / f"{_host_prefix(host)}{group.name}-rank{{rank}}.log")
    mark = uuid.uuid4().hex
    mesh = host.mesh.spawn_procs(
        per_host={"ranks": group.ranks},
        bootstrap=functools.partial(_prepare_process, log_file, group.first_rank, group.cores),
        name=group.name,
        bootstrap_command=start_command(
            {MARK_VARIABLE: mark}
            | process_environment(group)
            | _host_environment(host)
            | dict(environment)
        ),
    )
    actors: Any = mesh.spawn("process", _ProcessActor, group.first_rank)
    what = f"start of the processes of {group.name} on {host.name}"
    answering = asyncio.ensure_future(
        call(actors.answer.call(), what=what, timeout_s=_ASK_TIMEOUT_S)
    )
    holding = asyncio.ensure_future(
        call(host.hold(mark, group.ranks), what=what, timeout_s=_ASK_TIMEOUT_S)
    )
    try:
        await asyncio.wait({answering, holding}, return_when=asyncio.FIRST_COMPLETED)
        if not holding.done():
            answering.result()  # raises its error
        processes = await holding
        watch = asyncio.ensure_future(processes.wait_until_lost(group.name))
        watch.add_done_callback(retrieve)
        started = ProcessMesh(
            name=group.name, mesh=mesh, processes=processes, actors=actors, watch=watch
        )
        await started.call(answering, what=what)
    except BaseException:
        await cancel_all([holding])
        await _kill_all(host, mark, answering)
        raise
    return started


async def _kill_all(host: Host, mark: str, answering: asyncio.Future[Any]) -> None:
    """Kill the processes of a mesh that does not start as a whole. Monarch may still start some of
    them until the first call of the mesh, ``answering``, has ended."""
    answering.add_done_callback(retrieve)
    with suppress(TorchtitanRLError, TimeoutError):
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            is_last = False
            while not is_last:
                await asyncio.wait([answering], timeout=_KILL_S)
                is_last = answering.done()
                left = await call(host.hold(mark, 0), what="end of what has started")
                await left.end(_KILL_S)


def _prepare_process(log_file: str, first_rank: int, cores: tuple[int, ...]) -> None:
    """Prepare a new process. It gets its own process group, so that it does not get a terminal's
    Ctrl-C: the controller decides how the run ends."""
    stay_on_cores(cores)
    os.setpgid(0, 0)
    path = Path(log_file.format(rank=first_rank + current_rank().rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    log_to_stderr()


async def call(awaitable: Awaitable[_T], *, what: str, timeout_s: float | None = None) -> _T:
    """Return an actor's answer, and convert its errors to ours.

    Raises:
        TorchtitanRLError: the actor raised this error.
        ProcessLostError: the process is gone, or the actor raised something else.
        DeadlineError: there was no answer within ``timeout_s``, or the transport timed out.
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
    except _SPAWN_ERRORS as error:
        cause = shorten(first_line(error), _MAX_CAUSE)
        raise ProcessLostError(f"{what} failed: {cause}") from error


class ActorThread:
    """The single thread in which an actor works, so that the actor's event loop always answers."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        # Monarch finds the current actor in a context variable.
        work = functools.partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def all_of(*work: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def stop_processes(mesh: ProcessMesh) -> None:
    """End a mesh's processes, and kill those that do not end by themselves. If one of them is lost,
    the others are killed at once. Problems are a warning of one line. On a lost host, its worker
    ends the processes when heartbeats stop."""
    if mesh.processes.are_lost:
        return
    complaint, limit_s = "", _STOP_TIMEOUT_S
    if is_lost := mesh.watch.done():
        await mesh.processes.end(_KILL_S)
        limit_s = _LOST_STOP_S
    try:
        async with asyncio.timeout(limit_s):
            await mesh.mesh.stop()
    except TimeoutError:
        complaint = f"no end within {limit_s:.0f} s"
    except _SPAWN_ERRORS as error:
        complaint = shorten(first_line(error), _MAX_CAUSE)
    if mesh.processes.are_lost:
        return  # lost in the meantime
    if killed := await mesh.processes.end(_EXIT_TIMEOUT_S):
        complaint = f"processes {killed} were killed, for they did not end by themselves"
    if complaint and not is_lost:
        logger.warning("%s did not stop in order: %s", mesh.name, complaint)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


async def serve_channel(
    port: Port[Any],
    *,
    deliver: Callable[[Any], object],
    take: Callable[[], Awaitable[Any]],
) -> None:
    """Serve the actor's end: call ``deliver`` with each batch, and send each result of ``take``,
    until one of them fails."""
    to_actor, receiver = Channel[Any].open()
    port.send(to_actor)  # the first message

    async def receive_all() -> None:
        while True:
            deliver(await receiver.recv())

    async def send_all() -> None:
        while True:
            port.send(await take())

    await first_of(receive_all(), send_all())


ToActor = TypeVar("ToActor")
FromActor = TypeVar("FromActor")


class ActorChannel(Generic[ToActor, FromActor]):
    """The controller's end of a channel to an actor of a mesh. It ends when a process of the mesh
    is lost."""

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh
        self._name = mesh.name
        self._serving: asyncio.Future[None] | None = None

    async def open(
        self, serve: Callable[[Port[Any]], Awaitable[None]], *, timeout_s: float
    ) -> None:
        """Connect to the actor, whose endpoint ``serve`` calls `serve_channel`. Raises as
        `receive`."""
        port, self._receiver = Channel[Any].open()
        serving = self._mesh.call(serve(port), what=f"{self._name}: channel")
        self._serving = asyncio.ensure_future(serving)
        self._serving.add_done_callback(retrieve)  # `receive` raises its error
        self._port: Port[ToActor] = await self._next(timeout_s)

    def send(self, batch: ToActor) -> None:
        self._port.send(batch)

    async def receive(self, *, timeout_s: float) -> FromActor:
        """Wait for the next batch.

        Raises:
            DeadlineError: the actor sent nothing within ``timeout_s``.
            ProcessLostError: a process is gone, or is stopped.
            TorchtitanRLError: `serve_channel` raised it.
        """
        return await self._next(timeout_s)

    async def close(self) -> None:
        if self._serving is not None:
            await cancel_all([self._serving])

    async def _next(self, timeout_s: float) -> Any:
        assert self._serving is not None
        receiving = asyncio.ensure_future(self._receiver.recv())
        with suppress(TimeoutError):
            async with deadline(timeout_s):
                await asyncio.wait({receiving, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            return receiving.result()
        await cancel_all([receiving])
        if self._serving.done():
            self._serving.result()
        raise DeadlineError(f"{self._name}: nothing came within {timeout_s} s")
