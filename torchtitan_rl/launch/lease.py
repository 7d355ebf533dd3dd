"""One run at a time in a run's folder: `hold_run` holds the folder's lock and its lease.

The *lock* is the kernel's (`flock` on ``run.lock``): it becomes free as soon as the process that
holds it ends, in whatever way. The file's text about its holder is only for messages. On storage
that several hosts share, locks may not be visible to the other hosts. There the *lease* decides.
Acquiring the lease takes time only if the last owner was on another host and did not release the
lease.

Each owner of the lease adds an *entry* with the next number: a file such as
``run.lease/000001.json``, which is created exclusively. The owner of the entry with the highest
number owns the folder. An owner changes its entry every ``beat_s``, and then looks for higher
numbers. If the owner finds none, it may act until ``valid_s`` after the beginning of this look. A
contender adds the next entry after it has seen the newest entry unchanged for ``silence_s``; then
it waits for ``settle_s`` before it acts.

Invariant: once an owner acts, no owner with a lower number acts. The last successful look of an
earlier owner began before the new entry was added, so after the contender has waited, the earlier
owner may no longer act. Each host measures durations by its own clock, and clocks are never
compared. ``settle_s`` is longer than ``valid_s``, because clocks may run at different speeds.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.errors import ConfigError, OutputError, RunTakenOverError
from torchtitan_rl.files import NO_FILE_LOCKS

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
LEASE_FOLDER = "run.lease"
_LOCK_ATTEMPTS = 5  # `lock_errors` in another process may hold the lock for a moment
_LOCK_PAUSE_S = 0.05
_NAME = re.compile(r"(\d{6,})\.json")
_POLL_S = 0.5
_JOIN_S = 5.0  # wait no longer for the thread: the storage may be unreachable
_ENTRY_BYTES = 512  # constant size of an entry, so that changing it needs no disk space
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def hold_run(run_dir: Path) -> Iterator[Lease]:
    """Make the folder, and hold its lock and its lease while the context is open. Child processes
    do not inherit them.

    Raises:
        ConfigError: another process holds them, or the folder cannot be written to.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(run_dir, error) from error
    held = os.fstat(file)
    os.register_at_fork(after_in_child=lambda: _close_copy(file, held))
    lease = Lease(run_dir)
    try:
        try:
            lease.acquire(has_kernel_lock=_lock(file, attempts=_LOCK_ATTEMPTS))
            about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
            os.ftruncate(file, 0)
            os.pwrite(file, about, 0)
        except RunInUseError as error:
            raise ConfigError(_in_use(run_dir, str(error))) from error
        except BlockingIOError as error:
            raise ConfigError(_in_use(run_dir, _holder(run_dir))) from error
        except OSError as error:
            raise unwritable(run_dir, error) from error
        yield lease
    finally:
        lease.release()
        os.close(file)


def lock_errors(run_dir: Path) -> list[str]:
    """A message if another process owns the folder now. Changes nothing. If an owner may be alive
    on another host, this takes some seconds."""
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        Lease(run_dir).require_silence(has_kernel_lock=_lock(file))
    except RunInUseError as error:
        return [_in_use(run_dir, str(error))]
    except BlockingIOError:
        return [_in_use(run_dir, _holder(run_dir))]
    except OSError as error:
        return unwritable(run_dir, error).errors
    finally:
        os.close(file)
    return []


def unwritable(run_dir: Path, error: OSError) -> ConfigError:
    """The error that a run cannot write to its folder."""
    return ConfigError(
        f"output_dir is {run_dir.parent}: {run_dir} cannot be written to ({error.strerror}); make "
        "room, or give another"
    )


def _lock(file: int, *, attempts: int = 1) -> bool:
    """Take the lock; False if the file system has none. Raises BlockingIOError if it is taken."""
    for attempt in range(1, attempts + 1):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt == attempts:
                raise
            time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            if error.errno not in NO_FILE_LOCKS:
                raise
            break
    return False


def _holder(run_dir: Path) -> str:
    try:
        about = json.loads((run_dir / LOCK_FILE).read_text())
        return f"process {about['pid']} on {about['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # the file is just being written
        return "another process"


def _in_use(run_dir: Path, holder: str) -> str:
    return (
        f"name is {run_dir.name}: {holder} runs in {run_dir}; wait for it, end it, or give another "
        "name"
    )


def _close_copy(file: int, held: os.stat_result) -> None:
    """Close the lock file in a forked child, which would otherwise hold the lock after its parent
    has ended."""
    with suppress(OSError):
        now = os.fstat(file)
        if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino):
            os.close(file)


class RunInUseError(Exception):
    """Another process owns the folder. The message names the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """The durations of the protocol, in seconds. They must be the same on all hosts."""

    beat_s: float = 3.0
    valid_s: float = 12.0
    silence_s: float = 15.0
    settle_s: float = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of the lease. ``content`` changes with each beat. ``place`` identifies the owner's
    machine, the boot of the machine and the mounted file system; from it `Contender` may know that
    the owner is dead."""

    number: int
    content: bytes
    token: str = ""
    place: str = ""
    process: str = "another process"
    is_released: bool = False

    @classmethod
    def parse(cls, number: int, content: bytes) -> Entry:
        try:
            about = json.loads(content)
            return cls(
                number=number,
                content=content,
                token=about["token"],
                place=about["place"],
                process=f"process {about['pid']} on {about['host']}",
                is_released=about["released"],
            )
        except (ValueError, KeyError, TypeError):  # the entry is just being written
            return cls(number=number, content=content)


class Contender:
    """Decides when a process may add the next entry. Uses no clock and no files.

    Args:
        dead_place: owners with this place are dead, because this process holds the kernel's lock
            there, and a live owner would hold it. Empty without such a lock.
    """

    def __init__(self, times: LeaseTimes, *, dead_place: str = "") -> None:
        self._times = times
        self._dead_place = dead_place
        self._seen: Entry | None = None
        self._since_s = 0.0

    def see(self, newest: Entry | None, now_s: float) -> float | None:
        """How many seconds to wait after adding the next entry; None: do not add it yet, but look
        again soon. Raises RunInUseError if ``newest`` has changed: its owner is alive."""
        if newest is None or newest.is_released:
            return 0.0
        if self._dead_place and newest.place == self._dead_place:
            return 0.0
        if self._seen is None:
            self._seen, self._since_s = newest, now_s
        if newest != self._seen:
            raise RunInUseError(newest.process)
        return self._times.settle_s if now_s - self._since_s >= self._times.silence_s else None


class Ownership:
    """Decides whether the owner of an entry may act. ``is_lost`` is final. Uses no clock and no
    files."""

    def __init__(self, number: int, token: str, times: LeaseTimes) -> None:
        self.number = number
        self.is_lost = False
        self.successor = ""  # if lost: the new owner's process; empty: the entry was removed
        self._token = token
        self._valid_s = times.valid_s
        self._valid_until_s = float("-inf")

    def looked(self, newest: Entry | None, *, began_s: float) -> None:
        """Record a look, which began at ``began_s`` and found ``newest``."""
        if newest is not None and (newest.number, newest.token) == (self.number, self._token):
            self._valid_until_s = began_s + self._valid_s
            return
        self.is_lost = True
        if newest is not None and newest.number >= self.number:
            self.successor = newest.process

    def may_act(self, now_s: float) -> bool:
        """Whether the owner may act. If not, and ownership is not lost, it must look first."""
        return not self.is_lost and now_s < self._valid_until_s


class Lease:
    """Owns a folder from `acquire` to `release`. A thread changes the entry every ``beat_s`` (a
    *beat*). An entry is changed only by its owner, and only in place, so that a full disk does not
    stop the beats."""

    def __init__(self, run_dir: Path, times: LeaseTimes = LeaseTimes()) -> None:
        self._times = times
        self._run_dir = run_dir
        self._folder = run_dir / LEASE_FOLDER
        self._token = uuid.uuid4().hex
        self._place = _place(run_dir)
        self._owned: Ownership | None = None
        self._beats = 0
        self._looking = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="run lease", daemon=True)

    def acquire(self, *, has_kernel_lock: bool) -> None:
        """Acquire the lease: at once if no owner can be alive, otherwise after half a minute of
        silence. ``has_kernel_lock``: this process holds the lock that an owner in the same place
        would hold. Raises RunInUseError, or OSError if the folder cannot be read or written to."""
        self._folder.mkdir(parents=True, exist_ok=True)
        contender, has_warned = self._contender(has_kernel_lock), False
        while True:
            _refresh(self._folder)
            newest = read_newest(self._folder)
            settle_s = contender.see(newest, now_s())
            if settle_s is None:
                if not has_warned and newest is not None:
                    logger.warning(
                        "%s may still run in %s: waiting up to %.0f s to see whether it does",
                        *(newest.process, self._run_dir),
                        self._times.silence_s + self._times.settle_s,
                    )
                has_warned = True
                time.sleep(_POLL_S)
            elif self._add(1 if newest is None else newest.number + 1):
                break
        self._thread.start()
        time.sleep(settle_s)
        try:
            self.check()
        except RunTakenOverError as error:
            raise RunInUseError(error.successor or "another process") from error
        for number, path in _files(self._folder).items():
            if number < self._own.number:
                with suppress(OSError):
                    path.unlink()

    def require_silence(self, *, has_kernel_lock: bool) -> None:
        """Watch for some seconds whether an owner beats, and change nothing. Raises
        RunInUseError."""
        contender, end_s = self._contender(has_kernel_lock), now_s() + 2 * self._times.beat_s
        with suppress(OSError):
            while contender.see(read_newest(self._folder), now_s()) is None and now_s() < end_s:
                time.sleep(_POLL_S)

    def check(self) -> None:
        """Check the ownership before a write that only an owner may make; fast while the beats go
        on. Raises RunTakenOverError, or OutputError if the folder cannot be read."""
        if self._own.may_act(now_s()):
            return
        try:
            self._look()
        except OSError as error:
            raise OutputError(f"{self._folder} cannot be read: {error}") from error
        self._require_owned()

    async def wait_until_lost(self) -> None:
        """Raise RunTakenOverError once the lease is lost."""
        while True:
            await asyncio.sleep(_POLL_S)
            self._require_owned()

    def release(self) -> None:
        """End the lease, so that the next owner need not wait."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._owned is not None and not self._owned.is_lost:
            with suppress(OSError):
                self._write(is_released=True)

    @property
    def _own(self) -> Ownership:
        assert self._owned is not None
        return self._owned

    def _require_owned(self) -> None:
        if self._own.is_lost:
            raise RunTakenOverError(self._run_dir, self._own.successor)

    def _contender(self, has_kernel_lock: bool) -> Contender:
        return Contender(self._times, dead_place=self._place if has_kernel_lock else "")

    def _beat_on(self) -> None:
        while not self._own.is_lost and not self._ended.wait(self._times.beat_s):
            with suppress(OSError):  # `check` raises the error if it persists
                self._look()

    def _look(self) -> None:
        with self._looking:
            began_s = now_s()
            _refresh(self._folder)
            self._own.looked(read_newest(self._folder), began_s=began_s)
            if not self._own.is_lost:
                self._beats += 1
                with suppress(OSError):  # go on to look: only the look extends the ownership
                    self._write()

    def _add(self, number: int) -> bool:
        """Create the entry with this number; False if the number is taken."""
        path = self._path(number)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(path, flags, 0o644))
        except FileExistsError:
            return False
        self._owned = Ownership(number, self._token, self._times)
        try:
            self._write()
        except OSError:
            path.unlink()
            with suppress(OSError):  # fails if the folder has other entries
                self._folder.rmdir()
            raise
        return True

    def _write(self, *, is_released: bool = False) -> None:
        about = {
            "token": self._token,
            "place": self._place,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "beats": self._beats,
            "released": is_released,
        }
        content = json.dumps(about).encode().ljust(_ENTRY_BYTES - 1) + b"\n"
        # Closing the file sends its content to the server of a network file system.
        with open(self._path(self._own.number), "r+b", buffering=0) as file:
            while content:  # a write may be partial
                content = content[file.write(content) :]

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.json"


def read_newest(folder: Path) -> Entry | None:
    """The entry with the highest number. Raises OSError if the folder cannot be read."""
    while files := _files(folder):
        number = max(files)
        with suppress(FileNotFoundError):  # a later owner has just removed it
            return Entry.parse(number, files[number].read_bytes())
    return None


def now_s() -> float:
    """The time of a clock that also runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _files(folder: Path) -> dict[int, Path]:
    try:
        named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    return {int(name[1]): path for name, path in named if name}


def _refresh(folder: Path) -> None:
    """Change the folder, so that the next look is fresh: an NFS client may answer from its cache
    for up to a minute, but not after its own change."""
    path = folder / f".look-{uuid.uuid4().hex}"
    with suppress(OSError):  # without the change, looks are only slower
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        path.unlink()


def _place(run_dir: Path) -> str:
    """An identifier of this boot of this machine and of the mounted file system; empty if unknown.
    The file system counts because a container's own mount (FUSE) has separate locks."""
    try:
        parent = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
        return f"{_BOOT_ID.read_text().strip()} {parent.stat().st_dev}"
    except OSError:
        return ""
