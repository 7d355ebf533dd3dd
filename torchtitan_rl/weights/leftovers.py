"""The folders that hold published weights: whose they are, and what becomes of them.

A folder is named after its process and locked (flock(2)) by it. It goes in one of three ways: the
publisher removes it in the end; where the publisher's process dies, a *guard* does, a shell that
waits for the end of a pipe from it; where the guard was killed as well (a container that ends),
whoever starts next on this host, every ``torchtitan-rl`` command included.

Invariant: a folder of a live process is not touched by others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SHARED_MEMORY_ROOT = Path("/dev/shm")

_PREFIX = "torchtitan-rl-"
_FOLDER = re.compile(rf"{_PREFIX}.*-ns(?P<namespace>\d+)-pid(?P<pid>\d+)-t(?P<started>\d+)")
_LOCKED_WITHIN_S = 60.0  # of its making, by a process that is not ours to look at
_GUARD = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$@"'


def folder_name(run_id: str) -> str:
    """Of this process, readable; the same in each place."""
    readable = re.sub(r"[^A-Za-z0-9_.]+", "-", run_id)
    started = _started_ticks(os.getpid())
    return f"{_PREFIX}{readable}-ns{_pid_namespace()}-pid{os.getpid()}-t{started}"


def make_folder(folder: Path) -> int | None:
    """Make a folder of this process; a descriptor that holds its lock, to be kept open, or None
    where the file system has no such locks.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _lock(folder)


class FolderGuard:
    """Removes ``folders`` when this process is gone, however it ends. Start it once."""

    def __init__(self, folders: Sequence[Path]) -> None:
        # No object owns the writing end: it is closed by `close` or by the end of the process.
        reading, self._writing = os.pipe()
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "torchtitan-rl-guard", *map(str, folders)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # it outlives what ends the process's group
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        _guards.append(self)

    def close(self) -> None:
        """Remove the folders now; returns when they are gone."""
        if self in _guards:
            _guards.remove(self)
            os.close(self._writing)
            self._shell.wait()


_guards: list[FolderGuard] = []
"""Kept, since a `Popen` without a reference is a warning."""


def remove_leftovers(root: Path = SHARED_MEMORY_ROOT) -> list[Path]:
    """Remove the folders in ``root`` whose process is gone; returns them. Others are not touched.

    Of a process in another pid namespace (a container that shares the file system) only its lock
    tells whether it lives.
    """
    removed: list[Path] = []
    for folder in sorted(root.glob(f"{_PREFIX}*")) if root.is_dir() else []:
        match = _FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        if int(match["namespace"]) == _pid_namespace():
            is_dead = _started_ticks(int(match["pid"])) != int(match["started"])
        else:
            is_dead = _is_given_up(folder)
        if is_dead:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def _is_given_up(folder: Path) -> bool:
    """No process holds its lock, and it is not new."""
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
    """None where another process holds it, or there are no such locks."""
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
    """When the process started, in clock ticks since boot (field 22 of proc(5) stat), or None."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
