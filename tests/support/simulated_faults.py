"""What may go wrong with a simulated part, and when; nothing does unless a campaign says so."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens to one call of a part; each part knows its own actions."""

    action: str
    seconds: float = 0.0


class Fate(Protocol):
    """Is asked at every call of every part."""

    def at(self, point: str) -> Strike | None:
        """``point`` names part and method: ``r0.pull``, ``trainer.publish``, ``env.step``."""


class Undisturbed:
    """Nothing goes wrong."""

    def at(self, point: str) -> Strike | None:
        return None


class Strikes:
    """Does ``actions`` (by point and number of the call)."""

    def __init__(self, actions: dict[tuple[str, int], str]) -> None:
        self._actions = actions
        self.calls: Counter[str] = Counter()

    def at(self, point: str) -> Strike | None:
        number, self.calls[point] = self.calls[point], self.calls[point] + 1
        action = self._actions.get((point, number))
        seconds = 0.01 if action == "lost_soon" else 10_000.0
        return None if action is None else Strike(action=action, seconds=seconds)
