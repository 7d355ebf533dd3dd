"""The trace of a run: `TraceIndex` follows the files of spans, `timeline` shows a part of them.

Spans are kept as arrays by track. A span that is narrower than a pixel is shown together with its
neighbours, so an answer has at most about twice as many spans on a track as it has pixels.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchtitan_rl.files import parse_object
from torchtitan_rl.observability.explain import finite
from torchtitan_rl.observability.trace import HOST_EVENT, read_clocks
from torchtitan_rl.page.values import Json, name_of

_MAX_SPANS = 400_000  # of a track; beyond, the older half is dropped
_MAX_NAMES = 2_000
_MAX_TRACKS = 500  # of a process
_MAX_LINE_BYTES = 1 << 20
_MIN_IDLE_PIXELS = 3
_MIN_IDLE_MS = 50.0
_WHY = {  # by the phase that the controller is in meanwhile
    "start": "the run is starting",
    "restore": "a checkpoint is loaded",
    "reference": "logprobs of the initial policy are computed",
    "rows": "rows are being read",
    "train": "the trainer takes its step",
    "publish": "new weights are published",
    "sync": "replicas load new weights",
    "evaluation": "an evaluation runs",
    "checkpoint": "a checkpoint is written",
    "export": "the policy is exported",
}
_WHY_OF = {
    "trainer": {"rollout": "waits for rollouts", "train": "the batch is being packed"},
    "replica": {"rollout": "has no request: environments and rewards are at work"},
}
_CONTROLLER = "controller"

Floats = NDArray[np.float64]
Spans = tuple[Floats, Floats, NDArray[np.int64]]  # starts, durations, names
Union = tuple[Floats, Floats]  # starts and ends of spans that do not overlap


@dataclass(slots=True)
class _Track:
    name: str
    start_ms: array[float] = field(default_factory=lambda: array("d"))
    duration_ms: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("H"))

    def put(self, start_ms: float, duration_ms: float, name: int) -> None:
        if len(self.names) >= _MAX_SPANS:
            for values in (self.start_ms, self.duration_ms, self.names):
                del values[: _MAX_SPANS // 2]
        self.start_ms.append(start_ms)
        self.duration_ms.append(duration_ms)
        self.names.append(name)

    def arrays(self, ahead_ms: float) -> Spans:
        """Starts, durations and names, in no order."""
        names = np.array(self.names, dtype=np.int64)
        return np.array(self.start_ms) - ahead_ms, np.array(self.duration_ms), names


class _TraceFile:
    def __init__(self, name: str, file: BufferedReader) -> None:
        self.name = name
        self.process = name_of(name.partition(".")[0])
        self.host = ""
        self.tracks: dict[int, _Track] = {}
        self.file = file
        self.offset = 0


class TraceIndex:
    """The spans in a folder of traces. Times are milliseconds of the Unix clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _TraceFile] = {}
        self.names: dict[str, int] = {}  # of spans, with their numbers
        self.num_spans = 0

    def update(self, end_s: float) -> bool:
        """Read on until ``end_s`` of the monotonic clock. Returns whether all was read."""
        with suppress(OSError):
            for path in sorted(self._folder.glob("*.jsonl")):
                if path.name not in self._files:
                    self._files[path.name] = _TraceFile(path.name, path.open("rb"))
        for one in self._files.values():
            one.file.seek(one.offset)
            while (line := one.file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
                one.offset += len(line)
                self._put(one, line)
                if time.monotonic() > end_s:
                    return False
            if len(line) == _MAX_LINE_BYTES:  # no line of ours: skip it
                one.offset += len(line)
        return True

    def close(self) -> None:
        for one in self._files.values():
            one.file.close()

    def processes(self) -> dict[tuple[str, str], list[tuple[_TraceFile, float]]]:
        """The files of each process (name and host), with the milliseconds by which its clock is
        ahead."""
        clocks = read_clocks(self._folder)
        found: dict[tuple[str, str], list[tuple[_TraceFile, float]]] = {}
        for one in self._files.values():
            offset = clocks.get(one.name) or clocks.get(one.host)
            ahead_ms = 0.0 if offset is None else offset.ahead_ns / 1e6
            found.setdefault((one.process, one.host), []).append((one, ahead_ms))
        return found

    def _put(self, one: _TraceFile, line: bytes) -> None:
        try:
            event = parse_object("", line)
        except ValueError:
            return
        args, name, tid = event.get("args"), event.get("name"), event.get("tid", 0)
        if not isinstance(name, str) or not isinstance(tid, int):
            return
        args = args if isinstance(args, dict) else {}
        if event.get("ph") == "M":
            if name == "process_name":
                one.process = name_of(args.get("name"))
            elif name == HOST_EVENT:
                one.host = name_of(args.get("labels"))
            elif name == "thread_name" and len(one.tracks) < _MAX_TRACKS:
                one.tracks.setdefault(tid, _Track(name_of(args.get("name"))))
            return
        start_us, duration_us = finite(event.get("ts")), finite(event.get("dur"))
        track = one.tracks.get(tid)
        if start_us is None or duration_us is None or track is None:
            return
        if name not in self.names and len(self.names) >= _MAX_NAMES:
            name = "other"
        index = self.names.setdefault(name_of(name), len(self.names))
        track.put(start_us / 1e3, max(0.0, duration_us / 1e3), index)
        self.num_spans += 1


def timeline(
    trace: TraceIndex,
    steps: Iterable[tuple[int, float, float]],
    *,
    begin: float | None,
    end: float | None,
    width: int,
) -> Json:
    """The part of the trace between ``begin`` and ``end``, in milliseconds since the begin of the
    trace; None for its ends. ``width`` pixels show it. ``steps``: number, end (in Unix seconds) and
    length of each step; NaN if unknown."""
    processes = [
        (name, host, _tracks(files)) for (name, host), files in sorted(trace.processes().items())
    ]
    all_tracks = [track for _, _, tracks in processes for track in tracks.values() if len(track[0])]
    if not all_tracks:
        empty: Json = {"begin_unix_s": None, "from": 0, "to": 0, "names": [], "processes": []}
        return empty | {"steps": [], "idle": [], "total_ms": 0}
    zero = min(float(starts[0]) for starts, _, _ in all_tracks)
    last = max(float((starts + lengths).max()) for starts, lengths, _ in all_tracks) - zero
    low = 0.0 if begin is None else max(0.0, begin)
    high = last if end is None else min(end, last)
    high = max(high, low + 0.001)
    pixel = (high - low) / width
    inside = [
        (name, host, {track: _cut(one, zero, low, high) for track, one in tracks.items()})
        for name, host, tracks in processes
    ]
    phases = {
        track: _union(starts, starts + lengths)
        for name, _, tracks in inside
        if name == _CONTROLLER
        for track, (starts, lengths, _) in tracks.items()
    }
    shown: list[Json] = []
    idle: list[Json] = []
    for name, host, tracks in inside:
        busy, shortest_ms = _all_of(tracks), max(_MIN_IDLE_MS, _MIN_IDLE_PIXELS * pixel)
        idle_s, gaps = _gaps(name, busy, phases, low, high, shortest_ms)
        idle += gaps
        shown.append(
            {
                "name": name,
                "host": host,
                "busy_share": _covered(busy, low, high) / (high - low),
                "idle_s": idle_s,
                "tracks": [
                    {
                        "name": track,
                        "spans": _merged(*spans, low=low, pixel=pixel),
                        "busy_share": _covered(_union(spans[0], spans[0] + spans[1]), low, high)
                        / (high - low),
                    }
                    for track, spans in tracks.items()
                ],
            }
        )
    return {
        "begin_unix_s": zero / 1e3,
        "from": low,
        "to": high,
        "total_ms": last,
        "names": list(trace.names),
        "processes": shown,
        "steps": [
            {"step": step, "from": (end_s - length_s) * 1e3 - zero, "to": end_s * 1e3 - zero}
            for step, end_s, length_s in steps
            if math.isfinite(end_s) and math.isfinite(length_s)
        ],
        "idle": idle,
    }


def _cut(spans: Spans, zero: float, low: float, high: float) -> Spans:
    """The spans that are at least partly within the times, which are relative to ``zero``."""
    starts, lengths, names = spans
    starts = starts - zero
    is_in = (starts < high) & (starts + lengths > low)
    return starts[is_in], lengths[is_in], names[is_in]


def _all_of(tracks: Mapping[str, Spans]) -> Union:
    if not tracks:
        return np.zeros(0), np.zeros(0)
    starts, lengths, _ = (np.concatenate(one) for one in zip(*tracks.values(), strict=True))
    return _union(starts, starts + lengths)


def _tracks(files: Sequence[tuple[_TraceFile, float]]) -> dict[str, Spans]:
    """The spans of a process by track, by start: the files of its lives and of a full trace in
    one."""
    parts: dict[str, list[Any]] = {}
    for one, ahead_ms in files:
        for track in one.tracks.values():
            parts.setdefault(track.name, []).append(track.arrays(ahead_ms))
    merged = {}
    for name, several in parts.items():
        starts, lengths, names = (np.concatenate(one) for one in zip(*several, strict=True))
        order = np.argsort(starts, kind="stable")
        merged[name] = starts[order], lengths[order], names[order]
    return merged


def _merged(
    starts: Floats, lengths: Floats, names: NDArray[np.int64], *, low: float, pixel: float
) -> list[list[float]]:
    """Spans as ``[start, duration, name, count]``; those narrower than a pixel are joined."""
    is_wide = lengths >= pixel
    spans = [
        [round(float(s), 3), round(float(d), 3), int(n), 1]
        for s, d, n in zip(starts[is_wide], lengths[is_wide], names[is_wide], strict=True)
    ]
    small, ends, kinds = starts[~is_wide], (starts + lengths)[~is_wide], names[~is_wide]
    if len(small):
        cells = np.floor((small - low) / pixel)
        _, first, counts = np.unique(cells, return_index=True, return_counts=True)
        latest = np.maximum.reduceat(ends, first)
        for at, end, count in zip(first, latest, counts, strict=True):
            start = float(small[at])
            spans.append(
                [round(start, 3), round(float(end) - start, 3), int(kinds[at]), int(count)]
            )
        spans.sort(key=lambda span: (span[0], -span[1]))
    return spans


def _union(starts: Floats, ends: Floats) -> Union:
    """The time that is covered by any of the spans, as spans that do not overlap."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.concatenate([[True], starts[1:] > ends[:-1]])
    lasts = np.concatenate([begins[1:], [True]])
    return starts[begins], ends[lasts]


def _covered(union: Union, low: float, high: float) -> float:
    starts, ends = np.maximum(union[0], low), np.minimum(union[1], high)
    return float(np.maximum(ends - starts, 0.0).sum())


def _gaps(
    process: str,
    busy: Union,
    phases: Mapping[str, Union],
    low: float,
    high: float,
    shortest_ms: float,
) -> tuple[dict[str, float], list[Json]]:
    """The seconds in which a trainer or a replica does nothing, by reason, and the gaps of at least
    ``shortest_ms``; of other processes none. The reason of a gap is the phase of the controller
    that covers most of it."""
    words = next((own for kind, own in _WHY_OF.items() if process.startswith(kind)), None)
    if words is None:
        return {}, []
    begins = np.clip(np.concatenate([[low], busy[1]]), low, high)
    ends = np.clip(np.concatenate([busy[0], [high]]), low, high)
    is_gap = ends > begins
    begins, ends = begins[is_gap], ends[is_gap]
    # The first row lets a gap of which no phase covers a fifth be without reason.
    covered = [0.2 * (ends - begins), *(_covering(one, begins, ends) for one in phases.values())]
    reason_of = np.argmax(np.array(covered), axis=0)
    reasons = ["no reason recorded"]
    reasons += [(_WHY | words).get(one, f"the controller is in {one}") for one in phases]
    totals_s = np.bincount(reason_of, ends - begins, len(reasons)) / 1e3
    idle_s = {why: round(float(s), 3) for why, s in zip(reasons, totals_s, strict=True) if s}
    long = [
        {
            "process": process,
            "from": round(float(begins[at]), 3),
            "to": round(float(ends[at]), 3),
            "why": reasons[reason_of[at]],
        }
        for at in np.flatnonzero(ends - begins >= shortest_ms)
    ]
    return idle_s, long


def _covering(union: Union, begins: Floats, ends: Floats) -> Floats:
    """How much of each span between ``begins`` and ``ends`` is covered."""
    if not len(union[0]):
        return np.zeros(len(begins))
    times = np.ravel(np.column_stack(union))
    lengths = np.ravel(np.column_stack([union[1] - union[0], np.zeros(len(union[0]))]))
    before = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    result: Floats = np.interp(ends, times, before) - np.interp(begins, times, before)
    return result
