"""Who was busy when: spans of all processes, as a Chrome/Perfetto trace.

Each process writes events, one JSON line each, into files of its own, ``NAME.TIME.jsonl``: where
one is full it begins another, and keeps the newest ``KEPT_FILES``. `merge_traces` makes one
``trace.json`` of them that chrome://tracing and ui.perfetto.dev open. Spans lie on named tracks
(rows); spans of one track must nest or follow each other, so what overlaps (tasks of an event
loop) takes a track each.

Times are microseconds of the Unix clock, so that processes line up; within a process they follow
the monotonic clock. A disabled tracer does next to nothing.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from torchtitan_rl.line_files import whole_lines

MAX_BYTES = 32 << 20  # of a file; about a week of a busy process
KEPT_FILES = 4  # of one process

_NOTHING: AbstractContextManager[None] = nullcontext()
_MAIN_TRACK = "main"


class Tracer:
    """Writes the events of one process; safe to use from several threads.

    Args:
        trace_dir: None disables the tracer.
        process: name shown in the trace; a process that is started again, or that begins another
            file, shows as one more.
        max_bytes: of a file, but for its last event.
    """

    def __init__(self, trace_dir: Path | None, process: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._lock = threading.RLock()
        self._process = process
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._paths: list[Path] = []
        self._tracks: dict[str, int] = {}
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._file: TextIO | None = None
        if trace_dir is not None:
            trace_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._next_file(trace_dir)

    @property
    def is_enabled(self) -> bool:
        return self._file is not None

    def span(
        self, name: str, /, *, track: str = _MAIN_TRACK, **args: Any
    ) -> AbstractContextManager[None]:
        """Record how long the ``with`` block took. ``args`` (JSON-able) are shown with it."""
        return _NOTHING if self._file is None else self._measured(name, track, args)

    def complete(
        self, name: str, start_ns: int, end_ns: int, /, *, track: str = _MAIN_TRACK, **args: Any
    ) -> None:
        """Record a span between two readings of ``time.perf_counter_ns()``."""
        if self._file is None:
            return
        event = {
            "name": name,
            "ph": "X",
            "ts": (start_ns + self._offset_ns) / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
            "tid": self._track_id(track),
        }
        self._write(event | {"args": args} if args else event)

    def close(self) -> None:
        """Record nothing from here on."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    @contextmanager
    def _measured(self, name: str, track: str, args: dict[str, Any]) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.complete(name, start_ns, time.perf_counter_ns(), track=track, **args)

    def _track_id(self, track: str) -> int:
        with self._lock:
            known = self._tracks.get(track)
            if known is not None:
                return known
            new = len(self._tracks) + 1
            self._write({"name": "thread_name", "ph": "M", "tid": new, "args": {"name": track}})
            self._tracks[track] = new
        return new

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file is None:
                return
            if self._num_bytes >= self._max_bytes:
                self._file.close()
                self._file = self._next_file(self._paths[-1].parent)
            self._num_bytes += self._file.write(_line(event))

    def _next_file(self, folder: Path) -> TextIO:
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", self._process)
        path = folder / f"{readable}.{time.time_ns()}.jsonl"
        file = path.open("x", buffering=1, encoding="utf-8")
        self._paths.append(path)
        while len(self._paths) > KEPT_FILES:
            self._paths.pop(0).unlink(missing_ok=True)
        head: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "args": {"name": self._process}}
        ]
        head += [
            {"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": track}}
            for track, tid in self._tracks.items()
        ]
        self._num_bytes = file.write("".join(map(_line, head)))
        return file


class BusyStretches:
    """Joins many short pieces of work (engine steps) into few spans: what follows within
    ``max_gap_s`` belongs to the same stretch, and gaps stay visible as idle time.

    One thread calls it. Stretches are cut at ``max_stretch_s``, so that a killed process loses no
    more than that.
    """

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        *,
        track: str = _MAIN_TRACK,
        max_gap_s: float = 0.02,
        max_stretch_s: float = 1.0,
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._track = track
        self._max_gap_ns = round(max_gap_s * 1e9)
        self._max_stretch_ns = round(max_stretch_s * 1e9)
        self._start_ns = self._end_ns = self._pieces = 0

    def add(self, start_ns: int, end_ns: int) -> None:
        """One piece of work, between two readings of ``time.perf_counter_ns()``."""
        if not self._tracer.is_enabled:
            return
        is_apart = start_ns - self._end_ns > self._max_gap_ns
        if self._pieces and (is_apart or end_ns - self._start_ns > self._max_stretch_ns):
            self.flush()
        if not self._pieces:
            self._start_ns = start_ns
        self._end_ns = end_ns
        self._pieces += 1

    def flush(self) -> None:
        """Write the stretch so far; call it where the work pauses for long, and at the end."""
        if self._pieces:
            self._tracer.complete(
                self._name, self._start_ns, self._end_ns, track=self._track, steps=self._pieces
            )
            self._pieces = 0


def merge_traces(trace_dir: Path, output: Path | None = None) -> Path:
    """Make one Chrome trace of all files in ``trace_dir``; returns its path, by default
    ``trace.json`` beside the folder. A last line that a killed process left unfinished is left out.
    """
    output = output or trace_dir.parent / "trace.json"
    unfinished = output.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for pid, path in enumerate(sorted(trace_dir.glob("*.jsonl")), start=1):
            for event in _events(path):
                event["pid"] = pid
                event.setdefault("tid", 0)
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    unfinished.replace(output)
    return output


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), default=str) + "\n"


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in whole_lines(path):
        yield json.loads(line)
