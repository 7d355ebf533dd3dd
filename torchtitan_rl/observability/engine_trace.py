"""What an engine does, in the trace: decoding as stretches, everything else as spans."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.observability.trace import Tracer

_TRACK = "engine"


class EngineTrace:
    """The ``on_work`` of an `EngineLoop`; called from the loop's thread alone.

    Many short steps become few spans: what follows within ``max_gap_s`` belongs to the same
    stretch, and gaps stay visible as idle time. Stretches are cut at ``max_stretch_s``, so that a
    killed process loses no more than that.
    """

    def __init__(
        self, tracer: Tracer, *, max_gap_s: float = 0.02, max_stretch_s: float = 1.0
    ) -> None:
        self._tracer = tracer
        self._max_gap_ns = round(max_gap_s * 1e9)
        self._max_stretch_ns = round(max_stretch_s * 1e9)
        self._start_ns = self._end_ns = self._steps = 0

    def __call__(self, work: str, start_ns: int, end_ns: int, /, **details: Any) -> None:
        if not self._tracer.is_enabled:
            return
        if work != "step":
            self.flush()
            self._tracer.complete(work, start_ns, end_ns, track=_TRACK, **details)
            return
        is_apart = start_ns - self._end_ns > self._max_gap_ns
        if is_apart or end_ns - self._start_ns > self._max_stretch_ns:
            self.flush()
        if not self._steps:
            self._start_ns = start_ns
        self._end_ns = end_ns
        self._steps += 1

    def flush(self) -> None:
        """Write the stretch so far; for the end of the loop."""
        if self._steps:
            self._tracer.complete(
                "decode", self._start_ns, self._end_ns, track=_TRACK, steps=self._steps
            )
            self._steps = 0
