"""Which of many replicas has the least load, kept up to date change by change.

A binary tree over the replicas in which each node knows the least loaded eligible one below it and
the range of policy versions there: a change costs O(log N), and so does a question unless versions
are mixed, when it also visits the nodes whose versions are on both sides of the one asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

_NOBODY = (float("inf"), -1)


@dataclass(slots=True)
class _Node:
    """``best`` is (load, index). Versions are those of eligible replicas."""

    best: tuple[float, int] = _NOBODY
    oldest: float = float("inf")
    newest: float = float("-inf")


class LoadIndex:
    """Loads and versions of ``count`` replicas, none of which is eligible before its `update`."""

    def __init__(self, count: int) -> None:
        self._first = 1
        while self._first < count:
            self._first *= 2
        self._nodes = [_Node() for _ in range(2 * self._first)]

    def update(self, index: int, *, load: int, version: int, is_eligible: bool) -> None:
        """What a replica is now."""
        position = self._first + index
        node = self._nodes[position]
        if is_eligible:
            node.best, node.oldest, node.newest = (load, index), version, version
        else:
            node.best, node.oldest, node.newest = _NOBODY, float("inf"), float("-inf")
        while position > 1:
            position //= 2
            left, right = self._nodes[2 * position], self._nodes[2 * position + 1]
            node = self._nodes[position]
            node.best = min(left.best, right.best)
            node.oldest = min(left.oldest, right.oldest)
            node.newest = max(left.newest, right.newest)

    def least(self, min_version: int = 0) -> int | None:
        """The least loaded eligible replica of this version or a newer one, the lowest index among
        equals; None where there is none."""
        found = self._least(1, min_version)[1]
        return None if found < 0 else found

    def _least(self, position: int, min_version: int) -> tuple[float, int]:
        node = self._nodes[position]
        if node.newest < min_version:
            return _NOBODY
        if node.oldest >= min_version:
            return node.best
        return min(
            self._least(2 * position, min_version), self._least(2 * position + 1, min_version)
        )
