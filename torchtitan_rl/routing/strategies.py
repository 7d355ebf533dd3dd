"""Which replica a request goes to: decided from loads and versions alone, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torchtitan_rl.routing.load_index import LoadIndex


class RoutingStrategy(Protocol):
    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        """Index of a replica that is eligible for ``min_version``, or None where there is none.

        Loads are outstanding tokens: prompt and budget of the calls it has. ``last`` is the
        replica that served the session before; the session leaves it where it is too old.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded:
    """The replica with the fewest outstanding tokens; the lowest index among equals."""

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        return replicas.least(min_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyLeastLoaded:
    """A session stays on the replica with its cached prefix, unless that is overloaded or gone.

    Overloaded: more than ``max_imbalance`` times the tokens of the least loaded replica, and more
    than ``slack_tokens`` above it.
    """

    max_imbalance: float = 2.0
    slack_tokens: int = 8192

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        least = replicas.least(min_version)
        if least is None or last is None or not replicas.is_eligible(last, min_version):
            return least
        floor, load = replicas.load(least), replicas.load(last)
        is_overloaded = load > self.max_imbalance * floor and load > floor + self.slack_tokens
        return least if is_overloaded else last


@dataclass(slots=True)
class RoundRobin:
    """Each replica in turn, without regard to load: a baseline for measurements."""

    _next: int = 0

    def choose(self, replicas: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
        for offset in range(replicas.count):
            index = (self._next + offset) % replicas.count
            if replicas.is_eligible(index, min_version):
                self._next = index + 1
                return index
        return None
