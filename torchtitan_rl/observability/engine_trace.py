"""What an engine does, in the trace: decoding as stretches, everything else as spans."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.observability.trace import BusyStretches, Tracer

_TRACK = "engine"


class EngineTrace:
    """The ``on_work`` of an `EngineLoop`; called from the loop's thread alone."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._decoding = BusyStretches(tracer, "decode", track=_TRACK)

    def __call__(self, work: str, start_ns: int, end_ns: int, /, **details: Any) -> None:
        if work == "step":
            self._decoding.add(start_ns, end_ns)
            return
        self._decoding.flush()
        self._tracer.complete(work, start_ns, end_ns, track=_TRACK, **details)

    def flush(self) -> None:
        """Write the stretch so far; for the end of the loop."""
        self._decoding.flush()
