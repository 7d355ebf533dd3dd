"""The lease on a run's folder: `lease.py` on files, for storage that several hosts share.

The entries are files ``run.lease/000001.json``, made exclusively, so that of two hosts one gets the
number. Each is changed by its owner alone, in place: a full disk does not stop the beats. Before a
look, a file is made in the folder and removed again: NFS clients answer from a cache for up to a
minute, except after a change of their own.

Who may write into a run's folder, where hosts share it: the rules, without clocks and files.

Each owner adds an *entry* with the next number; the one with the highest number owns the folder.
Only one contender can add a number. An owner changes its entry every ``beat_s`` and looks for
higher numbers; it acts until ``valid_s`` after it began its last look. A contender adds the next
number once it has seen the newest entry unchanged for ``silence_s``, then waits for ``settle_s``
before it acts.

Invariant: once an owner acts, none with a lower number does. The last look of an earlier owner
began before the entry was added, so its time is up when the contender has waited. Each host
measures durations by its own clock, and no two clocks are compared; ``settle_s`` is longer than
``valid_s`` for clocks that run at different speeds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import OutputError, RunTakenOverError


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """The same on all hosts."""

    beat_s: float = 3.0
    valid_s: float = 12.0
    silence_s: float = 15.0
    settle_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``content`` changes with each beat. ``place`` is the running system and the file system that
    its owner used: `Contender` can tell that an owner there is dead."""

    number: int
    content: bytes
    token: str = ""
    place: str = ""
    process: str = "another process"
    is_released: bool = False


@dataclass(frozen=True, slots=True)
class Take:
    """Try to add entry ``number``. Whoever succeeds waits for ``settle_s``, looks once more, and
    owns the folder."""

    number: int
    settle_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again soon. ``process`` may own the folder."""

    process: str


@dataclass(frozen=True, slots=True)
class Refused:
    """``process`` owns the folder."""

    process: str


class Contender:
    """Decides what to do for what it sees.

    Args:
        dead_place: entries of this place are of dead owners, because the lock of the kernel there,
            which ends with its process, is ours. Empty where there is no such lock.
    """

    def __init__(self, times: LeaseTimes, *, dead_place: str = "") -> None:
        self._times = times
        self._dead_place = dead_place
        self._seen: Entry | None = None
        self._since_s = 0.0

    def see(self, newest: Entry | None, now_s: float) -> Take | Wait | Refused:
        if newest is None:
            return Take(1, 0.0)
        if newest.is_released or (self._dead_place and newest.place == self._dead_place):
            return Take(newest.number + 1, 0.0)
        if self._seen is None:
            self._seen, self._since_s = newest, now_s
        if newest != self._seen:
            return Refused(newest.process)
        if now_s - self._since_s >= self._times.silence_s:
            return Take(newest.number + 1, self._times.settle_s)
        return Wait(newest.process)


class Ownership:
    """What the owner of entry ``number`` may do. ``is_lost`` is final."""

    def __init__(self, number: int, token: str, times: LeaseTimes) -> None:
        self.number = number
        self.is_lost = False
        self.successor = ""  # who has taken over, once it is lost; empty: the entry was removed
        self._token = token
        self._valid_s = times.valid_s
        self._valid_until_s = float("-inf")

    def looked(self, newest: Entry | None, *, began_s: float) -> None:
        """``newest`` was read after ``began_s``."""
        if newest is None or (newest.number, newest.token) != (self.number, self._token):
            self.is_lost = True
            was_removed = newest is None or newest.number < self.number
            self.successor = "" if was_removed or newest is None else newest.process
        else:
            self._valid_until_s = began_s + self._valid_s

    def may_act(self, now_s: float) -> bool:
        """If not, and it is not lost: look first."""
        return not self.is_lost and now_s < self._valid_until_s


logger = logging.getLogger(__name__)

LEASE_FOLDER = "run.lease"
_NAME = re.compile(r"(\d{6,})\.json")
_POLL_S = 0.5
_LOST_POLL_S = 0.5
_JOIN_S = 5.0  # the storage may be out of reach
_TIMES = LeaseTimes()
_ENTRY_BYTES = 512  # always, so that a change needs no room
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RunInUseError(Exception):
    """Another process owns the folder; the message says which."""


class Lease:
    """Owns a folder from `acquire` to `release`, with a thread that beats."""

    def __init__(self, run_dir: Path, times: LeaseTimes = _TIMES) -> None:
        self._times = times
        self._folder = run_dir / LEASE_FOLDER
        self._token = uuid.uuid4().hex
        self._place = _place(run_dir)
        self._owned: Ownership | None = None
        self._beats = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="run lease", daemon=True)

    def acquire(self, *, has_kernel_lock: bool) -> None:
        """Returns at once where no owner can be alive, else after half a minute of silence.

        Args:
            has_kernel_lock: we hold a lock that an owner in the same place would hold.

        Raises:
            RunInUseError: another process owns it.
            OSError: the folder cannot be read or written to.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        dead_place = self._place if has_kernel_lock else ""
        contender = Contender(self._times, dead_place=dead_place)
        is_told = False
        while True:
            _refresh(self._folder)
            match contender.see(read_newest(self._folder), now_s()):
                case Refused(process):
                    raise RunInUseError(process)
                case Wait(process):
                    if not is_told:
                        self._say_waiting(process)
                        is_told = True
                    time.sleep(_POLL_S)
                case Take(number, settle_s):
                    if self._add(number):
                        return self._settle(settle_s)

    def _settle(self, settle_s: float) -> None:
        self._thread.start()
        time.sleep(settle_s)
        try:
            self.check()
        except RunTakenOverError as error:
            raise RunInUseError(error.successor or "another process") from error
        self._remove_older()

    def check(self) -> None:
        """Call it before a write that an owner alone may make. Costs nothing while the beats go on.

        Raises:
            RunTakenOverError: another process owns the folder.
            OutputError: that cannot be found out.
        """
        assert self._owned is not None
        if self._owned.may_act(now_s()):
            return
        with self._lock:
            try:
                self._look()
            except OSError as error:
                raise OutputError(f"{self._folder} cannot be read: {error}") from error
        if self._owned.is_lost:
            raise RunTakenOverError(self._folder.parent, self._owned.successor)

    async def wait_until_lost(self) -> None:
        """
        Raises:
            RunTakenOverError: another process has taken the folder over.
        """
        while True:
            await asyncio.sleep(_LOST_POLL_S)
            if self._owned is not None and self._owned.is_lost:
                raise RunTakenOverError(self._folder.parent, self._owned.successor)

    def release(self) -> None:
        """The next owner need not wait."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._owned is not None and not self._owned.is_lost:
            with suppress(OSError):
                self._write(is_released=True)

    def _beat_on(self) -> None:
        while not self._ended.wait(self._times.beat_s):
            with self._lock, suppress(OSError):  # `check` tells the caller, if it lasts
                self._look()
            assert self._owned is not None
            if self._owned.is_lost:
                return

    def _look(self) -> None:
        assert self._owned is not None
        began_s = now_s()
        _refresh(self._folder)
        self._owned.looked(read_newest(self._folder), began_s=began_s)
        if not self._owned.is_lost:
            self._beats += 1
            with suppress(OSError):  # the look is what counts; a beat keeps contenders away
                self._write()

    def _say_waiting(self, process: str) -> None:
        logger.warning(
            "%s may still run in %s: waiting up to %.0f s to see whether it does",
            process,
            self._folder.parent,
            self._times.silence_s + self._times.settle_s,
        )

    def _add(self, number: int) -> bool:
        """Whether the number was free."""
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(self._folder / _file_name(number), flags, 0o644))
        except FileExistsError:
            return False
        self._owned = Ownership(number, self._token, self._times)
        try:
            self._write()
        except OSError:
            (self._folder / _file_name(number)).unlink()
            with suppress(OSError):  # other entries are there
                self._folder.rmdir()
            raise
        return True

    def _write(self, *, is_released: bool = False) -> None:
        assert self._owned is not None
        about = {
            "token": self._token,
            "place": self._place,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": self._beats,
            "released": is_released,
        }
        content = json.dumps(about).encode().ljust(_ENTRY_BYTES - 1) + b"\n"
        path = self._folder / _file_name(self._owned.number)
        with open(path, "r+b", buffering=0) as file:  # closing it sends it to the server
            while content:  # a full disk takes a part first
                content = content[file.write(content) :]

    def _remove_older(self) -> None:
        assert self._owned is not None
        for number, path in _files(self._folder).items():
            if number < self._owned.number:
                with suppress(OSError):
                    path.unlink()


def beating_owner(run_dir: Path, *, has_kernel_lock: bool) -> str:
    """The process elsewhere that owns the folder and beats; empty where none does. Changes nothing.
    Where an owner may be alive, it takes some seconds. See `Lease.acquire`."""
    folder = run_dir / LEASE_FOLDER
    contender = Contender(_TIMES, dead_place=_place(run_dir) if has_kernel_lock else "")
    end_s = now_s() + 2 * _TIMES.beat_s
    while now_s() < end_s:
        try:
            newest = read_newest(folder)
        except OSError:
            return ""
        match contender.see(newest, now_s()):
            case Refused(process):
                return process
            case Take():
                return ""
        time.sleep(_POLL_S)
    return ""


def read_newest(folder: Path) -> Entry | None:
    """The entry with the highest number.

    Raises:
        OSError: the folder cannot be read.
    """
    while files := _files(folder):
        number = max(files)
        try:
            content = files[number].read_bytes()
        except FileNotFoundError:  # a later owner removed it
            continue
        return _entry(number, content)
    return None


def now_s() -> float:
    """Goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _entry(number: int, content: bytes) -> Entry:
    try:
        about: dict[str, Any] = json.loads(content)
        return Entry(
            number=number,
            content=content,
            token=about["token"],
            place=about["place"],
            process=f"process {about['pid']} on {about['host']}",
            is_released=about["released"],
        )
    except (ValueError, KeyError, TypeError):  # it is being written
        return Entry(number=number, content=content)


def _files(folder: Path) -> dict[int, Path]:
    try:
        named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    return {int(name[1]): path for name, path in named if name}


def _file_name(number: int) -> str:
    return f"{number:06d}.json"


def _refresh(folder: Path) -> None:
    path = folder / f".look-{uuid.uuid4().hex}"
    with suppress(OSError):  # a full disk is a local one, or makes looks slower
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        path.unlink()


def _place(run_dir: Path) -> str:
    """This boot of this machine, and the mounted file system. A file system of a container's own
    (FUSE) has locks of its own too. Empty where it is not known."""
    try:
        parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
        return f"{_BOOT_ID.read_text().strip()} {parent.stat().st_dev}"
    except OSError:
        return ""
