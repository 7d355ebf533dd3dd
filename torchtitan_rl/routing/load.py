"""Which of many replicas has the least load, kept up to date change by change.

One binary tree for each policy version that an eligible replica holds (few at any time), in which
each node knows the least loaded replica below it: a change costs O(log N), and a question looks at
the roots of the versions that are new enough.
"""

from __future__ import annotations

_Least = tuple[float, int]  # (load, index)
_NO_CALLER: _Least = (float("inf"), -1)


class _Tree:
    """The least loaded of the replicas with one version."""

    def __init__(self, size: int) -> None:
        self._size = size  # a power of two
        self._nodes = [_NO_CALLER] * (2 * size)
        self.num_members = 0

    @property
    def least(self) -> _Least:
        return self._nodes[1]

    def set(self, index: int, value: _Least) -> None:
        nodes, position = self._nodes, self._size + index
        self.num_members += (value is not _NO_CALLER) - (nodes[position] is not _NO_CALLER)
        nodes[position] = value
        while position > 1:
            best = min(nodes[position], nodes[position ^ 1])
            position //= 2
            if nodes[position] == best:
                return  # nothing above changes
            nodes[position] = best


class LoadIndex:
    """Loads and versions of ``count`` replicas, none of which is eligible before its `update`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._size = 1 << max(0, count - 1).bit_length()
        self._trees: dict[int, _Tree] = {}  # by version
        self._leaves: list[tuple[float, int] | None] = [None] * count  # (load, version)

    def update(self, index: int, *, load: int, version: int, is_eligible: bool) -> None:
        """Set the state of a replica."""
        before = self._leaves[index]
        if before is not None and not (is_eligible and before[1] == version):
            self._trees[before[1]].set(index, _NO_CALLER)
            if self._trees[before[1]].num_members == 0:
                del self._trees[before[1]]
        self._leaves[index] = (load, version) if is_eligible else None
        if is_eligible:
            if version not in self._trees:
                self._trees[version] = _Tree(self._size)
            self._trees[version].set(index, (load, index))

    def load(self, index: int) -> float:
        """The replica's load; infinite if it is not eligible."""
        leaf = self._leaves[index]
        return float("inf") if leaf is None else leaf[0]

    def is_eligible(self, index: int, min_version: int = 0) -> bool:
        """Whether the replica may get a request that wants ``min_version`` or a newer version."""
        leaf = self._leaves[index]
        return leaf is not None and leaf[1] >= min_version

    def least(self, min_version: int = 0) -> int | None:
        """The least loaded eligible replica of this version or a newer one, the lowest index among
        equals; None if no replica is."""
        best = _NO_CALLER
        for version, tree in self._trees.items():
            if version >= min_version and tree.least < best:
                best = tree.least
        return None if best is _NO_CALLER else best[1]
