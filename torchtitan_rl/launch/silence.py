"""When a host and its controller count as gone, from each other's silence.

| who | hears nothing for | then |
|---|---|---|
| controller | ``HOST_LOST_S`` | it gives the host's replicas up; a trainer there ends the run |
| host | ``CONTROLLER_LOST_S`` | the processes of the run on this host are ended |

Beats come every ``BEAT_S``. A controller that stands still for 10 to 20 s (a garbage collection, a
suspended laptop) loses nothing, and a killed one leaves nothing behind after a minute.

Invariant: time in which the listener itself stood still is not the other's silence.

Where a lost host is attached again, and when; see `backends.monarch.hosts`.

Its worker listens on one of its addresses, in general not on the one where it was lost. An address
that was not used before is tried at once. One that was used is tried again, too, because a long run
may use all of them. After an attempt that failed there are pauses, of 30 s to 8 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


NEXT_LIFE_S = CONTROLLER_LOST_S + 10.0
"""Until a worker that was lost listens on its next address; before, the old one is not tried."""
_PAUSE_S = 30.0
_MAX_PAUSE_S = 480.0


@dataclass(slots=True)
class _Tried:
    not_before_s: float
    num_failures: int = 0  # in a row


class Attempts:
    """Of one host, from the first time that it is lost to the end of the run."""

    def __init__(self) -> None:
        self._tried: dict[str, _Tried] = {}

    def choose(self, now_s: float, listening: Sequence[str]) -> str | None:
        """Which of these addresses is to be tried now: unused ones first."""
        for address in listening:
            if address not in self._tried:
                return address
        due = [one for one in listening if self._tried[one].not_before_s <= now_s]
        return min(due, key=lambda one: self._tried[one].not_before_s, default=None)

    def note_loss(self, now_s: float, address: str) -> None:
        """The host, which was attached there, is lost."""
        self._tried[address] = _Tried(now_s + NEXT_LIFE_S)

    def note_failure(self, now_s: float, address: str) -> float:
        """It was not attached there. Returns for how many seconds it is not tried there again."""
        tried = self._tried.setdefault(address, _Tried(now_s))
        pause_s = min(_PAUSE_S * 2.0 ** min(tried.num_failures, 8), _MAX_PAUSE_S)
        tried.num_failures += 1
        tried.not_before_s = now_s + pause_s
        return pause_s
