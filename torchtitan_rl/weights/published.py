"""Reference counts of the published versions, held by the controller.

The publisher keeps the newest version and the one before; an evaluation pins the version that it
runs on for longer. For use in one event loop.

Invariant: a pinned version stays readable if each publishing is given `kept` and followed by
`advance`. Only the current version, or one that is pinned already, can be pinned: a publishing that
has begun may release any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class PublishedVersions:
    """Counts the pins of each version."""

    def __init__(self) -> None:
        self._current: int | None = None
        self._pins: Counter[int] = Counter()

    @property
    def current(self) -> int | None:
        """The newest version that replicas can read; None before the first."""
        return self._current

    def advance(self, version: int) -> None:
        """``version`` has been published."""
        self._current = version

    def pin(self, version: int) -> Callable[[], None]:
        """Keep ``version`` readable until the returned function is called; calling it again has no
        effect.

        Raises:
            ValueError: it is neither the current version nor pinned.
        """
        if version != self._current and version not in self._pins:
            raise ValueError(
                f"version {version} cannot be pinned: current is {self._current}, "
                f"pinned are {sorted(self._pins) or 'none'}"
            )
        self._pins[version] += 1
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._pins[version] -= 1
                if self._pins[version] == 0:
                    del self._pins[version]

        return release

    def kept(self) -> frozenset[int]:
        """The pinned versions, for `Trainer.publish`."""
        return frozenset(self._pins)


def given_up(held: list[int], keep: frozenset[int]) -> list[int]:
    """The versions to release before one more is published, of those ``held``, oldest first: all
    but the newest and those in ``keep``.

    >>> given_up([3, 4, 5], keep=frozenset({3}))
    [4]
    """
    return [version for version in held[:-1] if version not in keep]
