"""Which replica a request goes to: pure functions of what the router knows, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as a strategy sees it. ``outstanding_tokens`` is prompt + budget of its calls."""

    index: int
    outstanding_tokens: int
    takes_requests: bool
    version: int = 0

    def is_eligible(self, min_version: int) -> bool:
        """May it serve a request that wants this version or a newer one?"""
        return self.takes_requests and self.version >= min_version


class RoutingStrategy(Protocol):
    def choose(
        self, views: Sequence[ReplicaView], home: int | None, min_version: int = 0
    ) -> int | None:
        """Index of a replica that is eligible for ``min_version``, or None where there is none.

        ``home`` is the replica that served the session before; it is left where it lags behind.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded:
    """The replica with the fewest outstanding tokens; the lowest index among equals."""

    def choose(
        self, views: Sequence[ReplicaView], home: int | None, min_version: int = 0
    ) -> int | None:
        usable = [view for view in views if view.is_eligible(min_version)]
        if not usable:
            return None
        return min(usable, key=lambda view: (view.outstanding_tokens, view.index)).index


@dataclass(frozen=True, slots=True, kw_only=True)
class StickyLeastLoaded:
    """A session stays at home, where its prefix is cached, unless home is overloaded or gone.

    Overloaded: more than ``max_imbalance`` times the tokens of the least loaded replica, and more
    than ``slack_tokens`` above it.
    """

    max_imbalance: float = 2.0
    slack_tokens: int = 8192

    def choose(
        self, views: Sequence[ReplicaView], home: int | None, min_version: int = 0
    ) -> int | None:
        least = LeastLoaded().choose(views, None, min_version)
        if least is None or home is None or not views[home].is_eligible(min_version):
            return least
        floor = views[least].outstanding_tokens
        load = views[home].outstanding_tokens
        is_overloaded = load > self.max_imbalance * floor and load > floor + self.slack_tokens
        return least if is_overloaded else home


@dataclass(slots=True)
class RoundRobin:
    """Each replica in turn, whatever its load: the baseline that others are measured against."""

    _next: int = 0

    def choose(
        self, views: Sequence[ReplicaView], home: int | None, min_version: int = 0
    ) -> int | None:
        for offset in range(len(views)):
            index = (self._next + offset) % len(views)
            if views[index].is_eligible(min_version):
                self._next = index + 1
                return index
        return None
