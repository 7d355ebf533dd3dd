"""One run at a time in a run's folder.

The lock is the kernel's (`flock` on a file): it is held by one open file of the controller process
and is free the moment that process ends, however it ends. The file itself stays; what it says about
its holder is for messages only. On storage that several hosts share, locks may not reach the other
hosts: there a lease (`launch/lease.py`) decides, which only waits where the last owner was
elsewhere and did not release it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.lease import Lease, RunInUseError, beating_owner

LOCK_FILE = "run.lock"
_ATTEMPTS = 5
_PAUSE_S = 0.05
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by some network file systems


@contextmanager
def hold_run(run_dir: Path) -> Iterator[Lease]:
    """Make the folder and hold its lock and its lease. Processes that are started meanwhile do not
    hold them.

    Raises:
        ConfigError: another process holds it, or the folder cannot be written to.
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
            lease.acquire(has_kernel_lock=_lock_patiently(file))
            _write_holder(file)
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
    """A message where another process runs in the folder now; changes nothing."""
    try:
        file = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        owner = beating_owner(run_dir, has_kernel_lock=_lock(file))
        return [_in_use(run_dir, owner)] if owner else []
    except BlockingIOError:
        return [_in_use(run_dir, _holder(run_dir))]
    except OSError as error:
        return unwritable(run_dir, error).errors
    finally:
        os.close(file)


def unwritable(run_dir: Path, error: OSError) -> ConfigError:
    """A run cannot begin in its folder."""
    return ConfigError(
        f"output_dir is {run_dir.parent}: {run_dir} cannot be written to ({error.strerror}); make "
        "room, or give another"
    )


def _write_holder(file: int) -> None:
    about = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    os.ftruncate(file, 0)
    os.pwrite(file, about, 0)


def _lock_patiently(file: int) -> bool:
    """`lock_errors` of another process holds the lock for a moment."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return _lock(file)
        except BlockingIOError:
            time.sleep(_PAUSE_S)
    return _lock(file)


def _lock(file: int) -> bool:
    """False where the file system has no locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def _holder(run_dir: Path) -> str:
    try:
        about = json.loads((run_dir / LOCK_FILE).read_text())
        return f"process {about['pid']} on {about['host']}"
    except (OSError, ValueError, KeyError, TypeError):  # it is being written
        return "another process"


def _in_use(run_dir: Path, holder: str) -> str:
    return (
        f"name is {run_dir.name}: {holder} runs in {run_dir}; wait for it, end it, or give another "
        "name"
    )


def _close_copy(file: int, held: os.stat_result) -> None:
    """In a forked child, which would keep the lock beyond its parent's end."""
    try:
        now = os.fstat(file)
        if (now.st_dev, now.st_ino) == (held.st_dev, held.st_ino):
            os.close(file)
    except OSError:
        pass
