"""Records when each process was busy with what: spans in a Chrome/Perfetto trace.

Each process writes events, one JSON line each, into its own files: ``NAME.TIME.jsonl``, or on
another host ``HOST-NAME.TIME.jsonl``. When a file is full, the process begins another, and keeps
the newest ``KEPT_FILES``. `merge_traces` merges all files into one ``trace.json`` for
chrome://tracing and ui.perfetto.dev. Spans on one track (row) must nest or follow each other, so
overlapping tasks of an event loop have one track each.

Times are microseconds of the Unix clock; within a process they follow the monotonic clock.
`merge_traces` subtracts the offset of another host's clock, which `estimate_offset` estimates from
round trips and `write_clocks` writes to ``clocks.json``.

Invariants: a tracer raises no OSError. Events that do not fit on a full disk are left out; this is
logged once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from torchtitan_rl.files import append_line, parse_object, replace_file, replacing, whole_lines

logger = logging.getLogger(__name__)

MAX_BYTES = 32 << 20  # size of a full file; about a week of a busy process
KEPT_FILES = 4  # number of files of one process
HOST_VARIABLE = "TORCHTITAN_RL_HOST"  # set for processes on another host than the controller's
CLOCKS = "clocks.json"  # in the folder of the traces

HOST_EVENT = "process_labels"  # the event for a text that viewers show next to a process's name
_MAIN_TRACK = "main"


class Tracer:
    """Writes the events of one process; safe to use from several threads.

    ``trace_dir`` None disables the tracer. ``process`` is the name shown in the trace; a process
    that is started again, or that begins another file, is shown as another process. A file is full
    from ``max_bytes`` on. ``host``: whose clock the times follow; empty for the controller's.
    """

    def __init__(
        self, trace_dir: Path | None, process: str, *, max_bytes: int = MAX_BYTES, host: str = ""
    ) -> None:
        self._lock = threading.RLock()
        self._process = process
        self._host = host
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._paths: list[Path] = []
        self._tracks: dict[str, int] = {}
        self._named_tracks: set[str] = set()  # tracks that the current file names
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._folder = trace_dir  # None: nothing is recorded
        self._file: FileIO | None = None  # None also while the file cannot be opened
        self._has_warned = False
        if trace_dir is not None:
            self._write_lines([])

    @contextmanager
    def span(self, name: str, /, *, track: str = _MAIN_TRACK, **args: Any) -> Iterator[None]:
        """Record how long the ``with`` block takes. Viewers show ``args`` (JSON-able) with it."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.complete(name, start_ns, time.perf_counter_ns(), track=track, **args)

    def complete(
        self, name: str, start_ns: int, end_ns: int, /, *, track: str = _MAIN_TRACK, **args: Any
    ) -> None:
        """Record a span between two readings of ``time.perf_counter_ns()``."""
        if self._folder is None:
            return
        event = {
            "name": name,
            "ph": "X",
            "ts": (start_ns + self._offset_ns) / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "tid": 0,
        }
        self._write(event | {"args": args} if args else event, track)

    def close(self) -> None:
        """Record nothing from here on."""
        with self._lock:
            self._folder = None
            if self._file is not None:
                try:
                    self._file.close()
                except OSError as error:
                    self._warn(error)

    def _write(self, event: dict[str, Any], track: str) -> None:
        with self._lock:
            event["tid"] = self._tracks.setdefault(track, len(self._tracks) + 1)
            is_named = track in self._named_tracks
            events = [event] if is_named else [self._track_name(track), event]
            if self._write_lines(events):
                self._named_tracks.add(track)

    def _write_lines(self, events: list[dict[str, Any]]) -> bool:
        """Write all events or none; False if the tracer is closed or the disk fails."""
        try:
            if self._folder is None:
                return False
            if self._file is None or self._num_bytes >= self._max_bytes:
                self._begin_file(self._folder)
            if self._file is not None and events:
                self._num_bytes += _append(self._file, events)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _begin_file(self, folder: Path) -> None:
        """Continue in a new file. Raises OSError if it cannot be written; then nothing changes."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._host}-{self._process}" if self._host else self._process
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        path = folder / f"{readable}.{time.time_ns()}.jsonl"
        file = FileIO(path, "x")
        head: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "args": {"name": self._process}}
        ]
        if self._host:
            head += [{"name": HOST_EVENT, "ph": "M", "args": {"labels": self._host}}]
        head += [self._track_name(track) for track in self._tracks]
        try:
            num_bytes = _append(file, head)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        before, self._file, self._num_bytes = self._file, file, num_bytes
        self._named_tracks = set(self._tracks)
        self._paths.append(path)
        if before is not None:
            before.close()
        while len(self._paths) > KEPT_FILES:
            self._paths.pop(0).unlink(missing_ok=True)

    def _track_name(self, track: str) -> dict[str, Any]:
        tid = self._tracks[track]
        return {"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": track}}

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("the trace of %s has gaps: %s", self._process, error)


def merge_traces(trace_dir: Path, output: Path | None = None) -> Path:
    """Merge all files in ``trace_dir`` into one Chrome trace, and return its path (by default
    ``trace.json`` next to the folder). Incomplete lines, from a killed process or a full disk, are
    left out. Raises OSError; an older trace is then unchanged."""
    output = output or trace_dir.parent / "trace.json"
    clocks = read_clocks(trace_dir)
    with replacing(output, is_durable=False) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for pid, path in enumerate(sorted(trace_dir.glob("*.jsonl")), start=1):
            ahead_us = 0.0
            for event in _events(path):
                if event.get("name") == HOST_EVENT:
                    label = str(event.get("args", {}).get("labels"))
                    offset = clocks.get(path.name) or clocks.get(label)
                    ahead_us = 0.0 if offset is None else offset.ahead_ns / 1e3
                elif "ts" in event:
                    event["ts"] -= ahead_us
                event["pid"] = pid
                event.setdefault("tid", 0)
                file.write(f"{separator}{json.dumps(event, separators=(',', ':'))}".encode())
                separator = ",\n"
        file.write(b"\n]}\n")
    return output


def host_label() -> str:
    """The name of the host on which this process runs; empty on the controller's host."""
    return os.environ.get(HOST_VARIABLE, "")


def write_clocks(trace_dir: Path, clocks: Mapping[str, ClockOffset]) -> None:
    """Write the offsets of other hosts' clocks. Keys are names of hosts or, for files from before a
    resume, names of files (see `clocks_of_files`). Raises OSError."""
    trace_dir.mkdir(parents=True, exist_ok=True)
    offsets = {host: asdict(offset) for host, offset in clocks.items()}
    content = json.dumps(offsets, indent=1).encode()
    replace_file(trace_dir / CLOCKS, content, is_durable=False)


def read_clocks(trace_dir: Path) -> dict[str, ClockOffset]:
    """Read the offsets that `write_clocks` wrote; empty if the file cannot be read."""
    try:
        content = (trace_dir / CLOCKS).read_bytes()
        return msgspec.json.decode(content, type=dict[str, ClockOffset])
    except (OSError, ValueError, RecursionError):
        return {}


def clocks_of_files(trace_dir: Path) -> dict[str, ClockOffset]:
    """The clock offsets of all files that exist now, by file name. The file, not the host, is the
    key, because after a resume another machine may have the same host name."""
    clocks, names = read_clocks(trace_dir), (path.name for path in trace_dir.glob("*.jsonl"))
    found = {name: clocks.get(name) or clocks.get(name.partition("-")[0]) for name in names}
    return {name: offset for name, offset in found.items() if offset is not None}


def _append(file: FileIO, events: list[dict[str, Any]]) -> int:
    lines = (json.dumps(one, separators=(",", ":"), default=str) + "\n" for one in events)
    data = "".join(lines).encode()
    append_line(file, data)
    return len(data)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in whole_lines(path):
        try:
            event = parse_object(path.name, line)
            has_time = math.isfinite(event.get("ts", 0.0))
        except (ValueError, TypeError, OverflowError):
            continue
        if has_time and isinstance(event.get("args", {}), dict):
            yield event


_TRACK = "engine"


class EngineTrace:
    """The ``on_work`` of an `EngineLoop`; called only from the loop's thread.

    Many short steps become few spans. A step that begins within ``max_gap_s`` of the previous one
    extends its span; longer gaps are visible as idle time. A span is at most ``max_stretch_s``
    long, so that a killed process loses no more than that.
    """

    def __init__(
        self, tracer: Tracer, *, max_gap_s: float = 0.02, max_stretch_s: float = 1.0
    ) -> None:
        self._tracer = tracer
        self._max_gap_ns = round(max_gap_s * 1e9)
        self._max_stretch_ns = round(max_stretch_s * 1e9)
        self._start_ns = self._end_ns = self._steps = 0

    def __call__(self, work: str, start_ns: int, end_ns: int, /, **details: Any) -> None:
        if work != "step":
            self.flush()
            self._tracer.complete(work, start_ns, end_ns, track=_TRACK, **details)
            return
        is_apart = start_ns - self._end_ns > self._max_gap_ns
        if is_apart or end_ns - self._start_ns > self._max_stretch_ns:
            self.flush()
        if not self._steps:
            self._start_ns = start_ns
        self._end_ns = end_ns
        self._steps += 1

    def flush(self) -> None:
        """Write the current span. Call this at the end of the loop."""
        if self._steps:
            self._tracer.complete(
                "decode", self._start_ns, self._end_ns, track=_TRACK, steps=self._steps
            )
            self._steps = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """One reading of a remote clock: the local times at which the question was sent and the answer
    received, and the remote time in between. Nanoseconds of the Unix clock."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def took_ns(self) -> int:
        return self.received_ns - self.sent_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The remote clock minus the local clock; wrong by at most ``error_ns``."""

    ahead_ns: int
    error_ns: int


def estimate_offset(round_trips: Iterable[RoundTrip]) -> ClockOffset | None:
    """Estimate the offset of a remote clock from the shortest round trip, assuming that the clock
    was read in the middle of this round trip. Return None if there is no usable round trip.

    >>> estimate_offset([RoundTrip(sent_ns=100, there_ns=1_110, received_ns=120)])
    ClockOffset(ahead_ns=1000, error_ns=10)
    """
    usable = [trip for trip in round_trips if trip.took_ns >= 0]  # < 0: our clock was set back
    if not usable:
        return None
    best = min(usable, key=lambda trip: trip.took_ns)
    half_ns = -(-best.took_ns // 2)
    return ClockOffset(
        ahead_ns=best.there_ns - (best.sent_ns + best.received_ns) // 2, error_ns=half_ns
    )
