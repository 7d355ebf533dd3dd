"""One of the launchers of a run on several nodes, which torchrun starts.

The launchers meet in torchrun's store (`launch/meeting.py`). Each launcher starts a worker. Rank 0
also starts the controller, which attaches to all workers in the order of their ranks. Every
launcher exits with the controller's exit code.

| what happens | what follows |
|---|---|
| SIGINT or SIGTERM at a node | the controller gets it, and stops after its step with a checkpoint |
| the controller ends | all workers are ended; all launchers exit with its code |
| a worker ends | its launcher starts it again; the controller decides whether the run goes on |
| torchrun starts the launchers again | the new controller resumes the run, on new workers |
| the launcher or agent of rank 0 dies | the other launchers notice this, and exit with 1 |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from torchtitan_rl.aio import cancel_all, retrieve, wait_within
from torchtitan_rl.commands.console import DryRun, StopSignals
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.run import LaunchConfig
from torchtitan_rl.errors import ConfigError, DeadlineError, TorchtitanRLError
from torchtitan_rl.launch.addresses import Address, ip_of
from torchtitan_rl.launch.interfaces import free_port, listening_host
from torchtitan_rl.launch.meeting import RESUME_COMMAND, Joining, Node, Round, resume_options
from torchtitan_rl.launch.workers import BEAT_S, CONTROLLER_LOST_S, Heartbeat
from torchtitan_rl.processes import ChildProcess

_LEAVE_S = 10.0  # time for the other launchers to read how the run ended
PROGRAM = (sys.executable, "-P", "-m", "torchtitan_rl.commands.cli")
_AGAIN_S = 5.0  # pause before a worker that ended is started again
_END_S = 30.0  # time for a process to end after a request to end


class LauncherError(TorchtitanRLError):
    """The launchers of a run cannot work together."""


def launch(node: Node, words: list[str], program: Sequence[str] = PROGRAM) -> int:
    """Run the launcher of this node to the end of the run, and return the run's exit code.
    ``words`` are CONFIG and its options; ``program`` has the commands ``worker`` and ``train``.
    Raises TorchtitanRLError if it fails before the controller runs."""
    return asyncio.run(_launch(node, words, program))


async def _launch(node: Node, words: list[str], program: Sequence[str]) -> int:
    signals = StopSignals()
    signals.install()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, os.kill, os.getpid(), signal.SIGTERM)
    watch = asyncio.create_task(_stop_without_parent())
    try:
        store = await asyncio.to_thread(connect, node)
        joining = Joining(store, node.rank, node.num_nodes)
        together = await poll(joining.look, lambda: _describe("launcher", joining.missing()))
        launcher = _Launcher(node, words, program, together, signals)
        return await (launcher.follow() if node.rank else launcher.lead())
    except asyncio.CancelledError:
        if not signals.received:
            raise
        return signals.exit_code
    except DistError as error:
        raise LauncherError(
            f"node {node.rank}: torchrun's store at {node.store_host}:{node.store_port} does not "
            f"answer: {str(error).splitlines()[0]}"
        ) from error
    finally:
        watch.cancel()


async def _stop_without_parent() -> None:
    """Send SIGTERM to this process once torchrun's agent is gone. The kernel can also signal the
    death of a parent, but may do so several times, and a second signal would end the run at
    once."""
    parent = os.getppid()
    while True:
        await asyncio.sleep(POLL_S)
        if os.getppid() != parent:
            return os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class _Launcher:
    _node: Node
    _words: list[str]
    _program: Sequence[str]
    _round: Round
    _signals: StopSignals

    async def lead(self) -> int:
        """Run on rank 0: start a worker and run the controller to its end."""
        code = 1
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._wait_until_all_left)
            await stack.enter_async_context(self._beating())
            try:
                launch = await self._start_worker(stack)
                addresses = await poll(self._addresses, self._describe_silent_workers)
                code = await self._control(launch, addresses)
            except ConfigError:
                code = 2
                raise
            except asyncio.CancelledError:
                code = self._signals.exit_code if self._signals.received else code
                raise
            finally:
                await self._say("end", code)
        return code

    async def follow(self) -> int:
        """Run on every other rank: keep a worker running until rank 0 reports the end of the
        run."""
        stop_asked = asyncio.Event()
        async with AsyncExitStack() as stack:
            try:
                await self._start_worker(stack)
            except TorchtitanRLError as error:  # rank 0 raises it
                kind = "refused" if isinstance(error, ConfigError) else "failed"
                await self._say(f"{kind}/{self._node.rank}", error)
            self._signals.stop_cleanly = stop_asked.set
            heartbeat = Heartbeat(time.monotonic())
            while (end := await self._hear("end")) is None:
                if stop_asked.is_set():
                    await self._say("stop", self._signals.received[0])
                if heartbeat.look(time.monotonic(), await self._hear("beat")) > CONTROLLER_LOST_S:
                    raise LauncherError(f"node {self._node.rank}: the launcher of rank 0 is gone")
                await asyncio.sleep(POLL_S)
            await self._say(f"left/{self._node.rank}", "")
        return int(end)

    async def _start_worker(self, stack: AsyncExitStack) -> LaunchConfig:
        """Start the worker, and write its address to the store once it listens."""
        launch = await asyncio.to_thread(_launch_config, self._words, self._node.rank)
        address = _address(launch, await self._host(launch))
        command = [*self._program, "worker", "--address", str(address)]
        command += [] if launch.keys is None else ["--keys", str(launch.keys)]
        command += ["--allow-plain-tcp"] if launch.allow_plain_tcp else []
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        worker = asyncio.create_task(self._keep_worker(command, listening))
        stack.push_async_callback(cancel_all, [worker])
        if not await wait_within(JOIN_S, listening):
            raise DeadlineError(f"waited {JOIN_S:.0f} s for the worker")
        listening.result()
        await self._say(f"address/{self._node.rank}", str(address))
        return launch

    async def _keep_worker(self, command: Sequence[str], listening: asyncio.Future[None]) -> None:
        """Run the worker, and start a new one when it ends, which the controller attaches again.
        ``listening`` is done when the first worker listens. If the first worker ends before it
        listens, ``listening`` gets an error."""
        while True:
            async with ChildProcess.started(
                command, end_within_s=_END_S, ready_at="listening on ", end_by=signal.SIGINT
            ) as worker:  # SIGTERM would wait for the run, whose end the launcher knows
                if await worker.ready() and not listening.done():
                    listening.set_result(None)
                code = await worker.wait()
            if not listening.done():
                error = LauncherError(f"the worker ended with code {code} at its start")
                return listening.set_exception(error)
            print(
                f"node {self._node.rank}: its worker ended with code {code} and is started again",
                file=sys.stderr,
            )
            await asyncio.sleep(_AGAIN_S)

    async def _host(self, launch: LaunchConfig) -> str:
        """The address on which this node listens: its own address on the way to rank 0. On rank 0
        it is the address on the way to rank 1, because on its own node the name of rank 0 may mean
        loopback."""
        towards = self._node.store_host
        if self._node.rank == 0 and not launch.interface:
            towards = await poll(self._next_host, lambda: "the host of node 1")
        host = await asyncio.to_thread(listening_host, launch.interface, towards)
        await self._say(f"host/{self._node.rank}", host)
        return host

    def _next_host(self) -> str | None:
        self._require_no_failure()
        return self._round.hear("host/1")

    def _addresses(self) -> list[str] | None:
        """The addresses of all workers; None until all listen."""
        self._require_no_failure()
        found = self._round.hear_of_nodes("address")
        addresses = [address for address in found if address is not None]
        return addresses if len(addresses) == len(found) else None

    def _require_no_failure(self) -> None:
        for kind, error in (("refused", ConfigError), ("failed", LauncherError)):
            said = enumerate(self._round.hear_of_nodes(kind))
            if errors := [f"node {rank}: {text}" for rank, text in said if text is not None]:
                raise error("\n".join(errors))

    def _describe_silent_workers(self) -> str:
        found = self._round.hear_of_nodes("address")
        return _describe("worker", [rank for rank, address in enumerate(found) if address is None])

    async def _control(self, launch: LaunchConfig, addresses: list[str]) -> int:
        """Run the controller to its end; returns its exit code."""
        is_again = await asyncio.to_thread(self._round.is_repeated) or self._node.restarts > 0
        own = _address(launch, Address.parse(addresses[0]).host, offset=1)
        command = [
            *(*self._program, "train", *self._words, "--launch.attach", *addresses),
            *("--launch.address", str(own)),
            *resume_options(self._words, is_again=is_again),
        ]
        again = shlex.join([*self._words, *resume_options(self._words, is_again=True)])
        os.environ[RESUME_COMMAND] = f"torchrun ... -m torchtitan_rl.launch {again}"
        asked: list[int] = []

        def ask_to_stop(number: int) -> None:
            """Forward only the first signal: schedulers signal all nodes, and a second signal would
            end the run at once."""
            if not asked:
                controller.send(number)
            asked.append(number)

        async with ChildProcess.started(command, end_within_s=_END_S) as controller:
            self._signals.stop_cleanly = lambda: ask_to_stop(self._signals.received[0])
            ended = asyncio.create_task(controller.wait())
            while not ended.done():
                if (number := await self._hear("stop")) is not None:
                    ask_to_stop(int(number))
                await asyncio.wait([ended], timeout=POLL_S)
            return ended.result()

    @asynccontextmanager
    async def _beating(self) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                await asyncio.to_thread(self._round.beat)
                await asyncio.sleep(BEAT_S)

        task = asyncio.create_task(beat())
        task.add_done_callback(retrieve)  # other calls of the store raise the same error
        try:
            yield
        finally:
            task.cancel()

    async def _wait_until_all_left(self) -> None:
        """Wait until the other launchers have read the end, because the store may end with this
        node's agent."""
        with contextlib.suppress(DeadlineError):
            await poll(self._all_left, lambda: "the other launchers", within_s=_LEAVE_S)

    def _all_left(self) -> bool | None:
        return None not in self._round.hear_of_nodes("left")[1:] or None

    async def _say(self, name: str, value: object) -> None:
        await asyncio.to_thread(self._round.say, name, value)

    async def _hear(self, name: str) -> str | None:
        return await asyncio.to_thread(self._round.hear, name)


def _launch_config(words: list[str], rank: int) -> LaunchConfig:
    _, options = DryRun.of(words[1:])
    launch = load_config(Path(words[0]), options).launch
    given = [name for name in ("attach", "address", "hosts") if getattr(launch, name)]
    if given:
        raise ConfigError(
            f"launch.{given[0]} is {getattr(launch, given[0])!r}: the hosts are those that "
            "torchrun starts; leave it out"
        )
    return launch


def _address(launch: LaunchConfig, host: str, *, offset: int = 0) -> Address:
    """Raises ConfigError if there are no keys, and plain TCP is not allowed."""
    port = launch.port + offset if launch.port else free_port(host)
    address = Address(scheme="tls" if launch.keys else "tcp", host=host, port=port)
    if not (launch.keys or launch.allow_plain_tcp):
        raise ConfigError(
            f"launch.keys is not set, and others can reach {host}: make keys with "
            "`torchtitan-rl keys` and give their folder by --launch.keys, or, where no one else is "
            f"{address.neighbourhood}, give --launch.allow-plain-tcp"
        )
    return address


def _describe(what: str, ranks: list[int]) -> str:
    return f"the {what} of node {', '.join(map(str, ranks))}"


_T = TypeVar("_T")
POLL_S = 0.3
JOIN_S = 300.0  # time for all launchers to meet, and again for all workers to listen
_CALL_S = 30.0


def connect(node: Node) -> TCPStore:
    """Connect to the store of torchrun's agents; if they have none, rank 0 provides one. Raises
    ConfigError if rank 0 cannot listen at the store's address."""
    listening = _listen(node.store_host, node.store_port) if node.provides_store else None
    store = TCPStore(
        node.store_host,
        node.store_port,
        is_master=node.provides_store,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    store.set_timeout(timedelta(seconds=_CALL_S))
    return store


def _listen(host: str, port: int) -> int:
    """Listen on this address only, and return the descriptor. By itself, TCPStore would listen on
    all interfaces."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if (ip := ip_of(str(address[0]))) and ip.is_unspecified:
            raise OSError("that is every interface of the machine")
        return socket.create_server((host, port), family=family).detach()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"MASTER_ADDR is {host!r} and MASTER_PORT {port}: rank 0 cannot listen there "
            f"({error}); give an address of its machine and a free port"
        ) from error


async def poll(
    look: Callable[[], _T | None], what: Callable[[], str], *, within_s: float = JOIN_S
) -> _T:
    """Call ``look`` in a thread until it returns something other than None, and return that. Raises
    DeadlineError, which says ``what`` was waited for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while (found := await asyncio.to_thread(look)) is None:
        if loop.time() > deadline:
            raise DeadlineError(f"waited {within_s:.0f} s for {await asyncio.to_thread(what)}")
        await asyncio.sleep(POLL_S)
    return found
