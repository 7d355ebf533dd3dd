"""What an audit reports: checks, how much each one looked at, and what it found wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError

_UNREADABLE = (TorchtitanRLError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the configuration of the run promises; None where it is unknown."""

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
    what: str = "files"
    looked_at: int = 0
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    @contextmanager
    def reports_errors(self, where: str, fix: str = "restore it from a copy") -> Iterator[None]:
        """Report an error in the block, which reads what a run wrote, as a violation."""
        try:
            yield
        except _UNREADABLE as error:
            self.violations.append(f"{where}: {type(error).__name__}: {error}; {fix}")

    @property
    def summary(self) -> str:
        number = len(self.violations)
        verdict = "ok" if not number else f"{number} violation{'s' if number > 1 else ''}"
        return f"{self.name}: {verdict} ({self.looked_at} {self.what})"
