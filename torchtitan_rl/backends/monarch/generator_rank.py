"""What runs in a generator process: one rank's engine, its loop, and its staged weights.

Messages between the controller and one actor, in both directions, without answers.

A message costs both processes together 0.1 ms of CPU time; a call, which has an answer, 0.7 ms.

Invariants: messages arrive in order, each once. One call, `ActorEnd.run`, lasts as long as the
stream: its error, and the end of the actor's process, end the stream.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from monarch.actor import Channel, Port, PortReceiver

from torchtitan_rl.aio import cancel_all, first_of, retrieve
from torchtitan_rl.backends.monarch.processes import collect_less
from torchtitan_rl.backends.monarch.runtime import call
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.rank import build_loop
from torchtitan_rl.errors import DeadlineError, LoopFailedError
from torchtitan_rl.generation.server import IDLE_S, EngineServer
from torchtitan_rl.launch.process_groups import listen_privately
from torchtitan_rl.observability.trace import EngineTrace, Tracer, host_label
from torchtitan_rl.weights.handle import SharedMemoryHandle
from torchtitan_rl.weights.staging import WeightStaging

_CLOSE_S = 30.0  # for the loop to end


class GeneratorRank:
    """Built in a thread of the actor, on all ranks together."""

    def __init__(self, spec: GeneratorSpec, rank: int) -> None:
        self._rank = rank
        listen_privately()
        self._tracer = Tracer(spec.trace_dir, f"{spec.name} rank {rank}", host=host_label())
        self._engine_trace = EngineTrace(self._tracer)
        self._staging = WeightStaging()
        with self._tracer.span("start"):
            self._loop = build_loop(
                spec,
                rank,
                self._staging,
                on_end=self._on_loop_end,
                on_pulled=self._on_pulled,
                on_work=self._engine_trace,
            )
        self.server = EngineServer(
            self._loop,
            idle_s=min(IDLE_S, spec.generator.stall_timeout_s / 4),
            stall_timeout_s=spec.generator.stall_timeout_s,
        )
        collect_less()
        self._loop.start()

    def _on_pulled(self, version: int) -> None:
        # In a thread of its own: to give memory back takes time.
        threading.Thread(target=self._staging.discard_before, args=(version,), daemon=True).start()

    def _on_loop_end(self, failure: LoopFailedError | None) -> None:
        self._engine_trace.flush()
        if failure is None:
            return
        traceback.print_exception(failure)
        if self._rank > 0:
            # The other ranks may wait for this one inside a collective.
            sys.stderr.flush()
            os._exit(1)

    async def stage(self, handle: SharedMemoryHandle) -> None:
        """Map a version while decoding goes on; on every rank."""
        with self._tracer.span("fetch weights", track="fetch", version=handle.version):
            await asyncio.to_thread(self._staging.stage, handle)

    async def close(self) -> None:
        if self._rank == 0:
            await asyncio.to_thread(self._loop.close, _CLOSE_S)
        self._tracer.close()


_ToActor = TypeVar("_ToActor")
_FromActor = TypeVar("_FromActor")


class ActorEnd(Generic[_ToActor, _FromActor]):
    """The actor's end: ``handle`` gets each message, and what ``take`` returns is sent."""

    def __init__(
        self, handle: Callable[[_ToActor], None], take: Callable[[], Awaitable[_FromActor]]
    ) -> None:
        self._handle = handle
        self._take = take
        self._num_received = 0
        self._received = asyncio.Condition()

    async def run(self, port: Port[Any]) -> None:
        """Send and receive, until one of both fails. The first message is the port to send to."""
        to_actor, receiver = Channel[Any].open()
        port.send(to_actor)
        await first_of(self._receive_all(receiver), self._send_all(port))

    async def until_received(self, count: int) -> None:
        """Return when so many messages were received."""
        async with self._received:
            await self._received.wait_for(lambda: self._num_received >= count)

    async def _receive_all(self, receiver: PortReceiver[_ToActor]) -> None:
        while True:
            self._handle(await receiver.recv())
            self._num_received += 1
            async with self._received:
                self._received.notify_all()

    async def _send_all(self, port: Port[Any]) -> None:
        while True:
            port.send(await self._take())


class Stream(Generic[_ToActor, _FromActor]):
    """The controller's end. ``run`` and ``until_received`` call those methods of the `ActorEnd`."""

    def __init__(
        self,
        name: str,
        *,
        run: Callable[[Port[Any]], Awaitable[None]],
        until_received: Callable[[int], Awaitable[None]],
    ) -> None:
        self._name = name
        self._run = run
        self._until_received = until_received
        self._num_sent = 0
        self._running: asyncio.Future[None] | None = None

    async def open(self, *, timeout_s: float) -> None:
        """Call it first; raises as `receive` does."""
        port, self._receiver = Channel[Any].open()
        what = f"{self._name}: connection"
        self._running = asyncio.ensure_future(call(self._run(port), what=what))
        self._running.add_done_callback(retrieve)  # it matters only to those who receive
        self._port: Port[_ToActor] = await self._next(timeout_s)

    def send(self, message: _ToActor) -> None:
        self._port.send(message)
        self._num_sent += 1

    async def until_received(self) -> None:
        """Return when the actor has received all that was sent.

        Raises:
            ProcessLostError: it is lost.
        """
        what = f"{self._name}: delivery"
        await call(self._until_received(self._num_sent), what=what)

    async def receive(self, *, timeout_s: float) -> _FromActor:
        """The next message.

        Raises:
            DeadlineError: none came within ``timeout_s``.
            ProcessLostError: the process is gone.
            TorchtitanRLError: what the `ActorEnd` raised.
        """
        message: _FromActor = await self._next(timeout_s)
        return message

    async def close(self) -> None:
        """Wait no longer for the actor."""
        if self._running is not None:
            await cancel_all([self._running])

    async def _next(self, timeout_s: float) -> Any:
        assert self._running is not None
        receiving = asyncio.ensure_future(self._receiver.recv())
        await asyncio.wait(
            {receiving, self._running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if receiving.done():
            return receiving.result()
        await cancel_all([receiving])
        if self._running.done():
            self._running.result()
        raise DeadlineError(f"{self._name}: nothing came within {timeout_s} s")
