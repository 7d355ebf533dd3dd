"""Records who was busy when: spans of all processes, as a Chrome/Perfetto trace.

Each process writes events, one JSON line each, into files of its own: ``NAME.TIME.jsonl``, and on
another host ``HOST-NAME.TIME.jsonl``. When one is full it begins another, and keeps the newest
``KEPT_FILES``. `merge_traces` makes one ``trace.json`` of them that chrome://tracing and
ui.perfetto.dev open. Spans lie on named tracks (rows); spans of one track must nest or follow each
other, so tasks of an event loop, which overlap, take a track each.

Times are microseconds of the Unix clock, so that processes line up; within a process they follow
the monotonic clock. Processes of other hosts write the name of their host. `merge_traces` subtracts
how far the clock of that host was ahead: `estimate_offset` estimates it from round trips, and
`write_clocks` notes it in ``clocks.json``. `read_new` and `FileCopies` bring the files of other
hosts, their logs too, to the run's folder.

Invariants: a tracer raises no OSError; events that a full disk does not take are left out, which is
logged once. A copy has the bytes of the original in their order, each once; a line says how many
were left out because the file grew faster than it was read.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan_rl.files import append_line, replace_file, replacing, whole_lines

logger = logging.getLogger(__name__)

MAX_BYTES = 32 << 20  # of a file; about a week of a busy process
KEPT_FILES = 4  # of one process
HOST_VARIABLE = "TORCHTITAN_RL_HOST"  # of processes that run on another host than the controller
CLOCKS = "clocks.json"  # in the folder of the traces

_HOST_EVENT = "process_labels"  # as viewers call what they show next to the name
_NOTHING: AbstractContextManager[None] = nullcontext()
_MAIN_TRACK = "main"


class Tracer:
    """Writes the events of one process; safe to use from several threads.

    Args:
        trace_dir: None disables the tracer.
        process: name shown in the trace; a process that is started again, or that begins another
            file, shows as one more.
        max_bytes: of a file, but for its last event.
        host: whose clock it follows; empty for the controller's.
    """

    def __init__(
        self,
        trace_dir: Path | None,
        process: str,
        *,
        max_bytes: int = MAX_BYTES,
        host: str = "",
    ) -> None:
        self._lock = threading.RLock()
        self._process = process
        self._host = host
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._paths: list[Path] = []
        self._tracks: dict[str, int] = {}
        self._named_tracks: set[str] = set()  # in the current file
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._folder = trace_dir  # None: nothing is recorded
        self._file: FileIO | None = None  # None also where it could not be opened yet
        self._has_warned = False
        if trace_dir is not None:
            self._write_lines([])

    @property
    def is_enabled(self) -> bool:
        return self._folder is not None

    def span(
        self, name: str, /, *, track: str = _MAIN_TRACK, **args: Any
    ) -> AbstractContextManager[None]:
        """Record how long the ``with`` block took. ``args`` (JSON-able) are shown with it."""
        return _NOTHING if self._folder is None else self._measured(name, track, args)

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
                self._file = None

    @contextmanager
    def _measured(self, name: str, track: str, args: dict[str, Any]) -> Iterator[None]:
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.complete(name, start_ns, time.perf_counter_ns(), track=track, **args)

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
        """Continue in a new file; if that fails, everything stays as it was.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._host}-{self._process}" if self._host else self._process
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
        path = folder / f"{readable}.{time.time_ns()}.jsonl"
        file = FileIO(path, "x")
        head: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "args": {"name": self._process}}
        ]
        if self._host:
            head += [{"name": _HOST_EVENT, "ph": "M", "args": {"labels": self._host}}]
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
    """Make one Chrome trace of all files in ``trace_dir``; returns its path, by default
    ``trace.json`` next to the folder. A line that a killed process or a full disk left unfinished
    is left out.

    Raises:
        OSError: it cannot be written, or files cannot be read; an older ``trace.json`` stays.
    """
    output = output or trace_dir.parent / "trace.json"
    clocks = read_clocks(trace_dir)
    with replacing(output, is_durable=False) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for pid, path in enumerate(sorted(trace_dir.glob("*.jsonl")), start=1):
            ahead_us = 0.0
            for event in _events(path):
                if event.get("name") == _HOST_EVENT:
                    ahead_us = _ahead_us(clocks, event, path.name)
                elif "ts" in event:
                    event["ts"] -= ahead_us
                event["pid"] = pid
                event.setdefault("tid", 0)
                file.write(f"{separator}{json.dumps(event, separators=(',', ':'))}".encode())
                separator = ",\n"
        file.write(b"\n]}\n")
    return output


def host_label() -> str:
    """The name of the host that this process runs on; empty where that is the controller's."""
    return os.environ.get(HOST_VARIABLE, "")


def write_clocks(trace_dir: Path, clocks: Mapping[str, ClockOffset]) -> None:
    """Note how far the clocks of other hosts are ahead, by their names; for files of earlier lives
    by the files' names, see `clocks_of_files`.

    Raises:
        OSError: it cannot be written.
    """
    trace_dir.mkdir(parents=True, exist_ok=True)
    offsets = {host: asdict(offset) for host, offset in clocks.items()}
    content = json.dumps(offsets, indent=1).encode()
    replace_file(trace_dir / CLOCKS, content, is_durable=False)


def read_clocks(trace_dir: Path) -> dict[str, ClockOffset]:
    """Read what `write_clocks` wrote; empty if it cannot be read."""
    try:
        found = json.loads((trace_dir / CLOCKS).read_text())
        return {host: ClockOffset(**offset) for host, offset in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def clocks_of_files(trace_dir: Path) -> dict[str, ClockOffset]:
    """The clocks of all files that are there, by file name: in a later life of the run, another
    machine may have the name of their host."""
    clocks = read_clocks(trace_dir)
    found = {}
    for path in trace_dir.glob("*.jsonl"):
        offset = clocks.get(path.name) or clocks.get(path.name.partition("-")[0])
        if offset is not None:
            found[path.name] = offset
    return found


def _ahead_us(clocks: Mapping[str, ClockOffset], event: dict[str, Any], file_name: str) -> float:
    label = str(event.get("args", {}).get("labels"))
    offset = clocks.get(file_name) or clocks.get(label)
    return 0.0 if offset is None else offset.ahead_ns / 1e3


def _append(file: FileIO, events: list[dict[str, Any]]) -> int:
    """Append events; returns their number of bytes."""
    data = "".join(map(_line, events)).encode()
    append_line(file, data)
    return len(data)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":"), default=str) + "\n"


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in whole_lines(path):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


_TRACK = "engine"


class EngineTrace:
    """The ``on_work`` of an `EngineLoop`; called from the loop's thread alone.

    Many short steps become few spans: what follows within ``max_gap_s`` belongs to the same
    stretch, and gaps stay visible as idle time. Stretches are cut at ``max_stretch_s``, so that a
    killed process loses no more than that.
    """

    def __init__(
        self, tracer: Tracer, *, max_gap_s: float = 0.02, max_stretch_s: float = 1.0
    ) -> None:
        self._tracer = tracer
        self._max_gap_ns = round(max_gap_s * 1e9)
        self._max_stretch_ns = round(max_stretch_s * 1e9)
        self._start_ns = self._end_ns = self._steps = 0

    def __call__(self, work: str, start_ns: int, end_ns: int, /, **details: Any) -> None:
        if not self._tracer.is_enabled:
            return
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
        """Write the stretch so far; for the end of the loop."""
        if self._steps:
            self._tracer.complete(
                "decode", self._start_ns, self._end_ns, track=_TRACK, steps=self._steps
            )
            self._steps = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """When a question was sent and its answer received by the clock here, and the clock there in
    between. Nanoseconds of the Unix clock."""

    sent_ns: int
    there_ns: int
    received_ns: int

    @property
    def took_ns(self) -> int:
        return self.received_ns - self.sent_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The other clock minus ours; it is off by at most ``error_ns``."""

    ahead_ns: int
    error_ns: int


def estimate_offset(round_trips: Iterable[RoundTrip]) -> ClockOffset | None:
    """From the shortest round trip, in the middle of which the other clock was read; None without
    a usable one.

    >>> estimate_offset([RoundTrip(sent_ns=100, there_ns=1_110, received_ns=120)])
    ClockOffset(ahead_ns=1000, error_ns=10)
    """
    usable = [trip for trip in round_trips if trip.took_ns >= 0]  # else our clock was set back
    if not usable:
        return None
    best = min(usable, key=lambda trip: trip.took_ns)
    half_ns = -(-best.took_ns // 2)
    return ClockOffset(
        ahead_ns=best.there_ns - (best.sent_ns + best.received_ns) // 2, error_ns=half_ns
    )


MAX_PIECE_BYTES = 1 << 20  # of one file in one reading
MAX_BEHIND_BYTES = 16 << 20  # more than this is skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """Bytes of the file ``name`` from ``start`` on; ``skipped`` bytes before it are left out."""

    name: str
    start: int
    data: bytes
    skipped: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.data)


def file_sizes(folder: Path, patterns: Sequence[str]) -> dict[str, int]:
    """Return the sizes of files, by name."""
    sizes = {}
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes


def read_new(
    folder: Path,
    offsets: Mapping[str, int],
    *,
    patterns: Sequence[str],
    max_behind_bytes: int = MAX_BEHIND_BYTES,
) -> list[FilePiece]:
    """Read what the files of ``folder`` have after ``offsets`` (by name; 0 for new ones)."""
    pieces = []
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        offset = offsets.get(path.name, 0)
        try:
            with path.open("rb") as file:
                behind = file.seek(0, 2) - offset
                skipped = max(0, behind - max_behind_bytes)
                file.seek(offset + skipped)
                data = file.read(MAX_PIECE_BYTES)
        except FileNotFoundError:
            continue  # it was removed just now
        if data:
            start = offset + skipped
            pieces.append(FilePiece(name=path.name, start=start, data=data, skipped=skipped))
    return pieces


class FileCopies:
    """The copies in ``folder``, named as the originals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.offsets: dict[str, int] = {}  # of the originals, by name

    def path(self, name: str) -> Path:
        return self._folder / name

    def write(self, pieces: Sequence[FilePiece]) -> None:
        """
        Raises:
            OSError: a copy cannot be written; its piece may be written again.
        """
        for piece in pieces:
            if piece.start - piece.skipped != self.offsets.get(piece.name, 0):
                continue  # known
            self._folder.mkdir(parents=True, exist_ok=True)
            with self.path(piece.name).open("ab") as file:
                if piece.skipped:
                    file.write(f"\n[{piece.skipped} bytes are left out]\n".encode())
                file.write(piece.data)
            self.offsets[piece.name] = piece.end


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log that are not empty; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - (8 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
