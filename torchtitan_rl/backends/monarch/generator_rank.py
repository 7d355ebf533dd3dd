"""What runs in a generator process: one rank's engine, its loop, and its staged weights."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.engine import build_loop
from torchtitan_rl.errors import LoopFailedError
from torchtitan_rl.generation.server import EngineServer
from torchtitan_rl.launch.process_groups import listen_privately
from torchtitan_rl.observability.trace import EngineTrace, Tracer, host_label
from torchtitan_rl.processes import collect_less
from torchtitan_rl.weights.handle import SharedMemoryHandle
from torchtitan_rl.weights.shm import WeightStaging

_CLOSE_S = 30.0  # for the loop to end


class GeneratorRank:
    """One rank's engine and loop. Build it on all ranks together, in a thread of the actor."""

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
        self.server = EngineServer(self._loop, stall_timeout_s=spec.generator.stall_timeout_s)
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
        """Map a version, while decoding continues. Every rank does it."""
        with self._tracer.span("fetch weights", track="fetch", version=handle.version):
            await asyncio.to_thread(self._staging.stage, handle)

    async def close(self) -> None:
        if self._rank == 0:
            await asyncio.to_thread(self._loop.close, _CLOSE_S)
        self._tracer.close()
