"""Who is to be told what running requests sample, and when it is time.

Invariants: nobody is told the same token twice, nor one without those before it; those who stream
hear the first tokens after a silence at once and then at most once per interval; a request that
nobody listens to costs nothing. Not thread-safe; the engine loop guards it with its lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.types import Progress

ProgressSink = Callable[[tuple[Progress, ...]], None]
"""Takes what is new of all its requests, in the loop's thread; must neither block nor raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who hears of a request's progress. ``streams``: within milliseconds, else about every second
    (so that little is lost with a replica)."""

    sink: ProgressSink
    streams: bool = False


class ProgressBook:
    """How much of each admitted request its listener has been told. Times are monotonic seconds."""

    def __init__(self, *, stream_interval_s: float, interval_s: float) -> None:
        self._stream_interval_s = stream_interval_s
        self._interval_s = interval_s
        self._listeners: dict[str, Listener] = {}
        self._told: dict[str, int] = {}  # tokens, of all
        self._streaming: set[str] = set()
        self._last_s = self._last_of_all_s = 0.0

    def follow(self, request_id: str, listener: Listener, now_s: float) -> None:
        if len(self._listeners) == len(self._streaming):
            self._last_of_all_s = now_s  # the first that does not stream
        self._listeners[request_id] = listener
        self._told[request_id] = 0
        if listener.streams:
            self._streaming.add(request_id)

    def forget(self, request_id: str) -> None:
        if self._listeners.pop(request_id, None) is not None:
            del self._told[request_id]
            self._streaming.discard(request_id)

    def due(self, now_s: float, *, at_once: bool = False) -> dict[str, int]:
        """Whom to read now, and from which token on; ``at_once``: whatever the intervals say."""
        if not self._listeners:
            return {}
        if at_once or now_s - self._last_of_all_s >= self._interval_s:
            self._last_of_all_s = now_s
            return dict(self._told)
        if self._streaming and now_s - self._last_s >= self._stream_interval_s:
            return {name: self._told[name] for name in self._streaming}
        return {}

    def tell(
        self, progress: list[Progress], now_s: float
    ) -> list[tuple[ProgressSink, tuple[Progress, ...]]]:
        """Each sink with what it is to be told; it counts as told from here on."""
        batches: dict[ProgressSink, list[Progress]] = {}
        for one in progress:
            listener = self._listeners.get(one.request_id)
            if listener is not None:
                self._told[one.request_id] = one.start + len(one.token_ids)
                batches.setdefault(listener.sink, []).append(one)
                if listener.streams:
                    self._last_s = now_s
        return [(sink, tuple(batch)) for sink, batch in batches.items()]
