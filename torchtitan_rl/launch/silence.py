"""When a host and its controller count as gone, from each other's silence.

| who | hears nothing for | then |
|---|---|---|
| controller | ``HOST_LOST_S`` | it gives the host's replicas up; a trainer there ends the run |
| host | ``CONTROLLER_LOST_S`` | the processes of the run on this host are ended |

Beats come every ``BEAT_S``. A controller that stands still for 10 to 20 s (a garbage collection, a
suspended laptop) loses nothing, and a killed one leaves nothing behind after a minute.

Invariant: time in which the listener itself stood still is not the other's silence.
"""

from __future__ import annotations

BEAT_S = 2.0
HOST_LOST_S = 12.0
CONTROLLER_LOST_S = 40.0
_MAX_GAP_S = 2 * BEAT_S  # between two looks; what is longer is the listener's own stop


class Silence:
    """How long nothing was heard, for a listener that looks every few seconds or more often."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._sign: object = None
        self.silent_s = 0.0

    def look(self, now_s: float, sign: object) -> float:
        """Seconds since ``sign`` has changed, as far as this listener was running."""
        self.silent_s += min(now_s - self._seen_s, _MAX_GAP_S)
        self._seen_s = now_s
        if sign != self._sign:
            self._sign, self.silent_s = sign, 0.0
        return self.silent_s
