"""Watches the other hosts of a run, from its start to its end: see `HostWatch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from torchtitan_rl.aio import cancel_all, first_of, loop_s, retrieve
from torchtitan_rl.backends.monarch.hosts import Host, Hosts, NotAttachedError
from torchtitan_rl.config.machine import host_name
from torchtitan_rl.errors import ConfigError, HostLeftError, HostLostError, HostsBusyError
from torchtitan_rl.failures import Failure, Part
from torchtitan_rl.files import FileCopies
from torchtitan_rl.launch.workers import BEAT_S, HOST_LOST_S, Heartbeat
from torchtitan_rl.observability.trace import (
    RoundTrip,
    clocks_of_files,
    estimate_offset,
    write_clocks,
)

logger = logging.getLogger(__name__)

_LAST_FILES_S = 20.0  # for the files that processes wrote at their end
_FILES_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_NUM_ROUND_TRIPS = 64
_UNREACHABLE = (TimeoutError, ActorError, SupervisionError)


@dataclass(eq=False)
class HostWatch:
    """Watches the other hosts of a run.

    - Sends each host a heartbeat every ``BEAT_S``.
    - A host that does not answer is lost: ``on_lost`` is called once with its index and the cause.
      Then the watch tries to attach the host again until it is back (`wait_until_there`).
    - If a host is about to end, ``on_leaving`` is called with its index, and has to move away what
      runs there. Then the watch ends the run on the host, and the host is lost as above.
    - Copies the hosts' files in ``log_dir`` and ``trace_dir`` (those under the host's name) to the
      same folders on this machine.
    - Records the offsets of the hosts' clocks, for the trace.
    """

    hosts: Hosts
    log_dir: Path
    trace_dir: Path | None
    say: Callable[[str], None]
    on_lost: Callable[[int, str], None]
    on_leaving: Callable[[int], Awaitable[None]]
    on_failure: Callable[[Failure], None] = lambda failure: None

    def __post_init__(self) -> None:
        folders = [(self.log_dir, ".log")]
        if self.trace_dir is not None:
            folders.append((self.trace_dir, ".jsonl"))
        far = [host.index for host in self.hosts.far()]
        self._files = {index: [_Files(index, *one) for one in folders] for index in far}
        self._clocks = {} if self.trace_dir is None else clocks_of_files(self.trace_dir)
        self._asking: dict[int, list[asyncio.Future[None]]] = {index: [] for index in far}
        self._lost = {index: asyncio.Event() for index in far}  # set while lost
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._gone: dict[int, HostLostError] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HostWatch:
        for host in self.hosts.far():
            for files in self._files[host.index]:
                await files.begin(host)
            self._start(self._watch(host), f"beats of {host_name(host.index)}")
            self._start(self._bring_files(host.index), f"files of {host_name(host.index)}")
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Copy the last files of the processes, which have ended."""
        await cancel_all(self._tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_FILES_S):
                await asyncio.gather(*(self.bring_now(host.index) for host in self.hosts.far()))
        for files in self._files.values():
            for one in files:
                one.end()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_report)
        self._tasks.append(task)
        return task

    async def wait_until_there(self, index: int) -> None:
        """Return when the host answers its next heartbeat and is not about to end; at once for this
        machine. Raises HostLostError: the host is lost, and cannot be used again."""
        if index in self._gone:
            raise self._gone[index]
        if index in self._asking:
            answered = asyncio.get_running_loop().create_future()
            self._asking[index].append(answered)
            await answered

    async def answers(self, index: int) -> bool:
        """Whether the host still answers: True after two answers (the first may have been sent
        before a process of the host was lost), False if the host is lost first. Returns at once for
        this machine."""
        if index not in self._files or self.is_lost(index):
            return index not in self._files

        async def two_answers() -> None:
            await self.wait_until_there(index)
            await self.wait_until_there(index)

        await first_of(two_answers(), self._lost[index].wait())
        return not self.is_lost(index)

    def is_far(self, index: int) -> bool:
        return index in self._files

    def is_lost(self, index: int) -> bool:
        return index in self._lost and self._lost[index].is_set()

    def is_leaving(self, index: int) -> bool:
        return index in self._leaving

    async def bring_now(self, index: int) -> None:
        host = self.hosts[index]
        if index in self._files and not host.lost.is_set():
            for files in self._files[index]:
                await files.bring(host)

    async def _watch(self, host: Host) -> None:
        while True:
            error, name = await self._beat_until_lost(host), host_name(host.index)
            if (leaving := self._leaving.pop(host.index, None)) is not None:
                if leaving.done():
                    error = HostLeftError("its worker was told to end (SIGTERM)")
                leaving.cancel()
            failure = Failure.of(Part.HOST, name, error, now_s=loop_s())
            self.hosts.lose(host)
            self._lost[host.index].set()
            how = "has left" if isinstance(error, HostLeftError) else "is lost"
            self.say(f"{name} ({host.name}) {how}: {error}")
            self.on_lost(host.index, f"{error}")
            try:
                back = await self._look_for(host.index) if self.hosts.can_return else None
            except asyncio.CancelledError:
                self.on_failure(failure.ended("the run ended first"))
                raise
            if back is None:
                self._gone[host.index] = gone = HostLostError(f"{name} is lost and cannot return")
                for asking in self._asking[host.index]:
                    if not asking.done():
                        asking.set_exception(gone)
                self.on_failure(failure.ended("it cannot return"))
                return
            host = back
            self._lost[host.index].clear()
            self.say(f"{name} is back")
            failure = failure.restarted(name, now_s=loop_s())
            self.on_failure(failure.serving(now_s=loop_s()))

    async def _beat_until_lost(self, host: Host) -> HostLostError:
        """Send heartbeats until the host is lost, or the run has left it. Returns the cause."""
        loop = asyncio.get_running_loop()
        heartbeat, num_answers = Heartbeat(loop.time()), 0
        round_trips: deque[RoundTrip] = deque(maxlen=_NUM_ROUND_TRIPS)
        beat: asyncio.Task[tuple[RoundTrip, bool]] | None = None
        try:
            while True:
                beat = beat or asyncio.create_task(_beat(host))
                await asyncio.wait({beat}, timeout=BEAT_S)
                if beat.done():
                    if (error := beat.exception()) is not None:
                        silent_s = heartbeat.look(loop.time(), num_answers)
                        return HostLostError(_cause(error), silent_s=silent_s)
                    round_trip, is_leaving = beat.result()
                    round_trips.append(round_trip)
                    beat, num_answers = None, num_answers + 1
                    if not is_leaving:
                        self._note_answer(host.index)
                    elif host.index not in self._leaving:
                        name = f"the departure of {host_name(host.index)}"
                        self._leaving[host.index] = self._start(self._leave(host), name)
                    await self._note_clock(host.index, round_trips)
                silent_s = heartbeat.look(loop.time(), num_answers)
                if silent_s >= HOST_LOST_S:
                    return HostLostError(f"no answer for {silent_s:.0f} s", silent_s=silent_s)
                if beat is None:
                    await asyncio.sleep(BEAT_S)
        finally:
            if beat is not None:
                beat.add_done_callback(retrieve)
                beat.cancel()

    async def _leave(self, host: Host) -> None:
        name = host_name(host.index)
        self.say(f"{name} ({host.name}) is about to end (SIGTERM): the run leaves it")
        await self.on_leaving(host.index)
        await self.bring_now(host.index)
        with contextlib.suppress(*_UNREACHABLE):
            await asyncio.wait_for(_answer(host.agent.end_run.call_one()), _END_TIMEOUT_S)

    def _note_answer(self, index: int) -> None:
        asking, self._asking[index] = self._asking[index], []
        for one in asking:
            if not one.done():
                one.set_result(None)

    async def _look_for(self, index: int) -> Host | None:
        """Wait until the host is back, and return it; None if it cannot be used any more."""
        name, is_busy = host_name(index), False
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                host = await self.hosts.attach_again(index)
            except HostsBusyError:
                if not is_busy:
                    self.say(f"{name} serves another run, and is used again once that has ended")
                is_busy = True
                continue
            except ConfigError as error:
                self.say(f"{name} is back and cannot be used: {error}")
                return None
            except NotAttachedError as error:
                self.say(f"{name} listens again, and {error}")
                continue
            if host is not None:
                return host

    async def _note_clock(self, index: int, round_trips: Sequence[RoundTrip]) -> None:
        offset, name = estimate_offset(round_trips), host_name(index)
        if self.trace_dir is None or offset is None or self._clocks.get(name) == offset:
            return
        self._clocks[name] = offset
        try:
            await asyncio.to_thread(write_clocks, self.trace_dir, dict(self._clocks))
        except OSError as error:
            logger.warning("clocks of hosts are not noted: %s", error)

    async def _bring_files(self, index: int) -> None:
        while True:
            await asyncio.sleep(2 * BEAT_S)
            await self.bring_now(index)


class _Files:
    """A host's files in one folder, which hosts may share. Only files under the host's name are
    copied."""

    def __init__(self, index: int, folder: Path, suffix: str) -> None:
        self._folder = folder
        self._patterns = (f"{host_name(index)}-*{suffix}",)
        self._copies = FileCopies(folder)
        self._sign = folder / f".of-the-controller-{uuid.uuid4().hex}"
        self._is_shared = self._has_warned = False
        self._bringing = asyncio.Lock()

    async def begin(self, host: Host) -> None:
        """Note the sizes of existing files, which are of earlier runs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sign.touch()
        try:
            sizes = host.agent.files_there.call_one(self._folder, self._patterns, self._sign.name)
            found = await asyncio.wait_for(_answer(sizes), _FILES_TIMEOUT_S)
        except _UNREACHABLE as error:
            logger.warning("%s: %s", host.name, error)
            found = {}
        self._is_shared = found is None
        self._copies.offsets |= found or {}

    async def bring(self, host: Host) -> None:
        async with self._bringing:
            while not self._is_shared:
                offsets = dict(self._copies.offsets)
                try:
                    asked = host.agent.read_new.call_one(
                        self._folder, self._patterns, offsets, self._sign.name
                    )
                    pieces = await asyncio.wait_for(_answer(asked), _FILES_TIMEOUT_S)
                    await asyncio.to_thread(self._copies.write, pieces)
                except _UNREACHABLE:
                    return  # the heartbeats detect the loss
                except OSError as error:
                    if not self._has_warned:
                        self._has_warned = True
                        logger.warning("files of %s are not all brought here: %s", host.name, error)
                    return
                if not pieces:
                    return

    def end(self) -> None:
        self._sign.unlink(missing_ok=True)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)


def _cause(error: BaseException) -> str:
    """Describe an error in one line. Monarch's errors begin with the actor and end with the reason;
    only the reason is returned."""
    status = " ".join(str(error).split()).rpartition("has status: ")[2]
    return f"its agent does not answer ({status or type(error).__name__})"


async def _beat(host: Host) -> tuple[RoundTrip, bool]:
    sent_ns = time.time_ns()
    there_ns, is_leaving = await host.agent.beat.call_one()
    return RoundTrip(sent_ns=sent_ns, there_ns=there_ns, received_ns=time.time_ns()), is_leaving


async def _answer(future: Any) -> Any:
    return await future
