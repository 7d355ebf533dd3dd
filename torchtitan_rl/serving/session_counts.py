"""What all sessions together came to, kept up to date one session at a time.

Invariant: each session counts once, by its last report. Reading costs nothing for sessions in which
nothing happened: a server may hold thousands of them, and is asked every second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torchtitan_rl.serving.session_record import SessionEnding, SessionReport


class SessionCounts:
    """Of open sessions as they were reported last, and of all that have ended."""

    def __init__(self) -> None:
        self._total = Counter({f"sessions_{ending.value}": 0 for ending in SessionEnding})
        self._open: dict[str, SessionReport] = {}
        self._add(SessionReport(session_id=""), 1)  # every name is there from the start

    def take(self, report: SessionReport) -> None:
        """It stands for all that was said of its session before."""
        before = self._open.pop(report.session_id, None)
        if before is not None:
            self._add(before, -1)
        self._add(report, 1)
        if report.ending is None:
            self._open[report.session_id] = report

    def read(self) -> Mapping[str, float]:
        """Gauges and counters, by name."""
        return {**self._total, "sessions_open": len(self._open)}

    def _add(self, report: SessionReport, sign: int) -> None:
        if report.ending is not None:
            self._total[f"sessions_{report.ending.value}"] += sign
        for name, number in {
            "session_turns": report.turns,
            "session_unseen_turns": report.unseen_turns,
            "session_tokens_generated": report.tokens_generated,
            "session_tokens_trained": report.tokens_trained,
            "session_tokens_masked": sum(report.tokens_masked.values()),
            "session_tokens_discarded": sum(report.tokens_discarded.values()),
            "session_tokens_pending": report.tokens_pending,
        }.items():
            self._total[name] += sign * number
