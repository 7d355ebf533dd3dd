"""What an audit says: one check, how much it looked at, and what it found wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the run's own configuration promises; None where nothing says."""

    staleness: int | None = None
    groups_per_step: int | None = None
    group_size: int | None = None
    num_steps: int | None = None
    exports: bool | None = None


def rules_of(identity: Mapping[str, Any]) -> Rules:
    """From the identity in a checkpoint or in ``identity.json``: fields by dotted name."""
    return Rules(
        staleness=identity.get("schedule.staleness"),
        groups_per_step=identity.get("rollout.groups_per_step"),
        group_size=identity.get("rollout.group_size"),
        num_steps=identity.get("num_steps"),
        exports=identity.get("checkpoint.export_hf"),
    )


@dataclass(slots=True, kw_only=True)
class Check:
    """``looked_at`` counts ``what``; each violation is a line that says where and what."""

    name: str
    what: str
    looked_at: int = 0
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    @property
    def summary(self) -> str:
        number = len(self.violations)
        verdict = "ok" if not number else f"{number} violation{'s' if number > 1 else ''}"
        return f"{self.name}: {verdict} ({self.looked_at} {self.what})"
