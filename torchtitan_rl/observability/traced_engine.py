"""An engine whose work shows in the trace: decoding as stretches, weight swaps as spans.

Changes nothing else: every call goes to the engine behind it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from torchtitan_rl.generation.engine import Admission, Engine, EngineLimits, EngineOutput
from torchtitan_rl.observability.trace import BusyStretches, Tracer
from torchtitan_rl.types import EngineStats


class TracedEngine:
    """Wraps an `Engine`; called from the loop's thread, as that is."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        self._engine = engine
        self._tracer = tracer
        self._decoding = BusyStretches(tracer, "decode", track="engine")

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    def add_request(self, admission: Admission) -> None:
        self._engine.add_request(admission)

    def abort(self, request_ids: tuple[str, ...]) -> list[EngineOutput]:
        return self._engine.abort(request_ids)

    def step(self) -> list[EngineOutput]:
        start_ns = time.perf_counter_ns()
        outputs = self._engine.step()
        self._decoding.add(start_ns, time.perf_counter_ns())
        if self._engine.num_unfinished() == 0:
            self._decoding.flush()
        return outputs

    def num_unfinished(self) -> int:
        return self._engine.num_unfinished()

    def generated_lengths(self) -> dict[str, int]:
        return self._engine.generated_lengths()

    def partial_outputs(self) -> list[EngineOutput]:
        return self._engine.partial_outputs()

    def sampled_since(self, starts: Mapping[str, int]) -> list[EngineOutput]:
        return self._engine.sampled_since(starts)

    def sleep(self) -> None:
        self._decoding.flush()
        with self._tracer.span("sleep", track="engine"):
            self._engine.sleep()

    def wake_up(self) -> None:
        with self._tracer.span("wake up", track="engine"):
            self._engine.wake_up()

    def swap_weights(self, version: int) -> None:
        self._decoding.flush()
        with self._tracer.span("swap weights", track="engine", version=version):
            self._engine.swap_weights(version)

    def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
        with self._tracer.span("reset prefix cache", track="engine"):
            return self._engine.reset_prefix_cache(recompute_running=recompute_running)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        self._decoding.flush()
        self._engine.close()
