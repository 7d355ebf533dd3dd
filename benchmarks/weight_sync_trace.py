"""Reads the durations of weight syncs from a run's traces: publishing, fetch, swap, stall.

Traces are written by `observability/trace.py`; the spans are those of the trainer's and the
generators' ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of a trace, in seconds of the Unix clock."""

    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def read_traces(trace_dir: Path, process: str) -> list[list[Span]]:
    """Read the spans of each rank of ``process`` ("trainer", "replica0"), in the order of their
    ends."""
    paths = sorted(trace_dir.glob(f"{process}-rank-*.jsonl"))
    return [spans(map(json.loads, path.read_text().splitlines())) for path in paths]


def spans(events: Iterable[Event]) -> list[Span]:
    found = [
        Span(
            name=event["name"],
            start_s=event["ts"] / 1e6,
            end_s=(event["ts"] + event["dur"]) / 1e6,
            args=event.get("args", {}),
        )
        for event in events
        if event["ph"] == "X"
    ]
    return sorted(found, key=lambda span: span.end_s)


def seconds_of(
    ranks: Iterable[list[Span]], name: str, version: int, *, default: float | None = None
) -> float:
    """Return the seconds of the span ``name`` of ``version`` on the slowest rank that has such a
    span.

    Raises:
        LookupError: no rank has such a span, and there is no default.
    """
    found = [span.seconds for span in _of_version(ranks, name, version)]
    if not found and default is not None:
        return default
    if not found:
        raise LookupError(f"no rank has a span {name!r} of version {version}")
    return max(found)


def seconds_together(ranks: Iterable[list[Span]], name: str, version: int) -> float:
    """Return the seconds from the moment when the last rank began the span ``name`` of ``version``
    to the moment when the last rank ended it. For work that all ranks do together.

    Raises:
        LookupError: no rank has such a span.
    """
    found = _of_version(ranks, name, version)
    if not found:
        raise LookupError(f"no rank has a span {name!r} of version {version}")
    return max(span.end_s for span in found) - max(span.start_s for span in found)


def standstill_s(ranks: Iterable[list[Span]], version: int) -> float:
    """Return the seconds from the moment when all ranks had ended the last engine step before the
    swap of ``version`` to the moment when all had begun the first step after it. All ranks do a
    step together.

    Raises:
        LookupError: on some rank, nothing was decoded before the swap, or after it.
    """
    around = [_steps_around(rank, version) for rank in ranks]
    return max(first for _, first in around) - max(last for last, _ in around)


def _of_version(ranks: Iterable[list[Span]], name: str, version: int) -> list[Span]:
    return [
        span
        for rank in ranks
        for span in rank
        if span.name == name and span.args.get("version") == version
    ]


def _steps_around(rank: list[Span], version: int) -> tuple[float, float]:
    """Return when the last step before the swap ended, and when the first step after the swap
    began."""
    swaps = _of_version([rank], "swap weights", version)
    if len(swaps) != 1:
        raise LookupError(f"version {version} was swapped in {len(swaps)} times")
    decoding = [span for span in rank if span.name == "decode"]
    before = [span.end_s for span in decoding if span.end_s <= swaps[0].start_s]
    after = [span.start_s for span in decoding if span.start_s >= swaps[0].end_s]
    if not before or not after:
        raise LookupError(f"nothing was decoded on both sides of the swap of version {version}")
    return max(before), min(after)
