"""The machine that one life of a run lives on: it counts everything that happens, in one order that
is always the same, and lets the scheduled faults happen at their counts.

Three kinds of moments are counted: a task of the run suspends at an await (``await``), a part of it
is called (``call``), and something is about to change on the disk (``disk``).
"""

from __future__ import annotations

import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from tests.support.package_frames import file_and_line, is_of_package
from tests.support.simulated_faults import Strike

Zone = Literal["await", "call", "disk"]

MAX_AWAITS = 300_000  # of one life; more is a run that spins


class Killed(KeyboardInterrupt):
    """The process ends here, as by kill -9. Event loops let it pass, as every KeyboardInterrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """``action`` happens at the ``nth`` moment (from 0) at ``point``, and at the ``span`` - 1 next
    ones. An ``await`` with an empty point counts all awaits together."""

    zone: Zone
    point: str
    nth: int
    action: str
    seconds: float = 0.0
    span: int = 1

    def __str__(self) -> str:
        where = self.point or "any await"
        length = f" for {self.seconds:.1f} s" if self.seconds else ""
        often = f", {self.span} times" if self.span > 1 else ""
        return f"{self.action}{length} at {self.zone} {where} #{self.nth}{often}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fired:
    fault: Fault
    task: str
    place: str
    time_s: float

    def __str__(self) -> str:
        return f"{self.time_s:9.2f} s: {self.fault} [task {self.task}, {self.place}]"


class Machine:
    """Of one life. ``controls`` are what awaits may do to the run: ``stop`` and ``cancel``."""

    def __init__(self, root: Path, faults: Sequence[Fault] = ()) -> None:
        self.root = root
        self.remains: Path | None = None  # of the disk, once it was killed
        self.is_dead = False
        self.has_spun = False
        self.num_awaits = 0
        self.counts: dict[Zone, Counter[str]] = {"await": Counter(), "call": Counter()}
        self.counts["disk"] = Counter()
        self.fired: list[Fired] = []
        self.trace = 0  # a checksum of everything that happened, in order
        self.controls: dict[str, Callable[[], object]] = {}
        self.now_s: Callable[[], float] = lambda: 0.0
        self.skip: Callable[[float], None] = lambda seconds: None
        self.task_name = "start"
        self.faults = tuple(faults)
        self._by_point: dict[tuple[Zone, str], list[Fault]] = {}
        for fault in faults:
            self._by_point.setdefault((fault.zone, fault.point), []).append(fault)
        self._full_until_s = -1.0

    @property
    def disk_is_full(self) -> bool:
        return self.now_s() < self._full_until_s

    def at(self, point: str) -> Strike | None:
        """A part is called; see `Fate`."""
        if self.is_dead:
            raise Killed
        fault = self._count("call", point)
        if fault is None:
            return None
        if fault.action == "kill":
            self.kill()
        return Strike(action=fault.action, seconds=fault.seconds)

    def at_disk(self, point: str) -> str | None:
        """Something is about to change on the disk; returns what happens to it."""
        if self.is_dead:
            raise Killed
        fault = self._count("disk", point)
        if fault is not None:
            return fault.action
        return "no_space" if self.disk_is_full else None

    def suspended(self, place: str) -> None:
        """A task of the run has just suspended."""
        self.num_awaits += 1
        if self.num_awaits > MAX_AWAITS:
            self.has_spun = True
            self.kill()
        fault = self._count("await", "", nth=self.num_awaits - 1, place=place)
        fault = fault or self._count("await", place, place=place)
        if fault is None:
            return
        match fault.action:
            case "kill":
                self.kill()
            case "block":
                self.skip(fault.seconds)
            case "disk_full":
                self._full_until_s = self.now_s() + fault.seconds
            case control:
                self.controls[control]()

    def kill(self) -> None:
        """Nothing runs any more, and the disk stays as it is now."""
        self.is_dead = True
        self.remains = self.root.with_name(f"{self.root.name}x")
        if self.root.exists():
            shutil.copytree(self.root, self.remains)
        else:
            self.remains.mkdir(parents=True)
        raise Killed

    def _count(
        self, zone: Zone, point: str, *, nth: int | None = None, place: str = ""
    ) -> Fault | None:
        if nth is None:
            nth = self.counts[zone][point]
            self.counts[zone][point] += 1
            entry = f"{zone} {point} {self.task_name} {self.now_s():.6f}"
            self.trace = zlib.crc32(entry.encode(), self.trace)
        for fault in self._by_point.get((zone, point), ()):
            if fault.nth <= nth < fault.nth + fault.span:
                self._note(fault, place or _innermost())
                return fault
        return None

    def _note(self, fault: Fault, place: str) -> None:
        self.fired.append(Fired(fault=fault, task=self.task_name, place=place, time_s=self.now_s()))


CURRENT: ContextVar[Machine] = ContextVar("machine")
"""The machine of the process that runs, where a loop runs several."""


def place_in(frame: FrameType) -> str:
    return f"{file_and_line(frame)} {frame.f_code.co_name}"


def _innermost() -> str:
    """Where the code of the package that runs now is."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if is_of_package(frame):
            return place_in(frame)
        frame = frame.f_back
    return "elsewhere"
