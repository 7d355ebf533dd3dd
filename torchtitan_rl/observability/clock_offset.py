"""By how much the clock of another host is ahead, estimated from round trips."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """When a question was sent and its answer received by the clock here, and the clock there in
    between. Nanoseconds of the Unix clock."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def took_ns(self) -> int:
        return self.received_ns - self.sent_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The other clock minus ours; it is off by at most ``error_ns``."""

    ahead_ns: int
    error_ns: int


def estimate_offset(round_trips: Iterable[RoundTrip]) -> ClockOffset | None:
    """From the shortest round trip, in the middle of which the other clock was read; None without
    a usable one.

    >>> estimate_offset([RoundTrip(sent_ns=100, there_ns=1_110, received_ns=120)])
    ClockOffset(ahead_ns=1000, error_ns=10)
    """
    usable = [trip for trip in round_trips if trip.took_ns >= 0]  # else our clock was set back
    if not usable:
        return None
    best = min(usable, key=lambda trip: trip.took_ns)
    half_ns = -(-best.took_ns // 2)
    return ClockOffset(
        ahead_ns=best.there_ns - (best.sent_ns + best.received_ns) // 2, error_ns=half_ns
    )
