"""Chooses the replica for a request, and decides whether the request may start now. No clock, no
I/O. `LoadIndex` finds the least loaded of thousands of replicas.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from torchtitan_rl.errors import GenerationError
from torchtitan_rl.routing.replicas import Halt, LoadIndex, ReplicaPool, ReplicaState
from torchtitan_rl.routing.weights import WeightSync
from torchtitan_rl.types import GenerationRequest

_MAX_REMEMBERED = 262_144  # sessions and prompts; the least recently used are forgotten first
_MAX_IMBALANCE = 2.0
_SLACK_TOKENS = 8192


def sticky_or_least_loaded(loads: LoadIndex, last: int | None, min_version: int = 0) -> int | None:
    """Return the index of a replica that is eligible for ``min_version``; None if no replica is.

    A session stays on ``last``, the replica with its cached prefix, unless that replica is not
    eligible or is overloaded: its load (the prompts and token budgets of its running calls) is more
    than twice that of the least loaded replica, and more than 8,192 tokens above it.
    """
    least = loads.least(min_version)
    if least is None or last is None or not loads.is_eligible(last, min_version):
        return least
    floor, load = loads.load(least), loads.load(last)
    is_overloaded = load > _MAX_IMBALANCE * floor and load > floor + _SLACK_TOKENS
    return least if is_overloaded else last


class Placement:
    """Chooses replicas for requests. With ``keeps_requests``, requests wait instead of failing if
    no replica is left."""

    def __init__(
        self, pool: ReplicaPool, weights: WeightSync, *, keeps_requests: bool = False
    ) -> None:
        self._pool = pool
        self._weights = weights
        self._keeps_requests = keeps_requests
        self._replica_of: OrderedDict[str | None, int] = OrderedDict()  # by session id or prompt id

    def choose(
        self, request: GenerationRequest, pinned: ReplicaState | None = None
    ) -> ReplicaState | None:
        """Choose the replica that takes the request now; with ``pinned``, only this one. None if
        the request has to wait: ask again once `can_schedule` holds. Raises GenerationError: the
        pinned replica is lost, or no replica is left."""
        version = request.min_version
        if pinned is not None:
            if not pinned.is_live:
                what = f"{pinned.name}, which was pinned for it, is lost"
                raise GenerationError(f"request {request.request_id}: {what}: {pinned.failure}")
            return pinned if self.can_schedule(version, pinned) else None
        if not self._may_start(version):
            return None
        loads = self._pool.index
        last, of_siblings = map(self._replica_of.get, (request.session_id, request.prompt_id))
        # The siblings' replica is taken whatever its load: so few siblings share a prompt_id that
        # replicas stay evenly loaded.
        if last is None and of_siblings is not None and loads.is_eligible(of_siblings, version):
            index: int | None = of_siblings
        else:
            index = sticky_or_least_loaded(loads, last, version)
        if index is None:
            if not self._keeps_requests:
                self._pool.require_unreserved()
            return None
        self._remember(request.session_id, index)
        self._remember(request.prompt_id, index)
        return self._pool.all[index]

    def can_schedule(self, version: int, pinned: ReplicaState | None = None) -> bool:
        """Whether a request that needs ``version`` need not wait: `choose` would return a replica,
        or raise."""
        if pinned is not None:
            is_running = pinned.halt is Halt.RUNNING
            return (pinned.is_serving and is_running) or not pinned.is_live
        if not self._may_start(version):
            return False
        if self._pool.index.least(version) is not None:
            return True
        return not self._keeps_requests and not self._pool.has_unreserved()

    def _may_start(self, version: int) -> bool:
        return not self._pool.is_paused and self._weights.may_start_on(version)

    def wait_key(self, version: int, pinned: ReplicaState | None = None) -> Hashable:
        """Return a key that is equal for all requests with the same `can_schedule`."""
        return ("request", version) if pinned is None else ("pin", pinned.index)

    def forget(self, request: GenerationRequest) -> None:
        """Let the request's next piece, and the siblings that follow, run on any replica."""
        for name in (request.session_id, request.prompt_id):
            self._replica_of.pop(name, None)

    def _remember(self, name: str | None, index: int) -> None:
        if name is None:
            return
        self._replica_of[name] = index
        self._replica_of.move_to_end(name)
        if len(self._replica_of) > _MAX_REMEMBERED:
            self._replica_of.popitem(last=False)
