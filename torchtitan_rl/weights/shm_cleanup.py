"""Names, locks and removes the folders of published weights.

A folder's name identifies its process, which holds a lock (flock(2)) on the folder, and has a
random part, so that no other user can create the folder first. The publisher removes the folder
when it closes. If the process dies, its *guard* does: a shell that waits until a pipe from the
process is closed. If the guard was killed too (for example because its container ended), the next
``torchtitan-rl`` command on this host removes the folder.

Invariant: other processes do not touch the folder of a live process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY_ROOT = Path("/dev/shm")
HEADROOM_BYTES = 16 << 20  # kept free in shared memory for other programs

_PREFIX = "torchtitan-rl-"
_FOLDER = re.compile(rf"{_PREFIX}.*-ns(?P<namespace>\d+)-pid(?P<pid>\d+)-t(?P<started>\d+)")
_LOCKED_WITHIN_S = 60.0  # after the folder's creation
GUARD_NAME = "torchtitan-rl-guard"  # the guard's name in its command line
_GUARD = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$@"'


def folder_name(run_id: str) -> str:
    """Return a new name for a folder of this process."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", run_id)
    started = _started_ticks(os.getpid())
    token = secrets.token_hex(8)
    return f"{_PREFIX}{readable}-{token}-ns{_pid_namespace()}-pid{os.getpid()}-t{started}"


def make_folder(folder: Path) -> int | None:
    """Create a folder of this process. Returns a descriptor that holds its lock while it is open;
    None if the file system has no locks. Raises OSError: the folder cannot be created."""
    folder.mkdir(parents=True, mode=0o700)
    return _lock(folder)


class FolderGuard:
    """Removes ``folders`` when this process ends, even if it is killed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        # The writing end is closed by `close` or by the end of the process.
        reading, self._writing = os.pipe()
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, GUARD_NAME, *map(str, folders)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # a signal to our process group does not reach the shell
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        _guards.append(self)

    def close(self) -> None:
        if self in _guards:
            _guards.remove(self)
            os.close(self._writing)
            self._shell.wait()


_guards: list[FolderGuard] = []
"""Keeps the guards alive, because Python warns if a `Popen` object is collected before its process
ends."""


def remove_leftovers(root: Path = SHARED_MEMORY_ROOT) -> list[Path]:
    """Remove the folders in ``root`` whose process has ended. Returns them.

    For a process in another pid namespace (a container that shares the file system), only the lock
    shows whether the process is alive.
    """
    removed: list[Path] = []
    for folder in sorted(root.glob(f"{_PREFIX}*")) if root.is_dir() else []:
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        if int(match["namespace"]) == _pid_namespace():
            is_dead = _started_ticks(int(match["pid"])) != int(match["started"])
        else:
            is_dead = _is_unlocked(folder)
        if is_dead:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_unlocked(folder: Path) -> bool:
    """Whether the folder is older than a minute and no process holds its lock."""
    try:
        age_s = time.time() - folder.stat().st_mtime
    except OSError:
        return False
    descriptor = _lock(folder) if age_s > _LOCKED_WITHIN_S else None
    if descriptor is None:
        return False
    os.close(descriptor)
    return True


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process holds it, or if the
    file system has no locks."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return None


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot (field 22 of proc(5) stat); None if the
    process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
